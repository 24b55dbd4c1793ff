#!/usr/bin/env bash
# transformers 5.24.0: a model class from outside of transformers whose forward takes `past_key_values` and **kwargs, as
# up to 5.23 all did, generates as if only the last token had been written, without a warning.
#
# From 5.24 on, generate() hands the cache over as `cache=` alone. Such a forward swallows it with **kwargs, and sees one
# token per step and no past. Outputs and masks of 5.24 still understand the old name, so that nothing fails. With
# `use_cache=False` the same model generates what it did under 5.23. The class below is a Marian in all but that name.
#
# Seen on 2026-11-28 (2 cores of an Intel Xeon, Python 3.11, torch 2.13.0):
#     transformers 5.23.0: with a cache, logits of the second token differ by 0.0% of the largest
#     transformers 5.24.0: with a cache, logits of the second token differ by 67.9% of the largest
# It takes two to four minutes, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/program.py" <<'PROGRAM'
import sys

import torch
import transformers
from transformers import MarianConfig, MarianMTModel


class OwnModel(MarianMTModel):
    """A forward with the argument names of all models up to 5.23."""

    def forward(self, input_ids=None, attention_mask=None, decoder_input_ids=None, past_key_values=None, **kwargs):
        # What a model of its own would do with its cache; whichever name the installed version has for it.
        name = "cache" if transformers.__version__ == "5.24.0" else "past_key_values"
        known = ("encoder_outputs", "use_cache", "labels", "return_dict")
        kwargs = {key: value for key, value in kwargs.items() if key in known}
        kwargs[name] = past_key_values
        return super().forward(input_ids, attention_mask, decoder_input_ids=decoder_input_ids, **kwargs)


torch.manual_seed(0)
sizes = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
sizes |= {"vocab_size": 30, "d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "pad_token_id": 0}
config = MarianConfig(
    **sizes, decoder_start_token_id=0, eos_token_id=1, forced_eos_token_id=None, dropout=0.0, init_std=0.1,
    tie_word_embeddings=False, share_encoder_decoder_embeddings=False,
)
model = OwnModel(config).eval()
options = {"input_ids": torch.tensor([[5, 9, 14, 6, 1]]), "max_new_tokens": 6, "num_beams": 1, "do_sample": False}
options |= {"output_logits": True, "return_dict_in_generate": True}
cached, uncached = (model.generate(**options, use_cache=use).logits[1] for use in (True, False))
difference = (cached - uncached).abs().max().item() / uncached.abs().max().item()
version = transformers.__version__
print(f"transformers {version}: with a cache, logits of the second token differ by {difference:.1%} of the largest")
sys.exit((difference < 1e-5) != (version == "5.23.0"))
PROGRAM
for version in 5.23.0 5.24.0; do
    python3 -m venv --clear "$folder/venv"
    "$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==$version accelerate==1.15.0 numpy==2.4.6
    "$folder/venv/bin/python" "$folder/program.py"
done
