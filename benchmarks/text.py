"""Text to text, through `Translator`, with a trained model: with what the engine takes, and with uncaptured steps."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from .report import Report, compare
from .workers import BenchmarkError, Entrant, Timing, start, take_turns


class Texts:
    """A translator; `decoder` as that of `TransformersTranslator`."""

    def __init__(self, folder: Path, device: str, dtype: str, decoder: str = "") -> None:
        package: Any = import_module("hf_vanilla_transformer")
        self.translator = package.Translator(folder, device, dtype=dtype)
        use_decoder(self.translator.model, decoder)

    def run(self, lines: list[str], num_beams: int) -> Timing:
        """Translates lines; the clock stops when all are text."""
        began = time.perf_counter()
        texts = self.translator(lines, num_beams=num_beams, progress_bar=False)
        return Timing(time.perf_counter() - began, [list(text.encode()) for text in texts])


def use_decoder(model: Any, decoder: str) -> None:
    """Lets the attached engine of a model decode with "packed" or "graph"; "": with what it takes by itself."""
    if decoder:
        module = import_module(f"hf_vanilla_transformer.engine.decoding.{decoder}")
        model.engine._prepared = getattr(module, decoder.capitalize())(model)


def measure_text(options: argparse.Namespace, report: Report, say: Callable[[str], None]) -> None:
    """Lets both decoders translate a file in turns, and adds a table for each number of beams.

    Raises:
        BenchmarkError: The file isn't there or has no lines, or a contender fails.
    """
    lines = options.input.read_text(encoding="utf-8").splitlines()[: options.lines] if options.input.is_file() else []
    if not lines:
        raise BenchmarkError(f"--input {options.input} has no lines; give a file with one sentence per line")
    contender = partial(Texts, options.model, options.device, options.dtype)
    names = {"ours, uncaptured": "packed", "ours": ""}
    entrants = [Entrant(name, partial(contender, decoder)) for name, decoder in names.items()]
    with start(entrants, options.threads) as workers:
        for beams in options.num_beams:
            players = {one.name: partial(one.ask, "run", lines, beams) for one in workers}
            say(f"beams: {beams}")
            turns = take_turns(players, options.rounds, say)
            report.tables[f"beams: {beams}, {len(lines):,} lines"] = compare(len(lines), "sentences/s", turns)
