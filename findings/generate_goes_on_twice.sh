#!/usr/bin/env bash
# transformers 5.24.0: an encoder-decoder that goes on from the cache that generate() has returned is fed its prompt a
# second time, unless the caller also gives a `decoder_attention_mask` as long as the prompt; no error, no warning.
#
# generate() takes the mask's length as the sign that `decoder_input_ids` holds what the cache knows already. Without a
# mask, the prompt is fed behind itself: after 10 + 10 tokens the cache has 30 positions in place of 20. Beam search goes
# on wrongly with a mask, too: each row of its cache is the past of another hypothesis, not of the sequence returned.
#
# Seen on 2026-11-29 (2 cores of an AMD EPYC, Python 3.11, torch 2.13.0), models that go on otherwise than without a cache:
#     1 beam(s), with a mask: 0 of 40, 20 positions
#     1 beam(s), without: 35 of 40, 30 positions
#     4 beam(s), with a mask: 5 of 40, 20 positions
# It takes one to three minutes, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/program.py" <<'PROGRAM'
import sys

import torch
import transformers
from transformers import MarianConfig, MarianMTModel

transformers.logging.set_verbosity_error()
sizes = {f"{side}_{what}": number for side in ("encoder", "decoder") for what, number in (("layers", 2), ("ffn_dim", 32))}
sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "vocab_size": 60}
config = MarianConfig(
    **sizes, pad_token_id=1, eos_token_id=2, decoder_start_token_id=3, forced_eos_token_id=None, init_std=0.1
)


def count(beams, is_masked):
    """Of 40 models, those whose 10 further tokens depend on the cache; and the positions of the last cache."""
    others = 0
    for seed in range(40):
        torch.manual_seed(seed)
        model = MarianMTModel(config).eval()
        source = torch.randint(4, 60, (4, 7))
        options = {"num_beams": beams, "min_new_tokens": 10, "max_new_tokens": 10, "return_dict_in_generate": True}
        first = model.generate(source, **options)
        options["decoder_input_ids"] = first.sequences
        if is_masked:
            options["decoder_attention_mask"] = torch.ones_like(first.sequences)
        without = model.generate(source, **options).sequences
        found = model.generate(source, cache=first.cache, **options)
        others += not torch.equal(without, found.sequences)
    positions = found.cache.get_seq_length()
    print(f"{beams} beam(s), {'with a mask' if is_masked else 'without'}: {others} of 40, {positions} positions")
    return others, positions


right, twice, beams = count(1, True), count(1, False), count(4, True)
sys.exit(right != (0, 20) or twice[1] != 30 or twice[0] < 10 or beams[0] == 0)
PROGRAM
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore "$folder/program.py"
