#!/usr/bin/env bash
# PyYAML 6.0.4: what safe_dump(..., allow_unicode=True) writes of a text with U+0085, its safe_load reads as a text with
# a space. U+2028 and U+2029 come back. No error or warning says so, with and without libyaml.
#
# A vocabulary in YAML that has the character as a token, as those made of web pages do, gets another token.
#
# Seen on 2026-11-28 (2 cores of an Intel Xeon, Python 3.11):
#     SafeLoader: {'a b': 1, 'a\u2028b': 2}
#     CSafeLoader: {'a b': 1, 'a\u2028b': 2}
# It takes some seconds, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet PyYAML==6.0.4
cat >"$folder/program.py" <<'PROGRAM'
import sys

import yaml

text = yaml.safe_dump({"a\x85b": 1, "a\u2028b": 2}, allow_unicode=True)
loaders = [getattr(yaml, name) for name in ("SafeLoader", "CSafeLoader") if hasattr(yaml, name)]
found = {one.__name__: yaml.load(text, Loader=one) for one in loaders}
for name, value in found.items():
    print(f"{name}: {value}")
sys.exit(any(one != {"a b": 1, "a\u2028b": 2} for one in found.values()))
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
