"""Arguments: their types for argparse, and the options that several commands have."""

import argparse
import ipaddress
import math

LANGUAGES = ("src_lang", "tgt_lang", "source_prefix")


# ---- Types ----
def positive(text: str) -> int:
    """Parses an integer of at least 1; a type for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def port_number(text: str) -> int:
    """Parses the number of a port; a type for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give an integer from 1 to 65535")
    return int(text)


def host_name(text: str) -> str:
    """Parses a name or an address to listen on, IPv6 in brackets or not; a type for argparse."""
    return text.strip("[]")


def in_url(host: str) -> str:
    """Returns an address as URLs have it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def is_this_machine(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
def add_debug(parser: argparse.ArgumentParser) -> None:
    """Declares --debug, before and after a command's name."""
    # No default: a command's would override an option given before the command.
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error as well"
    )


def add_decoding_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of decoding and of the device; `decoding_options` evaluates them."""
    beams = parser.add_mutually_exclusive_group()
    beams.add_argument(
        "--num-beams",
        "--beam",
        type=positive,
        metavar="N",
        help="beam size (default: the model's generation config)",
    )
    beams.add_argument("--greedy", dest="num_beams", action="store_const", const=1, help="the same as --num-beams 1")
    parser.add_argument(
        "--length-penalty",
        type=not_negative,
        metavar="ALPHA",
        help="divide log-probabilities by ((5 + length) / 6) ** ALPHA (default: the model's; the paper: 0.6)",
    )
    parser.add_argument(
        "--early-stopping",
        choices=["true", "false", "never"],
        help="when a search ends. true: as soon as there are as many translations as beams; false: when no open beam "
        "would score better if it ended now; never: when none can score better any more (default: the model's; the "
        "paper: true)",
    )
    parser.add_argument(
        "--coverage-penalty",
        type=not_negative,
        metavar="BETA",
        help="prefer hypotheses that attend to all of the source (Wu et al. 2016; default: the model's, usually none)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        metavar="N",
        help="longest translation, in tokens (default: the model's own limit)",
    )
    parser.add_argument(
        "--max-source-tokens",
        type=positive,
        metavar="N",
        help="longest line that is translated as one (default: 1,024 tokens, or the model's positions if they are "
        "fewer); a longer one is translated in pieces of at most 256 tokens, and a warning names it",
    )
    parser.add_argument(
        "--unknown",
        choices=["error", "keep", "ignore"],
        help="symbols that the model doesn't know: keep (default): it reads its unknown token, and a warning names "
        "them; ignore: they are left out; error",
    )
    parser.add_argument(
        "--unknown-target",
        choices=["mark", "drop", "avoid"],
        help="unknown tokens that the model writes: mark (default): they are shown, as <unk> for instance; drop: they "
        "are left out; avoid: the model never chooses them",
    )
    parser.add_argument(
        "--batch-tokens",
        type=positive,
        metavar="N",
        help="source tokens per batch, times the beam size (default: 4,096; ctranslate2: by the number of lines)",
    )
    add_model_arguments(parser)
    add_backend(parser)
    add_compute_type(parser)


def add_language_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the languages of a model that has several; `LANGUAGES` names them."""
    parser.add_argument(
        "--src-lang",
        metavar="LANG",
        help="what to translate from, by the model's name: eng_Latn (NLLB), en_XX (mBART)",
    )
    parser.add_argument(
        "--tgt-lang",
        metavar="LANG",
        help="what to translate into: deu_Latn (NLLB), de_DE (mBART), deu for OPUS-MT's code >>deu<<",
    )
    parser.add_argument(
        "--source-prefix", metavar="TEXT", help='what each source begins with: "translate English to German: " (T5)'
    )


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Declares the library that decodes."""
    parser.add_argument(
        "--backend",
        choices=["engine", "ctranslate2"],
        help="this package's engine (default), or CTranslate2 (the extra export installs it); an exported folder has "
        "its own backend",
    )


def add_compute_type(parser: argparse.ArgumentParser) -> None:
    """Declares the type that the engine computes with."""
    parser.add_argument(
        "--compute-type",
        metavar="TYPE",
        default="default",
        help="int8: 8-bit weights on a CPU, nearly the same output and faster, except for single lines of small "
        "models; ctranslate2 has more types of its own (default: default, the type of the weights)",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the batches' size, of the device, and of loading a model."""
    parser.add_argument(
        "--batch-size",
        type=positive,
        metavar="N",
        help="maximum number of sentences per batch (default: no limit)",
    )
    add_loading_arguments(parser)


def add_loading_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the device, and of loading a model."""
    parser.add_argument(
        "--threads",
        type=positive,
        metavar="N",
        help="threads of the computation on a CPU (default: PyTorch's, a thread per core)",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps ... (default: cuda where available, else cpu)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="type of the weights (default: as they were saved)"
    )
    add_trust(parser)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Declares --model, a single one."""
    parser.add_argument("--model", required=True, metavar="DIR", help="a saved model's folder, or its name on the Hub")


def add_trust(parser: argparse.ArgumentParser) -> None:
    """Declares --trust-remote-code."""
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model; only if you trust it"
    )


def add_host(parser: argparse.ArgumentParser, what: str) -> None:
    """Declares --host, the address that a server listens on; `what` it serves, for the help."""
    parser.add_argument(
        "--host",
        type=host_name,
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1, this machine alone); 0.0.0.0: every computer that reaches this "
        f"machine can use the {what}",
    )


def add_ray(parser: "argparse.ArgumentParser | argparse._ArgumentGroup", purpose: str) -> None:
    """Declares --ray, the address of a cluster."""
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help=f"{purpose} (without ADDRESS: one that is started on this machine)",
    )
