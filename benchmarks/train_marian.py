"""Trains Hugging Face's MarianMTModel at the size of one of our recipes with the stock Seq2SeqTrainer.

    python -m benchmarks.train_marian --config multi30k_tiny --data_dir DIR --minutes 30 \
        --tokenizer outputs/multi30k_tiny/tokenizer --output_dir outputs/marian

Data, tokenizer, sizes, dropout, smoothing, Adam and schedule are the recipe's, whose options can be overridden as in
`vanilla-transformer train`. Everything else is Marian's and the stock Trainer's: random batches with the same average
number of sentences as ours, the loss from all logits, biases.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    set_seed,
)

from hf_vanilla_transformer.data.batching import TokenBudgetBatchSampler
from hf_vanilla_transformer.data.corpora import Cleaning, lengths_of, read_corpus, tokenize
from hf_vanilla_transformer.evaluation.metrics import corpus_bleu
from hf_vanilla_transformer.evaluation.translation import translate
from hf_vanilla_transformer.training.recipe import parse_recipe


class StopAfter(TrainerCallback):
    """Ends training after a given time and keeps the last weights for averaging.

    Args:
        seconds: Time after which training ends.
        save_steps: Updates between two sets of weights.
        average: Number of sets to keep.
    """

    def __init__(self, seconds: float, save_steps: int, average: int) -> None:
        self.seconds, self.save_steps, self.average = seconds, save_steps, average
        self.kept: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts the clock."""
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Keeps the weights, and ends training if the time is over."""
        if state.global_step % self.save_steps == 0:
            weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
            self.kept = [*self.kept, weights][-self.average :]
        if time.perf_counter() - self.began > self.seconds:
            control.should_training_stop = True


def main() -> None:
    """Trains, averages, scores."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, help="our recipe")
    parser.add_argument("--data_dir", required=True, help="folder of the recipe's files")
    parser.add_argument("--tokenizer", required=True, help="the tokenizer of our run")
    parser.add_argument("--output_dir", required=True, help="folder for translations")
    parser.add_argument("--minutes", type=float, required=True, help="duration of the training")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    options, overrides = parser.parse_known_args()  # overrides: options of the recipe
    overrides += ["--data_dir", options.data_dir, "--output_dir", options.output_dir]
    data, sizes, args = parse_recipe([options.config], overrides)
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    train = tokenize(read_corpus(data.corpus("train")), tokenizer, Cleaning(data.max_length, data.max_length_ratio))
    lengths = (lengths_of(train, "input_ids"), lengths_of(train, "labels"))
    batches = TokenBudgetBatchSampler(*lengths, args.per_device_train_batch_tokens)
    model = MarianMTModel(marian_config(sizes, len(tokenizer)))
    callback = StopAfter(60 * options.minutes, int(args.save_steps), max(args.average_last, 1))
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=options.output_dir,
            per_device_train_batch_size=round(len(train) / len(batches)),
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            label_smoothing_factor=sizes.label_smoothing or 0.0,
            learning_rate=args.learning_rate,
            lr_scheduler_type=args.lr_scheduler_type,
            warmup_steps=args.warmup_steps,
            adam_beta2=args.adam_beta2,
            adam_epsilon=args.adam_epsilon,
            max_grad_norm=args.max_grad_norm,
            max_steps=args.max_steps,
            logging_steps=args.logging_steps,
            save_strategy="no",
            report_to="none",
            bf16=options.bf16,
            use_cpu=args.use_cpu,
            seed=args.seed,
        ),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        train_dataset=train,
        callbacks=[callback],
    )
    trainer.train()
    seconds = time.perf_counter() - callback.began
    updates = trainer.state.global_step
    if callback.kept:
        mean = {name: sum(kept[name] for kept in callback.kept) / len(callback.kept) for name in callback.kept[0]}
        model.load_state_dict(mean)
    sentences = round(len(train) / len(batches)) * args.gradient_accumulation_steps * updates
    tokens = float(lengths[1].mean()) * sentences
    report = {"updates": updates, "seconds": seconds, "target_tokens_per_second": tokens / seconds}
    for part in ("validation", "test"):
        pairs = read_corpus(data.corpus(part))
        translations = translate(model.eval(), tokenizer, list(pairs["source"]), num_beams=4, max_new_tokens=100)
        bleu = corpus_bleu(translations, list(pairs["target"]), tokenize=args.bleu_tokenize)
        report[f"{part}_bleu"] = bleu.value
        (Path(options.output_dir) / f"{part}.translations.txt").write_text("\n".join(translations) + "\n")
    print(json.dumps(report, indent=1))


def marian_config(sizes: Any, vocab_size: int) -> MarianConfig:
    """Marian at our sizes: one scaled matrix for all embeddings; padding is the start token."""
    same = ("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    same += ("encoder_ffn_dim", "decoder_ffn_dim", "dropout")
    ours = sizes.config(vocab_size)
    return MarianConfig(
        vocab_size=vocab_size,
        **{name: getattr(ours, name) for name in same},
        attention_dropout=0.0,
        activation_dropout=0.0,
        activation_function="relu",
        scale_embedding=True,
        pad_token_id=ours.pad_token_id,
        eos_token_id=ours.eos_token_id,
        forced_eos_token_id=None,
        decoder_start_token_id=ours.pad_token_id,
        init_std=ours.d_model**-0.5,
    )


if __name__ == "__main__":
    main()
