"""Seq2SeqTrainer with FSDP2 as Accelerate has it, for models with tied weights and code of their own."""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import Seq2SeqTrainer

from ..checkpoints.headers import tensors_in
from ..errors import CheckpointError
from .options import RecipeError


class ShardingTrainer(Seq2SeqTrainer):
    """Seq2SeqTrainer that trains this package's models with FSDP2 too, and loads no other model's weights."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled:
            raise RecipeError("DeepSpeed isn't supported; FSDP2 does the same (docs/scaling.md)")
        if self.is_fsdp_enabled:
            plugin = self.accelerator.state.fsdp_plugin
            if plugin.fsdp_version != 2 or "FULL_STATE_DICT" not in str(plugin.state_dict_type):
                raise RecipeError(
                    "write `fsdp_version: 2` and `fsdp_state_dict_type: FULL_STATE_DICT` into Accelerate's config; the "
                    "Trainer saves no model that from_pretrained can load in other ways"
                )
            share_embedding_module(self.model)

    @property
    def tied(self) -> set[str]:
        """Names of weights that checkpoints have under another name."""
        return {*getattr(self.model, "all_tied_weights_keys", ())}

    @property
    def unsaved(self) -> set[str]:
        """Names of weights that checkpoints don't have."""
        return {*(getattr(self.model, "_keys_to_ignore_on_save", None) or ())} - self.tied

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Loads weights, and refuses those of another model, where the Trainer would only warn of missing ones."""
        if hasattr(self.model, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        files = {file for file, _ in tensors_in(Path(resume_from_checkpoint)).values()}
        weights: dict[str, Any] = {name: value for file in files for name, value in load_file(file).items()}
        if self.is_fsdp_enabled:  # Accelerate's own loading fails for tied weights
            options = StateDictOptions(full_state_dict=True, strict=False)
            found = set_model_state_dict(self.model, weights, options=options)
        else:
            found = self.model.load_state_dict(weights, strict=False)
        if wrong := [*({*found.missing_keys} - self.tied - self.unsaved), *found.unexpected_keys]:
            raise CheckpointError(f"the checkpoint is of another model: only one of the two has {wrong[0]}")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Saves; with FSDP as the class it was: FSDP's would bring its own code, and each tied weight once more."""
        own = type(self.model)
        if isinstance(self.model, FSDPModule):
            self.model.__class__ = own.__bases__[-1]
            state_dict = {name: value for name, value in (state_dict or {}).items() if name not in self.tied}
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.model.__class__ = own


def share_embedding_module(model: nn.Module) -> None:
    """Replaces embeddings that share their matrix by one module, in place.

    FSDP needs all users of a matrix in one group, and Accelerate puts the model's input and output embeddings into one.
    """
    shared = model.get_input_embeddings()  # type: ignore[operator]
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Embedding) and child.weight is shared.weight:
                setattr(parent, name, shared)
