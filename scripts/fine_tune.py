"""Trains a translation model on two text files, one sentence per line, with the stock Seq2SeqTrainer.

    python scripts/fine_tune.py --train-source train.en --train-target train.de \
        --validation-source val.en --validation-target val.de --output-dir outputs/en-de --max-steps 600

With `--model-name-or-path` it starts from a saved model instead of a new one. All options of
`Seq2SeqTrainingArguments` can be given as well; `--help` lists them.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizerFast,
)
from hf_vanilla_transformer.training.evaluation import TranslationMetrics


@dataclass
class DataArguments:
    """The files and the model."""

    train_source: Path = field(metadata={"help": "Source sentences, one per line, UTF-8."})
    train_target: Path = field(metadata={"help": "Their translations, line by line."})
    validation_source: Path | None = field(default=None, metadata={"help": "Source sentences to evaluate on."})
    validation_target: Path | None = field(default=None, metadata={"help": "Their translations."})
    model_name_or_path: str | None = field(default=None, metadata={"help": "A saved model to start from."})
    preset: str = field(default="tiny", metadata={"help": "Size of a new model: tiny, base, big, ..."})
    vocab_size: int = field(default=8000, metadata={"help": "Size of a new model's joint vocabulary."})


@dataclass
class TrainingArguments(Seq2SeqTrainingArguments):
    """Hugging Face's arguments with the paper's values (section 5) and sizes for a small machine as defaults."""

    learning_rate: float = 1e-3
    lr_scheduler_type: str = "inverse_sqrt"
    warmup_steps: float = 200
    adam_beta2: float = 0.98
    adam_epsilon: float = 1e-9
    label_smoothing_factor: float = 0.1
    per_device_train_batch_size: int = 64
    per_device_eval_batch_size: int = 64
    train_sampling_strategy: str = "group_by_length"
    predict_with_generate: bool = True
    include_for_metrics: list[str] = field(default_factory=lambda: ["inputs"])
    logging_steps: float = 50
    report_to: str = "none"


def main() -> None:
    """Reads the files, trains, evaluates and saves."""
    options, training = HfArgumentParser([DataArguments, TrainingArguments]).parse_args_into_dataclasses()
    set_seed(training.seed)
    resume, output = training.resume_from_checkpoint, Path(training.output_dir)
    if resume is None and output.is_dir() and any(output.iterdir()):
        raise SystemExit(f"--output-dir {output} is not empty; name another folder, or --resume_from_checkpoint.")
    train = read_pairs(options.train_source, options.train_target)
    validation = None
    if options.validation_source:
        validation = read_pairs(options.validation_source, options.validation_target)

    if options.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
        model = AutoModelForSeq2SeqLM.from_pretrained(options.model_name_or_path)
    else:
        texts = (text for column in ("source", "target") for text in train[column])
        tokenizer = VanillaTransformerTokenizerFast.train_from_iterator(texts, vocab_size=options.vocab_size)
        # The Trainer smooths the labels (`label_smoothing_factor`), so the model doesn't.
        config = VanillaTransformerConfig.from_preset(options.preset, vocab_size=len(tokenizer), label_smoothing=0.0)
        model = VanillaTransformerForConditionalGeneration(config)
    print(f"{len(train):,} training pairs, {model.num_parameters():,} parameters, vocabulary of {len(tokenizer):,}")

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch["source"], text_target=batch["target"], truncation=True, max_length=256)

    metrics = TranslationMetrics(tokenizer)

    def compute_metrics(predictions: EvalPrediction) -> dict[str, float]:
        scores = metrics(predictions)
        for source, translation, reference in metrics.samples:
            print(f"\n  source:      {source}\n  translation: {translation}\n  reference:   {reference}")
        return scores

    trainer = Seq2SeqTrainer(
        model=model,
        args=training,
        train_dataset=train.map(tokenize, batched=True),
        eval_dataset=validation.map(tokenize, batched=True) if validation else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute_metrics,
    )
    trainer.train(resume_from_checkpoint=resume)
    if validation:
        print(trainer.evaluate())
    trainer.save_model()
    print(f"Saved to {training.output_dir}")


def read_pairs(source: Path, target: Path | None) -> Dataset:
    """Reads two files with the same number of lines into the columns "source" and "target"."""
    if target is None:
        raise SystemExit(f"{source} has no translations: give its --..._target file as well.")
    columns = {}
    for name, file in (("source", source), ("target", target)):
        if not file.is_file():
            raise SystemExit(f"There is no file {file}.")
        columns[name] = load_dataset("text", data_files=str(file), split="train")["text"]
    if len(columns["source"]) != len(columns["target"]):
        raise SystemExit(
            f"{source} has {len(columns['source']):,} lines and {target} {len(columns['target']):,}: they must be "
            "translations of each other, line by line."
        )
    return Dataset.from_dict(columns)


if __name__ == "__main__":
    main()
