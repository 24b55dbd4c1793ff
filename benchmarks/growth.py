"""How the time of decoding grows with each of its sizes, for ours and the floor."""

import dataclasses
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from .decoding import decoding_entrants
from .report import describe_machine, new_figure
from .work import Case, Size, uniform_batch
from .workers import LocalWorker, take_turns

LABELS = {
    "batch": "sentences per batch",
    "length": "tokens of source and translation",
    "beam": "beams",
    "vocabulary": "tokens in the vocabulary",
    "layers": "layers per stack",
}
VALUES = {
    "batch": (1, 4, 16, 64, 256),
    "length": (16, 64, 256, 1024),
    "beam": (1, 2, 4, 8, 16),
    "vocabulary": (1_000, 4_000, 16_000, 64_000),
    "layers": (2, 4, 8, 12),
}


@dataclass(frozen=True)
class Point:
    """What is decoded; one number varies while the others keep these defaults."""

    batch: int = 8
    length: int = 16
    beam: int = 4
    vocabulary: int = 4_000
    layers: int = 2

    @property
    def size(self) -> Size:
        """A narrow model, so that every point is cheap."""
        return Size(64, 4, self.layers, self.layers, 256, self.vocabulary)

    @property
    def case(self) -> Case:
        """One batch without padding."""
        batch = uniform_batch(self.size, self.batch, self.length, self.length)
        return Case("growth", (batch,), self.beam)


def measure_growth(
    device: str, dtype: torch.dtype, rounds: int, report: Callable[[str], None]
) -> dict[str, list[dict[str, float]]]:
    """Measures seconds per batch of ours and the floor, for every value of every axis, in this process."""
    points: dict[str, list[dict[str, float]]] = {}
    for axis, values in VALUES.items():
        points[axis] = []
        for value in values:
            report(f"{axis} {value}")
            seconds = _seconds(dataclasses.replace(Point(), **{axis: value}), device, dtype, rounds)
            points[axis].append({"value": value, **seconds})
    return points


def _seconds(point: Point, device: str, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    case = point.case
    with TemporaryDirectory() as folder:
        entrants = decoding_entrants([], point.size, (case,), device, dtype, None, Path(folder))
        workers = [LocalWorker(one, device, None) for one in entrants if one.name in ("ours", "floor")]
    timings = take_turns(workers, case.name, rounds)
    return {name: statistics.median(turn.seconds for turn in turns) for name, turns in timings.items()}


def write_growth(measured: dict[str, list[dict[str, float]]], folder: Path) -> list[Path]:
    """Writes a plot of each axis, and growth.json with the numbers; returns the plots' files."""
    folder.mkdir(parents=True, exist_ok=True)
    contents: dict[str, Any] = {"machine": describe_machine(), "at": dataclasses.asdict(Point()), "seconds": measured}
    (folder / "growth.json").write_text(json.dumps(contents, indent=1) + "\n")
    files = []
    for axis, points in measured.items():
        figure, (panel,) = new_figure(1, width=4.2)
        for name, colour in (("ours", "#2166ac"), ("floor", "#888888")):
            panel.plot([p["value"] for p in points], [p[name] for p in points], "o-", color=colour, label=name)
        panel.set(xscale="log", yscale="log", xlabel=LABELS[axis], ylabel="seconds per batch")
        panel.set_xticks([p["value"] for p in points], [f"{p['value']:,}" for p in points])
        panel.xaxis.minorticks_off()
        others = {name: value for name, value in dataclasses.asdict(Point()).items() if name != axis}
        panel.set_title(", ".join(f"{name} {value:,}" for name, value in others.items()), fontsize=8)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
        files.append(folder / f"growth_{axis}.png")
        figure.savefig(files[-1], dpi=150)
    return files
