"""Makes the README's links absolute when the package is built: package indexes show it without the files beside it.

They lead to `Source` of `[project.urls]` in pyproject.toml; as long as there is none, links stay as they are.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


def absolute_links(text: str, source: str) -> str:
    """Returns Markdown whose links and images lead to a repository's files.

    Args:
        text: Markdown; links with a scheme, and those to its own headings, are left as they are.
        source: The repository's address.
    """
    images = re.sub(r"(!\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)", rf"\1({source}/raw/HEAD/\2)", text)
    images = re.sub(r'(<img src=")(?![a-z]+:)([^"]+)', rf"\1{source}/raw/HEAD/\2", images)
    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", rf"]({source}/blob/HEAD/\1)", images)


class ReadmeHook(MetadataHookInterface):
    """Fills in the field `readme`."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Reads README.md and, if there is an address, replaces its links."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        if source := metadata.get("urls", {}).get("Source"):
            text = absolute_links(text, source.rstrip("/"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
