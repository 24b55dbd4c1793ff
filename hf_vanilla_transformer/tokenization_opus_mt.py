# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of checkpoints converted from OPUS-MT: SentencePiece's unigram models without SentencePiece.

Each side, source and target, has a SentencePiece model of its own; one vocabulary, or one a side, numbers their pieces.
"""

import base64
import json
import os
import re
import struct
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, models
from transformers import BatchEncoding, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import TruncationStrategy
from transformers.utils import PaddingStrategy, logging, to_py_obj

logger = logging.get_logger(__name__)

SPACE = "▁"  # what SentencePiece writes for a space
UNKNOWN_PENALTY = 10.0  # an unknown character costs this more than the rarest piece
SMALLEST_SUM = -100_000.0  # below, SentencePiece begins again at 0: so far from it, 32 bits are too coarse
# In a backend's vocabulary, a space before a piece that this side's SentencePiece model doesn't have. Texts have no
# spaces there any more, so it never matches.
OTHER_SIDE = " "
FIRST_CODE_POINT = 0x10000  # stands for id 0 in the texts that a side's `replay` reads
MOST_WORDS, LONGEST_WORD = 200_000, 100  # of those remembered; characters
LONGEST_CHECKED = 20_000  # characters of a text; in longer ones, nearly always some word is doubtful
LONGEST_RULE = 64  # characters, and bytes, that normalisation looks at at most
EXPANSION = 3  # characters that normalisation makes of one, at most, in a word that isn't doubtful
ROUNDING = 2.0**-24  # of a sum in 32 bits
CODE_EXAMPLES = 3

NO_PADDING, NO_CUT = PaddingStrategy.DO_NOT_PAD, TruncationStrategy.DO_NOT_TRUNCATE
CUTS = (TruncationStrategy.LONGEST_FIRST, TruncationStrategy.ONLY_FIRST)  # both cut a text without a pair
NOT_PLAIN = (
    "is_split_into_words",
    "return_token_type_ids",
    "return_overflowing_tokens",
    "return_offsets_mapping",
    "sanitize_control_tokens",
)
_FIRST, _SECOND = itemgetter(0), itemgetter(1)

# One for all tokenizers: padding and truncation are settings of the backend, which one call after the other changes.
_LOCK = threading.RLock()


class Piece(NamedTuple):
    """One token of a text: as SentencePiece names it, its id, and where it is in the text."""

    name: str
    id: int
    start: int
    end: int


class OpusMTTokenizerFast(PreTrainedTokenizerFast):
    """Gives the ids and the texts that transformers' MarianTokenizer gives, from `tokenizers` alone.

    `tokenizer(texts)` reads the source language, `tokenizer(text_target=texts)` the target language. `</s>` ends every
    sequence. A model of several target languages wants a code at the start of each source text: `>>deu<< How are you?`
    (`supported_language_codes`).

    Ids come from SentencePiece's own rules in Python, which remembers the pieces of each word. `tokenizers` has other
    rules in details: it adds scores in 64 bits instead of 32 ("1,000" may be cut in another place), finds characters
    with combining marks in other ways, and doesn't look up a run of unknown characters as one piece. It gives offsets
    and encodings (`char_to_token` and the like) where its ids are the same; elsewhere there are offsets, but the
    methods of encodings raise an error.

    Calls from several threads don't disturb each other.
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json", "target_tokenizer_file": "target_tokenizer.json"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Opens the two sides.

        Args:
            *args: For the base class.
            **kwargs: `tokenizer_file` and `target_tokenizer_file`, or `tokenizer_object` and
                `target_tokenizer_object`; `sentencepiece` (what the two files can't hold); `separate_vocabs`; and
                options of the base class.
        """
        kwargs.pop("vocab_file", None)
        files = [kwargs.pop(name, None) for name in ("tokenizer_file", "target_tokenizer_file")]
        backends = [kwargs.pop(name, None) for name in ("tokenizer_object", "target_tokenizer_object")]
        rest = kwargs.get("sentencepiece")
        if not isinstance(rest, dict) or {"source", "target"} - rest.keys():
            raise ValueError("tokenizer_config.json has no `sentencepiece`: this isn't a converted OPUS-MT tokenizer")
        for name, file, backend in zip(self.vocab_files_names.values(), files, backends, strict=True):
            if backend is None and (file is None or not os.path.isfile(file)):
                raise ValueError(f"{name} is missing: a tokenizer of OPUS-MT has one file a side")
        opened = [b or Tokenizer.from_file(f) for f, b in zip(files, backends, strict=True)]
        self._mode = Mode()
        self._sides = [_Side(b, **rest[s]) for b, s in zip(opened, ("source", "target"), strict=True)]
        self.separate_vocabs = bool(kwargs.get("separate_vocabs", False))
        self._share_added_tokens()
        defaults = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "model_max_length": 512}
        super().__init__(*args, **{**defaults, **kwargs})

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        """Leaves the files to `__init__`."""
        return kwargs

    @property
    def supported_language_codes(self) -> list[str]:
        """The codes that may begin a source text, such as [">>deu<<", ">>fra<<"]; none for one target language."""
        return [] if self.separate_vocabs else list(self._source.codes)

    @property
    def can_save_slow_tokenizer(self) -> bool:
        """False: transformers would save this class under another name otherwise."""
        return False

    # The two sides. Transformers' methods all use `_tokenizer`, which is the one of the current side.

    @property
    def _tokenizer(self) -> Tokenizer:
        side = self._side
        return side.replay if self._mode.replay else side.backend

    @_tokenizer.setter
    def _tokenizer(self, backend: Tokenizer) -> None:
        if backend is not self._tokenizer:
            raise AttributeError("the backends of this tokenizer can't be replaced: convert the OPUS-MT model again")

    @property
    def _side(self) -> "_Side":
        return self._sides[self._mode.target]

    @property
    def _source(self) -> "_Side":
        return self._sides[0]

    def _switch_to_input_mode(self) -> None:
        self._mode.target = False

    def _switch_to_target_mode(self) -> None:
        self._mode.target = True

    # The vocabulary

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary (the source's, if there are two), without added ones."""
        return self._source.backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return len(self._source.ids)

    def get_vocab(self) -> dict[str, int]:
        """Returns token -> id (the source's, if there are two vocabularies)."""
        return dict(self._source.ids)

    @property
    def content(self) -> list[Any]:
        """All that ids and texts depend on, but for added tokens: pieces, scores and normalisation of both sides."""
        content: list[Any] = [self.separate_vocabs]
        for side in self._sides:
            description = json.loads(side.backend.to_str())
            names, scores = zip(*description["model"]["vocab"], strict=True)
            # In 32 bits: the backend's own 64 may change a little when they are read from a file.
            content += [
                names,
                array("f", scores).tobytes().hex(),
                description["normalizer"],
                sorted(side.options.items()),
            ]
        return content

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Names ids: a string for an integer, otherwise a list. With two vocabularies, the target's decides.

        Args:
            ids: An id, or any sequence of ids.
            skip_special_tokens: Whether special tokens are left out of a list.

        Raises:
            ValueError: An id isn't in the vocabulary.
        """
        ids = to_py_obj(ids)
        if isinstance(ids, int):
            return self._names([ids])[0]
        skipped = set(self.all_special_ids) if skip_special_tokens else ()
        return self._names([number for number in map(int, ids) if number not in skipped])

    def _names(self, ids: list[int]) -> list[str]:
        try:
            return [self._names_of[number] for number in ids]
        except KeyError as error:
            raise ValueError(
                f"token id {error.args[0]} isn't in the vocabulary of {len(self._names_of):,}; "
                "put pad_token_id for the -100 of labels before you decode them"
            ) from None

    def _convert_token_to_id_with_added_voc(self, token: str) -> int:
        source = self._source
        if token in source.added:
            return source.ids[token]
        ids = self._side.ids
        return ids.get(token, ids[str(self._special_tokens_map["unk_token"])])

    def _convert_id_to_token(self, index: int) -> str:
        return self._names([int(index)])[0]

    def _add_tokens(self, new_tokens: list[str | AddedToken], special_tokens: bool = False) -> int:
        tokens = [t if isinstance(t, AddedToken) else AddedToken(t, special=special_tokens) for t in new_tokens]
        # Matched in the text as it is written, as MarianTokenizer does.
        tokens = [
            AddedToken(**{**t.__getstate__(), "normalized": False, "special": t.special or special_tokens})
            for t in tokens
            if t.content
        ]
        if wrong := [t.content for t in tokens if t.content.startswith(OTHER_SIDE)]:
            raise ValueError(f"token {wrong[0]!r} begins with a space; give it without, and rstrip or lstrip=True")
        unknown = {token.content for token in tokens if token.content not in self._source.ids}
        if unknown and self.separate_vocabs:
            raise ValueError(
                f"can't add {sorted(unknown)[0]!r}: source and target have vocabularies of their own, in which its ids "
                "would differ"
            )
        for side in self._sides:
            side.add([t for t in tokens if t.content in unknown or side.backend.token_to_id(t.content) is not None])
        self._share_added_tokens()
        special = [token.content for token in tokens if token.special]
        self._extra_special_tokens += [token for token in special if token not in self.all_special_tokens]
        return len(unknown)

    def _share_added_tokens(self) -> None:
        source, target = self._sides
        added = {t.content: t for side in self._sides for t in side.backend.get_added_tokens_decoder().values()}
        added = {token: added[token] for token in added if token not in source.codes and token not in target.codes}
        ids = {token: source.ids[token] for token in added}  # with two vocabularies, on both sides
        source.match(added, ids)
        target.match(added, ids)
        self._names_of = (
            {**target.names, **{ids[token]: token for token in ids}} if self.separate_vocabs else source.names
        )

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
        """Returns the pieces of a text; unknown characters and codes as they are.

        Args:
            text: The text.
            pair: A second one.
            add_special_tokens: Whether to end with `</s>`.
            **kwargs: `split_special_tokens`: read special tokens within the text as plain text.
        """
        check_texts(text, "text")
        split = kwargs.get("split_special_tokens", self.split_special_tokens)
        names = [piece.name for part in (text, pair) if part for piece in self._side.read(part, not split)]
        return names + [self.eos_token] * add_special_tokens

    def _encode_plus(self, text: Any, text_pair: Any = None, **kwargs: Any) -> BatchEncoding:
        if isinstance(text, (list, tuple)) and not (text or text_pair or kwargs.get("is_split_into_words")):
            return BatchEncoding({name: [] for name in self.model_input_names})
        split = kwargs.get("split_special_tokens")
        kwargs["split_special_tokens"] = split = self.split_special_tokens if split is None else split
        try:
            if not self._mode.target and kwargs.get("verbose", True):
                self._warn_of_codes(text, kwargs.get("is_split_into_words", False))
            if text_pair is None and _is_plain(text, kwargs):
                return self._encode_plainly(text, **kwargs)
            with _LOCK:
                return self._encode_with_backend(text, text_pair, **kwargs)
        except (TypeError, ValueError, AttributeError) as error:
            check_texts(text, "text")
            check_texts("" if text_pair is None else text_pair, "text_pair")
            if isinstance(error, ValueError):  # on lengths, padding or truncation: it speaks for itself
                raise
            raise TypeError(
                "text (and text_pair likewise): give a string, a list of strings or a list of pairs of strings; "
                "with is_split_into_words=True a list of words or a list of such lists"
            ) from error

    def _encode_plainly(self, text: str | list[str], **kwargs: Any) -> BatchEncoding:
        """Single texts, of which only ids, masks and lengths are wanted."""
        target, match_added = self._mode.target, not kwargs["split_special_tokens"]
        closing = [self.eos_token_id] if kwargs.get("add_special_tokens", True) else []
        longest = kwargs.get("max_length") if kwargs.get("truncation_strategy") in CUTS else None
        rows = [self._side.ids_of(one, match_added) for one in ([text] if isinstance(text, str) else text)]
        if longest:
            rows = [_shortened(row, max(longest - len(closing), 0), self.truncation_side) for row in rows]
        rows = [row + closing for row in rows]
        for row in rows:
            self._eventual_warn_about_too_long_sequence(row, kwargs.get("max_length"), kwargs.get("verbose", True))
        fields: dict[str, Any] = {"input_ids": rows}
        if kwargs.get("return_attention_mask") in (None, True):
            fields["attention_mask"] = [[1] * len(row) for row in rows]
        if kwargs.get("return_special_tokens_mask"):
            fields["special_tokens_mask"] = [self._special_tokens_mask(row) for row in rows]
        if kwargs.get("return_length"):
            fields["length"] = [len(row) for row in rows]
        if kwargs.get("padding_strategy", NO_PADDING) != NO_PADDING:
            self._pad_rows(fields, **kwargs)
        if isinstance(text, str) and kwargs.get("return_tensors") is None:
            fields = {name: value[0] for name, value in fields.items()}

        def encodings() -> Any:
            with _LOCK:
                before, self._mode.target = self._mode.target, target
                try:
                    return self._encode_with_backend(text, None, **{**kwargs, "return_tensors": None}).encodings
                finally:
                    self._mode.target = before

        return _LazyEncoding(fields, kwargs.get("return_tensors"), encodings)

    def _pad_rows(self, fields: dict[str, Any], **kwargs: Any) -> None:
        """Pads lists of a batch, in place."""
        lengths = [len(row) for row in fields["input_ids"]]
        longest = kwargs["padding_strategy"] == PaddingStrategy.LONGEST
        width, multiple = max(lengths) if longest else kwargs["max_length"], kwargs.get("pad_to_multiple_of") or 1
        width = -(-width // multiple) * multiple
        left = (kwargs.get("padding_side") or self.padding_side) == "left"
        for name, value in {"input_ids": self.pad_token_id, "attention_mask": 0, "special_tokens_mask": 1}.items():
            if name in fields:
                padding = [[value] * (width - length) for length in lengths]
                pairs = zip(fields[name], padding, strict=True)
                fields[name] = [pad + row if left else row + pad for row, pad in pairs]

    def _encode_with_backend(self, text: Any, text_pair: Any, **kwargs: Any) -> BatchEncoding:
        """Pairs, words, offsets and the like: by the backend, if it finds the right pieces; else it pads and cuts ids.

        In the second case, it reads texts of one character per id.
        """
        side, match_added = self._side, not kwargs["split_special_tokens"]
        strings = list(dict.fromkeys(_strings([text, text_pair])))
        side.reset()
        encodings = side.backend.encode_batch(strings, add_special_tokens=False)
        ids = [side.ids_of(string, match_added) for string in strings]
        if all(e.ids == own for e, own in zip(encodings, ids, strict=True)):
            return super()._encode_plus(text, text_pair, **kwargs)
        read = {}
        for string, encoding, own in zip(strings, encodings, ids, strict=True):
            same = encoding.ids == own
            read[string] = own, encoding.offsets if same else [p[2:] for p in side.read(string, match_added)]
        replayed = {s: "".join(chr(FIRST_CODE_POINT + number) for number in own) for s, (own, _) in read.items()}
        kwargs["split_special_tokens"] = False
        self._mode.replay = True
        try:
            both = [None if part is None else mapped(part, replayed.__getitem__) for part in (text, text_pair)]
            result = super()._encode_plus(*both, **kwargs)
        finally:
            self._mode.replay = False
        fields = dict(result)
        if "offset_mapping" in fields:
            samples = list(_samples(text, text_pair, kwargs.get("is_split_into_words", False)))
            numbers = map(int, fields.get("overflow_to_sample_mapping", range(len(samples))))
            offsets = [list(_offsets(e, samples[n], read)) for e, n in zip(result.encodings, numbers, strict=True)]
            nested = isinstance(fields["offset_mapping"][0], list) or kwargs.get("return_tensors") is not None
            fields["offset_mapping"] = offsets if nested else offsets[0]
        return BatchEncoding(fields, tensor_type=kwargs.get("return_tensors"))  # without the encodings of ids

    def _convert_encoding(self, encoding: Any, **kwargs: Any) -> Any:
        fields, encodings = super()._convert_encoding(encoding, **kwargs)
        if "special_tokens_mask" in fields:
            fields["special_tokens_mask"] = [self._special_tokens_mask(ids) for ids in fields["input_ids"]]
        return fields, encodings

    def _special_tokens_mask(self, ids: Iterable[int]) -> list[int]:
        special = set(self.all_special_ids) - {self.unk_token_id}
        return [int(number in special) for number in ids]

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        """1 where a sequence has `</s>` or `<pad>`, or will have `</s>` when it is closed; 0 elsewhere."""
        mask = self._special_tokens_mask([*token_ids_0, *(token_ids_1 or [])])
        return mask if already_has_special_tokens else [*mask, 1]

    def _warn_of_codes(self, text: Any, is_split_into_words: bool) -> None:
        """Warns, once each, of a source text without the code that the model wants, or with an unknown one."""
        codes = self._source.codes
        known = ", ".join(list(codes)[:CODE_EXAMPLES])
        texts = [text] if isinstance(text, str) else [next(_strings(item), "") for item in text]
        if is_split_into_words and text and isinstance(text[0], str):
            texts = texts[:1]
        for one in texts:
            code, _ = _parted(one)
            if code and code not in self._source.ids:
                those = f"those it knows are {known}, ..." if codes else "it has none, as it has one target language"
                self._warn_once("unknown code", f"the model has no language code {code!r}; {those}")
            elif codes and not code and one.strip():
                self._warn_once(
                    "no code",
                    "a text begins with no language code, so the model translates into any language; write one of "
                    f"`tokenizer.supported_language_codes` before each text, such as {known}",
                )

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self.deprecation_warnings:  # transformers keeps what it has warned of there
            self.deprecation_warnings[key] = True
            logger.warning(message)

    # From ids to text

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text that the tokens spell."""
        return self._spelled(tokens, self._sides[self.separate_vocabs])

    def _decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        ids = to_py_obj(token_ids["input_ids"] if isinstance(token_ids, (dict, BatchEncoding)) else token_ids)
        tokens = self.convert_ids_to_tokens([ids] if isinstance(ids, int) else ids, skip_special_tokens)
        use_source = kwargs.get("use_source_tokenizer", not self.separate_vocabs)
        text = self._spelled(tokens, self._sides[not use_source])
        clean = (
            self.clean_up_tokenization_spaces if clean_up_tokenization_spaces is None else clean_up_tokenization_spaces
        )
        return self.clean_up_tokenization(text) if clean else text

    def _spelled(self, tokens: list[str], side: "_Side") -> str:
        special, parts, begin = set(self.all_special_tokens), [], 0
        for end, token in () if special.isdisjoint(tokens) else enumerate(tokens):
            if token in special:
                parts += [side.model.spell(tokens[begin:end]), token, " "]
                begin = end + 1
        return "".join([*parts, side.model.spell(tokens[begin:])]).replace(SPACE, " ").strip()

    # Files

    def _save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        file_names: tuple[str, ...],
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
    ) -> tuple[str, ...]:
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        files = [os.path.join(save_directory, prefix + name) for name in self.vocab_files_names.values()]
        with _LOCK:
            for side, file in zip(self._sides, files, strict=True):
                side.reset()
                side.backend.save(file)
        return (*file_names, *files)

    def train_new_from_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Is refused: a trained model can't do anything with another vocabulary.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "the tokenizer of a converted OPUS-MT model can't be trained anew; train a VanillaTransformerTokenizerFast "
            "for a new model"
        )


class Mode(threading.local):
    """Which side a thread is reading, and whether the backend gets text or ids."""

    target = False
    replay = False

    def __reduce__(self) -> Any:
        return Mode, ()


class _LazyEncoding(BatchEncoding):
    """A BatchEncoding whose `encodings` are made when something asks for them."""

    def __init__(self, data: dict[str, Any], tensor_type: Any, make: Callable[[], Any]) -> None:
        self._make: Callable[[], Any] | None = make
        self._made: Any = None
        super().__init__(data, tensor_type=tensor_type, n_sequences=1)

    @property
    def _encodings(self) -> Any:
        if self._make is not None:
            make, self._make = self._make, None
            self._made = make()
        return self._made

    @_encodings.setter
    def _encodings(self, encodings: Any) -> None:
        if encodings is not None:
            self._make, self._made = None, encodings

    def __reduce__(self) -> Any:
        return BatchEncoding, (dict(self.data), None, None, False, 1)


class Words(dict[str, tuple[float, tuple[Any, ...]]]):
    """Word -> how sure its pieces are, and their ids (or names); `side.word` tells them, see `_Side.word`."""

    def __init__(self, side: Any) -> None:
        super().__init__()
        self.side = side

    def __missing__(self, word: str) -> tuple[float, tuple[Any, ...]]:
        entry: tuple[float, tuple[Any, ...]] = self.side.word(word)
        if len(word) <= LONGEST_WORD:
            if len(self) >= MOST_WORDS:
                self.clear()
            self[word] = entry
        return entry


class _Side:
    """One language: the backend, and SentencePiece's own rules in Python.

    Args:
        backend: Normalises as SentencePiece (nearly) does and has a unigram model; its ids are the vocabulary's.
        unlisted: Pieces of the SentencePiece model that the vocabulary hasn't, and their scores; they become `<unk>`.
        unused: Pieces that the SentencePiece model has, but never gives.
        control: Its control tokens, which spell nothing.
        others: What the vocabulary has and no SentencePiece model: special tokens and language codes.
    """

    def __init__(
        self, backend: Tokenizer, unlisted: dict[str, float], unused: list[str], control: list[str], others: list[str]
    ) -> None:
        self.backend = backend
        self.options: dict[str, Any] = {"unlisted": unlisted, "unused": unused, "control": control, "others": others}
        # A dictionary for its quick search; it keeps the order.
        self.codes = dict.fromkeys(token for token in others if token.startswith(">>") and token.endswith("<<"))
        self.match({}, {})

    def __reduce__(self) -> Any:
        return _restored, (self.backend, self.options, self.added, self.added_ids)

    # Made when they are first needed, as one side often does without.

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token -> id, in the order of ids."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        return {token.removeprefix(OTHER_SIDE): vocabulary[token] for token in sorted(vocabulary, key=vocabulary.get)}  # type: ignore[arg-type]

    @cached_property
    def names(self) -> dict[int, str]:
        """Id -> token."""
        return {number: token for token, number in self.ids.items()}

    @cached_property
    def model(self) -> "_SideModel":
        """SentencePiece's model in Python."""
        return _SideModel(self.backend, **self.options)

    @cached_property
    def replay(self) -> Tokenizer:
        """A backend that reads one character per id, and otherwise does as `backend` does."""
        replay = Tokenizer(models.BPE({chr(FIRST_CODE_POINT + number): number for number in self.names}, []))
        replay.post_processor = self.backend.post_processor
        return replay

    def add(self, tokens: list[AddedToken]) -> None:
        """Adds tokens to the backend."""
        self.backend.add_tokens(tokens)
        for name in ("ids", "names", "replay"):
            self.__dict__.pop(name, None)

    def match(self, tokens: dict[str, AddedToken], ids: dict[str, int]) -> None:
        """Sets the tokens that are matched before anything else, as they are written."""
        self.added, self.added_ids = tokens, ids
        # The longest first. A single word has a space, or nothing, on both sides.
        patterns = [
            rf"(?<![^ ]){re.escape(t)}(?![^ ])" if tokens[t].single_word else re.escape(t)
            for t in sorted(tokens, key=len, reverse=True)
        ]
        self.pattern = re.compile("|".join(patterns) or r"(?!)")
        self.with_space = [t for t in tokens if " " in t]
        self.words = Words(self)

    def reset(self) -> None:
        """Takes back what the last call set in the backend."""
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = False

    def ids_of(self, text: str, match_added: bool) -> list[int]:
        """The ids of a text, as MarianTokenizer gives them, from those of its words where that is the same."""
        code, begin = _parted(text)
        simple = code in self.codes and not self.pattern.search(code) if code else True
        if simple and match_added and len(text) <= LONGEST_CHECKED and not any(t in text for t in self.with_space):
            words = [self.words[word] for word in text[begin:].split(" ")]
            if min(map(_FIRST, words)) > self.model.slack * (len(text) + 1):
                ids = list(chain.from_iterable(map(_SECOND, words)))
                return [self.ids[code], *ids] if code else ids
        return [piece.id for piece in self.read(text, match_added)]

    def word(self, word: str) -> tuple[float, tuple[int, ...]]:
        """How much worse any other way to cut a word is, per character of it, and its ids.

        SentencePiece rounds sums to 32 bits, in an order that depends on the text before the word. Only where the best
        pieces are best by more than this can change, they are the same in every text. The number is negative if they
        may depend on the text for another reason.
        """
        if not word:
            return inf, ()
        if not self.model.pieces_end_with_words or len(word) > LONGEST_WORD or ">>" in word or SPACE in word:
            return -1.0, ()
        ids: list[int] = []
        gap, length = inf, 1
        for begin, end, token in self._segments(word, True):
            if token:
                ids.append(self.added_ids[token])
                continue
            text, places = self.model.charsmap.normalize(word[begin:end])
            cuts, unknown, gap_here = self.model.cut(text)
            gap, length = min(gap, gap_here), length + len(text)
            ids += [piece.id for piece in self._pieces(text, places, cuts, unknown, begin)]
        sure = length <= EXPANSION * (len(word) + 1)
        return (gap / length if sure else -1.0), tuple(ids)

    # SentencePiece's rules

    def read(self, text: str, match_added: bool) -> list[Piece]:
        """The pieces of a text, as MarianTokenizer gives them."""
        pieces: list[Piece] = []
        for begin, end, token in self._segments(text, match_added):
            if token:
                pieces.append(Piece(token, self.added_ids[token], begin, end))
                continue
            code, length = _parted(text[begin:end])
            if code:
                pieces.append(Piece(code, self.ids.get(code, self.model.unknown), begin, begin + length))
                begin += length
            normalized, places = self.model.charsmap.normalize(text[begin:end])
            cuts, unknown, _ = self.model.cut(normalized)
            pieces += self._pieces(normalized, places, cuts, unknown, begin)
        return pieces

    def _segments(self, text: str, match_added: bool) -> Iterator[tuple[int, int, str]]:
        """Added tokens, and what is between them: beginning, end, and the token or ""."""
        begin = 0
        for match in self.pattern.finditer(text) if match_added else ():
            if match.start() > begin:
                yield begin, match.start(), ""
            yield match.start(), match.end(), match[0]
            begin = match.end()
        if begin < len(text):
            yield begin, len(text), ""

    def _pieces(
        self, text: str, places: list[tuple[int, int]], cuts: list[int], unknown: list[bool], shift: int
    ) -> list[Piece]:
        """Joins runs of unknown characters into one piece each, and looks all pieces up."""
        joined = [n for n in range(len(unknown)) if not (n and unknown[n] and unknown[n - 1])]
        begins = [cuts[n] for n in joined]
        spans = zip(begins, [*begins[1:], len(text)], strict=True) if begins else ()
        ids, missing = self.ids, self.model.unknown
        return [
            Piece(text[b:e], ids.get(text[b:e], missing), shift + places[b][0], shift + places[e - 1][1])
            for b, e in spans
        ]


def _restored(backend: Tokenizer, options: dict[str, Any], *added: Any) -> _Side:
    side = _Side(backend, **options)
    side.match(*added)
    return side


class Unigram:
    """The pieces of a SentencePiece unigram model with their scores.

    Args:
        scores: Piece -> score; of normal pieces alone.
        unused: Those of them that are never given.
    """

    def __init__(self, scores: dict[str, float], unused: Iterable[str] = ()) -> None:
        scores = dict(zip(scores, array("f", scores.values()), strict=True))  # in 32 bits, as SentencePiece has them
        lowest = min(scores.values())
        self.unknown_score = _float32(lowest - UNKNOWN_PENALTY)
        for piece in unused:
            del scores[piece]
        # A beginning of pieces that is none itself has no score: where a text isn't here any more, no piece goes on.
        self.scores: dict[str, float | None] = {p[:n]: None for p in scores for n in range(1, len(p))}
        self.scores |= scores
        self.longest = max(map(len, scores))
        # Whether a piece ends where a word ends, so that a word has the same pieces wherever it is.
        self.pieces_end_with_words = SPACE in scores and not any(SPACE in piece[1:] for piece in scores)
        # A word has to be as sure as this times the text's length: more than rounding can do on the way through it.
        self.slack = 4 * ROUNDING * EXPANSION * abs(self.unknown_score)

    def cut(self, text: str) -> tuple[list[int], list[bool], float]:
        """The best way to cut a normalised text into pieces (Viterbi, as SentencePiece's EncodeOptimized).

        Returns:
            Where pieces begin and the last ends, whether each is an unknown character, and by how much the best way is
            better than the next, at the place where that is least.
        """
        size = len(text)
        best, second = array("f", [0.0] + [-inf] * size), [-inf] * (size + 1)  # SentencePiece's sums have 32 bits
        begin_of, is_unknown, total = [0] * (size + 1), [False] * (size + 1), array("f", [0.0])
        for begin in range(size):
            here = best[begin]
            if here < SMALLEST_SUM:
                for end in range(begin, min(size, begin + self.longest) + 1):
                    best[end] -= here
                here = 0.0
            for end, score, unknown_here in self._pieces_at(text, begin):
                total[0] = here + score
                candidate = total[0]
                if candidate > best[end]:
                    second[end], best[end] = best[end], candidate
                    begin_of[end], is_unknown[end] = begin, unknown_here
                elif candidate > second[end]:
                    second[end] = candidate
        cuts, unknown, gap, end = [size], [], inf, size
        while end > 0:
            gap = min(gap, best[end] - second[end])
            unknown.append(is_unknown[end])
            end = begin_of[end]
            cuts.append(end)
        return cuts[::-1], unknown[::-1], gap

    def _pieces_at(self, text: str, begin: int) -> list[tuple[int, float, bool]]:
        """The pieces that begin at a place: end, score, and whether it is an unknown character."""
        found, get = [], self.scores.get
        for end in range(begin + 1, len(text) + 1):
            score = get(text[begin:end], False)
            if score is False:
                break
            if score is not None:
                found.append((end, score, False))
        if not found or found[0][0] > begin + 1:
            found.append((begin + 1, self.unknown_score, True))
        return found


class _SideModel(Unigram):
    """SentencePiece's unigram model of one side; arguments as for `_Side`."""

    def __init__(
        self, backend: Tokenizer, unlisted: dict[str, float], unused: list[str], control: list[str], others: list[str]
    ) -> None:
        description = json.loads(backend.to_str())
        normalizers = description["normalizer"]["normalizers"]
        charsmaps = [n["precompiled_charsmap"] for n in normalizers if n["type"] == "Precompiled"]
        self.charsmap = Charsmap(base64.b64decode(charsmaps[0]) if charsmaps else b"")
        self.unknown: int = description["model"]["unk_id"]
        scores = {name: score for name, score in description["model"]["vocab"] if not name.startswith(OTHER_SIDE)}
        scores = {name: score for name, score in scores.items() if name not in others} | unlisted
        super().__init__(scores)
        self.known = scores.keys() | set(unused)
        self.control = set(control)

    def spell(self, tokens: list[str]) -> str:
        """What SentencePiece's decoder makes of pieces (`▁` is still to be replaced)."""
        if not self.control.isdisjoint(tokens):
            tokens = [token for token in tokens if token not in self.control]
        for n, token in enumerate(tokens):  # the space before the first word
            if not (token in self.known and token.startswith(SPACE)):
                return "".join(tokens[n:])
            if token != SPACE:
                return "".join([token[1:], *tokens[n + 1 :]])
        return ""


class Charsmap:
    """SentencePiece's normaliser: the longest match at each place, from a table compiled into a double-array trie."""

    def __init__(self, compiled: bytes) -> None:
        size = struct.unpack("<I", compiled[:4])[0] if compiled else 0
        self.units = struct.unpack(f"<{size // 4}I", compiled[4 : 4 + size])
        self.replacements = compiled[4 + size :]
        self.of_two: dict[str, tuple[str, int]] = {}  # two characters -> what becomes of the first, if that is enough

    def normalize(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Normalises a text, and writes `▁` for each space and before the first word.

        Returns:
            The text, and for each of its characters where that is in the original.
        """
        characters, places = [SPACE], [(0, 0)]
        begin, after_space = 0, True
        while begin < len(text):
            # What follows rarely matters beyond the next character.
            replacement, length = self.of_two.get(text[begin : begin + 2]) or self._longest(text, begin)
            if after_space:
                replacement = replacement.lstrip(" ")
            if replacement:
                characters += replacement
                places += [(begin, begin + length)] * len(replacement)
                after_space = replacement.endswith(" ")
            begin += length
        if len(places) > 1:
            places[0] = places[1]
        normalized = "".join(characters).replace(" ", SPACE).rstrip(SPACE)
        return normalized, places[: len(normalized)]

    def _longest(self, text: str, begin: int) -> tuple[str, int]:
        """The replacement for the longest match at a place, and how many characters it is for; one if none matches."""
        units, found = self.units, None
        data = text[begin : begin + LONGEST_RULE].encode()
        node, end = _offset(units[0]) if units else 0, 0
        for end, byte in enumerate(data if units else b""):
            node ^= byte
            if node >= len(units) or units[node] & 0x800000FF != byte:  # the label, and no value
                break
            unit = units[node]
            node ^= _offset(unit)
            if unit >> 8 & 1:  # a key ends here
                found = units[node] & 0x7FFFFFFF, end + 1
        else:
            end = len(data)
        if found:
            replacement = self.replacements[found[0] : self.replacements.index(0, found[0])].decode()
            result = replacement, len(data[: found[1]].decode())
        else:
            result = text[begin], 1
        two = text[begin : begin + 2]
        if end < len(two.encode()) or len(two) == 1:
            if len(self.of_two) >= MOST_WORDS:
                self.of_two.clear()
            self.of_two[two] = result
        return result


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)


def _float32(number: float) -> float:
    return array("f", [number])[0]


def _parted(text: str) -> tuple[str, int]:
    """The language code at the start of a text, or "", and its length."""
    end = text.find("<<") + 2 if text.startswith(">>") else 0
    return (text[:end], end) if end > 1 else ("", 0)


def _is_plain(text: Any, options: dict[str, Any]) -> bool:
    """Whether texts are single ones, and nothing is wanted that depends on where the pieces are."""
    single = isinstance(text, str) or (isinstance(text, (list, tuple)) and all(isinstance(one, str) for one in text))
    return (
        single
        and not any(options.get(name) for name in NOT_PLAIN)
        and options.get("truncation_strategy", NO_CUT) in (NO_CUT, *CUTS)
    )


def _shortened(ids: list[int], length: int, side: str) -> list[int]:
    return ids[:length] if side == "right" else ids[max(len(ids) - length, 0) :]


def _strings(value: Any) -> Iterator[str]:
    """All strings in nested lists."""
    if isinstance(value, str):
        yield value
    elif value is not None:
        for item in value:
            yield from _strings(item)


def mapped(value: Any, new: Callable[[str], str]) -> Any:
    """Nested lists, with other strings."""
    return new(value) if isinstance(value, str) else type(value)(mapped(item, new) for item in value)


def _samples(text: Any, text_pair: Any, is_split_into_words: bool) -> Iterator[tuple[Any, Any]]:
    """The pairs of a batch, or of the one text; the second is None where there is no pair."""

    def is_one(value: Any) -> bool:
        return isinstance(value[0], str) if is_split_into_words and value else isinstance(value, str)

    if is_one(text) or not text:
        yield text, text_pair
    elif text_pair is not None:
        yield from zip(text, text_pair, strict=True)
    else:
        yield from ((item, None) if is_one(item) or not item else item for item in text)


def _offsets(encoding: Any, sample: tuple[Any, Any], read: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Where the tokens of an encoding of ids are in the original texts."""
    for sequence, word, (n, _), special in zip(
        encoding.sequence_ids, encoding.word_ids, encoding.offsets, encoding.special_tokens_mask, strict=True
    ):
        if sequence is None or special:
            yield 0, 0
        else:
            text = sample[sequence]
            _, places = read[text if isinstance(text, str) else text[word]]
            yield places[n]


def check_texts(value: Any, name: str) -> None:
    """Refuses what isn't text; the error names the first such item."""
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_texts(item, f"{name}[{index}]")
    elif not isinstance(value, str):
        raise TypeError(
            f"{name} is of type {type(value).__name__}: give strings or lists of strings "
            "(list(column) for a column or an array, '' for a missing text)"
        )
    else:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} has a lone surrogate at position {error.start}, which is no Unicode text: clean it, for "
                "example by text.encode('utf-8', 'replace').decode()"
            ) from None
