#!/usr/bin/env bash
# argostranslate 1.11.0: every underscore of a translation becomes a space, where the package has a SentencePiece model:
# file names, e-mail addresses and code are broken. Its tokenizer replaces "_" beside SentencePiece's "▁".
#
# Seen on 2026-11-29 (2 cores of an AMD EPYC, Python 3.11):
#     'open my file.txt'
# It takes half a minute, for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps argostranslate==1.11.0 sentencepiece==0.2.3
cat >"$folder/program.py" <<'PROGRAM'
import sys
from pathlib import Path

import sentencepiece
from argostranslate.tokenizer import SentencePieceTokenizer

file, text = Path(sys.argv[1], "sentencepiece.model"), "open my_file.txt"
with file.open("wb") as writer:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text] * 5), model_writer=writer, vocab_size=20, hard_vocab_limit=False, minloglevel=2
    )
tokenizer = SentencePieceTokenizer(file)
found = tokenizer.decode(tokenizer.encode(text))
print(repr(found))
sys.exit(found != "open my file.txt")
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder"
