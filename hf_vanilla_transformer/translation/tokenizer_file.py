"""Tokenizers of exported models, read from tokenizer.json without PyTorch and transformers, which take seconds."""

import functools
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, processors

from ..checkpoints.kinds import OLD_TOKENIZER_SETTINGS, TOKENIZER, TOKENIZER_CONFIG
from .reading import ONLY_IDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CLASSES = ("VanillaTransformerTokenizer", "VanillaTransformerTokenizerFast")
CONTROL_TOKENS = ("pad_token", "bos_token", "eos_token")
# What the configuration may have; any other setting may change how texts are read. The latter have no effect here.
KNOWN_SETTINGS = {*CONTROL_TOKENS, "model_max_length", "split_special_tokens", "tokenizer_class"}
KNOWN_SETTINGS |= {"auto_map", "backend", "is_local", "local_files_only", "name_or_path"}


def open_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Opens the tokenizer of an exported model: this package's as a `TokenizerFile`, any other by transformers."""
    try:
        config = json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
        if _is_known(folder, config):
            opened = TokenizerFile(folder, config)
            if opened.has_control_tokens_alone():
                return opened
    except Exception:  # of the library, among others; loading all of it says what is wrong
        pass
    return _load(folder)


def _is_known(folder: Path, config: Mapping[str, object]) -> bool:
    """Whether tokenizer.json and settings that are known here are all that says how texts are read."""
    is_ours = config["tokenizer_class"] in CLASSES and all(isinstance(config[name], str) for name in CONTROL_TOKENS)
    has_others = any((folder / name).exists() for name in OLD_TOKENIZER_SETTINGS)
    return is_ours and config.keys() <= KNOWN_SETTINGS and not has_others


def _load(folder: Path) -> "PreTrainedTokenizerBase":
    from ..checkpoints.loading import load_tokenizer  # it imports PyTorch and transformers

    return load_tokenizer(folder)


class TokenizerFile:
    """This package's tokenizer as far as translating needs it. What else is asked for is the complete tokenizer's."""

    # There is one vocabulary for both sides, no codes of languages, and nothing is unknown.
    separate_vocabs, target_encoder, supported_language_codes, unk_token_id = False, None, (), None

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder, backend = folder, Tokenizer.from_file(str(folder / TOKENIZER))
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = config.get("split_special_tokens", False)
        self.all_special_ids = [backend.token_to_id(config[name]) for name in CONTROL_TOKENS]
        end = [(config["eos_token"], self.all_special_ids[-1])]
        backend.post_processor = processors.TemplateProcessing(single=["$A", end[0][0]], special_tokens=end)
        self.backend_tokenizer = backend
        self.model_max_length = config.get("model_max_length", int(1e30))

    def has_control_tokens_alone(self) -> bool:
        """Whether no tokens were added: those have rules of their own."""
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return added.keys() == set(self.all_special_ids) and all(token.special for token in added.values())

    @functools.cached_property
    def _complete(self) -> "PreTrainedTokenizerBase":
        return _load(self._folder)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._complete, name)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def __call__(self, text: object = None, **options: object) -> object:
        """Tokenizes a list of sources, or of targets as `text_target`; arguments are those of transformers."""
        others = dict(options)
        texts, adds = others.pop("text_target", text), bool(others.pop("add_special_tokens", True))
        if isinstance(texts, list) and others == ONLY_IDS and (text is None or texts is text):
            with suppress(TypeError, ValueError):  # the complete tokenizer says which text is none
                rows = self.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=adds)
                return {"input_ids": [row.ids for row in rows]}
        return self._complete(text, **options)

    def decode(self, token_ids: object, skip_special_tokens: bool = False, **options: object) -> str:
        """Returns the text of tokens; arguments are those of transformers."""
        if skip_special_tokens and isinstance(token_ids, list) and options.keys() <= {"use_source_tokenizer"}:
            return str(self.backend_tokenizer.decode(token_ids, skip_special_tokens=True))
        return str(self._complete.decode(token_ids, skip_special_tokens=skip_special_tokens, **options))

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids of all tokens."""
        return dict(self.backend_tokenizer.get_vocab())
