"""Compares training and decoding with other implementations of the same model, in one run on this machine.

    python -m benchmarks train --config base --peers marian torch --json train.json
    python -m benchmarks train --config base --packed --budget 120
    python -m benchmarks generate --config base --json generate.json
    python -m benchmarks real --model opus-mt-en-de --input test_2016_flickr.en --reference test_2016_flickr.de
    python -m benchmarks text --model outputs/model --input test.en
    python -m benchmarks ablate --config small --rounds 3 --batches 1

Contenders take turns, A B A B, on the same batches, each in its own process. Every figure is a median of rounds;
compare ratios, as machines have other work to do. docs/performance.md explains what is compared.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils import is_flash_attn_2_available, logging

from hf_vanilla_transformer.data.batching import BatchingError

from .ablate import DECODING, TRAINING, ablate
from .decoding import Variants, decoding_entrants, workload_of, write_models
from .real import measure_real
from .report import Report, compare
from .text import measure_text
from .training import training_entrants
from .work import SIZES, TRAINING_FORMULA, Case, decoding_batches, measure_peak, training_batches
from .workers import BenchmarkError, Entrant, Worker, start, take_turns

DTYPES = ("float32", "bfloat16")
BATCHES_OF_ONE = 8  # one would mainly measure refilling the caches after another contender's turn
DECODING_CASES = {  # name -> beams, sentences
    "greedy, batch 1": (1, 1),
    "greedy, batch 32": (1, 32),
    "beam 4, batch 1": (4, 1),
    "beam 4, batch 32": (4, 32),
    "greedy, batch 64": (1, 64),
    "greedy, batch 256": (1, 256),
    "beam 4, batch 256": (4, 256),
}
USUAL_CASES = list(DECODING_CASES)[:4]
PEERS = {
    "train": ["marian", "torch"],
    "generate": ["marian", "ctranslate2"],
    "real": ["marian", "ctranslate2"],
    "text": ["marian", "ctranslate2"],
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark that the command line asks for."""
    options = parse_arguments(arguments)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=UserWarning)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    options.threads = torch.get_num_threads()
    unprinted = ("command", "json", "model", "input", "reference")
    given = {name: value for name, value in vars(options).items() if value is not None and name not in unprinted}
    report = Report(options.command, given)
    runs = {"train": train, "generate": generate, "real": real, "text": text, "ablate": run_ablation}
    try:
        check(options, report)
        runs[options.command](options, report)
    except (BenchmarkError, BatchingError) as error:
        raise SystemExit(f"benchmarks: {error}") from error
    print(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument("--rounds", type=positive, default=5, help="timed turns of each (default: %(default)s)")
    every.add_argument("--threads", type=positive, help="threads of each process (default: torch's)")
    every.add_argument("--json", type=Path, metavar="F.json", help="write all figures to this file")
    placed = argparse.ArgumentParser(add_help=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    placed.add_argument("--device", choices=("cpu", "cuda"), default=device, help="default: cuda where there is one")
    placed.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on CUDA; train: autocast")
    common = argparse.ArgumentParser(add_help=False, parents=[placed])
    common.add_argument("--config", choices=SIZES, default="base", help="size of the models (default: base)")
    timed = argparse.ArgumentParser(add_help=False)
    timed.add_argument("--seconds", type=positive, help="time limit: no further case is begun after it")
    batches = f"batches per turn; {BATCHES_OF_ONE} single sentences count as one (default: %(default)s)"
    common.add_argument("--batches", type=positive, default=4, help=batches)
    updates, searches = argparse.ArgumentParser(add_help=False), argparse.ArgumentParser(add_help=False)
    updates.add_argument(
        "--tokens", type=positive, help="target tokens per batch (default: 2,048; ablate: 1,024; on CUDA 25,000)"
    )
    searches.add_argument("--new-tokens", type=positive, default=16, help="tokens of all translations (default: 16)")
    searches.add_argument("--cases", nargs="+", choices=DECODING_CASES, default=USUAL_CASES, metavar="CASE")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="train|generate|real|text|ablate")

    def add(name: str, *parents: argparse.ArgumentParser, help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[*parents, every], help=help)
        if name in PEERS:
            text = f"of {' '.join(PEERS[name])}; nothing: ours alone (default: all)"
            command.add_argument("--peers", nargs="*", choices=PEERS[name], default=PEERS[name], help=text)
        return command

    updating = add("train", common, updates, timed, help="updates: target tokens per second")
    compiled = "also this package's model by torch.compile (up to two minutes more)"
    updating.add_argument("--compiled", action="store_true", help=compiled)
    packed = "also this package's model on packed batches, as it is and by torch.compile (up to two minutes more)"
    updating.add_argument("--packed", action="store_true", help=packed)
    budget = "most seconds that a contender may take to start and for its first turn; a slower one is left out"
    updating.add_argument("--budget", type=positive, help=budget)
    add("generate", common, searches, timed, help="translations: output tokens per second")
    leave_out = add("ablate", common, updates, searches, help="each shortcut left out alone: time, memory")
    names = [*TRAINING, *DECODING]
    leave_out.add_argument("--only", nargs="+", choices=names, default=names, metavar="SHORTCUT", help=", ".join(names))
    real = add("real", help="real text with a trained model: sentences per second and BLEU")
    real.add_argument("--model", type=Path, required=True, help="folder of a MarianMTModel, as OPUS-MT's are laid out")
    real.add_argument("--input", type=Path, required=True, help="file with one sentence per line")
    real.add_argument("--reference", type=Path, required=True, help="their translations")
    real.add_argument("--num-beams", type=positive, nargs="+", default=[1, 4], help="beam sizes (default: 1 4)")
    longest = "longest translation, in tokens (default: 128)"
    real.add_argument("--max-new-tokens", dest="longest", metavar="N", type=positive, default=128, help=longest)
    real.add_argument("--lines", type=positive, help="number of lines, from the first (default: all)")
    real.add_argument("--singles", type=positive, default=50, help="lines also translated one at a time (default: 50)")
    real.set_defaults(device="cpu", dtype="float32", rounds=3)
    texts = add("text", placed, help="text to text with a trained model: sentences per second")
    texts.add_argument("--model", type=Path, required=True, help="folder of a trained model")
    texts.add_argument("--input", type=Path, required=True, help="file with one sentence per line")
    texts.add_argument("--num-beams", type=positive, nargs="+", default=[1, 4], help="beam sizes (default: 1 4)")
    texts.add_argument("--lines", type=positive, default=1_000, help="number of lines (default: 1000)")
    texts.add_argument("--singles", type=positive, default=20, help="lines also translated one at a time (default: 20)")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    if getattr(options, "tokens", 0) is None:
        on_cpu = 1_024 if options.command == "ablate" else 2_048  # which has forty rows
        options.tokens = on_cpu if options.device == "cpu" else 25_000
    return options


def positive(text: str) -> int:
    """Parses an integer of at least 1; a type for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too few; give 1 or more")
    return number


def check(options: argparse.Namespace, report: Report) -> None:
    """Checks the options before anything is measured, and leaves out CTranslate2 where it isn't installed.

    Raises:
        BenchmarkError: They can't work; the message names the fix.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("there is no CUDA device here; give --device cpu")
    if options.command == "ablate" and options.device != "cpu":
        raise BenchmarkError("the shortcuts are for a CPU; give --device cpu")
    if options.command == "ablate" and options.dtype != "float32" and not TRAINING.keys() >= {*options.only}:
        raise BenchmarkError(f"decoding is measured in float32; give --only {' '.join(map(repr, TRAINING))}")
    if "ctranslate2" in getattr(options, "peers", ()) and find_spec("ctranslate2") is None:
        options.peers = [name for name in options.peers if name != "ctranslate2"]
        report.notes.append("left out: ctranslate2, not installed")
    options.has_flash = options.device == "cuda" and is_flash_attn_2_available()
    if options.device == "cuda" and not options.has_flash:
        report.notes.append("left out: flash attention, flash_attn is not installed")


def real(options: argparse.Namespace, report: Report) -> None:
    """Measures a trained model on real text."""
    report.settings |= {"model": options.model.name, "input": options.input.name}
    measure_real(options, variants(options), report, say)


def text(options: argparse.Namespace, report: Report) -> None:
    """Measures a trained model from text to text."""
    report.settings |= {"model": options.model.name, "input": options.input.name}
    measure_text(options, report, say)


def variants(options: argparse.Namespace) -> Variants:
    """Returns what ours decodes with in addition to the default."""
    if options.device == "cuda":
        flash = {"ours, flash attention": {"attention": "flash_attention_2"}} if options.has_flash else {}
        return {"ours, uncaptured": {"decoder": "packed"}, **flash}
    return {"ours, int8": {"compute_type": "int8"}} if options.dtype == "float32" else {}


def run_ablation(options: argparse.Namespace, report: Report) -> None:
    """Leaves each shortcut out alone."""
    size, training = SIZES[options.config], training_cases(options)
    report.settings["padding"] = ", ".join(f"{case.padding:.0%}" for case in training)
    ablate(report, size, training, decoding_cases(options), options, say)


def train(options: argparse.Namespace, report: Report) -> None:
    """Measures updates, and how much of the machine's peak these use."""
    size, cases, dtype = SIZES[options.config], training_cases(options), getattr(torch, options.dtype)
    peak, peak_at = measure_peak(options.device, dtype)
    report.notes += [f"peak: {peak / 1e9:,.1f} GFLOP/s, {peak_at}", TRAINING_FORMULA]
    names = ["ours, plain call", *(["ours, torch.compile"] if options.compiled else [])]
    names += ["ours, packed", "ours, packed, torch.compile"] if options.packed else []
    names += ["ours, flash attention"] if options.has_flash else []
    compete(report, training_entrants([*names, *options.peers], size, options.device, dtype), cases, options)
    for case, table in zip(cases, report.tables.values(), strict=True):
        for row in table.values():
            row["utilisation"] = row["tokens/s"] * case.training_flops(size) / case.tokens / peak


def generate(options: argparse.Namespace, report: Report) -> None:
    """Measures translations of forced lengths."""
    with TemporaryDirectory() as name:
        write_models(SIZES[options.config], folder := Path(name))
        work = {name: getattr(options, name) for name in ("device", "dtype", "threads")}
        entrants = decoding_entrants(folder / "marian", folder, options.peers, variants(options), **work)
        compete(report, entrants, decoding_cases(options), options)


def compete(report: Report, entrants: list[Entrant], cases: tuple[Case, ...], options: argparse.Namespace) -> None:
    """Runs all cases and adds their tables to the report."""
    began = time.monotonic()
    with start(entrants, options.threads) as workers:
        for case in cases:
            if options.seconds is not None and time.monotonic() - began > options.seconds:
                report.notes.append(f"left out: {case.name}, as {options.seconds} seconds were over")
                continue
            if getattr(options, "budget", None) is not None:
                workers = list(in_time(workers, case, options.budget, report))
                if not workers:
                    raise BenchmarkError("; ".join(note for note in report.notes if note.startswith("left out")))
            players = {one.name: partial(one.ask, "run", workload_of(case) if case.beams else case) for one in workers}

            def note(what: str, to: str = case.name) -> None:
                say(f"{to}: {what}")

            turns = take_turns(players, options.rounds, note)
            title = f"{case.name}: {case.tokens:,} target tokens per round, {case.padding:.1%} padding"
            report.tables[title] = compare(case.tokens, "tokens/s", turns)
        for worker in workers:
            peak = round(worker.ask("peak") / 1e6)
            for table in report.tables.values():
                table[worker.name]["peak MB"] = peak


def in_time(workers: list[Worker], case: Case, seconds: float, report: Report) -> Iterator[Worker]:
    """Gives each contender a turn, which may compile, and yields those that manage it; the report says why not."""
    for worker in workers:
        say(f"{case.name}: first turn of {worker.name}")
        try:
            worker.ask("run", case, seconds=seconds)
            yield worker
        except BenchmarkError as error:
            report.notes.append(f"left out: {error}")


def training_cases(options: argparse.Namespace) -> tuple[Case, ...]:
    """One case: updates on all batches."""
    return (Case("updates", training_batches(SIZES[options.config], options.tokens, options.batches)),)


def decoding_cases(options: argparse.Namespace) -> tuple[Case, ...]:
    """Greedy and beam search, one sentence and many at a time; both searches on the same batches."""
    cases = []
    for name in options.cases:
        beams, sentences = DECODING_CASES[name]
        count = options.batches * (BATCHES_OF_ONE if sentences == 1 else 1)
        batches = decoding_batches(SIZES[options.config], sentences, count)
        cases.append(Case(name, batches, beams, options.new_tokens))
    return tuple(cases)


def say(what: str) -> None:
    """Prints progress to standard error, separately from the table."""
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
