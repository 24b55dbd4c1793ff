"""What a call asks for, what decodes it, and the translations that it gets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import did_you_mean
from ..plan_vanilla_transformer import DEFAULTS, KNOWN, LENGTHS, WITHOUT_EFFECT, Plan, settings_in
from .division import check_splitting
from .languages import Languages, Tasks
from .reading import Namer, Segment, namers
from .spelling import Spelling

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..checkpoints.loading import Where

# Longest source that is translated as one. Sentences are far shorter, and attention to this many tokens takes some
# megabytes per head.
MAX_SOURCE_TOKENS = 1_024
MAX_NEW_TOKENS = 512  # of another package's model whose settings name no limit: transformers would cut at 20
# The largest values of options that count something: beyond, a slip would only stall the machine.
LARGEST = {
    **dict.fromkeys(("num_beams", "num_return_sequences", "n_best"), 1_000),
    **dict.fromkeys(("max_new_tokens", "max_length", "max_extra_length"), 10_000),
    **{"max_source_tokens": 10_000, "batch_tokens": 1_000_000, "batch_size": 100_000, "window": 100_000},
}


class DeviceError(ValueError):
    """A device can't be used; the message says why."""


@dataclass(frozen=True)
class Opening:
    """How a `Translator` opens a model; fields are its arguments."""

    backend: str
    tokenizer: "PreTrainedTokenizerBase | str | Path | None"
    device: "str | torch.device | None"
    compute_type: str
    dtype: "torch.dtype | str"
    threads: int | None
    where: "Where"


@dataclass(frozen=True, eq=False)
class Alignment:
    """How much each token of a translation attends to each token of its source."""

    source: tuple[str, ...]  # the source's tokens, (S,)
    target: tuple[str, ...]  # the tokens that the model wrote, (T,), without those of a prefix
    weights: "Tensor"  # the mean of the last layer's heads, (T, S)
    source_ids: tuple[int, ...] = ()
    target_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Translation:
    """One translation of a text."""

    text: str  # on one line, unless the source was split into sentences: then it has that one's lines
    num_tokens: int  # that the model wrote, with the end of sentence but without a prefix
    # The log-probability in nats divided by the length penalty, `sequences_scores` of `generate()`; None without n-best
    # lists, or if the text was translated in pieces.
    score: float | None = None
    alignment: Alignment | None = field(default=None, compare=False)  # if asked for, of a text translated as one
    num_unknown: int = 0  # unknown tokens among those that the model wrote


class Found(NamedTuple):
    """What a search found for a segment."""

    tokens: list[int]  # that the model wrote, without those of a prefix
    score: float | None = None
    attention: "Tensor | None" = None  # of each token to the source's, (T, S)


Batch = tuple[list[int], list[list[Found]]]  # places of some segments, and what was found for each, the best first


class Backend(ABC):
    """Decodes with a model. A `Translator` holds one."""

    name: str  # "engine" or "ctranslate2"
    device: Any
    dtype: Any  # of the weights, or of the computation
    generation_config: Any  # the model's, or its values by name
    positions: int | None  # tokens of the longest source that the model has positions for; None: no end
    is_own: bool = True  # whether the model is of this package, with all of its options
    tasks: Tasks = MappingProxyType({})  # of a T5's configuration: "translation_en_to_de" and so on
    training: bool = False  # whether the model is in training mode, where it can't be used

    @property
    def option_names(self) -> set[str]:
        """Names that options of `generate()` may have; the backend may lack some."""
        return {*KNOWN, *WITHOUT_EFFECT, *DEFAULTS}

    def source_limit(self, tokenizer: "PreTrainedTokenizerBase", max_tokens: int | None = None) -> int:
        """Returns how many tokens a source may have to be translated as one; the paper's sinusoids have no end."""
        limit = max_tokens or min(MAX_SOURCE_TOKENS, int(getattr(tokenizer, "model_max_length", MAX_SOURCE_TOKENS)))
        return limit if self.positions is None else min(limit, self.positions)

    @abstractmethod
    def unsupported(self, call: "Call") -> str | None:
        """Says what of a call the backend lacks, and why, or None."""

    @abstractmethod
    def search(self, call: "Call", segments: list[Segment]) -> Iterator[Batch]:
        """Searches for translations of segments, in any order."""

    def namers(self, tokenizer: "PreTrainedTokenizerBase") -> tuple[Namer, Namer]:
        """Returns what names the tokens of a source, and those of a target."""
        return namers(tokenizer)

    @abstractmethod
    def log_probabilities(self, sources: list[list[int]], targets: list[list[int]]) -> list[float]:
        """Returns how probable each target is, in nats; the tokens of sources and targets end with `</s>`."""


def tasks_in(config: object) -> Tasks:
    """Returns the translation tasks that a configuration names, with their settings."""
    tasks = getattr(config, "task_specific_params", None) or {}
    return {name: settings for name, settings in tasks.items() if name.startswith("translation_")}


# ---- Calls ----
LANGUAGES = ("src_lang", "tgt_lang", "source_prefix")
UNKNOWN = ("error", "keep", "ignore")  # what becomes of unknown symbols


@dataclass(frozen=True)
class Call:
    """What a call asks for, resolved and checked once by `Call.of`; all that translates takes it.

    Options of a call are `src_lang`, `tgt_lang` and `source_prefix`, those from `n_best` on, and all of `generate()`;
    None: as if it weren't given, and for those of `generate()`, what the generation config says is off.

    Attributes:
        languages: How the model is told the languages. `src_lang` is the source language, for a model of several, by
            the name that its tokenizer has for it: "eng_Latn" (NLLB), "en" (M2M100), "en_XX" (mBART), or that of a T5's
            tasks; None: the tokenizer's, if it was given. `tgt_lang`: the target language, as well, or that of an
            OPUS-MT model: "deu" or ">>deu<<"; a sentence that begins with a code keeps it. `source_prefix`: what each
            source begins with, such as T5's "translate English to German: ".
        n_best: Different translations per sentence, of a beam search at least as wide. One with fewer is searched again
            with two, then four times the beams, and gets the best of all. None: the best, without its score.
        alignments: Whether translations have their alignments; only models of this package have them.
        prefix: What translations have to begin with: a string for all, or a list with one for each sentence. White
            space around it doesn't count. It should end with a word: the model continues with a new token.
        split_sentences: The language of the sentences in two letters (ISO 639-1), by whose rules each is first split
            (needs sentencex); the translations are joined, with line breaks and indents where they were. None: no
            splitting.
        batch_size: Sentences at a time at most; None: as many as `batch_tokens` allows.
        batch_tokens: Padded source tokens at a time, times beams, at most; a longer sentence is a batch by itself.
            None: 4,096, or what suits the backend.
        max_source_tokens: Tokens of a source that is translated as one, at most; None: 1,024, or the tokenizer's
            `model_max_length` if it is less. The model's positions may end earlier. A longer source is divided into
            pieces of at most 256 tokens at the ends of its sentences, else at white space, else anywhere; the
            translations are joined.
        unknown: What becomes of symbols that the tokenizer doesn't know: "keep" (default): the model reads its unknown
            token, and each such symbol is logged once; "ignore": they are left out; "error".
        unknown_target: What becomes of unknown tokens that the model writes: "mark" (default): the text shows the
            tokenizer's unknown token; "drop": they are left out; "avoid": the model never chooses them (in beam search,
            the backend "ctranslate2" then gives their probability to the others). A warning has their number.
        progress: Called with the number of sentences done since its last call.
        on_division: Called with the index and the number of pieces of each sentence that is too long; None: a warning.
    """

    backend: Backend
    tokenizer: "PreTrainedTokenizerBase"
    plan: Plan  # how it decodes
    languages: Languages
    spelling: Spelling  # how what it writes becomes text
    options: Mapping[str, object]  # those for `generate()`; lengths are those of a piece
    n_best: int | None = None
    alignments: bool = False
    prefix: str | Sequence[str] | None = None
    split_sentences: str | None = None
    batch_size: int | None = None
    batch_tokens: int | None = None
    max_source_tokens: int | None = None
    unknown: str = "keep"
    unknown_target: str | None = None
    progress: Callable[[int], object] = lambda number: None
    on_division: Callable[[int, int], object] | None = None

    @classmethod
    def of(
        cls,
        backend: Backend,
        tokenizer: "PreTrainedTokenizerBase",
        options: Mapping[str, object],
        usual: Mapping[str, str | None] = MappingProxyType(dict.fromkeys(LANGUAGES)),  # languages of its translator
    ) -> "Call":
        """Resolves the options of a call.

        Raises:
            TypeError: There is no such option.
            ValueError: The model is in training mode, an option has a wrong value, the backend or the model lacks it,
                or a language isn't given where the model has several.
        """
        check_model(backend)
        given = _renamed(options)
        asked = {name: given.pop(name) for name in LANGUAGES if name in given}
        own = {name: given.pop(name) for name in OWN if name in given}
        own = {name: value for name, value in own.items() if value is not None}
        for name in ("n_best", "batch_size", "batch_tokens", "max_source_tokens"):
            check_number(name, own.get(name))
        if (language := own.get("split_sentences")) is not None:
            check_splitting(language)
        if (how := own.get("unknown", "keep")) not in UNKNOWN:
            raise ValueError(f"unknown is {how!r}; give one of {', '.join(UNKNOWN)}")
        _check_names(backend, given)
        config = backend.generation_config
        languages = Languages.of(tokenizer, asked, usual, given, config, backend.tasks)
        given |= languages.settings
        spelling = Spelling.of(tokenizer, config, own.get("unknown_target"))
        plan = _plan(backend, given, own.get("n_best"), bool(own.get("alignments")), spelling.barred)
        call = cls(backend, tokenizer, plan, languages, spelling, given, **own)
        if (reason := backend.unsupported(call)) is not None:
            raise ValueError(reason)
        return call

    @property
    def limit(self) -> int:
        """Tokens of a source that is translated as one, at most."""
        return self.backend.source_limit(self.tokenizer, self.max_source_tokens)


OWN = tuple(one.name for one in fields(Call) if one.default is not MISSING)  # options that aren't for `generate()`


def _renamed(options: Mapping[str, object]) -> dict[str, Any]:
    """Returns a call's options with those of `generate()` that a `Call` has under another name renamed."""
    renamed: dict[str, Any] = dict(options)
    if renamed.get("output_alignments"):
        renamed["alignments"] = renamed.pop("output_alignments")
    if isinstance(count := renamed.get("num_return_sequences"), int) and count > 1:
        del renamed["num_return_sequences"]
        renamed["n_best"] = count if renamed.get("n_best") is None else renamed["n_best"]
    return renamed


def _check_names(backend: Backend, options: Mapping[str, object]) -> None:
    """Raises `TypeError` for an option, or one of a `generation_config` among them, with a name that nothing reads.

    transformers finds the former only when it decodes, and the latter never.
    """
    of_config = [name for name in settings_in(options.get("generation_config")) if not name.startswith("_")]
    known = {*backend.option_names, *settings_in(backend.generation_config)}
    for name in (*options, *of_config):
        if name not in known:
            raise TypeError(f"there is no option {name!r}{did_you_mean(name, {*known, *LANGUAGES, *OWN})}")


def _plan(
    backend: Backend, options: Mapping[str, object], n_best: int | None, alignments: bool, barred: tuple[int, ...]
) -> Plan:
    """Resolves how a call decodes, with more `barred` tokens; raises `ValueError`."""
    for name in ("num_beams", "num_return_sequences", *LENGTHS):  # which multiply the work
        check_number(name, options.get(name))
    plan = Plan.of(options, backend.generation_config)
    if not backend.is_own and plan.limit[0] == "default":
        plan = replace(plan, limit=("max_new_tokens", min(MAX_NEW_TOKENS, backend.positions or MAX_NEW_TOKENS)))
    if plan.num_hypotheses > plan.num_beams and not plan.others:  # samples may be as many as one likes
        raise ValueError(f"num_return_sequences is {plan.num_hypotheses}, more than num_beams, {plan.num_beams}")
    if n_best is not None:
        if plan.num_beams < (least := max(n_best, 2)):
            raise ValueError(
                f"n_best={n_best} needs a beam search of at least {least} beams, and num_beams is {plan.num_beams}; "
                "raise num_beams"
            )
        plan = replace(plan, num_hypotheses=plan.num_beams)  # some may be one text
    barred = tuple(dict.fromkeys((*plan.barred, *barred)))
    return replace(plan, alignments=plan.alignments or alignments, barred=barred)


def check_model(model: "PreTrainedModel | Backend") -> None:
    """Raises `ValueError` for a model in training mode."""
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes its output; call model.eval() first")


def check_number(name: str, value: object) -> None:
    """Checks an option that counts something, one of `LARGEST`, or None; raises `ValueError`."""
    least = 0 if name == "max_extra_length" else 1
    is_within = isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST[name]
    if value is not None and not is_within:
        raise ValueError(f"{name} is {value!r}; it has to be an integer from {least} to {LARGEST[name]:,}")


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
