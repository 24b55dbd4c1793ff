# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of checkpoints converted from fairseq, OpenNMT-py and JoeyNMT: a dictionary numbers pieces of words.

The pieces are those of subword-nmt, or of SentencePiece (BPE and unigram models), without those packages.
"""

import base64
import heapq
import json
import os
import threading
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from math import inf
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import BatchEncoding, PreTrainedTokenizerFast
from transformers.utils import to_py_obj

from .tokenization_opus_mt import (
    EXPANSION,
    LONGEST_CHECKED,
    LONGEST_WORD,
    SPACE,
    Charsmap,
    Mode,
    Unigram,
    Words,
    check_texts,
    mapped,
)

SEPARATOR = "@@"  # behind all pieces of a word but the last, in subword-nmt
END = "</w>"  # of a word, in subword-nmt's codes
SIDES = ("source", "target")

_LOCK = threading.RLock()  # padding and truncation are settings of the backend, which one call after the other changes


class DictionaryTokenizerFast(PreTrainedTokenizerFast):
    """Gives the ids that subword-nmt or SentencePiece gives together with a toolkit's dictionary.

    `tokenizer(texts)` reads the source language, `tokenizer(text_target=texts)` the target language. Pieces that aren't
    in the dictionary are unknown. `</s>` ends sequences; with `source_eos=False`, only the target's.

    Texts are segmented as they are: a model that was trained on the output of Moses' tokenizer wants its input in that
    form, and translates into it. Special tokens within a text are plain text.

    Backends get the pieces instead of the text, so there are no offsets, nor what depends on them (`char_to_token`).
    Calls from several threads don't disturb each other.
    """

    vocab_files_names = {"segmentation_file": "segmentation.json"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Opens the two sides.

        Args:
            *args: For the base class.
            **kwargs: `segmentation_file` or `segmentation` (its content: for "source" and "target", the `tokens` in the
                order of ids and the `segmenter`); `source_eos`; and options of the base class, special tokens among
                them.
        """
        file, content = kwargs.pop("segmentation_file", None), kwargs.pop("segmentation", None)
        for name in ("vocab_file", "tokenizer_file"):
            kwargs.pop(name, None)
        if content is None:
            if file is None or not os.path.isfile(file):
                raise ValueError("segmentation.json is missing, which has the dictionaries and how words are segmented")
            with open(file, encoding="utf-8") as opened:
                content = json.load(opened)
        self._content: dict[str, Any] = content
        self._mode = Mode()
        unknown, end = (str(kwargs[name]) for name in ("unk_token", "eos_token"))
        self.source_eos = bool(kwargs.get("source_eos", True))
        self._sides = [
            _Side(**content["source"], unk_token=unknown, eos_token=end, ends=self.source_eos),
            _Side(**content["target"], unk_token=unknown, eos_token=end, ends=True),
        ]
        self.separate_vocabs = self._sides[0].tokens != self._sides[1].tokens
        super().__init__(*args, **kwargs)

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        """Leaves the file to `__init__`."""
        return kwargs

    @property
    def can_save_slow_tokenizer(self) -> bool:
        """False: transformers would save this class under another name otherwise."""
        return False

    # The two sides. Transformers' methods all use `_tokenizer`, which is the one of the current side.

    @property
    def _side(self) -> "_Side":
        return self._sides[self._mode.target]

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._side.backend

    @_tokenizer.setter
    def _tokenizer(self, backend: Tokenizer) -> None:
        if backend is not self._tokenizer:
            raise AttributeError("the backends of this tokenizer can't be replaced: convert the model again")

    def _switch_to_input_mode(self) -> None:
        self._mode.target = False

    def _switch_to_target_mode(self) -> None:
        self._mode.target = True

    # The vocabulary

    @property
    def vocab_size(self) -> int:
        """Entries of the dictionary (the source's, if there are two)."""
        return len(self._sides[0].tokens)

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Returns token -> id (the source's, if there are two dictionaries)."""
        return dict(self._sides[0].ids)

    @property
    def content(self) -> list[Any]:
        """All that ids and texts depend on."""
        return [self._content[side] for side in SIDES] + [self.source_eos]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Names ids: a string for an integer, otherwise a list. With two dictionaries, the target's decides.

        Args:
            ids: An id, or any sequence of ids.
            skip_special_tokens: Whether special tokens are left out of a list.

        Raises:
            ValueError: An id isn't in the dictionary.
        """
        ids = to_py_obj(ids)
        if isinstance(ids, int):
            return self._convert_id_to_token(ids)
        return self._names(ids, skip_special_tokens, self._sides[1])

    def _names(self, ids: Iterable[int], skip_special_tokens: bool, side: "_Side") -> list[str]:
        skipped, size = set(self.all_special_ids) if skip_special_tokens else (), len(side.tokens)
        numbers = [number for number in map(int, ids) if number not in skipped]
        if wrong := [number for number in numbers if not 0 <= number < size]:
            raise ValueError(
                f"token id {wrong[0]} isn't in the dictionary of {size:,}; "
                "put pad_token_id for the -100 of labels before you decode them"
            )
        return [side.tokens[number] for number in numbers]

    def _convert_id_to_token(self, index: int) -> str:
        return self._names([index], False, self._sides[1])[0]

    def _convert_token_to_id_with_added_voc(self, token: str) -> int:
        ids = self._side.ids
        return ids.get(token, ids[str(self._special_tokens_map["unk_token"])])

    def _add_tokens(self, new_tokens: list[str | AddedToken], special_tokens: bool = False) -> int:
        for token in map(str, new_tokens):
            if missing := [name for name, side in zip(SIDES, self._sides, strict=True) if token not in side.ids]:
                raise ValueError(
                    f"can't add {token!r}, which isn't in the dictionary of the {missing[0]}: a converted model's "
                    "dictionary can't grow"
                )
        return 0

    # From text to ids

    def __call__(self, *args: Any, **kwargs: Any) -> BatchEncoding:
        """Tokenizes texts of the source (`text`), the target (`text_target`), or both; as transformers' tokenizers."""
        try:
            return super().__call__(*args, **kwargs)
        finally:
            if not self._in_target_context_manager:
                self._switch_to_input_mode()  # after an error in a target text, too

    def tokenize(
        self, text: str, pair: str | None = None, add_special_tokens: bool = False, **kwargs: Any
    ) -> list[str]:
        """Returns the pieces of a text, unknown ones as they are.

        Args:
            text: The text.
            pair: A second one.
            add_special_tokens: Whether to add what ends a sequence.
            **kwargs: Are ignored.
        """
        check_texts(text, "text")
        side = self._side
        pieces = [piece for part in (text, pair) if part for piece in side.pieces(part)]
        return pieces + [self.eos_token] * (add_special_tokens and side.ends)

    def _encode_plus(self, text: Any, text_pair: Any = None, **kwargs: Any) -> BatchEncoding:
        check_texts(text, "text")
        check_texts("" if text_pair is None else text_pair, "text_pair")
        if kwargs.get("return_offsets_mapping"):
            raise NotImplementedError("this tokenizer has no offsets: it looks up the pieces of a text, not the text")
        if isinstance(text, (list, tuple)) and not (text or text_pair or kwargs.get("is_split_into_words")):
            return BatchEncoding({name: [] for name in self.model_input_names})
        # Strings of pieces with spaces between them, which the backend looks up.
        text, text_pair = (None if part is None else mapped(part, self._side.line) for part in (text, text_pair))
        with _LOCK:
            encoding = super()._encode_plus(text, text_pair, **kwargs)
        return BatchEncoding(dict(encoding))  # without the encodings, whose offsets would be those of the pieces

    # From ids to text

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text that the tokens spell, in the target language."""
        return self._sides[1].spell(tokens, set(self.all_special_tokens))

    def _decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        ids = to_py_obj(token_ids["input_ids"] if isinstance(token_ids, (dict, BatchEncoding)) else token_ids)
        side = self._sides[not kwargs.get("use_source_tokenizer", False)]
        tokens = self._names([ids] if isinstance(ids, int) else ids, skip_special_tokens, side)
        text = side.spell(tokens, set(self.all_special_tokens))
        clean = (
            self.clean_up_tokenization_spaces if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        )
        return self.clean_up_tokenization(text) if clean else text

    # Files

    def _save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        file_names: tuple[str, ...],
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
    ) -> tuple[str, ...]:
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        file = os.path.join(save_directory, prefix + self.vocab_files_names["segmentation_file"])
        with open(file, "w", encoding="utf-8") as opened:
            json.dump(self._content, opened, ensure_ascii=False)
        return (*file_names, file)

    def train_new_from_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Is refused: a trained model can't do anything with another vocabulary.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "the tokenizer of a converted model can't be trained anew; train a VanillaTransformerTokenizerFast for a "
            "new model"
        )


class _Side:
    """One language.

    Args:
        tokens: The dictionary in the order of ids; where a token occurs twice, the last has its id.
        segmenter: The arguments of `SubwordNMT`, or those of `SentencePiece`.
        unk_token: What is looked up for a piece that isn't in the dictionary.
        eos_token: What ends a sequence.
        ends: Whether sequences end with it.
    """

    def __init__(
        self, tokens: list[str], segmenter: dict[str, Any], unk_token: str, eos_token: str, ends: bool
    ) -> None:
        self._arguments = (tokens, segmenter, unk_token, eos_token, ends)
        self.tokens, self.ends = tokens, ends
        self.ids = {token: number for number, token in enumerate(tokens)}
        self.segmenter: SubwordNMT | SentencePiece = (
            SubwordNMT(**segmenter) if "merges" in segmenter else SentencePiece(**segmenter)
        )
        self.backend = Tokenizer(models.WordLevel(self.ids, unk_token))
        self.backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
        end = [eos_token] if ends else []
        self.backend.post_processor = processors.TemplateProcessing(
            single=["$A", *end], pair=["$A", "$B", *end], special_tokens=[(token, self.ids[token]) for token in end]
        )

    def __reduce__(self) -> Any:
        return _Side, self._arguments  # without the words that it remembers, on which a hash of it would depend

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text."""
        # The toolkits write pieces as a line of text, which they divide again: white space within pieces is lost.
        return " ".join(self.segmenter.pieces(text)).split()

    def line(self, text: str) -> str:
        """The pieces of a text with spaces between them."""
        return " ".join(self.pieces(text))

    def spell(self, tokens: list[str], special: set[str]) -> str:
        """The text that tokens spell; special ones are words of it."""
        return self.segmenter.spell(tokens, special)


# ---- subword-nmt ----
class SubwordNMT:
    """Byte-pair encoding of words (Sennrich et al. 2016), as subword-nmt's apply_bpe does it.

    Args:
        merges: The two parts of each merge, a space between them; the first come first.
        version: Of the codes. In 1, the end of a word is a symbol by itself; in 2 it belongs to the last character.
        vocabulary: Pieces, written with their separators, that alone may be given if they can be; None: any.
    """

    def __init__(self, merges: list[str], version: int, vocabulary: list[str] | None = None) -> None:
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        self.ranks = {pair: rank for rank, pair in reversed(list(enumerate(pairs)))}  # the first of equal ones counts
        self.parts = {left + right: (left, right) for left, right in self.ranks}
        self.version = version
        self.vocabulary = frozenset(vocabulary or ())
        self.words = Words(self)

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text, whose words are what spaces divide."""
        return list(chain.from_iterable(self.words[word][1] for word in text.strip("\r\n ").split(" ") if word))

    def word(self, word: str) -> tuple[float, tuple[str, ...]]:
        """The pieces of a word; the number isn't used."""
        if len(word) == 1:
            return inf, (word,)
        symbols = [*word, END] if self.version == 1 else [*word[:-1], word[-1] + END]
        while pair := min(pairwise(symbols), key=self._rank, default=None):
            if pair not in self.ranks:
                break
            symbols = _merged(symbols, pair)
        symbols = symbols[:-1] if symbols[-1] == END else [*symbols[:-1], symbols[-1].removesuffix(END)]
        if self.vocabulary:
            symbols = [part for n, s in enumerate(symbols, 1) for part in self._known_parts(s, n == len(symbols))]
        return inf, (*(symbol + SEPARATOR for symbol in symbols[:-1]), symbols[-1])

    def _rank(self, pair: tuple[str, str]) -> float:
        return self.ranks.get(pair, inf)

    def _known_parts(self, symbol: str, is_last: bool) -> Iterator[str]:
        """Takes merges back until all parts are in the vocabulary, or no merge is left."""
        if (symbol if is_last else symbol + SEPARATOR) in self.vocabulary:
            yield symbol
        elif parts := self.parts.get(symbol + END if is_last else symbol):
            yield from self._known_parts(parts[0], False)
            yield from self._known_parts(parts[1].removesuffix(END) if is_last else parts[1], is_last)
        else:
            yield symbol

    def spell(self, tokens: list[str], special: set[str]) -> str:
        """Joins the pieces of words."""
        return f"{' '.join(tokens)} ".replace(f"{SEPARATOR} ", "").rstrip()


def _merged(symbols: list[str], pair: tuple[str, str]) -> list[str]:
    """Joins a pair wherever it occurs, from the left."""
    merged, n = [], 0
    while n < len(symbols):
        length = 2 if (symbols[n], *symbols[n + 1 : n + 2]) == pair else 1
        merged.append("".join(symbols[n : n + length]))
        n += length
    return merged


# ---- SentencePiece ----
class SentencePiece:
    """A SentencePiece model.

    Args:
        model: "unigram" or "bpe".
        scores: Normal piece -> score.
        charsmap: The compiled table of normalisations, in base64.
        unused: Pieces that aren't given: BPE takes their merges back, a unigram model does without them.
    """

    def __init__(self, model: str, scores: dict[str, float], charsmap: str, unused: list[str]) -> None:
        self.charsmap = Charsmap(base64.b64decode(charsmap))
        self.model: Unigram | None = Unigram(scores, unused) if model == "unigram" else None
        # In 32 bits, as SentencePiece has them.
        self.scores = dict(zip(scores, array("f", scores.values()), strict=True))
        self.unused = frozenset(unused)
        # Whether a piece ends where a word ends, so that a word has the same pieces wherever it is.
        self.has_words = SPACE in scores and not any(SPACE in piece[1:] for piece in scores)
        self.words = Words(self)

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text: those of its words, where they can't depend on the rest of the text."""
        if len(text) <= LONGEST_CHECKED:
            words = [self.words[word] for word in text.split(" ")]
            slack = self.model.slack * (len(text) + 1) if self.model else 0.0
            if all(sure > slack for sure, _ in words):
                return [piece for _, pieces in words for piece in pieces]
        return self._read(text)[0]

    def word(self, word: str) -> tuple[float, tuple[str, ...]]:
        """How much worse any other way to cut a word is, per character (negative: it may depend on the text); pieces.

        Why that is asked: see `_Side.word` of OPUS-MT's tokenizer.
        """
        if not word:
            return inf, ()
        if not self.has_words or len(word) > LONGEST_WORD or SPACE in word:
            return -1.0, ()
        pieces, gap, length = self._read(word)
        return (gap / length if length <= EXPANSION * (len(word) + 1) else -1.0), tuple(pieces)

    def _read(self, text: str) -> tuple[list[str], float, int]:
        """The pieces of a text, by how much they are the best, and how many characters of normalised text it has."""
        text, _ = self.charsmap.normalize(text)
        if self.model is None:
            symbols, gap = self._byte_pairs(text), inf
            unknown = [symbol not in self.scores for symbol in symbols]
        else:
            cuts, unknown, gap = self.model.cut(text)
            symbols = [text[begin:end] for begin, end in pairwise(cuts)]
        joined: list[str] = []  # a run of unknown characters is one piece
        for n, symbol in enumerate(symbols):
            if n and unknown[n] and unknown[n - 1]:
                joined[-1] += symbol
            else:
                joined.append(symbol)
        return joined, gap, len(text) + 1

    def _byte_pairs(self, text: str) -> list[str]:
        """Joins the two neighbours that make the best piece, the leftmost of equal ones, until none make one."""
        size = len(text)
        ends, before = list(range(1, size + 1)), list(range(-1, size - 1))  # of the symbol that begins at a place
        parts: dict[str, tuple[str, str]] = {}  # of unused pieces
        queue: list[tuple[float, int, int, int]] = []  # the best first: score, and where its two symbols are

        def look(left: int, middle: int) -> None:
            if left >= 0 and middle < size:
                piece = text[left : ends[middle]]
                if (score := self.scores.get(piece)) is not None:
                    heapq.heappush(queue, (-score, left, middle, ends[middle]))
                    if piece in self.unused:
                        parts[piece] = text[left:middle], text[middle : ends[middle]]

        for place in range(1, size):
            look(place - 1, place)
        while queue:
            _, left, middle, end = heapq.heappop(queue)
            if ends[left] != middle or ends[middle] != end:
                continue  # one of them has become another symbol since
            ends[left], ends[middle] = end, -1
            if end < size:
                before[end] = left
            look(before[left], left)
            look(left, end)
        symbols: list[str] = []
        begin = 0
        while begin < size:
            symbols += self._used(text[begin : ends[begin]], parts)
            begin = ends[begin]
        return symbols

    def _used(self, piece: str, parts: dict[str, tuple[str, str]]) -> Iterator[str]:
        if piece in self.unused and piece in parts:
            for part in parts[piece]:
                yield from self._used(part, parts)
        else:
            yield piece

    def spell(self, tokens: list[str], special: set[str]) -> str:
        """Joins pieces, and writes spaces again."""
        return "".join(f" {token}" if token in special else token for token in tokens).replace(SPACE, " ").strip()
