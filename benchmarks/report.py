"""Results as tables and as JSON."""

import platform
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from .workers import Timing

BASELINE = "marian"
INSTRUCTIONS = ("avx2", "avx_vnni", "avx512_f", "avx512_vnni", "avx512_bf16", "amx_int8")  # that products are fast with
Row = dict[str, Any]
Table = dict[str, Row]  # contender -> column -> value; None: unknown


@dataclass
class Report:
    """The results of a run: tables by title, whose `rounds` aren't printed, and notes below them."""

    command: str
    settings: dict[str, Any]
    tables: dict[str, Table] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())

    def __str__(self) -> str:
        lines = [", ".join(f"{name} {value}" for name, value in one.items()) for one in (self.machine, self.settings)]
        lines[1] = f"{self.command}: {lines[1]}"
        for title, table in self.tables.items():
            columns = list(dict.fromkeys(name for row in table.values() for name in row if name != "rounds"))
            rows = [(name, *(_cell(column, row.get(column)) for column in columns)) for name, row in table.items()]
            lines += ["", title, *align([("", *columns), *rows])]
        return "\n".join([*lines, "", *self.notes])


def compare(amount: float, unit: str, turns: dict[str, list[Timing]]) -> Table:
    """Makes rows of work per second, and of lines that differ; ratios are to Marian, or else to the first.

    A row has the median, the slowest and the fastest round, and the ratio of the medians.
    """
    first = BASELINE if BASELINE in turns else next(iter(turns))
    table: Table = {}
    for name, own in turns.items():
        rounds, base = ([timing.seconds for timing in timings] for timings in (own, turns[first]))
        found, ratio = [amount / one for one in rounds], statistics.median(base) / statistics.median(rounds)
        ends = {"from": min(found), "to": max(found), f"of {first}": ratio, "rounds": found}
        table[name] = {unit: amount / statistics.median(rounds), **ends}
        table[name]["other lines"] = count_different(own[-1].outputs, turns[first][-1].outputs)
    return table


def count_different(one: Sequence[Any] | None, other: Sequence[Any] | None) -> int | None:
    """Counts the lines that differ; None: there are none, as in training."""
    if one is None or other is None:
        return None
    return sum(own != theirs for own, theirs in zip(one, other, strict=True))


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column == "utilisation":
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 0.1 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def align(rows: list[tuple[str, ...]]) -> list[str]:
    """Makes lines of a table: the first and the last column begin at their left, the others end at their right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:-1]), row[-1]] for row in rows)
    return ["  ".join(cells).rstrip() for cells in lines]


def describe_machine() -> dict[str, Any]:
    """The machine and the versions that the figures depend on."""
    found = torch.cpu.get_capabilities()
    return {
        "cpu": ", ".join([found.get("cpu_name") or platform.machine(), *_generation()]),
        "instructions": " ".join(name for name in INSTRUCTIONS if found.get(name)) or "others",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "ctranslate2": version("ctranslate2") if find_spec("ctranslate2") else "none",
        "date": time.strftime("%Y-%m-%d"),
    }


def _generation() -> list[str]:
    """The numbers of a processor's generation on Linux, which the names of virtual machines' processors often lack."""
    info = Path("/proc/cpuinfo")
    found = re.findall(r"^(cpu family|model)\s*: (\d+)", info.read_text() if info.is_file() else "", re.MULTILINE)
    return [f"{name.removeprefix('cpu ')} {value}" for name, value in found[:2]]


def with_tables(page: Path, script: str, tables: str) -> str:
    """Returns a page's text with `tables` between a script's markers.

    Raises:
        SystemExit: The markers aren't there, once each and in this order.
    """
    text, begin = page.read_text(encoding="utf-8"), f"<!-- tables of scripts/{script}.py -->"
    end = f"<!-- end of the tables of scripts/{script}.py -->"
    if not (text.count(begin) == text.count(end) == 1 and text.index(begin) < text.index(end)):
        raise SystemExit(f"{script}: {page} needs the lines {begin} and {end}, once each and in this order")
    return f"{text.partition(begin)[0]}{begin}\n\n{tables}\n\n{end}{text.partition(end)[2]}"
