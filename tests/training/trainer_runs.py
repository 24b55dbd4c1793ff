"""Runs of transformers' own Seq2SeqTrainer on a handful of sentences, and changes to what they save."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

SOURCES = ["twenty-one", "half past nine", "the fourth of May", "three euros"]
TARGETS = ["einundzwanzig", "halb zehn", "der vierte Mai", "drei Euro"]


def stock_trainer(
    checkpoint: Path, run: Path, model: PreTrainedModel | None = None, data: list | None = None, **options: object
) -> Seq2SeqTrainer:
    """A Trainer that saves after each of four steps, with a learning rate that moves every weight visibly.

    It trains the checkpoint's model on a few sentences, or what is given.
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = model or AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    pairs = zip(SOURCES, TARGETS, strict=True)
    data = data or [dict(tokenizer(source, text_target=target)) for source, target in pairs]
    settings = {"max_steps": 4, "save_steps": 1, "learning_rate": 0.01, "report_to": "none", "disable_tqdm": True}
    return Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(output_dir=str(run), use_cpu=True, **{**settings, **options}),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=data,
        eval_dataset=data,
    )


def change_json(file: Path, **fields: object) -> None:
    """Adds or replaces fields of a JSON file; makes it if there is none."""
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(values | fields))


def change_weights(folder: Path, **tensors: Tensor | None) -> None:
    """Adds or replaces tensors of a saved model; None removes one."""
    file = folder / "model.safetensors"
    weights = {name: value for name, value in {**load_file(file), **tensors}.items() if value is not None}
    save_file(weights, file, metadata={"format": "pt"})
