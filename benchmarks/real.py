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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from hf_vanilla_transformer.interop.convert import convert
from hf_vanilla_transformer.metrics import corpus_bleu
from hf_vanilla_transformer.translation.backend import batches
from hf_vanilla_transformer.translation.engine_backend import BATCH_TOKENS

from .decoding import Variants, decoding_entrants, environments
from .report import Report, Table, compare, count_different
from .translators import Ids, Workload
from .workers import BenchmarkError, Timing, Worker, start, take_turns

# The tuned CTranslate2 translates some lines with each of these, one batch at a time and one per thread.
BATCH_TOKENS_TRIED = (512, 1024, 2048)
TRIAL_LINES = 128
Say = Callable[[str], None]


def measure_real(given: argparse.Namespace, variants: Variants, report: Report, say: Say) -> None:
    """Lets ours, with the default and `variants`, and the peers translate a file in turns; adds the tables.

    Raises:
        BenchmarkError: A file is missing or has no lines, or a contender fails.
    """
    files = {"input": given.input, "reference": given.reference}
    texts, references = (_read(name, path)[: given.lines] for name, path in files.items())
    if len(texts) != len(references):
        raise BenchmarkError(f"--input has {len(texts):,} lines and --reference {len(references):,}")
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    ids = tokenizer(texts)["input_ids"]
    with TemporaryDirectory() as name, ExitStack() as stack:
        convert(given.model, (folder := Path(name)) / "ours")
        options = {"threads": given.threads, "is_real": True}
        entrants = decoding_entrants(given.model, folder, given.peers, variants, **options)
        workers = stack.enter_context(start(entrants, given.threads))
        tuned: dict[str, dict[str, int]] = {}
        for worker in workers:
            if worker.name.endswith("tuned"):
                say(f"tuning {worker.name}")
                tuned[worker.name] = tune(worker, Workload([ids[:TRIAL_LINES]], max(given.num_beams), given.longest))
        starts = _starts(workers, Workload([ids[:1]], 1, given.longest), given.rounds, say)
        report.tables["start"] = starts
        for beams in given.num_beams:
            search, workload = "greedy" if beams == 1 else f"beam {beams}", Workload([], beams, given.longest)
            table, outputs = _file(workers, tuned, ids, workload, given.rounds, say)
            for name, own in outputs.items():
                translations = tokenizer.batch_decode(own, skip_special_tokens=True)
                table[name]["BLEU"] = str(corpus_bleu(translations, references)).removeprefix("BLEU ")
            report.tables[f"{search}, all lines"] = table
            singles = _singles(workers, ids[: given.singles], workload, given.rounds, say)
            report.tables[f"{search}, one line at a time"] = singles
        for worker in workers:
            used = {**tuned[worker.name], **worker.entrant.environment} if worker.name in tuned else None
            starts[worker.name] |= {"peak MB": round(worker.ask("peak") / 1e6), "options": used}


def _read(name: str, path: Path) -> list[str]:
    if not path.is_file() or not (text := path.read_text(encoding="utf-8").removesuffix("\n")):
        raise BenchmarkError(f"--{name} {path} has no lines; give a file with one sentence per line")
    return text.split("\n")


def tune(worker: Worker, workload: Workload) -> dict[str, int]:
    """Sets the fastest of CTranslate2's variables and returns the fastest fields of `Workload`, both for this text."""

    def seconds(**options: Any) -> float:  # of the second time: the first one warms up
        return [float(worker.ask("run", workload._replace(**options)).seconds) for _ in "12"][1]

    def seconds_with(variables: dict[str, str]) -> float:
        worker.restart(variables)
        return seconds(batch_tokens=max(BATCH_TOKENS_TRIED))

    worker.restart(min(environments("int8" if "int8" in worker.name else "float32"), key=seconds_with))
    pairs = itertools.product(BATCH_TOKENS_TRIED, sorted({1, worker.threads}))
    tried = [{"batch_tokens": tokens, "parallel": parallel} for tokens, parallel in pairs]
    return min(tried, key=lambda options: seconds(**options))


def _starts(workers: Sequence[Worker], workload: Workload, rounds: int, say: Say) -> Table:
    """Starts every contender once to warm up and once per round, until it has translated a sentence."""

    def restart(worker: Worker) -> float:
        began = time.perf_counter()
        worker.restart()
        worker.ask("run", workload)
        return time.perf_counter() - began

    players = {worker.name: partial(restart, worker) for worker in workers}
    turns = take_turns(players, rounds, lambda what: say(f"start: {what}"))
    return {name: {"s to the first translation": statistics.median(own)} for name, own in turns.items()}


def _file(
    workers: Sequence[Worker],
    tuned: dict[str, dict[str, int]],
    ids: list[Ids],
    workload: Workload,
    rounds: int,
    say: Say,
) -> tuple[Table, dict[str, list[Ids]]]:
    """Translates all lines, ours and Marian in our batches, CTranslate2 in its own; returns a table and outputs."""
    groups = list(batches([len(one) for one in ids], None, BATCH_TOKENS // workload.beams))
    back = np.argsort([place for group in groups for place in group])
    workload = workload._replace(batches=[[ids[place] for place in group] for group in groups])
    players = {}
    for worker in workers:
        own: dict[str, Any] = {"batch_tokens": max(BATCH_TOKENS_TRIED)} if "ctranslate2" in worker.name else {}
        players[worker.name] = partial(worker.ask, "run", workload._replace(**(tuned.get(worker.name) or own)))
    turns: dict[str, list[Timing]] = take_turns(
        players, rounds, lambda what: say(f"{workload.beams} beams, file: {what}")
    )
    outputs = {name: [(timings[-1].outputs or [])[place] for place in back] for name, timings in turns.items()}
    table = compare(len(ids), "sentences/s", turns)
    for name, row in table.items():  # with the end of sentence
        row["tokens/s"] = row["sentences/s"] * sum(len(output) + 1 for output in outputs[name]) / len(ids)
    return table, outputs


def _singles(workers: Sequence[Worker], ids: list[Ids], workload: Workload, rounds: int, say: Say) -> Table:
    """Translates one sentence at a time."""

    def one_by_one(worker: Worker) -> list[Timing]:
        return [worker.ask("run", workload._replace(batches=[[one]])) for one in ids]

    players: dict[str, Any] = {worker.name: partial(one_by_one, worker) for worker in workers}
    turns = take_turns(players, rounds, lambda what: say(f"{workload.beams} beams, one line at a time: {what}"))
    times = {name: [1000 * timing.seconds for turn in own for timing in turn] for name, own in turns.items()}
    outputs, first = {name: [timing.outputs for timing in own[-1]] for name, own in turns.items()}, workers[0].name
    return {
        name: {
            "median ms": statistics.median(own),
            "95% ms": float(np.percentile(own, 95)),
            f"of {first}": statistics.median(times[first]) / statistics.median(own),
            "other lines": count_different(outputs[name], outputs[first]),
        }
        for name, own in times.items()
    }
