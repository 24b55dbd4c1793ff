"""Notices changes of a model between two calls of `generate()`, in a fraction of a millisecond."""

from operator import is_not

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import modeling_vanilla_transformer as modeling
from . import torch_private
from .support import hook_reason, parameters_of, shadowed_reason, used_modules

# Values of each parameter that are compared. Some writes change nothing else that could be seen: those of fused
# optimizers, of PEFT when it merges adapters, and of `parameter.data.copy_()` for averages of weights.
VALUES_PER_PARAMETER = 16
# Integers of the width of a floating-point type: NaN has to equal NaN.
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Snapshot:
    """A model's modules and parameters as they were when its weights were prepared.

    It holds the parameters and all modules below the model, and not the model itself.
    """

    def __init__(self, model: PreTrainedModel, allow_autocast: bool = False) -> None:
        self.allow_autocast = allow_autocast
        modules = used_modules(model)
        self.below, self.kinds = modules[1:], list(map(type, modules))
        self.parameters = parameters_of(modules)
        self.places = list(map(_place, self.parameters))
        self.samples = list(map(_sample, self.parameters))
        self.values = torch.cat(self.samples)

    def change(self, model: PreTrainedModel) -> str | None:
        """Says how the model has changed, or None if no change is seen.

        Single elements that are written through `.data` or NumPy, and settings of modules, aren't seen.
        """
        modules = used_modules(model)
        if list(map(type, modules)) != self.kinds or any(map(is_not, modules[1:], self.below)):
            return "modules of the model, or their classes, were replaced"
        for module in modules:
            if (reason := shadowed_reason(module, self.allow_autocast and module is model)) is not None:
                return reason
        parameters = parameters_of(modules)
        if len(parameters) != len(self.parameters) or any(map(is_not, parameters, self.parameters)):
            return "parameters of the model were replaced"
        # The last one, as it reads where a parameter may no longer be.
        if list(map(_place, parameters)) != self.places or not torch.equal(torch.cat(self.samples), self.values):
            return "weights of the model were changed"
        return None

    def obstacle(self, model: PreTrainedModel) -> str | None:
        """Says what keeps the engine from this call alone, or None: hooks, training mode, autocast."""
        if torch_private.has_global_hooks():
            return "there are hooks on all modules"
        for module in (model, *self.below):
            if (module._forward_hooks or module._forward_pre_hooks) and (reason := hook_reason(module)) is not None:
                return reason
            # To torch's other modules it makes no difference; new ones are in training mode until `eval()`.
            kind = type(module)
            if module.training and (kind is nn.Dropout or kind.__module__ == modeling.__name__):
                return f"a {kind.__name__} is in training mode"
        return "autocast is on" if torch.is_autocast_enabled(self.parameters[0].device.type) else None


def _place(parameter: Tensor) -> tuple[int, int, torch.dtype]:
    # Tensors made in inference mode count no versions.
    version = -1 if parameter.is_inference() else parameter._version
    return version, parameter.data_ptr(), parameter.dtype


def _sample(parameter: Tensor) -> Tensor:
    """Returns a view of some values of a parameter, as integers: (16,), or fewer where it is small."""
    # As they lie in memory, from the first to the last.
    reach = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    # The last value is among them, and so are values of many columns: the step is seldom a multiple of the width.
    step = max((reach - 1) // (VALUES_PER_PARAMETER - 1), 1)
    values = parameter.detach().as_strided((reach,), (1,))
    return values[::step][:VALUES_PER_PARAMETER].view(INTEGERS[values.element_size()])
