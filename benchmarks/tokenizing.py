"""Sentences per second of MarianTokenizer and of ours, made of the same files, in turns.

    python -m benchmarks.tokenizing --model outputs/marian_multi30k --input train.en

Medians of `--rounds`. "First sight": a new tokenizer, which hasn't seen any of the words. MarianTokenizer needs
sentencepiece.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import MarianTokenizer

from hf_vanilla_transformer.interop.sentencepiece import opus_mt_tokenizer

from .report import align, describe_machine

BATCH, PADDED, SINGLES = 1_000, 32, 2_000  # sentences


def in_batches(tokenizer: Any, lines: list[str]) -> int:
    """Tokenizes all lines, a thousand at a time."""
    for start in range(0, len(lines), BATCH):
        tokenizer(lines[start : start + BATCH])
    return len(lines)


def padded(tokenizer: Any, lines: list[str]) -> int:
    """Tokenizes all lines into padded tensors, 32 at a time."""
    for start in range(0, len(lines), PADDED):
        tokenizer(lines[start : start + PADDED], padding=True, return_tensors="pt")
    return len(lines)


def one_at_a_time(tokenizer: Any, lines: list[str]) -> int:
    """Tokenizes some lines, each by itself."""
    for line in lines[:SINGLES]:
        tokenizer(line)
    return len(lines[:SINGLES])


def decoded(tokenizer: Any, lines: list[str]) -> int:
    """Decodes what the lines have become."""
    tokenizer.batch_decode(tokenizer(lines)["input_ids"], skip_special_tokens=True)
    return len(lines)


JOBS: dict[str, Callable[[Any, list[str]], int]] = {
    "1,000 at a time": in_batches,
    "32 at a time, padded, as tensors": padded,
    "one at a time": one_at_a_time,
    "there and back": decoded,
}


def main() -> None:
    """Times all jobs and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, type=Path, help="folder with source.spm, target.spm and vocab.json")
    parser.add_argument("--input", required=True, type=Path, help="text file in the source language")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
    lines = options.input.read_text(encoding="utf-8").splitlines()[:10_000]
    marian = MarianTokenizer.from_pretrained(options.model)
    ours = opus_mt_tokenizer(options.model)
    kinds = {"MarianTokenizer": lambda: marian, "ours, first sight": lambda: copy.deepcopy(fresh), "ours": lambda: ours}
    fresh = copy.deepcopy(ours)
    rows = [("sentences per second", *kinds)]
    for name, job in JOBS.items():
        speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds + 1):  # the first round warms up
            for kind, tokenizer_of in kinds.items():
                tokenizer = tokenizer_of()
                begun = time.perf_counter()
                count = job(tokenizer, lines)
                speeds[kind].append(count / (time.perf_counter() - begun))
        rows.append((name, *(f"{statistics.median(values[1:]):,.0f}" for values in speeds.values())))
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    print(f"{options.model}, {len(ours):,} tokens; {options.input}, {len(lines):,} lines")
    print("\n".join(align(rows)))


if __name__ == "__main__":
    main()
