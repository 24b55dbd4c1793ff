#!/usr/bin/env bash
# transformers 5.23.0: Seq2SeqTrainer can't train an M2M100 (or an NLLB, which is one) with label smoothing.
#
# With label_smoothing_factor, the Trainer takes the labels out of the batch, and the model needs decoder_input_ids.
# DataCollatorForSeq2Seq(model=...) makes them by the model's prepare_decoder_input_ids_from_labels. BART has that
# method; M2M100ForConditionalGeneration hasn't, so the collator leaves them out, and the error speaks of both kinds of
# inputs being given. Without label smoothing, the model shifts the labels itself.
#
# Seen on 2026-11-27 (2 cores of an Intel Xeon, Python 3.11, torch 2.13.0):
#     BartForConditionalGeneration, label smoothing 0.0: trained
#     BartForConditionalGeneration, label smoothing 0.1: trained
#     M2M100ForConditionalGeneration, label smoothing 0.0: trained
#     M2M100ForConditionalGeneration, label smoothing 0.1: ValueError: You cannot specify both decoder_input_ids and
#     decoder_inputs_embeds at the same time
# It takes one to three minutes, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.4.6
cat >"$folder/program.py" <<'PROGRAM'
import sys
import tempfile

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    M2M100Config,
    M2M100ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

words = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c"]
backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
backend.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
)
pairs = [{"input_ids": [4, 5, 2], "attention_mask": [1, 1, 1], "labels": [6, 4, 2]} for _ in range(4)]
sizes = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
sizes |= {"vocab_size": len(words), "d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}


def trained(model_class, config_class, smoothing):
    model = model_class(config_class(**sizes, decoder_start_token_id=2))
    arguments = Seq2SeqTrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=1, label_smoothing_factor=smoothing, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True,
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model=model)
    try:
        Seq2SeqTrainer(model, arguments, train_dataset=pairs, data_collator=collator).train()
    except ValueError as error:
        return f"ValueError: {error}"
    return "trained"


found = []
for model_class, config_class in ((BartForConditionalGeneration, BartConfig), (M2M100ForConditionalGeneration, M2M100Config)):
    for smoothing in (0.0, 0.1):
        found.append(trained(model_class, config_class, smoothing))
        print(f"{model_class.__name__}, label smoothing {smoothing}: {found[-1]}")
sys.exit(found[:3] != ["trained"] * 3 or "cannot specify both decoder_input_ids" not in found[3])
PROGRAM
"$folder/venv/bin/python" "$folder/program.py"
