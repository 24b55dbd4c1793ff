"""The three attentions of a sentence pair: their names, their tokens and their weights."""

import torch

from ..translation.attention import Attention

# Part -> its name, the token that attends, the token attended to, and a description of the picture.
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
