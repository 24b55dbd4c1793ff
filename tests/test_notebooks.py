"""The notebooks: they run from top to bottom in a fresh kernel, and as stored they can be read without running."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from opus_mt import opus_mt_folder

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = {path.name: path for path in sorted(FOLDER.glob("*.ipynb"))}
PAPER, MARIAN = "attention_is_all_you_need.ipynb", "fine_tune_marian.ipynb"
MOST_BYTES = 1_500_000
SECONDS = 1_800  # a notebook of 5 minutes, on a slower machine with other work
# From the root of a machine, "/home/me" or "C:\Users"; no address, no closing tag, no "3/4".
MACHINE_PATH = re.compile(r"(?<![\w./:<>)])/(?:[\w.+-]+/)+[\w.+-]+|\b[A-Z]:\\\w+")


def read(name: str) -> Any:
    return nbformat.read(NOTEBOOKS[name], as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts_of(cell: Any) -> list[str]:
    """A cell's source and what its outputs have as text."""
    texts = [cell.source]
    for output in cell.get("outputs", []):
        data = {"text/plain": output.get("text", "")} | dict(output.get("data", {}))
        texts += [text for kind, text in data.items() if kind.startswith("text/")]
    return texts


def printed(notebook: Any) -> str:
    return "".join(o.text for cell in code_cells(notebook) for o in cell.outputs if o.output_type == "stream")


def figures(notebook: Any) -> int:
    return sum("image/png" in o.get("data", {}) for cell in code_cells(notebook) for o in cell.outputs)


# ---- Running ----
@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel of this interpreter, by its name; nothing of the user's Jupyter is read or written."""
    for variable in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable.lower()))
    folder = tmp_path / "jupyter_data_dir/kernels/of_the_tests"
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "tests", "language": "python"}))
    return folder.name


def run(notebook: Any, kernel: str) -> Any:
    """Executes all cells from top to bottom in the notebooks' folder, as Jupyter does."""
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(FOLDER)}}
    return NotebookClient(notebook, timeout=SECONDS, kernel_name=kernel, resources=resources).execute()


def files_of_the_checkout() -> dict[str, int]:
    """All files by size, but for those of git, of the environment and of caches."""
    sizes = {}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        sizes |= {path: os.path.getsize(path) for name in names if os.path.exists(path := os.path.join(folder, name))}
    return sizes


@pytest.mark.notebook
@pytest.mark.timeout(SECONDS + 300)
def test_the_papers_notebook_runs(kernel: str) -> None:
    """Its cells compare and assert; here, that they have shown what the text says they do."""
    before, stored = files_of_the_checkout(), read(PAPER)
    executed = run(read(PAPER), kernel)
    matches = [float(share) for share in re.findall(r"exact match (\d+\.\d)%", printed(executed))]
    assert len(matches) == 3  # of the last weights, and of the averaged ones with two searches
    assert min(matches[1:]) >= 80
    assert figures(executed) == figures(stored) >= 14
    assert [o for cell in code_cells(executed) for o in cell.outputs if o.get("name") == "stderr"] == []
    assert files_of_the_checkout() == before


@pytest.mark.notebook
@pytest.mark.timeout(SECONDS + 300)
def test_the_marian_notebook_runs(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a random model in place of OPUS-MT's: its loss falls, and it is saved and loaded."""
    before = files_of_the_checkout()
    torch.manual_seed(0)
    folder = opus_mt_folder(tmp_path / "opus-mt")
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"max_length": 16}))
    for name, value in (("MARIAN_MODEL", str(folder)), ("STEPS", "20"), ("LEARNING_RATE", "0.01")):
        monkeypatch.setenv(name, value)
    executed = run(read(MARIAN), kernel)
    losses = re.search(r"validation loss: (\S+) before, (\S+) after 20 updates", printed(executed))
    assert losses is not None
    assert float(losses[2]) < float(losses[1])
    assert len(re.findall(r"^(?:before|after): +BLEU \d+\.\d\d \(nrefs:1\|", printed(executed), re.MULTILINE)) == 2
    assert figures(executed) == 1
    assert files_of_the_checkout() == before


# ---- As stored ----
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_are_valid_and_linked(name: str) -> None:
    notebook = json.loads(NOTEBOOKS[name].read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    nbformat.validate(notebook)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"  # which every Jupyter has
    assert NOTEBOOKS[name].stat().st_size < MOST_BYTES
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    assert any(f"](../notebooks/{name})" in page for page in pages)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_outputs_are_of_one_run_from_top_to_bottom_without_noise(name: str) -> None:
    """No errors, warnings or progress bars, and nothing of the machine that they were made on."""
    notebook = read(name)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert figures(notebook) > 0
    outputs = [output for cell in cells for output in cell.outputs]
    assert [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"] == []
    texts = [text for cell in notebook.cells for text in texts_of(cell)]
    assert [match.group() for text in texts for match in MACHINE_PATH.finditer(text)] == []
