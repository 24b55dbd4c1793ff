"""Text to text with a trained model: on a GPU, with captured and uncaptured steps; on a CPU, both backends and Marian.

All have the same weights: Marian's model is the export to transformers' own class, CTranslate2's is converted. Texts go
in and come out, so that tokenizers count. On a CPU, the complete process of the command is measured as well.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.interop.export import export

from .report import BASELINE, Report, Row, Table, compare
from .translators import Command
from .workers import BenchmarkError, Entrant, Timing, Worker, start, take_turns

MARIAN_BATCH = 32  # lines
LONGEST = 100  # tokens of a translation, in all contenders
Say = Callable[[str], None]


class Texts:
    """A Translator with some options; `decoder` as that of `TransformersTranslator`."""

    def __init__(self, folder: Path, decoder: str = "", **options: Any) -> None:
        package: Any = import_module("hf_vanilla_transformer")
        self.translator = package.Translator(folder, **options)
        if decoder:
            use_decoder(self.translator.model, decoder)

    def run(self, lines: list[str], num_beams: int) -> Timing:
        """Translates lines; the clock stops when all are text."""
        return _timed(lambda: self.translator(lines, num_beams=num_beams, max_new_tokens=LONGEST, progress_bar=False))

    def singles(self, lines: list[str], num_beams: int) -> list[Timing]:
        """Translates one line at a time."""
        return [self.run([line], num_beams) for line in lines]


class MarianTexts(Texts):
    """transformers' MarianMTModel with its tokenizer, in batches of lines as they come."""

    def __init__(self, folder: Path) -> None:
        transformers: Any = import_module("transformers")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model = transformers.MarianMTModel.from_pretrained(folder).eval()

    def run(self, lines: list[str], num_beams: int) -> Timing:
        """Translates lines; the clock stops when all are text."""
        return _timed(lambda: [text for batch in self._batches(lines, num_beams) for text in batch])

    def _batches(self, lines: list[str], num_beams: int) -> Iterator[list[str]]:
        for first in range(0, len(lines), MARIAN_BATCH):
            batch = self.tokenizer(lines[first : first + MARIAN_BATCH], padding=True, return_tensors="pt")
            ids = {name: batch[name] for name in ("input_ids", "attention_mask")}
            tokens = self.model.generate(**ids, num_beams=num_beams, max_new_tokens=LONGEST)
            yield self.tokenizer.batch_decode(tokens, skip_special_tokens=True)


def _timed(translate: Callable[[], list[str]]) -> Timing:
    began = time.perf_counter()
    texts = translate()
    return Timing(time.perf_counter() - began, [list(text.encode()) for text in texts])


def use_decoder(model: Any, decoder: str) -> None:
    """Lets the attached engine of a model decode with "packed" or "graph"; "": with what it takes by itself."""
    if decoder:
        module = import_module(f"hf_vanilla_transformer.engine.decoding.{decoder}")
        model.engine._prepared = getattr(module, decoder.capitalize())(model)


def measure_text(options: argparse.Namespace, report: Report, say: Say) -> None:
    """Lets contenders translate a file in turns, and adds a table for each number of beams.

    Raises:
        BenchmarkError: The file isn't there or has no lines, or a contender fails.
    """
    lines = options.input.read_text(encoding="utf-8").splitlines()[: options.lines] if options.input.is_file() else []
    if not lines:
        raise BenchmarkError(f"--input {options.input} has no lines; give a file with one sentence per line")
    with TemporaryDirectory() as name:
        of_device = _on_a_cpu if options.device == "cpu" else _on_a_gpu
        with start(of_device(options, Path(name)), options.threads) as workers:
            for beams in options.num_beams:
                say(f"beams: {beams}")
                players = {one.name: partial(one.ask, "run", lines, beams) for one in workers}
                turns = take_turns(players, options.rounds, say)
                table = compare(len(lines), "sentences/s", turns)
                report.tables[f"beams: {beams}, {len(lines):,} lines"] = table
                if options.device == "cpu":
                    singles = _singles(workers, lines[: options.singles], beams, options.rounds)
                    for who, milliseconds in singles.items():
                        table[who]["ms, single lines"] = milliseconds
        if options.device == "cpu":
            report.tables["start"] = _starts(options, Path(name), lines[0], say)


def _on_a_gpu(options: argparse.Namespace, _: Path) -> list[Entrant]:
    contender = partial(Texts, options.model, device=options.device, dtype=options.dtype)
    names = {"ours, uncaptured": "packed", "ours": ""}
    return [Entrant(name, partial(contender, decoder)) for name, decoder in names.items()]


def _on_a_cpu(options: argparse.Namespace, folder: Path) -> list[Entrant]:
    """Returns Marian, and both backends in both types; writes the exports that are needed into the folder."""
    entrants, ours = [], Translator(options.model, "cpu")
    for kind, to in {BASELINE: "stock", "ctranslate2": "ctranslate2"}.items():
        if kind in options.peers:
            export(ours.model, folder / kind, to=to, tokenizer=ours.tokenizer)
    if BASELINE in options.peers:
        entrants.append(Entrant(BASELINE, partial(MarianTexts, folder / BASELINE)))
    for backend in ("engine", *[name for name in options.peers if name != BASELINE]):
        who, place = ("ours", options.model) if backend == "engine" else (backend, folder / backend)
        make = partial(Texts, place, device="cpu", threads=options.threads, backend=backend)
        entrants.append(Entrant(who, make))
        entrants.append(Entrant(f"{who}, int8", partial(make, compute_type="int8")))
    return entrants


def _singles(workers: list[Worker], lines: list[str], beams: int, rounds: int) -> dict[str, float]:
    """Returns the milliseconds that a line by itself takes, the median."""
    players: dict[str, Any] = {one.name: partial(one.ask, "singles", lines, beams) for one in workers}
    turns = take_turns(players, rounds)
    return {name: 1000 * statistics.median(one.seconds for turn in own for one in turn) for name, own in turns.items()}


def _starts(options: argparse.Namespace, folder: Path, line: str, say: Say) -> Table:
    """Measures the command that translates a line, from the start of its process to its end."""
    places = {"ours": options.model, "ctranslate2": folder / "ctranslate2"}
    command = partial(Command, sys.executable, "-m", "hf_vanilla_transformer", "translate", line, "--model")
    entrants = [Entrant(name, partial(command, str(place))) for name, place in places.items() if place.is_dir()]
    with start(entrants, options.threads) as workers:
        turns = take_turns({one.name: partial(one.ask, "run") for one in workers}, options.rounds, say)
    return {name: _start(own) for name, own in turns.items()}


def _start(turns: list[tuple[float, int]]) -> Row:
    seconds, peaks = zip(*turns, strict=True)
    return {"s": statistics.median(seconds), "peak MB": round(statistics.median(peaks) / 1e6)}
