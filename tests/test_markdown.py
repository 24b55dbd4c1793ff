"""The Markdown files: their Python code runs, their links lead to files, and README names what exists."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from opus_mt import opus_mt_folder

ROOT = Path(__file__).parents[1]
FILES = {path.relative_to(ROOT).as_posix(): path for folder in (ROOT, ROOT / "docs") for path in folder.glob("*.md")}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
README = TEXTS["README.md"]

RUNS, NOT_RUN = "```python", "```python no-run"  # what begins a block; `no-run` is for what can't run offline
WITH_PYTHON = sorted(name for name, text in TEXTS.items() if RUNS in text.splitlines())


def python_of(text: str) -> str:
    """Returns a file's Python blocks, one after the other, on the lines where the file has them."""
    lines, fence = [], ""
    for line in text.splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
            lines.append("")
        else:
            lines.append(line if fence == RUNS else "")
    return "\n".join(lines)


@pytest.fixture
def place(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A folder with what the files name: models of the quickstart, Multi30k and OPUS-MT, and Multi30k, all tiny."""
    (tmp_path / "outputs/quickstart").mkdir(parents=True)
    (tmp_path / "outputs/multi30k_best").mkdir()
    for model in ("quickstart/model", "multi30k_best/averaged-10"):
        (tmp_path / "outputs" / model).symlink_to(tiny_checkpoint)
    opus_mt_folder(tmp_path / "Helsinki-NLP" / "opus-mt-en-de")
    (tmp_path / "multi30k").mkdir()
    for part in ("train", "val", "test_2016_flickr"):
        for language, sentence in (("en", "half past nine"), ("de", "halb zehn")):
            lines = "".join(f"{sentence} {number}\n" for number in range(20))
            (tmp_path / "multi30k" / f"{part}.{language}").write_text(lines, encoding="utf-8")
    return tmp_path


@pytest.mark.docs
@pytest.mark.parametrize("name", WITH_PYTHON)
def test_python_blocks_run_one_after_the_other(name: str, place: Path) -> None:
    """The blocks of one file share their names, as if a reader had typed them."""
    script = place / f"{name.replace('/', '_')}.py"
    script.write_text(python_of(TEXTS[name]), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script], cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_python_blocks_are_found() -> None:
    assert {"README.md", "model_card.md", "docs/training.md", "docs/engine.md"} <= set(WITH_PYTHON)
    assert python_of("a\n```python\nb\n```\nc\n```\nd\n```\n```python no-run\ne\n```") == "\n\nb" + "\n" * 8


@pytest.mark.parametrize("name", WITH_PYTHON)
def test_examples_import_public_names(name: str) -> None:
    """Names in the `__all__` of the package or of a module."""
    imports = [node for node in ast.walk(ast.parse(python_of(TEXTS[name]))) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if node.module and node.module.split(".")[0] == "hf_vanilla_transformer"]
    for node in ours:
        public = {*importlib.import_module(node.module).__all__, "engine"}  # a folder is imported by its name
        assert {alias.name for alias in node.names} <= public, node.module


def test_few_python_blocks_are_not_run() -> None:
    fences = [line for text in TEXTS.values() for line in text.splitlines() if re.match(r"```+ *py", line)]
    assert set(fences) <= {RUNS, NOT_RUN}
    assert fences.count(NOT_RUN) <= 3


@pytest.mark.parametrize("target", re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
def test_make_targets_are_documented(target: str) -> None:
    assert f"`make {target}`" in TEXTS["CONTRIBUTING.md"] or f"`make {target}`" in README


def test_the_readme_and_the_documentation_are_short() -> None:
    assert len(README.split()) <= 900
    assert sum(len(text.split()) for name, text in TEXTS.items() if name.startswith(("README.md", "docs/"))) <= 17_000


def test_the_chinese_readme_says_the_same() -> None:
    """The same code, links to files and figures; where Chinese counts in units of its own, the English is beside it."""
    chinese = TEXTS["README.zh.md"]
    for pattern in (r"^```.*?^```", r"\]\(([\w./]+)", r"!\[.*?\]\((.*?)\)", r"\| `([^`]+)`", r"\(\d[\d.]*\)"):
        ours, theirs = (re.findall(pattern, text, re.MULTILINE | re.DOTALL) for text in (README, chinese))
        other = {"README.md", "README.zh.md"}  # each links to the other
        assert [one for one in ours if one not in other] == [one for one in theirs if one not in other]
    ours, theirs = (set(re.findall(r"\d[\d.,]*\d", text)) for text in (README, chinese))
    assert ours <= theirs


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_linked_exist(name: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", TEXTS[name]) if "://" not in link]
    assert [link for link in links if not (FILES[name].parent / link).exists()] == []


def test_the_readme_links_to_the_documentation() -> None:
    """To all but the appendix of the results, which they link to."""
    assert "](trials.md" in TEXTS["docs/results.md"]
    linked = {*re.findall(r"\]\((docs/\w+\.md)", README), "docs/trials.md"}
    assert {name for name in FILES if name.startswith("docs/")} <= linked


def test_no_address_is_a_placeholder() -> None:
    """The project's address has one place, [project.urls] of pyproject.toml."""
    placeholder = re.compile(r"git clone|\bREPOSITORY\b|github\.com/(OWNER|USER)")
    assert [name for name, text in TEXTS.items() if placeholder.search(text)] == []
