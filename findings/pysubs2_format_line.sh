#!/usr/bin/env bash
# pysubs2 1.8.1: the Format line of an .ass file, which says in which order the fields of its events stand, isn't read.
# With other fields than the usual ten, texts lose their beginning, or all, and no error or warning says so.
#
# libass, which plays these files in mpv and VLC, follows the Format line; old versions of ffmpeg wrote such files with
# five fields (libass has them among its tests). Saved again, the file lacks what was lost.
#
# Seen on 2026-11-28 (2 cores of an Intel Xeon, Python 3.11):
#     Senator, we land. -> ''
#     One, two, three, four, five, six. -> ' six.'
# It takes some seconds, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet pysubs2==1.8.1
cat >"$folder/program.py" <<'PROGRAM'
import sys

import pysubs2

TEXTS = ("Senator, we land.", "One, two, three, four, five, six.")
events = "".join(f"Dialogue: 0,0:00:01.00,0:00:02.00,Default,{text}\n" for text in TEXTS)
source = f"[Script Info]\nScriptType: v4.00+\n\n[Events]\nFormat: Layer, Start, End, Style, Text\n{events}"
found = [event.text for event in pysubs2.SSAFile.from_string(source, format_="ass")]
for text, one in zip(TEXTS, found, strict=True):
    print(f"{text} -> {one!r}")
sys.exit(found != ["", " six."])
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null
