"""One HTML page with the attention of a sentence: point at a token, choose layer and head; nothing is loaded."""

import base64
import html
import json
from pathlib import Path
from typing import Any

import torch

from ..translation.attention import Attention
from .attention_parts import PARTS, of_part

TEMPLATE = Path(__file__).with_name("attention_page.html")
INVISIBLE = "\N{OPEN BOX}"  # replaces each character of an invisible token


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


def _part(attention: Attention, name: str) -> dict[str, Any]:
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
