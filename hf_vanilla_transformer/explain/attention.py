"""The page without a model: the attention of one sentence, of any model that shows its weights."""

import base64

import torch

from ..translation.attention import Attention
from .page import page

INVISIBLE = "\N{OPEN BOX}"  # replaces each character of an invisible token
PARTS = ("encoder", "decoder", "cross")


def attention_page(attention: Attention, title: str) -> str:
    """Returns a page in which readers choose the attention, the layer and the head, and point at tokens.

    Weights are rounded to 1/255, so that a page for a sentence of 300 tokens has megabytes rather than hundreds.
    """
    data = {
        "source": [_shown(piece) for piece in attention.source_pieces],
        "inputs": [_shown(piece) for piece in attention.input_pieces],
        "targets": [_shown(piece) for piece in attention.target_pieces],
        "parts": {name: _part(getattr(attention, name)) for name in PARTS},
    }
    return page(title, {"attention": data})


def _part(weights: torch.Tensor) -> dict[str, object]:
    """Returns weights, (layers, heads, queries, keys), as bytes in base64."""
    rounded = (weights.clamp(0, 1) * 255).round().to(torch.uint8).contiguous()
    letters = base64.b64encode(rounded.numpy().tobytes()).decode("ascii")
    return {"layers": weights.shape[0], "heads": weights.shape[1], "weights": letters}


def _shown(piece: str) -> str:
    is_visible = piece.strip() and any(character.isprintable() for character in piece)
    return piece if is_visible else INVISIBLE * max(1, len(piece))
