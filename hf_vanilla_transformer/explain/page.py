"""Writes the page: its modules, styles and texts in one HTML file, with a policy that allows nothing else to run."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .contents import Quantization, contents_of, lines_of_code

FOLDER = Path(__file__).with_name("page")
# In an order in which each module comes after those that it imports.
MODULES = (
    "tensor", "model", "checkpoint", "search", "pieces", "tokenizer", "dom", "links", "layers", "tree", "compare",
    "figure", "app", "attention", "tour", "main",
)  # fmt: skip


def model_page(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    title: str,
    examples: Sequence[str] = (),
    *,
    quantization: Quantization = "float32",
    language: str = "en",
) -> str:
    """Returns a page that computes a model: its translations, every number in between, and what switches change.

    The HTML needs no server and loads nothing. The title is shown at the top, and the first of the `examples` at the
    beginning; `language` is that of the page's texts, "en" or "zh". Models and errors are those of `contents_of`.
    """
    return page(title, contents_of(model, tokenizer, quantization, examples), language)


def page(title: str, data: Mapping[str, Any], language: str = "en") -> str:
    """Returns the page; `data` are values of JSON, for the script, and the language is "en" or "zh"."""
    style, script = _file("style.css"), _script()
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'"
    texts = json.loads(_file("texts.json"))
    values = {"title": title, "language": language, "code": lines_of_code(), "texts": texts, **data}
    filled = {
        "policy": html.escape(policy),
        "language": html.escape(language),
        "title": html.escape(title),
        "style": style,
        "script": script,
        "data": _in_a_script(json.dumps(values)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], _file("page.html"))


def _script() -> str:
    """Joins the modules into one script: in one scope, nothing has to be imported and exported."""
    parts = (re.sub(r"^import .*\n|^export ", "", _file(f"{name}.mjs"), flags=re.MULTILINE) for name in MODULES)
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _in_a_script(data: str) -> str:
    """Escapes what would end a script or change how it is read, in a string too. JSON is ASCII here."""
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return data
