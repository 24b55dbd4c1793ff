"""Learning curves; `plot_attention` can be imported from here, too. Plots need matplotlib, but no screen."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from .attention import STYLE
from .attention import plot_attention as plot_attention

# Entry of a log -> the panel's title, and the unit on its axis.
CURVES = {
    "loss": ("training loss", "nats per token"),
    "eval_perplexity": ("validation perplexity", "perplexity per token"),
    "eval_bleu": ("validation BLEU", "BLEU"),
    "eval_bleu_multi30k": ("validation bleu_multi30k", "BLEU"),
    "eval_bleu_compound_split": ("validation bleu_compound_split", "BLEU"),
    "eval_chrf": ("validation chrF", "chrF2"),
    "eval_exact_match": ("validation exact match", "% of outputs"),
    "eval_wer": ("validation WER", "% of outputs with an error"),
    "eval_ser": ("validation SER", "errors per 100 symbols"),
    "eval_cer": ("validation CER", "errors per 100 characters"),
}
# Okabe and Ito (2008): distinct with any kind of colour vision; lines differ in colour and in dashes.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")


@rc_context(STYLE)
def plot_training(runs: Mapping[str, Sequence[Mapping[str, float]]], title: str = "") -> Figure:
    """Draws learning curves, each of `CURVES` that a log has, by updates; nothing to draw raises `ValueError`.

    `runs`: Name -> the Trainer's log, `trainer.state.log_history` or `log_history` of a trainer_state.json.
    """
    shown = [key for key in CURVES if any(key in entry for log in runs.values() for entry in log)]
    if not shown:
        raise ValueError("no log has a loss, a perplexity or a BLEU score; give `trainer.state.log_history` of runs")
    figure = Figure(figsize=(6 if len(shown) == 1 else max(10, 3 * len(shown)), 3.5 + 0.15 * len(runs)))
    for panel, key in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        panel.set(title=CURVES[key][0], xlabel="updates", ylabel=CURVES[key][1])
        panel.grid(alpha=0.3)
        for number, log in enumerate(runs.values()):
            points = np.array([(entry["step"], entry[key]) for entry in log if key in entry]).reshape(-1, 2)
            style = {"color": COLOURS[number % len(COLOURS)], "marker": "." if len(points) == 1 else ""}
            panel.plot(*points.T, ("-", "--", "-.", ":")[number % 4], **style)
        panel.locator_params(axis="x", nbins=5, integer=True)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        if key == "eval_perplexity":
            panel.set_yscale("log", subs=(2, 3, 5, 7))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.yaxis.set_minor_formatter("{x:g}")
    if len(runs) > 1:
        figure.legend(panel.get_lines(), list(runs), loc="outside lower center")
    figure.suptitle(title, wrap=True)
    return figure
