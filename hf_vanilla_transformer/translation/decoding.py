"""Translating many sentences by a `Call`: batches by length, n-best lists, alignments."""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

from ..plan_vanilla_transformer import Plan
from .backend import LARGEST, Alignment, Backend, Call, Found, Translation, check_model
from .ctranslate2_folder import PieceTokenizer
from .division import join_segments
from .languages import own_code
from .reading import Encode, Namer, Segment, encode_within, encoder, read_segments, without_empty
from .spelling import unknown_of_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

LEAST_SCORE = -1e8  # of a hypothesis: places that hold none have transformers' -1e9
TEXTS_AT_ONCE = 1_000  # that are tokenized at a time

Names = tuple[Namer, Namer]  # of the tokens of a source, and of a target


def backend_of(model: "PreTrainedModel | Backend", tokenizer: "PreTrainedTokenizerBase") -> Backend:
    """Returns what decodes with a model."""
    if isinstance(model, Backend):
        return model
    from .engine_backend import EngineBackend  # it needs torch and transformers

    return EngineBackend(model, tokenizer)


def translate(call: Call, texts: list[str], first: int = 0) -> list[list[Translation]]:
    """Translates texts; `first` is the index of the first one, for errors and `on_division`.

    Each text has one translation, or `n_best`, the best first (fewer where the search found no more). That of an empty
    text is empty, of no tokens and score 0. A text that is divided or split has one, without a score or an alignment:
    the best of each piece, joined.
    """
    check_model(call.backend)  # of a stream, at each window
    segments, gaps = _read(call, texts, first)
    left = Counter(segment.text for segment in segments)  # segments of each text that aren't translated yet
    call.progress(len(texts) - len(left))
    found: dict[int, list[Translation]] = {}
    wanted = [call.n_best or 1 if left[segment.text] == 1 else 1 for segment in segments]
    for places, translations in _search(call, segments, wanted):
        found.update(zip(places, translations, strict=True))
        left.subtract(segments[place].text for place in places)
        call.progress(sum(left[text] == 0 for text in {segments[place].text for place in places}))
    results = [[Translation("", 0, None if call.n_best is None else 0.0)] for _ in texts]
    for text, group in groupby(range(len(segments)), key=lambda place: segments[place].text):
        parts = [(segments[place].gap, found[place]) for place in group]
        end = gaps.get(text, "") + texts[text][len(texts[text].rstrip()) :] if call.split_sentences else ""
        alone = [replace(one, text=parts[0][0] + one.text + end) for one in parts[0][1]]
        results[text] = alone if len(parts) == 1 else [_joined(parts, end)]
    call.spelling.warn([one.num_unknown for row in results for one in row])
    return results


# ---- Reading ----
def _read(call: Call, texts: list[str], first: int) -> tuple[list[Segment], dict[int, str]]:
    """Returns the segments of texts, and the white space before the empty ones that a text ends with."""
    call.languages.check(call.tokenizer, texts, first)
    segments: list[Segment] = []
    tell = call.on_division or partial(_warn_of_division, call.limit)
    with call.languages.read_by(call.tokenizer):
        prefixes = _prefix_tokens(call, len(texts))
        for place in range(0, len(texts), TEXTS_AT_ONCE):
            some = dict(enumerate(texts[place : place + TEXTS_AT_ONCE], place))
            begin, rules = call.languages.begin, call.split_sentences
            read, divided = read_segments(call.tokenizer, some, call.limit, begin, rules)
            segments += read
            for index, count in divided.items():
                tell(first + index, count)
    segments, gaps = without_empty(_without_unknown(call, texts, segments, first))
    for place, segment in enumerate(segments):
        if not place or segments[place - 1].text != segment.text:
            segments[place] = segment._replace(prefix=prefixes[segment.text])
    return segments, gaps


def _warn_of_division(limit: int, index: int, count: int) -> None:
    logger.warning(f"sentences[{index}] has more than {limit:,} tokens and is translated in {count} pieces.")


def _without_unknown(call: Call, texts: list[str], segments: list[Segment], first: int) -> list[Segment]:
    """Warns of unknown symbols in the segments of texts, leaves them out, or raises `ValueError`.

    A segment of which only the beginning is left, its text's own code or else the call's, has no tokens then.
    """
    tokenizer = call.tokenizer
    number = getattr(tokenizer, "unk_token_id", None)
    having = [] if number is None else [segment for segment in segments if number in segment.token_ids]
    if not having:
        return segments
    if call.unknown == "keep" and isinstance(tokenizer, PieceTokenizer):  # which needs no transformers
        count = sum(token == number for one in having for token in one.token_ids)
        logger.warning(f"the source has {count:,} unknown token{'' if count == 1 else 's'}")
        return segments
    from ..data.symbols import shown, unknown_symbols, warn_of_unknown  # it needs transformers

    if call.unknown == "error":
        text = having[0].text
        found = shown(unknown_symbols(tokenizer, [texts[text]]))
        raise ValueError(f"sentences[{first + text}] has {found}; correct it, or give unknown keep or ignore")
    if call.unknown == "keep":
        warn_of_unknown(tokenizer, [texts[one.text] for one in having], [one.token_ids for one in having])
        return segments
    read, spelled = encoder(tokenizer), partial(tokenizer.decode, skip_special_tokens=True, use_source_tokenizer=True)
    left = []
    for one in segments:
        ids = [token for token in one.token_ids if token != number]
        is_changed, code = len(ids) < len(one.token_ids), own_code(tokenizer, texts[one.text])
        begin = code[1] if code else call.languages.begin
        if is_changed and spelled(ids).strip() == spelled(read([begin])[0]).strip():
            ids = []
        left.append(one._replace(token_ids=ids))
    return left


def _prefix_tokens(call: Call, count: int) -> list[tuple[int, ...]]:
    """Returns the tokens that the decoder begins with, for each text; none where the model is free to begin."""
    prefix, plan, tokenizer = call.prefix, call.plan, call.tokenizer
    if prefix is None:
        return [()] * count
    given = [prefix] * count if isinstance(prefix, str) else texts_of("prefix", prefix)
    if len(given) != count:
        raise ValueError(f"prefix has {len(given)} strings for {count} sentences; give one for each, or one string")
    start, whole = () if plan.start is None else (plan.start,), target_encoder(plan, tokenizer)
    known: dict[str, tuple[int, ...]] = {}
    special_ids = set(tokenizer.all_special_ids)
    if getattr(tokenizer, "separate_vocabs", False):  # whose unknown tokens have ids of their own
        named = [getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")]
        special_ids = {one for one in (*named, unknown_of_target(tokenizer)) if one is not None}
    read = encoder(tokenizer, is_target=True, add_special_tokens=False)
    for text in dict.fromkeys(given):
        ids = read([text.strip()])[0]
        if special := set(ids) & special_ids:
            shown = ", ".join(tokenizer.convert_ids_to_tokens(sorted(special)))
            raise ValueError(f"the prefix {text!r} becomes {shown} for the tokenizer; leave out what it doesn't know")
        (target,) = whole([text.strip()])
        known[text] = (*start, *target[: _place(target, ids)], *ids) if ids else ()
    return [known[text] for text in given]


def read_pairs(
    call: Call, sources: list[str], targets: list[str]
) -> tuple[list[list[int] | None], list[list[int] | None]]:
    """Returns the tokens of complete sources and of targets as in training; None: more than the call's limit."""
    tokenizer, begin = call.tokenizer, call.languages.begin
    call.languages.check(tokenizer, sources)
    begun = [text if own_code(tokenizer, text) else begin + text for text in sources]
    with call.languages.read_by(tokenizer):
        read, written = encoder(tokenizer), target_encoder(call.plan, tokenizer)
        return encode_within(read, begun, call.limit), encode_within(written, targets, call.limit)


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
    """Raises `TypeError` for one string, a set, a dictionary, a table, or what can't be iterated over."""
    if isinstance(values, str | bytes):
        raise TypeError(f"{name} is a string; give a list of strings, [text] for a single one")
    is_iterable = isinstance(values, Iterable) or hasattr(values, "__getitem__")  # a data set of torch has no __iter__
    is_table = getattr(values, "ndim", 1) != 1  # one of pandas would give the names of its columns
    if isinstance(values, Mapping | set | frozenset) or is_table or not is_iterable:
        raise TypeError(f"{name} is {_kind(values)}; give strings in an order, for instance a list of strings")


def _kind(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


# ---- Searching ----
def _search(
    call: Call, segments: list[Segment], wanted: list[int]
) -> Iterator[tuple[list[int], list[list[Translation]]]]:
    """Searches for as many different texts of each segment as are wanted, with more beams for those that lack some."""
    lists: dict[int, list[Translation]] = {place: [] for place in range(len(segments))}
    last = 1 if call.n_best is None else 4
    names = call.backend.namers(call.tokenizer) if call.plan.alignments else None
    for times in (1, 2, 4)[:last]:
        width, left = min(times * call.plan.num_beams, LARGEST["num_beams"]), list(lists)
        wider = replace(call, plan=replace(call.plan, num_beams=width, num_hypotheses=width)) if times > 1 else call
        for numbers, rows in call.backend.search(wider, [segments[place] for place in left]):
            places = [left[number] for number in numbers]
            for place, row in zip(places, rows, strict=True):
                lists[place] = _different([*lists[place], *_translations(call, names, segments[place], row)])
            ready = [place for place in places if times == last or len(lists[place]) >= wanted[place]]
            yield ready, [lists.pop(place)[: wanted[place]] for place in ready]


def _different(translations: list[Translation]) -> list[Translation]:
    """Returns the best translation of each text, the best first."""
    found: dict[str, Translation] = {}
    for one in sorted(translations, key=lambda one: -(one.score or 0.0)):
        found.setdefault(one.text, one)
    return list(found.values())


def _translations(call: Call, names: Names | None, segment: Segment, row: list[Found]) -> Iterator[Translation]:
    """Yields what was found for a segment: the best, or all with their scores."""
    for number, one in enumerate(row if call.n_best is not None else row[:1]):
        # A beam search with fewer hypotheses than places fills the list up.
        if number == 0 or (one.score is not None and one.score > LEAST_SCORE):
            prefix = segment.prefix[int(call.plan.start is not None) :]
            text, unknown = call.spelling.text((*prefix, *one.tokens)), call.spelling.count(one.tokens)
            score, alignment = None if call.n_best is None else one.score, _alignment(names, segment, one)
            yield Translation(text, len(one.tokens), score, alignment, unknown)


def _alignment(names: Names | None, segment: Segment, found: Found) -> Alignment | None:
    if names is None or found.attention is None:
        return None
    written, read = found.attention.shape
    source, target = segment.token_ids[:read], found.tokens[:written]
    return Alignment(tuple(names[0](source)), tuple(names[1](target)), found.attention, tuple(source), tuple(target))


def _joined(parts: list[tuple[str, list[Translation]]], end: str) -> Translation:
    # Scores of several searches add up to no score of one.
    text = join_segments([(gap, rows[0].text) for gap, rows in parts])
    best = [rows[0] for _, rows in parts]
    unknown = sum(one.num_unknown for one in best)
    return Translation(text + end, sum(one.num_tokens for one in best), num_unknown=unknown)
