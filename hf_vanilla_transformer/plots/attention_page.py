"""One HTML page with the attention of a sentence: point at a token, choose layer and head; nothing is loaded."""

import base64
import html
import json
from pathlib import Path

import torch

from ..translation.attention import Attention

TEMPLATE = Path(__file__).with_name("attention_page.html")
INVISIBLE = "\N{OPEN BOX}"  # replaces each character of an invisible token
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


def attention_page(attention: Attention, title: str) -> str:
    """Returns a self-contained HTML page: scripts, styles and weights are in it.

    Weights are rounded to 1/255, so that a page for a sentence of 300 tokens has megabytes rather than hundreds.

    Args:
        attention: The result of `attention_of`.
        title: The page's title.
    """
    data = json.dumps([_part(attention, name) for name in PARTS])
    # In a script, "</script>" would end it and "<!--" change how it is read, in a string too. JSON is ASCII here.
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    page = TEMPLATE.read_text(encoding="utf-8")
    head, data_mark, tail = page.partition("{{data}}")
    assert data_mark, "the template has a place for the data"
    return head.replace("{{title}}", html.escape(title)) + data + tail


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


def _part(attention: Attention, name: str) -> dict[str, object]:
    """Returns the data of one of the three attentions for the page's script."""
    weights, keys, queries = of_part(attention, name)  # (layers, heads, queries, keys)
    title, query, key, what = PARTS[name]
    rounded = (weights.clamp(0, 1) * 255).round().to(torch.uint8).contiguous()
    return {
        "name": title,
        "query": query,
        "key": key,
        "what": what,
        "queries": [_shown(piece) for piece in queries],
        "keys": [_shown(piece) for piece in keys],
        "layers": weights.shape[0],
        "heads": weights.shape[1],
        "weights": base64.b64encode(rounded.numpy().tobytes()).decode("ascii"),
    }


def _shown(piece: str) -> str:
    is_visible = piece.strip() and any(character.isprintable() for character in piece)
    return piece if is_visible else INVISIBLE * max(1, len(piece))
