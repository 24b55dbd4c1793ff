"""Runs the benchmarks on a GPU and writes their tables into docs/performance.md, in place of the last ones.

    python -m scripts.gpu_report

Training at base and big in bfloat16, batches of 25,000 target tokens, compared with Marian and torch.nn.Transformer;
decoding of 1, 32 and 64 sentences, compared with Marian. Ours also runs with torch.compile in training, and with flash
attention where flash_attn is installed. The file is changed when all of them have ended, or not at all.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- tables of scripts/gpu_report.py -->", "<!-- end of these tables -->"
COMMANDS = {
    "train": ["--compiled", "--peers", "marian", "torch"],
    "generate": ["--peers", "marian", "--cases", "greedy, batch 1", "beam 4, batch 32", "greedy, batch 64"],
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and replaces what stands between the markers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "performance.md", help="file with the markers")
    parser.add_argument("--configs", nargs="+", default=["base", "big"], help="sizes (default: base big)")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--dtype", default="bfloat16", help="default: bfloat16")
    parser.add_argument("--tokens", default="25000", help="target tokens per batch of training (default: 25000)")
    parser.add_argument("--rounds", default="3", help="timed turns of each (default: 3)")
    parser.add_argument("--batches", default="2", help="batches per turn (default: 2)")
    options = parser.parse_args(arguments)
    replace(options.docs, "")  # fails now rather than after minutes if the markers are missing
    same = ["--device", options.device, "--dtype", options.dtype]
    same += ["--rounds", options.rounds, "--batches", options.batches]
    parts = []
    for config in options.configs:
        for command, own in COMMANDS.items():
            more = ["--tokens", options.tokens] if command == "train" else []
            parts.append(measure([command, "--config", config, *same, *more, *own]))
    options.docs.write_text(replace(options.docs, "\n\n".join(parts)), encoding="utf-8")
    print(f"written: {options.docs}")


def measure(arguments: list[str]) -> str:
    """Runs one benchmark and returns its command and its output as Markdown."""
    shown = shlex.join(["python", "-m", "benchmarks", *arguments])
    print(shown, flush=True)
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"gpu_report: `{shown}` failed, see above; the file is unchanged")
    print(f"{time.monotonic() - begin:.0f} seconds", flush=True)
    return f"```\n$ {shown}\n{done.stdout.strip()}\n```"


def replace(docs: Path, tables: str) -> str:
    """Returns a file's text with `tables` between the markers.

    Raises:
        SystemExit: The markers aren't there, once each and in this order.
    """
    text = docs.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in after:
        raise SystemExit(f"gpu_report: {docs} needs the lines {BEGIN} and {END}, once each and in this order")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


if __name__ == "__main__":
    main()
