"""scripts/speed.py: its tables take the place of the last ones, and a part without a result leaves a note."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import speed

ROOT = Path(__file__).parents[2]
PAGES = ("docs/performance.md", "README.md", "README.zh.md")
PARTS = ["tiny", "base", "opus", "text", "train", "ablate"]
MACHINE = {"cpu": "a CPU", "instructions": "avx2", "threads": 2, "date": "2026-01-01"}
MACHINE |= {"torch": "2.9", "transformers": "5.1", "ctranslate2": "4.7"}
# Command -> titles of its tables, and contenders.
REPORTS = {
    "generate": ([f"{case}: 128 target tokens per round" for case in speed.CASES.values()], speed.IN_THE_README),
    "text": (["beams: 1, 500 lines", "beams: 4, 500 lines", "start"], speed.IN_THE_README),
    "train": (["updates: 2,000 target tokens per round"], ["ours", "marian", "torch"]),
    "ablate": (["updates, kept memory", "updates, fresh memory"], ["everything", "loss in chunks"]),
}


def row(name):
    """What `python -m benchmarks` says of a contender: all columns of all commands."""
    figure = 1_000.0 if name == "marian" else 1_800.0
    columns = {"tokens/s": figure, "sentences/s": figure, "of marian": figure / 1_000, "other lines": 3}
    return {**columns, "ms, single lines": 12.3, "s": 0.5, "s per batch": 1.5, "of everything": 1.25, "peak MB": 2_000}


@pytest.fixture
def pages(tmp_path):
    for name in PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "quickstart" / "model").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def ran(monkeypatch):
    """The parts that ran, in place of the benchmarks; those in `failing` fail."""

    def run(arguments, seconds):
        command = arguments[0]
        part = arguments[arguments.index("--config") + 1] if command == "generate" else command
        run.parts.append(part)
        if part in run.failing:
            return f"stopped after {seconds} seconds"
        titles, contenders = REPORTS[command]
        tables = {title: {name: row(name) | run.changes.get(name, {}) for name in contenders} for title in titles}
        settings = {"config": "base", "new_tokens": 16}
        report = {"tables": tables, "settings": settings, "notes": run.notes, "machine": dict(MACHINE)}
        Path(arguments[arguments.index("--json") + 1]).write_text(json.dumps(report))
        return ""

    run.parts, run.failing, run.notes, run.changes = [], set(), [], {"ours": {"other lines": 0}}
    monkeypatch.setattr(speed, "run", run)
    return run


def measure(pages, *more):
    given = ["--pages", str(pages), "--output", str(pages / "results"), "--quickstart", str(pages / "quickstart")]
    speed.main([*given, *more])
    return {name: (pages / name).read_text(encoding="utf-8") for name in PAGES}


def test_tables_take_the_place_of_the_last_ones(pages, ran):
    measure(pages)
    texts = measure(pages)
    assert ran.parts == 2 * PARTS
    page, english, chinese = texts.values()
    for line, count in (
        ("a CPU (avx2), 2 threads, 2026-01-01; torch 2.9, transformers 5.1, CTranslate2 4.7.", 1),
        ("| engine, 8 bits | 1,800 (1.80) | 1,800 (1.80) | 1,800 (1.80) | 1,800 (1.80) | 2,000 |", 3),
        ("| engine | 1,800 (1.80) | 12.3 | 0 |", 2),
        ("| engine, 8 bits | 1,800 (1.80) | 12.3 | 3 |", 2),
        ("| its export to CTranslate2 | 0.50 | 2,000 |", 1),
        ("| `torch.nn.Transformer` | 1,800 (1.80) | 2,000 |", 1),
        ("| loss in chunks | 1.50 (1.25) | 2,000 |", 1),
        ("not measured", 0),
        ("differ from Marian's in float32", 0),
    ):
        assert page.count(line) == count, line
    assert "| `MarianMTModel` | 1,000 (1.00) |" in english
    assert "| engine, 8 bits | 1,800 (1.80) |" in english
    assert "| 引擎, int8 | 1,800 (1.80) |" in chinese
    for name, text in texts.items():  # everything else is as it was
        old, begin = (ROOT / name).read_text(encoding="utf-8"), "<!-- tables of scripts/speed.py -->"
        end = "<!-- end of the tables of scripts/speed.py -->"
        assert (text.partition(begin)[0], text.partition(end)[2]) == (old.partition(begin)[0], old.partition(end)[2])


def test_a_part_without_a_result_and_other_translations_leave_a_note(pages, ran):
    shutil.rmtree(pages / "quickstart")
    ran.failing, ran.notes = {"base", "train"}, ["left out: beam 4, batch 32, as 9 seconds were over", "peak: 3"]
    texts = measure(pages, "--seconds", "9")
    for line in (
        "not measured: base, stopped after 9 seconds", "not measured: train, stopped after 9 seconds",
        "not measured: real text and start-up", "tiny: left out: beam 4, batch 32, as 9 seconds were over",
        "### OPUS-MT's size",
    ):  # fmt: skip
        assert line in texts["docs/performance.md"]
    assert [texts[name] for name in PAGES[1:]] == [(ROOT / name).read_text(encoding="utf-8") for name in PAGES[1:]]
    ran.parts, ran.failing, ran.changes = [], set(), {"ours": {"other lines": 2}}
    texts = measure(pages, "--resume")
    assert "| engine |" in texts["README.md"]
    assert ran.parts == ["base", "train"], "only what had no result"
    note = "- base: 2 lines of the engine differ from Marian's in float32, greedy, batch 1: 128 target"
    assert note in texts["docs/performance.md"]


def test_results_that_do_not_belong_together_are_refused(pages, ran):
    measure(pages)
    file = pages / "results" / "base.json"
    file.write_text(file.read_text().replace("a CPU", "another"))
    with pytest.raises(SystemExit, match="several machines or versions; nothing is written"):
        measure(pages, "--resume")
    ran.failing = set(PARTS)
    with pytest.raises(SystemExit, match=r"no results; nothing is written(?s:.*)not measured: tiny"):
        measure(pages)
    ran.parts = []
    (pages / "README.zh.md").write_text("", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"speed: .*README.zh.md needs the lines <!-- tables of scripts/speed"):
        measure(pages)
    assert ran.parts == []


def test_a_part_that_takes_too_long_is_stopped_with_its_processes(monkeypatch):
    child = "import time; time.sleep(600)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', '{child}'], stdout=sys.stdout)"
    popen = subprocess.Popen
    started = []

    def instead(command, **options):
        started.append(popen([sys.executable, "-c", f"{code}.wait()"], stdout=subprocess.PIPE, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", instead)
    began = time.monotonic()
    assert speed.run(["train"], 1) == "stopped after 1 seconds"
    started[0].stdout.read()  # ends when no process has it open
    assert time.monotonic() - began < 60


def test_all_parts_together_take_40_minutes_at_most():
    assert sum(speed.SECONDS.values()) <= 40 * 60
