"""Runs of transformers' own Seq2SeqTrainer on a handful of sentences, for the tests of what works on checkpoints."""

from pathlib import Path

from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

SOURCES = ["twenty-one", "half past nine", "the fourth of May", "three euros"]
TARGETS = ["einundzwanzig", "halb zehn", "der vierte Mai", "drei Euro"]


def stock_trainer(checkpoint: Path, run: Path, **options: object) -> Seq2SeqTrainer:
    """A Trainer that saves after each of four steps, with a learning rate that moves every weight visibly."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    settings = {"max_steps": 4, "save_steps": 1, "learning_rate": 0.01, "report_to": "none", "disable_tqdm": True}
    return Seq2SeqTrainer(
        model=AutoModelForSeq2SeqLM.from_pretrained(checkpoint),
        args=Seq2SeqTrainingArguments(output_dir=str(run), use_cpu=True, **{**settings, **options}),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        train_dataset=[
            dict(tokenizer(source, text_target=target)) for source, target in zip(SOURCES, TARGETS, strict=True)
        ],
    )
