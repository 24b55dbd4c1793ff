"""The three attentions of a sentence pair: their names, their tokens and their weights."""

from collections.abc import Mapping
from typing import Any

import torch

from ..translation.attention import Attention

# Part -> what it is called, who attends, what to, and the sentence that says what is seen.
PARTS: dict[str, tuple[str, str, str, str]] = {
    "encoder": (
        "Encoder self-attention",
        "source token that attends",
        "source token attended to",
        "which source token each source token attends to",
    ),
    "decoder": (
        "Decoder self-attention",
        "target token that is predicted",
        "earlier target token attended to",
        "which earlier token each target token attends to",
    ),
    "cross": (
        "Cross-attention",
        "target token that is predicted",
        "source token attended to",
        "which source token each target token attends to",
    ),
}


def of_part(attention: Attention, part: str) -> tuple[torch.Tensor, list[str], list[str]]:
    """Returns the weights of a part, (layers, heads, queries, keys), and the tokens of its keys and its queries.

    Raises:
        ValueError: There is no such part.
    """
    if part == "encoder":
        return attention.encoder, attention.source_pieces, attention.source_pieces
    if part == "decoder":
        return attention.decoder, attention.input_pieces, attention.target_pieces
    if part == "cross":
        return attention.cross, attention.source_pieces, attention.target_pieces
    raise ValueError(f"part={part!r}; choose one of {', '.join(PARTS)}")


def sizes_in(config: Mapping[str, Any], part: str) -> tuple[int, int] | None:
    """Returns the layers and heads that a config.json gives a part; None where it has them under other names."""
    stack = "encoder" if part == "encoder" else "decoder"
    layers, heads = (config.get(f"{stack}_{name}") for name in ("layers", "attention_heads"))
    return (layers, heads) if isinstance(layers, int) and isinstance(heads, int) else None


def check_choice(part: str, sizes: tuple[int, int], layer: int | str, heads: int | str) -> None:
    """Checks that there are such a layer and such a head.

    Args:
        part: The part.
        sizes: Its layers and heads.
        layer: A layer's number, from 1; a word is not checked.
        heads: A head's number, from 1; a word is not checked.

    Raises:
        ValueError: There are none; the message says how many there are.
    """
    for name, number, count in (("layer", layer, sizes[0]), ("head", heads, sizes[1])):
        if isinstance(number, int) and not 1 <= number <= count:
            raise ValueError(f"{name} {number} doesn't exist: the {PARTS[part][0].lower()} has {name}s 1 to {count}")
