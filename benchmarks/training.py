"""Contenders in training: forward, loss, backward and a step of Adam, called as users call them."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from hf_vanilla_transformer.data.packing import PackedBatchSampler, PackingCollator
from hf_vanilla_transformer.engine import training_shortcuts

from . import models
from .work import Case, Size, synchronize
from .workers import BenchmarkError, Entrant, Timing

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Trainee:
    """A model in training mode, and how it is called."""

    model: nn.Module
    prepare: Callable[[Inputs], Inputs]  # adds to a batch what a collator would; not timed
    loss: Callable[[Inputs], Tensor]  # the mean smoothed cross-entropy of a batch
    pack: Callable[[Case], list[Inputs]] | None = None  # makes the batches, in place of `prepare`; not timed
    opened: ExitStack = field(default_factory=ExitStack)  # contexts, which end with the trainee


def _ours(size: Size, as_trainer: bool = False, attention: str = "sdpa", is_compiled: bool = False) -> Trainee:
    """Ours as our trainer calls it, or by a plain `model(**batch).loss`, by another attention or by torch.compile."""
    model, options = models.vanilla(size), {"skip_logits": True} if as_trainer else {}
    model.set_attn_implementation(attention)
    trainee = Trainee(model, lambda batch: batch, lambda batch: model(**batch, **options).loss)
    if as_trainer:
        trainee.opened.enter_context(training_shortcuts(model))
    elif is_compiled:
        model.compile(dynamic=True)
    return trainee


def _packed(size: Size, is_compiled: bool = False) -> Trainee:
    """Ours as our trainer calls it with `packed`, and with `torch_compile`."""
    model = models.vanilla(size)

    def pack(case: Case) -> list[Inputs]:
        lengths = [[np.array(list(map(len, side))) for side in (one.sources, one.targets)] for one in case.batches]
        samplers = [PackedBatchSampler(*own, sys.maxsize) for own in lengths]  # one batch each, as the others have
        rows, source, target = (max(sizes) for sizes in zip(*(one.shape for one in samplers), strict=True))
        collator = PackingCollator(model.config, (rows, source, target))
        return [
            collator([{"input_ids": one.sources[n], "labels": one.targets[n]} for n in next(iter(sampler))])
            for one, sampler in zip(case.batches, samplers, strict=True)
        ]

    trainee = Trainee(model, lambda batch: batch, lambda batch: model(**batch, skip_logits=True).loss, pack)
    trainee.opened.enter_context(training_shortcuts(model, {} if is_compiled else None))
    return trainee


def _marian(size: Size) -> Trainee:
    """Marian as Seq2SeqTrainer with `label_smoothing_factor` and DataCollatorForSeq2Seq trains it."""
    model: Any = models.marian(size)
    model.config.use_cache = False
    smooth = LabelSmoother(epsilon=models.LABEL_SMOOTHING)

    def prepare(batch: Inputs) -> Inputs:
        return {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}

    def loss(batch: Inputs) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return smooth(model(**inputs), batch["labels"])

    return Trainee(model, prepare, loss)


def _torch(size: Size) -> Trainee:
    """torch.nn.Transformer with the target shifted right by hand."""
    model = models.TorchTransformer(size)

    def prepare(batch: Inputs) -> Inputs:
        target = F.pad(batch["labels"], (1, -1), value=size.pad)
        target = target.masked_fill(target == -100, size.pad)
        return {"padding": batch["attention_mask"] == 0, "target": target, **batch}

    def loss(batch: Inputs) -> Tensor:
        logits = model(batch["input_ids"], batch["padding"], batch["target"])
        labels = batch["labels"].flatten()
        return F.cross_entropy(logits.flatten(0, 1).float(), labels, label_smoothing=models.LABEL_SMOOTHING)

    return Trainee(model, prepare, loss)


MAKERS: dict[str, Callable[[Size], Trainee]] = {
    "ours": partial(_ours, as_trainer=True),
    "ours, plain call": _ours,
    "ours, torch.compile": partial(_ours, is_compiled=True),
    "ours, packed": _packed,
    "ours, packed, torch.compile": partial(_packed, is_compiled=True),
    "ours, flash attention": partial(_ours, attention="flash_attention_2"),
    "marian": _marian,
    "torch": _torch,
}


class TrainingContender:
    """Updates of one model, by a name of `MAKERS`; bfloat16 means autocast, and the weights are always float32."""

    def __init__(self, name: str, size: Size, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.trainee, self.size, self.device, self.dtype = MAKERS[name](size), size, device, dtype
        self.trainee.model.to(device).train()
        trained = [parameter for parameter in self.trainee.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)

    def run(self, case: Case) -> Timing:
        """Updates on all batches of a case."""
        return Timing(self.update(case, self.trainee.loss)[0])

    def update(self, case: Case, loss_of: Callable[[Inputs], Tensor]) -> tuple[float, float]:
        """Updates on all batches of a case; returns the seconds and the last loss.

        Raises:
            BenchmarkError: The loss isn't finite.
        """
        if self.trainee.pack is not None:
            batches = [{name: x.to(self.device) for name, x in one.items()} for one in self.trainee.pack(case)]
        else:
            batches = [self.trainee.prepare(batch.tensors(self.size, self.device)) for batch in case.batches]
        synchronize(self.device)
        began = time.perf_counter()
        for batch in batches:
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
                loss = loss_of(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        synchronize(self.device)
        seconds = time.perf_counter() - began
        if not loss.isfinite():
            raise BenchmarkError(f"the loss is {loss.item()}; take another --dtype")
        return seconds, loss.item()


def training_entrants(names: list[str], size: Size, device: str, dtype: torch.dtype) -> list[Entrant]:
    """Returns ours, those of the names, and on a CPU Marian with ours' way of keeping memory."""
    make, keeps = partial(TrainingContender, size=size, device=device, dtype=dtype), device == "cpu"
    entrants = [Entrant("ours", partial(make, "ours"), keeps)]
    entrants += [Entrant(name, partial(make, name)) for name in names]
    if "marian" in names and keeps:
        entrants.append(Entrant("marian, kept memory", partial(make, "marian"), keeps))
    return entrants
