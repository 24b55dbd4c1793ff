"""Results as a table, as JSON and as a chart."""

import dataclasses
import json
import platform
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from .work import BenchmarkError, Case, Size
from .workers import Facts, Timing

BASELINE, FLOOR = "marian", "floor"


@dataclass(frozen=True)
class Result:
    """One contender in one case.

    Attributes:
        name: The contender's.
        tokens_per_second: Median of the rounds.
        rounds: Tokens per second of each round.
        ratio: Ratio to the baseline's median.
        floor_share: Ratio to the floor's median.
        utilisation: Model FLOPs per second divided by the machine's peak.
        different: Translations that differ from the baseline's; None: in training.
        peak_memory: Bytes beyond those that the libraries take; None: not measured.
        parameters: Number of trained parameters; None: unknown.
        note: How it is called.
    """

    name: str
    tokens_per_second: float
    rounds: list[float]
    ratio: float
    floor_share: float | None
    utilisation: float | None
    different: int | None
    peak_memory: int | None
    parameters: int | None
    note: str


@dataclass
class CaseResult:
    """All contenders in one case.

    Attributes:
        name: Of the case.
        tokens: Target tokens per round; None: they differ between contenders.
        padding: Share of padding in the batches, or None likewise.
        model_flops: Model FLOPs per round, or None likewise.
        results: One result per contender.
    """

    name: str
    tokens: int | None
    padding: float | None
    model_flops: float | None
    results: list[Result]


@dataclass
class Report:
    """The results of a complete run.

    Attributes:
        command: "train" or "generate".
        size: Size of the models.
        settings: Options of the run.
        formula: Formula of the model FLOPs.
        peak_flops: The machine's measured peak; None: no utilisation is computed.
        peak_at: The product with which the peak was measured.
        left_out: Peer -> reason.
        baseline: The contender that ratios refer to.
        cases: The results.
        machine: The machine and the versions.
    """

    command: str
    size: Size
    settings: dict[str, Any]
    formula: str
    peak_flops: float | None
    peak_at: str
    left_out: dict[str, str]
    baseline: str = ""
    cases: list[CaseResult] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())

    def add(
        self,
        name: str,
        case: Case | None,
        timings: dict[str, list[Timing]],
        facts: dict[str, Facts],
        memory: dict[str, int | None],
    ) -> None:
        """Adds a case's timings; without a `case`, the numbers of tokens differ between contenders."""
        flops = None if case is None else case.flops(self.size)
        rates = {who: [turn.tokens / turn.seconds for turn in turns] for who, turns in timings.items()}
        medians = {who: statistics.median(rounds) for who, rounds in rates.items()}
        self.baseline = BASELINE if BASELINE in medians else next(iter(medians))
        results = []
        for who, median in medians.items():
            used = None
            if case is not None and flops is not None and self.peak_flops and facts[who].in_dtype:
                used = median * flops / case.tokens / self.peak_flops
            share = median / medians[FLOOR] if FLOOR in medians else None
            ratio, fact = median / medians[self.baseline], facts[who]
            other = _different(timings[who][-1], timings[self.baseline][-1])
            more = (used, other, memory[who], fact.parameters, fact.note)
            results.append(Result(who, median, rates[who], ratio, share, *more))
        tokens, padding = (None, None) if case is None else (case.tokens, case.padding)
        self.cases.append(CaseResult(name, tokens, padding, flops, results))

    def to_json(self) -> str:
        """Returns all fields as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        lines = [f"{self.command}: {self.size}", f"on {', '.join(f'{k} {v}' for k, v in self.machine.items())}"]
        lines += [", ".join(f"{name} {value}" for name, value in self.settings.items())]
        for case in self.cases:
            lines += ["", *_table(case, self.baseline)]
        lines.append("")
        if self.peak_flops is not None:
            lines.append(f"peak: {self.peak_flops / 1e9:,.1f} GFLOP/s, {self.peak_at}")
            lines.append(self.formula)
        lines += [f"left out: {name}, {reason}" for name, reason in self.left_out.items()]
        return "\n".join(lines)


def _different(one: Timing, other: Timing) -> int | None:
    if one.outputs is None or other.outputs is None:
        return None
    return sum(own != theirs for own, theirs in zip(one.outputs, other.outputs, strict=True))


def _table(case: CaseResult, baseline: str) -> list[str]:
    title = case.name
    if case.tokens is not None:
        title += f": {case.tokens:,} target tokens per round, {case.padding:.1%} padding, {case.model_flops:.3g} FLOPs"
    header = ("", "tokens/s", "from", "to", f"of {baseline}", "of floor", "utilisation", "other lines")
    return [title, *align([(*header, "peak MB", "parameters", ""), *map(_row, case.results)])]


def align(rows: list[tuple[str, ...]]) -> list[str]:
    """Makes lines of a table: the first and the last column begin at their left, the others end at their right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:-1], widths[1:-1], strict=True))]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines


def _row(result: Result) -> tuple[str, ...]:
    def unless_none(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        result.name,
        f"{result.tokens_per_second:,.0f}",
        f"{min(result.rounds):,.0f}",
        f"{max(result.rounds):,.0f}",
        f"{result.ratio:.2f}",
        unless_none(result.floor_share, ".0%"),
        unless_none(result.utilisation, ".1%"),
        unless_none(result.different, ","),
        unless_none(None if result.peak_memory is None else result.peak_memory / 1e6, ",.0f"),
        unless_none(result.parameters, ","),
        result.note,
    )


def describe_machine() -> dict[str, Any]:
    """The machine and the versions that the figures depend on."""
    return {
        "cpu": _cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def new_figure(panels: int, width: float = 3.6, height: float = 3.2) -> tuple[Any, list[Any]]:
    """Makes a figure with panels side by side, which needs no screen.

    Raises:
        BenchmarkError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchmarkError("charts need matplotlib: pip install hf-vanilla-transformer[plot]") from error
    figure = Figure(figsize=(width * panels, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def draw(report: Report, file: Path) -> None:
    """Draws bars of tokens per second, one panel per case, each bar with its ratio to the baseline."""
    most = max(len(case.results) for case in report.cases)
    figure, panels = new_figure(len(report.cases), height=1.2 + 0.35 * most)
    for panel, case in zip(panels, report.cases, strict=True):
        names = [result.name for result in case.results]
        rates = [result.tokens_per_second for result in case.results]
        colours = [_colour(name) for name in names]
        errors = [[rate - min(r.rounds), max(r.rounds) - rate] for rate, r in zip(rates, case.results, strict=True)]
        bars = panel.barh(names, rates, color=colours, xerr=list(zip(*errors, strict=True)), ecolor="#555555")
        panel.bar_label(bars, [f"{result.ratio:.2f}" for result in case.results], padding=4, fontsize=8)
        panel.set_title(case.name, fontsize=9)
        panel.set_xlabel("target tokens per second", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.margins(x=0.2)
        panel.invert_yaxis()
    figure.suptitle(f"{report.command}; numbers: ratio to {report.baseline}", fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def _colour(name: str) -> str:
    if name == FLOOR:
        return "#bbbbbb"
    return "#2166ac" if name.startswith("ours") else "#d8a35d"
