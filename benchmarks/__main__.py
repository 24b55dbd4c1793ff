"""Compares training and decoding with other implementations of the same model, in one run on this machine.

    python -m benchmarks train --config base --peers marian,torch --json train.json --chart train.png
    python -m benchmarks train --config tiny --end-to-end --data_dir multi30k_tok
    python -m benchmarks generate --config base --json generate.json --chart generate.png
    python -m benchmarks generate --growth growth/
    python -m benchmarks generate --config opus --compiled
    python -m benchmarks real --model opus-mt-en-de --input test_2016_flickr.en --reference test_2016_flickr.de

Contenders take turns, A B A B, on the same random batches, each in its own process. Every figure is a median of
rounds; compare ratios, as machines have other work to do. docs/performance.md explains what is compared.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hf_vanilla_transformer.data.batching import BatchingError

from . import end_to_end, growth
from .decoding import decoding_entrants
from .floor import products_of
from .real import RealText, measure_real
from .report import Report, draw, new_figure
from .training import training_entrants
from .work import (
    DECODING_FORMULA,
    LENGTHS,
    SIZES,
    TRAINING_FORMULA,
    BenchmarkError,
    Case,
    decoding_batches,
    training_batches,
)
from .workers import PAUSE, Entrant, Facts, be_quiet, set_threads, start, synchronize, take_turns

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


@dataclass(frozen=True)
class Peer:
    """Another implementation.

    Attributes:
        module: The module that must be installed.
        train: Whether the benchmark of training supports it.
        generate: Whether the benchmark of decoding supports it.
        unsupported_reason: Why not both are supported.
    """

    module: str
    train: bool
    generate: bool
    unsupported_reason: str = ""


PEERS = {
    "marian": Peer("transformers", True, True),
    "torch": Peer("torch", True, False, "torch.nn.Transformer has no decoding"),
    "bart": Peer("transformers", True, False, "it decodes as Marian does"),
    "ctranslate2": Peer("ctranslate2", False, True, "it only decodes"),
    "fairseq": Peer("fairseq", False, False, "benchmarks has no adapter for it"),
    "joeynmt": Peer("joeynmt", False, False, "benchmarks has no adapter for it"),
    "opennmt": Peer("onmt", False, False, "benchmarks has no adapter for it"),
}
DEFAULT_PEERS = {"train": "marian,torch", "generate": "marian,ctranslate2", "real": "marian,ctranslate2"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark that the command line asks for."""
    options = parse_arguments(arguments)
    be_quiet()
    set_threads(options.threads)
    try:
        check(options)
        if options.command == "generate" and options.growth:
            seconds = growth.measure_growth(options.device, DTYPES[options.dtype], options.rounds, say)
            files = growth.write_growth(seconds, options.growth)
            print("\n".join(map(str, files)))
            return
        report = real(options) if options.command == "real" else measure(options)
    except (BenchmarkError, BatchingError) as error:
        raise SystemExit(f"benchmarks: {error}") from error
    print(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(report.to_json() + "\n")
    if options.chart and isinstance(report, Report):
        draw(report, options.chart)


def real(options: argparse.Namespace) -> RealText:
    """Measures a trained model on real text."""
    peers, left_out = choose_peers(options.peers, "generate")
    for name, reason in left_out.items():
        say(f"left out: {name}, {reason}")
    return measure_real(
        options.model,
        options.input,
        options.reference,
        beams=options.num_beams,
        longest=options.max_new_tokens,
        lines=options.lines,
        singles=options.singles,
        rounds=options.rounds,
        threads=options.threads or torch.get_num_threads(),
        peers=peers,
        compute_types=compute_types(options),
        say=say,
    )


def compute_types(options: argparse.Namespace) -> tuple[str, ...]:
    """Returns the compute types that ours decodes with, in addition to the default."""
    return ("int8", "compiled") if options.compiled else ("int8",)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", choices=SIZES, default="base", help="size of the models (default: base)")
    common.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    common.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on CUDA; train: autocast")
    common.add_argument("--peers", help=f"of {', '.join(PEERS)}, separated by commas; none: ours and the floor only")
    common.add_argument("--lengths", choices=LENGTHS, default="multi30k", help="sentence lengths (default: multi30k)")
    common.add_argument("--rounds", type=positive, default=5, help="timed turns of each (default: 5)")
    batches = f"batches per turn; {BATCHES_OF_ONE} single sentences count as one (default: 4)"
    common.add_argument("--batches", type=positive, default=4, help=batches)
    common.add_argument("--threads", type=positive, help="threads of each process (default: torch's)")
    common.add_argument("--seed", type=int, default=0, help="seed of the batches (default: 0)")
    common.add_argument("--json", type=Path, metavar="F.json", help="write all figures to this file")
    common.add_argument("--chart", type=Path, metavar="F.png", help="draw a chart")
    common.add_argument("--same-process", action="store_true", help="all in one process: no peak memory, one allocator")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="train|generate|real")
    train = commands.add_parser("train", parents=[common], help="updates: target tokens per second")
    train.add_argument("--tokens", type=positive, help="target tokens per batch (default: 2,048; on CUDA 25,000)")
    train.add_argument("--end-to-end", action="store_true", help="compare our trainer with the stock one, on files")
    train.add_argument("--data_dir", type=Path, help="folder of Multi30k's train.en and train.de")
    train.add_argument("--updates", type=positive, default=20, help="updates per turn, end to end (default: 20)")
    generate = commands.add_parser("generate", parents=[common], help="translations: output tokens per second")
    generate.add_argument("--new-tokens", type=positive, help="tokens of all translations (default: of real targets)")
    generate.add_argument("--cases", nargs="+", metavar="CASE", help=f"of {'; '.join(DECODING_CASES)} (default: all)")
    generate.add_argument("--compiled", action="store_true", help=COMPILED)
    generate.add_argument("--growth", type=Path, metavar="FOLDER", help="instead, plot how time grows with each size")
    real = commands.add_parser("real", help="real text with a trained model: sentences per second and BLEU")
    real.add_argument("--model", type=Path, required=True, help="folder of a MarianMTModel, as OPUS-MT's are laid out")
    real.add_argument("--input", type=Path, required=True, help="file with one sentence per line")
    real.add_argument("--reference", type=Path, required=True, help="their translations")
    real.add_argument("--num-beams", type=positive, nargs="+", default=[1, 4], help="beam sizes (default: 1 4)")
    real.add_argument("--max-new-tokens", type=positive, default=128, help="longest translation (default: 128 tokens)")
    real.add_argument("--lines", type=positive, help="number of lines, from the first (default: all)")
    real.add_argument("--singles", type=positive, default=50, help="lines also translated one at a time (default: 50)")
    real.add_argument("--compiled", action="store_true", help=COMPILED)
    real.add_argument("--peers", help="of marian and ctranslate2, or none (default: both)")
    real.add_argument("--rounds", type=positive, default=3, help="timed turns of each (default: 3)")
    real.add_argument("--threads", type=positive, help="threads of each process (default: torch's)")
    real.add_argument("--json", type=Path, metavar="F.json", help="file to write all figures to")
    real.set_defaults(device="cpu", dtype="float32", chart=None)
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    if options.peers is None:
        options.peers = DEFAULT_PEERS[options.command]
    if options.command == "train" and options.tokens is None:
        options.tokens = 2_048 if options.device == "cpu" else 25_000
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
    if options.command == "train" and options.end_to_end and options.data_dir is None:
        raise BenchmarkError("--end-to-end needs --data_dir, the folder of Multi30k's train.en and train.de")
    for name in getattr(options, "cases", None) or ():
        if name not in DECODING_CASES:
            raise BenchmarkError(
                f"--cases: there is no case {name!r}; choose of {', '.join(map(repr, DECODING_CASES))}"
            )
    if options.chart or getattr(options, "growth", None):
        new_figure(1)  # fails now rather than after an hour if matplotlib is missing
    choose_peers(options.peers, "train" if options.command == "train" else "generate")


def choose_peers(names: str, command: str) -> tuple[list[str], dict[str, str]]:
    """Selects the peers that are installed and supported.

    Args:
        names: Names of peers, separated by commas.
        command: "train" or "generate".

    Returns:
        The selected names; name of each other peer -> reason.

    Raises:
        BenchmarkError: A name is unknown.
    """
    chosen, left_out = [], {}
    for name in dict.fromkeys(part.strip() for part in names.split(",")):
        if name in ("", "none"):
            continue
        if name not in PEERS:
            raise BenchmarkError(f"there is no peer {name!r}; choose of {', '.join(PEERS)}")
        peer = PEERS[name]
        if find_spec(peer.module) is None:
            left_out[name] = "not installed"
        elif not getattr(peer, command):
            left_out[name] = peer.unsupported_reason
        else:
            chosen.append(name)
    return chosen, left_out


def measure(options: argparse.Namespace) -> Report:
    """Builds the contenders, lets them take turns and returns the report."""
    size, dtype = SIZES[options.config], DTYPES[options.dtype]
    peers, left_out = choose_peers(options.peers, options.command)
    names = ["config", "device", "dtype", "rounds", "seed", "tokens"]
    names += ["updates"] if getattr(options, "end_to_end", False) else ["lengths", "new_tokens", "batches"]
    settings = {name: getattr(options, name) for name in names if hasattr(options, name)}
    is_training = options.command == "train"
    report = Report(options.command, size, settings, "", None, "", left_out)
    with TemporaryDirectory() as name:
        folder, work = Path(name), {"device": options.device, "dtype": dtype}
        if is_training and options.end_to_end:
            cases: dict[str, Case | None] = {"Multi30k, end to end": None}
            report.size = size = end_to_end.prepare(options.data_dir, size, folder)
            report.left_out |= {peer: "there is no end-to-end benchmark of it" for peer in peers if peer != "marian"}
            entrants = end_to_end.entrants(
                size, folder, options.tokens, options.updates, **work, with_marian="marian" in peers
            )
        else:
            say("measuring the machine's peak")
            report.peak_flops, report.peak_at = measure_peak(options.device, dtype)
            report.formula = TRAINING_FORMULA if is_training else DECODING_FORMULA
            work_cases = training_cases(options) if is_training else decoding_cases(options)
            cases = {case.name: case for case in work_cases}
            if is_training:
                entrants = training_entrants(peers, size, work_cases, **work)
            else:
                more = {"threads": options.threads, "folder": folder, "compute_types": compute_types(options)}
                entrants = decoding_entrants(peers, size, work_cases, **work, **more)
        compete(report, entrants, cases, options)
    return report


def compete(report: Report, entrants: list[Entrant], cases: dict[str, Case | None], options: Any) -> None:
    """Runs all cases and adds their timings to the report."""
    workers = start(entrants, options.device, options.threads, options.same_process)
    try:
        check_parameters({worker.name: worker.facts() for worker in workers})
        timings = {
            name: take_turns(workers, name, options.rounds, say, case is not None, 0 if options.same_process else PAUSE)
            for name, case in cases.items()
        }
        facts = {name: {worker.name: worker.facts(name) for worker in workers} for name in cases}
        memory = {worker.name: worker.close() for worker in workers}
    finally:
        for worker in workers:
            worker.stop()
    for name, case in cases.items():
        report.add(name, case, timings[name], facts[name], memory)


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
    counts = {name: fact.parameters - sum(fact.alone.values()) for name, fact in facts.items() if fact.parameters}
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
