"""Which models the engine knows (the paper's, with exactly its modules and shapes), and how they change meanwhile."""

import copy
import functools
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from operator import is_not

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from .. import modeling_vanilla_transformer as modeling
from . import torch_private

HEAD = modeling.VanillaTransformerForConditionalGeneration
# Settings of modules that the engine takes from the configuration, or can't have.
MODULE_SETTINGS = ("head_dim", "value_head_dim", "is_causal", "max_norm")
# Values of each parameter that are compared. Some writes change nothing else that could be seen: those of fused
# optimizers, of PEFT when it merges adapters, and of `parameter.data.copy_()` for averages of weights.
VALUES_PER_PARAMETER = 16


def unsupported_reason(model: PreTrainedModel, compute_type: str = "default") -> str | None:
    """Says why the engine can't be attached to a model, with this `compute_type`, or None if it can."""
    if (reason := edited_reason(model)) is not None:
        return reason
    if (kernel := model.config._attn_implementation or "eager") not in ("sdpa", "eager"):
        return f"the attention is {kernel}"
    if getattr(model.config, "is_causal", None) is not None:
        return "the configuration has `is_causal`"
    return _weights_reason(_parameters_of(_used_modules(model)), compute_type)


def edited_reason(model: PreTrainedModel) -> str | None:
    """Says why a model isn't this package's, or computes something else than its weights and configuration say."""
    kind = type(model)
    if kind is not HEAD and kind.__name__ == HEAD.__name__ and kind.__module__.startswith("transformers_modules."):
        return "its class came with the checkpoint; import hf_vanilla_transformer before loading the model"
    if kind is not HEAD:
        return f"{kind.__name__} is not {HEAD.__name__} itself"
    if getattr(model, "is_quantized", False):
        return "its weights are quantized"
    modules = _used_modules(model)
    reasons = (_structure_reason(model, modules), *map(_shadowed_reason, modules), *map(_hook_reason, modules))
    return next(filter(None, reasons), None)


def _used_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the modules that decoding with a model runs, and no others."""
    found = [model.model.encoder, model.model.decoder, model.lm_head]
    for parent in found:  # which grows on the way; `modules()` makes names too, and takes several times as long
        found += [child for child in parent._modules.values() if child is not None]
    return [model, model.model, *found]


def _parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return list(dict.fromkeys(one for module in modules for one in module._parameters.values() if one is not None))


def _structure_reason(model: PreTrainedModel, modules: Sequence[nn.Module]) -> str | None:
    """Says where a model isn't what its class makes of its configuration, or None."""
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # no other is looked for
    with torch.device("meta"):
        expected = _used_modules(HEAD(config))
    for module, other in zip_longest(modules, expected, fillvalue=model):
        if _facts(module) != _facts(other) or vars(module).get("config", model.config) is not model.config:
            return f"{type(module).__name__} is not what the configuration says, or not in its place"
    return None


def _facts(module: nn.Module) -> tuple[object, ...]:
    shapes = [None if one is None else one.shape for one in module._parameters.values()]
    return type(module), shapes, [getattr(module, name, None) for name in MODULE_SETTINGS]


def _shadowed_reason(module: nn.Module) -> str | None:
    """Says which attribute of a module runs in place of its class's, or None."""
    names = _names(type(module)).intersection(vars(module))  # type: ignore[arg-type]  # classes are hashable
    if type(module) is HEAD and "_original_forward" in vars(module):  # Accelerate's, with autocast: it isn't called
        names -= {"forward"}
    return f"a {type(module).__name__} has a {min(names)} of its own" if names else None


@functools.cache
def _names(kind: type) -> frozenset[str]:
    """Names that an instance may not have attributes of, as these would run in place of the class's."""
    called = {name for base in kind.__mro__ for name, value in vars(base).items() if callable(value)}
    return frozenset(called - {"__class__", "loss_of_targets"}) | {"weight", "bias", "_hf_hook"}


def _hook_reason(module: nn.Module) -> str | None:
    """Says that a module has hooks, but for transformers' own, which collect outputs where they are asked for."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    is_one = any(getattr(hook, "__module__", None) != output_capturing.__name__ for hook in hooks)
    return f"a {type(module).__name__} has hooks" if is_one else None


def _weights_reason(parameters: Iterable[nn.Parameter], compute_type: str) -> str | None:
    """Says why the weights can't be computed with, or not in this type, or None."""
    kinds = {(type(one), one.dtype, one.layout, one.device) for one in parameters}
    _, dtype, _, device = next(iter(kinds))
    if kinds != {(nn.Parameter, dtype, torch.strided, device)} or not dtype.is_floating_point or device.type == "meta":
        return "its parameters aren't of one floating-point type, on one device"
    own = str(dtype).removeprefix("torch.")
    if compute_type == "int8" and (device.type, own) != ("cpu", "float32"):
        return f"int8 needs a model in float32 on a CPU, and this one is in {own} on {device.type}"
    if compute_type == "int8" and torch_private.int8_linear() is None:
        return f"int8 needs products of 8 bits, and torch {torch.__version__} lacks them on this machine"
    if compute_type not in ("default", "int8", own):
        return f"compute_type is {compute_type!r}; choose one of 'default', {own!r}, 'int8', or load it with that dtype"
    return None


class Snapshot:
    """A model's modules and parameters as they were when its weights were prepared; the model itself isn't held."""

    def __init__(self, model: PreTrainedModel) -> None:
        _, *self.below = modules = _used_modules(model)
        self.parameters = _parameters_of(modules)
        self.parts = [*self.below, *map(type, modules), *self.parameters]
        self.places, self.samples = list(map(_place, self.parameters)), list(map(_sample, self.parameters))
        self.values = torch.cat(self.samples)

    def change(self, model: PreTrainedModel) -> str | None:
        """Says how the model has changed, or None; takes a fraction of a millisecond, and doesn't see everything."""
        modules = _used_modules(model)
        parts = [*modules[1:], *map(type, modules), *_parameters_of(modules)]
        if len(parts) != len(self.parts) or any(map(is_not, parts, self.parts)):
            return "modules or parameters of the model, or their classes, were replaced"
        is_moved = list(map(_place, self.parameters)) != self.places  # samples may then be of memory that has gone
        if is_moved or not torch.allclose(torch.cat(self.samples), self.values, rtol=0, atol=0, equal_nan=True):
            return "weights of the model were changed"
        return next(filter(None, map(_shadowed_reason, modules)), None)

    def obstacle(self, model: PreTrainedModel) -> str | None:
        """Says what keeps the engine from this call alone, or None: hooks, training mode, autocast."""
        if torch_private.has_global_hooks():
            return "there are hooks on all modules"
        for module in (model, *self.below):
            if (reason := _hook_reason(module)) is not None:
                return reason
            # To torch's other modules it makes no difference; new ones are in training mode until `eval()`.
            kind = type(module)
            if module.training and (kind is nn.Dropout or kind.__module__ == modeling.__name__):
                return f"a {kind.__name__} is in training mode"
        return "autocast is on" if torch.is_autocast_enabled(self.parameters[0].device.type) else None


def _place(parameter: Tensor) -> tuple[int, int]:
    return -1 if parameter.is_inference() else parameter._version, parameter.data_ptr()  # inference counts no versions


def _sample(parameter: Tensor) -> Tensor:
    """Returns a view of some values of a parameter as they lie in memory: (16,), or fewer of a small one."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    # The last value is among them, and so are values of many columns: the step is seldom a multiple of the width.
    step = max((reach - 1) // (VALUES_PER_PARAMETER - 1), 1)
    return parameter.detach().as_strided((reach,), (1,))[::step][:VALUES_PER_PARAMETER]
