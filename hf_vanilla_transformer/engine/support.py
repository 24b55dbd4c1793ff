"""Which models the engine knows: the paper's, with exactly its modules and shapes."""

import copy
import functools
import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from .. import modeling_vanilla_transformer as modeling
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from . import torch_private

HEAD = modeling.VanillaTransformerForConditionalGeneration
KERNELS = ("sdpa", "eager")  # of eq. 1, `attn_implementation`

# Hooks without effect on decoding, by the file and the name of their code.
HARMLESS_HOOKS = {
    (output_capturing.__file__, "output_capturing_hook"),
    (sys.modules["transformers.modeling_utils"].__file__, "make_inputs_require_grads"),
}

# Activations that treat each element by itself, so that it makes no difference how positions are laid out.
ACTIVATION_NAMES = (
    "relu", "relu6", "relu2", "gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh",
    "gelu_accurate", "hardswish", "leaky_relu", "linear", "mish", "quick_gelu", "sigmoid", "silu", "swish", "tanh",
)  # fmt: skip
# Settings of modules that the engine takes from the configuration, or can't have.
SETTINGS = ("head_dim", "value_head_dim", "is_causal", "max_norm")


# ---- What a model is made of ----
def tree(module: nn.Module) -> list[nn.Module]:
    """Returns a module and all below it; `modules()` takes several times as long, as it makes their names too."""
    found = [module]
    for parent in found:  # which grows on the way
        found += [child for child in parent._modules.values() if child is not None]
    return found


def used_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the modules that decoding with a model runs, and no others."""
    return [model, model.model, *tree(model.model.encoder), *tree(model.model.decoder), *tree(model.lm_head)]


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters of modules, each once."""
    found = (value for module in modules for value in module._parameters.values() if value is not None)
    return list({id(one): one for one in found}.values())


# ---- What can't be supported ----
def unsupported_reason(
    model: PreTrainedModel, compute_type: str = "default", *, allow_autocast: bool = False
) -> str | None:
    """Says why the engine can't be attached to a model, or None if it can.

    Args:
        model: A model.
        compute_type: As for `attach`.
        allow_autocast: As for `attach`.
    """
    return _model_reason(model, allow_autocast) or _type_reason(model, compute_type)


def _model_reason(model: PreTrainedModel, allow_autocast: bool) -> str | None:
    kind = type(model)
    if kind is not HEAD and kind.__name__ == HEAD.__name__ and kind.__module__.startswith("transformers_modules."):
        return "its class came with the checkpoint; import hf_vanilla_transformer before loading the model"
    if kind is not HEAD:
        return f"{kind.__name__} is not {HEAD.__name__} itself"
    if getattr(model, "is_quantized", False):
        return "its weights are quantized"
    modules = used_modules(model)
    reason = _configuration_reason(model) or _structure_reason(model, modules)
    for module in modules if reason is None else ():
        reason = reason or shadowed_reason(module, allow_autocast and module is model) or hook_reason(module)
    return reason or _parameter_reason(modules)


def _structure_reason(model: PreTrainedModel, modules: Sequence[nn.Module]) -> str | None:
    """Says where a model isn't what its class makes of its configuration, or None."""
    with torch.device("meta"):
        expected = used_modules(HEAD(copy.deepcopy(model.config)))
    for module, other in zip_longest(modules, expected):
        kind = type(module)
        if kind is not type(other):
            return f"{kind.__name__} is not one of the model's own modules, or not in its place"
        shapes, others = (
            [None if one is None else one.shape for one in part._parameters.values()] for part in (module, other)
        )
        settings, usual = ([getattr(part, name, None) for name in SETTINGS] for part in (module, other))
        if shapes != others or settings != usual or vars(module).get("config", model.config) is not model.config:
            return f"a {kind.__name__} is another one than the configuration says"
    return None


def shadowed_reason(module: nn.Module, allow_autocast: bool = False) -> str | None:
    """Says which attribute of a module runs in place of its class's, or None; Accelerate's `forward` may be allowed."""
    attributes, run = vars(module), _names(type(module))  # type: ignore[arg-type]  # classes are hashable
    if run.isdisjoint(attributes):  # the usual case, in a microsecond
        return None
    names = run & attributes.keys()
    if allow_autocast and "_original_forward" in attributes:
        names -= {"forward"}
    return f"a {type(module).__name__} has a {min(names)} of its own" if names else None


def hook_reason(module: nn.Module) -> str | None:
    """Says that a module has hooks that could see or change what it computes, or None."""
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        code = getattr(hook, "__code__", None)
        if code is None or (code.co_filename, code.co_name) not in HARMLESS_HOOKS:
            return f"a {type(module).__name__} has hooks"
    return None


@functools.cache
def _names(kind: type) -> frozenset[str]:
    """Names that an instance may not have attributes of, as these would run in place of the class's."""
    called = {name for base in kind.__mro__ for name, value in vars(base).items() if callable(value)}
    return frozenset(called - {"__class__", "loss_of_targets"}) | {"weight", "bias", "_hf_hook"}


def _configuration_reason(model: PreTrainedModel) -> str | None:
    config = model.config
    if type(config) is not VanillaTransformerConfig:
        return f"{type(config).__name__} is another configuration"
    kernel = config._attn_implementation or "eager"
    if kernel not in KERNELS:
        return f"the attention is {kernel}"
    if config.activation_function not in ACTIVATION_NAMES:
        return f"the activation {config.activation_function} may look at more than one element"
    return "the configuration has `is_causal`" if getattr(config, "is_causal", None) is not None else None


def _parameter_reason(modules: Iterable[nn.Module]) -> str | None:
    first, *others = parameters_of(modules)
    if first.device.type == "meta" or not first.dtype.is_floating_point:
        return f"its parameters are {first.dtype} on {first.device}"
    for one in (first, *others):
        if type(one) is not nn.Parameter or one.layout is not torch.strided or not one.numel():
            return f"its parameters are of type {type(one).__name__}, {one.layout}, {tuple(one.shape)}"
        if one.dtype is not first.dtype or one.device != first.device:
            return "its parameters have several devices or types"
    return None


def _type_reason(model: PreTrainedModel, compute_type: str) -> str | None:
    weight = model.lm_head.weight
    own = str(weight.dtype).removeprefix("torch.")
    if compute_type == "int8" and (weight.device.type, own) != ("cpu", "float32"):
        return f"int8 needs a model in float32 on a CPU, and this one is in {own} on {weight.device.type}"
    if compute_type == "int8" and not torch_private.has_int8():
        return f"int8 needs products of 8 bits, and torch {torch.__version__} lacks them on this machine"
    if compute_type not in ("default", "int8", own):
        return f"its weights are in {own}; load it with dtype={compute_type}, or leave compute_type out"
    return None
