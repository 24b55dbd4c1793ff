#!/usr/bin/env bash
# sacrebleu 2.6.0: an empty reference, which a docstring of its metrics names as the way to leave one out where a sentence
# has fewer than others, counts as one of length 0: a translation of any length then has no brevity penalty.
#
# With None in its place the score is right. The command knows no other way than an empty line.
#
# Seen on 2026-11-29 (2 cores of an AMD EPYC, Python 3.11), one translation of half a reference:
#     None: BLEU = 36.79 100.0/100.0/100.0/100.0 (BP = 0.368 ratio = 0.500 hyp_len = 4 ref_len = 8)
#     empty string: BLEU = 100.00 100.0/100.0/100.0/100.0 (BP = 1.000 ratio = 0.000 hyp_len = 4 ref_len = 0)
#     the command: 100.0
# It takes a few seconds. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet sacrebleu==2.6.0
cat >"$folder/program.py" <<'PROGRAM'
import sys

from sacrebleu.metrics import BLEU

scores = {}
for name, second in (("None", None), ("empty string", "")):
    score = scores[name] = BLEU().corpus_score(["a b c d"], [["a b c d e f g h"], [second]])
    print(f"{name}: {score}")
sys.exit(round(scores["None"].score, 2) != 36.79 or round(scores["empty string"].score, 2) != 100.0)
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
echo "a b c d" >"$folder/translation"
echo "a b c d e f g h" >"$folder/first"
echo "" >"$folder/second"
score=$("$folder/venv/bin/sacrebleu" "$folder/first" "$folder/second" -i "$folder/translation" --score-only)
echo "the command: $score"
[[ "$score" == 100.0 ]]
