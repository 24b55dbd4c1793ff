# SPDX-License-Identifier: Apache-2.0
"""Section 5.1 of "Attention Is All You Need": byte-pair encoding with one vocabulary for source and target.

Sennrich et al. 2016 (arXiv:1508.07909) start from letters and merge the most frequent pair of neighbours until the
vocabulary is full. Here the letters are the 256 bytes of UTF-8, so that there is no unknown token and every text comes
back exactly as it was.
"""

from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import chain
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BatchEncoding, PreTrainedTokenizerFast
from transformers.utils import to_py_obj

CONTROL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}  # ids 0, 1, 2
OPTIONS = ("extra_special_tokens", "model_max_length", "padding_side", "split_special_tokens", "truncation_side")

# Where a word begins: at white space with no punctuation beside it. Merges don't cross such a place, but they may join
# "street" and " ." or "," and " and": tokenised text then needs no more pieces than running text.
WORD_START = r"(?<![\s\p{P}])\s+(?![\s\p{P}])"
# The other way: a word, or a run of punctuation, with the space before it.
WORD_OR_PUNCTUATION = r"\s?[^\s\p{P}]+|\s?\p{P}+|\s+(?=\s)|\s+"
# Parts the ">" from "</s" and its like, so that no piece learned from a text can ever spell a control token.
CONTROL_TOKEN_END = r"(?<=<pad|<s|</s)>"
LONGEST_WORD = 256  # characters; the trainer's time grows with the square of a word's length

# ByteLevel's alphabet: a byte that is a visible Latin-1 character stands for itself, the others are U+0100 and on.
_VISIBLE = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
LETTER_OF_BYTE = {byte: chr(byte) for byte in _VISIBLE} | {byte: chr(256 + n) for n, byte in enumerate(_HIDDEN)}
BYTE_OF_LETTER = {letter: byte for byte, letter in LETTER_OF_BYTE.items()}


class VanillaTransformerTokenizerFast(PreTrainedTokenizerFast):
    r"""Byte-level BPE: `decode(encode(text), skip_special_tokens=True) == text` for every Unicode string.

    A word carries the space before it. The first word of a text gets one too, and decoding removes it: a word is the
    same piece wherever it stands. `</s>` ends every sequence and every pair (`A B </s>`). Offsets index the original
    text and leave out the space before a word (only where a text begins with a single space, they leave it in).

    `<pad>`, `<s>` and `</s>` within a text are plain text: a text can't end its sentence by `</s>`
    (`split_special_tokens=False` allows it). Tokens that you add, special ones too, are matched in one piece:
    `add_special_tokens({"extra_special_tokens": ["<2de>"]})` makes a language tag.
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]

    @classmethod
    def from_pretrained(cls, *args: object, **kwargs: object) -> "VanillaTransformerTokenizerFast":
        """Loads a tokenizer as transformers does; an `eos_token` given here closes sequences too."""
        tokenizer: VanillaTransformerTokenizerFast = super().from_pretrained(*args, **kwargs)
        if "eos_token" in kwargs:
            tokenizer.update_post_processor()
        return tokenizer

    @classmethod
    def train_from_iterator(
        cls,
        texts: Iterable[str | list[str]],
        vocab_size: int = 37000,
        min_frequency: int = 2,
        show_progress: bool = True,
        length: int | None = None,
        merge_punctuation: bool = True,
        **kwargs: Any,
    ) -> "VanillaTransformerTokenizerFast":
        """Learns a joint vocabulary (5.1). The same texts give the same tokenizer, byte for byte.

        Args:
            texts: Sentences of both languages: strings, or lists of strings, from any iterable, such as a generator or
                a column `dataset["text"]`. It is read once and not kept.
            vocab_size: Upper bound of `len(tokenizer)`, with the control tokens and the 256 bytes. The paper has about
                37,000 for English-German.
            min_frequency: How often a pair has to be seen to be merged.
            show_progress: Whether to show a progress bar.
            length: Number of texts for the progress bar, where `texts` doesn't know it.
            merge_punctuation: Whether a piece may join words and punctuation, "street .". That takes fewer pieces;
                apart, a word is the same piece before a comma as elsewhere: small corpora need that.
            **kwargs: For the tokenizer: `extra_special_tokens` (counted in `vocab_size`), `model_max_length`,
                `padding_side`, `truncation_side`, `split_special_tokens`.

        Raises:
            TypeError: `texts` is one string or a mapping, one of its items is no string, an unknown keyword.
            ValueError: `vocab_size` or `min_frequency` is too small, or there is no text.
        """
        if unknown := sorted(kwargs.keys() - set(OPTIONS)):
            raise TypeError(f"unknown option {unknown[0]!r}; give one of {', '.join(OPTIONS)}")
        extra = list(kwargs.get("extra_special_tokens") or [])
        smallest = len(CONTROL_TOKENS) + len(BYTE_OF_LETTER) + len(extra)
        if not isinstance(vocab_size, int) or vocab_size < smallest:
            raise ValueError(
                f"vocab_size={vocab_size!r}: give an integer of at least {smallest}, as many as special tokens and "
                "the 256 bytes need before the first merge; some thousands are usual"
            )
        if not isinstance(min_frequency, int) or min_frequency < 1:
            raise ValueError(f"min_frequency={min_frequency!r}: give an integer of at least 1")
        if isinstance(texts, (str, bytes, Mapping)):
            raise TypeError(
                f"texts is one {type(texts).__name__}: give an iterable of strings, such as [text] or dataset['text']"
            )
        strings = chain.from_iterable(_strings(item, f"texts[{i}]") for i, item in enumerate(texts))
        first = next(filter(None, strings), None)
        if first is None:
            raise ValueError("texts is empty, or all its strings are: there is nothing to learn from")

        backend = _pipeline(merge_punctuation)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(extra),
            min_frequency=min_frequency,
            special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS.values()],
            initial_alphabet=list(BYTE_OF_LETTER),
            show_progress=show_progress,
        )
        length = len(texts) if length is None and isinstance(texts, Sized) else length
        backend.train_from_iterator(chain([first], strings), trainer=trainer, length=length)
        return cls(tokenizer_object=backend, **{"split_special_tokens": True, **CONTROL_TOKENS, **kwargs})

    def train_new_from_iterator(
        self,
        text_iterator: Iterable[str | list[str]],
        vocab_size: int,
        length: int | None = None,
        new_special_tokens: list[str | AddedToken] | None = None,
        special_tokens_map: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> "VanillaTransformerTokenizerFast":
        """Trains a tokenizer with this one's settings on other texts, as transformers' base class does."""
        extra = new_special_tokens or []
        pieces = vocab_size - len(extra) - len(self.extra_special_tokens)
        new = super().train_new_from_iterator(text_iterator, pieces, length, None, special_tokens_map, **kwargs)
        new.add_tokens(extra, special_tokens=True)
        new.update_post_processor()  # the control tokens may have new names
        return new

    def add_special_tokens(self, special_tokens_dict: object, replace_extra_special_tokens: bool = False) -> int:
        """As transformers' own, but earlier extra tokens stay special by default."""
        return int(super().add_special_tokens(special_tokens_dict, replace_extra_special_tokens))

    def __setattr__(self, key: str, value: object) -> None:
        super().__setattr__(key, value)
        if key.removesuffix("_id") in ("bos_token", "eos_token") and "_should_update_post_processor" in vars(self):
            self.update_post_processor()

    def update_post_processor(self) -> None:
        """Closes sequences with `</s>`; after `add_bos_token = True` also opens them with `<s>`."""
        self._add_bos_token = self.add_bos_token and self.bos_token_id is not None
        begin = [self.bos_token] if self.add_bos_token else []
        end = [self.eos_token] if self.eos_token_id is not None else []
        special = [(token, self.convert_tokens_to_ids(token)) for token in begin + end]
        self._tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(add_prefix_space=True, trim_offsets=True),
                processors.TemplateProcessing(
                    single=[*begin, "$A", *end], pair=[*begin, "$A", "$B:1", *end], special_tokens=special
                ),
            ]
        )

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        """1 where a sequence has a special token, or will have one when it is closed; 0 elsewhere."""
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, already_has_special_tokens=True)
        inside = len(token_ids_0) + len(token_ids_1 or [])
        return [1] * self.add_bos_token + [0] * inside + [1] * (self.eos_token_id is not None)

    def readable_pieces(self, ids: object) -> list[str]:
        """The pieces of one sequence as people read them, for the axes of plots.

        Args:
            ids: Token ids, (T,): a list, an array or a tensor.

        Returns:
            T strings: "▁" for a space, "<0xC3>" for a byte that is no complete character or not a visible one, control
            and added tokens as they are.
        """
        return [_readable(piece) for piece in self._spelled(self.convert_ids_to_tokens(_flat(ids)))]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text that the tokens spell."""
        # The decoder removes the space that the first word of a text gets, and an added token gets none.
        is_added = bool(tokens) and tokens[0] in self.added_tokens_encoder
        return super().convert_tokens_to_string([LETTER_OF_BYTE[ord(" ")]] * is_added + self._spelled(tokens))

    def _spelled(self, tokens: Iterable[str | None]) -> list[str]:
        # ByteLevel reads the letters of added tokens as bytes too, and would break "<ü>": write them in its alphabet.
        # None is an id beyond the vocabulary; it spells nothing.
        added = self.added_tokens_encoder
        known = [token or "" for token in tokens]
        return ["".join(LETTER_OF_BYTE[b] for b in token.encode()) if token in added else token for token in known]

    def _decode(self, token_ids: object, skip_special_tokens: bool = False, **kwargs: object) -> str:
        # Nothing is cleaned up afterwards, whatever clean_up_tokenization_spaces says.
        ids, added = _flat(token_ids), self.added_tokens_decoder
        if skip_special_tokens:
            special = {i for i, token in added.items() if token.special}.union(self.all_special_ids)
            ids = [i for i in ids if i not in special]
        if added.keys().isdisjoint(ids):
            return self._tokenizer.decode(ids, skip_special_tokens=False)  # the same, faster
        return self.convert_tokens_to_string(self.convert_ids_to_tokens(ids))

    def _encode_plus(self, text: object, text_pair: object = None, **kwargs: object) -> BatchEncoding:
        if isinstance(text, (list, tuple)) and not (text or text_pair or kwargs.get("is_split_into_words")):
            return BatchEncoding({name: [] for name in self.model_input_names})
        try:
            return super()._encode_plus(text, text_pair, **kwargs)
        except (TypeError, ValueError) as error:
            for name, value in (("text", text), ("text_pair", text_pair)):
                for _ in _strings("" if value is None and name == "text_pair" else value, name):
                    pass
            if isinstance(error, ValueError):  # on lengths, padding or truncation: it speaks for itself
                raise
            raise TypeError(
                "text (and text_pair likewise): give a string, a list of strings or a list of pairs of strings; "
                "with is_split_into_words=True a list of words or a list of such lists"
            ) from error

    def _add_tokens(self, new_tokens: list[str | AddedToken], special_tokens: bool = False) -> int:
        # What is special to the backend becomes plain text under split_special_tokens, an option for the control
        # tokens alone. All others are special by standing in extra_special_tokens, and texts may hold them.
        control = {self.pad_token, self.bos_token, self.eos_token}
        tokens = []
        for new in new_tokens:
            token = new if isinstance(new, AddedToken) else AddedToken(new, special=special_tokens)
            if (special_tokens or token.special) and token.content not in self.all_special_tokens:
                self._extra_special_tokens.append(token.content)
            tokens.append(AddedToken(**{**token.__getstate__(), "special": token.content in control}))
        number = self._tokenizer.add_tokens(tokens)
        if number and any(token.special for token in tokens) and "_should_update_post_processor" in vars(self):
            self.update_post_processor()  # a control token has an id now
        return number


VanillaTransformerTokenizer = VanillaTransformerTokenizerFast


def _pipeline(merge_punctuation: bool) -> Tokenizer:
    """An untrained backend: text -> words -> bytes -> pieces, and back."""
    words = (WORD_START, "merged_with_next") if merge_punctuation else (WORD_OR_PUNCTUATION, "isolated")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words[0]), words[1]),
            pre_tokenizers.Split(Regex(CONTROL_TOKEN_END), "merged_with_next"),
            pre_tokenizers.FixedLength(LONGEST_WORD),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            # The space before the first word. ByteLevel's add_prefix_space leaves it out where the text begins with a
            # space, as Metaspace does, and then "a" and " a" are the same. But behind ByteLevel no text begins with a
            # space: the first Metaspace always sets one, and the second writes it as ByteLevel does.
            pre_tokenizers.Metaspace(" ", prepend_scheme="first", split=False),
            pre_tokenizers.Metaspace(LETTER_OF_BYTE[ord(" ")], prepend_scheme="never", split=False),
        ]
    )
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", left=1, right=0)])
    return backend


def _strings(value: object, name: str) -> Iterator[str]:
    """The strings in `value` (a string, or lists of them); an error names the first item that is no text."""
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _strings(item, f"{name}[{index}]")
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
                f"{name} has a lone surrogate at position {error.start} and is no Unicode text: clean it, for "
                "example by text.encode('utf-8', 'replace').decode()"
            ) from None
        yield value


def _flat(ids: Any) -> list[int]:
    """Ids of one sequence as a list."""
    if not (isinstance(ids, list) and all(type(one) is int for one in ids)):
        ids = to_py_obj(ids["input_ids"] if isinstance(ids, Mapping) else ids)
    ids = [ids] if isinstance(ids, int) else list(ids)
    if min(ids, default=0) < 0:
        raise ValueError(f"token id {min(ids)} stands for no token: put pad_token_id for the -100 of labels")
    return ids


def _readable(piece: str) -> str:
    # A byte that is no complete character becomes an unprintable surrogate, and a byte again.
    text = bytes(BYTE_OF_LETTER[letter] for letter in piece).decode("utf-8", "surrogateescape").replace(" ", "▁")
    shown = (c if c.isprintable() else c.encode("utf-8", "surrogateescape") for c in text)
    return "".join(c if isinstance(c, str) else "".join(f"<0x{byte:02X}>" for byte in c) for c in shown)
