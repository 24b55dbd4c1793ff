#!/usr/bin/env bash
# transformers 5.23.0: with several beams, generate() fills up behind the end with </s> in place of <pad> where the
# padding token has the id 0, as T5's has; with one beam it fills up with <pad>.
#
# The fill value is `pad_token_id or eos_token_id[0]`, and 0 is false. What counts tokens that aren't padding, as `gen_len`
# of the examples' run_translation.py and run_summarization.py does, gets the length of the batch's longest output.
#
# Seen on 2026-11-27 (2 cores of an Intel Xeon, Python 3.11, torch 2.13.0):
#     1 beam:  [0, 2, 2, 1, 0, 0, 0, 0], 3 tokens that aren't padding
#     2 beams: [0, 2, 2, 1, 1, 1, 1, 1], 7 tokens that aren't padding
# It takes one to three minutes, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 numpy==2.4.6
cat >"$folder/program.py" <<'PROGRAM'
import sys

import torch
from transformers import LogitsProcessor, T5Config, T5ForConditionalGeneration

PAD, END, WORD = 0, 1, 2
model = T5ForConditionalGeneration(
    T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=PAD)
).eval()
assert (model.config.pad_token_id, model.config.eos_token_id) == (PAD, END)


class Script(LogitsProcessor):
    """The first sentence ends after two words, the second after six."""

    def __call__(self, input_ids, scores):
        beams = len(input_ids) // 2
        ends = [3 if row < beams else 7 for row in range(len(input_ids))]
        wanted = [END if input_ids.shape[1] == end else WORD for end in ends]
        return torch.full_like(scores, -1e4).scatter(1, torch.tensor(wanted)[:, None], 0.0)


lengths = []
for beams in (1, 2):
    outputs = model.generate(
        input_ids=torch.tensor([[3, 4, END], [5, 6, END]]), num_beams=beams, max_new_tokens=7, do_sample=False,
        logits_processor=[Script()],
    )
    first = outputs[0].tolist()
    lengths.append(sum(token != PAD for token in first))
    print(f"{beams} beam{'s' * (beams > 1)}: {first}, {lengths[-1]} tokens that aren't padding")
sys.exit(lengths != [3, 7])
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
