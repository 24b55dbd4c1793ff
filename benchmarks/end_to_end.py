"""Training on files, data loading included: our trainer with its batches, and the stock one with Marian."""

import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import disable_progress_bars, load_from_disk
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments
from transformers.trainer_callback import PrinterCallback

from hf_vanilla_transformer import VanillaTransformerTokenizerFast
from hf_vanilla_transformer.data.batching import TokenBudgetBatchSampler
from hf_vanilla_transformer.data.corpora import (
    Cleaning,
    Corpus,
    CorpusError,
    lengths_of,
    read_corpus,
    texts_of,
    tokenize,
)
from hf_vanilla_transformer.training.recipe import VanillaTransformerTrainingArguments
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer

from . import models
from .work import BenchmarkError, Size
from .workers import Entrant, Facts, Timing, synchronize

WARM_UP = 2  # updates before the clock starts


def prepare(data: Path, size: Size, folder: Path) -> Size:
    """Trains a tokenizer on train.en and train.de, and writes it and the token ids to another folder.

    Args:
        data: Folder of train.en and train.de.
        size: Of the model, with the largest vocabulary.
        folder: Where tokenizer and token ids are written.

    Returns:
        The size with the actual vocabulary.

    Raises:
        BenchmarkError: The files are missing or can't be read.
    """
    disable_progress_bars()
    try:
        pairs = read_corpus(Corpus((str(data / "train.en"),), (str(data / "train.de"),)))
    except CorpusError as error:
        raise BenchmarkError(f"{error}; --data_dir is the folder with Multi30k's train.en and train.de") from error
    tokenizer = VanillaTransformerTokenizerFast.train_from_iterator(
        texts_of(pairs), vocab_size=size.vocab_size, show_progress=False
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    tokenize(pairs, tokenizer, Cleaning(max_length=256)).save_to_disk(folder / "train")
    return dataclasses.replace(size, vocab_size=len(tokenizer))


class _Timed:
    """A trainer that measures the time between the beginnings of two updates."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs one update and counts its target tokens."""
        step, last = self.state.global_step, self.args.max_steps - 1
        if step in (WARM_UP, last):
            synchronize(self.args.device.type)
            self.times = [*getattr(self, "times", []), time.perf_counter()]
        if WARM_UP <= step < last:
            self.tokens = getattr(self, "tokens", 0) + (inputs["labels"] != -100).sum()
        return super().training_step(model, inputs, *args, **kwargs)


class _OurTrainer(_Timed, VanillaTransformerTrainer):
    pass


class _StockTrainer(_Timed, Seq2SeqTrainer):
    pass


class EndToEnd:
    """Trains a new model with a new trainer in each turn.

    Args:
        name: "ours" or "marian".
        size: Of the model.
        folder: The output of `prepare`.
        tokens: Tokens per batch, padding included; the stock trainer's batches have as many sentences on average.
        updates: Number of timed updates.
        device: "cpu" or "cuda".
        dtype: bfloat16 means autocast.
    """

    def __init__(
        self, name: str, size: Size, folder: Path, tokens: int, updates: int, device: str, dtype: torch.dtype
    ) -> None:
        self.name, self.size, self.folder, self.tokens, self.updates = name, size, folder, tokens, updates
        self.on_cpu, self.bf16 = device == "cpu", dtype == torch.bfloat16
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.train = load_from_disk(str(folder / "train"))
        self.parameters = models.count_parameters(self._model())

    def facts(self, case: str = "") -> Facts:
        """Its parameters, and its batches."""
        batches = f"batches of {self.tokens} tokens" if self.name == "ours" else f"{self._sentences()} random sentences"
        trainer = "VanillaTransformerTrainer" if self.name == "ours" else "Seq2SeqTrainer"
        return Facts(self.parameters, note=f"{trainer}, {batches}", has_memory=True)

    def run(self, case: str) -> Timing:
        """Trains a new model."""
        trainer = self._trainer()
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        began, ended = trainer.times
        return Timing(ended - began, int(trainer.tokens))

    def _model(self) -> Any:
        torch.manual_seed(0)
        pad, end = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        tokens = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": end}
        return (models.vanilla if self.name == "ours" else models.marian)(self.size, **tokens)

    def _sentences(self) -> int:
        lengths = (lengths_of(self.train, "input_ids"), lengths_of(self.train, "labels"))
        return round(len(self.train) / len(TokenBudgetBatchSampler(*lengths, self.tokens)))

    def _trainer(self) -> Any:
        """A new model in its trainer, with settings that are the same for both."""
        model: Any = self._model()
        settings: dict[str, Any] = {
            "output_dir": str(self.folder / self.name),
            "max_steps": WARM_UP + self.updates + 1,
            "learning_rate": 1e-4,
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": ["none"],
            "disable_tqdm": True,
            "use_cpu": self.on_cpu,
            "dataloader_pin_memory": not self.on_cpu,
            "bf16": self.bf16,
        }
        data = {"train_dataset": self.train, "processing_class": self.tokenizer}
        if self.name == "ours":
            ours = VanillaTransformerTrainingArguments(per_device_train_batch_tokens=self.tokens, **settings)
            return _OurTrainer(model, ours, data_collator=DataCollatorForSeq2Seq(self.tokenizer), **data)
        settings["per_device_train_batch_size"] = self._sentences()
        stock = Seq2SeqTrainingArguments(label_smoothing_factor=models.LABEL_SMOOTHING, **settings)
        return _StockTrainer(model, stock, data_collator=DataCollatorForSeq2Seq(self.tokenizer, model=model), **data)


def entrants(
    size: Size, folder: Path, tokens: int, updates: int, device: str, dtype: torch.dtype, with_marian: bool
) -> list[Entrant]:
    """Returns ours, and Marian if asked for."""
    work = {"size": size, "folder": folder, "tokens": tokens, "updates": updates, "device": device, "dtype": dtype}
    ours = Entrant("ours", partial(EndToEnd, "ours", **work))
    return [ours, Entrant("marian", partial(EndToEnd, "marian", **work))] if with_marian else [ours]
