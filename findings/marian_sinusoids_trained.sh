#!/usr/bin/env bash
# transformers 5.24.0: fine-tuning a MarianMTModel trains its sinusoids, and saving leaves them out, so that the saved
# model is another one than the trained one.
#
# The positions of Marian (and so of OPUS-MT) are a fixed table. After from_pretrained, its parameter has
# requires_grad=True; up to 5.23 its forward ran without gradients, from 5.24 on it doesn't. Both versions leave the table
# out when they save, and compute it again when they load. With `requires_grad = False` for the two tables, 5.24 trains
# as 5.23 does.
#
# Seen on 2026-11-28 (2 cores of an Intel Xeon, Python 3.11, torch 2.13.0), after 20 updates of a tiny model:
#     transformers 5.23.0: the table has changed by 0.000; logits of the saved model differ by 0.0% of the largest
#     transformers 5.24.0: the table has changed by 0.127; logits of the saved model differ by 30.3% of the largest
# It takes two to four minutes, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/program.py" <<'PROGRAM'
import sys
import tempfile

import torch
import transformers
from transformers import MarianConfig, MarianMTModel

torch.manual_seed(0)
sizes = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
sizes |= {"vocab_size": 30, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "pad_token_id": 0}
config = MarianConfig(**sizes, decoder_start_token_id=0, eos_token_id=1, forced_eos_token_id=None, dropout=0.0)
with tempfile.TemporaryDirectory() as folder:  # from_pretrained makes the table trainable, the constructor doesn't
    MarianMTModel(config).save_pretrained(folder)
    model = MarianMTModel.from_pretrained(folder).train()
before = model.model.encoder.embed_positions.weight.detach().clone()
batch = {"input_ids": torch.tensor([[5, 9, 14, 6, 1]]), "labels": torch.tensor([[7, 3, 8, 1]])}
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(20):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    model.save_pretrained(folder)
    saved = MarianMTModel.from_pretrained(folder).eval()
    trained, loaded = model(**batch).logits, saved(**batch).logits
table = (model.model.encoder.embed_positions.weight - before).abs().max().item()
logits = ((trained - loaded).abs().max() / trained.abs().max()).item()
version = transformers.__version__
print(
    f"transformers {version}: the table has changed by {table:.3f}; logits of the saved model differ by {logits:.1%} of "
    "the largest"
)
sys.exit((table == 0 and logits < 1e-6) != (version == "5.23.0"))
PROGRAM
for version in 5.23.0 5.24.0; do
    python3 -m venv --clear "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==$version accelerate==1.15.0 numpy==2.4.6
    "$folder/venv/bin/python" "$folder/program.py"
done
