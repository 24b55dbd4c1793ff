#!/usr/bin/env bash
# @huggingface/tokenizers 0.2.0 (the tokenizers of transformers.js 4.3.1) reads a tokenizer.json otherwise than
# tokenizers 0.23.3 in Python, without a warning:
# - Split with the behavior "MergedWithNext" divides as "Isolated": the separator is a piece of its own.
# - Metaspace with prepend_scheme "first" writes a space before every piece of a Sequence, not before the text's first.
# A model then gets other ids in the browser than in its training.
#
# Seen on 2026-11-27 (2 cores of an Intel Xeon, Python 3.11, node 20.20):
#     MergedWithNext: Python a -b -c, JavaScript a - b - c
#     Metaspace "first": Python ▁a b, JavaScript ▁a ▁b
# It needs node and npm, and takes half a minute, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tokenizers==0.23.3
npm install --silent --no-audit --no-fund @huggingface/tokenizers@0.2.0
cat >write.py <<'PROGRAM'
import json

from tokenizers import Tokenizer, models, pre_tokenizers

tokens = ["?", "a", "b", "c", "-", "-b", "-c", "▁a", "▁b"]
punctuation = pre_tokenizers.Split("-", "merged_with_next")
first = pre_tokenizers.Sequence(
    [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first", split=False)]
)
for name, splitter, text in (("split", punctuation, "a-b-c"), ("metaspace", first, "a b")):
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="?"))
    tokenizer.pre_tokenizer = splitter
    tokenizer.save(f"{name}.json")
    with open(f"{name}.python", "w", encoding="utf-8") as file:
        file.write(" ".join(tokenizer.encode(text).tokens))
PROGRAM
venv/bin/python write.py
cat >read.mjs <<'PROGRAM'
import { readFileSync } from "node:fs";
import { Tokenizer } from "@huggingface/tokenizers";

const read = (name) => readFileSync(name, "utf8");
let isSame = true;
const cases = [["split", "MergedWithNext", "a-b-c", "a -b -c", "a - b - c"], ["metaspace", 'Metaspace "first"', "a b", "▁a b", "▁a ▁b"]];
for (const [name, title, text, inPython, inJavaScript] of cases) {
  const own = read(`${name}.python`), other = new Tokenizer(JSON.parse(read(`${name}.json`)), {}).tokenize(text).join(" ");
  console.log(`${title}: Python ${own}, JavaScript ${other}`);
  isSame &&= own === inPython && other === inJavaScript;
}
process.exit(isSame ? 0 : 1);
PROGRAM
node read.mjs
