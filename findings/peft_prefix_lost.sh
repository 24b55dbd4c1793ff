#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0: a trained prefix of an encoder-decoder is lost in generate(), with a warning that
# looks like one of any other renamed argument.
#
# PEFT puts the prefix under `past_key_values` into what `prepare_inputs_for_generation` returns; transformers 5.24 puts
# its own, empty cache there under the new name, `cache`, and where a forward is given both, the old one is dropped. The
# model's forward still takes the prefix in training, so that a prefix is trained that no generation uses. With 5.23 it
# is used.
#
# Seen on 2026-11-28 (2 cores of an Intel Xeon, Python 3.11, torch 2.13.0), with MarianMTModel, a prefix of 3 tokens
# that is trained to make the model say the token 7:
#     transformers 5.23.0: loss 3.5 -> 3.1, with the prefix [7, 7, 7, 7, 7, 7], without it [29, 29, 18, 18, 18, 29]
#     transformers 5.24.0: loss 3.5 -> 3.1, with the prefix [29, 29, 18, 18, 18, 29], without it the same
# It takes two to four minutes, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/program.py" <<'PROGRAM'
import sys
import warnings

import torch
import transformers
from peft import PrefixTuningConfig, get_peft_model
from transformers import MarianConfig, MarianMTModel

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
sizes = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
sizes |= {"vocab_size": 30, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "pad_token_id": 0}
config = MarianConfig(**sizes, decoder_start_token_id=0, eos_token_id=1, forced_eos_token_id=None, dropout=0.0)
model = get_peft_model(MarianMTModel(config), PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3))
source = torch.tensor([[5, 9, 14, 6, 1]])
target = torch.full((1, 6), 7)
optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.3)
losses = []
for _ in range(100):
    loss = model(input_ids=source, labels=target).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.eval()
options = {"input_ids": source, "max_new_tokens": 6, "num_beams": 1, "do_sample": False}
found = model.generate(**options)[0, 1:].tolist()
with model.disable_adapter():
    without = model.generate(**options)[0, 1:].tolist()
shown = "the same" if found == without else without
version = transformers.__version__
print(f"transformers {version}: loss {losses[0]:.1f} -> {losses[-1]:.1f}, with the prefix {found}, without it {shown}")
sys.exit(losses[-1] >= losses[0] or (found != [7] * 6 if version == "5.23.0" else found != without))
PROGRAM
for version in 5.23.0 5.24.0; do
    python3 -m venv --clear "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==$version accelerate==1.15.0 peft==0.21.2 numpy==2.4.6
    "$folder/venv/bin/python" "$folder/program.py"
done
