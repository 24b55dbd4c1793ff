# SPDX-License-Identifier: Apache-2.0
"""Two tokenizers as one: letters in and phones out, each with a vocabulary of its own."""

import json
import os
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import BatchEncoding, PreTrainedTokenizerFast


class SourceTargetTokenizerFast(PreTrainedTokenizerFast):
    """Reads sources with tokenizer.json and targets with target_tokenizer.json; their special tokens are the same.

    `tokenizer(texts)` reads the source side, `tokenizer(text_target=texts)` the target side. Decoding spells the target
    side; with `use_source_tokenizer=True`, the source side. As with transformers' MarianTokenizer, tokens are converted
    to ids by the source's vocabulary, and ids to tokens by the target's.

    Args:
        target_tokenizer_file: The file of the target's tokenizer.
        target_tokenizer_object: That tokenizer itself, in place of the file.
        **kwargs: Of the base class: `tokenizer_file` or `tokenizer_object` for the source, the special tokens ...

    Raises:
        ValueError: There is no tokenizer of the target, or a special token has another id there.
    """

    vocab_files_names = {  # noqa: RUF012
        "tokenizer_file": "tokenizer.json",
        "target_tokenizer_file": "target_tokenizer.json",
    }
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    separate_vocabs = True

    def __init__(
        self,
        *args: object,
        target_tokenizer_file: str | None = None,
        target_tokenizer_object: Tokenizer | None = None,
        **kwargs: object,
    ) -> None:
        if target_tokenizer_object is None:
            if target_tokenizer_file is None or not os.path.isfile(target_tokenizer_file):
                raise ValueError("target_tokenizer.json is missing: it says how targets are read and written")
            target_tokenizer_object = Tokenizer.from_file(target_tokenizer_file)
        super().__init__(*args, **{"split_special_tokens": True, **kwargs})
        self._source_backend: Tokenizer = self.backend_tokenizer
        self._target_backend = target_tokenizer_object
        self._target_backend.encode_special_tokens = self.split_special_tokens
        for token in (self.pad_token, self.bos_token, self.eos_token):
            if self._target_backend.token_to_id(str(token)) != self._source_backend.token_to_id(str(token)):
                raise ValueError(f"{token} has two ids, one in tokenizer.json and another in target_tokenizer.json")

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: object) -> dict[str, object]:
        """Leaves the files to `__init__`: the base class would make a tokenizer of the vocabulary alone."""
        return kwargs

    def __call__(self, *args: object, **kwargs: object) -> BatchEncoding:
        """Tokenizes; arguments are those of the base class."""
        try:
            return super().__call__(*args, **kwargs)
        finally:  # after an error too, when the base class leaves it on the target's side
            self._switch_to_input_mode()

    @property
    def target_encoder(self) -> dict[str, int]:
        """Token of the target's vocabulary -> id."""
        return self._target_backend.get_vocab()

    @property
    def content(self) -> list[object]:
        """All that ids and texts depend on."""
        sides = [json.loads(side.to_str()) for side in (self._source_backend, self._target_backend)]
        return [side | {"padding": None, "truncation": None} for side in sides]  # left over from the last call

    def _switch_to_input_mode(self) -> None:
        self._tokenizer = self._source_backend

    def _switch_to_target_mode(self) -> None:
        self._tokenizer = self._target_backend

    # What follows changes no state: other threads may be encoding.
    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Returns the tokens of ids of the target: one for an id, a list for a list."""
        if isinstance(ids, int):
            return self._target_backend.id_to_token(ids)
        special = self.all_special_ids if skip_special_tokens else ()
        return [self._target_backend.id_to_token(int(one)) for one in ids if int(one) not in special]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Returns the text that tokens of the target spell."""
        decoder = self._target_backend.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(tokens))

    def _decode(
        self, token_ids: Any, skip_special_tokens: bool = False, use_source_tokenizer: bool = False, **kwargs: object
    ) -> str:
        ids = token_ids["input_ids"] if isinstance(token_ids, dict) else token_ids
        backend = self._source_backend if use_source_tokenizer else self._target_backend
        return str(backend.decode([ids] if isinstance(ids, int) else ids, skip_special_tokens=skip_special_tokens))

    def _add_tokens(self, new_tokens: list[str | AddedToken], special_tokens: bool = False) -> int:
        if unknown := [str(token) for token in new_tokens if self._tokenizer.token_to_id(str(token)) is None]:
            raise ValueError(f"can't add {unknown[0]!r}: the two vocabularies are those of the training data")
        return super()._add_tokens(new_tokens, special_tokens)

    def _save_pretrained(
        self, save_directory: str, file_names: object, legacy_format: object = None, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        names = super()._save_pretrained(save_directory, file_names, legacy_format, filename_prefix)
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        file = os.path.join(save_directory, prefix + self.vocab_files_names["target_tokenizer_file"])
        self._target_backend.save(file)
        return (*names, file)
