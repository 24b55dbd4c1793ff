#!/usr/bin/env bash
# sentencepiece 0.2.3: its module sentencepiece_model_pb2, by which transformers and others read a model's pieces, refuses
# any protobuf below 7.36.1, and the wheel names no requirement of protobuf: pip installs it beside protobuf 6, and
# `pip check` finds nothing wrong. 0.2.2 takes protobuf 5.29.1.
#
# Seen on 2026-11-29 (2 cores of an AMD EPYC, Python 3.11):
#     0.2.2 reads with protobuf 5.29.1: no error
#     No broken requirements found.
#     0.2.3 with protobuf 6.33.6: VersionError
# It takes half a minute, for the installations. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
bin="$folder/venv/bin"
cat >"$folder/program.py" <<'PROGRAM'
try:
    from sentencepiece import sentencepiece_model_pb2  # noqa: F401
    print("no error")
except Exception as error:
    print(type(error).__name__)
PROGRAM
"$bin/pip" install --quiet sentencepiece==0.2.2 protobuf==5.29.1
before=$("$bin/python" "$folder/program.py")
echo "0.2.2 reads with protobuf 5.29.1: $before"
"$bin/pip" install --quiet sentencepiece==0.2.3 protobuf==6.33.6
"$bin/pip" check
after=$("$bin/python" "$folder/program.py")
echo "0.2.3 with protobuf 6.33.6: $after"
[[ "$before" == "no error" && "$after" == VersionError ]]
