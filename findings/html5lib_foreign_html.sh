#!/usr/bin/env bash
# html5lib 1.1 and tinyhtml5 2.1.0: an element <html> in a drawing or a formula in a table ends the parser with an
# AssertionError, though a parser of HTML accepts any text. At the end of the text, both take the drawing's element, the
# current one, for the page's own, which they expect in fragments alone.
#
# Seen on 2026-11-28 (2 cores of an Intel Xeon, Python 3.11):
#     html5lib, <table><svg><html>: AssertionError
#     tinyhtml5, <table><svg><html>: AssertionError
# It takes less than a minute, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet html5lib==1.1 tinyhtml5==2.1.0
cat >"$folder/program.py" <<'PROGRAM'
import sys

import html5lib
import tinyhtml5

found = []
for library in (html5lib, tinyhtml5):
    try:
        library.parse("<table><svg><html>")
        found.append("a tree")
    except AssertionError:
        found.append("AssertionError")
    print(f"{library.__name__}, <table><svg><html>: {found[-1]}")
sys.exit(found != ["AssertionError", "AssertionError"])
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
