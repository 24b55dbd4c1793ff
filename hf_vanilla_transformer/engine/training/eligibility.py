"""Which layers of a model are nothing but the paper's modules and their parameters."""

from typing import Any

import torch
from torch import Tensor, nn

from ...modeling_vanilla_transformer import (
    LearnedPositions,
    PostNormResidual,
    PreNormResidual,
    VanillaTransformerDecoder,
    VanillaTransformerEncoder,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
)
from ..support import MADE_OF, callable_names, is_harmless
from .layers import FAST_LAYERS, FastDecoderLayer, FastEncoderLayer

_STACK_PARTS = ("embed_tokens", "embed_positions", "dropout", "layer_norm")
# The parts of each class, by name, and the types that they may have.
_PARTS: dict[Any, dict[str, Any]] = MADE_OF | {fast: MADE_OF[plain] for plain, fast in FAST_LAYERS.items()}
_PARAMETERS: dict[type[nn.Module], tuple[str, ...]] = dict.fromkeys(
    (nn.Linear, nn.LayerNorm, PostNormResidual, PreNormResidual), ("weight", "bias")
) | dict.fromkeys((nn.Embedding, LearnedPositions), ("weight",))


def is_untouched(module: Any) -> bool:
    """Tells whether calling a module runs its class's methods and nothing else."""
    state = vars(module)
    if state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return False
    if state["_forward_hooks"] and not all(map(is_harmless, state["_forward_hooks"].values())):
        return False
    return module._compiled_call_impl is None and callable_names(type(module)).isdisjoint(state)  # type: ignore[arg-type]


def is_plain_linear(module: nn.Module, dtype: torch.dtype) -> bool:
    """Tells whether a module is a linear map without an adapter, a hook, a parametrization or weights elsewhere."""
    return type(module) is nn.Linear and _is_plain(module, dtype)


def is_eligible(layer: Any, config: Any, dtype: torch.dtype) -> bool:
    """Tells whether a layer is the paper's, with parameters of a type on the CPU, and nothing else has to be asked."""
    if type(layer) not in FAST_LAYERS.values() or not _is_plain(layer, dtype):
        return False
    attentions = [layer.self_attn] if type(layer) is FastEncoderLayer else [layer.self_attn, layer.encoder_attn]
    return all(one.config is config and _fits_together(one) for one in attentions)


def _is_plain(module: nn.Module, dtype: torch.dtype) -> bool:
    """Tells whether a module is untouched, and has the parameters and parts of its class, which are plain as well."""
    # Two hundred modules are looked at before each call of a model: loops, as generators take three times as long.
    kind, state = type(module), vars(module)
    parts, names = _PARTS.get(kind, {}), _PARAMETERS.get(kind, ())
    children, parameters = state["_modules"], state["_parameters"]
    if len(children) != len(parts) or len(parameters) != len(names) or state["_buffers"] or not is_untouched(module):
        return False
    for name in names:
        if not _is_plain_parameter(parameters.get(name, module), dtype):
            return False
    for name, kinds in parts.items():
        child = children.get(name)
        if type(child) not in kinds or not _is_plain(child, dtype):
            return False
    return kind is not nn.Dropout or not state["inplace"]


def _is_plain_parameter(parameter: Any, dtype: torch.dtype) -> bool:
    if parameter is None:
        return True
    is_tensor = type(parameter) is nn.Parameter or type(parameter) is Tensor
    return is_tensor and parameter.dtype is dtype and parameter.is_cpu and parameter.layout is torch.strided


def _fits_together(attention: Any) -> bool:
    """Tells whether projections have biases or none and as many rows as heads times width, and settings are numbers."""
    if type(attention.scaling) is not float or not isinstance(attention.attention_dropout, (int, float)):
        return False
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    query, key, value = (len(one.weight) for one in projections)
    heads = query // attention.head_dim
    has_heads = (query, key, value) == (heads * attention.head_dim,) * 2 + (heads * attention.value_head_dim,)
    return has_heads and len({one.bias is None for one in projections}) == 1


def takes_keywords(model: Any) -> bool:
    """Tells whether a keyword of the model's call reaches all layers: whether what is between them is the paper's."""
    if not _has_class(model.model, VanillaTransformerModel):
        return False
    encoder, decoder = model.model.encoder, model.model.decoder
    if not (_has_class(encoder, VanillaTransformerEncoder) and _has_class(decoder, VanillaTransformerDecoder)):
        return False
    if not (_has_class(encoder.layers, nn.ModuleList) and _has_class(decoder.layers, nn.ModuleList)):
        return False
    encodes = all(_has_class(layer, FastEncoderLayer) for layer in encoder.layers)
    return encodes and all(_has_class(layer, FastDecoderLayer) for layer in decoder.layers)


def _has_class(module: Any, kind: type[nn.Module]) -> bool:
    """Tells whether a module is of a class and not of a subclass, with the forward of that class."""
    return type(module) is kind and "forward" not in vars(module)


def may_leave_padding_out(model: VanillaTransformerForConditionalGeneration, dtype: torch.dtype) -> bool:
    """Tells whether nothing outside of the layers looks at what is computed of padding."""
    stacks = (model.model.encoder, model.model.decoder)
    parts = [(getattr(stack, name), MADE_OF[type(stack)][name]) for stack in stacks for name in _STACK_PARTS]
    containers = [model.model, *stacks, *(stack.layers for stack in stacks)]
    return (
        all(type(part) in kinds and is_untouched(part) for part, kinds in parts)
        and all(map(is_untouched, containers))
        and all(_is_plain_parameter(stack.embed_tokens.weight, dtype) for stack in stacks)
        and len(model._forward_pre_hooks) == 1  # ours
        and not any((model._forward_hooks, model._backward_hooks, model._backward_pre_hooks))
    )
