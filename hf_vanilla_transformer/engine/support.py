"""Which models the engine knows: the paper's, with exactly its modules and shapes."""

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from .. import modeling_vanilla_transformer as modeling
from . import torch_private

HEAD = modeling.VanillaTransformerForConditionalGeneration

# A hook without effect on decoding, by the file and the name of its code: it collects outputs where they are asked for.
HARMLESS_HOOK = (output_capturing.__file__, "output_capturing_hook")

# Activations that treat each element by itself, so that it makes no difference how positions are laid out.
ACTIVATION_NAMES = (
    "relu", "relu6", "relu2", "gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh",
    "gelu_accurate", "hardswish", "leaky_relu", "linear", "mish", "quick_gelu", "sigmoid", "silu", "swish", "tanh",
)  # fmt: skip
# Settings of modules that the engine takes from the configuration, or can't have.
MODULE_SETTINGS = ("head_dim", "value_head_dim", "is_causal", "max_norm")


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
    """Says why the engine can't be attached to a model, with these options of `attach`, or None if it can."""
    return next(filter(None, _reasons(model, compute_type, allow_autocast)), None)


def _reasons(model: PreTrainedModel, compute_type: str, allow_autocast: bool) -> Iterator[str | None]:
    """Yields what each check says; the later ones presume that the earlier ones said None."""
    kind = type(model)
    if kind is not HEAD and kind.__name__ == HEAD.__name__ and kind.__module__.startswith("transformers_modules."):
        yield "its class came with the checkpoint; import hf_vanilla_transformer before loading the model"
    if kind is not HEAD:
        yield f"{kind.__name__} is not {HEAD.__name__} itself"
    if getattr(model, "is_quantized", False):
        yield "its weights are quantized"
    if (kernel := model.config._attn_implementation or "eager") not in ("sdpa", "eager"):
        yield f"the attention is {kernel}"
    if model.config.activation_function not in ACTIVATION_NAMES:
        yield f"the activation {model.config.activation_function} may look at more than one element"
    if getattr(model.config, "is_causal", None) is not None:
        yield "the configuration has `is_causal`"
    modules = used_modules(model)
    yield _structure_reason(model, modules)
    for module in modules:
        yield shadowed_reason(module, allow_autocast and module is model)
        yield hook_reason(module)
    yield _parameter_reason(modules)
    yield _type_reason(model, compute_type)


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
        settings, usual = ([getattr(part, name, None) for name in MODULE_SETTINGS] for part in (module, other))
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
        if code is None or (code.co_filename, code.co_name) != HARMLESS_HOOK:
            return f"a {type(module).__name__} has hooks"
    return None


@functools.cache
def _names(kind: type) -> frozenset[str]:
    """Names that an instance may not have attributes of, as these would run in place of the class's."""
    called = {name for base in kind.__mro__ for name, value in vars(base).items() if callable(value)}
    return frozenset(called - {"__class__", "loss_of_targets"}) | {"weight", "bias", "_hf_hook"}


def _parameter_reason(modules: Iterable[nn.Module]) -> str | None:
    kinds = {(type(one), one.dtype, one.layout, one.device) for one in parameters_of(modules)}
    if len(kinds) > 1:
        return "its parameters have several devices or types"
    ((kind, dtype, layout, device),) = kinds
    is_usual = kind is nn.Parameter and dtype.is_floating_point and layout is torch.strided
    if not is_usual or device.type == "meta":
        return f"its parameters are of type {kind.__name__}, {dtype}, {layout} on {device}"
    return None


def _type_reason(model: PreTrainedModel, compute_type: str) -> str | None:
    weight = model.lm_head.weight
    own = str(weight.dtype).removeprefix("torch.")
    if compute_type == "int8" and (weight.device.type, own) != ("cpu", "float32"):
        return f"int8 needs a model in float32 on a CPU, and this one is in {own} on {weight.device.type}"
    if compute_type == "int8" and torch_private.int8_linear() is None:
        return f"int8 needs products of 8 bits, and torch {torch.__version__} lacks them on this machine"
    if compute_type not in ("default", "int8", own):
        return f"its weights are in {own}; load it with dtype={compute_type}, or leave compute_type out"
    return None
