"""CTranslate2 as the backend of a `Translator`: models in its format, searched and ranked as in section 6.1.

    translator = Translator("outputs/quickstart/model", backend="ctranslate2", compute_type="int8")

CTranslate2's beam search ends as with `early_stopping=True`, and has length^alpha for a penalty. Here it returns all
hypotheses that have ended, and the paper's penalty (or transformers', whichever the model has) ranks them. A batch is
searched up to the longest limit of its sentences; one that went beyond its own is searched again within that. Behind a
prefix, beam search finds a translation that ends at once only if the end is the most probable token.
"""

import json
import math
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..checkpoints.loading import CONFIG, GENERATION_CONFIG, CheckpointError
from ..errors import first_line
from ..generation_vanilla_transformer import DEFAULT_MAX_LENGTH, GNMTLengthPenalty, check_settings, sets_length
from ..interop.conversion import ConversionError
from .decoding import NO_HYPOTHESIS, Alignment, OtherModel, Translation, batches_of, check_n_best, on_one_line
from .limits import check_generation
from .sources import Piece

logger = logging.get_logger(__name__)

WEIGHTS, SHARED = "model.bin", "shared_vocabulary.json"
FIX = "export the model again"
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
# Padded source tokens of a batch, times beams, at most, and at least where that makes more batches, in 8 bits and in
# others; weights of many parameters are only read fast enough for many rows. Speed: docs/performance.md.
SIZES = {
    "small": {"int8": (1_024, 128), "other": (2_048, 512)},
    "large": {"int8": (2_048, 512), "other": (4_096, 1_024)},
}
MANY_PARAMETERS = 16_000_000
TOKENS_ON_GPU = 16_384
ROOM_FOR_PADDING = 1.05
BATCHES_IN_FLIGHT = 3  # of each thread, at work or waiting
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
        prompt = max(len(piece.prefix), 1)
        total = value if name == "max_length" else prompt + value
        if name == "max_extra_length":
            total += len(piece.token_ids)
        return max(min(total, positions) - 1 - self.is_end_forced, prompt)

    def exponent(self, pieces: Sequence[Piece]) -> float:
        """Returns the exponent with which length^exponent grows as the penalty does, at the sources' mean length."""
        if not isinstance(self.penalty, GNMTLengthPenalty):
            return self.penalty or LEAST_EXPONENT
        length = sum(len(piece.token_ids) for piece in pieces) / len(pieces)
        return self.penalty * length / (5 + length) or LEAST_EXPONENT


class Batch(NamedTuple):
    """Pieces that are translated at the moment, by their numbers; `repeat` searches for some of them again."""

    places: list[int]
    pieces: list[Piece]
    limits: list[int]
    exponent: float
    results: list[Any]
    repeat: Callable[[list[int]], list[Any]]


class Hypothesis(NamedTuple):
    """What CTranslate2 found for a piece; `num_tokens` leaves out those that it was made to begin with."""

    ids: list[int]
    num_tokens: int
    score: float | None
    attention: list[list[float]] | None


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
        config = _read(folder, CONFIG)
        if missing := {"max_position_embeddings", "num_parameters"} - config.keys():
            raise CheckpointError(f"{folder / CONFIG} has no {min(missing)}; {FIX}")
        self.config = SimpleNamespace(**config)
        self._source, self._target = _vocabularies(folder)
        self._ids = {token: number for number, token in enumerate(self._target)}
        self._end = config["eos_token"]
        self.threads = (threads or torch.get_num_threads()) if self.device.type == "cpu" else 1
        self._process = os.getpid()
        self._pools: dict[tuple[int, int], Any] = {}
        self._opening = threading.Lock()
        self._open = partial(
            _library().Translator,
            **(_in_memory(folder) if in_memory else {"model_path": str(folder)}),
            device=self.device.type,
            device_index=self.device.index or 0,
            compute_type=compute_type,
            max_queued_batches=-1,
        )
        self.dtype = self._pool((self.threads, 1)).compute_type

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
        from ..interop import ctranslate2 as exporter  # it needs an extra, and takes a while

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
        """Checks the options of a call of `decode` and returns the settings for `search`; raises `ValueError`."""
        for name in options.keys() - set(OPTIONS):
            raise ValueError(f"the backend ctranslate2 has no option {name}; it has {', '.join(OPTIONS)}")
        check_generation(options, self.generation_config)
        given = {name: value for name, value in options.items() if value is not None}
        own = {name: value for name, value in vars(self.generation_config).items() if value is not None}
        both = {"num_beams": 1, "min_new_tokens": 0, "length_penalty": 1.0, **own, **given}
        num_beams, least = both["num_beams"], both["min_new_tokens"]
        if n_best is not None:
            check_n_best(n_best, num_beams)
        if options.get("do_sample"):
            raise ValueError("the backend ctranslate2 has no do_sample: it searches; leave it out")
        if num_beams > 1 and given.get("early_stopping", True) is not True:
            raise ValueError(
                f"early_stopping is {given['early_stopping']!r}, and searches of the backend ctranslate2 end as with "
                "True; leave it out"
            )
        if isinstance(least, bool) or not isinstance(least, int) or least < 0:
            raise ValueError(f"min_new_tokens is {least!r}; it has to be 0 or more tokens")
        if least and num_beams > 1:  # the end's probability would go to the other tokens
            raise ValueError("the backend ctranslate2 has min_new_tokens for greedy search only; give num_beams=1")
        length = _length(given, self.generation_config)
        if length[0] != "max_extra_length" and length[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"{length[0]} is {length[1]:,}, and the model's table in CTranslate2's format has "
                f"{self.config.max_position_embeddings:,} positions; give less"
            )
        penalty = _penalty(options, both)
        forced = both.get("forced_bos_token_id"), both.get("forced_eos_token_id") is not None
        return {"settings": Settings(num_beams, n_best, alignments, penalty, length, least, *forced)}

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
        settings: Settings = options["settings"]
        if settings.alignments and settings.num_beams > 1:
            batch_size = 1  # CTranslate2 4.8 mixes up what the first tokens of a batch attend to
        working: deque[Batch] = deque()
        first = 0
        for window in windows:
            most = (batch_tokens or self._tokens(window, settings.num_beams)) // settings.num_beams
            groups = list(batches_of(window, batch_size, max(most, 1), int))
            shares = len(groups) == 1 and self.dtype == "float32"
            pool = self._pool((1, self.threads) if shares else (self.threads, 1))
            for group in groups:
                places = [first + number for number in group]
                working.append(self._begun(pool, places, [window[number] for number in group], settings))
                if len(working) >= self.threads * BATCHES_IN_FLIGHT:
                    yield self._ended(working.popleft(), settings, tokenizer, lock)
            first += len(window)
        while working:
            yield self._ended(working.popleft(), settings, tokenizer, lock)

    def _tokens(self, pieces: list[Piece], num_beams: int) -> int:
        """Returns tokens of a batch, times beams: many, as products want, with as many batches for each thread."""
        if self.device.type == "cuda":
            return TOKENS_ON_GPU
        sizes = SIZES["large" if self.config.num_parameters > MANY_PARAMETERS else "small"]
        most, fewest = sizes["int8" if self.dtype.startswith("int8") else "other"]
        total = sum(len(piece.token_ids) for piece in pieces) * num_beams
        number = min(self.threads * math.ceil(total / (most * self.threads)), max(total // fewest, 1))
        return math.ceil(ROOM_FOR_PADDING * total / max(number, 1))

    def _pool(self, shape: tuple[int, int]) -> Any:
        """Returns CTranslate2's translator for a number of batches at a time, and of threads for each."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "CTranslate2's threads stay behind where a process forks, and this model was opened before; open a "
                'Translator in each process, or start them by "spawn"'
            )
        with self._opening:
            if shape not in self._pools:
                self._pools[shape] = self._open(inter_threads=shape[0], intra_threads=shape[1])
                if len(self._pools) == 2 or self.threads == 1 or self._pools[shape].compute_type != "float32":
                    del self._open  # and the files that it holds
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
            _search_again(batch, results)
        found = [
            self._ranked(piece, result, limit, batch.exponent, settings)
            for piece, result, limit in zip(batch.pieces, results, batch.limits, strict=True)
        ]
        with lock:
            texts = iter(tokenizer.batch_decode([one.ids for row in found for one in row], skip_special_tokens=True))
        lists = [
            [
                Translation(on_one_line(next(texts)), one.num_tokens, one.score, self._alignment(piece, one))
                for one in row
            ]
            for piece, row in zip(batch.pieces, found, strict=True)
        ]
        return batch.places, lists

    def _ranked(self, piece: Piece, result: Any, limit: int, exponent: float, settings: Settings) -> list[Hypothesis]:
        """Returns the best hypotheses of a piece, by the model's own penalty."""
        prompt = max(len(piece.prefix) - 1, 0)
        nothing = [None] * len(result.hypotheses)
        has_scores = any(result.scores or ())  # neither has greedy search, nor a source without tokens

        def hypothesis(number: int, score: float | None) -> Hypothesis:
            tokens = result.hypotheses[number][:limit]
            attention = (result.attention or nothing)[number]
            return Hypothesis([self._ids[token] for token in tokens], count(tokens), score, attention)

        def count(tokens: list[str]) -> int:
            is_cut = len(tokens) == limit and tokens[-1] != self._end
            return len(tokens) - prompt + (is_cut and settings.is_end_forced)

        if not has_scores:
            return [hypothesis(0, None if settings.n_best is None else 0.0)]
        scores = [
            score * len(tokens) ** exponent / count(tokens[:limit]) ** settings.penalty
            for tokens, score in zip(result.hypotheses, result.scores, strict=True)
        ]
        best = sorted(range(len(scores)), key=lambda number: -scores[number])[: settings.n_best or 1]
        if settings.n_best is None:
            return [hypothesis(best[0], None)]
        return [hypothesis(one, scores[one]) for one in best if one == best[0] or scores[one] > NO_HYPOTHESIS]

    def _alignment(self, piece: Piece, found: Hypothesis) -> Alignment | None:
        if found.attention is None:
            return None
        written = slice(max(len(piece.prefix) - 1, 0), len(found.ids))
        weights = torch.tensor(found.attention[written]).reshape(-1, len(piece.token_ids))
        source, target = (self._source[token] for token in piece.token_ids), found.ids[written]
        return Alignment(tuple(source), tuple(self._target[token] for token in target), weights)

    # ---- Forced decoding ----
    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[float]:
        """Returns how probable each target is, in nats; tokens of sources and targets end with `</s>`."""
        scores = self._pool((self.threads, 1)).score_batch(
            [[self._source[token] for token in row] for row in sources],
            [[self._target[token] for token in row[:-1]] for row in targets],  # the end is added there
            max_input_length=0,
        )
        return [sum(one.log_probs) for one in scores]


def _search_again(batch: Batch, results: list[Any]) -> None:
    """Repeats the searches that went beyond a piece's limit: within it, other hypotheses would have been cut."""
    beyond: dict[int, list[int]] = {}
    for number, (result, limit) in enumerate(zip(results, batch.limits, strict=True)):
        if max(map(len, result.hypotheses)) > limit:
            beyond.setdefault(limit, []).append(number)
    for numbers in beyond.values():
        for number, again in zip(numbers, batch.repeat(numbers), strict=True):
            results[number] = again.result()


def _length(options: Mapping[str, Any], config: GenerationConfig) -> tuple[str, int]:
    """Returns the option that limits lengths and its value: a call's, or else the model's."""
    names = ("max_new_tokens", "max_length", "max_extra_length")
    limits_length = sets_length(config)  # otherwise, transformers' default may have been written into it
    own = {name: getattr(config, name, None) for name in (names if limits_length else names[2:])}
    given = ((name, source.get(name)) for source in (options, own) for name in names)
    return next(((name, value) for name, value in given if value is not None), ("max_length", DEFAULT_MAX_LENGTH))


def _penalty(options: Mapping[str, Any], both: Mapping[str, Any]) -> float:
    """Returns the penalty that counts: alpha as in the paper, or transformers' exponent."""
    power, alpha = both["length_penalty"], both.get("gnmt_length_penalty")
    if "gnmt_length_penalty" in options or options.get("length_penalty") is not None:
        alpha = options.get("gnmt_length_penalty")
    if isinstance(power, bool) or not isinstance(power, int | float):
        raise ValueError(f"length_penalty is {power!r}; it has to be a number")
    check_settings({"gnmt_length_penalty": alpha, "max_extra_length": None, "length_penalty": power})
    return float(power) if alpha is None else GNMTLengthPenalty(alpha)


# ---- Opening ----
def is_exported(model: Any) -> bool:
    """Whether something is a folder in CTranslate2's format, such as `vanilla-transformer export` writes."""
    return isinstance(model, str | Path) and (Path(model) / WEIGHTS).is_file()


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


def _generation_config(folder: Path) -> GenerationConfig:
    """Reads how a model decodes, and refuses what CTranslate2 hasn't."""
    config = GenerationConfig(**_read(folder, GENERATION_CONFIG))
    given = config.to_diff_dict()
    unknown = sorted(name for name in given.keys() - SETTINGS if given[name])
    unknown += ["do_sample"] if config.do_sample else []
    unknown += ["bad_words_ids of several tokens"] if any(len(one) > 1 for one in config.bad_words_ids or []) else []
    unknown += ["several eos_token_id"] if isinstance(config.eos_token_id, list) and config.eos_token_id[1:] else []
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


def _vocabularies(folder: Path) -> list[list[str]]:
    """Reads the tokens of the source and of the target, by their ids: a tokenizer may name them otherwise."""
    shared = (folder / SHARED).is_file()
    return [_read(folder, SHARED if shared else f"{side}_vocabulary.json") for side in ("source", "target")]


def _read(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / name} can't be read ({first_line(error)}); {FIX}") from error


def _in_memory(folder: Path) -> dict[str, Any]:
    """Returns the arguments by which CTranslate2 takes its files from memory."""
    files = [folder / WEIGHTS, folder / CONFIG, *folder.glob("*_vocabulary.json")]
    return {"model_path": "model", "files": {file.name: file.read_bytes() for file in files}}


__all__ = ["CTranslate2Model", "check_compute_type", "is_exported"]
