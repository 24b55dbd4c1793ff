"""Trains Hugging Face's MarianMTModel on a parallel corpus and saves it as OPUS-MT's repositories are laid out.

    python -m scripts.train_marian --source train.en --target train.de --validation-source val.en \
        --validation-target val.de --minutes 60 --output-dir outputs/marian

The result has source.spm and target.spm (unigram), one vocab.json over both, and OPUS-MT's configuration: what
`vanilla-transformer convert` and `MarianMTModel.from_pretrained` read. `--resume` continues from the last state saved.
"""

import argparse
import io
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, MarianConfig, MarianMTModel, MarianTokenizer, set_seed

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.checkpoints.files import replacing
from hf_vanilla_transformer.data.batching import TokenBudgetBatchSampler
from hf_vanilla_transformer.engine import keep_freed_memory
from hf_vanilla_transformer.metrics import corpus_bleu

STATE = "training_state.pt"
COOLDOWN = 0.2  # the share of the time, at its end, in which the learning rate falls to 0
Pairs = list[tuple[list[int], list[int]]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the tokenizer, trains, saves and scores."""
    options = parse_arguments(arguments)
    set_seed(options.seed)
    keep_freed_memory()
    warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")  # it changes no token
    folder = options.output_dir
    if not options.resume and folder.is_dir() and any(folder.iterdir()):
        raise SystemExit(f"--output-dir {folder} is not empty; name another folder, or give --resume.")
    sources, targets = read_lines(options.source, options.target)
    validation = read_lines(options.validation_source, options.validation_target)
    if not options.resume:
        write_tokenizer(folder, sources, targets, options)
    tokenizer = MarianTokenizer.from_pretrained(folder)
    encoded = tokenizer(sources)["input_ids"], tokenizer(text_target=targets)["input_ids"]
    pairs = [pair for pair in zip(*encoded, strict=True) if max(map(len, pair)) <= options.max_length]
    model = new_model(len(tokenizer), options)
    model.final_logits_bias.copy_(output_bias(pairs, len(tokenizer)))
    print(f"{len(pairs):,} pairs, {model.num_parameters():,} parameters, vocabulary of {len(tokenizer):,}", flush=True)
    train(model, pairs, folder / STATE, options)
    model.eval().save_pretrained(folder)
    translator = Translator(model, tokenizer=tokenizer)
    translations = translator(validation[0], num_beams=1, max_length=options.max_length, progress_bar=False)
    print(f"validation, greedy: {corpus_bleu(translations, validation[1])}", flush=True)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("source", "target", "validation-source", "validation-target"):
        parser.add_argument(f"--{name}", type=Path, required=True, help="text file, one sentence per line")
    parser.add_argument("--output-dir", type=Path, required=True, help="folder for the model")
    parser.add_argument("--minutes", type=float, required=True, help="time to train, with that before --resume")
    parser.add_argument("--resume", action="store_true", help="continue from the state in --output-dir")
    parser.add_argument("--source-lang", default="en", help="its code (default: en)")
    parser.add_argument("--target-lang", default="de", help="its code (default: de)")
    numbers = {"d-model": 512, "layers": 6, "heads": 8, "ffn": 2048, "num-beams": 4}
    numbers |= {"batch-tokens": 1024, "max-length": 128, "warmup": 400, "save-minutes": 5, "seed": 0}
    for name, number in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=number, help=f"default: {number}")
    parser.add_argument("--vocab-size", type=int, default=8000, help="pieces per side, at most (default: 8000)")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="its peak (default: 0.0005)")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    return parser.parse_args(arguments)


def read_lines(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Reads two files that are translations of each other, line by line."""
    sides = [path.read_text(encoding="utf-8").removesuffix("\n").split("\n") for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise SystemExit(f"{source} has {len(sides[0]):,} lines and {target} {len(sides[1]):,}; give equally many.")
    return sides[0], sides[1]


def write_tokenizer(folder: Path, sources: list[str], targets: list[str], options: argparse.Namespace) -> None:
    """Writes source.spm, target.spm, vocab.json and tokenizer_config.json: spm_train's defaults but for the sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = {"</s>": 0, "<unk>": 1}
    for name, lines in (("source.spm", sources), ("target.spm", targets)):
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=written,
            vocab_size=options.vocab_size,
            hard_vocab_limit=False,  # a small corpus has fewer pieces
            minloglevel=1,
        )
        (folder / name).write_bytes(written.getvalue())
        side = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
        for number in range(side.get_piece_size()):
            if not side.is_control(number):
                pieces.setdefault(side.id_to_piece(number), len(pieces))
    pieces["<pad>"] = len(pieces)
    (folder / "vocab.json").write_text(json.dumps(pieces, ensure_ascii=False, indent=1), encoding="utf-8")
    settings = {"source_lang": options.source_lang, "target_lang": options.target_lang, "model_max_length": 512}
    settings["tokenizer_class"] = "MarianTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")


def new_model(vocab_size: int, options: argparse.Namespace) -> MarianMTModel:
    """Makes a model with OPUS-MT's settings. The row of the padding is zero, and stays so (see `loss_of`)."""
    pad, end = vocab_size - 1, 0
    both = {"layers": options.layers, "attention_heads": options.heads, "ffn_dim": options.ffn}
    config = MarianConfig(
        vocab_size=vocab_size,
        d_model=options.d_model,
        **{f"{stack}_{name}": number for stack in ("encoder", "decoder") for name, number in both.items()},
        activation_function="swish",
        max_position_embeddings=512,
        scale_embedding=True,
        static_position_embeddings=True,
        dropout=0.1,
        pad_token_id=pad,
        decoder_start_token_id=pad,
        eos_token_id=end,
        forced_eos_token_id=end,
    )
    model = MarianMTModel(config)
    model.generation_config = GenerationConfig(
        num_beams=options.num_beams,
        max_length=512,
        bad_words_ids=[[pad]],
        forced_eos_token_id=end,
        eos_token_id=end,
        pad_token_id=pad,
        decoder_start_token_id=pad,
    )
    with torch.no_grad():
        model.get_input_embeddings().weight[pad] = 0.0
    return model


def output_bias(pairs: Pairs, vocab_size: int) -> Tensor:
    """Returns the logarithms of the target tokens' frequencies, less their mean; 0 for the padding. (1, V).

    OPUS-MT's models learned theirs; in MarianMTModel it is a constant.
    """
    counts = torch.bincount(torch.tensor([token for _, target in pairs for token in target]), minlength=vocab_size)
    bias = (counts + 1.0).log()
    bias -= bias[:-1].mean()
    bias[-1] = 0.0
    return bias[None]


def train(model: MarianMTModel, pairs: Pairs, state_file: Path, options: argparse.Namespace) -> None:
    """Trains until the time is over, saving the state every few minutes."""
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
    update, before = 0, 0.0
    if options.resume:
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])
        update, before = state["update"], state["seconds"]
    model.train()
    began = saved = shown = time.perf_counter()
    losses, tokens = 0.0, 0
    for batch in islice(batches(pairs, options), update, None):
        seconds = before + time.perf_counter() - began
        left = 1 - seconds / (60 * options.minutes)
        if left <= 0:
            break
        update += 1
        for group in adam.param_groups:
            rise_and_fall = min(update / options.warmup, (options.warmup / update) ** 0.5)
            group["lr"] = options.learning_rate * rise_and_fall * min(1, left / COOLDOWN)
        source, target = (pad_sequence([torch.tensor(pair[side]) for pair in batch], True, -100) for side in (0, 1))
        loss = loss_of(model, source, target, options.bf16)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        losses, tokens = losses + loss.item(), tokens + int((target >= 0).sum())
        now = time.perf_counter()
        if update % 50 == 0:
            print(
                f"update {update:,}, minute {seconds / 60:.1f}: loss {losses / 50:.3f}, learning rate "
                f"{adam.param_groups[0]['lr']:.2e}, {tokens / (now - shown):.0f} target tokens/s",
                flush=True,
            )
            losses, tokens, shown = 0.0, 0, now
        if now - saved > 60 * options.save_minutes:
            save_state(state_file, model, adam, update, seconds)
            saved = now
    save_state(state_file, model, adam, update, before + time.perf_counter() - began)


def batches(pairs: Pairs, options: argparse.Namespace) -> Iterator[Pairs]:
    """Yields batches of sentences of similar length, epoch after epoch."""
    source, target = (np.array([len(pair[side]) for pair in pairs]) for side in (0, 1))
    sampler = TokenBudgetBatchSampler(source, target, options.batch_tokens, seed=options.seed)
    for epoch in count():
        sampler.set_epoch(epoch)
        for places in sampler:
            yield [pairs[place] for place in places]


def loss_of(model: MarianMTModel, source: Tensor, target: Tensor, bf16: bool) -> Tensor:
    """Computes the smoothed cross-entropy without the last token of the vocabulary: Marian never writes padding."""
    attention_mask = source.ge(0).long()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(
            input_ids=source.masked_fill(source < 0, model.config.pad_token_id),
            attention_mask=attention_mask,
            decoder_input_ids=model.prepare_decoder_input_ids_from_labels(target),
            use_cache=False,
        ).logits
    return F.cross_entropy(logits[target >= 0][:, :-1].float(), target[target >= 0], label_smoothing=0.1)


def save_state(file: Path, model: MarianMTModel, adam: Any, update: int, seconds: float) -> None:
    """Saves what `--resume` needs."""
    state = {"model": model.state_dict(), "adam": adam.state_dict(), "update": update, "seconds": seconds}
    with replacing(file) as path:
        torch.save(state, path)


if __name__ == "__main__":
    main()
