"""README's Python blocks run as they stand, and its commands and links exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_there_are_python_blocks() -> None:
    assert BLOCKS


@pytest.mark.slow
def test_python_blocks_run_one_after_the_other(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """They share names, as a reader would type them; a checkpoint stands where the quickstart leaves its own."""
    (tmp_path / "outputs/quickstart").mkdir(parents=True)
    (tmp_path / "outputs/quickstart/model").symlink_to(tiny_checkpoint)
    done = subprocess.run([sys.executable, "-c", "\n".join(BLOCKS)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
def test_make_targets_are_in_the_readme(target: str) -> None:
    assert f"make {target}" in README


def test_files_that_are_linked_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_table_of_sections_names_what_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "hf_vanilla_transformer").glob("*_vanilla_transformer.py"))
    rows = [line for line in README.splitlines() if re.match(r"\| \d", line)]
    assert len(rows) >= 10
    for row in rows:
        for name in re.findall(r"`(\w+)`", row.split("|")[3]):
            assert re.search(rf"\b(class|def) {name}\b|\b{name}\b\s*[:=]", sources), name
