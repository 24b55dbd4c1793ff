"""Puts the shortcuts of a training step into a model, and takes them out again.

Inside of `with training_shortcuts(model):`, the layers whose class is exactly the paper's get a subclass's `forward`,
and before each call of the model it is checked, in less than a millisecond, what may be computed in which way:

- in training mode, with gradients, on a CPU; no compiler, transformation, mode or hook on all modules is active, and no
  function that the shortcuts stand for was replaced (`surroundings_reason`);
- a layer only if its modules are exactly the paper's, without hooks, adapters, parametrizations or overrides
  (`eligibility`); others are computed as always, beside those that are eligible;
- without padding only if the loss alone is asked for (`skip_logits=True`) and every layer is eligible, so that whatever
  else looks into the model sees (B, T, d_model);
- the projection and the loss together only if `lm_head` is a plain linear map and the loss the paper's.

Loss and gradients are those of the plain model up to rounding; dropout draws other random numbers. What can't be
noticed is a kernel replaced under torch's dispatcher. Gradients of gradients raise an error.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ...modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, label_smoothed_cross_entropy
from ..support import KERNELS, is_at_home, surroundings_reason
from .eligibility import is_eligible, is_plain_linear, may_leave_padding_out, takes_keywords
from .layers import FAST_LAYERS, PLAIN_LAYERS, Shortcuts
from .loss import projected_cross_entropy
from .packing import Packing, up_to_last

_Model = VanillaTransformerForConditionalGeneration
_FORWARD = _Model.forward
_ARGUMENTS = tuple(inspect.signature(_FORWARD).parameters)[1:-1]  # without self and **kwargs
_UNSUPPORTED = ("encoder_outputs", "past_key_values", "inputs_embeds", "decoder_inputs_embeds", "use_cache")
_OUTPUTS = ("output_attentions", "output_hidden_states")
_KNOWN = {*_ARGUMENTS, *_OUTPUTS, "num_items_in_batch", "return_dict"}

_lock = threading.RLock()
_installations: dict[nn.Module, "_Installation"] = {}


@contextmanager
def training_shortcuts(model: nn.Module) -> Iterator[None]:
    """Trains with shortcuts: the same loss and gradients, in less time and memory on a CPU.

    May be nested, and used by several threads: the last to leave takes the shortcuts out. Copies of the model that are
    made inside are computed as always.

    Args:
        model: The paper's model, or a module that contains one; others are left as they are.
    """
    with ExitStack() as stack:
        for head in _heads_of(model):
            stack.enter_context(_used(head, 1, 0))
        yield


@contextmanager
def paused_shortcuts(model: nn.Module) -> Iterator[None]:
    """Takes the shortcuts out for a while: every module has its own class then, and no hook or attribute of ours.

    Args:
        model: As for `training_shortcuts`; one without shortcuts is left as it is.
    """
    with ExitStack() as stack:
        for head in _heads_of(model):
            stack.enter_context(_used(head, 0, 1))
        yield


def _heads_of(model: nn.Module) -> list[_Model]:
    return [module for module in model.modules() if isinstance(module, _Model)]


@contextmanager
def _used(model: _Model, users: int, pauses: int) -> Iterator[None]:
    """Counts who wants the shortcuts in a model, and who wants them out."""
    with _lock:
        installation = _installations.setdefault(model, _Installation(model))
        installation.count(users, pauses)
    try:
        yield
    finally:
        with _lock:
            installation.count(-users, -pauses)
            if not (installation.users or installation.pauses):
                _installations.pop(model, None)


class _Installation:
    """The shortcuts of one model, in it or not."""

    def __init__(self, model: _Model) -> None:
        self.model, self.users, self.pauses = model, 0, 0
        self.remove: Callable[[], None] | None = None

    def count(self, users: int, pauses: int) -> None:
        """Changes the numbers of users and pauses, and puts the shortcuts in or takes them out accordingly."""
        self.users, self.pauses = self.users + users, self.pauses + pauses
        is_wanted = self.users > 0 and self.pauses == 0
        if is_wanted and self.remove is None:
            self.remove = _put_in(self.model)
        elif not is_wanted and self.remove is not None:
            self.remove()
            self.remove = None


def _put_in(model: _Model) -> Callable[[], None]:
    """Puts the shortcuts in; returns what takes them out."""
    layers = [layer for layer in model.modules() if type(layer) in FAST_LAYERS]
    for layer in layers:
        layer.__class__ = FAST_LAYERS[type(layer)]
    handle = model.register_forward_pre_hook(_add_shortcuts, with_kwargs=True)
    if "loss_of_targets" not in vars(model) and type(model).loss_of_targets is _Model.loss_of_targets:
        model.loss_of_targets = MethodType(loss_of_targets, model)  # type: ignore[method-assign]

    def remove() -> None:
        for layer in layers:
            layer.__class__ = PLAIN_LAYERS.get(type(layer), type(layer))
        handle.remove()
        _remove_loss(model)

    return remove


def _remove_loss(model: nn.Module) -> None:
    if getattr(vars(model).get("loss_of_targets"), "__func__", None) in (loss_of_targets, _Model.loss_of_targets):
        del model.loss_of_targets


def _remove_from_copy(model: nn.Module) -> None:
    """Removes what a copy of a model with shortcuts has of them; its layers are the paper's already."""
    for key in [key for key, hook in model._forward_pre_hooks.items() if hook is _add_shortcuts]:
        del model._forward_pre_hooks[key]
        model._forward_pre_hooks_with_kwargs.pop(key, None)
    _remove_loss(model)


def _add_shortcuts(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook before each call of a model: hands the shortcuts of this call down as a keyword."""
    if torch.compiler.is_compiling():
        return None
    if model not in _installations:
        _remove_from_copy(model)
        return None
    shortcuts = shortcuts_of_call(model, dict(zip(_ARGUMENTS, args, strict=False)) | kwargs)
    return None if shortcuts is None else (args, kwargs | {"shortcuts": shortcuts})


def shortcuts_of_call(model: _Model, arguments: dict[str, Any]) -> Shortcuts | None:
    """Finds out what may be computed in which way.

    Args:
        model: The model, with shortcuts in it.
        arguments: Those of its call, by name.

    Returns:
        What each layer may do; None: nothing but the plain formulas.
    """
    if not (model.training and torch.is_grad_enabled()) or surroundings_reason() is not None:
        return None
    if not (_is_supported(model, arguments) and _runs_papers_forward(model) and takes_keywords(model)):
        return None
    stacks, dtype = (model.model.encoder, model.model.decoder), next(model.parameters()).dtype
    layers = [layer for stack in stacks for layer in stack.layers]
    eligible = frozenset(layer for layer in layers if is_eligible(layer, model.config, dtype))
    has_papers_loss = model.loss_function is label_smoothed_cross_entropy
    shortcuts = Shortcuts(eligible, fuses_loss=has_papers_loss and is_plain_linear(model.lm_head, dtype))
    is_recomputed = any(layer.gradient_checkpointing for layer in layers)  # at another time than its neighbours
    packs = arguments.get("skip_logits") and len(eligible) == len(set(layers)) and not is_recomputed
    if packs and may_leave_padding_out(model, dtype):
        _leave_padding_out(shortcuts, arguments)
        shortcuts.last_layers = frozenset(stack.layers[-1] for stack in stacks if len(stack.layers))
    return shortcuts


def _is_supported(model: _Model, arguments: dict[str, Any]) -> bool:
    """Tells whether a call asks for nothing but a loss or logits of token ids."""
    config, is_given = model.config, {name for name, value in arguments.items() if value is not None}
    if not is_given <= _KNOWN or any(arguments.get(name) for name in _OUTPUTS) or is_given & {*_UNSUPPORTED}:
        return False
    if any(getattr(config, name, None) for name in _OUTPUTS) or config._attn_implementation not in KERNELS:
        return False
    # Every keyword reaches the loss, which has to know what to do with ours.
    if arguments.get("skip_logits") and "labels" in is_given:
        return getattr(vars(model).get("loss_of_targets"), "__func__", None) is loss_of_targets
    return model.loss_function is label_smoothed_cross_entropy


def _runs_papers_forward(model: _Model) -> bool:
    """Tells whether calling a model runs the paper's `forward`, maybe as accelerate wraps it for bfloat16."""
    forward = vars(model).get("forward", type(model).forward)
    if forward is _FORWARD:
        return True
    chain = [forward]
    while (inner := getattr(chain[-1], "__wrapped__", None)) is not None:
        chain.append(inner)
    functions = [getattr(one, "__func__", one) for one in chain]
    return _FORWARD in functions and all(is_at_home(one.__code__) for one in functions if hasattr(one, "__code__"))


def _leave_padding_out(shortcuts: Shortcuts, arguments: dict[str, Any]) -> None:
    source, mask, labels = (arguments.get(name) for name in ("input_ids", "attention_mask", "labels"))
    if mask is not None and _are_alike(mask, source):
        shortcuts.source = Packing.where_worthwhile(mask != 0)
    target, target_mask = arguments.get("decoder_input_ids"), arguments.get("decoder_attention_mask")
    is_causal = target_mask is None or target_mask.ndim == 2  # others may let a position look ahead
    if labels is not None and _are_alike(labels, labels if target is None else target) and is_causal:
        shortcuts.target = Packing.where_worthwhile(up_to_last(labels))


def _are_alike(one: Any, other: Any) -> bool:
    are_matrices = all(isinstance(x, Tensor) and x.ndim == 2 and x.is_cpu for x in (one, other))
    return are_matrices and one.shape == other.shape


def loss_of_targets(
    self: Any, hidden: Tensor, labels: Tensor, shortcuts: Shortcuts | None = None, **kwargs: Any
) -> Tensor:
    """Computes the loss of what has a label, of (B, T, d_model) and (B, T): without all logits where that may be."""
    if shortcuts is None or not shortcuts.fuses_loss or hidden.dtype != self.lm_head.weight.dtype:
        return type(self).loss_of_targets(self, hidden, labels, **kwargs)
    items, eps = kwargs.get("num_items_in_batch"), kwargs.get("label_smoothing", 0.0)
    return projected_cross_entropy(hidden, self.lm_head, labels, items, eps)


__all__ = ["paused_shortcuts", "training_shortcuts"]
