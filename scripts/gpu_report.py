"""Runs the benchmarks on a GPU and writes their tables into docs/performance.md, in place of the last ones.

    python -m scripts.gpu_report
    python -m scripts.gpu_report --model outputs/model --input test.en

Training at base and big in bfloat16, batches of 25,000 target tokens, compared with Marian and torch.nn.Transformer;
decoding of 1, 32 and 256 sentences at base, compared with Marian, and with CTranslate2 where it is installed and works;
with `--model`, text to text by `Translator`. It takes 6 minutes at most: each part has a budget, and what it has no
time for is left out. The file is changed when all of them have ended, or not at all.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import with_tables

ROOT = Path(__file__).parents[1]
SEARCHES = [f"{search}, batch {size}" for size in (1, 32, 256) for search in ("greedy", "beam 4")]
COMMANDS = {
    "train": ["--peers", "marian", "torch"],
    "generate": ["--peers", "marian", "ctranslate2", "--new-tokens", "32", "--cases", *SEARCHES],
}
# Of each part, after which it leaves out the cases that are left; on a GPU, it is stopped some time later.
SECONDS, MORE = {"train": 30, "generate": 70, "text": 30}, 40


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and replaces what stands between the markers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "performance.md", help="file with the markers")
    sizes = "sizes; decoding is of the first one (default: base big)"
    parser.add_argument("--configs", nargs="+", default=["base", "big"], help=sizes)
    parser.add_argument("--model", help="folder of a trained model, for text to text with --input")
    parser.add_argument("--input", help="file with one sentence per line")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--dtype", default="bfloat16", help="default: bfloat16")
    parser.add_argument("--tokens", default="25000", help="target tokens per batch of training (default: 25000)")
    parser.add_argument("--rounds", default="3", help="timed turns of each (default: 3)")
    parser.add_argument("--batches", default="2", help="batches per turn of training (default: 2)")
    options = parser.parse_args(arguments)
    with_tables(options.docs, "gpu_report", "")  # fails now rather than after minutes if the markers are missing
    same = ["--device", options.device, "--dtype", options.dtype, "--rounds", options.rounds]
    parts = []
    for number, config in enumerate(options.configs):
        for command, own in COMMANDS.items() if number == 0 else [("train", COMMANDS["train"])]:
            more = ["--batches", "1"]
            if command == "train":
                more = ["--batches", options.batches, "--tokens", options.tokens]
            more += ["--seconds", str(SECONDS[command])]
            parts.append(measure([command, "--config", config, *same, *more, *own]))
    if options.model and options.input:
        parts.append(measure(["text", "--model", options.model, "--input", options.input, *same]))
    options.docs.write_text(with_tables(options.docs, "gpu_report", "\n\n".join(parts)), encoding="utf-8")
    print(f"written: {options.docs}")


def measure(arguments: list[str]) -> str:
    """Runs one benchmark and returns its command and its output as Markdown."""
    shown = shlex.join(["python", "-m", "benchmarks", *arguments])
    print(shown, flush=True)
    begin = time.monotonic()
    command = [sys.executable, "-m", "benchmarks", *arguments]
    longest = SECONDS[arguments[0]] + MORE if "cuda" in arguments else None
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=longest)
    except subprocess.TimeoutExpired:
        return f"```\n$ {shown}\nnot measured: it was stopped after {longest} seconds\n```"
    if done.returncode and "ctranslate2" in arguments:  # it may lack a library of CUDA
        return measure([one for one in arguments if one != "ctranslate2"])
    if done.returncode:
        raise SystemExit(f"gpu_report: `{shown}` failed, see above; the file is unchanged")
    print(f"{time.monotonic() - begin:.0f} seconds", flush=True)
    return f"```\n$ {shown}\n{done.stdout.strip()}\n```"


if __name__ == "__main__":
    main()
