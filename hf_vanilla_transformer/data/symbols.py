"""Tokenizers of any symbols: words, characters, graphemes or bytes, for one side or both; and symbols they don't know.

They are made of the tokenizers library's parts, so that AutoTokenizer loads them.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..tokenization_source_target import SourceTargetTokenizerFast
from ..tokenization_vanilla_transformer import BYTE_OF_LETTER, CONTROL_TOKENS, VanillaTransformerTokenizerFast

UNKNOWN = "<unk>"
SPECIAL_TOKENS = (*CONTROL_TOKENS.values(), UNKNOWN)  # ids 0 to 3
# A feature of the source, behind a tab: one symbol, whatever it is spelled with.
FEATURE = r"\t[^\t]+"
SYMBOLS = {"words": r"\S+", "characters": r"[\s\S]", "graphemes": r"\X"}
KINDS = ("bpe", *SYMBOLS, "bytes")
# What ends features in a column, "V;PST": written as tabs, wherever the text has a tab before.
END_OF_FEATURE = r"(?:\t|(?!\A)\G)[^;]*\K;"
# Parts the ">" from "</s" and its like: a word of the data isn't a special token.
SPECIAL_TOKEN_END = r"(?<=<pad|<s|</s|<unk)>"
NORMAL_FORMS = {name: getattr(normalizers, name.upper()) for name in ("nfc", "nfd", "nfkc", "nfkd")}
SHOWN = 10  # symbols in a message
MOST_WARNINGS = 1_000  # unknown symbols that are logged by a process

logger = logging.getLogger(__name__)
_logged: set[tuple[str, bool, str]] = set()  # tokenizer, side, symbol


def train_tokenizer(
    pairs: Iterable[Mapping[str, str]],  # the texts "source" and "target"
    kinds: Sequence[str] = ("bpe",),  # for both sides, or two, for source and target with vocabularies of their own
    *,
    vocab_size: int = 37_000,  # most tokens of a vocabulary, special ones included; the most frequent are kept
    min_frequency: int | None = None,  # of a symbol to be known (None: 1), and of a pair of "bpe" to be merged (2)
    merge_punctuation: bool = True,  # whether a token of "bpe" may join words and punctuation
    features: bool = False,  # whether sources have features
    source_normalization: str | None = None,  # Unicode's normal form of sources, a key of `NORMAL_FORMS`
    show_progress: bool = False,  # of "bpe"
) -> PreTrainedTokenizerFast:
    r"""Makes the tokenizer of a corpus: one for both sides, or one for the source and one for the target.

    - "words": what white space separates. Decoding writes a space between two of them.
    - "characters": each code point, spaces too. `decode(encode(text)) == text`, as for the kinds that follow.
    - "graphemes": each character as a reader sees it, with its combining marks (Unicode's extended clusters).
    - "bytes": the 256 bytes of UTF-8; nothing is unknown.
    - "bpe": the paper's (5.1); nothing is unknown.

    Features are one symbol each, behind a tab or, after the first, a semicolon: "walk\tV;PST". With the normal form
    "nfd", Korean syllables are read as their letters.

    Returns:
        For one kind, a PreTrainedTokenizerFast ("bpe" and "bytes": a VanillaTransformerTokenizerFast); for two, a
        SourceTargetTokenizerFast.

    Raises:
        ValueError: There is no such kind or form, a number is too small, there is no text, or the kind of the sources
            has no features or normal forms.
    """
    check_kinds(kinds, features, source_normalization)
    pairs = list(pairs) if iter(pairs) is pairs else pairs  # a generator is read once
    sides = [("source", "target")] if len(kinds) == 1 else [("source",), ("target",)]
    backends = []
    for kind, names in zip(kinds, sides, strict=True):
        texts = (pair[name] for pair in pairs for name in names)
        if kind in SYMBOLS:
            is_source = "source" in names
            pattern = f"{FEATURE}|{SYMBOLS[kind]}" if features and is_source else SYMBOLS[kind]
            form = NORMAL_FORMS[source_normalization]() if source_normalization and is_source else None
            backend = _symbols(pattern, kind == "words", form, features and is_source)
            fewest = 1 if min_frequency is None else min_frequency
            backends.append(_with_vocabulary(backend, texts, vocab_size, fewest))
            continue
        smallest = len(CONTROL_TOKENS) + len(BYTE_OF_LETTER)
        own = VanillaTransformerTokenizerFast.train_from_iterator(
            texts,
            vocab_size=smallest if kind == "bytes" else vocab_size,
            min_frequency=2 if min_frequency is None else min_frequency,
            merge_punctuation=merge_punctuation,
            show_progress=show_progress,
        )
        if len(kinds) == 1:
            return own
        backends.append(own.backend_tokenizer)
    special = {**CONTROL_TOKENS, **({"unk_token": UNKNOWN} if kinds[0] in SYMBOLS else {})}
    if len(backends) == 1:
        return PreTrainedTokenizerFast(tokenizer_object=backends[0], split_special_tokens=True, **special)
    source, target = backends
    return SourceTargetTokenizerFast(
        tokenizer_object=source, target_tokenizer_object=target, split_special_tokens=True, **special
    )


def check_kinds(kinds: Sequence[str], features: bool = False, source_normalization: str | None = None) -> None:
    """Raises `ValueError` for kinds of tokenizers that `train_tokenizer` can't make, before any data is read."""
    if not 1 <= len(kinds) <= 2 or not set(kinds) <= set(KINDS):
        raise ValueError(f"tokenizer is {' '.join(map(str, kinds))}; give one or two of: {', '.join(KINDS)}")
    if (features or source_normalization) and kinds[0] not in SYMBOLS:
        what = "source_normalization" if source_normalization else "feature_columns"
        raise ValueError(f"{what} needs sources of {', '.join(SYMBOLS)}, not of {kinds[0]}; leave it out")
    if source_normalization and (source_normalization not in NORMAL_FORMS or len(kinds) == 1):
        raise ValueError(
            f"source_normalization is {source_normalization!r} for a tokenizer of {' '.join(kinds)}; give one of "
            f"{', '.join(NORMAL_FORMS)}, and a kind for each side, as targets aren't changed"
        )


def _symbols(pattern: str, is_words: bool, form: normalizers.Normalizer | None, features: bool) -> Tokenizer:
    """A backend without a vocabulary: text -> symbols, and back."""
    backend = Tokenizer(models.WordLevel({UNKNOWN: 0}, unk_token=UNKNOWN))
    changes = [form] if form is not None else []
    changes += [normalizers.Replace(Regex(END_OF_FEATURE), "\t")] if features else []
    if changes:
        backend.normalizer = normalizers.Sequence(changes)
    if is_words:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "removed", invert=True),
                pre_tokenizers.Split(Regex(SPECIAL_TOKEN_END), "isolated"),
            ]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
        backend.decoder = decoders.Fuse()
    return backend


def _with_vocabulary(backend: Tokenizer, texts: Iterable[str], vocab_size: int, min_frequency: int) -> Tokenizer:
    """The backend with the symbols of texts, the most frequent ones first."""
    if vocab_size <= len(SPECIAL_TOKENS) or min_frequency < 1:
        raise ValueError(
            f"vocab_size is {vocab_size} and min_frequency {min_frequency}; give more than {len(SPECIAL_TOKENS)}, the "
            "number of special tokens, and 1 or more"
        )
    counts = Counter(chain.from_iterable(map(_splitter(backend), texts)))
    known = sorted(
        (symbol for symbol, count in counts.items() if count >= min_frequency), key=lambda s: (-counts[s], s)
    )
    if not known:
        raise ValueError(f"no symbol occurs {min_frequency} times in the training data; give a lower min_frequency")
    names = (*SPECIAL_TOKENS, *known[: vocab_size - len(SPECIAL_TOKENS)])
    backend.model = models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=UNKNOWN)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS])
    end = CONTROL_TOKENS["eos_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=["$A", end], pair=["$A", "$B:1", end], special_tokens=[(end, backend.token_to_id(end))]
    )
    return backend


Splitter = Callable[[str], list[str]]  # text -> its symbols


def _splitter(backend: Tokenizer) -> Splitter:
    normalizer, pre_tokenizer = backend.normalizer, backend.pre_tokenizer

    def split(text: str) -> list[str]:
        text = text if normalizer is None else normalizer.normalize_str(text)
        return [symbol for symbol, _ in pre_tokenizer.pre_tokenize_str(text)]

    return split


def _backend_of(tokenizer: PreTrainedTokenizerBase, is_target: bool) -> Tokenizer | None:
    """The part of a tokenizer that reads one side, if it numbers symbols; None for any other."""
    backend = getattr(tokenizer, "_target_backend" if is_target else "_source_backend", None)
    backend = backend or getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.model, models.WordLevel) or backend.pre_tokenizer is None:
        return None
    return backend


def reads_features(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether what follows a tab in a source is one symbol to a tokenizer."""
    backend, feature = _backend_of(tokenizer, False), "\tV;PST"
    return backend is not None and _splitter(backend)(f"a{feature}")[1:] == ["\tV", "\tPST"]


def default_measures(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns what a tokenizer's translations are measured by: of words or characters, other than of BPE's pieces."""
    return ["bleu", "chrf"] if symbol_splitter(tokenizer) is None else ["exact_match", "ser"]


def symbol_splitter(tokenizer: PreTrainedTokenizerBase) -> Splitter | None:
    """Returns what divides targets into the tokenizer's symbols, known or not; None for a tokenizer of pieces.

    The unknown token is one symbol, whatever it is spelled with.
    """
    if (backend := _backend_of(tokenizer, True)) is None:
        return None
    split, unknown = _splitter(backend), backend.model.unk_token
    return lambda text: split(text.replace(unknown, "\ufffc"))


def unknown_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None]:
    """Returns the ids that stand for unknown symbols of a source and of a target; None: nothing is unknown."""
    own = getattr(tokenizer, "unk_token_id", None)
    backends = [_backend_of(tokenizer, is_target) for is_target in (False, True)]
    if not any(backends):
        return own, own
    source, target = (None if one is None else one.token_to_id(one.model.unk_token) for one in backends)
    return source, target


def unknown_symbols(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], is_target: bool = False) -> Counter[str]:
    """Returns the symbols of texts that a tokenizer doesn't know, with their numbers; of bytes, none are unknown."""
    if backend := _backend_of(tokenizer, is_target):
        known, split = backend.get_vocab(), _splitter(backend)
        return Counter(symbol for text in texts for symbol in split(text) if symbol not in known)
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None:
        return Counter()
    found: Counter[str] = Counter()
    for text in texts:
        if is_target:
            found.update(_unknown_in_target(tokenizer, text))
            continue
        pieces = tokenizer.tokenize(text)
        found.update(p for p, i in zip(pieces, tokenizer.convert_tokens_to_ids(pieces), strict=True) if i == unknown)
    return found


def _unknown_in_target(tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """Returns the unknown characters of a target; of a word whose characters alone are all unknown, the word."""

    def is_unknown(part: str) -> bool:
        return tokenizer.unk_token_id in tokenizer(text_target=part)["input_ids"]

    found = []
    for word in filter(is_unknown, text.split()):
        characters = [one for one in word if is_unknown(one)]
        found += characters if len(characters) < len(word) else [word]
    return found


def warn_of_unknown(
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    rows: Iterable[Sequence[int] | None],
    is_target: bool = False,
) -> None:
    """Logs the symbols of texts that a tokenizer doesn't know, each once in a process; `rows` are the texts' ids."""
    unknown = unknown_ids(tokenizer)[is_target]
    if unknown is None:
        return
    having = [text for text, ids in zip(texts, rows, strict=True) if ids and unknown in ids]
    found = unknown_symbols(tokenizer, having, is_target)
    name = str(getattr(tokenizer, "name_or_path", ""))
    new = Counter({symbol: count for symbol, count in found.items() if (name, is_target, symbol) not in _logged})
    if new and len(_logged) < MOST_WARNINGS:
        _logged.update((name, is_target, symbol) for symbol in new)
        logger.warning(f"the {'target' if is_target else 'source'} has {shown(new)}")


def shown(symbols: Counter[str]) -> str:
    """Lists symbols for a message, the most frequent first: "12 unknown symbols, 'x' (7), 'y' (5)"."""
    first = ", ".join(f"{symbol!r} ({count:,})" for symbol, count in symbols.most_common(SHOWN))
    number = symbols.total()
    more = ", ..." if len(symbols) > SHOWN else ""
    return f"{number:,} unknown symbol{'' if number == 1 else 's'}: {first}{more}"


__all__ = ["KINDS", "train_tokenizer", "unknown_symbols"]
