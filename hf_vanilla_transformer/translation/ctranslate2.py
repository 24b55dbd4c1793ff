"""CTranslate2 as the backend of a `Translator`: models in its format, searched and ranked as in section 6.1.

    translator = Translator("outputs/quickstart/model", backend="ctranslate2", compute_type="int8")

CTranslate2's beam search ends as with `early_stopping=True`, and has length^alpha for a penalty. Here it returns as
many hypotheses as beams, the best by its penalty, and the model's own (the paper's or transformers') ranks them. A
batch is searched up to the longest limit of its sentences; one that went beyond its own is searched again within that.
Behind a prefix, beam search finds a translation that ends at once only if the end is the most probable token. As the
length penalty is that of a batch's mean length, the last entries of n-best lists may depend on the batch.
"""

import json
import math
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..checkpoints.loading import CONFIG, GENERATION_CONFIG, CheckpointError, named
from ..errors import first_line
from ..generation_vanilla_transformer import DEFAULT_MAX_LENGTH, GNMTLengthPenalty, check_settings, sets_length
from ..interop.conversion import ConversionError, never_chosen, own_settings
from .backend import (
    LENGTHS,
    NO_HYPOTHESIS,
    Alignment,
    Backend,
    Found,
    Job,
    Options,
    Translation,
    batches_of,
    check_generation,
    check_n_best,
    on_one_line,
)
from .reading import Segment

if TYPE_CHECKING:  # an extra
    from ctranslate2 import AsyncTranslationResult, TranslationResult
    from ctranslate2 import Translator as Pool

logger = logging.get_logger(__name__)

WEIGHTS, SHARED = "model.bin", "shared_vocabulary.json"
FIX = "export the model again"
# Options of a call.
OPTIONS = (
    *("num_beams", "max_new_tokens", "min_new_tokens", "max_length", "max_extra_length"),
    *("length_penalty", "gnmt_length_penalty", "early_stopping", "do_sample"),
)
# Settings of a generation config: those, others that each search gets, and others without effect.
SETTINGS = {
    *OPTIONS, "bad_words_ids", "suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "use_cache",
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "transformers_version", "compute_type",
    "renormalize_logits", "_from_model_config",
}  # fmt: skip
# Padded source tokens of a batch, times beams: at most, and at least if there are more batches for it. Of small models
# in 8 bits; of small ones in other types or large ones in 8 bits; of large ones in other types. Many bytes need many
# rows to be read fast enough. Speed: docs/performance.md.
SIZES = ((1_024, 128), (2_048, 512), (4_096, 1_024))
MANY_PARAMETERS = 16_000_000
TOKENS_ON_GPU = 16_384
ROOM_FOR_PADDING = 1.05
BATCHES_IN_FLIGHT = 3  # of each thread, at work or waiting
# With an exponent of 0, CTranslate2's search ends as soon as the best hypothesis has.
LEAST_EXPONENT = 1e-6


class Settings(NamedTuple):
    """How a call decodes; `n_best` and `alignments` as for `decode`.

    Attributes:
        num_beams: 1 is greedy search.
        penalty: Alpha of the paper's length penalty, or transformers' exponent.
        length: The option that limits lengths, and its value.
        least: Tokens before the end of a translation at least.
    """

    num_beams: int
    n_best: int | None
    alignments: bool
    penalty: float
    length: tuple[str, int]
    least: int


class Batch:
    """Segments that CTranslate2's translator `pool` is translating; their prefixes have one length."""

    def __init__(self, model: "CTranslate2Model", pool: "Pool", segments: list[Segment], settings: Settings) -> None:
        self._model, self._pool, self._segments, self._settings = model, pool, segments, settings
        self._is_end_forced = model.generation_config.forced_eos_token_id is not None  # as the last one that fits
        self._limits = list(map(self._limit, segments))
        # length^exponent grows as the penalty does, at the sources' mean length.
        self._exponent = settings.penalty
        if isinstance(settings.penalty, GNMTLengthPenalty):
            length = sum(len(segment.token_ids) for segment in segments) / len(segments)
            self._exponent = settings.penalty * length / (5 + length)
        self._exponent = self._exponent or LEAST_EXPONENT
        self._results = self._search(range(len(segments)))

    def _limit(self, segment: Segment) -> int:
        """Returns how many tokens CTranslate2 may write for a segment, with those that it is made to begin with."""
        name, value = self._settings.length
        prompt = max(len(segment.prefix), 1)
        total = value if name == "max_length" else prompt + value
        if name == "max_extra_length":
            total += len(segment.token_ids)
        limit = min(total, self._model.config.max_position_embeddings) - 1 - self._is_end_forced
        if self._is_end_forced and limit < prompt:
            raise ValueError(f"{name}={value} leaves no token before the end that is forced; give more")
        return max(limit, prompt)

    def _search(self, places: Sequence[int]) -> "list[AsyncTranslationResult]":
        """Begins to search for the translations of some segments."""
        settings, model, segments = self._settings, self._model, [self._segments[place] for place in places]
        forced = model.generation_config.forced_bos_token_id
        begins = [segment.prefix[1:] or (() if forced is None else (forced,)) for segment in segments]
        limit = max(self._limits[place] for place in places)
        results: list[AsyncTranslationResult] = self._pool.translate_batch(
            [[model.source[token] for token in segment.token_ids] for segment in segments],
            [[model.target[token] for token in begin] for begin in begins] if begins[0] else None,
            asynchronous=True,
            beam_size=settings.num_beams,
            num_hypotheses=settings.num_beams,
            length_penalty=self._exponent,
            max_input_length=0,  # otherwise sources are cut at 1,024 tokens
            max_decoding_length=limit,
            # A beginning that the model is made to write is part of the translation, a prefix isn't.
            min_decoding_length=min(len(segments[0].prefix[1:]) + settings.least, limit),
            suppress_sequences=model.barred,
            return_scores=settings.num_beams > 1,
            return_attention=settings.alignments,
            return_end_token=True,
        )
        return results

    def wait(self) -> None:
        """Waits for the results. Beam searches that reach their segment's own limit are repeated within it."""
        self._results = [one.result() for one in self._results]
        beyond: dict[int, list[int]] = {}
        longest = max(self._limits)
        for place, (result, limit) in enumerate(zip(self._results, self._limits, strict=True)):
            # Within a longer limit, hypotheses of this length go on; here, they end.
            if self._settings.num_beams > 1 and limit < longest and max(map(len, result.hypotheses)) >= limit:
                beyond.setdefault(limit, []).append(place)
        for places in beyond.values():
            for place, again in zip(places, self._search(places), strict=True):
                self._results[place] = again.result()

    def translations(self, tokenizer: PreTrainedTokenizerBase) -> list[list[Translation]]:
        """Returns the best translations of each segment, by the model's own penalty."""
        return [self._ranked(tokenizer, *row) for row in zip(self._segments, self._results, self._limits, strict=True)]

    def _ranked(
        self, tokenizer: PreTrainedTokenizerBase, segment: Segment, result: "TranslationResult", limit: int
    ) -> list[Translation]:
        settings, prompt = self._settings, max(len(segment.prefix) - 1, 0)

        def count(tokens: list[str]) -> int:
            """Counts what the model wrote, with an end that is forced behind a cut."""
            is_cut = len(tokens) == limit and tokens[-1] != self._model.config.eos_token
            return len(tokens) - prompt + (is_cut and self._is_end_forced)

        def translation(number: int, score: float | None) -> Translation:
            tokens = result.hypotheses[number][:limit]
            ids = [self._model.ids[token] for token in tokens]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            alignment = None
            if result.attention:
                source = tuple(self._model.source[token] for token in segment.token_ids)
                weights = torch.tensor(result.attention[number][prompt : len(tokens)]).reshape(-1, len(source))
                sides = tuple(segment.token_ids), tuple(ids[prompt:])
                alignment = Alignment(source, tuple(tokens[prompt:]), weights, *sides)
            return Translation(on_one_line(text), count(tokens), score, alignment)

        if not any(result.scores or ()):  # greedy search has none, nor has a source without tokens
            return [translation(0, None if settings.n_best is None else 0.0)]
        scores = [
            score * len(tokens) ** self._exponent / count(tokens[:limit]) ** settings.penalty
            for tokens, score in zip(result.hypotheses, result.scores, strict=True)
        ]
        best = sorted(range(len(scores)), key=lambda number: -scores[number])
        if settings.n_best is None:
            return [translation(best[0], None)]
        return [translation(one, scores[one]) for one in best if one == best[0] or scores[one] > NO_HYPOTHESIS]


class CTranslate2Model(Backend):
    """A model that CTranslate2 runs. Several threads may use it at the same time.

    On a CPU, each of `threads` translates a batch of its own. In float32, they share a batch that is alone; for that,
    the weights are held twice.

    Args:
        folder: In CTranslate2's format, with generation_config.json.
        device: "cpu", "cuda" or "cuda:1".
        compute_type: A type of CTranslate2's for this device; "default": as the weights were saved.
        threads: Of the computation on a CPU; None: PyTorch's number.

    Raises:
        CheckpointError: The folder is incomplete or damaged.
        ValueError: The device or the type can't be used, or CTranslate2 lacks a setting of the model's decoding.
        ImportError: CTranslate2 isn't installed.
    """

    training = False

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        compute_type: str = "default",
        threads: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.name_or_path = str(folder)
        self.generation_config = _generation_config(folder)
        config = _read(folder, CONFIG)
        if missing := {"max_position_embeddings", "num_parameters"} - config.keys():
            raise CheckpointError(f"{folder / CONFIG} has no {min(missing)}; {FIX}")
        self.config = SimpleNamespace(**config)
        # Tokens by their ids: a tokenizer may name them otherwise.
        shared = (folder / SHARED).is_file()
        sides = [_read(folder, SHARED if shared else f"{side}_vocabulary.json") for side in ("source", "target")]
        self.source, self.target = sides
        self.ids = {token: number for number, token in enumerate(self.target)}
        self.barred = never_chosen(self.generation_config, self.target) or None
        self.threads = (threads or torch.get_num_threads()) if self.device.type == "cpu" else 1
        self._process = os.getpid()
        open_pool = partial(
            import_library().Translator,
            model_path=str(folder),
            device=self.device.type,
            device_index=self.device.index or 0,
            compute_type=compute_type,
            max_queued_batches=-1,
        )
        try:
            self._many = open_pool(inter_threads=self.threads, intra_threads=1)
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"CTranslate2 can't open the model on {device} with compute_type={compute_type!r} "
                f'({first_line(error)}); try "default", or the device cpu'
            ) from error
        self.dtype: str = self._many.compute_type
        shares = self.threads > 1 and self.dtype == "float32"
        self._alone = open_pool(inter_threads=1, intra_threads=self.threads) if shares else self._many

    @classmethod
    def converted(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        device: str = "cpu",
        compute_type: str = "default",
        threads: int | None = None,
    ) -> "CTranslate2Model":
        """Converts a model in a temporary folder; other arguments and errors are those of the class."""
        from ..interop import ctranslate2 as exporter  # it needs an extra, and takes a while

        with tempfile.TemporaryDirectory(prefix="hf_vanilla_transformer-") as folder:
            try:
                exporter.write(model, tokenizer, Path(folder))
            except ConversionError as error:
                raise CheckpointError(f"the model can't be converted for CTranslate2: {error}") from error
            made = cls(Path(folder), device, compute_type, threads)  # this reads all of it
        made.name_or_path = getattr(model, "name_or_path", "")
        return made

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises `CheckpointError` if a tokenizer gives its tokens other ids than the vocabularies of the folder."""
        sides = [tokenizer.get_vocab(), getattr(tokenizer, "target_encoder", None) or tokenizer.get_vocab()]
        for ids, tokens in zip(sides, (self.source, self.target), strict=True):
            names = {number: token for token, number in ids.items()}
            if wrong := [token for number, token in names.items() if tokens[number : number + 1] != [token]]:
                raise CheckpointError(f"{self.name_or_path}: it lacks {named(wrong)} of its tokenizer; {FIX}")

    # ---- Options ----
    def check_options(self, options: Options, n_best: int | None, alignments: bool) -> Options:
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
        if least and num_beams > 1:  # the end's probability would go to the other tokens
            raise ValueError(
                "the backend ctranslate2 has min_new_tokens for greedy search only; give num_beams=1, or "
                "min_new_tokens=0"
            )
        length = _length(given, self.generation_config)
        if length[0] != "max_extra_length" and length[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"{length[0]} is {length[1]:,}, and the model's table in CTranslate2's format has "
                f"{self.config.max_position_embeddings:,} positions; give less"
            )
        return {"settings": Settings(num_beams, n_best, alignments, _penalty(options, both), length, least)}

    # ---- Searching ----
    def search(self, job: Job) -> Iterator[Found]:
        """Translates the segments of a job, several batches at a time."""
        settings: Settings = job.options["settings"]
        batch_size = job.batch_size
        if settings.alignments and settings.num_beams > 1:
            batch_size = 1  # CTranslate2 4.8 mixes up what the first tokens of a batch attend to
        working: deque[tuple[list[int], Batch]] = deque()

        def ended() -> Found:
            places, batch = working.popleft()
            batch.wait()
            return places, batch.translations(job.tokenizer)

        most = (job.batch_tokens or self._tokens(job.segments, settings.num_beams)) // settings.num_beams
        groups = list(batches_of(job.segments, batch_size, max(most, 1)))
        pool = self._pool(is_alone=len(groups) == 1)
        for group in groups:
            working.append((group, Batch(self, pool, [job.segments[place] for place in group], settings)))
            if len(working) >= self.threads * BATCHES_IN_FLIGHT:
                yield ended()
        while working:
            yield ended()

    def _tokens(self, segments: list[Segment], num_beams: int) -> int:
        """Returns tokens of a batch, times beams: many, as products want, with as many batches for each thread."""
        if self.device.type == "cuda":
            return TOKENS_ON_GPU
        is_large, is_int8 = self.config.num_parameters > MANY_PARAMETERS, self.dtype.startswith("int8")
        most, fewest = SIZES[is_large + (not is_int8)]
        total = sum(len(segment.token_ids) for segment in segments) * num_beams
        number = min(self.threads * math.ceil(total / (most * self.threads)), max(total // fewest, 1))
        return math.ceil(ROOM_FOR_PADDING * total / max(number, 1))

    def _pool(self, is_alone: bool = False) -> "Pool":
        """Returns CTranslate2's translator, for many batches or for one that is alone."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "CTranslate2's threads stay behind where a process forks, and this model was opened before; open a "
                'Translator in each process, or start them by "spawn"'
            )
        return self._alone if is_alone else self._many

    # ---- Forced decoding ----
    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[float]:
        """Returns how probable each target is, in nats; the tokens of sources and targets end with `</s>`."""
        scores = self._pool().score_batch(
            [[self.source[token] for token in row] for row in sources],
            [[self.target[token] for token in row[:-1]] for row in targets],  # the end is added there
            max_input_length=0,
        )
        return [sum(one.log_probs) for one in scores]


def _length(options: Mapping[str, Any], config: GenerationConfig) -> tuple[str, int]:
    """Returns the option that limits lengths and its value: a call's, or else the model's."""
    # transformers' default may have been written into the model's.
    own = {name: getattr(config, name, None) for name in (LENGTHS if sets_length(config) else LENGTHS[2:])}
    given = ((name, source.get(name)) for source in (options, own) for name in LENGTHS)
    return next(((name, value) for name, value in given if value is not None), ("max_length", DEFAULT_MAX_LENGTH))


def _penalty(options: Mapping[str, Any], both: Mapping[str, Any]) -> float:
    """Returns the penalty that counts: alpha as in the paper, or transformers' exponent."""
    power, alpha = both["length_penalty"], both.get("gnmt_length_penalty")
    if "gnmt_length_penalty" in options or options.get("length_penalty") is not None:
        alpha = options.get("gnmt_length_penalty")
    check_settings({"gnmt_length_penalty": alpha, "max_extra_length": None, "length_penalty": power})
    return float(power) if alpha is None else GNMTLengthPenalty(alpha)


# ---- Opening ----
def is_exported(model: object) -> bool:
    """Whether something is a folder in CTranslate2's format, such as `vanilla-transformer export` writes."""
    return isinstance(model, str | Path) and (Path(model) / WEIGHTS).is_file()


def refuse_exported(model: str | Path) -> None:
    """Raises `CheckpointError` for such a folder, or one with ONNX graphs, where the model itself is needed."""
    for name, file in (("CTranslate2's format", WEIGHTS), ("ONNX's format, for onnxruntime", "encoder_model.onnx")):
        if Path(model, file).is_file():
            raise CheckpointError(f"{model} is in {name}; give the model that it was exported from")


def import_library() -> ModuleType:
    """Imports CTranslate2, with AVX-512 on AMD's processors, unless the user's environment chooses.

    By itself, it doesn't use AVX-512 there; batches are up to a quarter faster with it. The variable is read at the
    first computation.
    """
    cpu = Path("/proc/cpuinfo")
    if torch.backends.cpu.get_cpu_capability() == "AVX512" and cpu.is_file() and "AuthenticAMD" in cpu.read_text():
        os.environ.setdefault("CT2_FORCE_CPU_ISA", "AVX512")
    try:
        return import_module("ctranslate2")
    except ImportError as error:
        raise ImportError(
            "CTranslate2, needed by the backend ctranslate2, isn't installed: pip install '.[export]' in a checkout"
        ) from error


def _generation_config(folder: Path) -> GenerationConfig:
    """Reads how a model decodes, and refuses what CTranslate2 lacks."""
    config = GenerationConfig(**_read(folder, GENERATION_CONFIG))
    given = own_settings(config)
    unknown = sorted(name for name in given.keys() - SETTINGS if given[name])
    unknown += ["do_sample"] if config.do_sample else []
    unknown += ["bad_words_ids of several tokens"] if any(len(one) > 1 for one in config.bad_words_ids or []) else []
    unknown += ["several eos_token_id"] if isinstance(config.eos_token_id, list) and config.eos_token_id[1:] else []
    if unknown:
        raise ValueError(
            f"the model's generation config has {', '.join(unknown)}; the backend ctranslate2 lacks that. Use the "
            'backend "engine", or change the generation config'
        )
    if (config.num_beams or 1) > 1 and config.early_stopping is not True:
        logger.warning(
            f"early_stopping is {config.early_stopping} in the model's generation config; with CTranslate2, searches "
            "end as with True."
        )
    bars = config.suppress_tokens or config.bad_words_ids
    if (config.num_beams or 1) > 1 and bars and not config.renormalize_logits:
        logger.warning(
            "suppress_tokens or bad_words_ids of the model's generation config bar tokens; in beam search, CTranslate2 "
            "gives their probability to the others, as with renormalize_logits: scores and translations may differ."
        )
    return config


def _read(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / name} can't be read ({first_line(error)}); {FIX}") from error


__all__ = ["CTranslate2Model", "import_library", "is_exported", "refuse_exported"]
