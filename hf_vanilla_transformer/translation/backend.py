"""What translating needs of a model, and the batches that it gets."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..plan_vanilla_transformer import DEFAULTS, KNOWN, LENGTHS, WITHOUT_EFFECT, Plan
from .reading import Segment
from .spelling import Spelling

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

LEAST_SCORE = -1e8  # of a hypothesis: places that hold none have transformers' -1e9
MAX_NEW_TOKENS = 512  # of another package's model whose settings name no limit: transformers would cut at 20
# The largest values of options that count something: beyond, a slip would only stall the machine.
LARGEST = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "n_best"), 1_000),
    **dict.fromkeys(("max_new_tokens", "max_length", "max_extra_length"), 10_000),
    **dict.fromkeys(("max_source_tokens", "max_tokens"), 10_000),
    **{"batch_tokens": 1_000_000, "batch_size": 100_000, "window": 100_000},
}


class DeviceError(ValueError):
    """A device can't be used; the message says why."""


@dataclass(frozen=True, eq=False)
class Alignment:
    """How much each token of a translation attends to each token of its source.

    Attributes:
        source: The source's tokens, (S,).
        target: The tokens that the model wrote, (T,), without those of a prefix.
        weights: The mean of the last layer's heads, (T, S).
        source_ids: The ids of the source's tokens, (S,).
        target_ids: The ids of the target's tokens, (T,).
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: "Tensor"
    source_ids: tuple[int, ...] = ()
    target_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Translation:
    """One translation of a text.

    Attributes:
        text: Its text; on one line, unless the text was split into sentences: then it has that one's lines.
        num_tokens: Tokens that the model wrote, with the end of sentence but without a prefix.
        score: Its log-probability in nats divided by the length penalty, `sequences_scores` of `generate()`; None
            without n-best lists, or if the text was translated in pieces.
        alignment: With `alignments=True`, if the text was translated as one.
        num_unknown: Unknown tokens among those that the model wrote.
    """

    text: str
    num_tokens: int
    score: float | None = None
    alignment: Alignment | None = field(default=None, compare=False)
    num_unknown: int = 0


Found = tuple[list[int], list[list[Translation]]]  # places of some segments, and the translations of each


@dataclass(frozen=True)
class DecodingJob:
    """Segments to translate, and how: all as for `decode`, and the `plan` of its options."""

    tokenizer: "PreTrainedTokenizerBase"
    segments: list[Segment]
    plan: Plan
    options: dict[str, Any]
    has_scores: bool  # whether translations have their scores, as n-best lists do
    batch_size: int | None
    batch_tokens: int | None
    spelling: Spelling


class Backend(ABC):
    """Decodes with a model. A `Translator` holds one."""

    name: str  # "engine" or "ctranslate2"
    device: Any
    dtype: Any  # of the weights, or of the computation
    generation_config: Any  # the model's, or its values by name
    positions: int | None  # tokens of the longest source that the model has positions for; None: no end
    is_own: bool = True  # whether the model is of this package, with all of its options
    tasks: Mapping[str, Any] = MappingProxyType({})  # of a T5's configuration: "translation_en_to_de" and so on
    training: bool = False  # whether the model is in training mode, where it can't be used

    @property
    def option_names(self) -> set[str]:
        """Names that options of `generate()` may have; the backend may lack some."""
        return {*KNOWN, *WITHOUT_EFFECT, *DEFAULTS}

    def plan(
        self,
        options: dict[str, Any],
        n_best: int | None = None,
        alignments: bool = False,
        barred: tuple[int, ...] = (),
    ) -> Plan:
        """Resolves how a call of `decode` decodes, with more `barred` tokens; raises `ValueError` for what it lacks."""
        check_generation(options, self.generation_config)
        plan = Plan.of(options, self.generation_config)
        if not self.is_own and plan.limit[0] == "default":
            plan = replace(plan, limit=("max_new_tokens", min(MAX_NEW_TOKENS, self.positions or MAX_NEW_TOKENS)))
        if plan.num_hypotheses > plan.num_beams and not plan.others:  # samples may be as many as one likes
            raise ValueError(f"num_return_sequences is {plan.num_hypotheses}, more than num_beams, {plan.num_beams}")
        if n_best is not None:
            check_number("n_best", n_best)
            if plan.num_beams < (least := max(n_best, 2)):
                raise ValueError(
                    f"n_best={n_best} needs a beam search of at least {least} beams, and num_beams is "
                    f"{plan.num_beams}; raise num_beams"
                )
            plan = replace(plan, num_hypotheses=plan.num_beams)  # some may be one text
        barred = tuple(dict.fromkeys((*plan.barred, *barred)))
        plan = replace(plan, alignments=plan.alignments or alignments, barred=barred)
        if (reason := self.unsupported(plan)) is not None:
            raise ValueError(reason)
        return plan

    @abstractmethod
    def unsupported(self, plan: Plan) -> str | None:
        """Says which setting of a plan the backend lacks, and why, or None."""

    @abstractmethod
    def search(self, job: DecodingJob) -> Iterator[Found]:
        """Translates the segments of a job, in any order; for n-best lists, into all that each search found."""

    @abstractmethod
    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[float]:
        """Returns how probable each target is, in nats; the tokens of sources and targets end with `</s>`."""


def positions_in(config: Any) -> int | None:
    """Returns the number of positions of a model by its configuration; None: there is no end."""
    positions = getattr(config, "max_position_embeddings", None)
    has_end = isinstance(positions, int) and getattr(config, "position_encoding", "learned") == "learned"
    return positions if has_end else None


def tasks_in(config: Any) -> dict[str, Any]:
    """Returns the translation tasks that a configuration names, with their settings."""
    tasks = getattr(config, "task_specific_params", None) or {}
    return {name: settings for name, settings in tasks.items() if name.startswith("translation_")}


# ---- Options ----
def check_number(name: str, value: object, where: str = "") -> None:
    """Checks an option that counts something, one of `LARGEST`, or None; raises `ValueError`."""
    least = 0 if name == "max_extra_length" else 1
    is_within = isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST[name]
    if value is not None and not is_within:
        raise ValueError(f"{name}{where} is {value!r}; it has to be an integer from {least} to {LARGEST[name]:,}")


def check_generation(options: Mapping[str, object], generation_config: Any) -> None:
    """Checks the options of `generate()` that multiply its work, given or else of the generation config."""
    config = options.get("generation_config") or generation_config
    own = config if isinstance(config, Mapping) else vars(config)
    has_length = any(options.get(name) is not None for name in LENGTHS)
    for name in ("num_beams", "num_return_sequences", *LENGTHS):
        if name in options:
            check_number(name, options[name])
        elif not (has_length and name in LENGTHS):
            check_number(name, own.get(name), " of the generation config")


# ---- Batches ----
def batches(lengths: Sequence[int], batch_size: int | None, max_tokens: int) -> Iterator[list[int]]:
    """Groups sentences of similar length, the longest first, so that too little memory shows at once.

    A batch has at most `batch_size` sentences and `max_tokens` padded tokens; a longer sentence is a batch by itself.
    Yields indices into `lengths`, each of them once.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and (len(batch) == batch_size or (len(batch) + 1) * lengths[batch[0]] > max_tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def batches_of(segments: Sequence[Segment], batch_size: int | None, max_tokens: int) -> Iterator[list[int]]:
    """Groups segments as `batches` does, by the lengths of their prefixes: a target can't begin with padding."""
    groups: dict[int, list[int]] = {}
    for number, segment in enumerate(segments):
        groups.setdefault(len(segment.prefix), []).append(number)
    for group in groups.values():
        for batch in batches([len(segments[number].token_ids) for number in group], batch_size, max_tokens):
            yield [group[place] for place in batch]
