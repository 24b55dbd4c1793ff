"""Draws README's picture: what each target token attends to, and how the model learned.

    python -m scripts.readme_picture --model outputs/quickstart/model --run outputs/quickstart \
        --source "We have to pay twenty-three euros on Monday." --output docs/images/first_screen.png

The left half is the cross-attention of the last layer, the mean of its heads unless one is given; the right half is the
training loss and the validation BLEU (or perplexity) by updates.
"""

import argparse
from collections.abc import Sequence

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.plots.curves import draw_curve, save_figure
from hf_vanilla_transformer.plots.drawing import Axes, Figure, colour_bar, heat_map, name_panel, new_figure
from hf_vanilla_transformer.training.run_folder import read_log
from hf_vanilla_transformer.translation.attention import Attention, attention_of

WIDTH, HEIGHT = 1000 / 120, 3.9  # inches: 1,000 pixels at the resolution of `save_figure`


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the folder of a model")
    parser.add_argument("--run", required=True, help="the folder of a run, or its trainer_state.json")
    parser.add_argument("--source", required=True, help="the sentence")
    parser.add_argument("--target", help="its translation (default: the model's own)")
    parser.add_argument("--head", type=int, help="a head of the last layer, from 1 (default: their mean)")
    parser.add_argument("--output", required=True, help="PNG or SVG file")
    options = parser.parse_args(arguments)
    log = read_log(options.run)
    scores = [key for key in ("eval_bleu", "eval_perplexity") if any(key in entry for entry in log)]
    if not scores:
        raise SystemExit(f"readme_picture: {options.run} was not evaluated; its log has no BLEU and no perplexity")
    translator = Translator(options.model, "cpu")
    attention = attention_of(translator.model, translator.tokenizer, options.source, options.target)

    figure = new_figure(WIDTH, HEIGHT)
    left, right = figure.subfigures(1, 2, width_ratios=[1.15, 1])  # type: ignore[misc]
    draw_cross_attention(figure, left.subplots(), attention, options.head)
    for panel, key in zip(right.subplots(2, 1, sharex=True), ("loss", scores[0]), strict=True):
        draw_curve(panel, key, {"run": log})
        panel.label_outer()
    save_figure(figure, options.output)


def draw_cross_attention(figure: Figure, panel: Axes, attention: Attention, head: int | None) -> None:
    """Draws a head of the last layer, or the mean of all."""
    weights = attention.cross[-1]  # (heads, T, S)
    if head is not None and not 1 <= head <= len(weights):
        raise SystemExit(f"readme_picture: there is no head {head}; the last layer has heads 1 to {len(weights)}")
    chosen = weights.mean(dim=0) if head is None else weights[head - 1]
    sides = attention.source_pieces, attention.target_pieces
    columns, rows = ([piece.replace("▁", "") or "␣" for piece in pieces] for pieces in sides)
    image = heat_map(panel, chosen.numpy(), columns, rows, size=(3.0, 2.6), largest=float(chosen.max()))
    which = f"mean of {len(weights)} heads" if head is None else f"head {head}"
    name_panel(panel, f"Cross-attention, last layer, {which}", "source token attended to", "token that is predicted")
    colour_bar(figure, panel, image, "attention weight")


if __name__ == "__main__":
    main()
