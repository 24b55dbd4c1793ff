"""Seq2SeqTrainer with FSDP2: weights, gradients and Adam's moments are sharded across the processes.

It saves what one process saves without FSDP, so that any number of processes can resume from any checkpoint, with FSDP
or without, and so that `from_pretrained` loads every checkpoint.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel, Seq2SeqTrainer

from ..checkpoints.completeness import OPTIMIZER, SCHEDULER
from ..checkpoints.loading import tensors_in
from ..errors import CheckpointError
from .arguments import RecipeError
from .recipe import RECIPES


class ShardingTrainer(Seq2SeqTrainer):
    """Seq2SeqTrainer that trains, saves and resumes this package's models with FSDP2 too."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise RecipeError(f"DeepSpeed isn't supported; FSDP does the same: {RECIPES / 'accelerate'}/fsdp_8gpu.yaml")
        if parse_flag_from_env("ACCELERATE_USE_FSDP") and not self.is_fsdp_enabled:
            raise RecipeError(
                f"Accelerate has no FSDP on CPUs; there, use {RECIPES / 'accelerate'}/cpu_ddp.yaml instead"
            )
        if self.is_fsdp_enabled:
            check_plugin(self.accelerator.state.fsdp_plugin)
            share_embedding_module(self.model)
            self.model.save_pretrained = partial(save_plain, self.model, type(self.model))

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

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Loads weights, and refuses those of another model, where the Trainer would only warn of missing ones."""
        if hasattr(self.model, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        files = {file for file, _ in tensors_in(Path(resume_from_checkpoint)).values()}
        weights: dict[str, Any] = {name: value for file in files for name, value in load_file(file).items()}
        if self.is_fsdp_enabled:
            options = StateDictOptions(full_state_dict=True, strict=False)  # as tied weights are saved once
            found = set_model_state_dict(self.model, weights, options=options)
        else:
            found = self.model.load_state_dict(weights, strict=False)
        left_out = [getattr(self.model, name, None) for name in ("all_tied_weights_keys", "_keys_to_ignore_on_save")]
        missing = [name for name in found.missing_keys if not any(name in (names or ()) for names in left_out)]
        if wrong := [*missing, *found.unexpected_keys]:
            raise CheckpointError(f"the checkpoint is of another model: only one of the two has {wrong[0]}")

    def load_sharded_states(self, checkpoint: Path) -> None:
        """Loads the states of optimizer and schedule that one process or several have saved, with FSDP."""
        saved = torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True, mmap=True)
        named = {parameter: name for name, parameter in self.model.named_parameters()}
        names = [named[parameter] for group in self.optimizer.param_groups for parameter in group["params"]]
        state = renamed(saved, dict(enumerate(names)))
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, self._torch_optimizer, state, options=options)
        self.lr_scheduler.load_state_dict(torch.load(checkpoint / SCHEDULER, weights_only=True))

    @property
    def _torch_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate has wrapped it


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


def save_plain(model: PreTrainedModel, plain: type[PreTrainedModel], folder: str, **options: Any) -> None:
    """Saves a model as one of its `plain` class: of FSDP's, its own code and each tied weight would be saved too."""
    sharded, model.__class__ = type(model), plain
    if weights := options.get("state_dict"):  # gathered by the Trainer
        tied = model.all_tied_weights_keys  # name of each -> that of the saved one
        options["state_dict"] = {name: value for name, value in weights.items() if name not in tied}
    try:
        plain.save_pretrained(model, folder, **options)
    finally:
        model.__class__ = sharded


def check_plugin(plugin: FullyShardedDataParallelPlugin) -> None:
    """Checks that Accelerate's config asks for FSDP2 and for checkpoints that `from_pretrained` can load."""
    if plugin.fsdp_version != 2 or "FULL_STATE_DICT" not in str(plugin.state_dict_type):
        raise RecipeError(
            "write `fsdp_version: 2` and `fsdp_state_dict_type: FULL_STATE_DICT` into Accelerate's config; neither "
            "from_pretrained nor another number of processes can load other checkpoints"
        )
