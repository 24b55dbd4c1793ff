"""Real text: a trained Marian model, the same model as ours, and the same in CTranslate2's format.

Token ids go in and come out, so that tokenizers don't count. Every contender is a process of its own, takes the lines
of a file by its own batches and then one at a time, and ends sentences where the model does.
"""

import dataclasses
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from hf_vanilla_transformer.evaluation.limits import BATCH_TOKENS
from hf_vanilla_transformer.evaluation.metrics import corpus_bleu
from hf_vanilla_transformer.evaluation.translation import batches
from hf_vanilla_transformer.interop import marian

from .decoding import convert_to_ctranslate2, environments
from .report import align, describe_machine
from .work import BenchmarkError
from .workers import PAUSE

Ids = list[int]
# The tuned CTranslate2 translates some lines with each of these, one batch at a time and one per thread.
BATCH_TOKENS_TRIED = (512, 1024, 2048)
TRIAL_LINES = 128


@dataclass
class Contender:
    """A process that translates.

    Attributes:
        name: In the tables.
        settings: Of `benchmarks.program`.
        environment: Variables that it gets in addition.
        options: Of its jobs with the whole file.
        process: None until it is started.
    """

    name: str
    settings: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)
    process: Any = None

    def start(self) -> None:
        """Starts the process, and ends the one before."""
        self.stop()
        command = [sys.executable, "-m", "benchmarks.program", json.dumps(self.settings)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.settings["threads"]), **self.environment}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, **pipes, text=True, env=environment)

    def translate(self, **job: Any) -> tuple[float, list[Ids]]:
        """Returns the seconds and the translations of a job.

        Raises:
            BenchmarkError: It fails.
        """
        try:
            print(json.dumps(job), file=self.process.stdin, flush=True)
            answer = json.loads(self.process.stdout.readline())
        except (OSError, ValueError) as error:
            code = self.process.wait()
            raise BenchmarkError(f"{self.name}: its process ended unexpectedly (exit code {code})") from error
        if "error" in answer:
            raise BenchmarkError(f"{self.name} failed; leave it out, or fix this error:\n{answer['error']}")
        return answer["seconds"], answer["outputs"]

    def peak_memory(self) -> int | None:
        """Returns the most megabytes that were resident, libraries included; None: not on Linux."""
        status = Path(f"/proc/{self.process.pid}/status")
        peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
        return int(peak.group(1)) * 1024 // 10**6 if peak else None

    def stop(self) -> None:
        """Ends the process if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


@dataclass
class RealText:
    """What was measured: tables of columns by contender.

    Attributes:
        settings: Of the run.
        tables: Title -> contender -> column -> value.
        machine: The machine and the versions.
    """

    settings: dict[str, Any]
    tables: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=describe_machine)

    def to_json(self) -> str:
        """Returns all fields as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        lines = [", ".join(f"{name} {value}" for name, value in one.items()) for one in (self.settings, self.machine)]
        for title, table in self.tables.items():
            shown = {name: {k: v for k, v in row.items() if k != "rounds"} for name, row in table.items()}
            header = ("", *next(iter(shown.values())))
            rows = [(name, *map(_cell, row.values())) for name, row in shown.items()]
            lines += ["", title, *align([header, *rows])]
        return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def measure_real(
    model: Path,
    source: Path,
    reference: Path,
    *,
    beams: Sequence[int],
    longest: int,
    lines: int | None,
    singles: int,
    rounds: int,
    threads: int,
    peers: Sequence[str],
    compute_types: Sequence[str],
    say: Callable[[str], None],
) -> RealText:
    """Lets the contenders translate a file in turns, after a warm-up turn.

    Args:
        model: Folder of a MarianMTModel with its tokenizer's files.
        source: File with one sentence per line.
        reference: Their translations.
        beams: Beam sizes, each measured by itself; 1 is greedy search.
        longest: Most tokens of a translation.
        lines: Number of lines that are used, from the first; None: all.
        singles: Number of these that are also translated one at a time.
        rounds: Timed turns of each contender.
        threads: Threads of each.
        peers: Of "marian" and "ctranslate2".
        compute_types: Of ours, in addition to the default.
        say: Is called with progress messages.

    Raises:
        BenchmarkError: A file is missing or has no lines, or a contender fails.
    """
    texts, references = (_read(name, path)[:lines] for name, path in (("input", source), ("reference", reference)))
    if len(texts) != len(references):
        raise BenchmarkError(f"--input has {len(texts):,} lines and --reference {len(references):,}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(texts)["input_ids"]
    given = {"model": model.name, "input": source.name, "sentences": len(ids), "singles": len(ids[:singles])}
    report = RealText({**given, "longest": longest, "rounds": rounds, "threads": threads})
    with TemporaryDirectory() as folder, ExitStack() as stack:
        contenders = _contenders(model, Path(folder), peers, compute_types, threads)
        for contender in contenders:
            stack.callback(contender.stop)
            if contender.name.endswith("tuned"):
                say(f"tuning {contender.name}")
                tune(contender, ids[:TRIAL_LINES], max(beams), longest)
        report.tables["start"] = _starts(contenders, ids[:1], longest, rounds, say)
        for number in beams:
            search, job = "greedy" if number == 1 else f"beam {number}", {"beams": number, "longest": longest}
            files, outputs = _files(contenders, ids, job, rounds, lambda what, to=search: say(f"{to}: {what}"))
            for name, own in outputs.items():
                texts = tokenizer.batch_decode(own, skip_special_tokens=True)
                files[name]["BLEU"] = str(corpus_bleu(texts, references)).removeprefix("BLEU ")
            report.tables[f"{search}, all lines"] = files
            report.tables[f"{search}, one line at a time"] = _singles(contenders, ids[:singles], job, rounds, say)
        for contender in contenders:
            options = {**contender.options, **contender.environment} if contender.options else "-"
            report.tables["start"][contender.name] |= {"peak MB": contender.peak_memory(), "options": options}
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
    common = {"threads": threads, "vocabulary": str(model / "vocab.json"), "compute_type": ""}
    contenders = []
    if "marian" in peers:
        contenders.append(Contender("marian", {**common, "kind": "marian", "folder": str(model)}))
    cache = {"HF_VANILLA_TRANSFORMER_CACHE": str(folder / "cache")}  # of compiled programs
    for kind in ("", *compute_types):
        settings = {**common, "kind": "ours", "folder": str(folder / "ours"), "compute_type": kind}
        contenders.append(Contender(f"ours, {kind}" if kind else "ours", settings, cache))
    if "ctranslate2" in peers:
        kinds = {"ctranslate2": "float32", "ctranslate2, int8": "int8"}
        convert_to_ctranslate2(model, folder, kinds.values())
        for name, kind in kinds.items():
            settings = {**common, "kind": "ctranslate2", "folder": str(folder / kind), "compute_type": kind}
            contenders += [Contender(name, settings), Contender(f"{name}, tuned", settings)]
    return contenders


def tune(contender: Contender, ids: list[Ids], beams: int, longest: int) -> None:
    """Chooses the fastest of CTranslate2's variables, then of its options, for this machine and this text."""

    def seconds(**options: int) -> float:
        both = [contender.translate(batches=[ids], beams=beams, longest=longest, **options) for _ in range(2)]
        return both[1][0]  # the first one warms up

    found = []
    for variables in environments(contender.settings["compute_type"]).values():
        contender.environment = variables
        contender.start()
        found.append((seconds(), variables))
    contender.environment = min(found, key=itemgetter(0))[1]
    contender.start()
    pairs = itertools.product(BATCH_TOKENS_TRIED, sorted({1, contender.settings["threads"]}))
    tried = [{"batch_tokens": tokens, "parallel": parallel} for tokens, parallel in pairs]
    contender.options = min(tried, key=lambda options: seconds(**options))


def _starts(
    contenders: Sequence[Contender], ids: list[Ids], longest: int, rounds: int, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Starts every contender once to warm up and once per round, until it has translated a sentence."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number, contender in itertools.product(range(rounds + 1), contenders):
        say(f"start {number} of {rounds}, {contender.name}")
        began = time.perf_counter()
        contender.start()
        contender.translate(batches=[ids], beams=1, longest=longest)
        if number:
            seconds[contender.name].append(time.perf_counter() - began)
    return {name: {"s to the first translation": statistics.median(own)} for name, own in seconds.items()}


def _files(
    contenders: Sequence[Contender], ids: list[Ids], job: dict[str, Any], rounds: int, say: Callable[[str], None]
) -> tuple[dict[str, dict[str, Any]], dict[str, list[Ids]]]:
    """Translates all lines, ours and Marian in our batches, CTranslate2 in its own; returns a table and outputs."""
    groups = list(batches([len(one) for one in ids], None, BATCH_TOKENS // job["beams"]))
    back = np.argsort([place for group in groups for place in group])
    job = {**job, "batches": [[ids[place] for place in group] for group in groups]}
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    outputs = {}
    for number, contender in itertools.product(range(rounds + 1), contenders):
        say(f"round {number} of {rounds}, {contender.name}")
        time.sleep(PAUSE)
        took, translations = contender.translate(**job, **contender.options)
        outputs[contender.name] = [translations[place] for place in back]
        seconds[contender.name] += [took] if number else []
    medians = {name: statistics.median(own) for name, own in seconds.items()}
    first = contenders[0].name
    table = {
        name: {
            "sentences/s": len(ids) / median,
            "from": len(ids) / max(seconds[name]),
            "to": len(ids) / min(seconds[name]),
            f"of {first}": medians[first] / median,
            "tokens/s": sum(len(output) + 1 for output in outputs[name]) / median,  # with the end of sentence
            "other lines": _different(outputs[name], outputs[first]),
            "rounds": seconds[name],
        }
        for name, median in medians.items()
    }
    return table, outputs


def _singles(
    contenders: Sequence[Contender], ids: list[Ids], job: dict[str, Any], rounds: int, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Translates one sentence at a time."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    outputs: dict[str, list[Ids]] = {}
    for number, contender in itertools.product(range(rounds + 1), contenders):
        say(f"one line at a time: round {number} of {rounds}, {contender.name}")
        time.sleep(PAUSE)
        answers = [contender.translate(**job, batches=[[one]]) for one in ids]
        outputs[contender.name] = [output for _, (output,) in answers]
        times[contender.name] += [1000 * seconds for seconds, _ in answers] if number else []
    first = contenders[0].name
    return {
        name: {
            "median ms": statistics.median(own),
            "95% ms": float(np.percentile(own, 95)),
            f"of {first}": statistics.median(times[first]) / statistics.median(own),
            "other lines": _different(outputs[name], outputs[first]),
        }
        for name, own in times.items()
    }


def _different(one: list[Ids], other: list[Ids]) -> int:
    return sum(own != theirs for own, theirs in zip(one, other, strict=True))
