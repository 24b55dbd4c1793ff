"""Puts the shortcuts of a training step into a model, and takes them out again."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ...modeling_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    eager_attention,
    label_smoothed_cross_entropy,
)
from .loss import projected_cross_entropy
from .packing import SDPA_IN_FLOAT32, CompileOptions, PackedForward

_Model = VanillaTransformerForConditionalGeneration
_INTERFERING = ("forward", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def training_shortcuts(model: nn.Module, compiled: CompileOptions | None = None) -> Iterator[None]:
    """Trains with shortcuts: the same loss and gradients, in less memory and, in bfloat16, less time.

    Inside, on a CPU and in training mode,

    - the loss is computed in chunks, where it alone is asked for (`skip_logits=True`), the loss function is the paper's
      and `lm_head` a plain `nn.Linear`: no adapter, parametrization, hook or `forward` of its own;
    - attention by "sdpa" is computed in float32 where it would be in bfloat16.

    On every device, the model takes packed batches (`data.packing`); on CUDA their loss is computed in chunks too, and
    their attention by FlexAttention in place of "sdpa". `compiled` has options of `torch.compile` for the layers and
    the loss of packed batches; None: they aren't compiled.

    Everything else is the model's own code. Hooks on all modules and replaced functions or classes of torch and
    transformers aren't noticed. Copies that are made inside keep the shortcuts. May be nested. `model` is the paper's
    model, or a module that contains one; subclasses and others are left as they are.
    """
    with _switched(model, True, compiled):
        yield


@contextmanager
def paused_shortcuts(model: nn.Module) -> Iterator[None]:
    """Takes the shortcuts out for a while; a model without shortcuts is left as it is."""
    with _switched(model, False):
        yield


@contextmanager
def _switched(model: nn.Module, on: bool, compiled: CompileOptions | None = None) -> Iterator[None]:
    before = None if on else loss_of_targets
    models = [one for one in model.modules() if type(one) is _Model and _own_loss(one) is before]
    changed = {one: vars(one.model).get("forward", PackedForward(one, compiled)) for one in models}
    for one, forward in changed.items():
        _switch(one, on, forward)
    try:
        yield
    finally:
        for one, forward in changed.items():
            _switch(one, not on, forward)


def _own_loss(model: _Model) -> object:
    method = vars(model).get("loss_of_targets")
    return getattr(method, "__func__", method)


def _switch(model: _Model, on: bool, forward: object) -> None:
    before, after = ("sdpa", SDPA_IN_FLOAT32) if on else (SDPA_IN_FLOAT32, "sdpa")
    if model.config._attn_implementation == before:
        model.config._attn_implementation = after
    if on:
        model.loss_of_targets = MethodType(loss_of_targets, model)  # type: ignore[method-assign]
    elif "loss_of_targets" in vars(model):
        del model.loss_of_targets
    if isinstance(forward, PackedForward) and on:  # and not somebody's own
        model.model.forward = forward  # type: ignore[method-assign]
    elif isinstance(vars(model.model).get("forward"), PackedForward):
        del model.model.forward


def loss_of_targets(self: _Model, hidden: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    """Computes the loss of labelled positions, of (B, T, d_model) and (B, T), in chunks if that is possible."""
    forward = vars(self.model).get("forward")
    packed = forward if isinstance(forward, PackedForward) and "encoder_attention_mask" in kwargs else None
    is_parted = (hidden.is_cpu or packed) and _can_be_parted(self, hidden)
    if not (self.training and torch.is_grad_enabled() and is_parted):
        return _Model.loss_of_targets(self, hidden, labels, **kwargs)
    items, eps = kwargs.get("num_items_in_batch"), kwargs.get("label_smoothing", 0.0)
    chunk = packed.loss_of_chunk if packed and not (hidden.is_cpu and packed.compiled is None) else None
    return projected_cross_entropy(hidden, self.lm_head, labels, items, eps, chunk)


def _can_be_parted(model: _Model, hidden: Tensor) -> bool:
    """Tells whether the loss is the paper's, of a projection that is nothing but its weights."""
    head, state = model.lm_head, vars(model.lm_head)
    if type(head) is not nn.Linear or any(map(state.get, _INTERFERING)) or torch.compiler.is_compiling():
        return False
    has_weights = all(type(one) is nn.Parameter and one.dtype == hidden.dtype for one in head.parameters())
    return has_weights and model.loss_function is label_smoothed_cross_entropy


def _sdpa_in_float32(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | BlockMask | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Computes eq. 1 by sdpa, on a CPU in float32, as its backward pass takes longer in bfloat16; or by blocks."""
    if isinstance(mask, BlockMask):
        return flex_attention_forward(module, query, key, value, mask, **kwargs)
    if kwargs.get("output_attentions"):
        return eager_attention(module, query, key, value, mask, **kwargs)
    if not (query.is_cpu and query.dtype == torch.bfloat16 and torch.is_grad_enabled()):
        return sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    mask = mask.float() if mask is not None and mask.is_floating_point() else mask
    with torch.autocast("cpu", enabled=False):
        heads, weights = sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask, **kwargs)
    return heads.to(query.dtype), weights


AttentionInterface.register(SDPA_IN_FLOAT32, _sdpa_in_float32)
AttentionMaskInterface.register(SDPA_IN_FLOAT32, sdpa_mask)
