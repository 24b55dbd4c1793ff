"""Speed of the backend ctranslate2, from text to text, beside a program that calls CTranslate2 itself, tuned by hand.

    vanilla-transformer export --model DIR --to ctranslate2 --output DIR-ct2
    python -m scripts.time_ctranslate2 --exported DIR-ct2 --input test.en --compute-type int8 --num-beams 4 --threads 2

Both take turns. The program tokenizes all lines at once, translates them in one call with a batch per thread and
the best of some sizes of batches, and ranks by length^0.6. One line at a time, float32 has all threads for it.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ctranslate2
from tokenizers import Tokenizer

from hf_vanilla_transformer import Translator

SIZES = (512, 1_024, 2_048, 4_096, 8_192)  # tokens of a batch, times beams
SINGLES = 20


class Program:
    """What one would write with CTranslate2's and tokenizers' documentation, tuned."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.size = options, SIZES[0]
        self.tokenizer = Tokenizer.from_file(str(options.exported / "tokenizer.json"))
        names = json.loads((options.exported / "shared_vocabulary.json").read_text(encoding="utf-8"))
        self.ids = {token: number for number, token in enumerate(names)}
        self.many, self.one = self._open(options.threads, 1), None
        if options.compute_type == "float32":
            self.one = self._open(1, options.threads)

    def _open(self, batches: int, threads: int) -> Any:
        sizes = {"inter_threads": batches, "intra_threads": threads}
        return ctranslate2.Translator(str(self.options.exported), compute_type=self.options.compute_type, **sizes)

    def translate(self, lines: list[str]) -> list[str]:
        """Translates lines."""
        translator = self.one if self.one is not None and len(lines) == 1 else self.many
        results = translator.translate_batch(
            [one.tokens for one in self.tokenizer.encode_batch(lines)],
            beam_size=self.options.num_beams,
            length_penalty=0.6,
            max_batch_size=max(self.size // self.options.num_beams, 1),
            batch_type="tokens",
            max_decoding_length=self.options.max_new_tokens or 100,
            max_input_length=0,
            min_decoding_length=0,
        )
        return self.tokenizer.decode_batch([[self.ids[token] for token in one.hypotheses[0]] for one in results])


def main() -> None:
    """Times both and prints medians and ratios."""
    options = _options()
    os.environ.setdefault("CT2_FORCE_CPU_ISA", options.instructions)
    lines = options.input.read_text(encoding="utf-8").splitlines()[: options.lines]
    program = Program(options)
    translator = Translator(options.exported, "cpu", options.compute_type, options.threads)
    settings: dict[str, Any] = {"num_beams": options.num_beams, "progress_bar": False}
    if options.max_new_tokens:
        settings["max_new_tokens"] = options.max_new_tokens

    def tuned(some: list[str]) -> list[str]:
        return program.translate(some)

    def ours(some: list[str]) -> list[str]:
        return translator(some, **settings)

    found = {}
    for program.size in SIZES:
        found[program.size] = _seconds(tuned, lines)
    program.size = min(found, key=lambda size: found[size])
    ours(lines[:SINGLES])
    rounds = [(_seconds(tuned, lines), _seconds(ours, lines)) for _ in range(options.rounds)]
    speeds = [len(lines) / statistics.median(column) for column in zip(*rounds, strict=True)]
    ratio = statistics.median(one / other for one, other in rounds)
    found_size = f"batches of {program.size:,}"
    print(f"{len(lines)} lines: tuned {speeds[0]:,.0f}/s ({found_size}), ours {speeds[1]:,.0f}/s: {ratio:.2f}")
    singles = [[_seconds(tuned, [line]) for line in lines[:SINGLES]]]
    program.many = program.one = None  # two teams of threads would wait for one another
    singles.append([_seconds(ours, [line]) for line in lines[:SINGLES]])
    print("one line: tuned {:.2f} ms, ours {:.2f} ms".format(*(1_000 * statistics.median(one) for one in singles)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--exported", required=True, type=Path, help="folder of an export, without --quantization")
    parser.add_argument("--input", required=True, type=Path, help="lines of text")
    parser.add_argument("--lines", type=int, default=1_000, help="of the input (default: %(default)s)")
    parser.add_argument("--compute-type", default="float32")
    parser.add_argument("--num-beams", type=int, default=1)
    parser.add_argument("--max-new-tokens", type=int, help="for models that don't end their sentences")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--instructions", default="AVX512", help="CT2_FORCE_CPU_ISA (default: %(default)s)")
    return parser.parse_args()


def _seconds(translate: Callable[[list[str]], list[str]], lines: list[str]) -> float:
    began = time.perf_counter()
    translate(lines)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
