"""The file of a model card, and what its metadata says."""

from pathlib import Path

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

CARD = "README.md"


class CardError(ValueError):
    """A card can't be made or published; the message says why and names the fix."""


def load_card(file: Path) -> ModelCard:
    """Reads a card.

    Raises:
        CardError: It isn't UTF-8, its metadata isn't YAML, or has aliases, which can expand to any size.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
        block = REGEX_YAML_BLOCK.search(text)
        if block and any(isinstance(token, yaml.AliasToken) for token in yaml.scan(block[2])):
            raise ValueError("it has an alias of YAML; write its value")
        return ModelCard(text)
    except (ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())[:200]
        raise CardError(f"{file} isn't a model card ({problem}); correct its metadata, or remove it") from error
