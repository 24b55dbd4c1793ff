"""scripts/gpu_report.py: its tables take the place of the last ones, and nothing is lost if a benchmark fails."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.report import with_tables
from scripts import gpu_report

DOCS = Path(__file__).parents[2] / "docs" / "performance.md"
BEGIN = "<!-- tables of scripts/gpu_report.py -->"
TINY = ["--configs", "tiny", "--device", "cpu", "--dtype", "float32"]
TINY += ["--tokens", "64", "--rounds", "1", "--batches", "1"]


@pytest.fixture
def docs(tmp_path):
    return shutil.copy(DOCS, tmp_path / "performance.md")


def test_tables_take_the_place_of_the_last_ones(docs, monkeypatch):
    outputs = iter(["first\n", "second\n", "third\n", "fourth\n", "fifth\n"])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout=next(outputs)))
    old = docs.read_text(encoding="utf-8")
    gpu_report.main(["--docs", str(docs), *TINY])
    gpu_report.main(["--docs", str(docs), *TINY, "--model", "outputs/m", "--input", "test.en"])
    text = docs.read_text(encoding="utf-8")
    for part in (
        "third\n```", "$ python -m benchmarks text --model outputs/m --input test.en --device cpu", "fifth\n```",
        "$ python -m benchmarks generate --config tiny --device cpu",
    ):  # fmt: skip
        assert part in text
    assert "first" not in text.replace(old.partition(BEGIN)[0], "")
    assert with_tables(docs, "gpu_report", "") == with_tables(DOCS, "gpu_report", "")


def test_a_benchmark_that_fails_leaves_the_file_as_it_was_and_one_that_takes_too_long_a_note(docs, monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="")
    outputs = iter([SimpleNamespace(returncode=0, stdout="figures"), failed, failed])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: next(outputs))
    with pytest.raises(SystemExit, match=r"`python -m benchmarks generate .* --peers marian --new-tokens .*` failed"):
        gpu_report.main(["--docs", str(docs), *TINY])
    assert docs.read_bytes() == DOCS.read_bytes()

    def stopped(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", stopped)
    _, command, note, *_ = gpu_report.measure(["generate", "--device", "cuda"]).splitlines()
    assert command == "$ python -m benchmarks generate --device cuda"
    assert note == "not measured: it was stopped after 110 seconds"
