"""A folder that the Hub shows as a static Space: the page and its card."""

import json
from pathlib import Path

from ..checkpoints.files import new_folder, write_text

CARD = """\
---
title: {title}
emoji: 🔍
colorFrom: blue
colorTo: gray
sdk: static
app_file: index.html
pinned: false
tags:
- translation
- transformer
---

# {heading}

The Transformer of "Attention Is All You Need" (Vaswani et al. 2017), computed in the browser: a translation with every
number in between, and switches that take parts of the model away. `index.html` contains the model, its tokenizer and
the program; it loads nothing else and works offline too.

Made with `vanilla-transformer explain` of hf_vanilla_transformer.
"""


def write_space(page: str, title: str, output: Path) -> None:
    """Writes a page with its card into a new folder.

    Args:
        page: HTML, by `page`.
        title: The Space's title.
        output: The folder; it must not exist, or be empty.

    Raises:
        OSError: It can't be written.
    """
    heading = " ".join(title.split())
    with new_folder(output) as folder:
        write_text(folder / "index.html", page)
        write_text(folder / "README.md", CARD.format(title=json.dumps(heading, ensure_ascii=False), heading=heading))
