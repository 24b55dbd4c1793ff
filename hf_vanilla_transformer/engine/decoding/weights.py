"""A model's weights as decoding needs them: fused, packed, and taken through the layers of section 3.1."""

from collections.abc import Callable
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...integration_vanilla_transformer import outside_vocabulary
from ..torch_private import int8_linear
from .linear import Int8Linear, Linear, linear_map
from .screen import Screen

Maker = Callable[[Tensor, Tensor | None], Linear]  # of weight, (out, in), and bias, (out,)

ELEMENTS_TO_SCREEN = 2**21  # of a projection to a vocabulary, from which a screen is faster than all logits
STEPS_TO_SCREEN = 100  # a screen takes as long to make as it saves in about as many steps
ROWS_TO_SCREEN = 64  # of more, too many tokens may be the best of a row


class Weights:
    """What decoding needs of a supported model: weights that are fused, packed and, if asked, in 8 bits."""

    def __init__(self, model: PreTrainedModel, is_int8: bool = False) -> None:
        self.projection, weight = model.lm_head, model.lm_head.weight
        self.is_int8, self.greedy_steps = is_int8, 0
        self.linear = linear = partial(linear_map, is_int8=is_int8, model_bytes=model.get_memory_footprint())
        self.device, self.vocab_size = weight.device, len(weight)
        self.encoder = StackWeights(model.get_encoder(), linear)
        self.decoder = StackWeights(model.get_decoder(), linear)
        crosses = [layer.encoder_attn for layer in model.get_decoder().layers]
        self.memory = _fuse(linear, *(m for cross in crosses for m in (cross.k_proj, cross.v_proj)))

    @property
    def layouts(self) -> dict[str, str]:
        """Which layout was measured to be the fastest for each of a decoder layer's maps."""
        return {name: repr(one) for name, one in vars(self.decoder.layers[0]).items() if isinstance(one, Linear)}

    @cached_property
    def lm_head(self) -> Linear:
        """The projection to the vocabulary; a greedy search does without, as a rule."""
        return _fuse(self.linear, self.projection)

    def screen_of_step(self, rows: int) -> Screen | None:
        """Returns what finds the most probable tokens of a greedy step faster than all logits do, or None."""
        if rows > ROWS_TO_SCREEN:
            return None
        self.greedy_steps += 1
        return self._screen if self.greedy_steps > STEPS_TO_SCREEN else None

    @cached_property
    def _screen(self) -> Screen | None:
        weight, bias = self.projection.weight.detach(), self.projection.bias
        is_plain = self.device.type == "cpu" and weight.dtype == torch.float32 and not self.is_int8
        if not is_plain or weight.numel() < ELEMENTS_TO_SCREEN or int8_linear() is None:
            return None
        bias = None if bias is None else bias.detach()
        in_8_bits = linear_map(weight, bias, is_int8=True)
        assert isinstance(in_8_bits, Int8Linear), "a weight as large as this is in 8 bits, and in one layout"
        return Screen(weight, bias, in_8_bits, lambda: self.lm_head)


class StackWeights:
    """The weights of the encoder's or of the decoder's stack."""

    def __init__(self, stack: PreTrainedModel, linear: Maker) -> None:
        self.embed_tokens, self.positions = stack.embed_tokens, stack.embed_positions
        self.scale, self.pre_norm = stack.config.embedding_scale, stack.config.norm_position == "pre"
        self.layers = [LayerWeights(layer, linear) for layer in stack.layers]
        self.last_norm: Callable[[Tensor], Tensor] = _norm(stack.layer_norm)
        self.dtype = stack.embed_tokens.weight.dtype
        attention = stack.layers[0].self_attn
        self.key_dim, self.value_dim = attention.head_dim, attention.value_head_dim
        self.heads = heads = len(attention.q_proj.weight) // self.key_dim
        self.qkv_sizes = [heads * self.key_dim, heads * self.key_dim, heads * self.value_dim]

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Adds the scaled embeddings of tokens to those of their positions (3.4, 3.5)."""
        try:
            return torch.add(positions, self.embed_tokens(tokens), alpha=self.scale)
        except IndexError as error:
            raise outside_vocabulary(tokens, self.embed_tokens.num_embeddings) from error

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Computes eq. 1 for heads side by side, with a mask for `scaled_dot_product_attention`.

        Query (B, T, h d_k), its weights scaled, key (B, S, h d_k), value (B, S, h d_v); the result is (B T, h d_v).
        """
        query, key, value = (x.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for x in (query, key, value))
        heads = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0)
        return heads.transpose(1, 2).reshape(heads.shape[0] * heads.shape[2], -1)


class LayerWeights:
    """The weights of a layer."""

    def __init__(self, layer: GradientCheckpointingLayer, linear: Maker) -> None:
        own, network = layer.self_attn, layer.feed_forward
        # 1 / sqrt(d_k) of eq. 1 is taken into the queries' weights.
        self.qkv = _fuse(linear, own.q_proj, own.k_proj, own.v_proj, scaling=own.scaling)
        self.out, self.own_norm = _fuse(linear, own.out_proj), _norm(layer.self_attn_layer_norm)
        if (cross := getattr(layer, "encoder_attn", None)) is not None:
            self.cross_query = _fuse(linear, cross.q_proj, scaling=cross.scaling)
            self.cross_out, self.cross_norm = _fuse(linear, cross.out_proj), _norm(layer.encoder_attn_layer_norm)
            self.cross = cross  # for `FoldedAttention`
        self.fc1, self.fc2 = _fuse(linear, network.fc1), _fuse(linear, network.fc2)
        self.activation = None if isinstance(network.activation, nn.ReLU) else network.activation
        self.last_norm = _norm(layer.final_layer_norm)

    def hidden(self, x: Tensor) -> Tensor:
        """Computes the hidden layer of eq. 2, (rows, d_ff)."""
        return self.fc1(x, relu=True) if self.activation is None else self.activation(self.fc1(x))


def through_layers(
    stack: StackWeights,
    x: Tensor,
    attend: Callable[[int, Tensor], Tensor],
    attend_to_memory: Callable[[int, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Takes embedded tokens, (rows, d_model), through the layers of a stack (section 3.1).

    `attend` gives, for a layer's number and its input, the heads' output side by side, (rows, h d_v);
    `attend_to_memory`, for number, input and residual, attention and residual, (rows, d_model).
    """
    for number, layer in enumerate(stack.layers):
        if stack.pre_norm:
            x = layer.out(attend(number, layer.own_norm(x)), x)
            if attend_to_memory is not None:
                x = attend_to_memory(number, layer.cross_norm(x), x)
            x = layer.fc2(layer.hidden(layer.last_norm(x)), x)
        else:
            x = layer.own_norm(layer.out(attend(number, x), x))
            if attend_to_memory is not None:
                x = layer.cross_norm(attend_to_memory(number, x, x))
            x = layer.last_norm(layer.fc2(layer.hidden(x), x))
    return stack.last_norm(x)


def _fuse(linear: Maker, *modules: nn.Linear, scaling: float = 1.0) -> Linear:
    """Makes one map of several that have their input in common: outputs stand side by side, the first one scaled."""
    weights = [module.weight.detach() for module in modules]
    biases = [module.bias.detach() for module in modules if module.bias is not None]  # of all or of none
    if scaling != 1:
        weights[0], biases[:1] = weights[0] * scaling, [bias * scaling for bias in biases[:1]]
    bias = (torch.cat(biases) if len(biases) > 1 else biases[0]) if biases else None
    return linear(torch.cat(weights) if len(weights) > 1 else weights[0], bias)


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    if isinstance(module, nn.Identity):
        return module
    assert isinstance(module, nn.LayerNorm)
    shape, weight, bias, eps = module.normalized_shape, module.weight.detach(), module.bias.detach(), module.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
