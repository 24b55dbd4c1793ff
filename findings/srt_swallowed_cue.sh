#!/usr/bin/env bash
# srt 3.5.3: a cue without a number, and without a blank line before it, becomes a part of the text before, times
# included, though it is asked for no errors. Players show two cues.
#
# Seen on 2026-11-28 (2 cores of an Intel Xeon, Python 3.11):
#     ['One.\n00:00:03,000 --> 00:00:04,000\nTwo.']
# It takes half a minute, for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet srt==3.5.3
cat >"$folder/program.py" <<'PROGRAM'
import sys

import srt

texts = [cue.content for cue in srt.parse("00:00:01,000 --> 00:00:02,000\nOne.\n00:00:03,000 --> 00:00:04,000\nTwo.\n")]
print(texts)
sys.exit(texts != ["One.\n00:00:03,000 --> 00:00:04,000\nTwo."])
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
