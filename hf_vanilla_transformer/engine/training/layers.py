"""The paper's layers, computed in training by fused functions and without padding, from the same parameters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ...modeling_vanilla_transformer import (
    PostNormResidual,
    PreNormResidual,
    VanillaTransformerAttention,
    VanillaTransformerDecoderLayer,
    VanillaTransformerEncoderLayer,
    VanillaTransformerFeedForward,
    eager_attention,
)
from .functions import add_dropout, fused_linear, without_autocast
from .packing import Packing


@dataclass(eq=False)
class Shortcuts:
    """What was checked for one call of a model, handed down to its layers as the keyword `shortcuts`.

    Attributes:
        layers: Those that may be computed by fused functions.
        last_layers: Of each stack the last one, which puts padding back.
        fuses_loss: Whether the output projection and the loss may be computed together.
        source: Which source positions are computed.
        target: Which target positions are computed.
    """

    layers: frozenset[nn.Module] = frozenset()
    last_layers: frozenset[nn.Module] = frozenset()
    fuses_loss: bool = False
    source: Packing = field(default_factory=Packing)
    target: Packing = field(default_factory=Packing)
    _memory: tuple[Tensor, Tensor] | None = None

    def applies(self, layer: Any, *inputs: Tensor) -> bool:
        """Tells whether a layer may be computed by fused functions, with inputs of the type of its parameters."""
        return layer in self.layers and all(
            type(x) is Tensor and x.dtype == layer.final_layer_norm.weight.dtype for x in inputs
        )

    def packed_memory(self, memory: Tensor) -> Tensor:
        """Packs the encoder's output, (B, S, d_model), once for all layers of the decoder."""
        if self._memory is None or self._memory[0] is not memory:
            self._memory = (memory, self.source.pack(memory))
        return self._memory[1]


class _CopiedAsPlain:
    """A layer whose copies, by pickle or deepcopy, are of the paper's class again."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind: Any = type(self)
        return _new, (PLAIN_LAYERS.get(kind, kind),), vars(self)


def _new(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


class FastEncoderLayer(_CopiedAsPlain, VanillaTransformerEncoderLayer):
    """The encoder's layer, by fused functions where `shortcuts` says that it may."""

    def forward(self, x: Tensor, mask: Any, shortcuts: Shortcuts | None = None, **kwargs: Any) -> Tensor:
        """Maps (B, S, d_model), or (N, d_model) without padding, to the same shape; the last layer to the former."""
        if shortcuts is None or not shortcuts.applies(self, x):
            return super().forward(x, mask, **kwargs)
        own = shortcuts.source
        x = own.pack(x)
        x = _residual(self.self_attn_layer_norm, x, lambda x: _attention(self.self_attn, x, x, mask, own, own))
        x = _residual(self.final_layer_norm, x, lambda x: _feed_forward(self.feed_forward, x))
        return own.unpack(x) if self in shortcuts.last_layers else x


class FastDecoderLayer(_CopiedAsPlain, VanillaTransformerDecoderLayer):
    """The decoder's layer, by fused functions where `shortcuts` says that it may."""

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        mask: Any,
        cross: Any,
        past_key_values: Any = None,
        shortcuts: Shortcuts | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Maps (B, T, d_model), or (N, d_model) without padding, to the same shape; the last layer to the former."""
        if shortcuts is None or past_key_values is not None or not shortcuts.applies(self, x, memory):
            return super().forward(x, memory, mask, cross, past_key_values, **kwargs)
        own, source = shortcuts.target, shortcuts.source
        x, memory, other = own.pack(x), shortcuts.packed_memory(memory), self.encoder_attn
        x = _residual(self.self_attn_layer_norm, x, lambda x: _attention(self.self_attn, x, x, mask, own, own))
        x = _residual(self.encoder_attn_layer_norm, x, lambda x: _attention(other, x, memory, cross, own, source))
        x = _residual(self.final_layer_norm, x, lambda x: _feed_forward(self.feed_forward, x))
        return own.unpack(x) if self in shortcuts.last_layers else x


FAST_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    VanillaTransformerEncoderLayer: FastEncoderLayer,
    VanillaTransformerDecoderLayer: FastDecoderLayer,
}
PLAIN_LAYERS = {fast: plain for plain, fast in FAST_LAYERS.items()}


def _residual(norm: PostNormResidual, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    if type(norm) is PreNormResidual:
        return add_dropout(norm.dropout, sublayer(nn.LayerNorm.forward(norm, x)), x)
    return nn.LayerNorm.forward(norm, add_dropout(norm.dropout, sublayer(x), x))


def _feed_forward(module: VanillaTransformerFeedForward, x: Tensor) -> Tensor:
    if type(module.activation) is nn.ReLU:
        (hidden,) = fused_linear(x, module.fc1, relu=True)
    else:
        hidden = module.activation(*fused_linear(x, module.fc1))
    return fused_linear(add_dropout(module.dropout, hidden), module.fc2)[0]


def _attention(
    module: VanillaTransformerAttention, x: Tensor, memory: Tensor, mask: Any, queries: Packing, keys: Packing
) -> Tensor:
    """Attends from x to memory, which may be x itself; both are packed, and so is what is returned."""
    if memory is x:
        query, key, value = fused_linear(x, module.q_proj, module.k_proj, module.v_proj)
    else:
        (query,), (key, value) = fused_linear(x, module.q_proj), fused_linear(memory, module.k_proj, module.v_proj)
    query, key = queries.split(query, module.head_dim), keys.split(key, module.head_dim)
    heads = _attend(module, query, key, keys.split(value, module.value_head_dim), mask)  # (B, T, h, d_v)
    return fused_linear(queries.pack(heads.flatten(2)), module.out_proj)[0]


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Computes eq. 1 by what the model is configured to use."""
    if module.config._attn_implementation != "sdpa":
        return _by_interface(eager_attention, module, query, key, value, mask)
    if query.dtype != torch.bfloat16:
        return _by_interface(sdpa_attention_forward, module, query, key, value, mask)
    # torch's backward pass takes seven times as long in bfloat16.
    mask = mask.float() if mask is not None and mask.is_floating_point() else mask
    with without_autocast():
        floats = (one.float() for one in (query, key, value))
        return _by_interface(sdpa_attention_forward, module, *floats, mask).to(query.dtype)


def _by_interface(attend: Callable[..., Any], module: Any, *tensors: Any) -> Tensor:
    dropout = module.attention_dropout if module.training else 0.0
    heads: Tensor = attend(module, *tensors, scaling=module.scaling, dropout=dropout)[0]
    return heads
