"""Seq2SeqTrainer with FSDP2: weights, gradients and Adam's moments are sharded across the processes.

It saves what one process saves without FSDP, so that any number of processes can resume from any checkpoint, with FSDP
or without, and so that `from_pretrained` loads every checkpoint.
"""

from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from transformers import Seq2SeqTrainer

from ..checkpoints.completeness import OPTIMIZER, SCHEDULER
from ..checkpoints.loading import WEIGHTS
from ..errors import CheckpointError
from .arguments import RecipeError
from .recipe import RECIPES


class ShardingTrainer(Seq2SeqTrainer):
    """Seq2SeqTrainer that trains, saves and resumes this package's models with FSDP2 too."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._model_class = type(self.model)  # FSDP puts the model into a class of its own
        if self.is_deepspeed_enabled:
            raise RecipeError(f"DeepSpeed isn't supported; FSDP does the same: {RECIPES / 'accelerate'}/fsdp_8gpu.yaml")
        if parse_flag_from_env("ACCELERATE_USE_FSDP") and not self.is_fsdp_enabled:
            raise RecipeError(
                f"Accelerate has no FSDP on CPUs; there, use {RECIPES / 'accelerate'}/cpu_ddp.yaml instead"
            )
        if self.is_fsdp_enabled:
            check_plugin(self.accelerator.state.fsdp_plugin)
            share_embedding_module(self.model)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        sharded_class = type(self.model)
        if state_dict and self.is_fsdp_enabled:  # gathered by the Trainer
            # With FSDP's class, its code would be saved instead of the model's, and tied weights more than once.
            self.model.__class__ = self._model_class
            state_dict = {name: value for name, value in state_dict.items() if name not in _tied_to(self.model)}
        try:
            super()._save(output_dir, state_dict=state_dict)
        finally:
            self.model.__class__ = sharded_class

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        # The weights are in model.safetensors already; the Trainer would save them again, in a format for FSDP only.
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(self.model, self._torch_optimizer, options=options)
        if self.args.should_save:
            torch.save(numbered(state), Path(output_dir, OPTIMIZER))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fsdp_enabled:
            self._load_weights(Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: _IncompatibleKeys) -> None:
        # The Trainer would only warn of missing weights. Tied ones are saved once.
        left_out = {*_tied_to(self.model), *(getattr(self.model, "_keys_to_ignore_on_save", None) or ())}
        missing = [name for name in load_result.missing_keys if name not in left_out]
        if wrong := [*missing, *load_result.unexpected_keys]:
            raise CheckpointError(f"the checkpoint is of another model: only one of the two has {wrong[0]}")

    def _load_best_model(self) -> None:
        if self.is_fsdp_enabled:
            self._load_weights(Path(self.state.best_model_checkpoint))
        else:
            super()._load_best_model()

    def _load_weights(self, checkpoint: Path) -> None:
        options = StateDictOptions(full_state_dict=True, strict=False)  # as tied weights are saved once
        self._issue_warnings_after_load(
            set_model_state_dict(self.model, {**load_file(checkpoint / WEIGHTS)}, options=options)
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.is_fsdp_enabled or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        saved = torch.load(Path(checkpoint, OPTIMIZER), map_location="cpu", weights_only=True, mmap=True)
        named = {parameter: name for name, parameter in self.model.named_parameters()}
        names = [named[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]
        state = renamed(saved, dict(enumerate(names)))
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, self._torch_optimizer, state, options=options)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER), weights_only=True))

    @property
    def _torch_optimizer(self) -> Optimizer:
        wrapped = self.optimizer  # by Accelerate
        assert wrapped is not None
        return wrapped.optimizer if isinstance(wrapped, AcceleratedOptimizer) else wrapped


def share_embedding_module(model: nn.Module) -> None:
    """Replaces embeddings that share their matrix by one module, in place.

    FSDP needs all users of a matrix in one group, and Accelerate puts the model's input and output embeddings into one.
    """
    shared = model.get_input_embeddings()  # type: ignore[operator]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Embedding) and child.weight is shared.weight:
                setattr(parent, name, shared)


def numbered(optimizer_state: dict[str, Any]) -> dict[str, Any]:
    """Converts an optimizer's state with named parameters to one with numbers, as `Optimizer.state_dict` has it."""
    names = [name for group in optimizer_state["param_groups"] for name in group["params"]]
    return renamed(optimizer_state, {name: number for number, name in enumerate(names)})


def renamed(optimizer_state: dict[str, Any], new: dict[Any, Any]) -> dict[str, Any]:
    """Returns an optimizer's state with each parameter's key replaced by `new[key]`."""
    state = {new[key]: values for key, values in optimizer_state["state"].items()}
    groups = [{**group, "params": [new[key] for key in group["params"]]} for group in optimizer_state["param_groups"]]
    return {"state": state, "param_groups": groups}


def _tied_to(model: nn.Module) -> dict[str, str]:
    """Name of each tied parameter that is not saved -> name of the saved one."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    return tied


def check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Checks that Accelerate's config asks for FSDP2 and for checkpoints that `from_pretrained` can load."""
    if plugin.fsdp_version != 2 or "FULL_STATE_DICT" not in str(plugin.state_dict_type):
        raise RecipeError(
            "write `fsdp_version: 2` and `fsdp_state_dict_type: FULL_STATE_DICT` into Accelerate's config; neither "
            "from_pretrained nor another number of processes can load other checkpoints"
        )
