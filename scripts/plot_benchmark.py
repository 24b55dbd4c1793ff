"""Draws results of `python -m benchmarks ... --json F.json` as bars: a panel for each table that has rounds.

    python -m scripts.plot_benchmark tiny.json small.json base.json --tables "greedy, all lines" --output real.png

A bar is the median, its line goes from the slowest to the fastest round, and its number is the table's ratio.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OURS, OTHERS, LINES = "#2166ac", "#d8a35d", "#555555"


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files with results, of the same machine")
    parser.add_argument("--tables", nargs="*", help="beginnings of titles (default: all tables with rounds)")
    parser.add_argument("--output", type=Path, required=True, help="PNG or SVG file")
    options = parser.parse_args(arguments)
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in options.results]
    machines = {f"{one['machine']['cpu']}, {one['settings']['threads']} threads" for one in reports}
    if len(machines) > 1:
        raise SystemExit(f"plot_benchmark: the results are of {' and of '.join(sorted(machines))}; draw one chart each")
    panels = [panel for report in reports for panel in panels_of(report, options.tables)]
    if not panels:
        raise SystemExit("plot_benchmark: there is no such table with rounds in these files")
    draw(panels, f"{machines.pop()}, {reports[-1]['machine']['date']}", options.output)


def panels_of(report: dict[str, Any], titles: Sequence[str] | None) -> list[tuple[str, dict[str, Any]]]:
    """Returns titles and tables to be drawn; a title names the model."""
    model = report["settings"].get("model") or report["settings"]["config"]
    tables = {title: table for title, table in report["tables"].items() if "rounds" in next(iter(table.values()))}
    wanted = [title for title in tables if not titles or any(map(title.startswith, titles))]
    return [(f"{model}: {title.partition(':')[0]}", tables[title]) for title in wanted]


def draw(panels: Sequence[tuple[str, dict[str, Any]]], title: str, output: Path) -> None:
    """Draws the panels side by side."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    most = max(len(table) for _, table in panels)
    figure = Figure(figsize=(4.5 * len(panels), 1.2 + 0.35 * most), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, (name, table) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        unit, *others = next(iter(table.values()))
        ratio = next(column for column in others if column.startswith("of "))
        values = [row[unit] for row in table.values()]
        errors = [(row[unit] - row["from"], row["to"] - row[unit]) for row in table.values()]
        colours = [OURS if name.startswith("ours") else OTHERS for name in table]
        bars = panel.barh(list(table), values, color=colours, xerr=list(zip(*errors, strict=True)), ecolor=LINES)
        panel.bar_label(bars, [f"{row[ratio]:.2f}" for row in table.values()], padding=4, fontsize=8)
        panel.set_title(name, fontsize=9)
        panel.set_xlabel(f"{unit}; numbers: ratio to {ratio.removeprefix('of ')}", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.margins(x=0.2)
        panel.invert_yaxis()
    figure.suptitle(title, fontsize=9)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)


if __name__ == "__main__":
    main()
