"""The page's tables, in HTML: lists of translations with their scores, and attention as a matrix of shaded cells.

All text in them comes from users and models, so all of it is escaped. This file travels with a Space.
"""

import html
import unicodedata
from collections.abc import Iterator, Sequence

from .models import Candidate, Matrix, Model

LONGEST_LABEL = 24
DARK = 0.65  # weights from here on are written in white, others in black: the contrast is at least 4.5

# Colours are those of the page's theme, light or dark; cells have their own, from white to dark blue.
CSS = """
#translate { align-self: flex-end; }
.vt-choice label { padding: 4px 8px; }
.vt-scroll { overflow-x: auto; }
.vt-scroll:focus-visible { outline: 2px solid var(--color-accent); outline-offset: 2px; }
.vt-message { margin: 0; min-height: 1.5em; }
.vt-message.vt-problem { border-left: 4px solid #b45309; padding-left: 8px; font-weight: 600; }
.vt-about { margin: 0; color: var(--body-text-color); }
.vt-table { border-collapse: collapse; font-size: 14px; color: var(--body-text-color); width: 100%; }
.vt-table caption, .vt-matrix caption { caption-side: bottom; text-align: left; padding-top: 6px; font-size: 13px; }
.vt-table th, .vt-table td { border-bottom: 1px solid var(--border-color-primary); padding: 4px 10px 4px 0; }
.vt-table th { text-align: left; font-weight: 600; white-space: nowrap; }
.vt-table td { vertical-align: top; overflow-wrap: anywhere; white-space: pre-wrap; }
.vt-table .vt-number { width: 1%; padding-right: 16px; text-align: right; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.vt-matrix { border-collapse: separate; border-spacing: 1px; font-size: 12px; color: var(--body-text-color); }
.vt-matrix th { font-weight: 400; white-space: pre; line-height: 1.1; }
.vt-matrix thead th { writing-mode: vertical-rl; transform: rotate(180deg); text-align: left; vertical-align: top;
  padding: 2px 3px; }
.vt-matrix tbody th { text-align: right; padding: 0 6px 0 0; }
.vt-matrix td { min-width: 26px; height: 24px; text-align: center; font-size: 11px; padding: 0; color: #000;
  background: color-mix(in srgb, #08306b calc(var(--w) * 100%), #f3f7fb); font-variant-numeric: tabular-nums; }
.vt-matrix td.vt-dark { color: #fff; }
"""


def message(text: str, *, is_problem: bool = False) -> str:
    """Returns a line for the place of messages."""
    kind = "vt-message vt-problem" if is_problem else "vt-message"
    return f'<p class="{kind}">{html.escape(text)}</p>'


def candidates_table(model: Model, lines: Sequence[tuple[int, Sequence[Candidate]]]) -> str:
    """Returns the table of a model's translations, the best first.

    Args:
        model: The model.
        lines: The number of each line, beginning with 1, and its candidates.
    """
    several = len(lines) > 1
    titles = [*(["Line"] if several else []), "Rank", "Score", "Tokens"]
    head = "".join(f'<th scope="col" class="vt-number">{title}</th>' for title in titles)
    head += '<th scope="col">Translation</th>'
    rows = []
    for number, candidates in lines:
        for rank, one in enumerate(candidates, start=1):
            score = "–" if one.score is None else f"{one.score:.3f}".replace("-", "−")
            cells = [*([number] if several else []), rank, score, "–" if one.tokens is None else one.tokens]
            shown = "".join(f'<td class="vt-number">{cell}</td>' for cell in cells)
            rows.append(f"<tr>{shown}<td>{html.escape(one.text)}</td></tr>")
    note = model.scoring
    if any(one.score is None for _, candidates in lines for one in candidates):
        note += " A translation by one beam, or of a line that is too long to be translated as one, has no score."
    return (
        f'<div class="vt-scroll" tabindex="0" role="region" aria-label="Translations by {html.escape(model.name)}">'
        f'<table class="vt-table"><caption>{html.escape(note)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def attention_table(matrix: Matrix, layer: int, head: int, title: str) -> str:
    """Returns one layer's matrix, in per cent.

    Args:
        matrix: The weights of all layers and heads.
        layer: The layer, beginning with 1.
        head: The head, beginning with 1; 0: the mean of all heads.
        title: What the matrix is.

    Raises:
        ValueError: There is no such layer or head.
    """
    layers, heads = matrix.weights.shape[:2]
    if not 1 <= layer <= layers:
        raise ValueError(f"There is no layer {layer}: this model has {layers} layers there.")
    if not 0 <= head <= heads:
        raise ValueError(f"There is no head {head}: this model has {heads} heads.")
    weights = matrix.weights[layer - 1]
    shown = (weights[head - 1] if head else weights.mean(dim=0)).tolist()
    which = f"head {head} of {heads}" if head else f"mean of {heads} heads"
    caption = f"{title}, layer {layer} of {layers}, {which}, in per cent of each row."
    if any("▁" in piece for piece in (*matrix.columns, *matrix.rows)):
        caption += " ▁ is a space."
    columns, rows = ([html.escape(visible(piece)) for piece in pieces] for pieces in (matrix.columns, matrix.rows))
    top = "".join(f'<th scope="col">{name}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{name}</th>{"".join(_cells(row))}</tr>' for name, row in zip(rows, shown, strict=True)
    )
    return (
        f'<div class="vt-scroll" tabindex="0" role="region" aria-label="{html.escape(title)}">'
        f'<table class="vt-matrix"><caption>{html.escape(caption)}</caption>'
        f"<thead><tr><td></td>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cells(row: Sequence[float]) -> Iterator[str]:
    for weight in row:
        dark = ' class="vt-dark"' if weight >= DARK else ""
        yield f'<td{dark} style="--w:{weight:.2f}">{100 * weight:.0f}</td>'


def visible(piece: str) -> str:
    """Returns a token with a symbol for each character that can't be seen, cut where it is very long."""
    if not piece:
        return "∅"
    shown = "".join("␣" if one == " " else "·" if unicodedata.category(one)[0] in "CZ" else one for one in piece)
    return shown if len(shown) <= LONGEST_LABEL else f"{shown[: LONGEST_LABEL - 1]}…"
