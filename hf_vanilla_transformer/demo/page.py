"""The page: a text box, translations with their scores, and attention, for one model or several side by side.

It has no component that takes a file or shows one. This file travels with a Space.
"""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from .models import Candidate, Matrix, Model
from .tables import attention_table, candidates_table, message

try:
    import gradio as gr
except ImportError as error:
    raise ImportError("the demo needs Gradio: pip install 'hf-vanilla-transformer[demo]'") from error

logger = logging.getLogger(__name__)

MOST_CHARACTERS = 20_000
MOST_LINES = 100
MOST_BEAMS = 10
MOST_NEW_TOKENS = 512
MATRICES_KEPT = 8  # sentences whose weights are kept while layers and heads are looked at

# Kind of attention -> its label, and what rows and columns are.
KINDS = {
    "cross": ("Cross", "Cross-attention from the translation (rows) to the source (columns)"),
    "encoder": ("Encoder", "Self-attention of the encoder, from the source (rows) to itself (columns)"),
    "decoder": ("Decoder", "Self-attention of the decoder, from what it has read (rows) to itself"),
}
NOTHING = "There is nothing to translate. Type a sentence into the text box first."
TRANSLATE_FIRST = "Attention is shown here after a translation."

# What was translated: numbers of lines with text, the lines, and for each model the candidates of each line.
Translated = list[tuple[int, str, list[list[Candidate]]]]


def build_page(models: Sequence[Model], examples: Sequence[str] = ()) -> gr.Blocks:
    """Builds the page; `server.serve` shows it.

    Args:
        models: One, or several that are shown side by side.
        examples: Texts that can be chosen.

    Returns:
        The page.

    Raises:
        ValueError: There is no model.
    """
    if not models:
        raise ValueError("the page needs at least one model")
    names = " and ".join(model.name for model in models)
    with gr.Blocks(title=f"Translation by {names}", analytics_enabled=False, fill_width=True) as page:
        state = gr.State([])
        gr.HTML("<h1>Translation and attention</h1>")
        text, num_beams, longest, button = _inputs(models[0], examples)
        status = gr.HTML(
            message(""), apply_default_css=False, html_template='<div role="status" aria-live="polite">${value}</div>'
        )
        translations, tables = _outputs(models)
        choices, matrices = _attention(models)
        line, rank, *_ = choices

        def translate(text: str, num_beams: int, max_new_tokens: int) -> list[Any]:
            return _translate(models, text, num_beams, max_new_tokens)

        translated = gr.on(
            [button.click, text.submit],
            translate,
            [text, num_beams, longest],
            [status, state, line, rank, *translations, *tables],
            api_name="translate",
            api_description="Translates text, one sentence per line; max_new_tokens=0 is the model's own limit.",
            concurrency_id="model",
            show_progress_on=translations,
        )
        attend = [lru_cache(MATRICES_KEPT)(model.attend) for model in models]
        show: dict[str, Any] = {
            "fn": lambda *values: _show(models, attend, *values),
            "inputs": [state, *choices],
            "outputs": matrices,
            "api_visibility": "private",
            "concurrency_id": "model",
            "show_progress": "hidden",
        }
        translated.then(**show)
        gr.on([choice.input for choice in choices], trigger_mode="always_last", **show)
    return page


# ---- Layout ----
def _inputs(model: Model, examples: Sequence[str]) -> tuple[Any, Any, Any, Any]:
    text = gr.Textbox(
        label="Text to translate",
        info="One sentence per line. Ctrl+Enter translates.",
        lines=2,
        max_lines=12,
        elem_id="source",
        autofocus=True,
    )
    if examples:
        gr.Examples([[example] for example in examples], [text], label="Examples", cache_examples=False)
    with gr.Row():
        info = "As many translations are listed."
        default = min(model.num_beams, MOST_BEAMS)
        beams = gr.Slider(1, MOST_BEAMS, default, step=1, label="Beams", info=info, scale=2)
        info = f"Up to {MOST_NEW_TOKENS}; 0: the model's own limit."
        longest = gr.Number(0, label="Longest translation, in tokens", info=info, precision=0, scale=2)
        button = gr.Button("Translate", variant="primary", elem_id="translate", min_width=120)
    return text, beams, longest, button


def _outputs(models: Sequence[Model]) -> tuple[list[Any], list[Any]]:
    """A column for each model, with its best translation and the list of all."""
    translations, tables = [], []
    with gr.Row():
        for model in models:
            with gr.Column(min_width=320):
                translations.append(
                    gr.Textbox(
                        label=f"Translation by {model.name}",
                        info=model.about,
                        lines=1,
                        max_lines=12,
                        interactive=False,
                    )
                )
                tables.append(gr.HTML("", apply_default_css=False))
    return translations, tables


def _attention(models: Sequence[Model]) -> tuple[list[Any], list[Any]]:
    """What is to be seen of the attention, and a column for each model's matrix."""
    layers = max(max(model.layers) for model in models)
    heads = max(max(model.heads) for model in models)
    gr.HTML("<h2>Attention</h2>")
    with gr.Row():
        kinds = [(label, kind) for kind, (label, _) in KINDS.items()]
        kind = _radio("Attention", kinds, "cross", more=130)
        shared = min(min(model.layers) for model in models)  # the last layer that all of them have
        layer = _radio("Layer", list(range(1, layers + 1)), shared)
        head = _radio("Head", [("mean", 0), *((str(number), number) for number in range(1, heads + 1))], 0, more=46)
        rank = _radio("Rank of the translation", [1], 1, buttons=4)
        line = gr.Number(1, label="Line", precision=0, step=1, min_width=90, visible=False)
    matrices = []
    with gr.Row():
        for _ in models:
            with gr.Column(min_width=320):
                matrices.append(gr.HTML(message(TRANSLATE_FIRST), apply_default_css=False))
    return [line, rank, kind, layer, head], matrices


def _radio(label: str, choices: list[Any], value: Any, *, buttons: int | None = None, more: int = 0) -> Any:
    """A row of buttons: each takes 54 pixels with a digit, and `more` are for the text in them."""
    width = 24 + 54 * min(buttons or len(choices), 9) + more
    return gr.Radio(choices, value=value, label=label, scale=width, min_width=width, elem_classes="vt-choice")


# ---- Translating ----
def _translate(models: Sequence[Model], text: Any, num_beams: Any, longest: Any) -> list[Any]:
    """Returns the values of all that the button changes."""
    try:
        lines, beams, limit = _checked(text, num_beams, longest)
        per_model = [_translated_by(model, lines, beams, limit) for model in models]
    except ValueError as error:
        blank = [""] * (2 * len(models))
        return [message(str(error), is_problem=True), [], *_choices([]), *blank]
    found: Translated = [
        (number, line, [candidates[number - 1] for candidates in per_model])
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    best = ["\n".join(one[0].text if one else "" for one in candidates) for candidates in per_model]
    tables = [
        candidates_table(model, [(number, own[place]) for number, _, own in found])
        for place, model in enumerate(models)
    ]
    count = f"{len(found)} lines" if len(found) > 1 else "1 line"
    return [message(f"Translated {count}."), found, *_choices(found), *best, *tables]


def _checked(text: Any, num_beams: Any, longest: Any) -> tuple[list[str], int, int | None]:
    """Returns the lines and the options, all of which a client may have made up.

    Raises:
        ValueError: There is nothing to do, too much, or an option is beyond its limits.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(NOTHING)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"The text has {len(text):,} characters; at most {MOST_CHARACTERS:,} are translated at a time. Divide it."
        )
    lines = text.replace("\r\n", "\n").replace("\r", "\n").strip("\n").split("\n")
    if len(lines) > MOST_LINES:
        raise ValueError(
            f"The text has {len(lines):,} lines; at most {MOST_LINES} are translated at a time. Divide it."
        )
    return lines, _integer("Beams", num_beams, MOST_BEAMS), _limit(longest)


def _limit(longest: Any) -> int | None:
    return None if longest in (None, 0) else _integer("Longest translation", longest, MOST_NEW_TOKENS)


def _integer(name: str, value: Any, largest: int) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 1 <= value <= largest or value != int(value):
        raise ValueError(f"{name}: give an integer from 1 to {largest}.")
    return int(value)


def _translated_by(model: Model, lines: list[str], num_beams: int, longest: int | None) -> list[list[Candidate]]:
    """A model's candidates; raises `ValueError` with one line for whatever goes wrong, so that the page can say it."""
    try:
        return model.translate(lines, num_beams, longest)
    except Exception as error:  # the server goes on
        raise ValueError(f"{model.name} can't translate this: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    if not isinstance(error, ValueError):
        logger.warning("The page shows the first line of this error.", exc_info=error)
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return first if isinstance(error, ValueError) else f"{type(error).__name__}: {first}"


def _choices(found: Translated) -> tuple[Any, Any]:
    """The line and the ranks that can be chosen to see their attention: at first, the best translation of the first."""
    most = max((len(candidates) for _, _, per_model in found for candidates in per_model), default=1)
    line = gr.Number(found[0][0] if found else 1, visible=len(found) > 1)
    return line, gr.Radio(list(range(1, most + 1)), value=1)


# ---- Attention ----
def _show(
    models: Sequence[Model],
    attend: Sequence[Callable[[str, str], dict[str, Matrix]]],
    found: Translated,
    line: int,
    rank: int,
    kind: str,
    layer: int,
    head: int,
) -> list[str]:
    """Returns each model's matrix, or a message in its place; a list of one would be taken for its value."""
    shown = []
    for place, model in enumerate(models):
        try:
            if not found:
                shown.append(message(TRANSLATE_FIRST))
                continue
            source, candidates = _chosen(found, line, place)
            if rank > len(candidates):
                raise ValueError(f"{model.name} has found {len(candidates)} translations of this line.")
            matrix = attend[place](source, candidates[rank - 1].text)[kind]
            shown.append(attention_table(matrix, layer, head, f"{model.name}: {KINDS[kind][1]}"))
        except Exception as error:  # the server goes on
            shown.append(message(_one_line(error), is_problem=True))
    return shown


def _chosen(found: Translated, line: Any, place: int) -> tuple[str, list[Candidate]]:
    for number, source, per_model in found:
        if number == line:
            return source, per_model[place]
    raise ValueError(f"Line {line}: give the number of a line with text, from {found[0][0]} to {found[-1][0]}.")
