#!/usr/bin/env bash
# CTranslate2 4.8.5: ct2-marian-converter writes other positions into a model than Marian computes.
#
# Both have sines in the first half of a position's vector and cosines in the second. Marian's frequencies are
# 10000^(-i / (d/2 - 1)) (sinusoidalPositionEmbeddings in its src/graph/node_initializers.cpp; a forward pass with these
# has the log-probabilities of Marian 1.12.42's scorer within 1e-5). The converter's are 10000^(-2i / d), as in Hugging
# Face's Marian: the converted model computes something else than the trained one, the more so the narrower it is.
#
# Seen on 2026-11-29 (2 cores of an Intel Xeon, Python 3.11), the largest difference of the first 50 positions:
#     width 16: 1.82 from Marian's formula, 3e-08 from the one with 2i / d
#     width 256: 0.14 from Marian's formula, 3e-08 from the one with 2i / d
#     width 512: 0.07 from Marian's formula, 3e-08 from the one with 2i / d
#     width 1024: 0.04 from Marian's formula, 3e-08 from the one with 2i / d
# It takes less than a minute. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ctranslate2==4.8.5 numpy==2.4.6 PyYAML==6.0.4
cat >"$folder/program.py" <<'PROGRAM'
import sys
from pathlib import Path

import numpy as np
import yaml
from ctranslate2.converters import MarianConverter
from ctranslate2.specs import TransformerSpec

TOKENS = ["</s>", "<unk>", "a", "b"]
OPTIONS = {
    "type": "transformer", "enc-depth": 1, "dec-depth": 1, "transformer-heads": 2, "transformer-ffn-activation": "relu",
    "transformer-preprocess": "", "transformer-postprocess": "dan", "transformer-postprocess-emb": "d",
    "transformer-decoder-autoreg": "self-attention", "transformer-no-projection": False,
    "transformer-guided-alignment-layer": "last", "version": "v1.12.0",
}  # fmt: skip


def write_model(folder, width):
    """A Marian model of random weights: one layer in each stack, tied embeddings, post-norm."""
    random = np.random.default_rng(0)
    arrays = {"Wemb": (len(TOKENS), width), "decoder_ff_logit_out_b": (1, len(TOKENS))}
    for stack, attentions in {"encoder_l1": ["self"], "decoder_l1": ["self", "context"]}.items():
        for attention in attentions:
            arrays |= {f"{stack}_{attention}_W{part}": (width, width) for part in "qkvo"}
            arrays |= {f"{stack}_{attention}_b{part}": (1, width) for part in "qkvo"}
            arrays |= {f"{stack}_{attention}_Wo_ln_{part}": (1, width) for part in ("scale", "bias")}
        arrays |= {f"{stack}_ffn_{part}": (width, width) for part in ("W1", "W2")}
        arrays |= {f"{stack}_ffn_{part}": (1, width) for part in ("b1", "b2", "ffn_ln_scale", "ffn_ln_bias")}
    values = {name: random.standard_normal(shape).astype(np.float32) for name, shape in arrays.items()}
    settings = yaml.dump({**OPTIONS, "dim-emb": width}).encode() + b"\0"
    np.savez(folder / "model.npz", **values, **{"special:model.yml": np.frombuffer(settings, np.int8)})
    (folder / "vocab.yml").write_text("".join(f'"{token}": {number}\n' for number, token in enumerate(TOKENS)))


def marians(positions, width):
    """Marian's table: its loop over half of the width, with all positions at once."""
    half = width // 2
    angles = np.arange(positions)[:, None] * np.exp(-np.log(10000) / (half - 1) * np.arange(half))
    return np.hstack([np.sin(angles), np.cos(angles)])


def hugging_faces(positions, width):
    angles = np.arange(positions)[:, None] * 10000 ** (-2 * np.arange(width // 2) / width)
    return np.hstack([np.sin(angles), np.cos(angles)])


written = []
TransformerSpec.save = lambda spec, folder: written.append(spec)  # in place of writing a file, which has the same
folder, is_so = Path(sys.argv[1]), True
for width in (16, 256, 512, 1024):
    write_model(folder, width)
    MarianConverter(str(folder / "model.npz"), [str(folder / "vocab.yml")] * 2).convert(str(folder / "out"), force=True)
    stacks = (written[-1].encoder, written[-1].decoder)  # one table for both: the other has its name
    tables = [stack.position_encodings.encodings for stack in stacks]
    table = next(one for one in tables if not isinstance(one, str)).numpy()[:50]
    difference, other = (np.abs(table - kind(50, width)).max() for kind in (marians, hugging_faces))
    print(f"width {width}: {difference:.2f} from Marian's formula, {other:.0e} from the one with 2i / d")
    is_so = is_so and difference > 0.01 and other < 1e-5
sys.exit(not is_so)
PROGRAM
"$folder/venv/bin/python" "$folder/program.py" "$folder"
