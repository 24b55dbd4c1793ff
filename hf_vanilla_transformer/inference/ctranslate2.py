"""CTranslate2 as the backend of a `Translator`: models in its format, searched and ranked as in section 6.1.

    translator = Translator("outputs/quickstart/model", backend="ctranslate2", compute_type="int8")

CTranslate2's beam search ends as with `early_stopping=True`, and has length^alpha for a penalty. Here it returns all
hypotheses that have ended, and the paper's penalty (or transformers', whichever the model has) ranks them. A batch is
searched up to the longest limit of its sentences; one that went beyond its own is searched again within that. Behind a
prefix, beam search finds a translation that ends at once only if the end is the most probable token.
"""

import json
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..evaluation.limits import check_generation
from ..evaluation.loading import CONFIG, GENERATION_CONFIG, CheckpointError, load_tokenizer
from ..evaluation.sources import Piece
from ..evaluation.translation import (
    NO_HYPOTHESIS,
    Alignment,
    OtherModel,
    Translation,
    batches_of,
    check_n_best,
    on_one_line,
)
from ..generation_vanilla_transformer import DEFAULT_MAX_LENGTH, GNMTLengthPenalty, _limits_length
from ..interop.base import ConversionError

logger = logging.get_logger(__name__)

WEIGHTS = "model.bin"
VARIABLE = "CT2_FORCE_CPU_ISA"
# Options of a call.
OPTIONS = (
    *("num_beams", "max_new_tokens", "min_new_tokens", "max_length", "max_extra_length"),
    *("length_penalty", "gnmt_length_penalty", "early_stopping", "do_sample"),
)
# Of a generation config: those, what the exported weights hold, and what changes no translation.
SETTINGS = {
    *OPTIONS, "bad_words_ids", "suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "use_cache",
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "transformers_version", "compute_type",
    "renormalize_logits", "_from_model_config",
}  # fmt: skip
# Padded source tokens of a batch, times beams. Measured: docs/deploy.md.
TOKENS_IN_8_BITS, TOKENS, FEWEST_TOKENS = 512, 2_048, 128
# Of each thread, so that all of them end at about the same time; and those that wait for a thread.
BATCHES_PER_THREAD, BATCHES_IN_FLIGHT = 4, 2
# With an exponent of 0, CTranslate2's search ends as soon as the best hypothesis has.
LEAST_EXPONENT = 1e-6


@dataclass(frozen=True)
class Settings:
    """How a call decodes.

    Attributes:
        num_beams: 1 is greedy search.
        n_best: Translations of each piece; None: the best, without a score.
        alignments: Whether translations have them.
        penalty: Alpha of the paper's length penalty, or transformers' exponent.
        length: The option that limits lengths, and its value.
        least: Tokens before the end of a translation at least.
        begin: The token that each translation is forced to begin with.
        is_end_forced: Whether the last token within the limit is the end.
    """

    num_beams: int
    n_best: int | None
    alignments: bool
    penalty: float
    length: tuple[str, int]
    least: int
    begin: int | None
    is_end_forced: bool

    def limit(self, piece: Piece, positions: int) -> int:
        """Returns how many tokens CTranslate2 may write for a piece, those that it is made to begin with included."""
        name, value = self.length
        begin = max(len(piece.prefix), 1)
        total = {"max_extra_length": begin + len(piece.token_ids) + value, "max_new_tokens": begin + value}.get(
            name, value
        )
        return max(min(total, positions) - 1 - self.is_end_forced, begin)

    def exponent(self, pieces: Sequence[Piece]) -> float:
        """Returns the exponent with which length^exponent grows as the penalty does, at the sources' mean length."""
        if not isinstance(self.penalty, GNMTLengthPenalty):
            return self.penalty or LEAST_EXPONENT
        length = sum(len(piece.token_ids) for piece in pieces) / len(pieces)
        return self.penalty * length / (5 + length) or LEAST_EXPONENT


class Batch(NamedTuple):
    """Pieces that are translated at the moment, by their numbers."""

    places: list[int]
    pieces: list[Piece]
    limits: list[int]
    exponent: float
    results: list[Any]
    repeat: Callable[[list[int]], list[Any]]


class Hypothesis(NamedTuple):
    """What CTranslate2 found for a piece; `begin` counts the tokens that it was made to begin with."""

    ids: list[int]
    begin: int
    num_tokens: int
    score: float | None
    attention: list[list[float]] | None


def is_exported(model: Any) -> bool:
    """Whether something is a folder in CTranslate2's format, such as `vanilla-transformer export` writes."""
    return isinstance(model, str | Path) and (Path(model) / WEIGHTS).is_file()


class CTranslate2Model(OtherModel):
    """A model that CTranslate2 runs. Several threads may use it at the same time.

    On a CPU, each of `threads` translates a batch of its own; in float32, they share a batch that is alone, for which
    the weights are then held twice.

    Args:
        folder: In CTranslate2's format, with generation_config.json.
        device: "cpu", "cuda" or "cuda:1".
        compute_type: A type of CTranslate2's for this device; "default": as the weights were saved.
        threads: Of the computation on a CPU; None: PyTorch's number.
        in_memory: Whether the folder is read into memory, as it will be removed.

    Raises:
        CheckpointError: The folder is incomplete or damaged.
        ValueError: The device or the type can't be used, or the model decodes by settings that CTranslate2 hasn't.
        ImportError: CTranslate2 isn't installed.
    """

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        compute_type: str = "default",
        threads: int | None = None,
        *,
        in_memory: bool = False,
    ) -> None:
        self.device = torch.device(device)
        check_compute_type(self.device, compute_type)
        self.name_or_path = str(folder)
        self.generation_config = _generation_config(folder)
        config = _read(folder / CONFIG)
        names = [next(iter(_vocabularies(folder, side)), None) for side in ("source", "target")]
        if None in names or "max_position_embeddings" not in config:
            raise CheckpointError(f"{folder} is incomplete, or of another program; export the model again")
        self._source, self._target = ([str(token) for token in _read(name)] for name in names if name is not None)
        self._ids = {token: number for number, token in enumerate(self._target)}
        self._end = self._ids[config["eos_token"]]
        self.config = SimpleNamespace(max_position_embeddings=int(config["max_position_embeddings"]))
        self.threads = 1 if self.device.type == "cuda" else threads or torch.get_num_threads()
        self._process = os.getpid()
        self._place = _place(folder, in_memory)
        self._compute_type = compute_type
        self._pools: dict[tuple[int, int], Any] = {}
        self._opening = threading.Lock()
        self.dtype = self._pool(is_alone=False).compute_type
        if not self._shares_batches:
            self._place = {}

    @classmethod
    def converted(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *args: Any, **kwargs: Any
    ) -> "CTranslate2Model":
        """Converts a model in a temporary folder; the arguments after the tokenizer are those of the class.

        Raises:
            CheckpointError: CTranslate2 can't express the model.
            ValueError: As the class.
            ImportError: As the class.
        """
        _library()
        exporter = import_module("..interop.ctranslate2", __package__)
        with tempfile.TemporaryDirectory(prefix="hf_vanilla_transformer-") as folder:
            try:
                exporter.write(model, tokenizer, Path(folder))
            except ConversionError as error:
                raise CheckpointError(f"the model can't be converted for CTranslate2: {error}") from error
            made = cls(Path(folder), *args, **kwargs, in_memory=True)
        made.name_or_path = getattr(model, "name_or_path", "")
        return made

    # ---- Options ----
    def check_options(self, options: dict[str, Any], n_best: int | None, alignments: bool) -> dict[str, Any]:
        """Checks the options of a call of `decode` and adds `n_best` and `alignments`; raises `ValueError`."""
        for name in options.keys() - set(OPTIONS):
            raise ValueError(f"the backend ctranslate2 has no option {name}; it has {', '.join(OPTIONS)}")
        check_generation(options, self.generation_config)
        settings = self._settings(options, n_best, alignments)
        if n_best is not None:
            check_n_best(n_best, settings.num_beams)
        if options.get("do_sample"):
            raise ValueError("the backend ctranslate2 has no do_sample: it searches; leave it out")
        if settings.num_beams > 1 and options.get("early_stopping", True) is not True:
            raise ValueError(
                f"early_stopping is {options['early_stopping']!r}, and searches of the backend ctranslate2 end as with "
                "True; leave it out"
            )
        for name in ("max_new_tokens", "max_length"):
            if (options.get(name) or 0) > self.config.max_position_embeddings:
                raise ValueError(
                    f"{name} is {options[name]:,}, and the model's table in CTranslate2's format has "
                    f"{self.config.max_position_embeddings:,} positions; give less"
                )
        return {**options, "n_best": n_best, "alignments": alignments}

    def _settings(self, options: Mapping[str, Any], n_best: int | None, alignments: bool) -> Settings:
        def value(name: str, otherwise: Any = None) -> Any:
            own = getattr(self.generation_config, name, None)
            return next((one for one in (options.get(name), own) if one is not None), otherwise)

        least = value("min_new_tokens", 0)
        if isinstance(least, bool) or not isinstance(least, int) or least < 0:
            raise ValueError(f"min_new_tokens is {least!r}; it has to be 0 or more tokens")
        if least and value("num_beams", 1) > 1:  # the end's probability would go to the other tokens
            raise ValueError("the backend ctranslate2 has min_new_tokens for greedy search only; give num_beams=1")
        return Settings(
            num_beams=value("num_beams", 1),
            n_best=n_best,
            alignments=alignments,
            penalty=self._penalty(options),
            length=_length(options, self.generation_config),
            least=least,
            begin=value("forced_bos_token_id"),
            is_end_forced=value("forced_eos_token_id") is not None,
        )

    def _penalty(self, options: Mapping[str, Any]) -> float:
        """Returns the penalty that counts: alpha as in the paper, or transformers' exponent."""
        power, config = options.get("length_penalty"), self.generation_config
        alpha = options.get(
            "gnmt_length_penalty", None if power is not None else getattr(config, "gnmt_length_penalty", None)
        )
        for name, number in (("length_penalty", power), ("gnmt_length_penalty", alpha)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
                raise ValueError(f"{name} is {number!r}; it has to be a number")
        if alpha is None:
            own = 1.0 if config.length_penalty is None else config.length_penalty
            return float(own if power is None else power)
        if alpha < 0 or power not in (None, 1.0):
            raise ValueError(
                f"gnmt_length_penalty is {alpha} and length_penalty {power}: give one of the two, the first from 0 up"
            )
        return GNMTLengthPenalty(alpha)

    # ---- Searching ----
    def search(
        self,
        tokenizer: PreTrainedTokenizerBase,
        windows: Iterator[list[Piece]],
        options: dict[str, Any],
        *,
        batch_size: int | None,
        batch_tokens: int | None,
        lock: AbstractContextManager[Any],
    ) -> Iterator[tuple[list[int], list[list[Translation]]]]:
        """Translates pieces as `OtherModel.search` says: while some are translated, the next ones are tokenized."""
        settings = self._settings(options, options["n_best"], options["alignments"])
        if settings.alignments and settings.num_beams > 1:
            batch_size = 1  # CTranslate2 4.8 mixes up what the first tokens of a batch attend to
        working: deque[Batch] = deque()
        first = 0
        for window in windows:
            tokens = batch_tokens or self._tokens(window)
            groups = list(batches_of(window, batch_size, max(tokens // settings.num_beams, 1)))
            for group in groups:
                pool = self._pool(is_alone=len(groups) == 1)
                places, pieces = [first + number for number in group], [window[number] for number in group]
                working.append(self._begun(pool, places, pieces, settings))
                if len(working) >= self.threads * (1 + BATCHES_IN_FLIGHT):
                    yield self._ended(working.popleft(), settings, tokenizer, lock)
            first += len(window)
        while working:
            yield self._ended(working.popleft(), settings, tokenizer, lock)

    def _tokens(self, pieces: list[Piece]) -> int:
        """Returns the size of batches: large enough for products, and enough of them for all threads."""
        most = TOKENS_IN_8_BITS if self.dtype.startswith("int8") else TOKENS
        total = sum(len(piece.token_ids) for piece in pieces)
        if self.device.type == "cuda":
            return TOKENS * 8
        return min(max(total // (self.threads * BATCHES_PER_THREAD), FEWEST_TOKENS), most)

    @property
    def _shares_batches(self) -> bool:
        return self.threads > 1 and self.dtype == "float32"

    def _pool(self, *, is_alone: bool) -> Any:
        """Returns the translator of CTranslate2's for a batch; 8 bits are slower with several threads in one batch."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "CTranslate2's threads stay behind where a process forks, and this model was opened before; open a "
                'Translator in each process, or start them by "spawn"'
            )
        shape = (1, self.threads) if self._pools and is_alone and self._shares_batches else (self.threads, 1)
        with self._opening:
            if shape not in self._pools:
                self._pools[shape] = _library().Translator(
                    **self._place,
                    device=self.device.type,
                    device_index=self.device.index or 0,
                    compute_type=self._compute_type,
                    inter_threads=shape[0],
                    intra_threads=shape[1],
                    max_queued_batches=-1,
                )
                self._place = {} if len(self._pools) == 2 else self._place
        return self._pools[shape]

    def _begun(self, pool: Any, places: list[int], pieces: list[Piece], settings: Settings) -> Batch:
        limits = [settings.limit(piece, self.config.max_position_embeddings) for piece in pieces]
        exponent = settings.exponent(pieces)

        def translate(chosen: list[int]) -> list[Any]:
            prefixes = [self._prefix(pieces[number], settings) for number in chosen]
            limit = max(limits[number] for number in chosen)
            return pool.translate_batch(
                [[self._source[token] for token in pieces[number].token_ids] for number in chosen],
                prefixes if prefixes[0] else None,
                asynchronous=True,
                beam_size=settings.num_beams,
                num_hypotheses=settings.num_beams,
                length_penalty=exponent,
                max_input_length=0,  # otherwise sources are cut at 1,024 tokens
                max_decoding_length=limit,
                min_decoding_length=min(len(prefixes[0]) + settings.least, limit),
                return_scores=settings.num_beams > 1,
                return_attention=settings.alignments,
                return_end_token=True,
            )

        return Batch(places, pieces, limits, exponent, translate(list(range(len(pieces)))), translate)

    def _prefix(self, piece: Piece, settings: Settings) -> list[str]:
        begin = piece.prefix[1:] or (() if settings.begin is None else (settings.begin,))
        return [self._target[token] for token in begin]

    def _ended(
        self, batch: Batch, settings: Settings, tokenizer: PreTrainedTokenizerBase, lock: AbstractContextManager[Any]
    ) -> tuple[list[int], list[list[Translation]]]:
        """Waits for a batch and makes its translations."""
        results = [one.result() for one in batch.results]
        if settings.num_beams > 1:
            self._search_again(batch, results)
        found = [
            self._ranked(piece, result, limit, batch.exponent, settings)
            for piece, result, limit in zip(batch.pieces, results, batch.limits, strict=True)
        ]
        with lock:
            texts = iter(tokenizer.batch_decode([one.ids for row in found for one in row], skip_special_tokens=True))
        lists = []
        for piece, row in zip(batch.pieces, found, strict=True):
            alignments = [self._alignment(piece, one) for one in row]
            lists.append(
                [
                    Translation(on_one_line(next(texts)), one.num_tokens, one.score, alignment)
                    for one, alignment in zip(row, alignments, strict=True)
                ]
            )
        return batch.places, lists

    def _search_again(self, batch: Batch, results: list[Any]) -> None:
        """Repeats the searches that went beyond a piece's limit: within it, other hypotheses would have been cut."""
        beyond: dict[int, list[int]] = {}
        for number, (result, limit) in enumerate(zip(results, batch.limits, strict=True)):
            if max(map(len, result.hypotheses), default=0) > limit:
                beyond.setdefault(limit, []).append(number)
        for numbers in beyond.values():
            for number, again in zip(numbers, batch.repeat(numbers), strict=True):
                results[number] = again.result()

    def _ranked(self, piece: Piece, result: Any, limit: int, exponent: float, settings: Settings) -> list[Hypothesis]:
        """Returns the best hypotheses of a piece, by the model's own penalty."""
        begin, rows = max(len(piece.prefix) - 1, 0), []
        attentions = result.attention or [None] * len(result.hypotheses)
        for number, (tokens, attention) in enumerate(zip(result.hypotheses, attentions, strict=True)):
            ids = [self._ids[token] for token in tokens[:limit]]
            count = len(ids) - begin + (settings.is_end_forced and ids[-1:] != [self._end] and len(ids) == limit)
            score = None
            if settings.num_beams > 1 and result.scores:
                score = result.scores[number] * len(tokens) ** exponent / max(count, 1) ** settings.penalty
            rows.append(Hypothesis(ids, begin, count, score, attention))
        if not any(result.scores or ()):  # of greedy search, or of a source without tokens, which isn't translated
            return [one._replace(score=None if settings.n_best is None else 0.0) for one in rows[:1]]
        rows.sort(key=lambda one: -(one.score or 0.0))
        best = [one for number, one in enumerate(rows) if not number or (one.score or 0.0) > NO_HYPOTHESIS]
        return best[: settings.n_best] if settings.n_best is not None else [best[0]._replace(score=None)]

    def _alignment(self, piece: Piece, found: Hypothesis) -> Alignment | None:
        if found.attention is None:
            return None
        weights = torch.tensor(found.attention[found.begin : len(found.ids)]).reshape(-1, len(piece.token_ids))
        names = (self._source[token] for token in piece.token_ids)
        return Alignment(tuple(names), tuple(self._target[token] for token in found.ids[found.begin :]), weights)

    # ---- Forced decoding ----
    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[float]:
        """Returns how probable each target is, in nats; tokens of sources and targets end with `</s>`."""
        scores = self._pool(is_alone=False).score_batch(
            [[self._source[token] for token in row] for row in sources],
            [[self._target[token] for token in row[:-1]] for row in targets],  # the end is added there
            max_input_length=0,
        )
        return [sum(one.log_probs) for one in scores]


def open_folder(name: str | Path, *args: Any, **kwargs: Any) -> tuple[PreTrainedTokenizerBase, CTranslate2Model]:
    """Opens a folder that `vanilla-transformer export --to ctranslate2` wrote.

    Args:
        name: The folder.
        *args: As for `CTranslate2Model` behind the folder.
        **kwargs: As for `CTranslate2Model`.

    Raises:
        CheckpointError: As `CTranslate2Model`.
        ValueError: As `CTranslate2Model`.
        ImportError: As `CTranslate2Model`.
    """
    return load_tokenizer(name), CTranslate2Model(Path(name), *args, **kwargs)


def _length(options: Mapping[str, Any], config: GenerationConfig) -> tuple[str, int]:
    """Returns the option that limits lengths and its value: a call's, or else the model's."""
    names = ("max_new_tokens", "max_length", "max_extra_length")
    limits_length = _limits_length(config)  # otherwise, transformers' default may have been written into it
    own = {name: getattr(config, name, None) for name in (names if limits_length else names[2:])}
    for name, value in ((name, source.get(name)) for source in (options, own) for name in names):
        if value is not None:
            return name, value
    return "max_length", DEFAULT_MAX_LENGTH


# ---- Opening ----
def _library() -> Any:
    """Imports CTranslate2, which reads the variable when it computes for the first time.

    By itself, it doesn't use AVX-512. On processors of AMD, that makes batches up to a quarter faster.
    """
    cpu = Path("/proc/cpuinfo")
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and cpu.is_file() and "AuthenticAMD" in cpu.read_text():
        os.environ.setdefault(VARIABLE, "AVX512")
    try:
        return import_module("ctranslate2")
    except ImportError as error:
        raise ImportError(
            "the backend ctranslate2 needs CTranslate2, which isn't installed: pip install '.[export]' in a checkout"
        ) from error


def check_compute_type(device: torch.device, compute_type: str) -> None:
    """Checks that CTranslate2 is installed and has a type on a device; raises `ImportError` or `ValueError`."""
    library = _library()
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not library.get_cuda_device_count()):
        raise ValueError(f"device {device} can't be used with the backend ctranslate2 here; try cpu")
    known = ["default", *sorted(library.get_supported_compute_types(device.type))]
    if compute_type not in known:
        choices = ", ".join(map(repr, known))
        raise ValueError(
            f"compute_type is {compute_type!r}; the backend ctranslate2 has {choices} on this {device.type}"
        )


def _generation_config(folder: Path) -> GenerationConfig:
    """Reads how a model decodes, and refuses what CTranslate2 hasn't."""
    if not (folder / GENERATION_CONFIG).is_file():
        raise CheckpointError(
            f"{folder} has no {GENERATION_CONFIG}, and so no beams and no penalty; export the model again"
        )
    config = GenerationConfig(**_read(folder / GENERATION_CONFIG))
    given = config.to_diff_dict()
    unknown = sorted(name for name in given.keys() - SETTINGS if given[name])
    if config.do_sample:
        unknown.append("do_sample")
    if any(len(words) > 1 for words in config.bad_words_ids or []):
        unknown.append("bad_words_ids of several tokens")
    if isinstance(config.eos_token_id, list) and len(config.eos_token_id) > 1:
        unknown.append("several eos_token_id")
    if unknown:
        raise ValueError(
            f"the model's generation config has {', '.join(unknown)}, which the backend ctranslate2 hasn't; use the "
            'backend "engine", or change the generation config'
        )
    if (config.num_beams or 1) > 1 and config.early_stopping is not True:
        logger.warning(
            f"early_stopping is {config.early_stopping} in the model's generation config; with CTranslate2, searches "
            "end as with True."
        )
    return config


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} can't be read ({error}); export the model again") from error


def _vocabularies(folder: Path, side: str) -> list[Path]:
    files = [folder / f"{name}_vocabulary.json" for name in (side, "shared")]
    return [file for file in files if file.is_file()]


def _place(folder: Path, in_memory: bool) -> dict[str, Any]:
    """Returns the arguments by which CTranslate2 finds the files."""
    if not in_memory:
        return {"model_path": str(folder)}
    names = [folder / WEIGHTS, folder / CONFIG, *folder.glob("*_vocabulary.json")]
    return {"model_path": "model", "files": {file.name: file.read_bytes() for file in names}}


__all__ = ["CTranslate2Model", "check_compute_type", "is_exported", "open_folder"]
