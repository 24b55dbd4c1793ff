#!/usr/bin/env bash
# sacrebleu 2.6.0: of several metrics whose scores have the same name, PairedTest compares one, the last, without an
# error. The keys of the metrics that it is given are replaced by the names of their scores, and every BLEU is "BLEU".
#
# Asked for a BLEU with case and one without, it returns a single p-value; the signature alone tells whose.
#
# Seen on 2026-11-28 (2 cores of an Intel Xeon, Python 3.11):
#     case:mixed alone: p = 0.3616
#     case:lc alone: p = 0.0699
#     both: p = 0.0699 (case:lc)
# It takes less than a minute. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet sacrebleu==2.6.0 numpy==2.4.6
cat >"$folder/program.py" <<'PROGRAM'
import sys

from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

references = [f"The big dog sees cat number {n} ." for n in range(12)]
one = [text.lower() if n % 3 else text for n, text in enumerate(references)]
other = [text.replace("dog", "cat") if n % 4 == 0 else text for n, text in enumerate(references)]
cases = {"case:mixed": False, "case:lc": True}


def compared(*names):
    metrics = {name: BLEU(lowercase=cases[name]) for name in names}
    signatures, scores = PairedTest([("one", one), ("other", other)], metrics, [references], test_type="bs")()
    del scores["System"]
    return [(str(signatures[name]).split("|")[3], f"{scores[name][1].p_value:.4f}") for name in scores]


alone = [compared(name) for name in cases]
for ((case, p_value),) in alone:
    print(f"{case} alone: p = {p_value}")
both = compared(*cases)
print("both:", ", ".join(f"p = {p_value} ({case})" for case, p_value in both))
sys.exit(alone[0] == alone[1] or both != alone[1])
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
