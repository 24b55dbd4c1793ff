#!/usr/bin/env bash
# transformers 5.23.0: with gradient accumulation, Seq2SeqTrainer trains MarianMTModel with gradients that are
# gradient_accumulation_steps times too large, and logs a loss that is as many times too large.
#
# The Trainer passes num_items_in_batch to each model whose forward takes **kwargs, and leaves the division to it. Marian's
# forward takes them and computes the mean of each batch all the same, as do BART's and T5's.
#
# Seen on 2026-11-27 (2 cores of an AMD EPYC, Python 3.11, torch 2.13.0, accelerate 1.15.0):
#     one batch of 4 rows: loss 3.68, norm of the gradient 0.83
#     4 batches of 1 row: loss 14.71, norm of the gradient 3.32: 4.0 and 4.0 times as large
# It takes one to three minutes, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat >"$folder/program.py" <<'PROGRAM'
import copy
import sys
import tempfile

import torch
from transformers import MarianConfig, MarianMTModel, Seq2SeqTrainer, Seq2SeqTrainingArguments

torch.manual_seed(1)
sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
config = MarianConfig(
    vocab_size=40, d_model=16, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=16, pad_token_id=0,
    eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None, dropout=0.0, **sizes,
)
model = MarianMTModel(config)
rows = [{name: torch.randint(2, 40, (6,)).tolist() for name in ("input_ids", "labels")} for _ in range(4)]


def collate(batch):
    return {name: torch.tensor([row[name] for row in batch]) for name in batch[0]}


def measured(batch_size, steps):
    arguments = Seq2SeqTrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=batch_size, gradient_accumulation_steps=steps, max_steps=1,
        logging_steps=1, max_grad_norm=1e9, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
    )
    trainer = Seq2SeqTrainer(copy.deepcopy(model), arguments, train_dataset=rows, data_collator=collate)
    trainer.train()
    (log,) = [one for one in trainer.state.log_history if "grad_norm" in one]
    return float(log["loss"]), float(log["grad_norm"])


one, four = measured(4, 1), measured(1, 4)
ratios = [large / small for large, small in zip(four, one)]
print(f"one batch of 4 rows: loss {one[0]:.2f}, norm of the gradient {one[1]:.2f}")
print(f"4 batches of 1 row: loss {four[0]:.2f}, norm of the gradient {four[1]:.2f}", end="")
print(": {:.1f} and {:.1f} times as large".format(*ratios))
sys.exit(any(abs(ratio - 4) > 0.1 for ratio in ratios))
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
