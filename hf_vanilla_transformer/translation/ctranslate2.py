"""CTranslate2 as the backend of a `Translator`: models in its format, searched and ranked as in section 6.1.

    translator = Translator("outputs/quickstart/model", backend="ctranslate2", compute_type="int8")

CTranslate2's beam search ends as with `early_stopping=True`, or later (`patience`), and has length^alpha for a penalty.
Here it returns as many hypotheses as beams, the best by its penalty, and the model's own (the paper's or transformers')
ranks them; one that only the latter finds good can be missing. A batch is searched up to the longest limit of its
sentences; one that went beyond its own is searched again within that. Beam search finds a translation that ends at once
only if the end is the most probable token. As the length penalty is that of a batch's mean length, the last entries of
n-best lists may depend on the batch.
"""

import copy
import logging
import math
import os
import random
import sys
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoints.kinds import MODEL_TYPE
from ..errors import CheckpointError, first_line, named
from ..interop.ctranslate2_files import Folder
from ..interop.ctranslate2_settings import lacking_settings, never_chosen, patience
from ..plan_vanilla_transformer import GNMTLengthPenalty, Plan
from .backend import Backend, Batch, Call, Found, batches_of, tasks_in
from .ctranslate2_folder import FIX, settings_of
from .reading import Namer, Segment

if TYPE_CHECKING:  # an extra, and what a folder in its format is translated without
    from ctranslate2 import AsyncTranslationResult, TranslationResult
    from ctranslate2 import Translator as Pool
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CALL_OPTIONS = (
    *("num_beams", "forced_bos_token_id", "max_new_tokens", "min_new_tokens", "max_length", "max_extra_length"),
    *("length_penalty", "gnmt_length_penalty", "early_stopping", "do_sample"),
)
MADE_WITH = ("decoder_start_token_id", "eos_token_id")
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


class PendingBatch:
    """Segments that CTranslate2's translator `pool` is translating; their prefixes have one length."""

    def __init__(self, model: "CTranslate2Backend", pool: "Pool", segments: list[Segment], plan: Plan) -> None:
        self._model, self._pool, self._segments, self._plan = model, pool, segments, plan
        self._is_end_forced = bool(plan.forced_end)  # as the last one that fits
        self._limits = list(map(self._limit, segments))
        # length^exponent grows as the penalty does, at the sources' mean length.
        self._exponent = plan.length_penalty
        if isinstance(self._exponent, GNMTLengthPenalty):
            length = sum(len(segment.token_ids) for segment in segments) / len(segments)
            self._exponent = self._exponent * length / (5 + length)
        self._exponent = self._exponent or LEAST_EXPONENT
        self._results = self._search(range(len(segments)))

    def _limit(self, segment: Segment) -> int:
        """Returns how many tokens CTranslate2 may write for a segment, with those that it is made to begin with."""
        prompt = max(len(segment.prefix), 1)
        total = prompt + self._plan.max_new_tokens(len(segment.token_ids), prompt)
        limit = min(total, self._model.positions) - 1 - self._is_end_forced
        if self._is_end_forced and limit < prompt:
            name, value = self._plan.limit
            raise ValueError(f"{name}={value} leaves no token before the end that is forced; give more")
        return max(limit, prompt)

    def _search(self, places: Sequence[int]) -> "list[AsyncTranslationResult]":
        """Begins to search for the translations of some segments."""
        plan, model, segments = self._plan, self._model, [self._segments[place] for place in places]
        forced = plan.forced_begin
        begins = [segment.prefix[1:] or (() if forced is None else (forced,)) for segment in segments]
        limit = max(self._limits[place] for place in places)
        results: list[AsyncTranslationResult] = self._pool.translate_batch(
            [model.source_tokens(segment.token_ids) for segment in segments],
            [[model.target[token] for token in begin] for begin in begins] if begins[0] else None,
            asynchronous=True,
            beam_size=plan.num_beams,
            num_hypotheses=plan.num_beams,
            length_penalty=self._exponent,
            patience=patience(plan),
            max_input_length=0,  # otherwise sources are cut at 1,024 tokens
            max_decoding_length=limit,
            # A beginning that the model is made to write is part of the translation, a prefix isn't.
            min_decoding_length=min(
                len(segments[0].prefix[1:]) + max(plan.min_new_tokens or 0, model.least_length), limit
            ),
            suppress_sequences=never_chosen(plan, model.target) or None,
            return_scores=plan.num_beams > 1,
            return_attention=plan.alignments,
            return_end_token=True,
        )
        return results

    def found(self) -> list[list[Found]]:
        """Waits for what is found for each segment, the best by the model's own penalty first.

        Beam searches that reach their segment's own limit are repeated within it: in a batch with a longer limit,
        hypotheses of this length go on; here, they end.
        """
        results: list[TranslationResult] = [one.result() for one in self._results]
        beyond: defaultdict[int, list[int]] = defaultdict(list)
        longest = max(self._limits)
        for place, (result, limit) in enumerate(zip(results, self._limits, strict=True)):
            if self._plan.num_beams > 1 and limit < longest and max(map(len, result.hypotheses)) >= limit:
                beyond[limit].append(place)
        for places in beyond.values():
            for place, again in zip(places, self._search(places), strict=True):
                results[place] = again.result()
        return [self._ranked(*row) for row in zip(self._segments, results, self._limits, strict=True)]

    def _ranked(self, segment: Segment, result: "TranslationResult", limit: int) -> list[Found]:
        if not any(result.scores or ()):  # greedy search has none, nor has a source without tokens
            return [self._found(segment, result, 0, limit)]
        rows = [self._found(segment, result, number, limit) for number in range(len(result.hypotheses))]
        scores = [
            score * len(tokens) ** self._exponent / len(one.tokens) ** self._plan.length_penalty
            for one, tokens, score in zip(rows, result.hypotheses, result.scores, strict=True)
        ]
        ranked = [one._replace(score=score) for one, score in zip(rows, scores, strict=True)]
        return sorted(ranked, key=lambda one: -(one.score or 0.0))

    def _found(self, segment: Segment, result: "TranslationResult", number: int, limit: int) -> Found:
        model, prompt, tokens = self._model, len(segment.prefix[1:]), result.hypotheses[number][:limit]
        ids = [model.ids[token] for token in tokens[prompt:]]
        weights: Any = None
        if result.attention:
            shape = -1, len(model.source_tokens(segment.token_ids))
            weights = np.array(result.attention[number][prompt : len(tokens)], dtype=np.float32).reshape(shape)
            with suppress(ImportError):  # where an exported model runs without it, this is numpy's
                weights = import_module("torch").from_numpy(weights)
        if self._is_end_forced and len(tokens) == limit and tokens[-1] != model.end:  # behind a cut
            ids.append(model.ids[model.end])
        return Found(ids, 0.0, weights)


class CTranslate2Backend(Backend):
    """A model that CTranslate2 runs. Several threads may use it at the same time.

    On a CPU, each of `threads` (None: PyTorch's number, or a thread per core where it isn't imported) translates a
    batch of its own. In float32, they share a batch that is alone; for that, the weights are held twice. The `folder`
    is in CTranslate2's format, with generation_config.json; the device "cpu", "cuda" or "cuda:1"; `compute_type` one of
    CTranslate2's for it, "default": as the weights were saved. A damaged folder raises `CheckpointError`; a device, a
    type or a setting of the model's decoding that CTranslate2 lacks, `ValueError`.
    """

    name = "ctranslate2"
    config: Mapping[str, Any]
    source: list[str]  # tokens by their ids: a tokenizer may name them otherwise
    target: list[str]
    adds_end = False  # whether CTranslate2 ends sources, which the tokenizer does, too
    least_length = 0  # of translations; CTranslate2's own default, for models of others, is 1

    def __init__(
        self, folder: Path, device: str = "cpu", compute_type: str = "default", threads: int | None = None
    ) -> None:
        self.device, self.name_or_path, self.folder = device, str(folder), Folder.read(folder)
        vars(self).update(settings_of(self.folder))
        self.positions: int = self.config["max_position_embeddings"]
        self.end = self.config["eos_token"]
        self.ids = {token: number for number, token in enumerate(self.target)}
        self._check_settings()
        kind, _, index = device.partition(":")
        self.threads = (threads or _threads()) if kind == "cpu" else 1
        self._process = os.getpid()
        open_pool = partial(
            import_library().Translator,
            model_path=str(self.folder.weights.parent),
            device=kind,
            device_index=int(index or 0),
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
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase",
        device: str = "cpu",
        compute_type: str = "default",
        threads: int | None = None,
    ) -> "CTranslate2Backend":
        """Converts a model in a temporary folder; other arguments and errors are those of the class."""
        from ..interop import ctranslate2 as exporter  # it needs an extra, and takes a while
        from ..interop.interface import ConversionError

        with tempfile.TemporaryDirectory(prefix="hf_vanilla_transformer-") as folder:
            is_own = model.config.model_type == MODEL_TYPE
            write = exporter.write_model if is_own else exporter.write_other_model
            try:
                write(model, tokenizer, Path(folder))
                made = cls(Path(folder), device, compute_type, threads)  # this reads all of it
                if not is_own:
                    made.is_own, made.tasks = False, tasks_in(model.config)
                    cls(Path(folder), "cpu", "float32", threads).compare(model, tokenizer)
            except ConversionError as error:
                raise CheckpointError(f"the model can't be converted for CTranslate2: {error}") from error
        made.name_or_path = getattr(model, "name_or_path", "")
        return made

    def compare(self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raises `ConversionError` if sequences of random tokens have other probabilities than with the model."""
        import torch

        from ..interop.interface import check_distance, distance  # it needs PyTorch, as the next one
        from .engine_backend import EngineBackend

        self.check_tokenizer(tokenizer)
        chance, special, end = random.Random(0), set(tokenizer.all_special_ids), self.ids[self.end]
        usual = sorted(set(tokenizer.get_vocab().values()) - special)
        pairs = [[[*chance.choices(usual, k=length), end] for length in (3, 9, 17)] for _ in range(2)]
        exact = model if model.dtype == torch.float32 else copy.deepcopy(model).float()  # as CTranslate2 computes here
        found, wanted = (torch.tensor(one.log_probabilities(*pairs)) for one in (self, EngineBackend(exact, tokenizer)))
        for one, other in zip(found, wanted, strict=True):  # long sequences would hide what short ones show
            check_distance(distance(one, other), "ctranslate2", '; use the backend "engine"')

    def check_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raises `CheckpointError` if a tokenizer gives its tokens other ids than the vocabularies of the folder."""
        sides = [tokenizer.get_vocab(), getattr(tokenizer, "target_encoder", None) or tokenizer.get_vocab()]
        for ids, tokens in zip(sides, (self.source, self.target), strict=True):
            names = {number: token for token, number in ids.items()}
            if not self.is_own:  # Marian's <pad>, for instance, isn't in CTranslate2's format
                names = {number: token for number, token in names.items() if number < len(tokens)}
            if wrong := [token for number, token in names.items() if tokens[number : number + 1] != [token]]:
                fix = FIX if self.is_own else "give the model's own tokenizer"
                raise CheckpointError(f"{self.name_or_path}: it lacks {named(wrong)} of its tokenizer; {fix}")

    # ---- Options ----
    def unsupported(self, call: Call) -> str | None:
        """Says what of a call CTranslate2 lacks, and why, or None."""
        plan, options = call.plan, call.options
        for name, value in options.items():  # what is off needs nothing of CTranslate2, but for what it was made with
            if name not in CALL_OPTIONS and (value is not None or name in MADE_WITH):
                return f"the backend ctranslate2 has no option {name}; it has {', '.join(CALL_OPTIONS)}"
        if any(one.startswith("do_sample") for one in plan.others):
            return "the backend ctranslate2 has no do_sample: it searches; leave it out"
        if lacking := lacking_settings(plan):
            return f'the backend ctranslate2 lacks {", ".join(lacking)}; use the backend "engine"'
        if plan.min_new_tokens and plan.num_beams > 1:  # the end's probability would go to the other tokens
            return (
                "the backend ctranslate2 has min_new_tokens for greedy search only; give num_beams=1, or "
                "min_new_tokens=0"
            )
        name, value = plan.limit
        if name != "max_extra_length" and value > self.positions:
            return (
                f"{name} is {value:,}, and the model's table in CTranslate2's format has {self.positions:,} "
                "positions; give less"
            )
        return None

    def _check_settings(self) -> None:
        """Refuses what CTranslate2 lacks of how the model decodes, and warns of what it does otherwise."""
        plan = Plan.of({}, self.generation_config)
        if lacking := lacking_settings(plan):
            raise ValueError(
                f"the model's generation config has {', '.join(lacking)}; the backend ctranslate2 lacks that. Use the "
                'backend "engine", or change the generation config'
            )
        if plan.num_beams > 1 and never_chosen(plan, self.target) and not plan.renormalize:
            logger.warning(
                "suppress_tokens or bad_words_ids of the model's generation config bar tokens; in beam search, "
                "CTranslate2 gives their probability to the others, as with renormalize_logits: scores and "
                "translations may differ."
            )

    # ---- Searching ----
    def search(self, call: Call, segments: list[Segment]) -> Iterator[Batch]:
        """Searches for translations of segments, several batches at a time."""
        plan, batch_size = call.plan, call.batch_size
        if plan.alignments and plan.num_beams > 1:
            batch_size = 1  # CTranslate2 4.8 mixes up what the first tokens of a batch attend to
        working: deque[tuple[list[int], PendingBatch]] = deque()
        most = (call.batch_tokens or self._tokens(segments, plan.num_beams)) // plan.num_beams
        groups = list(batches_of(segments, batch_size, max(most, 1)))
        pool = self._pool(is_alone=len(groups) == 1)
        for group in groups:
            working.append((group, PendingBatch(self, pool, [segments[place] for place in group], plan)))
            if len(working) >= self.threads * BATCHES_IN_FLIGHT:
                places, batch = working.popleft()
                yield places, batch.found()
        yield from ((places, batch.found()) for places, batch in working)

    def _tokens(self, segments: list[Segment], num_beams: int) -> int:
        """Returns tokens of a batch, times beams: many, as products want, with as many batches for each thread."""
        if self.device != "cpu":
            return TOKENS_ON_GPU
        is_large, is_int8 = self.config["num_parameters"] > MANY_PARAMETERS, self.dtype.startswith("int8")
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

    def namers(self, tokenizer: "PreTrainedTokenizerBase") -> tuple[Namer, Namer]:
        """Returns what names the tokens of a source, and those of a target: a tokenizer may name them otherwise."""
        return self._names, lambda ids: [self.target[number] for number in ids]

    def _names(self, ids: Sequence[int]) -> list[str]:
        return [self.source[number] if number < len(self.source) else self.config["unk_token"] for number in ids]

    def source_tokens(self, ids: Sequence[int]) -> list[str]:
        """Returns the tokens of a source that CTranslate2 is given."""
        tokens = self._names(ids)
        return tokens[:-1] if self.adds_end and tokens[-1:] == [self.end] else tokens

    # ---- Forced decoding ----
    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[float]:
        """Returns how probable each target is, in nats; the tokens of sources and targets end with `</s>`."""
        scores = self._pool().score_batch(
            [self.source_tokens(row) for row in sources],
            [[self.target[token] for token in row[:-1]] for row in targets],  # the end is added there
            max_input_length=0,
        )
        return [sum(one.log_probs) for one in scores]


# ---- Opening ----
def _threads() -> int:
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch is not None else len(os.sched_getaffinity(0))


def import_library() -> ModuleType:
    """Imports CTranslate2, with AVX-512 on AMD's processors, unless the user's environment chooses.

    By itself, it doesn't use AVX-512 there; batches are up to a quarter faster with it. The variable is read at the
    first computation.
    """
    file = Path("/proc/cpuinfo")
    cpu = file.read_text() if file.is_file() else ""
    if "AuthenticAMD" in cpu and all(f" avx512{part}" in cpu for part in ("f", "bw", "cd", "dq", "vl")):
        os.environ.setdefault("CT2_FORCE_CPU_ISA", "AVX512")
    try:
        return import_module("ctranslate2")
    except ImportError as error:
        raise ImportError(
            "CTranslate2, needed by the backend ctranslate2, isn't installed: pip install '.[export]' in a checkout"
        ) from error


__all__ = ["CTranslate2Backend", "import_library"]
