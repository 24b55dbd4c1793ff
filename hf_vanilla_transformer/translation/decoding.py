"""Translating many sentences with one model or an ensemble: batches by length, n-best lists, alignments.

Everything here takes a sequence-to-sequence model of transformers in evaluation mode, or one of another backend, and
its tokenizer. Options are keyword arguments of `generate()`, by default those of the model's generation config.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..errors import did_you_mean
from ..plan_vanilla_transformer import Plan, settings_in
from .backend import LARGEST, Backend, DecodingJob, Found, Translation, check_number, positions_in
from .division import Encode
from .languages import set_languages
from .reading import Segment, check_splitting, encoder, join_segments, own_code, read_segments, without_empty
from .spelling import Spelling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Longest source that is translated as one. Sentences are far shorter, and attention to this many tokens takes some
# megabytes per head.
MAX_SOURCE_TOKENS = 1_024
UNKNOWN = ("error", "keep", "ignore")  # what becomes of unknown symbols
TEXTS_AT_ONCE = 1_000  # that are tokenized at a time


def backend_of(model: "PreTrainedModel | Backend", tokenizer: "PreTrainedTokenizerBase") -> Backend:
    """Returns what decodes with a model; raises `ValueError` for one in training mode."""
    check_model(model)
    if isinstance(model, Backend):
        return model
    from .engine_backend import EngineBackend  # it needs torch and transformers

    return EngineBackend(model, tokenizer)


def decode(
    model: "PreTrainedModel | Backend",
    tokenizer: "PreTrainedTokenizerBase",
    sentences: Iterable[str],
    *,
    n_best: int | None = None,
    alignments: bool = False,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    source_prefix: str | None = None,
    prefix: str | Sequence[str] | None = None,
    split_sentences: str | None = None,
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    max_source_tokens: int | None = None,
    unknown: str | None = None,
    unknown_target: str | None = None,
    progress: Callable[[int], object] | None = None,
    on_division: Callable[[int, int], object] | None = None,
    first: int = 0,
    **options: Any,
) -> list[list[Translation]]:
    """Translates sentences into translations with their lengths and, for n-best lists, scores.

    Args:
        model: A model, what `ensemble` made of several, or one of another backend.
        tokenizer: Its tokenizer.
        sentences: Strings.
        n_best: Different translations per sentence, of a beam search at least as wide. One with fewer is searched again
            with two, then four times the beams, and gets the best of all. None: the best, without its score.
        alignments: Whether translations have their alignments; only models of this package have them.
        src_lang: The source language, for a model of several, by the name that its tokenizer has for it: "eng_Latn"
            (NLLB), "en" (M2M100), "en_XX" (mBART), or that of a T5's tasks. None: the tokenizer's, if it was given.
        tgt_lang: The target language, as well, or that of an OPUS-MT model: "deu" or ">>deu<<". A sentence that begins
            with a code keeps it.
        source_prefix: What each source begins with, such as T5's "translate English to German: ".
        prefix: What translations have to begin with: a string for all, or a list with one for each sentence. White
            space at its end doesn't count. It should end with a word: the model continues with a new token.
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
        first: The index of the first sentence, for `on_division` and errors.
        **options: For `generate()`; lengths are those of a piece. None switches off what the generation config says.

    Returns:
        Translations of each sentence, the best first: one, or `n_best` (fewer where the search found no more). An empty
        sentence has one, empty, of no tokens and score 0. A sentence that is divided or split has one, without a score
        or an alignment: the best of each piece, joined.

    Raises:
        TypeError: `sentences` is one string, a set, a dictionary or None, or has an item that is not a string; an
            option is unknown.
        ValueError: The model is in training mode, lacks alignments or a language, or has several and none is given; an
            option is too large, or `generate()` refuses it or a sentence; `n_best` is below 1 or above the number of
            beams, or there is only one beam; a prefix has special or unknown tokens; with `unknown="error"`, a sentence
            has an unknown symbol.
    """
    texts = texts_of("sentences", sentences, first)
    backend = backend_of(model, tokenizer)
    check_number("batch_size", batch_size)
    check_number("batch_tokens", batch_tokens)
    check_number("max_source_tokens", max_source_tokens)
    check_splitting(split_sentences)
    limit = source_limit(backend, max_source_tokens, tokenizer)
    languages = {"src_lang": src_lang, "tgt_lang": tgt_lang, "source_prefix": source_prefix}
    segments: list[Segment] = []
    _check_names(backend, options)
    spelling = Spelling.of(tokenizer, backend.generation_config, unknown_target)
    with set_languages(tokenizer, backend, options, texts, first, **languages) as (begin, options):
        plan = backend.plan(options, n_best, alignments, spelling.barred)
        prefixes = _prefix_tokens(plan, tokenizer, prefix, len(texts))
        for place in range(0, len(texts), TEXTS_AT_ONCE):
            some = dict(enumerate(texts[place : place + TEXTS_AT_ONCE], place))
            read, divided = read_segments(tokenizer, some, limit, begin, split_sentences)
            segments += read
            for index, count in divided.items():
                (on_division or partial(_warn_of_division, limit))(first + index, count)
    segments = _without_unknown(tokenizer, texts, segments, unknown or "keep", first, begin)
    segments, gaps = without_empty(segments)
    for place, segment in enumerate(segments):
        if not place or segments[place - 1].text != segment.text:
            segments[place] = segment._replace(prefix=prefixes[segment.text])
    left = Counter(segment.text for segment in segments)  # segments of each text that aren't translated yet
    tell = progress or (lambda number: None)
    tell(len(texts) - len(left))
    found: dict[int, list[Translation]] = {}
    wanted = [n_best or 1 if left[segment.text] == 1 else 1 for segment in segments]
    job = DecodingJob(tokenizer, segments, plan, options, n_best is not None, batch_size, batch_tokens, spelling)
    for places, translations in _search(backend, job, wanted):
        found.update(zip(places, translations, strict=True))
        left.subtract(segments[place].text for place in places)
        tell(sum(left[text] == 0 for text in {segments[place].text for place in places}))
    results = [[Translation("", 0, None if n_best is None else 0.0)] for _ in texts]
    for text, group in groupby(range(len(segments)), key=lambda place: segments[place].text):
        parts = [(segments[place].gap, found[place]) for place in group]
        end = "" if split_sentences is None else gaps.get(text, "") + texts[text][len(texts[text].rstrip()) :]
        alone = [replace(one, text=parts[0][0] + one.text + end) for one in parts[0][1]]
        results[text] = alone if len(parts) == 1 else [_joined(parts, end)]
    spelling.warn([one.num_unknown for row in results for one in row])
    return results


def plan_of(
    backend: Backend,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    n_best: int | None = None,
    alignments: bool = False,
    src_lang: str | None = None,
    tgt_lang: str | None = None,
    source_prefix: str | None = None,
    unknown_target: str | None = None,
    **options: Any,
) -> Plan:
    """Resolves how a call of `decode` decodes; arguments and errors are those of `decode`."""
    languages = {"src_lang": src_lang, "tgt_lang": tgt_lang, "source_prefix": source_prefix}
    _check_names(backend, options)
    barred = Spelling.of(tokenizer, backend.generation_config, unknown_target).barred
    with set_languages(tokenizer, backend, options, (), 0, **languages) as (_, options):
        return backend.plan(options, n_best, alignments, barred)


def _check_names(backend: Backend, options: dict[str, Any]) -> None:
    """Raises `TypeError` for an option, or one of a `generation_config` among them, with a name that nothing reads.

    transformers finds the former only when it decodes, and the latter never.
    """
    of_config = [name for name in settings_in(options.get("generation_config")) if not name.startswith("_")]
    known = {*backend.option_names, *settings_in(backend.generation_config)}
    for name in (*options, *of_config):
        if name not in known:
            known.update(signature(decode).parameters)
            raise TypeError(f"there is no option {name!r}{did_you_mean(name, known)}")


def _search(backend: Backend, job: DecodingJob, wanted: list[int]) -> Iterator[Found]:
    """Searches for as many different texts of each segment as are wanted, with more beams for those that lack some."""
    lists: dict[int, list[Translation]] = {place: [] for place in range(len(job.segments))}
    widths = [
        min(times * job.plan.num_beams, LARGEST["num_beams"]) for times in ((1, 2, 4) if job.has_scores else (1,))
    ]
    for number, width in enumerate(widths, start=1):
        left = list(lists)
        plan = replace(job.plan, num_beams=width, num_hypotheses=width) if number > 1 else job.plan
        for numbers, rows in backend.search(replace(job, segments=[job.segments[place] for place in left], plan=plan)):
            places = [left[number] for number in numbers]
            for place, row in zip(places, rows, strict=True):
                lists[place] = _different([*lists[place], *row])
            ready = [place for place in places if number == len(widths) or len(lists[place]) >= wanted[place]]
            yield ready, [lists.pop(place)[: wanted[place]] for place in ready]


def _different(translations: list[Translation]) -> list[Translation]:
    """Returns the best translation of each text, the best first."""
    found: dict[str, Translation] = {}
    for one in sorted(translations, key=lambda one: -(one.score or 0.0)):
        found.setdefault(one.text, one)
    return list(found.values())


def _joined(parts: list[tuple[str, list[Translation]]], end: str) -> Translation:
    # Scores of several searches add up to no score of one.
    text = join_segments([(gap, rows[0].text) for gap, rows in parts])
    best = [rows[0] for _, rows in parts]
    unknown = sum(one.num_unknown for one in best)
    return Translation(text + end, sum(one.num_tokens for one in best), num_unknown=unknown)


def _warn_of_division(limit: int, index: int, count: int) -> None:
    logger.warning(f"sentences[{index}] has more than {limit:,} tokens and is translated in {count} pieces.")


def _without_unknown(
    tokenizer: "PreTrainedTokenizerBase", texts: list[str], segments: list[Segment], how: str, first: int, begin: str
) -> list[Segment]:
    """Warns of unknown symbols in the segments of texts, leaves them out, or raises `ValueError`.

    A segment of which only the beginning is left, its text's own code or else `begin`, has no tokens then.
    """
    if how not in UNKNOWN:
        raise ValueError(f"unknown is {how!r}; give one of {', '.join(UNKNOWN)}")
    number = getattr(tokenizer, "unk_token_id", None)
    having = [] if number is None else [segment for segment in segments if number in segment.token_ids]
    if not having:
        return segments
    from ..data.symbols import shown, unknown_symbols, warn_of_unknown  # it needs transformers

    if how == "error":
        text = having[0].text
        found = shown(unknown_symbols(tokenizer, [texts[text]]))
        raise ValueError(f"sentences[{first + text}] has {found}; correct it, or give unknown keep or ignore")
    if how == "keep":
        warn_of_unknown(tokenizer, [texts[one.text] for one in having], [one.token_ids for one in having])
        return segments
    read, spelled = encoder(tokenizer), partial(tokenizer.decode, skip_special_tokens=True, use_source_tokenizer=True)
    left = []
    for one in segments:
        ids = [token for token in one.token_ids if token != number]
        is_changed, code = len(ids) < len(one.token_ids), own_code(tokenizer, texts[one.text])
        if is_changed and spelled(ids).strip() == spelled(read([code[1] if code else begin])[0]).strip():
            ids = []
        left.append(one._replace(token_ids=ids))
    return left


def _prefix_tokens(
    plan: Plan, tokenizer: "PreTrainedTokenizerBase", prefix: str | Sequence[str] | None, count: int
) -> list[tuple[int, ...]]:
    """Returns the tokens that the decoder begins with, for each text; none where the model is free to begin."""
    if prefix is None:
        return [()] * count
    given = [prefix] * count if isinstance(prefix, str) else texts_of("prefix", prefix)
    if len(given) != count:
        raise ValueError(f"prefix has {len(given)} strings for {count} sentences; give one for each, or one string")
    start, whole = () if plan.start is None else (plan.start,), target_encoder(plan, tokenizer)
    known: dict[str, tuple[int, ...]] = {}
    special_ids = set(tokenizer.all_special_ids)
    if getattr(tokenizer, "separate_vocabs", False):  # whose unknown tokens have ids of their own
        from ..data.symbols import unknown_ids  # it needs transformers

        named = [getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")]
        special_ids = {one for one in (*named, unknown_ids(tokenizer)[1]) if one is not None}
    read = encoder(tokenizer, is_target=True, add_special_tokens=False)
    for text in dict.fromkeys(given):
        ids = read([text.rstrip()])[0]
        if special := set(ids) & special_ids:
            shown = ", ".join(tokenizer.convert_ids_to_tokens(sorted(special)))
            raise ValueError(f"the prefix {text!r} becomes {shown} for the tokenizer; leave out what it doesn't know")
        (target,) = whole([text.rstrip()])
        known[text] = (*start, *target[: _place(target, ids)], *ids) if ids else ()
    return [known[text] for text in given]


def target_encoder(plan: Plan, tokenizer: "PreTrainedTokenizerBase") -> Encode:
    """Returns the function that tokenizes targets as in training, but that a forced token is the first of them."""
    whole, bare = (encoder(tokenizer, is_target=True, add_special_tokens=adds) for adds in (True, False))
    if (forced := plan.forced_begin) is None:
        return whole
    return lambda texts: [
        [forced, *row[_place(row, own) > 0 :]] for row, own in zip(whole(texts), bare(texts), strict=True)
    ]


def _place(ids: list[int], text: list[int]) -> int:
    """Returns where the tokens of a text are among those of a complete target."""
    ends = [*text, *ids[-1:]]
    return next((place for place in range(len(ids)) if ids[place : place + len(ends)] == ends), 0)


def source_limit(
    model: "PreTrainedModel | Backend",
    max_tokens: int | None = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
) -> int:
    """Returns how many tokens a source may have to be translated as one.

    It is `max_tokens`, or else the tokenizer's `model_max_length`, at most 1,024; or the model's number of positions if
    that is less: the size of a learned table, or another architecture's `max_position_embeddings`. The paper's
    sinusoids have no end.
    """
    limit = max_tokens
    if limit is None:
        limit = min(MAX_SOURCE_TOKENS, int(getattr(tokenizer, "model_max_length", MAX_SOURCE_TOKENS)))
    positions = model.positions if isinstance(model, Backend) else positions_in(model.config)
    return limit if positions is None else min(limit, positions)


def texts_of(name: str, values: Iterable[str], first: int = 0) -> list[str]:
    """Lists the sentences that a caller gives; errors call them `name` and count from `first`.

    One string, a set, a dictionary or None, or an item that is not a string, raises `TypeError`.
    """
    check_texts(name, values)
    texts = list(values)
    for index, text in enumerate(texts, start=first):
        if not isinstance(text, str):
            raise TypeError(f'{name}[{index}] is {_kind(text)}; give strings, "" for a missing one')
    return texts


def check_texts(name: str, values: object) -> None:
    """Raises `TypeError` for one string, a set, a dictionary, or what can't be iterated over."""
    if isinstance(values, str | bytes):
        raise TypeError(f"{name} is a string; give a list of strings, [text] for a single one")
    is_iterable = isinstance(values, Iterable) or hasattr(values, "__getitem__")  # a data set of torch has no __iter__
    if isinstance(values, Mapping | set | frozenset) or not is_iterable:
        raise TypeError(f"{name} is {_kind(values)}; give strings in an order, for instance a list of strings")


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def check_model(model: "PreTrainedModel | Backend") -> None:
    """Raises `ValueError` for a model in training mode."""
    if model.training:
        raise ValueError("the model is in training mode, where dropout changes its output; call model.eval() first")
