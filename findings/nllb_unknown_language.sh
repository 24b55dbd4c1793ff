#!/usr/bin/env bash
# transformers 5.23.0: NLLB's and mBART-50's tokenizers take a language that they don't have. The source then begins
# with <unk>, and no error or warning says so; M2M100's tokenizer raises a KeyError.
#
# "eng_Latin" for "eng_Latn", or M2M100's "en", is such a language. The model translates the sentence nevertheless, as
# if its language weren't known.
#
# Seen on 2026-11-27 (2 cores of an Intel Xeon, Python 3.11):
#     NllbTokenizer, eng_Latn: ['eng_Latn', '▁', 'a', '</s>']
#     NllbTokenizer, eng_Latin: ['<unk>', '▁', 'a', '</s>']
#     MBart50Tokenizer, en_XX: ['en_XX', '▁', 'a', '</s>']
#     MBart50Tokenizer, en: ['<unk>', '▁', 'a', '</s>']
# It takes one to three minutes, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 numpy==2.4.6
cat >"$folder/program.py" <<'PROGRAM'
import sys

from transformers import MBart50Tokenizer, NllbTokenizer

special = ["<s>", "<pad>", "</s>", "<unk>"]
nllb = NllbTokenizer(vocab={token: number for number, token in enumerate([*special, "▁", "a"])}, merges=[])
mbart = MBart50Tokenizer(vocab=[(token, 0.0) for token in ["<unk>", "<s>", "</s>", "▁", "a"]])
found = {}
for tokenizer, languages in ((nllb, ("eng_Latn", "eng_Latin")), (mbart, ("en_XX", "en"))):
    for language in languages:
        tokenizer.src_lang = language
        tokens = tokenizer.convert_ids_to_tokens(tokenizer("a").input_ids)
        found[language] = tokens[0]
        print(f"{type(tokenizer).__name__}, {language}: {tokens}")
sys.exit(found != {"eng_Latn": "eng_Latn", "eng_Latin": "<unk>", "en_XX": "en_XX", "en": "<unk>"})
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" 2>/dev/null
