"""Ablation: each shortcut of the engine left out alone, by patches from here; the engine itself has no switches.

Updates are measured in processes that keep freed memory and in processes that don't. One process does all of its rows
in turn, in another order each round; what each takes of memory is measured in a process of its own.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hf_vanilla_transformer import engine
from hf_vanilla_transformer.engine.decoding import linear, packed, weights
from hf_vanilla_transformer.engine.training import shortcuts

from .decoding import workload_of, write_models
from .report import Report, Row, Table, count_different
from .training import TrainingContender
from .translators import TransformersTranslator
from .work import Case, Size
from .workers import Entrant, peak_memory, start, take_turns

ALL, NONE, MARIAN = "everything", "plain model", "marian"
KEPT, FRESH = ", kept memory", ", fresh memory"
KINDS = {KEPT: True, FRESH: False}  # whether the process keeps freed memory
Patch = AbstractContextManager[Any]
Say = Callable[[str], None]
Make = Callable[[], Any]  # of something with `play`: does a case without a shortcut, returns seconds and what came out
Cases = tuple[Case, ...]
Contenders = dict[str, tuple[Make, list[str]]]  # "ours" and "marian": how they are made, and their rows


# ---- Replacements of shortcuts ----
def reselect(sources: Tensor, *tensors: Tensor, dim: int) -> None:
    """Copies all rows, as transformers does, in place of those that move."""
    for tensor in tensors:
        tensor.narrow(dim, 0, len(sources)).copy_(tensor.index_select(dim, sources))


def unfolded() -> Patch:
    """Leaves the projections of cross-attention out of a single sentence's keys and values."""
    init = packed.PackedDecoder.__init__

    def plain(self: Any, *arguments: Any, **options: Any) -> None:
        with patch.object(packed, "FoldedAttention", lambda *_: None):
            init(self, *arguments, **options)
        self.folded = []

    return patch.object(packed.PackedDecoder, "__init__", plain)


# Name of a shortcut -> what takes it out. Patches are made each time.
TRAINING: dict[str, Callable[[], Patch]] = {
    "loss in chunks": lambda: patch.object(shortcuts, "_can_be_parted", lambda *arguments: False),
    "attention in float32": lambda: patch.object(shortcuts, "SDPA_IN_FLOAT32", "sdpa"),  # of use in bfloat16
    "skip_logits": contextlib.nullcontext,  # with which the loss in chunks goes: `Updates` leaves the argument out
}
DECODING: dict[str, Callable[[], Patch]] = {
    "packed weights": lambda: patch.object(linear, "PackedLinear", linear.PlainLinear),
    "weights by column": lambda: patch.object(linear, "ColumnLinear", linear.PlainLinear),
    "measured layouts": lambda: patch.object(linear, "fastest", lambda shape, dtype, layouts, *_: (layouts[0],) * 4),
    "screened tokens": lambda: patch.object(weights.Weights, "screen_of_step", lambda *_: None),
    "folding": unfolded,
    "caches in place": lambda: patch.object(packed, "_copy", reselect),
}


def left_out(name: str) -> Patch:
    """Takes a shortcut out; ALL and NONE take none."""
    return {**TRAINING, **DECODING}.get(name, contextlib.nullcontext)()


class InTurns:
    """Does a case once with each row's shortcut left out, in another order each time."""

    def __init__(self, make: Make, names: list[str]) -> None:
        self.contender, self.names, self.turns = make(), names, 0

    def run(self, case: Case) -> dict[str, tuple[float, Any]]:
        """Returns the seconds of each row, and what came out."""
        first, self.turns = self.turns % len(self.names), self.turns + 1
        return {name: self.contender.play(case, name) for name in self.names[first:] + self.names[:first]}


class Updates(TrainingContender):
    """Updates of this package's model without a shortcut, or of Marian."""

    def play(self, case: Case, name: str) -> tuple[float, float]:
        """Updates on all batches of a case; returns the seconds and the last loss."""
        if name == MARIAN:
            return self.update(case, self.trainee.loss)
        options = {} if name in (NONE, "skip_logits") else {"skip_logits": True}
        shortens = contextlib.nullcontext() if name == NONE else engine.training_shortcuts(self.trainee.model)
        with left_out(name), shortens:
            return self.update(case, lambda batch: self.trainee.model(**batch, **options).loss)


class Translations(TransformersTranslator):
    """Translations by ours without a shortcut, or by Marian."""

    def play(self, case: Case, name: str) -> tuple[float, Any]:
        """Translates a case's sources; returns the seconds and the translations."""
        with left_out(name):
            if name != MARIAN:
                engine.attach(self.model)  # which prepares the weights again
            timing = self.run(workload_of(case))
        return timing.seconds, timing.outputs


class Meter:
    """Measures memory in forks of a process that has imported everything and computed nothing."""

    def measure(self, make: Make, name: str, case: Case, keeps: bool) -> int:
        """Returns the bytes that a contender takes at most, libraries aside, while it does a case twice."""
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.apply(_growth, (make, name, case, keeps))


def _growth(make: Make, name: str, case: Case, keeps: bool) -> int:
    before = peak_memory()
    if keeps:
        engine.keep_freed_memory()
    contender = make()
    for _ in "12":
        contender.play(case, name)
    return peak_memory() - before


def ablate(report: Report, size: Size, training: Cases, decoding: Cases, options: argparse.Namespace, say: Say) -> None:
    """Leaves each shortcut out alone, of updates on `training` and of translations of `decoding`; adds the tables."""
    dtype = getattr(torch, options.dtype)
    of_updates, of_translations = ([name for name in names if name in options.only] for names in (TRAINING, DECODING))
    if of_updates:
        contenders: Contenders = {
            "ours": (partial(Updates, "ours, plain call", size, dtype=dtype), [ALL, *of_updates, NONE]),
            MARIAN: (partial(Updates, MARIAN, size, dtype=dtype), [MARIAN]),
        }
        report.tables |= measure(contenders, training, options, say)
    if of_translations:
        with TemporaryDirectory() as name:
            write_models(size, folder := Path(name))
            makes = {kind: partial(Translations, kind, folder / kind) for kind in ("ours", MARIAN)}
            contenders = {"ours": (makes["ours"], [ALL, *of_translations]), MARIAN: (makes[MARIAN], [MARIAN])}
            report.tables |= measure(contenders, decoding, options, say)
    report.notes += [
        "Each row leaves one shortcut out; `of everything`: its seconds divided by those with everything, `MB of "
        "everything` likewise; above 1, the shortcut pays.",
        "over marian: the lead over Marian with fresh memory, as it comes.",
    ]


def measure(contenders: Contenders, cases: Cases, options: argparse.Namespace, say: Say) -> dict[str, Table]:
    """Returns a table of time and memory for each case with kept memory, and one with fresh memory."""
    tables: dict[str, Table] = {}
    entrants = [
        Entrant(who + kind, partial(InTurns, *own), keeps)
        for (kind, keeps), (who, own) in itertools.product(KINDS.items(), contenders.items())
    ]
    with start([*entrants, Entrant("memory", Meter)], options.threads) as (*workers, meter):
        for case in cases:
            players = {worker.name: partial(worker.ask, "run", case) for worker in workers}

            def note(what: str, to: str = case.name) -> None:
                say(f"{to}: {what}")

            turns = take_turns(players, options.rounds, note)
            marian = statistics.median(turn[MARIAN][0] for turn in turns[MARIAN + FRESH])
            for kind, keeps in KINDS.items():
                table = tables[case.name + kind] = {}
                for who, (make, names) in contenders.items():
                    for name in names:
                        say(f"{case.name}{kind}: memory, {name}")
                        peak = meter.ask("measure", make, name, case, keeps)
                        table[name] = _row([turn[name] for turn in turns[who + kind]], marian, peak, case)
                base = dict(table[ALL])
                for row in table.values():
                    row["of everything"] = row["s per batch"] / base["s per batch"]
                    row["MB of everything"] = row["peak MB"] / max(base["peak MB"], 1)
                    outputs = row.pop("outputs")
                    row["other lines"] = count_different(outputs, base["outputs"]) if case.beams else None
    return tables


def _row(turns: list[tuple[float, Any]], marian: float, peak: int, case: Case) -> Row:
    seconds, count = [one for one, _ in turns], len(case.batches)
    middle, ends = statistics.median(seconds), {"from": min(seconds) / count, "to": max(seconds) / count}
    row = {"s per batch": middle / count, **ends, "over marian": marian / middle, "peak MB": round(peak / 1e6)}
    return {**row, "outputs": turns[-1][1]}
