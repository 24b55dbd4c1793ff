"""Sentences per second of MarianTokenizer and of ours, made of the same files, in turns.

    python -m scripts.compare_tokenizers --model outputs/marian_multi30k --input train.en

"First sight": a new tokenizer, which hasn't seen any of the words. MarianTokenizer needs sentencepiece.
"""

import argparse
import copy
import statistics
import time
from pathlib import Path
from typing import Any

from transformers import MarianTokenizer

from benchmarks.report import align, describe_machine
from hf_vanilla_transformer.interop.sentencepiece import opus_mt_tokenizer

JOBS: dict[str, tuple[int, int, dict[str, Any]]] = {  # lines, lines of a call, options
    "1,000 at a time": (10_000, 1_000, {}),
    "32 at a time, padded, as tensors": (10_000, 32, {"padding": True, "return_tensors": "pt"}),
    "one at a time": (2_000, 1, {}),
    "there and back": (10_000, 10_000, {}),
}


def seconds_per_line(tokenizer: Any, lines: list[str], job: str) -> float:
    """Does a job, and says how long a line takes."""
    number, size, options = JOBS[job]
    lines, began = lines[:number], time.perf_counter()
    for start in range(0, len(lines), size):
        ids = tokenizer(lines[start] if size == 1 else lines[start : start + size], **options)["input_ids"]
        if job == "there and back":
            tokenizer.batch_decode(ids, skip_special_tokens=True)
    return (time.perf_counter() - began) / len(lines)


def main() -> None:
    """Times all jobs and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, type=Path, help="folder with source.spm, target.spm and vocab.json")
    parser.add_argument("--input", required=True, type=Path, help="text file in the source language")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lines = options.input.read_text(encoding="utf-8").splitlines()
    marian, ours = MarianTokenizer.from_pretrained(options.model), opus_mt_tokenizer(options.model)
    fresh = copy.deepcopy(ours)
    kinds = {"MarianTokenizer": lambda: marian, "ours, first sight": lambda: copy.deepcopy(fresh), "ours": lambda: ours}
    rows = [("sentences per second", *kinds)]
    for job in JOBS:  # the first round warms up
        turns = [[seconds_per_line(of(), lines, job) for of in kinds.values()] for _ in range(options.rounds + 1)]
        rows.append((job, *(f"{1 / statistics.median(own[1:]):,.0f}" for own in zip(*turns, strict=True))))
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    print("\n".join(align(rows)))


if __name__ == "__main__":
    main()
