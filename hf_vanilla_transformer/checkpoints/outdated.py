"""Tokenizers of checkpoints that version 0.2 converted: without these names, transformers would open them wrongly."""

from pathlib import Path
from typing import NoReturn


class _Outdated:
    """Stands for a class of 0.2 in AutoTokenizer's table."""

    @classmethod
    def from_pretrained(cls, name: str | Path, *args: object, **kwargs: object) -> NoReturn:
        """Is refused, with the fix.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"the tokenizer is a {cls.__name__} of version 0.2; convert the original model again: "
            "vanilla-transformer convert ORIGINAL --output FOLDER"
        )


OUTDATED = tuple(type(name, (_Outdated,), {}) for name in ("OpusMTTokenizerFast", "DictionaryTokenizerFast"))
