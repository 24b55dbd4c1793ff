"""A page to try a model in the browser: translations, the beams' scores, and attention."""

import html
import math
import os
from collections.abc import Sequence
from typing import Any

from .errors import first_line, install
from .explain.attention import attention_page
from .plan_vanilla_transformer import GNMTLengthPenalty
from .translation.attention import attention_of
from .translation.backend import Translation
from .translation.languages import known_languages
from .translation.reading import target_codes
from .translation.translator import Translator

try:
    import gradio as gr
except ImportError as error:
    raise ImportError(f"the demo needs Gradio: {install('demo')}") from error
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

HOST = "127.0.0.1"
MOST_CHARACTERS = 5_000
MOST_BEAMS = 10
MOST_TOKENS_SHOWN = 100  # of attention: its weights are sent to the browser
LARGEST_PENALTY = 2.0
QUEUE = 32  # the most requests that wait; one is computed at a time
SESSIONS = 1_000  # the most visitors whose last translations are kept
FONTS = ["system-ui", "sans-serif"]  # Gradio's themes load theirs from another machine
HEADERS = ["Line", "Rank", "Score", "Tokens", "Translation"]
TRANSLATE_FIRST = "<p>Attention is shown here after a translation.</p>"

# Sources, their translations and languages, in the order of the table.
Pairs = list[tuple[str, str, dict[str, str]]]


def build_page(translator: Translator, examples: Sequence[str] = (), split_sentences: str | None = None) -> gr.Blocks:
    """Builds the page; `start` shows it.

    Args:
        translator: Translates.
        examples: Texts that can be chosen.
        split_sentences: As for `Translator`'s calls.
    """
    model = translator.model
    name = getattr(model, "name_or_path", "") or type(model).__name__
    sources = list(known_languages(translator.tokenizer))
    # All languages of such a model are decoded in one way.
    plan = translator.plan(**dict.fromkeys(("src_lang", "tgt_lang"), sources[0]) if sources else {})
    codes = sources or target_codes(translator.tokenizer)
    is_paper, penalty = isinstance(plan.length_penalty, GNMTLengthPenalty), float(plan.length_penalty)
    penalty_name = "gnmt_length_penalty" if is_paper else "length_penalty"
    with gr.Blocks(title=f"Translation by {name}", analytics_enabled=False, fill_width=True) as page:
        pairs = gr.State([])
        gr.Markdown(f"# Translation\n\n{model.num_parameters():,} parameters. Score: {_scoring(penalty_name)}")
        text = gr.Textbox(
            label="Text to translate",
            info=f"{'Sentences' if split_sentences else 'One sentence per line'}. Shift+Enter translates.",
            lines=2,
            max_lines=12,
            max_length=MOST_CHARACTERS,
            autofocus=True,
            elem_id="source",
        )
        if examples:
            gr.Examples([[example] for example in examples], [text], cache_examples=False)
        with gr.Row():
            info = "As many translations are listed; one beam is greedy search, without scores."
            beams = gr.Slider(1, MOST_BEAMS, min(plan.num_beams, MOST_BEAMS), step=1, label="Beams", info=info)
            largest = max(LARGEST_PENALTY, math.ceil(penalty))
            info = "A larger one prefers longer translations."
            penalties = gr.Slider(0, largest, penalty, step=0.05, label="Length penalty", info=info)
            source, target = (
                gr.Dropdown(some, label=f"{side} language", visible=bool(some), value=next(iter(some), None))
                for side, some in (("Source", sources), ("Target", codes))
            )
            button = gr.Button("Translate", variant="primary", elem_id="translate")
        best = gr.Textbox(label=f"Translation by {name}", max_lines=12, interactive=False, elem_id="translation")
        table = gr.Dataframe(headers=HEADERS, label="Translations", interactive=False, wrap=True, elem_id="candidates")
        choice = gr.Dropdown([], label="Attention of", type="index", visible=False, elem_id="choice")
        picture = gr.HTML(TRANSLATE_FIRST, elem_id="attention")

        def translate(
            text: str, num_beams: float, penalty: float, tgt_lang: str | None = None, src_lang: str | None = None
        ) -> list[Any]:
            options: dict[str, Any] = {"split_sentences": split_sentences, "num_beams": int(num_beams)}
            options |= {name: one for name, one in (("src_lang", src_lang), ("tgt_lang", tgt_lang)) if one}
            if num_beams > 1:
                options |= {"n_best": int(num_beams), penalty_name: penalty}
            else:
                options |= {"do_sample": False, "early_stopping": False}
            return _translated(translator, text, options)

        def attend(pairs: Pairs, choice: int | None) -> str:
            return _attention(translator, pairs, choice)

        translated = gr.on(
            [button.click, text.submit],
            translate,
            [text, beams, penalties, target, source],
            [best, table, pairs, choice],
            api_name="translate",
            concurrency_id="model",
        )
        show: dict[str, Any] = {"inputs": [pairs, choice], "outputs": picture, "concurrency_id": "model"}
        translated.success(attend, **show, api_visibility="private")
        choice.input(attend, **show, api_visibility="private", trigger_mode="always_last")
    return page


def _scoring(penalty_name: str) -> str:
    divisor = "((5 + tokens) / 6)^penalty" if penalty_name.startswith("gnmt") else "tokens^penalty"
    return f"log-probability (natural logarithm), divided by {divisor}; the nearer to 0, the more probable."


def _translated(translator: Translator, text: str, options: dict[str, Any]) -> list[Any]:
    """Returns the best translations, the table of all, the pairs, and the choice of a pair for the attention."""
    if not text or not text.strip():
        raise gr.Error("There is nothing to translate. Type a sentence into the text box first.")
    if len(text) > MOST_CHARACTERS:  # so far, only the browser has checked it
        raise gr.Error(f"The text has {len(text):,} characters; at most {MOST_CHARACTERS:,} are translated at a time.")
    lines = text.replace("\r\n", "\n").strip("\n").split("\n")
    quiet: dict[str, Any] = {"progress_bar": False, "on_division": lambda *_: None}
    try:
        found = translator(lines, **options, **quiet)
    except ValueError as error:
        raise gr.Error(html.escape(first_line(error))) from error
    candidates = [one if isinstance(one, list) else [Translation(one, 0)] for one in found]
    rows, pairs = [], []
    languages = {name: options[name] for name in ("src_lang", "tgt_lang") if name in options}
    for number, (line, translations) in enumerate(zip(lines, candidates, strict=True), start=1):
        for rank, one in enumerate(translations if line.strip() else (), start=1):
            score = "" if one.score is None else f"{one.score:.3f}"
            rows.append([number, rank, score, one.num_tokens or "", one.text])
            pairs.append((line, one.text, languages))
    choices = [f"line {number}, rank {rank}: {text}" for number, rank, *_, text in rows]
    best = "\n".join(translations[0].text for translations in candidates)
    return [best, rows, pairs, gr.Dropdown(choices, value=next(iter(choices), None), visible=True)]


def _attention(translator: Translator, pairs: Pairs, choice: int | None) -> str:
    """Returns the attention of a pair as a page of its own, in a frame that can reach nothing outside."""
    if not pairs or choice is None:
        return TRANSLATE_FIRST
    source, target, languages = pairs[choice]
    try:
        attention = attention_of(translator.model, translator.tokenizer, source, target, **languages)
        tokens = max(len(attention.source_pieces), len(attention.target_pieces))
        if tokens > MOST_TOKENS_SHOWN:
            raise ValueError(f"attention is shown for up to {MOST_TOKENS_SHOWN} tokens; here there are {tokens:,}")
    except ValueError as error:
        return f"<p>{html.escape(first_line(error))}</p>"
    inner = html.escape(attention_page(attention, "Attention"))
    return (
        f'<iframe title="Attention" sandbox="allow-scripts" srcdoc="{inner}" '
        'style="width: 100%; height: 70em; border: 0; background: #fff"></iframe>'
    )


# ---- The server ----
def known_names(host: str) -> list[str]:
    """Returns the names that a browser may ask the page by.

    Otherwise a page from elsewhere could point its own name at this machine and read the server's answers (DNS
    rebinding). If the server listens on all addresses of the machine, any name is accepted.
    """
    if host.strip("[]") in ("0.0.0.0", "::"):
        return ["*"]
    return ["localhost", "127.0.0.1", "::1", "[::1]", host, host.strip("[]")]


def start(page: gr.Blocks, host: str = HOST, port: int | None = None) -> str:
    """Shows the page in a thread, until the process ends or `page.close()`.

    Args:
        page: The result of `build_page`.
        host: The address to listen on.
        port: The port; None: the first that is free from 7860 on.

    Returns:
        The page's address.

    Raises:
        OSError: The address or the port can't be used.
    """
    for variable in ("NO_PROXY", "no_proxy"):  # Gradio asks its own server whether it is there
        os.environ[variable] = ",".join(filter(None, ("127.0.0.1,localhost", os.environ.get(variable))))
    page.queue(default_concurrency_limit=1, max_size=QUEUE, api_open=False)
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        theme=gr.themes.Default(font=FONTS, font_mono=FONTS).set(block_info_text_color="*neutral_600"),  # legible
        # Each of these could also be set by a variable of the environment, or is on unless it is switched off.
        share=False,
        show_error=True,  # beside the traceback that Gradio prints
        quiet=True,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        run_history=False,
        footer_links=[],
        allowed_paths=[],
        state_session_capacity=SESSIONS,
        max_file_size="1kb",  # nothing on the page takes a file
        app_kwargs={"middleware": [Middleware(TrustedHostMiddleware, allowed_hosts=known_names(host))]},
    )
    return str(address)
