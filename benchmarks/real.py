"""Real text: a trained Marian model, the same model as ours, and the same in CTranslate2's format.

Token ids go in and come out, so that tokenizers don't count. Every contender takes the lines of a file by its own
batches and then one at a time, and ends sentences where the model does.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from transformers import AutoTokenizer

from hf_vanilla_transformer.evaluation.limits import BATCH_TOKENS
from hf_vanilla_transformer.evaluation.metrics import corpus_bleu
from hf_vanilla_transformer.evaluation.translation import batches
from hf_vanilla_transformer.interop import marian

from .decoding import convert_to_ctranslate2, environments
from .report import Report, Table, compare, count_different, megabytes
from .translators import CTranslate2Translator, Ids, Job, TransformersTranslator
from .workers import BenchmarkError, Entrant, Timing, Worker, take_turns

# The tuned CTranslate2 translates some lines with each of these, one batch at a time and one per thread.
BATCH_TOKENS_TRIED = (512, 1024, 2048)
TRIAL_LINES = 128
Say = Callable[[str], None]


@dataclass
class Contender:
    """A process that translates: how to make it, CTranslate2's compute type, and fields of its `Job` with the file."""

    entrant: Entrant
    threads: int
    compute_type: str = ""
    options: dict[str, int] = field(default_factory=dict)
    worker: Worker | None = None

    @property
    def name(self) -> str:
        """Its name in the tables."""
        return self.entrant.name

    def start(self) -> None:
        """Starts the process, and ends the one before."""
        self.stop()
        self.worker = Worker(self.entrant, self.threads)

    def translate(self, job: Job) -> Timing:
        """Does a job."""
        assert self.worker is not None
        timing: Timing = self.worker.ask("translate", job)
        return timing

    def stop(self) -> None:
        """Ends the process if there is one."""
        if self.worker is not None:
            self.worker.stop()


def measure_real(given: argparse.Namespace, peers: Sequence[str], compute_types: Sequence[str], say: Say) -> Report:
    """Lets the contenders translate a file in turns, after a warm-up turn.

    Args:
        given: The options of the command line.
        peers: Of "marian" and "ctranslate2".
        compute_types: Of ours, in addition to the default.
        say: Is called with progress messages.

    Raises:
        BenchmarkError: A file is missing or has no lines, or a contender fails.
    """
    files = {"input": given.input, "reference": given.reference}
    texts, references = (_read(name, path)[: given.lines] for name, path in files.items())
    if len(texts) != len(references):
        raise BenchmarkError(f"--input has {len(texts):,} lines and --reference {len(references):,}")
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = tokenizer(texts)["input_ids"]
    numbers = {"sentences": len(ids), "singles": len(ids[: given.singles]), "longest": given.max_new_tokens}
    settings = {"model": given.model.name, "input": given.input.name, **numbers, "rounds": given.rounds}
    report = Report("real", {**settings, "threads": given.threads})
    with TemporaryDirectory() as folder, ExitStack() as stack:
        contenders = _contenders(given.model, Path(folder), peers, compute_types, given.threads)
        for contender in contenders:
            stack.callback(contender.stop)
            if contender.name.endswith("tuned"):
                say(f"tuning {contender.name}")
                tune(contender, Job([ids[:TRIAL_LINES]], max(given.num_beams), [given.max_new_tokens]))
        start = _starts(contenders, Job([ids[:1]], 1, [given.max_new_tokens]), given.rounds, say)
        report.tables["start"] = start
        for beams in given.num_beams:
            search, job = "greedy" if beams == 1 else f"beam {beams}", Job([], beams, [given.max_new_tokens])
            table, outputs = _file(contenders, ids, job, given.rounds, say)
            for name, own in outputs.items():
                translations = tokenizer.batch_decode(own, skip_special_tokens=True)
                table[name]["BLEU"] = str(corpus_bleu(translations, references)).removeprefix("BLEU ")
            report.tables[f"{search}, all lines"] = table
            singles = _singles(contenders, ids[: given.singles], job, given.rounds, say)
            report.tables[f"{search}, one line at a time"] = singles
        for contender in contenders:
            options = {**contender.options, **contender.entrant.environment} if contender.options else None
            assert contender.worker is not None
            whole, _ = contender.worker.ask("peak")  # libraries included
            start[contender.name] |= {"peak MB": megabytes(whole), "options": options}
    return report


def _read(name: str, path: Path) -> list[str]:
    if not path.is_file() or not (text := path.read_text(encoding="utf-8").removesuffix("\n")):
        raise BenchmarkError(f"--{name} {path} has no lines; give a file with one sentence per line")
    return text.split("\n")


def _contenders(
    model: Path, folder: Path, peers: Sequence[str], compute_types: Sequence[str], threads: int
) -> list[Contender]:
    """Converts the model and returns the contenders, the one that ratios refer to first."""
    marian.convert(model, folder / "ours")
    contenders = []
    if "marian" in peers:
        make = partial(TransformersTranslator, "marian", model)
        contenders.append(Contender(Entrant("marian", make, library=""), threads))
    cache = {"HF_VANILLA_TRANSFORMER_CACHE": str(folder / "cache")}  # of compiled programs
    for kind in ("", *compute_types):
        make = partial(TransformersTranslator, "ours", folder / "ours", kind, as_translator=True)
        ours = Entrant(f"ours, {kind}" if kind else "ours", make, keep_freed_memory=True, library="", environment=cache)
        contenders.append(Contender(ours, threads))
    if "ctranslate2" in peers:
        kinds = {"ctranslate2": "float32", "ctranslate2, int8": "int8"}
        convert_to_ctranslate2(model, folder, kinds.values())
        for name, kind in kinds.items():
            peer = partial(CTranslate2Translator, folder / kind, model / "vocab.json", kind, threads)
            names = (name, f"{name}, tuned")
            contenders += [Contender(Entrant(one, peer, library=""), threads, kind) for one in names]
    return contenders


def tune(contender: Contender, job: Job) -> None:
    """Chooses the fastest of CTranslate2's variables, then of its options, for this machine and this text."""

    def seconds(**options: int) -> float:  # of the second time: the first one warms up
        return [contender.translate(job._replace(**{**_own_batches(contender), **options})) for _ in "12"][1].seconds

    found = []
    for variables in environments(contender.compute_type).values():
        contender.entrant = replace(contender.entrant, environment=variables)
        contender.start()
        found.append((seconds(), variables))
    contender.entrant = replace(contender.entrant, environment=min(found, key=itemgetter(0))[1])
    contender.start()
    pairs = itertools.product(BATCH_TOKENS_TRIED, sorted({1, contender.threads}))
    tried = [{"batch_tokens": tokens, "parallel": parallel} for tokens, parallel in pairs]
    contender.options = min(tried, key=lambda options: seconds(**options))


def _starts(contenders: Sequence[Contender], job: Job, rounds: int, say: Say) -> Table:
    """Starts every contender once to warm up and once per round, until it has translated a sentence."""

    def start(contender: Contender) -> float:
        began = time.perf_counter()
        contender.start()
        contender.translate(job)
        return time.perf_counter() - began

    players = {contender.name: partial(start, contender) for contender in contenders}
    turns = take_turns(players, rounds, lambda what: say(f"start: {what}"))
    return {name: {"s to the first translation": statistics.median(own)} for name, own in turns.items()}


def _file(
    contenders: Sequence[Contender], ids: list[Ids], job: Job, rounds: int, say: Say
) -> tuple[Table, dict[str, list[Ids]]]:
    """Translates all lines, ours and Marian in our batches, CTranslate2 in its own; returns a table and outputs."""
    groups = list(batches([len(one) for one in ids], None, BATCH_TOKENS // job.beams))
    back = np.argsort([place for group in groups for place in group])
    of_file = [[ids[place] for place in group] for group in groups]
    job = job._replace(batches=of_file, longest=job.longest * len(of_file))
    jobs = {one.name: job._replace(**{**_own_batches(one), **one.options}) for one in contenders}
    players = {one.name: partial(one.translate, jobs[one.name]) for one in contenders}
    turns = take_turns(players, rounds, lambda what: say(f"{job.beams} beams, all lines: {what}"))
    outputs = {name: [(timings[-1].outputs or [])[place] for place in back] for name, timings in turns.items()}
    first, seconds = contenders[0].name, {name: [one.seconds for one in timings] for name, timings in turns.items()}
    table = compare(len(ids), "sentences/s", seconds, first)
    for name, row in table.items():
        tokens = sum(len(output) + 1 for output in outputs[name])  # with the end of sentence
        row["tokens/s"] = tokens / statistics.median(seconds[name])
        row["other lines"] = count_different(outputs[name], outputs[first])
    return table, outputs


def _own_batches(contender: Contender) -> dict[str, int]:
    return {"batch_tokens": max(BATCH_TOKENS_TRIED)} if contender.compute_type else {}


def _singles(contenders: Sequence[Contender], ids: list[Ids], job: Job, rounds: int, say: Say) -> Table:
    """Translates one sentence at a time."""

    def one_by_one(contender: Contender) -> list[Timing]:
        return [contender.translate(job._replace(batches=[[one]])) for one in ids]

    players = {contender.name: partial(one_by_one, contender) for contender in contenders}
    turns = take_turns(players, rounds, lambda what: say(f"{job.beams} beams, one line at a time: {what}"))
    times = {name: [1000 * timing.seconds for turn in own for timing in turn] for name, own in turns.items()}
    outputs, first = {name: [timing.outputs for timing in own[-1]] for name, own in turns.items()}, contenders[0].name
    return {
        name: {
            "median ms": statistics.median(own),
            "95% ms": float(np.percentile(own, 95)),
            f"of {first}": statistics.median(times[first]) / statistics.median(own),
            "other lines": count_different(outputs[name], outputs[first]),
        }
        for name, own in times.items()
    }
