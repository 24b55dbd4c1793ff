"""A folder that the Hub shows as a static Space: the page and its card."""

import json
from pathlib import Path

from ..checkpoints.files import new_folder, write_text

CARD = Path(__file__).with_name("page") / "space.md"


def write_space(page: str, title: str, output: Path) -> None:
    """Writes a page with its card, for a Space of this title, into a folder that must not exist, or be empty."""
    heading = " ".join(title.split())
    values = {"title": json.dumps(heading, ensure_ascii=False), "heading": heading}
    with new_folder(output) as folder:
        write_text(folder / "index.html", page)
        write_text(folder / "README.md", CARD.read_text(encoding="utf-8").format(**values))
