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
Option = dict[str, Any]  # the arguments of argparse's `add_argument`
NUMBER: Option = {"type": positive, "metavar": "N"}
SWITCH: Option = {"action": "store_true"}
# Of several commands: name -> what argparse takes. Defaults are None or the library's, unless a help says otherwise.
OPTIONS: dict[str, Option] = {
    "--model": {"required": True, "metavar": "DIR", "help": "a saved model's folder, or its name on the Hub"},
    "--ensemble": {**SWITCH, "help": "decode with all models as one that averages their probabilities"},
    "--output": {"required": True, "metavar": "DIR", "help": "folder to write; it must not exist, or be empty"},
    "--overwrite": {**SWITCH, "help": "replace an existing file"},
    # Languages, for a model of several.
    "--src-lang": {
        "metavar": "LANG",
        "help": "what to translate from, by the model's name: eng_Latn (NLLB), en_XX (mBART)",
    },
    "--tgt-lang": {
        "metavar": "LANG",
        "help": "what to translate into: deu_Latn (NLLB), de_DE (mBART), deu for OPUS-MT's code >>deu<<",
    },
    "--source-prefix": {
        "metavar": "TEXT",
        "help": 'what each source begins with: "translate English to German: " (T5)',
    },
    # Decoding; `decoding_options` evaluates these.
    "--length-penalty": {
        "type": not_negative,
        "metavar": "ALPHA",
        "help": "divide log-probabilities by ((5 + length) / 6) ** ALPHA (default: the model's; the paper: 0.6)",
    },
    "--early-stopping": {
        "choices": ["true", "false", "never"],
        "help": "when a search ends. true: as soon as there are as many translations as beams; false: when no open "
        "beam would score better if it ended now; never: when none can score better any more (default: the model's; "
        "the paper: true)",
    },
    "--coverage-penalty": {
        "type": not_negative,
        "metavar": "BETA",
        "help": "prefer hypotheses that attend to all of the source (Wu et al. 2016; default: the model's, usually "
        "none)",
    },
    "--max-new-tokens": {**NUMBER, "help": "longest translation, in tokens (default: the model's own limit)"},
    "--max-source-tokens": {
        **NUMBER,
        "help": "longest line that is translated as one (default: 1,024 tokens, or the model's positions if they are "
        "fewer); a longer one is translated in pieces of at most 256 tokens, and a warning names it",
    },
    "--unknown": {
        "choices": ["error", "keep", "ignore"],
        "help": "symbols that the model doesn't know: keep (default): it reads its unknown token, and a warning names "
        "them; ignore: they are left out; error",
    },
    "--unknown-target": {
        "choices": ["mark", "drop", "avoid"],
        "help": "unknown tokens that the model writes: mark (default): they are shown, as <unk> for instance; drop: "
        "they are left out; avoid: the model never chooses them",
    },
    "--batch-tokens": {
        **NUMBER,
        "help": "source tokens per batch, times the beam size (default: 4,096; ctranslate2: by the number of lines)",
    },
    "--batch-size": {**NUMBER, "help": "maximum number of sentences per batch (default: no limit)"},
    # Loading.
    "--threads": {**NUMBER, "help": "threads of the computation on a CPU (default: PyTorch's, a thread per core)"},
    "--device": {"help": "cpu, cuda, cuda:1, mps ... (default: cuda where available, else cpu)"},
    "--dtype": {
        "choices": ["float32", "bfloat16", "float16"],
        "help": "type of the weights (default: as they were saved)",
    },
    "--trust-remote-code": {**SWITCH, "help": "run code that comes with the model; only if you trust it"},
    "--backend": {
        "choices": ["engine", "ctranslate2"],
        "help": "this package's engine (default), or CTranslate2 (the extra export installs it); an exported folder "
        "has its own backend",
    },
    "--compute-type": {
        "metavar": "TYPE",
        "default": "default",
        "help": "int8: 8-bit weights on a CPU, nearly the same output and faster, except for single lines of small "
        "models; ctranslate2 has more types of its own (default: default, the type of the weights)",
    },
    "--tokenizer": {
        "metavar": "DIR",
        "help": "where the tokenizer of a model in CTranslate2's format is, if it isn't with the model",
    },
    "--ray": {"nargs": "?", "const": "local", "metavar": "ADDRESS"},
    # No default: a command's would override an option given before the command.
    "--debug": {**SWITCH, "default": argparse.SUPPRESS, "help": "show the traceback of an error as well"},
}
LANGUAGES = ("src_lang", "tgt_lang", "source_prefix")
LANGUAGE_OPTIONS = ("--src-lang", "--tgt-lang", "--source-prefix")
LOADING_OPTIONS = ("--threads", "--device", "--dtype", "--trust-remote-code")
DECODING_OPTIONS = (
    *("--length-penalty", "--early-stopping", "--coverage-penalty", "--max-new-tokens", "--max-source-tokens"),
    *("--unknown", "--unknown-target", "--batch-tokens", "--batch-size"),
    *LOADING_OPTIONS,
    *("--backend", "--compute-type", "--tokenizer"),
)


def add(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", *names: str, **changes: object) -> None:
    """Declares some of `OPTIONS`, with changes for all of them."""
    for name in names:
        parser.add_argument(name, **{**OPTIONS[name], **changes})


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """Declares the options of decoding, of batches, of the device and of loading a model."""
    beams = parser.add_mutually_exclusive_group()
    of_model = "beam size (default: the model's generation config)"
    beams.add_argument("--num-beams", "--beam", type=positive, metavar="N", help=of_model)
    beams.add_argument("--greedy", dest="num_beams", action="store_const", const=1, help="the same as --num-beams 1")
    add(parser, *DECODING_OPTIONS)
