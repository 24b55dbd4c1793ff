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

import ctranslate2
import torch
from transformers import AutoTokenizer, MarianConfig, MarianMTModel
from transformers.utils import logging

from benchmarks.workers import Entrant, start, take_turns
from hf_vanilla_transformer import Translator, VanillaTransformerConfig

SIZES = (512, 1_024, 2_048, 4_096, 8_192)  # tokens of a batch, times beams
SINGLES = 20
MARIAN_BATCH = 32  # lines
CONTENDERS = (
    *("marian", "engine float32", "engine int8", "backend float32", "backend int8"),
    *("smallest float32", "smallest int8", "tuned float32", "tuned int8"),
)
Translate = Callable[[list[str]], object]


class Program:
    """Translates as CTranslate2's documentation shows, with transformers' tokenizer; tuned, with more care."""

    def __init__(self, options: argparse.Namespace, compute_type: str, is_tuned: bool) -> None:
        self.options, self.is_tuned, self.size = options, is_tuned, SIZES[0]
        self.tokenizer = AutoTokenizer.from_pretrained(options.exported)
        names = json.loads((options.exported / "shared_vocabulary.json").read_text(encoding="utf-8"))
        self.ids = {token: number for number, token in enumerate(names)}
        shape = {"inter_threads": options.threads, "intra_threads": 1} if is_tuned else {}
        self.translator = ctranslate2.Translator(str(options.exported), compute_type=compute_type, **shape)

    def __call__(self, lines: list[str]) -> list[str]:
        """Translates lines."""
        more: dict[str, Any] = {"max_decoding_length": self.options.max_new_tokens or 100}
        if self.is_tuned:
            backend = self.tokenizer.backend_tokenizer
            tokens = [one.tokens for one in backend.encode_batch(lines)]
            more |= {"max_batch_size": max(self.size // self.options.num_beams, 1), "batch_type": "tokens"}
            more |= {"length_penalty": 0.6, "max_input_length": 0, "min_decoding_length": 0}
        else:
            tokens = [self.tokenizer.convert_ids_to_tokens(self.tokenizer.encode(line)) for line in lines]
        results = self.translator.translate_batch(tokens, beam_size=self.options.num_beams, **more)
        rows = [[self.ids[token] for token in one.hypotheses[0]] for one in results]
        if self.is_tuned:
            return backend.decode_batch(rows)
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]

    def tune(self, lines: list[str]) -> None:
        """Chooses the size of batches."""
        seconds = {}
        for self.size in SIZES:
            seconds[self.size] = _seconds(self, lines)
        self.size = min(seconds, key=lambda size: seconds[size])


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
