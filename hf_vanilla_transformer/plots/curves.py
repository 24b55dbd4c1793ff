"""The plots: attention, positions, masks, schedules and learning curves.

They need matplotlib, but no screen, and don't change its global state.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .attention import draw_attention, plot_attention
from .drawing import (
    WIDTH,
    Axes,
    Figure,
    Line2D,
    count_updates,
    line_style,
    name_lines,
    name_panel,
    new_figure,
    save_figure,
    set_log_scale,
    set_title,
)
from .paper import Schedule, plot_masks, plot_positions, plot_schedule

# Entry of a log -> the panel's title, and the unit on its axis.
CURVES = {
    "loss": ("training loss", "nats per token"),
    "eval_perplexity": ("validation perplexity", "perplexity per token"),
    "eval_bleu": ("validation BLEU", "BLEU"),
    "eval_exact_match": ("validation exact match", "% of outputs"),
    "eval_wer": ("validation WER", "% of outputs with an error"),
    "eval_ser": ("validation SER", "errors per 100 symbols"),
}
Log = Sequence[Mapping[str, Any]]


def plot_training(runs: Mapping[str, Log], title: str | None = None) -> Figure:
    """Learning curves: loss of training, and perplexity, BLEU and errors of symbols of validation, by updates.

    Args:
        runs: Name -> the Trainer's log, `trainer.state.log_history` or `log_history` of a trainer_state.json.
        title: Is written above the panels.

    Returns:
        A figure with one panel for each of `CURVES` that occurs in any log.

    Raises:
        ValueError: None of them occurs in a log.
    """
    shown = [key for key in CURVES if any(key in entry for log in runs.values() for entry in log)]
    if not shown:
        raise ValueError("no log has a loss, a perplexity or a BLEU score; give `trainer.state.log_history` of runs")
    figure = new_figure(WIDTH if len(shown) > 1 else 0.6 * WIDTH, 3.6)
    lines: dict[str, Line2D] = {}
    for panel, key in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        lines |= draw_curve(panel, key, runs)
    if len(runs) > 1:
        name_lines(figure, lines, loc="outside lower center", ncols=3)
    if title is not None:
        set_title(figure, title)
    return figure


def draw_curve(panel: Axes, key: str, runs: Mapping[str, Log]) -> dict[str, Line2D]:
    """Draws one of `CURVES` by updates into a panel, and returns the line of each run that has it.

    Args:
        panel: Where to draw.
        key: The entry of the logs.
        runs: As for `plot_training`.
    """
    title, unit = CURVES[key]
    lines: dict[str, Line2D] = {}
    for number, (name, log) in enumerate(runs.items()):
        points = [(entry["step"], entry[key]) for entry in log if key in entry]
        if points:
            (lines[name],) = panel.plot(*zip(*points, strict=True), **line_style(number))
    name_panel(panel, title, "updates", unit)
    panel.grid(alpha=0.3)
    count_updates(panel)
    if key == "eval_perplexity":
        set_log_scale(panel)
    return lines


__all__ = [
    "Figure",
    "Schedule",
    "draw_attention",
    "draw_curve",
    "plot_attention",
    "plot_masks",
    "plot_positions",
    "plot_schedule",
    "plot_training",
    "save_figure",
]
