"""`vanilla-transformer evaluate`."""

import argparse
import json
import math
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..checkpoints.files import write_text
from ..errors import first_line
from .arguments import LANGUAGES, NUMBER, add, add_decoding
from .lines import read_parallel
from .models import call_options, check_ensemble, decoding_errors, load_translator
from .output import UsageError, check_output, progress_bar, say_written, show, table, warn_of_line

if TYPE_CHECKING:
    from ..metrics import Comparison, Edits
    from ..translation.backend import Call
    from ..translation.evaluation import EvaluationResult, Measures
    from ..translation.scoring import Likelihood

    _Error = tuple[dict[str, object], Edits]  # a wrong line, and what is wrong in it

SHOWN = 20  # confusions
PACKAGES = ("torch", "transformers", "sacrebleu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Measure BLEU, chrF, errors of symbols and perplexity of one or several checkpoints."""
    parser.epilog = (
        "Perplexity is the reference's, per token of the model's own vocabulary, </s> included. Speed is that of "
        "decoding alone, from text to text. Perplexity leaves out pairs with a side longer than --max-source-tokens; a "
        "warning names them. Files are written when all models are evaluated, each completely or not at all."
    )
    add(parser, "model", nargs="+", help="saved models' folders, or names on the Hub; one row each")
    add(parser, "ensemble")
    source = "sentences, one per line, compressed or not; or a table (.tsv, .csv, .jsonl, .parquet) with both sides"
    parser.add_argument("--source", required=True, metavar="FILE", help=source)
    reference = "their reference translations, line by line; of several files, a line of some may be empty"
    parser.add_argument("--reference", nargs="+", default=[], metavar="FILE", help=reference)
    for name in ("source", "target"):
        help = f"the {name}'s column of the table, by its name or its number (default: {name})"
        parser.add_argument(f"--{name}-column", metavar="NAME", help=help)
    parser.add_argument("--feature-columns", nargs="+", metavar="NAME", help="columns with features of the source")
    _add_metric_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write scores, signatures and settings there")
    parser.add_argument("--output", metavar="FILE", help="write the translations there, one per line")
    wrong = "write the wrong lines to this .tsv or .jsonl, and print which symbols (or words) are confused most often"
    parser.add_argument("--errors", metavar="FILE", help=wrong)
    add(parser, "overwrite", *LANGUAGES)
    add_decoding(parser)
    parser.set_defaults(run=_evaluate)


def _add_metric_arguments(parser: argparse.ArgumentParser) -> None:
    measures = (
        "of bleu, bleu_multi30k, bleu_compound_split, chrf, exact_match, wer, ser, cer (default: bleu and chrf; with a "
        "tokenizer of words or characters, exact_match and ser). bleu_multi30k: lower-cased, split at white space "
        "only, for tokenised text; bleu_compound_split: the paper's, with compounds split at hyphens; wer: the rest of "
        "exact_match; ser, cer: errors per symbol, per character"
    )
    parser.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help=measures)
    best = "measure as well how often one of the best 1, 3, 5 ... N is right"
    more = "lists that lack different ones are searched with more beams"
    parser.add_argument("--n-best", **NUMBER, help=f"{best} ({more})")  # type: ignore[arg-type]
    words = "tokeniser of bleu and bleu_compound_split: 13a (default), intl, none (for tokenised text), zh, char ..."
    parser.add_argument("--tokenize", default="13a", metavar="NAME", help=words)
    parser.add_argument("--lowercase", action="store_true", help="case-insensitive bleu and chrf")
    paired = "compare each row with the first: sacreBLEU's paired bootstrap resampling, 1,000 resamples (Koehn 2004)"
    parser.add_argument("--significance", action="store_true", help=paired)


@dataclass
class _Row:
    """One model or one ensemble."""

    name: str
    models: list[str]
    result: "EvaluationResult"
    seconds: dict[str, float]  # of loading, scoring and decoding
    decoding: dict[str, object]  # how, and by what
    comparisons: "list[Comparison]" = field(default_factory=list)  # with the first row

    @property
    def likelihood(self) -> "Likelihood":
        """How probable the references are."""
        assert self.result.likelihood is not None  # as it is asked for
        return self.result.likelihood

    @property
    def speeds(self) -> dict[str, float]:
        """Sentences and tokens per second."""
        counts = {"sentences": len(self.result.translations), "tokens": self.result.num_output_tokens}
        return {f"{name}_per_second": count / self.seconds["decoding"] for name, count in counts.items()}


def _evaluate(arguments: argparse.Namespace) -> None:
    check_ensemble(arguments.model, arguments)
    _check(arguments)
    sources, references = _read(arguments)
    _check_measures(arguments, len(sources))

    rows: list[_Row] = []
    for names in [arguments.model] if arguments.ensemble else [[name] for name in arguments.model]:
        rows.append(_row(arguments, names, sources, references, rows[0].result.measures if rows else None))
    if arguments.significance:
        _compare(rows, sources, references)
    errors = _errors(rows[0].result, sources, references) if arguments.errors else []
    try:
        show(_report(rows))
        if arguments.errors:
            show(_confusions(errors))
    finally:  # even if the report can't be printed
        _write(arguments, rows, errors)
    say_written(arguments.output, arguments.errors, arguments.json)


def _check(arguments: argparse.Namespace) -> None:
    """Checks, before any work is done, which options go together, and that the output files can be written."""
    is_one = arguments.ensemble or len(arguments.model) == 1
    for option, name in (("--output", arguments.output), ("--errors", arguments.errors)):
        if name and not is_one:
            raise UsageError(f"{option} is for one model's translations; give a single --model, or --ensemble")
    if arguments.n_best and arguments.ensemble:
        raise UsageError("--n-best is for one model; leave --ensemble out")
    if arguments.significance and is_one:
        raise UsageError("--significance compares models; give --model A B")
    if arguments.errors and Path(arguments.errors).suffix not in (".tsv", ".jsonl"):
        raise UsageError(f"--errors {arguments.errors} is no table; give a name that ends in .tsv or .jsonl")
    taken = [arguments.source, *arguments.reference]
    for name in ("json", "output", "errors"):
        if (file := getattr(arguments, name)) is not None:
            check_output(f"--{name}", file, arguments.overwrite, taken)
            taken.append(file)


def _read(arguments: argparse.Namespace) -> tuple[list[str], list[list[str]]]:
    """Returns the sources, and the references of each: one, or several by files."""
    from ..data.formats import check_file, is_table

    if not arguments.reference:
        if not is_table(arguments.source):
            raise UsageError("the sources need references; give --reference FILE, or a table with both by --source")
        from ..data.tables import read_table

        check_file(Path(arguments.source))
        sides = (arguments.source_column or "source", arguments.target_column or "target")
        columns = (*sides, *(arguments.feature_columns or ()))
        pairs = list(read_table(arguments.source, columns))
        return [pair["source"] for pair in pairs], [[pair["target"]] for pair in pairs]
    if is_table(arguments.source) or arguments.source_column or arguments.target_column or arguments.feature_columns:
        raise UsageError("--reference and columns are two ways to give references; give text files, or one table")
    read = [read_parallel(arguments.source, name) for name in arguments.reference]
    rows = zip(*(references for _, references in read), strict=True)
    from ..metrics import nonempty

    return read[0][0], [nonempty(row) for row in rows]


def _check_measures(arguments: argparse.Namespace, count: int) -> None:
    """Checks, before a model is loaded, that the measures are available."""
    from ..metrics import check_resampling, measure

    try:
        measure(arguments.metrics or ["bleu"], ["a"], ["a"], tokenize=arguments.tokenize, lowercase=arguments.lowercase)
        if arguments.significance:
            check_resampling(count)
    except (ValueError, ImportError, RuntimeError) as error:
        raise UsageError(first_line(error)) from error


# ---- Models ----
@decoding_errors()
def _row(
    arguments: argparse.Namespace,
    names: list[str],
    sources: list[str],
    references: list[list[str]],
    measures: "Measures | None",
) -> _Row:
    """Evaluates a model or an ensemble; without measures, its tokenizer chooses what is still open."""
    begun = time.perf_counter()
    translator = load_translator(names, arguments)
    loading = time.perf_counter() - begun
    from ..translation.evaluation import evaluate  # an exported model may be where it can't be imported

    call = translator.call(options := call_options(arguments, translator))

    def warn(index: int, consequence: str) -> None:
        warn_of_line(f"line {index + 1}", call.limit, consequence)

    with progress_bar(len(sources), "sentences", hidden=sys.stderr.isatty()) as tell:  # there are `evaluate`'s bars
        result = evaluate(
            translator,
            sources,
            references,
            metrics=measures or dict.fromkeys(arguments.metrics),
            tokenize=arguments.tokenize,
            lowercase=arguments.lowercase,
            n_best=arguments.n_best,
            progress=tell,
            on_omission=lambda index: warn(index, "it is left out of the perplexity"),
            on_division=lambda index, count: warn(index, f"it is translated in {count} pieces"),
            **options,
        )
    return _Row(" + ".join(names), names, result, {"loading": loading, **result.seconds}, _settings(call))


def _settings(call: "Call") -> dict[str, object]:
    """Returns how a row decodes, and by what."""
    backend = call.backend
    attached = getattr(vars(getattr(backend, "model", backend)).get("engine"), "compute_type", None)
    return {
        "search": str(call.plan),
        **call.plan.settings(),
        "backend": backend.name,
        "compute_type": str(backend.dtype) if backend.name == "ctranslate2" else attached,
        "device": str(backend.device),
        "dtype": str(backend.dtype),
        "batch_size": call.batch_size,
        "batch_tokens": call.batch_tokens,
        "max_source_tokens": call.limit,
    }


@decoding_errors()
def _compare(rows: list[_Row], sources: list[str], references: list[list[str]]) -> None:
    """Tests whether each row but the first differs from the first by more than chance."""
    from ..metrics import paired_bootstrap

    measures = rows[0].result.measures
    places, kept = measures.lines(sources, references)  # of words and characters, equal sources are one
    systems = [[row.result.translations[place] for place in places] for row in rows]
    comparisons = paired_bootstrap(systems, kept, names=measures.names, **measures.how)
    for row, own in zip(rows[1:], comparisons, strict=True):
        row.comparisons = own


# ---- Output ----
def _report(rows: Sequence[_Row]) -> str:
    """Formats the results: a table, the signatures, and BLEU's details."""
    from ..metrics import title

    scores = rows[0].result.scores.items()
    titles = {name: title(name, score.name) for name, score in scores}
    lines = [["model", *titles.values(), "perplexity", "sentences/s", "tokens/s", "loading"]]
    signatures = [f"{titles[name]}: {score.signature}" for name, score in scores]
    details = []
    for row in rows:
        figures = [*(score.value for score in row.result.scores.values()), row.likelihood.perplexity]
        shown = [*(f"{figure:.2f}" for figure in figures), *(f"{speed:.1f}" for speed in row.speeds.values())]
        lines.append([row.name, *shown, f"{row.seconds['loading']:.1f} s"])
        if row.likelihood.num_left_out:
            left_out = f"without {row.likelihood.num_left_out} pairs that are too long"
            signatures.append(f"perplexity of {row.name}: {left_out}")
        of = f" of {row.name}" if len(rows) > 1 else ""
        signatures.append(f"decoding{of}: {row.decoding['search']}")
        own = row.result.scores.items()
        details += [f"{titles[name]}{of}: {score.details}" for name, score in own if score.details]
    details += [
        f"{one.name} of {row.name}: p = {one.p_value:.3f} against {rows[0].name} ({one.signature})"
        for row in rows
        for one in row.comparisons
    ]
    return "\n".join([f"{rows[0].result.num_sentences} sentences", table(lines, align=">"), *signatures, *details])


def _errors(result: "EvaluationResult", sources: list[str], references: list[list[str]]) -> "list[_Error]":
    """Returns the lines that differ from their nearest reference, with the edits in each."""
    from ..metrics import edits

    errors: list[_Error] = []
    for place, own in zip(*result.measures.lines(sources, references), strict=True):
        text = result.translations[place]
        reference, pairs = edits(text, own, result.measures.symbols)
        if pairs:
            line = {"source": sources[place], "prediction": text, "reference": reference, "edits": len(pairs)}
            errors.append((line, pairs))
    return errors


def _confusions(errors: "list[_Error]") -> str:
    """Lists the most frequent edits; those of words or symbols, spaces too."""
    counts = Counter(pair for _, pairs in errors for pair in pairs)
    shown: dict[object, str] = {None: "nothing", "\ufffc": "<unk>"}  # as `symbol_splitter` spells the unknown token
    rows = [[" -> ".join(shown.get(one, repr(one)) for one in pair), f"{n:,}"] for pair, n in counts.most_common(SHOWN)]
    first = f"wrong: {len(errors):,} lines, by {counts.total():,} edits of {len(counts):,} kinds"
    return f"{first}\n{table([['expected -> predicted', 'times'], *rows], align='>')}"


def _write(arguments: argparse.Namespace, rows: list[_Row], errors: "list[_Error]") -> None:
    if arguments.errors:
        lines = [line for line, _ in errors]
        if arguments.errors.endswith(".jsonl"):
            written = [json.dumps(line, ensure_ascii=False) for line in lines]
        else:  # whose texts have neither tabs nor line breaks
            cells = [["source", "prediction", "reference", "edits"], *(line.values() for line in lines)]
            written = ["\t".join(re.sub(r"[\t\r\n]", " ", str(cell)) for cell in row) for row in cells]
        write_text(arguments.errors, "".join(f"{line}\n" for line in written))
    if arguments.output:
        write_text(arguments.output, "".join(f"{line}\n" for line in rows[0].result.translations))
    if arguments.json:
        record = _record(arguments, rows)
        write_text(arguments.json, json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _record(arguments: argparse.Namespace, rows: list[_Row]) -> dict[str, object]:
    from importlib.metadata import version  # it takes ten milliseconds, of every command

    versions = {"python": platform.python_version(), "hf_vanilla_transformer": __version__}
    installed = filter(find_spec, PACKAGES)  # an exported model needs few
    return {
        "source": arguments.source,
        "reference": arguments.reference[0] if len(arguments.reference) == 1 else arguments.reference,
        "num_sentences": rows[0].result.num_sentences,
        "ensemble": arguments.ensemble,
        "results": [_row_record(row) for row in rows],
        "versions": versions | {name: version(name) for name in installed},
    }


def _row_record(row: _Row) -> dict[str, object]:
    likelihood = row.likelihood
    return {
        "models": row.models,
        "p_values": {one.name: one.p_value for one in row.comparisons},
        **{name: asdict(score) for name, score in row.result.scores.items()},
        "perplexity": _finite(likelihood.perplexity),
        "negative_log_probability": _finite(likelihood.negative_log_probability),
        "num_reference_tokens": likelihood.num_tokens,
        "num_pairs_without_perplexity": likelihood.num_left_out,
        "num_output_tokens": row.result.num_output_tokens,
        **row.speeds,
        "seconds": row.seconds,
        "decoding": row.decoding,
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None  # JSON has no infinity
