# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of checkpoints converted from fairseq, OpenNMT-py and JoeyNMT: a dictionary numbers pieces of words.

The pieces are those of subword-nmt or SentencePiece, as the model was trained; that library has to be installed. A
model without them has words, or characters.
"""

import base64
import io
import json
import os
from itertools import groupby
from typing import Any

from transformers import AddedToken, BatchEncoding, PreTrainedTokenizer

try:
    import sentencepiece
except ImportError:
    sentencepiece = None  # type: ignore[assignment]
try:
    from subword_nmt import apply_bpe
except ImportError:
    apply_bpe = None

SIDES = ("source", "target")
SPECIAL = ("pad_token", "bos_token", "eos_token", "unk_token")
SPACE = "▁"  # among characters
SEPARATOR = "@@"  # behind all pieces of a word but the last, in subword-nmt
MOST_WORDS = 200_000  # whose pieces subword-nmt remembers


class DictionaryTokenizer(PreTrainedTokenizer):
    """Gives the ids that subword-nmt or SentencePiece gives together with a toolkit's dictionary.

    `tokenizer(texts)` reads the source language, `tokenizer(text_target=texts)` the target language. `</s>` ends
    sequences; with `source_eos=False`, only the target's. Special tokens within a text are plain text. Texts are
    segmented as they are: a model that was trained on the output of Moses' tokenizer wants its input in that form.

    A word that occurs twice in the dictionary has the later id, as in fairseq's with `#fairseq:overwrite`, while a
    special token keeps the id of its first place. Of two ids with one name, one is called "name id", with a space.

    Args:
        segmentation_file: segmentation.json.
        segmentation: Its content. For "source" and "target": `tokens` in the order of ids; and the text of `codes`
            with the `vocabulary` of pieces that alone may be given (None: any), or a model `spm` in base64, or
            `level`: "words", which white space separates, "word", which U+0020 separates, or "char".
        source_eos: Whether sources end with `</s>`.
        **kwargs: The special tokens, and options of the base class.
    """

    vocab_files_names = {"segmentation_file": "segmentation.json"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(
        self,
        segmentation_file: str | None = None,
        segmentation: dict[str, Any] | None = None,
        source_eos: bool = True,
        **kwargs: object,
    ) -> None:
        if segmentation is None:
            if segmentation_file is None or not os.path.isfile(segmentation_file):
                raise ValueError("segmentation.json is missing: it has the dictionaries and the segmentation of words")
            with open(segmentation_file, encoding="utf-8") as opened:
                segmentation = json.load(opened)
        self._segmentation, self.source_eos = segmentation, source_eos
        special = {str(kwargs[name]) for name in SPECIAL if kwargs.get(name)}
        self._sides = [_Side(special, **segmentation[side]) for side in SIDES]
        self._is_target = False
        self.encoder, self.target_encoder = (side.encoder for side in self._sides)
        self.separate_vocabs = self.encoder != self.target_encoder
        kwargs.pop("added_tokens_decoder", None)
        self._added_tokens_decoder = {
            self.encoder[token]: AddedToken(token, special=True, normalized=False) for token in special
        }
        super().__init__(
            source_eos=source_eos, **{"split_special_tokens": True, "special_tokens_pattern": "prefix_suffix", **kwargs}
        )

    def __call__(self, *args: object, **kwargs: object) -> BatchEncoding:
        """Tokenizes; arguments are those of the base class."""
        try:
            return super().__call__(*args, **kwargs)
        except Exception:
            self._is_target = self._in_target_context_manager  # the base class would leave it on the target's side
            raise

    @property
    def content(self) -> list[object]:
        """All that ids and texts depend on."""
        return [self._segmentation, self.source_eos]

    @property
    def vocab_size(self) -> int:
        """Entries of the dictionary (the source's, if there are two)."""
        return len(self.encoder)

    def get_vocab(self) -> dict[str, int]:
        """Returns token -> id (the source's, if there are two dictionaries)."""
        return dict(self.encoder)

    def add_special_tokens(self, special_tokens_dict: dict[str, Any], *args: object, **kwargs: object) -> int:
        """Names tokens of the dictionary as special ones; others are refused before anything changes."""
        for value in special_tokens_dict.values():
            self._add_tokens([value] if isinstance(value, (str, AddedToken)) else value)
        return super().add_special_tokens(special_tokens_dict, *args, **kwargs)

    def _add_tokens(self, new_tokens: list[str | AddedToken], special_tokens: bool = False) -> int:
        for token in map(str, new_tokens):
            if token not in self.encoder or token not in self.target_encoder:
                raise ValueError(f"can't add {token!r}: a converted model's dictionary can't grow")
        return 0

    def _switch_to_input_mode(self) -> None:
        self._is_target = False

    def _switch_to_target_mode(self) -> None:
        self._is_target = True

    def _tokenize(self, text: str, **kwargs: object) -> list[str]:
        side = self._sides[self._is_target]
        if side.level is not None:
            return [side.name_of_word.get(piece, piece) for piece in side.pieces(text)]
        # The toolkits write pieces as a line and divide it again: white space within pieces is lost.
        return [side.name_of_word.get(piece, piece) for piece in " ".join(side.pieces(text)).split()]

    def _convert_token_to_id(self, token: str) -> int:
        unknown = self._added_tokens_encoder[str(self.unk_token)]
        return self._sides[self._is_target].encoder.get(token, unknown)

    def _convert_id_to_token(self, index: int) -> str:
        return self._sides[1].name(index)

    @property
    def suffix_tokens(self) -> list[int]:
        """What ends a sequence, or two as one; the base class reads it."""
        return [self.eos_token_id] if self._is_target or self.source_eos else []

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Returns the text that tokens of the target spell."""
        return self._sides[1].spell(tokens, self.all_special_tokens)

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        use_source_tokenizer: bool = False,
        **kwargs: object,
    ) -> str:
        side = self._sides[not use_source_tokenizer]
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        text = side.spell([side.name(number) for number in ids], self.all_special_tokens, skips=skip_special_tokens)
        if clean_up_tokenization_spaces is None:
            clean_up_tokenization_spaces = self.clean_up_tokenization_spaces
        return self.clean_up_tokenization(text) if clean_up_tokenization_spaces else text

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Writes segmentation.json and returns its path."""
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        file = os.path.join(save_directory, prefix + self.vocab_files_names["segmentation_file"])
        with open(file, "w", encoding="utf-8") as opened:
            json.dump(self._segmentation, opened, ensure_ascii=False)
        return (file,)


class _Side:
    """One language: its dictionary, and what segments its words."""

    def __init__(
        self,
        special: set[str],
        tokens: list[str],
        codes: str | None = None,
        vocabulary: list[str] | None = None,
        spm: str | None = None,
        level: str | None = None,
    ) -> None:
        self._arguments = (special, tokens, codes, vocabulary, spm, level)
        self.level = level
        of_word = {token: number for number, token in enumerate(tokens)}
        of_name = of_word | {token: tokens.index(token) for token in special}
        self._names = [t if of_name[t] == number else f"{t} {number}" for number, t in enumerate(tokens)]
        self._words = dict(zip(self._names, tokens, strict=True))
        self.encoder = {name: number for number, name in enumerate(self._names)}
        self.name_of_word = {token: self._names[number] for token, number in of_word.items()}
        self._spm: Any = None if spm is None else _sentencepiece(base64.b64decode(spm))
        self._bpe: Any = None if codes is None else _subword_nmt(codes, vocabulary)

    def __reduce__(self) -> tuple[object, ...]:
        return _Side, self._arguments  # without the words that subword-nmt remembers, on which a hash would depend

    def pieces(self, text: str) -> list[str]:
        """Returns the pieces of a text."""
        if self.level is not None:
            return (
                list(text.replace(" ", SPACE))
                if self.level == "char"
                else text.split(" " if self.level == "word" else None)
            )
        if self._spm is not None:
            return list(self._spm.encode(text, out_type=str))
        if len(self._bpe.cache) > MOST_WORDS:
            self._bpe.cache.clear()
        return self._bpe.segment(text).split(" ")

    def name(self, number: int) -> str:
        """Returns the name of an id; raises `ValueError` if there is none."""
        if not 0 <= number < len(self._names):
            raise ValueError(
                f"token id {number} isn't in the dictionary of {len(self._names):,}; "
                "put pad_token_id for the -100 of labels before you decode them"
            )
        return self._names[number]

    def spell(self, names: list[str], special: list[str], skips: bool = False) -> str:
        """Returns the text of tokens; special ones are part of it, or end a word where they are skipped."""
        parts: list[str] = []
        is_own = skips or self._spm is not None  # the toolkits join "@@" with a special token too
        for is_special, run in groupby(names, lambda name: is_own and name in special):
            pieces = [self._words.get(name, name) for name in run]
            if is_special:
                parts += [] if skips else pieces
            else:
                parts.append(self._joined(pieces))
        text = " ".join(filter(None, parts))
        return text if self.level == "char" else text.strip()

    def _joined(self, pieces: list[str]) -> str:
        if self._spm is not None:
            return self._spm.decode_pieces(pieces)
        if self.level is not None:
            return "".join(pieces).replace(SPACE, " ") if self.level == "char" else " ".join(pieces)
        return f"{' '.join(pieces)} ".replace(f"{SEPARATOR} ", "").rstrip()


def _sentencepiece(model: bytes) -> Any:
    if sentencepiece is None:
        raise ImportError("this model's tokenizer needs sentencepiece: pip install sentencepiece")
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def _subword_nmt(codes: str, vocabulary: list[str] | None) -> Any:
    if apply_bpe is None:
        raise ImportError("this model's tokenizer needs subword-nmt: pip install subword-nmt")
    return apply_bpe.BPE(io.StringIO(codes), vocab=set(vocabulary or ()))
