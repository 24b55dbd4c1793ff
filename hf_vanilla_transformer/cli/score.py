"""`vanilla-transformer score`."""

import argparse
import sys

from ..checkpoints.files import write_text
from .arguments import LANGUAGES, LOADING, add, given
from .lines import read_parallel
from .models import check_model_name, decoding_errors, load_translator
from .output import check_output, say_written, warn_of_line

TITLES = "log_probability\ttokens"
LEFT_OUT = "\t"  # of a pair that is too long


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Score given translations by their log-probability."""
    parser.epilog = (
        "After a line of titles, there is one line per pair: the log-probability of the target in nats, a tab, and the "
        "number of its tokens, </s> included. Several models are averaged by probability, as in evaluate --ensemble. "
        "If a side of a pair is too long, its line has no numbers, and a warning names it."
    )
    add(parser, "model", nargs="+")
    parser.add_argument("--source", required=True, metavar="FILE", help="sentences, one per line, compressed or not")
    parser.add_argument("--target", required=True, metavar="FILE", help="their translations, line by line")
    parser.add_argument("--output", metavar="FILE", help="write the scores there (default: standard output)")
    add(parser, "overwrite", *LANGUAGES, "batch_size", *LOADING)
    most = "the most tokens of a source and of a target (default: that of translate)"
    add(parser, "max_source_tokens", help=most)
    parser.set_defaults(run=_score)


def _score(arguments: argparse.Namespace) -> None:
    for name in arguments.model:
        check_model_name(name)
    sources, targets = read_parallel(arguments.source, arguments.target)
    if arguments.output is not None:
        check_output("--output", arguments.output, arguments.overwrite, [arguments.source, arguments.target])
    from ..translation.scoring import score_pairs

    translator = load_translator(arguments.model, arguments)
    limit = translator.source_limit(arguments.max_source_tokens)
    with decoding_errors():
        scores = score_pairs(
            translator.decodes_with,
            translator.tokenizer,
            sources,
            targets,
            **given(arguments, *LANGUAGES, "batch_size"),
            max_tokens=arguments.max_source_tokens,
            on_omission=lambda index: warn_of_line(f"line {index + 1}", limit, "it has no score"),
        )
    lines = [TITLES, *(LEFT_OUT if one is None else f"{one.log_probability:.6f}\t{one.num_tokens}" for one in scores)]
    text = "".join(f"{line}\n" for line in lines)
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        write_text(arguments.output, text)
        say_written(arguments.output)
