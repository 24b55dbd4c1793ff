"""Arguments: their types for argparse, and the options that several commands have."""

import argparse
import math
from typing import Any


# ---- Types ----
def positive(text: str) -> int:
    """Parses an integer of at least 1; a type for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def not_negative(text: str) -> float:
    """Parses a number of at least 0; a type for argparse."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number


# ---- Options ----
# An option's help, and what else argparse's `add_argument` takes. Their names are those of Python's arguments:
# "max_new_tokens" is --max-new-tokens. Defaults are None or the library's, unless a help says otherwise.
Options = dict[str, tuple[str, dict[str, object]]]
NUMBER: dict[str, object] = {"type": positive, "metavar": "N"}
SWITCH: dict[str, object] = {"action": "store_true"}
# For a model of several languages.
LANGUAGES: Options = {
    "src_lang": ("what to translate from, by the model's name: eng_Latn (NLLB), en_XX (mBART)", {"metavar": "LANG"}),
    "tgt_lang": (
        "what to translate into: deu_Latn (NLLB), de_DE (mBART), deu for OPUS-MT's code >>deu<<",
        {"metavar": "LANG"},
    ),
    "source_prefix": ('what each source begins with: "translate English to German: " (T5)', {"metavar": "TEXT"}),
}
# Of a search; `models.decoding_options` evaluates these.
SEARCH: Options = {
    "length_penalty": (
        "divide log-probabilities by ((5 + length) / 6) ** ALPHA (default: the model's; the paper: 0.6)",
        {"type": not_negative, "metavar": "ALPHA"},
    ),
    "early_stopping": (
        "when a search ends. true: as soon as there are as many translations as beams; false: when no open beam would "
        "score better if it ended now; never: when none can score better any more (default: the model's; the paper: "
        "true)",
        {"choices": ["true", "false", "never"]},
    ),
    "coverage_penalty": (
        "prefer hypotheses that attend to all of the source (Wu et al. 2016; default: the model's, usually none)",
        {"type": not_negative, "metavar": "BETA"},
    ),
    "max_new_tokens": ("longest translation, in tokens (default: the model's own limit)", NUMBER),
}
# How texts are read and written.
TEXTS: Options = {
    "max_source_tokens": (
        "longest line that is translated as one (default: 1,024 tokens, or the model's positions if they are fewer); a "
        "longer one is translated in pieces of at most 256 tokens, and a warning names it",
        NUMBER,
    ),
    "unknown": (
        "symbols that the model doesn't know: keep (default): it reads its unknown token, and a warning names them; "
        "ignore: they are left out; error",
        {"choices": ["error", "keep", "ignore"]},
    ),
    "unknown_target": (
        "unknown tokens that the model writes: mark (default): they are shown, as <unk> for instance; drop: they are "
        "left out; avoid: the model never chooses them",
        {"choices": ["mark", "drop", "avoid"]},
    ),
}
BATCHES: Options = {
    "batch_tokens": (
        "source tokens per batch, times the beam size (default: 4,096; ctranslate2: by the number of lines)",
        NUMBER,
    ),
    "batch_size": ("maximum number of sentences per batch (default: no limit)", NUMBER),
}
# Of the translator itself.
LOADING: Options = {
    "threads": ("threads of the computation on a CPU (default: PyTorch's, a thread per core)", NUMBER),
    "device": ("cpu, cuda, cuda:1, mps ... (default: cuda where available, else cpu)", {}),
    "dtype": ("type of the weights (default: as they were saved)", {"choices": ["float32", "bfloat16", "float16"]}),
    "trust_remote_code": ("run code that comes with the model; only if you trust it", SWITCH),
}
BACKEND: Options = {
    "backend": (
        "this package's engine (default), or CTranslate2 (the extra export installs it); an exported folder has its "
        "own backend",
        {"choices": ["engine", "ctranslate2"]},
    ),
    "compute_type": (
        "int8: 8-bit weights on a CPU, nearly the same output and faster, except for single lines of small models; "
        "ctranslate2 has more types of its own (default: default, the type of the weights)",
        {"metavar": "TYPE", "default": "default"},
    ),
    "tokenizer": (
        "where the tokenizer of a model in CTranslate2's format is, if it isn't with the model",
        {"metavar": "DIR"},
    ),
}
OPTIONS: Options = {
    "model": ("a saved model's folder, or its name on the Hub", {"required": True, "metavar": "DIR"}),
    "ensemble": ("decode with all models as one that averages their probabilities", SWITCH),
    "output": ("folder to write; it must not exist, or be empty", {"required": True, "metavar": "DIR"}),
    "overwrite": ("replace an existing file", SWITCH),
    **{**LANGUAGES, **SEARCH, **TEXTS, **BATCHES, **LOADING, **BACKEND},
    "ray": (
        "use a Ray cluster, whose nodes see the files (without ADDRESS: one that is started on this machine)",
        {"nargs": "?", "const": "local", "metavar": "ADDRESS"},
    ),
    # No default: a command's would override an option given before the command.
    "debug": ("show the traceback of an error as well", {**SWITCH, "default": argparse.SUPPRESS}),
}


def add(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", *names: str, **changes: object) -> None:
    """Declares some of `OPTIONS`, with changes for all of them."""
    for name in names:
        text, how = OPTIONS[name]
        parser.add_argument(f"--{name.replace('_', '-')}", **{"help": text, **how, **changes})  # type: ignore[arg-type]


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """Declares the options of decoding, of batches, of the device and of loading a model."""
    beams = parser.add_mutually_exclusive_group()
    of_model = "beam size (default: the model's generation config)"
    beams.add_argument("--num-beams", "--beam", type=positive, metavar="N", help=of_model)
    beams.add_argument("--greedy", dest="num_beams", action="store_const", const=1, help="the same as --num-beams 1")
    add(parser, *SEARCH, *TEXTS, *BATCHES, *LOADING, *BACKEND)


def given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns those of some options that a command has and that are given."""
    return {name: value for name in names if (value := getattr(arguments, name, None)) is not None}
