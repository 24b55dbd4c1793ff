"""Measures the speed on this machine's CPU, and writes the tables into docs/performance.md and both READMEs.

    python -m scripts.speed
    python -m scripts.speed --resume
    python -m scripts.speed --pages /tmp/copy --output /tmp/speed --configs tiny --rounds 1 --new-tokens 4 --seconds 60

The parts, each a run of `python -m benchmarks`, follow one another, in 40 minutes at most. One that fails or runs out
of its time is stopped, and the page says so. The results are kept in `--output`; the pages are written after the last
part. `--resume` measures only the parts without a result there, which also writes the tables again in another form.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Row, Table, with_tables

ROOT = Path(__file__).parents[1]
SECONDS = {"tiny": 270, "base": 600, "opus": 720, "text": 180, "train": 360, "ablate": 270}  # of the parts, at most
OTHERS = ("text", "train", "ablate")
LAST_CASE = 260  # seconds that the start and the last case of a size may take: none is begun when less is left
CASES = {
    "greedy, 1": "greedy, batch 1",
    "greedy, 32": "greedy, batch 32",
    "beam 4, 1": "beam 4, batch 1",
    "beam 4, 32": "beam 4, batch 32",
}
PARAMETERS = {
    "tiny": "tiny (1,965,056 parameters)",
    "base": "base (63,082,496 parameters)",
    "opus": "OPUS-MT's size (6 + 6 layers, 512 wide, 58,101 tokens)",
}
NAMES = {
    "marian": "Marian",
    "marian, kept memory": "Marian, freed memory kept",
    "ours": "engine",
    "ours, int8": "engine, 8 bits",
    "ctranslate2": "CTranslate2",
    "ctranslate2, int8": "CTranslate2, 8 bits",
}
TRAINERS = NAMES | {
    "ours": "this package",
    "ours, plain call": "this package, no shortcuts",
    "torch": "`torch.nn.Transformer`",
}
STARTS = {"ours": "a checkpoint, by the engine", "ctranslate2": "its export to CTranslate2"}
VERSIONS = {"torch": "torch", "transformers": "transformers", "CTranslate2": "ctranslate2"}
IN_THE_README = ("marian", "ours", "ours, int8", "ctranslate2", "ctranslate2, int8")
CHINESE = {
    "greedy": "贪心",
    "beam 4": "4 束",
    "engine": "引擎",
    "8 bits": "int8",
    "tokens per second": "词元/秒",
    "threads of": "线程,",
}


@dataclass
class Results:
    """The reports of the parts that ended well, as `python -m benchmarks --json` writes them, and why others didn't."""

    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def tables(self, part: str) -> dict[str, Table]:
        """Returns the tables of a part by their titles, none if it has no result."""
        return self.reports.get(part, {}).get("tables", {})


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and replaces what stands between the markers."""
    options = parse_arguments(arguments)
    pages = {name: options.pages / name for name in ("docs/performance.md", "README.md", "README.zh.md")}
    for page in pages.values():
        with_tables(page, "speed", "")  # fails now rather than after minutes if the markers are missing
    began, results = time.monotonic(), measure(options)
    machine = machine_of(results)
    new = {"docs/performance.md": page_of(results, machine)}
    if base := by_contender(results.tables("base")):
        new |= {"README.md": readme_table(base, machine, {}), "README.zh.md": readme_table(base, machine, CHINESE)}
    else:
        print("The READMEs are unchanged: base has no result.")
    texts = {pages[name]: with_tables(pages[name], "speed", text) for name, text in new.items()}
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")
        print(f"written: {page}")
    print(*results.notes, f"{(time.monotonic() - began) / 60:.1f} minutes", sep="\n")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=Path, default=ROOT, help="folder of the pages (default: the checkout)")
    results = "folder of the results (default: outputs/speed)"
    parser.add_argument("--output", type=Path, default=ROOT / "outputs" / "speed", help=results)
    parser.add_argument("--resume", action="store_true", help="keep the results that are there")
    parser.add_argument("--configs", nargs="+", choices=PARAMETERS, default=list(PARAMETERS), help="sizes of decoding")
    others = "other parts than decoding"
    parser.add_argument("--parts", nargs="*", choices=OTHERS, default=list(OTHERS), help=f"{others} (default: all)")
    trained = "folder of the quickstart's results (default: outputs/quickstart)"
    parser.add_argument("--quickstart", type=Path, default=ROOT / "outputs" / "quickstart", help=trained)
    parser.add_argument("--training-config", default="base", help="size of training (default: base)")
    parser.add_argument("--threads", default=str(os.cpu_count()), help="threads of each process (default: the cores)")
    parser.add_argument("--rounds", type=int, default=3, help="timed turns of each (default: 3)")
    parser.add_argument("--new-tokens", default="16", help="tokens of all translations (default: 16)")
    parser.add_argument("--lines", default="500", help="of the quickstart's test set (default: 500)")
    parser.add_argument("--tokens", default="2048", help="target tokens per batch of training (default: 2048)")
    parser.add_argument("--seconds", type=int, help="most seconds of each part (default: its own)")
    return parser.parse_args(arguments)


# ---- Measuring ----
def measure(options: argparse.Namespace) -> Results:
    """Runs all parts."""
    results = Results()
    options.output.mkdir(parents=True, exist_ok=True)
    parts = parts_of(options)
    for part in OTHERS:
        if part not in options.parts:
            del parts[part]
            results.notes.append(f"not measured: {part}")
    if "text" in parts and not (options.quickstart / "model").is_dir():
        del parts["text"]
        results.notes.append("not measured: real text and start-up, which need the model of `make quickstart`")
    for number, (part, arguments) in enumerate(parts.items(), start=1):
        file = options.output / f"{part}.json"
        print(f"{time.strftime('%H:%M:%S')} part {number} of {len(parts)}: {part}", flush=True)
        if not (options.resume and file.is_file()):
            file.unlink(missing_ok=True)
            seconds = options.seconds or SECONDS[part]
            more = ["--rounds", str(options.rounds), "--threads", options.threads, "--json", str(file.resolve())]
            if reason := run([arguments[0], *more, *arguments[1:]], seconds):
                file.unlink(missing_ok=True)  # it may end within a line
                results.notes.append(f"not measured: {part}, {reason}")
                print(results.notes[-1], flush=True)
                continue
        results.reports[part] = json.loads(file.read_text(encoding="utf-8"))
        results.notes += [f"{part}: {one}" for one in notes_of(results.reports[part])]
    return results


def notes_of(report: Mapping[str, Any]) -> Iterator[str]:
    """Gives what was left out, and in which table the engine's translations aren't Marian's."""
    yield from (note for note in report["notes"] if note.startswith("left out"))
    for title, table in report["tables"].items():
        if lines := table.get("ours", {}).get("other lines"):
            yield f"{lines:,} lines of the engine differ from Marian's in float32, {title}"


def parts_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the arguments of `python -m benchmarks` for each part."""
    cpu, trained = ["--device", "cpu"], options.quickstart.resolve()
    files = ["--model", str(trained / "model"), "--input", str(trained / "corpus" / "test.en")]
    parts = {}
    for config in options.configs:
        seconds = options.seconds or SECONDS[config]
        own = ["--new-tokens", options.new_tokens, "--seconds", str(max(seconds - LAST_CASE, seconds // 2))]
        parts[config] = ["generate", "--config", config, "--batches", "1", *cpu, *own]
    updates = ["--config", options.training_config, "--batches", "1", *cpu]
    return parts | {
        "text": ["text", *files, "--lines", options.lines, *cpu],
        "train": ["train", *updates, "--tokens", options.tokens, "--peers", "marian", "torch", "--budget", "120"],
        "ablate": ["ablate", *updates, "--only", "loss in chunks", "--rounds", str(min(options.rounds, 2))],
    }


def run(arguments: list[str], seconds: int) -> str:
    """Runs a benchmark with all of its processes, for some seconds at most; returns why there is no result, or ""."""
    print(shlex.join(["python", "-m", "benchmarks", *arguments]), flush=True)
    environment = dict(os.environ)
    if torch.backends.cpu.get_cpu_capability() == "AVX512":  # CTranslate2 doesn't use it by itself
        environment.setdefault("CT2_FORCE_CPU_ISA", "AVX512")
    command = [sys.executable, "-m", "benchmarks", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds} seconds"
    finally:
        stop(process)
    return f"failed with exit code {code}" if code else ""


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ends a process that leads a group, and the contenders that it started."""
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---- The pages ----
def machine_of(results: Results) -> dict[str, Any]:
    """Returns the machine of all results.

    Raises:
        SystemExit: There are none, or they are of several machines or versions.
    """
    machines = [report["machine"] for report in results.reports.values()]
    dates = sorted({machine.pop("date") for machine in machines})
    if not machines or any(one != machines[0] for one in machines):
        found = "results of several machines or versions" if machines else "no results"
        raise SystemExit("\n".join([f"speed: {found}; nothing is written. Run it without --resume", *results.notes]))
    return machines[0] | {"date": " to ".join(dict.fromkeys([dates[0], dates[-1]]))}


def page_of(results: Results, machine: Mapping[str, Any]) -> str:
    """Returns all tables, with their headings and what they are of."""
    where = f"{machine['cpu']} ({machine['instructions']}), {machine['threads']} threads, {machine['date']}"
    blocks = [f"{where}; {', '.join(f'{name} {machine[key]}' for name, key in VERSIONS.items())}."]
    for part, title in PARAMETERS.items():
        if rows := by_contender(results.tables(part)):
            tokens = results.reports[part]["settings"]["new_tokens"]
            blocks += [f"### {title}", markdown(f"tokens per second (to Marian), {tokens} a sentence", rows, NAMES)]
    blocks += [*text_tables(results.tables("text")), *training_tables(results)]
    blocks += ["\n".join(f"- {note}." for note in results.notes)] if results.notes else []
    return "\n\n".join(blocks)


def text_tables(tables: Mapping[str, Table]) -> Iterator[str]:
    """Gives the tables of the quickstart's model."""
    if tables:
        yield "### Real text"
    for title, table in tables.items():
        if title == "start":
            rows = {who: {"seconds": number(row["s"]), "peak MB": f"{row['peak MB']:,}"} for who, row in table.items()}
            yield from ["### Start-up", markdown("process of `translate` with one line", rows, STARTS)]
        else:
            search = title.replace("beams: 1,", "greedy,").replace("beams: 4,", "beam 4,")
            yield markdown(search, {who: text_row(row) for who, row in table.items()}, NAMES)


def training_tables(results: Results) -> Iterator[str]:
    """Gives the tables of updates, compared with other implementations and without a shortcut."""
    for title, table in results.tables("train").items():
        corner = f"{results.reports['train']['settings']['config']}, {title.removeprefix('updates: ')}"
        yield from ["### Training", markdown(corner, {who: training_row(row) for who, row in table.items()}, TRAINERS)]
    if shortcuts := results.tables("ablate").get("updates, kept memory"):
        rows = {who: ablation_row(row) for who, row in shortcuts.items()}
        yield markdown("left out of this package", rows, {**NAMES, "everything": "nothing", "plain model": "all"})


def by_contender(tables: Mapping[str, Table]) -> dict[str, Row]:
    """Returns the cells of one size: contender -> search and sentences -> speed and ratio; at the end, the peak."""
    rows: dict[str, Row] = {}
    for title, table in tables.items():
        case = next(name for name, own in CASES.items() if title.startswith(f"{own}:"))
        for name, row in table.items():
            rows.setdefault(name, {})[case] = speed(row, "tokens/s")
    for name in rows:
        rows[name]["peak MB"] = f"{table[name]['peak MB']:,}"
    return rows


def readme_table(rows: Mapping[str, Row], machine: Mapping[str, Any], translations: Mapping[str, str]) -> str:
    """Returns the table of base for a README, with the words of its language."""
    where = f"{machine['threads']} threads of {machine['cpu']} ({machine['instructions']})"
    corner = f"tokens per second, {where}, {machine['date']}"
    cells = {
        name: {case: rows[name][case] for case in CASES if case in rows[name]} for name in IN_THE_README if name in rows
    }
    table = markdown(corner, cells, {**NAMES, "marian": "`MarianMTModel`"})
    for english, other in translations.items():
        table = table.replace(english, other)
    return table


def text_row(row: Row) -> Row:
    """Returns the cells of real text."""
    return {
        "sentences per second (to Marian)": speed(row, "sentences/s"),
        "ms for a single line": number(row["ms, single lines"]),
        "lines that differ from Marian's": f"{row['other lines']:,}",
    }


def training_row(row: Row) -> Row:
    """Returns the cells of training."""
    return {"tokens per second (to Marian)": speed(row, "tokens/s"), "peak MB": f"{row['peak MB']:,}"}


def ablation_row(row: Row) -> Row:
    """Returns the cells of a shortcut that is left out."""
    return {
        "seconds per update (to nothing left out)": f"{number(row['s per batch'])} ({number(row['of everything'])})",
        "memory of updates, MB": f"{row['peak MB']:,}",
    }


def speed(row: Row, unit: str) -> str:
    """Returns a speed, and its ratio to Marian or to what the run was compared with."""
    ratio = next(value for name, value in row.items() if name.startswith("of "))
    return f"{number(row[unit])} ({ratio:.2f})"


def number(value: float) -> str:
    """Returns a figure with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def markdown(corner: str, rows: Mapping[str, Row], names: Mapping[str, str]) -> str:
    """Returns a table; "-" is what a row lacks."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [[corner, *columns], ["---"] * (1 + len(columns))]
    lines += [[names.get(name, name), *(row.get(column, "-") for column in columns)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
