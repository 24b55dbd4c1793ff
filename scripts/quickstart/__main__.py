"""Trains a small Transformer to translate numbers, dates, times and amounts of money from English to German.

    python -m scripts.quickstart

It takes about three minutes on two CPU cores and downloads nothing: the corpus is generated. The output folder,
outputs/quickstart/, then contains the model with its tokenizer, metrics.json and a plot of cross-attention.
"""

import argparse
import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizerFast,
)
from hf_vanilla_transformer.evaluation.metrics import corpus_bleu, exact_match
from hf_vanilla_transformer.publish.plotting import plot_attention
from hf_vanilla_transformer.training.trainer import TranslationMetrics
from scripts.quickstart.corpus import generate_pairs, split_pairs

SEED = 0


def main() -> None:
    """Generates the corpus, trains and saves a model, loads it again and tests it."""
    options = parse_arguments()
    start = time.perf_counter()
    run = new_folder(options.output_dir)
    set_seed(SEED)

    pairs = split_pairs(generate_pairs(options.num_pairs, seed=SEED), num_validation=200, num_test=500, seed=SEED)
    print(f"Corpus: {', '.join(f'{len(part):,} {name}' for name, part in pairs.items())} pairs, for instance")
    for english, german in pairs["train"][:3]:
        print(f"  {english}\n  {german}")

    texts = (text for pair in pairs["train"] for text in pair)
    tokenizer = VanillaTransformerTokenizerFast.train_from_iterator(texts, vocab_size=options.vocab_size)
    config = VanillaTransformerConfig.from_preset(
        "tiny", vocab_size=len(tokenizer), d_model=options.d_model, dropout=options.dropout
    )
    model = VanillaTransformerForConditionalGeneration(config)
    print(f"Model: {model.num_parameters():,} parameters, vocabulary of {len(tokenizer):,}")

    train(model, tokenizer, pairs, run, options)
    model.save_pretrained(run / "model")
    tokenizer.save_pretrained(run / "model")

    model = AutoModelForSeq2SeqLM.from_pretrained(run / "model")
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    metrics, hypotheses = test(model, tokenizer, pairs["test"])
    picture = run / "cross_attention.png"
    longest = max(range(len(hypotheses)), key=lambda i: len(hypotheses[i]))
    draw_attention(model, tokenizer, pairs["test"][longest][0], hypotheses[longest], picture)
    metrics["seconds"] = round(time.perf_counter() - start, 1)
    (run / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")

    print(f"\n{len(hypotheses)} held-out sentences, beam search of {model.generation_config.num_beams}:")
    print(f"  exact match {metrics['exact_match']:.1f}%, BLEU {metrics['bleu']:.2f} ({metrics['bleu_signature']})")
    for (english, _), german in list(zip(pairs["test"], hypotheses, strict=True))[:5]:
        print(f"  {english}\n    {german}")
    print(f"\nTime: {metrics['seconds']:.0f} seconds\nModel: {run / 'model'}\nCross-attention: {picture}")
    print(f'Try it: .venv/bin/vanilla-transformer translate --model {run / "model"} "It is half past three."')


def parse_arguments() -> argparse.Namespace:
    """Parses the command line; README describes the run with the default values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--num-pairs", type=int, default=40_000, help="number of sentence pairs to generate")
    parser.add_argument("--vocab-size", type=int, default=2000)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--max-steps", type=int, default=1800)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    return parser.parse_args()


def new_folder(folder: Path) -> Path:
    """Creates the output folder; an earlier run's folder is kept under another name."""
    if folder.exists():
        earlier = folder.with_name(f"{folder.name}-{datetime.now():%Y%m%d-%H%M%S}")
        folder.rename(earlier)
        print(f"The earlier run in {folder} is now in {earlier}.")
    folder.mkdir(parents=True)
    return folder


def train(model: Any, tokenizer: Any, pairs: dict[str, list[tuple[str, str]]], run: Path, options: Any) -> None:
    """Trains with the stock Seq2SeqTrainer: Adam and label smoothing as in the paper's section 5."""
    metrics = TranslationMetrics(tokenizer)

    def compute_metrics(predictions: EvalPrediction) -> dict[str, float]:
        scores = metrics(predictions)
        for source, translation, reference in metrics.samples:
            mark = "" if translation == reference else f"   (reference: {reference})"
            print(f"\n  {source}\n    {translation}{mark}", end="")
        print()
        return scores

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        return dict(tokenizer(batch["english"], text_target=batch["german"]))

    data = {}
    for name in ("train", "validation"):
        english, german = zip(*pairs[name], strict=True)
        data[name] = Dataset.from_dict({"english": english, "german": german}).map(tokenize, batched=True)
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=str(run),
            max_steps=options.max_steps,
            per_device_train_batch_size=options.batch_size,
            train_sampling_strategy="group_by_length",
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=options.max_steps // 10,
            adam_beta2=0.98,
            adam_epsilon=1e-9,
            max_grad_norm=0.0,
            eval_strategy="steps",
            eval_steps=options.max_steps // 4,
            per_device_eval_batch_size=100,
            predict_with_generate=True,
            generation_num_beams=1,
            include_for_metrics=["inputs"],
            logging_steps=options.max_steps // 20,
            save_strategy="no",
            dataloader_pin_memory=False,
            report_to="none",
            seed=SEED,
        ),
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute_metrics,
    )
    trainer.train()


def test(model: Any, tokenizer: Any, pairs: list[tuple[str, str]]) -> tuple[dict[str, Any], list[str]]:
    """Translates with the model's defaults, the paper's beam search.

    Args:
        model: The trained model.
        tokenizer: Its tokenizer.
        pairs: Source sentences with their references.

    Returns:
        Exact match in percent and BLEU with its signature, and the translations.
    """
    sources, references = map(list, zip(*pairs, strict=True))
    hypotheses: list[str] = []
    for i in range(0, len(sources), 100):
        inputs = tokenizer(sources[i : i + 100], padding=True, return_tensors="pt")
        hypotheses += tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)
    bleu = corpus_bleu(hypotheses, references)
    scores = {"exact_match": exact_match(hypotheses, references), "bleu": bleu.value, "bleu_signature": bleu.signature}
    return scores, hypotheses


def draw_attention(model: Any, tokenizer: Any, source: str, target: str, file: Path) -> None:
    """Plots which source tokens each target token attends to, in the last layer's cross-attention."""
    inputs = tokenizer(source, text_target=target, return_tensors="pt")
    with torch.inference_mode():
        weights = model(**inputs, output_attentions=True).cross_attentions[-1][0]  # (heads, T, S)
    pieces = (tokenizer.readable_pieces(inputs[name][0].tolist()) for name in ("input_ids", "labels"))
    plot_attention(weights, *pieces, title=f"Cross-attention: {source}").savefig(file)


if __name__ == "__main__":
    main()
