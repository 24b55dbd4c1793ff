"""Lines per second, from text to text: both backends of `Translator`, beside Marian and programs that call CTranslate2.

    vanilla-transformer export --model DIR --to ctranslate2 --output DIR-ct2
    python -m scripts.time_backends --model DIR --exported DIR-ct2 --input test.en --num-beams 4 --threads 2

They take turns, each in a process of its own. Marian is transformers', with random weights and the model's sizes; it
writes as many tokens of each line as `--max-new-tokens` says, or 16. "Smallest" is the program of CTranslate2's
documentation; "tuned" tokenizes all lines at once, translates them with a batch per thread and the best of some sizes
of batches, and ranks by length^0.6. One instruction set counts for all of CTranslate2.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, MarianConfig, MarianMTModel
from transformers.utils import logging

from benchmarks.translators import CTranslate2Translator, Workload
from benchmarks.workers import Entrant, start, take_turns
from hf_vanilla_transformer import Translator, VanillaTransformerConfig

SIZES = (512, 1_024, 2_048, 4_096, 8_192)  # tokens of a batch, times beams
TUNED = {"length_penalty": 0.6, "max_input_length": 0, "min_decoding_length": 0}
SINGLES = 20
MARIAN_BATCH = 32  # lines
CONTENDERS = (
    *("marian", "engine float32", "engine int8", "backend float32", "backend int8"),
    *("smallest float32", "smallest int8", "tuned float32", "tuned int8"),
)
Translate = Callable[[list[str]], object]


class Program:
    """Calls CTranslate2 as its documentation shows, with transformers' tokenizer; tuned, with more care."""

    def __init__(self, options: argparse.Namespace, compute_type: str, is_tuned: bool) -> None:
        self.is_tuned, self.tokenizer = is_tuned, AutoTokenizer.from_pretrained(options.exported)
        names = json.loads((options.exported / "shared_vocabulary.json").read_text(encoding="utf-8"))
        ids = {token: number for number, token in enumerate(names)}
        self.program = CTranslate2Translator(options.exported, ids, compute_type, options.threads)
        self.workload = Workload([], options.num_beams, (options.max_new_tokens or 100) + 1)
        if is_tuned:
            self.workload = self.workload._replace(parallel=options.threads, options=TUNED)

    def __call__(self, lines: list[str]) -> list[str]:
        """Translates lines."""
        backend = self.tokenizer.backend_tokenizer
        rows = [one.ids for one in backend.encode_batch(lines)] if self.is_tuned else map(self.tokenizer.encode, lines)
        found = self.program.run(self.workload._replace(batches=[list(rows)])).outputs or []
        if self.is_tuned:
            return backend.decode_batch(found)
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in found]

    def tune(self, lines: list[str]) -> None:
        """Chooses the size of batches."""
        timed = []
        for size in SIZES:
            self.workload = self.workload._replace(batch_tokens=max(size // self.workload.beams, 1))
            timed.append((_seconds(self, lines), self.workload))
        self.workload = min(timed, key=lambda one: one[0])[1]


class Contender:
    """One of the programs, with its lines."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        logging.set_verbosity_error()
        torch.set_num_threads(options.threads)
        self.lines, self.translate = _lines(options), _contender(name, options)
        if isinstance(self.translate, Program) and self.translate.is_tuned:
            self.translate.tune(self.lines)

    def all(self) -> float:
        """Returns the seconds that all lines take."""
        return _seconds(self.translate, self.lines)

    def single(self) -> float:
        """Returns the seconds that a line by itself takes."""
        return statistics.median(_seconds(self.translate, [line]) for line in self.lines[:SINGLES])


def main() -> None:
    """Times the contenders in turns and prints a row for each."""
    options = _options()
    os.environ.setdefault("CT2_FORCE_CPU_ISA", options.instructions)
    entrants = [Entrant(name, partial(Contender, name, options)) for name in options.contenders]
    with start(entrants, options.threads) as workers:
        seconds = take_turns({worker.name: partial(worker.ask, "all") for worker in workers}, options.rounds)
        singles = take_turns({worker.name: partial(worker.ask, "single") for worker in workers}, 1)
    medians = {name: statistics.median(some) for name, some in seconds.items()}
    first = medians[options.contenders[0]]
    lines = len(_lines(options))
    for name, median in medians.items():
        print(f"| {name} | {lines / median:,.0f} ({first / median:.2f}) | {1_000 * singles[name][0]:.1f} |")


def _lines(options: argparse.Namespace) -> list[str]:
    return options.input.read_text(encoding="utf-8").splitlines()[: options.lines]


def _contender(name: str, options: argparse.Namespace) -> Translate:
    kind, _, compute_type = name.partition(" ")
    if kind == "marian":
        return _marian(options)
    if kind in ("smallest", "tuned"):
        return Program(options, compute_type, kind == "tuned")
    folder, backend = (options.model, "engine") if kind == "engine" else (options.exported, "ctranslate2")
    translator = Translator(folder, "cpu", compute_type, options.threads, backend=backend)
    settings: dict[str, Any] = {"num_beams": options.num_beams, "progress_bar": False}
    if options.max_new_tokens:
        settings["max_new_tokens"] = options.max_new_tokens
    return lambda lines: translator(lines, **settings)


def _marian(options: argparse.Namespace) -> Translate:
    """Returns transformers' Marian in batches of lines as they come."""
    ours = VanillaTransformerConfig.from_pretrained(options.model)
    sizes = ("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    own = {name: getattr(ours, name) for name in (*sizes, "encoder_ffn_dim", "decoder_ffn_dim", "vocab_size")}
    tokens = {"pad_token_id": ours.pad_token_id, "eos_token_id": ours.eos_token_id, "bos_token_id": None}
    config = MarianConfig(**own, **tokens, decoder_start_token_id=ours.decoder_start_token_id, forced_eos_token_id=None)
    model, tokenizer = MarianMTModel(config).eval(), AutoTokenizer.from_pretrained(options.model)
    settings = {"num_beams": options.num_beams, "max_new_tokens": options.max_new_tokens or 16}

    def translate(lines: list[str]) -> list[str]:
        texts: list[str] = []
        for first in range(0, len(lines), MARIAN_BATCH):
            batch = tokenizer(lines[first : first + MARIAN_BATCH], padding=True, return_tensors="pt")
            texts += tokenizer.batch_decode(model.generate(**batch, **settings), skip_special_tokens=True)
        return texts

    return translate


def _seconds(translate: Translate, lines: list[str]) -> float:
    began = time.perf_counter()
    translate(lines)
    return time.perf_counter() - began


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, type=Path, help="a saved model")
    parser.add_argument("--exported", required=True, type=Path, help="its export, without --quantization")
    parser.add_argument("--input", required=True, type=Path, help="lines of text")
    parser.add_argument("--lines", type=int, default=1_000, help="of the input (default: %(default)s)")
    parser.add_argument("--num-beams", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, help="for models that don't end their sentences")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, metavar="NAME")
    parser.add_argument("--instructions", default="AVX512", help="CT2_FORCE_CPU_ISA (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    from scripts.time_backends import main  # under its name, by which the contenders' processes import it

    main()
