"""Contenders in training: forward, loss, backward and a step of Adam, called as users call them."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from hf_vanilla_transformer.engine import training_shortcuts

from . import models
from .floor import Floor
from .work import Case, Size, synchronize
from .workers import BenchmarkError, Entrant, Facts, Timing

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Trainee:
    """A model in training mode, and how it is called."""

    model: nn.Module
    prepare: Callable[[Inputs], Inputs]  # adds to a batch what a collator would; not timed
    loss: Callable[[Inputs], Tensor]  # the mean smoothed cross-entropy of a batch
    note: str


def _ours(size: Size, as_trainer: bool) -> Trainee:
    model, options, note = models.vanilla(size), {}, "model(**batch).loss"
    if as_trainer:
        options, note = {"skip_logits": True}, "shortcuts, skip_logits, keeps freed memory, as our trainer"
        training_shortcuts(model).__enter__()  # until the process ends
    return Trainee(model, lambda batch: batch, lambda batch: model(**batch, **options).loss, note)


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

    return Trainee(model, prepare, loss, "loss by the Trainer's LabelSmoother")


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

    return Trainee(model, prepare, loss, "loss by F.cross_entropy")


MAKERS: dict[str, Callable[[Size], Trainee]] = {
    "ours": partial(_ours, as_trainer=True),
    "ours, plain call": partial(_ours, as_trainer=False),
    "marian": _marian,
    "torch": _torch,
}


class TrainingContender:
    """Updates of one model, by a name of `MAKERS`; bfloat16 means autocast, and the weights are always float32."""

    def __init__(
        self, name: str, size: Size, cases: tuple[Case, ...], device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self.trainee, self.device, self.dtype = MAKERS[name](size), device, dtype
        self.trainee.model.to(device).train()
        self.optimizer = _adam(self.trainee.model)
        self.batches = {
            case.name: [self.trainee.prepare(batch.tensors(device)) for batch in case.batches] for case in cases
        }

    def facts(self, case: str = "") -> Facts:
        """Its parameters."""
        return Facts(models.count_parameters(self.trainee.model), note=self.trainee.note)

    def run(self, case: str) -> Timing:
        """Updates on all batches of a case."""
        return Timing(self.update(case, self.trainee.loss)[0])

    def update(self, case: str, loss_of: Callable[[Inputs], Tensor]) -> tuple[float, float]:
        """Updates on all batches of a case; returns the seconds and the last loss.

        Raises:
            BenchmarkError: The loss isn't finite.
        """
        synchronize(self.device)
        began = time.perf_counter()
        for batch in self.batches[case]:
            self.optimizer.zero_grad(set_to_none=True)
            with self._precision():
                loss = loss_of(batch)
            loss.backward()
            self.optimizer.step()
        synchronize(self.device)
        seconds = time.perf_counter() - began
        if not loss.isfinite():
            raise BenchmarkError(f"the loss is {loss.item()}; take another --dtype")
        return seconds, loss.item()

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32)


def _adam(model: nn.Module) -> torch.optim.Adam:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.98), "eps": 1e-9}
    try:
        return torch.optim.Adam(parameters, **options, fused=True)
    except RuntimeError:  # not available on this device
        return torch.optim.Adam(parameters, **options)


def training_entrants(
    peers: list[str], size: Size, cases: tuple[Case, ...], device: str, dtype: torch.dtype
) -> list[Entrant]:
    """Returns ours in both variants, the peers, Marian with ours' way of keeping memory, and the floor."""
    work = {"size": size, "cases": cases, "device": device, "dtype": dtype}
    keeps = device == "cpu"
    entrants = [Entrant("ours", partial(TrainingContender, "ours", **work), keeps)]
    entrants += [Entrant(name, partial(TrainingContender, name, **work)) for name in ("ours, plain call", *peers)]
    if "marian" in peers and keeps:
        entrants.append(Entrant("marian, kept memory", partial(TrainingContender, "marian", **work), keeps))
    return [*entrants, Entrant("floor", partial(Floor, **work), keeps)]
