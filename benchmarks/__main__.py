"""Compares training and decoding with other implementations of the same model, in one run on this machine.

    python -m benchmarks train --config base --peers marian,torch --json train.json --chart train.png
    python -m benchmarks generate --config base --compiled --json generate.json --chart generate.png
    python -m benchmarks real --model opus-mt-en-de --input test_2016_flickr.en --reference test_2016_flickr.de
    python -m benchmarks ablate --config small --rounds 3 --batches 1

Contenders take turns, A B A B, on the same batches, each in its own process. Every figure is a median of rounds;
compare ratios, as machines have other work to do. docs/performance.md explains what is compared.
"""

import argparse
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils import logging

from hf_vanilla_transformer.data.batching import BatchingError

from .ablate import ablate
from .decoding import decoding_entrants
from .floor import products_of
from .real import measure_real
from .report import BASELINE, FLOOR, Report, compare, count_different, draw, megabytes, new_figure
from .training import training_entrants
from .work import (
    DECODING_FORMULA,
    LENGTHS,
    SIZES,
    TRAINING_FORMULA,
    Case,
    decoding_batches,
    random_batches,
    synchronize,
    training_batches,
)
from .workers import BenchmarkError, Entrant, Facts, Timing, Worker, take_turns

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PEAK_SIDES = {"cpu": (1024, 2048), "cuda": (4096, 8192, 16384)}
COMPILED = 'also ours with compute_type="compiled"; compiling takes up to two minutes'
BATCHES_OF_ONE = 8  # instead of one, which would mainly measure refilling the caches after another's turn
DECODING_CASES = {  # name -> beams, sentences
    "greedy, batch 1": (1, 1),
    "greedy, batch 32": (1, 32),
    "beam 4, batch 1": (4, 1),
    "beam 4, batch 32": (4, 32),
}
# Name of a peer -> the module that must be installed, and the commands that have it.
PEERS = {
    "marian": ("transformers", ("train", "generate", "real")),
    "torch": ("torch", ("train",)),
    "ctranslate2": ("ctranslate2", ("generate", "real")),
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
    try:
        check(options)
        report = {"real": real, "ablate": run_ablation}.get(options.command, run_contest)(options)
    except (BenchmarkError, BatchingError) as error:
        raise SystemExit(f"benchmarks: {error}") from error
    print(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(report.to_json() + "\n")
    if options.chart:
        draw(report, options.chart)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    every = argparse.ArgumentParser(add_help=False)
    every.add_argument("--rounds", type=positive, default=5, help="timed turns of each (default: %(default)s)")
    every.add_argument("--threads", type=positive, help="threads of each process (default: torch's)")
    every.add_argument("--json", type=Path, metavar="F.json", help="write all figures to this file")
    every.add_argument("--chart", type=Path, metavar="F.png", help="draw a chart")
    every.add_argument("--peers", help=f"of {', '.join(PEERS)}, separated by commas; none: ours alone (default: all)")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", choices=SIZES, default="base", help="size of the models (default: base)")
    common.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    common.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on CUDA; train: autocast")
    common.add_argument("--lengths", choices=LENGTHS, default="multi30k", help="sentence lengths (default: multi30k)")
    batches = f"batches per turn; {BATCHES_OF_ONE} single sentences count as one (default: %(default)s)"
    common.add_argument("--batches", type=positive, default=4, help=batches)
    common.add_argument("--seed", type=int, default=0, help="seed of the batches (default: 0)")
    updates, searches = argparse.ArgumentParser(add_help=False), argparse.ArgumentParser(add_help=False)
    updates.add_argument(
        "--tokens", type=positive, help="target tokens per batch (default: 2,048; ablate: 1,024; on CUDA 25,000)"
    )
    searches.add_argument("--new-tokens", type=positive, help="tokens of all translations (default: of real targets)")
    searches.add_argument("--cases", nargs="+", metavar="CASE", help=f"of {'; '.join(DECODING_CASES)} (default: all)")
    compiled = argparse.ArgumentParser(add_help=False)
    compiled.add_argument("--compiled", action="store_true", help=COMPILED)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = partial(parser.add_subparsers(dest="command", required=True, metavar="train|generate|real|ablate").add_parser)
    add("train", parents=[common, updates, every], help="updates: target tokens per second")
    add("generate", parents=[common, searches, compiled, every], help="translations: output tokens per second")
    leave_out = add(
        "ablate", parents=[common, updates, searches, every], help="each shortcut left out alone: time, memory"
    )
    leave_out.add_argument("--only", choices=("updates", "translations"), help="half of the tables (default: both)")
    real = add("real", parents=[compiled, every], help="real text with a trained model: sentences per second and BLEU")
    real.add_argument("--model", type=Path, required=True, help="folder of a MarianMTModel, as OPUS-MT's are laid out")
    real.add_argument("--input", type=Path, required=True, help="file with one sentence per line")
    real.add_argument("--reference", type=Path, required=True, help="their translations")
    real.add_argument("--num-beams", type=positive, nargs="+", default=[1, 4], help="beam sizes (default: 1 4)")
    real.add_argument("--max-new-tokens", type=positive, default=128, help="longest translation (default: 128 tokens)")
    real.add_argument("--lines", type=positive, help="number of lines, from the first (default: all)")
    real.add_argument("--singles", type=positive, default=50, help="lines also translated one at a time (default: 50)")
    real.set_defaults(device="cpu", dtype="float32", rounds=3)
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    if getattr(options, "tokens", 0) is None:
        on_cpu = 1_024 if options.command == "ablate" else 2_048  # which has forty rows
        options.tokens = on_cpu if options.device == "cpu" else 25_000
    if options.peers is None:
        options.peers = ",".join(name for name, (_, commands) in PEERS.items() if options.command in commands)
    return options


def positive(text: str) -> int:
    """Parses an integer of at least 1; a type for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is too few; give 1 or more")
    return number


def check(options: argparse.Namespace) -> None:
    """Checks the options before anything is measured.

    Raises:
        BenchmarkError: They can't work; the message names the fix.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("there is no CUDA device here; give --device cpu")
    if options.command == "train" and options.dtype == "float16":
        raise BenchmarkError("training in float16 needs a scaled loss; give --dtype bfloat16 or float32")
    if options.command == "ablate" and (options.device, options.dtype) != ("cpu", "float32"):
        raise BenchmarkError("the shortcuts are for float32 on a CPU; give --device cpu --dtype float32")
    for name in getattr(options, "cases", None) or ():
        if name not in DECODING_CASES:
            raise BenchmarkError(
                f"--cases: there is no case {name!r}; choose of {', '.join(map(repr, DECODING_CASES))}"
            )
    if options.chart:
        new_figure(1)  # fails now rather than after an hour if matplotlib is missing
    choose_peers(options)


def choose_peers(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Selects the peers that are installed and part of the command; returns also why others are left out."""
    chosen, left_out = [], []
    for name in dict.fromkeys(part.strip() for part in options.peers.split(",")):
        if name in ("", "none"):
            continue
        if name not in PEERS:
            raise BenchmarkError(f"there is no peer {name!r}; choose of {', '.join(PEERS)}")
        module, commands = PEERS[name]
        if options.command not in commands:
            left_out.append(f"left out: {name}, only part of {' and '.join(commands)}")
        elif find_spec(module) is None:
            left_out.append(f"left out: {name}, not installed")
        else:
            chosen.append(name)
    return chosen, left_out


def real(options: argparse.Namespace) -> Report:
    """Measures a trained model on real text."""
    peers, left_out = choose_peers(options)
    report = measure_real(options, peers, compute_types(options), say)
    report.notes += left_out
    return report


def compute_types(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the compute types that ours decodes with, in addition to the default."""
    return ("int8", "compiled") if options.compiled else ("int8",)


def settings_of(options: argparse.Namespace) -> dict[str, object]:
    """Returns the options that the figures depend on."""
    names = ("config", "device", "dtype", "rounds", "seed", "tokens", "lengths", "new_tokens", "batches", "threads")
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def run_ablation(options: argparse.Namespace) -> Report:
    """Leaves each shortcut out alone, on well filled batches and on badly filled ones."""
    size, lengths = SIZES[options.config], LENGTHS[options.lengths]
    bad = random_batches(lengths, size, options.tokens, options.batches, options.seed)
    training = (*training_cases(options), Case("updates, badly filled batches", bad))
    training = () if options.only == "translations" else training
    decoding = () if options.only == "updates" else decoding_cases(options)
    settings = {**settings_of(options), "padding": ", ".join(f"{case.padding:.0%}" for case in training)}
    return ablate(size, training, decoding, options.rounds, options.threads, settings, say)


def run_contest(options: argparse.Namespace) -> Report:
    """Builds the contenders of train or generate, lets them take turns and returns the report."""
    size, dtype, is_training = SIZES[options.config], DTYPES[options.dtype], options.command == "train"
    peers, left_out = choose_peers(options)
    say("measuring the machine's peak")
    peak, peak_at = measure_peak(options.device, dtype)
    report = Report(options.command, {**settings_of(options), "size": str(size)})
    report.notes = [
        f"peak: {peak / 1e9:,.1f} GFLOP/s, {peak_at}",
        TRAINING_FORMULA if is_training else DECODING_FORMULA,
    ]
    report.notes += left_out
    with TemporaryDirectory() as folder:
        if is_training:
            cases = training_cases(options)
            entrants = training_entrants(peers, size, cases, options.device, dtype)
        else:
            cases = decoding_cases(options)
            more = {"folder": Path(folder), "compute_types": compute_types(options)}
            entrants = decoding_entrants(peers, size, cases, options.device, dtype, options.threads, **more)
        compete(report, entrants, cases, peak, options)
    return report


def compete(
    report: Report, entrants: list[Entrant], cases: tuple[Case, ...], peak: float, options: argparse.Namespace
) -> None:
    """Runs all cases and adds their tables to the report."""
    size = SIZES[options.config]
    workers = [Worker(entrant, options.threads) for entrant in entrants]
    try:
        facts = {worker.name: worker.ask("facts") for worker in workers}
        check_parameters(facts)
        for case in cases:
            players = {worker.name: partial(worker.ask, "run", case.name) for worker in workers}
            turns = take_turns(players, options.rounds, lambda what, to=case.name: say(f"{to}: {what}"))
            title = f"{case.name}: {case.tokens:,} target tokens per round, {case.padding:.1%} padding"
            title += f", {case.flops(size):.3g} FLOPs"
            report.tables[title] = rows_of(case, turns, facts, case.flops(size) / case.tokens / peak)
        for worker in workers:
            _, peak_memory = worker.ask("peak")
            for table in report.tables.values():
                # The floor's buffers say nothing of what a model needs.
                table[worker.name]["peak MB"] = None if worker.name == FLOOR else megabytes(peak_memory)
                table[worker.name] |= {"parameters": facts[worker.name].parameters, "note": facts[worker.name].note}
    finally:
        for worker in workers:
            worker.stop()


def rows_of(
    case: Case, turns: dict[str, list[Timing]], facts: dict[str, Facts], utilisation: float
) -> dict[str, dict[str, object]]:
    """Makes a case's table; `utilisation` is that of one token per second."""
    baseline = BASELINE if BASELINE in turns else next(iter(turns))
    seconds = {name: [timing.seconds for timing in own] for name, own in turns.items()}
    table = compare(case.tokens, "tokens/s", seconds, baseline)
    for name, row in table.items():
        row[f"of {FLOOR}"] = row["tokens/s"] * statistics.median(seconds[FLOOR]) / case.tokens
        row["utilisation"] = row["tokens/s"] * utilisation if facts[name].in_dtype else None
        row["other lines"] = count_different(turns[name][-1].outputs, turns[baseline][-1].outputs)
    return table


def training_cases(options: argparse.Namespace) -> tuple[Case, ...]:
    """One case: updates on all batches."""
    size, lengths = SIZES[options.config], LENGTHS[options.lengths]
    batches = training_batches(lengths, size, options.tokens, options.batches, options.seed)
    return (Case("updates", batches),)


def decoding_cases(options: argparse.Namespace) -> tuple[Case, ...]:
    """Greedy and beam search, one sentence and many at a time; both searches on the same batches."""
    size, lengths = SIZES[options.config], LENGTHS[options.lengths]
    cases = []
    for name in options.cases or DECODING_CASES:
        beams, sentences = DECODING_CASES[name]
        count = options.batches * (BATCHES_OF_ONE if sentences == 1 else 1)
        batches = decoding_batches(lengths, size, sentences, count, options.seed, options.new_tokens)
        cases.append(Case(name, batches, beams))
    return tuple(cases)


def check_parameters(facts: dict[str, Facts]) -> None:
    """Compares the numbers of parameters, without those that only one of the contenders has by design.

    Raises:
        BenchmarkError: They are not of the same size.
    """
    counts = {name: fact.parameters - fact.alone for name, fact in facts.items() if fact.parameters}
    ours = counts["ours"]
    for name, count in counts.items():
        if count != ours:
            raise BenchmarkError(
                f"{name} has {count:,} parameters and ours {ours:,}, so they are not the same model; fix its builder "
                "in benchmarks/models.py, or state there what only it has"
            )


def measure_peak(device: str, dtype: torch.dtype, seconds: float = 1.0) -> tuple[float, str]:
    """Returns the most FLOP/s that this machine reaches in products of large square matrices, and which these were."""
    best, best_side = 0.0, 0
    for side, kind in itertools.product(PEAK_SIDES[device], products_of(device, dtype).values()):
        a, b, out = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))
        call, ends = kind.multiply(a, b, out), time.perf_counter() + seconds
        for number in range(100):
            synchronize(device)
            began = time.perf_counter()
            call()
            synchronize(device)
            now = time.perf_counter()
            if number and 2 * side**3 / (now - began) > best:  # the first one warms up
                best, best_side = 2 * side**3 / (now - began), side
            if number and now > ends:
                break
    return best, f"the best product of {best_side} x {best_side} matrices in {str(dtype).removeprefix('torch.')}"


def say(what: str) -> None:
    """Prints progress to standard error, separately from the table."""
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
