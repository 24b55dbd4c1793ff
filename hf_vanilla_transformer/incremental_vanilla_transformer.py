"""Encoder and decoder of section 3.1 for `generate()`: what the model's modules compute, the decoder step by step.

A step of decoding multiplies few rows with large matrices, so what counts is how weights lie in memory, how often they
are read, and how many operators are called. Here queries, keys and values are one product, the cross keys and values
of all layers another one, taken once a sentence whatever the number of beams, products take their ReLU and residual
along, caches lie ready and are never copied for a beam that goes on in its place, and for a sentence by itself the
projections of cross-attention are multiplied into its keys and values.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .ops_vanilla_transformer import MKL_IS_FASTEST, look_up, positions_of

# How a step is computed: with weights as they are (packed for oneDNN on a CPU that has it), with weights of 8 bits, or
# by machine code that PyTorch's compiler makes for this model and this machine (`CompiledDecoder`).
COMPUTE_TYPES = ("default", "int8", "compiled")

# Positions that caches have room for at first; it doubles when they are full.
FIRST_POSITIONS = 32

# Sources that are shorter are filled up with hidden positions on a CPU: below the size of its vectors, torch's softmax
# takes up to ten times as long.
SHORTEST_SOURCE = 16

# Packing weights is no public function of torch's: where a build hasn't got it, plain products do.
HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")

# Who multiplies by a weight in float32: MKL, up to so many elements; from there on, up to so many, either, as the rows
# say; then oneDNN. With few rows, MKL takes a third to nine tenths as long as oneDNN: up to so many multiplications, 64
# rows for a weight of 256 x 256, or on Intel's processors one row for 37,000 x 512.
ELEMENTS_FOR_MKL = 2**22 if MKL_IS_FASTEST else 0
ELEMENTS_FOR_BOTH = math.inf if MKL_IS_FASTEST else 2**16
MULTIPLICATIONS_FOR_MKL = 20_000_000 if MKL_IS_FASTEST else 2**22

# 7 bits of inputs in place of 8, as the 16-bit sums of processors without VNNI overflow otherwise.
REDUCE_RANGE = not getattr(torch.cpu, "_is_vnni_supported", lambda: False)()

# What is known to compute nothing else than is computed here.
KNOWN_FILES = ("modeling_vanilla_transformer", "ops_vanilla_transformer")
KNOWN_MODULES = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleList)
ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
KNOWN_KERNELS = ("eager", "sdpa", "flex_attention")


# ---- Linear maps for few rows ----
class Linear(Protocol):
    """x W^T + b, then a ReLU or a residual: x is (rows, in), the result (rows, out)."""

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor: ...


class PlainLinear:
    """The map with its parameters as they are."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        return _finish(F.linear(x, self.weight, self.bias), residual, relu)


class PackedLinear:
    """The map with a copy of its weight in oneDNN's own order, which products of few rows read several times faster."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        operator = torch.ops.mkldnn._linear_pointwise
        self.map, self.map_and_add = operator.default, operator.binary
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight), bias

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        if residual is not None:
            return self.map_and_add(x, residual, self.weight, self.bias, "add")
        return self.map(x, self.weight, self.bias, "relu" if relu else "none", [], "")


class ColumnLinear(PlainLinear):
    """The map with a copy of its weight by columns, which is what MKL reads fastest."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.t().contiguous().t(), bias)


class MixedLinear:
    """A map that takes longer to start in oneDNN than MKL needs for few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.elements = weight.numel()
        self.of_few_rows, self.of_many_rows = ColumnLinear(weight, bias), PackedLinear(weight, bias)

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        are_few = len(x) * self.elements <= MULTIPLICATIONS_FOR_MKL
        return (self.of_few_rows if are_few else self.of_many_rows)(x, residual, relu)


class Int8Linear:
    """The map with 8-bit weights, scaled for each output, and inputs rounded to 8 bits as they come (FBGEMM)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.float()
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        no_shift = torch.zeros(len(weight), dtype=torch.long)
        with warnings.catch_warnings():  # that torch means to replace these types, without saying yet by what
            warnings.simplefilter("ignore", UserWarning)
            quantized = torch.quantize_per_channel(weight, scale, no_shift, axis=0, dtype=torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(quantized, None if bias is None else bias.float())

    def __call__(self, x: Tensor, residual: Tensor | None = None, relu: bool = False) -> Tensor:
        """Maps (rows, in) to (rows, out)."""
        if relu:
            return torch.ops.quantized.linear_relu_dynamic(x, self.packed, reduce_range=REDUCE_RANGE)
        return _finish(torch.ops.quantized.linear_dynamic(x, self.packed, reduce_range=REDUCE_RANGE), residual, False)


def _finish(y: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    y = y if residual is None else y.add_(residual)
    return y.relu_() if relu else y


def _kind_of_linear(compute_type: str, weight: Tensor) -> Callable[[Tensor, Tensor | None], Linear]:
    if compute_type == "int8":
        return Int8Linear
    return _by_mkl_or_onednn if _can_be_packed(weight) else PlainLinear


def _by_mkl_or_onednn(weight: Tensor, bias: Tensor | None) -> Linear:
    if weight.dtype != torch.float32 or weight.numel() > ELEMENTS_FOR_BOTH:
        return PackedLinear(weight, bias)
    return (ColumnLinear if weight.numel() <= ELEMENTS_FOR_MKL else MixedLinear)(weight, bias)


def _can_be_packed(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not HAS_ONEDNN or not torch._C._get_mkldnn_enabled():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and _has_fast_bfloat16())


def _has_fast_bfloat16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


# ---- Weights ----
class Weights:
    """What decoding needs of a model, fused and packed.

    Args:
        model: A model for which `why_not` has nothing to say.
        compute_type: One of `COMPUTE_TYPES`.
    """

    def __init__(self, model: Any, compute_type: str = "default") -> None:
        linear = _kind_of_linear(compute_type, model.lm_head.weight)
        self.is_compiled = compute_type == "compiled"
        of_steps = PlainLinear if self.is_compiled else linear  # the compiler packs by itself
        self.encoder = StackWeights(model.get_encoder(), linear, model.config.encoder_attention_heads)
        self.decoder = StackWeights(model.get_decoder(), of_steps, model.config.decoder_attention_heads)
        self.lm_head = _fuse(of_steps, model.lm_head)
        self.programs: dict[str, Any] = {}  # of `CompiledDecoder`, which come of:
        self.sources = (model.get_decoder(), model.lm_head)
        crosses = [layer.encoder_attn for layer in model.get_decoder().layers]
        self.memory = _fuse(linear, *(m for cross in crosses for m in (cross.k_proj, cross.v_proj)))


class StackWeights:
    """What the encoder's and the decoder's stack have in common."""

    def __init__(self, stack: Any, linear: Callable[[Tensor, Tensor | None], Linear], heads: int) -> None:
        self.embed_tokens, self.positions = stack.embed_tokens, stack.embed_positions
        self.scale, self.pre_norm = stack.config.embedding_scale, stack.config.norm_position == "pre"
        self.layers = [LayerWeights(layer, linear) for layer in stack.layers]
        self.last_norm: Callable[[Tensor], Tensor] = _norm(stack.layer_norm)
        self.dtype = stack.embed_tokens.weight.dtype
        attention = stack.layers[0].self_attn
        self.heads, self.key_dim, self.value_dim = heads, attention.head_dim, attention.value_head_dim
        self.qkv_sizes = [heads * self.key_dim, heads * self.key_dim, heads * self.value_dim]

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Adds the scaled embeddings of tokens to those of their positions (3.4, 3.5)."""
        return torch.add(positions, look_up(self.embed_tokens, tokens, None), alpha=self.scale)


class LayerWeights:
    """What a step needs of a layer."""

    def __init__(self, layer: Any, linear: Callable[[Tensor, Tensor | None], Linear]) -> None:
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
    """Takes embedded tokens through the layers of a stack (section 3.1).

    Args:
        stack: The encoder's or the decoder's weights.
        x: (rows, d_model).
        attend: Of a layer's number and its input, the heads' output side by side, (rows, h d_v).
        attend_to_memory: Of a layer's number, its input and a residual: attention and residual, (rows, d_model).

    Returns:
        The stack's output, (rows, d_model).
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


def _fuse(linear: Callable[[Tensor, Tensor | None], Linear], *modules: nn.Linear, scaling: float = 1.0) -> Linear:
    """Makes one map of several that have their input in common: outputs stand side by side, the first one scaled."""
    weights = [module.weight.detach() for module in modules]
    biases = [module.bias.detach() for module in modules if module.bias is not None]
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


_packed: "weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Any, Any, Weights]]]" = weakref.WeakKeyDictionary()


def weights_of(model: nn.Module, compute_type: str = "default") -> Weights:
    """Returns `Weights` of a model: those of the last call, as long as its parameters are what they were.

    Args:
        model: A model for which `why_not` has nothing to say.
        compute_type: One of `COMPUTE_TYPES`.

    Raises:
        ValueError: There is no such compute type, or not for this model's device.
    """
    if compute_type not in COMPUTE_TYPES:
        raise ValueError(f"`compute_type` is {compute_type!r}; choose one of {', '.join(map(repr, COMPUTE_TYPES))}.")
    modules = _tree(model)
    parameters = list(_parameters(modules))
    if compute_type != "default" and (parameters[0].device.type != "cpu" or parameters[0].dtype != torch.float32):
        raise ValueError(
            f'`compute_type="{compute_type}"` needs a model in float32 on a CPU, and this one is in '
            f"{str(parameters[0].dtype).removeprefix('torch.')} on {parameters[0].device.type}; "
            'leave it at "default", or load the model with `dtype=torch.float32`.'
        )
    if any(parameter.is_inference() for parameter in parameters):  # these don't count their versions
        return Weights(model, compute_type)
    known = _packed.setdefault(model, {})
    state = [(parameter.data_ptr(), parameter._version) for parameter in parameters], list(map(id, modules))
    if compute_type in known:
        known_state, samples, weights = known[compute_type]
        # Writing to `parameter.data` counts no version, so a number of each row is compared too.
        if known_state == state and torch.equal(torch.cat(samples[0]), samples[1]):
            return weights
    # One behind the other, so that each column is among them as well; of vectors, all numbers.
    strides = [max(min(parameter.shape) - 1, 1) if parameter.ndim > 1 else 1 for parameter in parameters]
    views = [parameter.detach().flatten()[::stride] for parameter, stride in zip(parameters, strides, strict=True)]
    weights = Weights(model, compute_type)
    known[compute_type] = (state, (views, torch.cat(views)), weights)
    return weights


def why_not(model: Any) -> str | None:
    """Says what keeps `IncrementalDecoder` from computing what this model's own modules would, or None."""
    if model.training:
        return "the model is in training mode"
    if torch.compiler.is_compiling():
        return "the call is being compiled"
    if nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]
        return "there are hooks on all modules"
    kernel = model.config._attn_implementation or "eager"
    if kernel not in KNOWN_KERNELS and "flash" not in kernel:
        return f"the attention is {kernel}"
    stacks = (model.get_encoder(), model.get_decoder())
    left_out = [stack.layer_norm for stack in stacks if type(stack.layer_norm) is nn.Identity]
    parts = [model, model.model, *(module for stack in stacks for module in _tree(stack)), model.lm_head]
    modules = [module for module in parts if module not in left_out]
    parameters = list(_parameters(modules))
    reason = None if _is_known(type(model).forward) else "the model's forward is another one"
    reasons = (reason or _what_is_unknown(modules), _what_is_special(modules), _what_is_mixed(parameters))
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is None and torch.is_autocast_enabled(parameters[0].device.type):
        return "autocast is on"
    return reason


def _tree(module: nn.Module) -> list[nn.Module]:
    """A module and all below it; `modules()` takes several times as long, as it makes their names too."""
    found = [module]
    for parent in found:  # which grows on the way
        found += [child for child in parent._modules.values() if child is not None]
    return found


def _parameters(modules: Iterable[nn.Module]) -> Iterator[nn.Parameter]:
    return (value for module in modules for value in module._parameters.values() if value is not None)


def _is_known(function: Any) -> bool:
    """Tells whether a function, and what it wraps, are the model file's or transformers'."""
    path = Path(function.__code__.co_filename)
    is_known = path.stem in KNOWN_FILES or "transformers" in path.parts
    return is_known and (not hasattr(function, "__wrapped__") or _is_known(function.__wrapped__))


def _what_is_unknown(modules: Iterable[nn.Module]) -> str | None:
    for kind in dict.fromkeys(type(module) for module in modules):
        if not (kind in KNOWN_MODULES or kind.__module__.startswith(ACTIVATIONS)) and not _is_own(kind):
            return f"{kind.__name__} is not one of the model's own modules, or its forward is another one"
    return None


def _is_own(kind: type[nn.Module]) -> bool:
    forward = kind.forward.__module__  # of torch's where it is inherited
    is_known = forward.split(".")[-1] in KNOWN_FILES or forward.startswith("torch.nn.modules.")
    return is_known and kind.__module__.split(".")[-1] in KNOWN_FILES


def _what_is_special(modules: Iterable[nn.Module]) -> str | None:
    for module in modules:
        attributes, name = vars(module), type(module).__name__
        hooks = module._forward_hooks or module._forward_pre_hooks
        if (hooks and _is_hooked(module)) or "_hf_hook" in attributes or "forward" in attributes:
            return f"{name} has hooks"
        if module.training and _is_own(type(module)):  # to torch's, it makes no difference
            return f"{name} is in training mode"
        if isinstance(module, nn.LayerNorm) and (module.weight is None or module.bias is None):
            return f"a {name} has no weight or bias"
    return None


def _is_hooked(module: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    # Those with which transformers collects outputs stay there when they have been asked for once.
    return any(hook.__module__ != "transformers.utils.output_capturing" for hook in hooks)


def _what_is_mixed(parameters: Iterable[nn.Parameter]) -> str | None:
    kinds = {(parameter.device, parameter.dtype, type(parameter)) for parameter in parameters}
    device, dtype, kind = next(iter(kinds))
    if len(kinds) > 1:
        return "its parameters have several devices or types"
    if device.type == "meta" or not dtype.is_floating_point or kind is not nn.Parameter:
        return f"its parameters are {dtype} on {device}, of type {kind.__name__}"
    return None


# ---- The encoder ----
def encode(weights: Weights, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Encodes a source.

    Args:
        weights: The model's.
        input_ids: (B, S).
        attention_mask: (B, S), 0 for padding; None: there is none. Each sentence has at least one position.

    Returns:
        The encoder's output, (B, S, d_model); that of padding is arbitrary.
    """
    stack, (batch, length) = weights.encoder, input_ids.shape
    if attention_mask is not None and attention_mask.all():
        attention_mask = None
    positions = stack.positions(positions_of(attention_mask, 0, input_ids), length).to(stack.dtype)
    x = stack.embed(input_ids, positions).flatten(0, 1)  # (B S, d_model)
    mask = None if attention_mask is None else attention_mask[:, None, None].bool()

    def attend(number: int, x: Tensor) -> Tensor:
        parts = stack.layers[number].qkv(x).view(batch, length, -1).split_with_sizes(stack.qkv_sizes, dim=-1)
        query, key, value = (part.view(batch, length, stack.heads, -1).transpose(1, 2) for part in parts)
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=1.0)
        return found.transpose(1, 2).reshape(batch * length, -1)

    return through_layers(stack, x, attend).view(batch, length, -1)


# ---- The decoder, step by step ----
class FoldedAttention:
    """Multi-head attention to the one sentence of a batch, with the projections multiplied into its keys and values.

    softmax(x (W^Q K^T)) (V W^O) is two small products for each step, in place of two of (d_model, d_model) and two for
    each head: less to read, as long as h S <= d_model, and half as many operators.

    Args:
        cross: The module.
        keys: Of the sentence, (h, S, d_k).
        values: (h, S, d_v).
        mask: Added to the scores, (h, S); None: there is no padding.
    """

    def __init__(self, cross: Any, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        self.shape = keys.shape[:2]
        (heads, _, key_dim), value_dim, keys = keys.shape, values.shape[-1], keys * cross.scaling
        query, out = cross.q_proj, cross.out_proj
        self.keys = torch.bmm(keys, query.weight.detach().view(heads, key_dim, -1)).flatten(0, 1)  # (h S, d_model)
        self.values = torch.bmm(values, out.weight.detach().t().view(heads, value_dim, -1)).flatten(0, 1)
        self.bias = None if mask is None else mask.flatten()
        if query.bias is not None:
            bias = torch.bmm(keys, query.bias.detach().view(heads, key_dim, 1)).flatten()
            self.bias = bias if self.bias is None else bias + self.bias
        if out.bias is not None:  # each head's shares sum up to 1
            self.values += out.bias.detach() / heads

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Attends from x, (rows, d_model): residual + attention, (rows, d_model), and the shares, (rows, h, S)."""
        shares = _softmax(F.linear(x, self.keys, self.bias).view(len(x), *self.shape))
        return torch.addmm(residual, shares.flatten(1), self.values), shares


class IncrementalDecoder:
    """A decoder with what it knows of a batch: each row is one hypothesis, and each sentence has equally many rows.

    Args:
        weights: The decoder's weights.
        memory: The encoder's output, (B, S, d_model).
        memory_mask: (B, S), 0 for padding; None: there is none. Each sentence has at least one position.
        beams: Rows that a sentence will have at most. It begins with one.
        keep_attention: Whether `attention` is wanted.
    """

    shapes_memory = True  # whether the source is folded or filled up, as torch's operators have it fastest

    def __init__(
        self,
        weights: Weights,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        beams: int = 1,
        keep_attention: bool = False,
    ) -> None:
        self.weights, self.keep_attention = weights.decoder, keep_attention
        self.lm_head = weights.lm_head
        self.attention: Tensor | None = None  # (rows, S), of the last step: the last layer's, mean of its heads
        self.num_sentences = self.num_rows = len(memory)
        self.length = 0
        stack, dtype = weights.decoder, weights.decoder.dtype
        # (layers, positions, rows, h d_k + h d_v): a step's keys and values are one piece, and so are a row's.
        shape = (len(stack.layers), FIRST_POSITIONS, beams * len(memory), sum(stack.qkv_sizes[1:]))
        self.past = memory.new_empty(shape, dtype=dtype)
        self.position_embeddings = self.past.new_empty(0)  # of `_position`
        self.source_mask = memory.new_ones(memory.shape[:2], dtype=torch.bool)  # (B, S)
        if memory_mask is not None:
            self.source_mask = memory_mask != 0
        is_folded = self.shapes_memory and len(memory) == 1 and stack.heads * memory.shape[1] <= memory.shape[2]
        shortest = SHORTEST_SOURCE if self.shapes_memory and not is_folded and memory.device.type == "cpu" else 0
        self.memory_keys, self.memory_values = self._project(memory.to(dtype), weights.memory, shortest)
        filling = self.memory_keys.shape[3] - memory.shape[1]
        self.memory_bias = None
        if filling or not self.source_mask.all():
            hidden = F.pad(~self.source_mask, (0, filling), value=True)
            bias = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
            self.memory_bias = bias[:, None].expand(-1, stack.heads, -1).contiguous()  # (B, h, S')
        self.folded: list[FoldedAttention] = []
        if is_folded:
            mask = None if self.memory_bias is None else self.memory_bias[0]
            parts = zip(stack.layers, self.memory_keys[:, 0], self.memory_values[:, 0], strict=True)
            self.folded = [FoldedAttention(layer.cross, keys, values, mask) for layer, keys, values in parts]
        self._view()

    def _project(self, memory: Tensor, linear: Linear, shortest: int) -> Iterator[Tensor]:
        """Computes keys and values of all layers: (layers, B, h, S', d_k) and the same with d_v.

        S' is S, or `shortest` where that is more; what isn't of the source is 0.
        """
        weights = self.weights
        batch, length, _ = memory.shape
        layers, heads = len(weights.layers), weights.heads
        fused = linear(memory.flatten(0, 1)).view(batch, length, layers, -1)
        for part in fused.split_with_sizes(weights.qkv_sizes[1:], dim=-1):
            part = part.view(batch, length, layers, heads, -1).permute(2, 0, 3, 1, 4)
            found = part.new_empty(*part.shape[:3], max(length, shortest), part.shape[4])
            found[:, :, :, :length] = part
            found[:, :, :, length:] = 0.0
            yield found

    def _view(self) -> None:
        """Makes the views that a step needs, so that it doesn't have to."""
        sentences, heads = self.num_sentences, self.weights.heads
        self.cross_caches = [
            (keys.flatten(0, 1).transpose(1, 2), values.flatten(0, 1))
            for keys, values in zip(self.memory_keys[:, :sentences], self.memory_values[:, :sentences], strict=True)
        ]  # (B h, d_k, S'), (B h, S', d_v)
        bias = self.memory_bias
        self.cross_bias = None if bias is None else bias[:sentences].view(sentences * heads, 1, -1)

    def step(self, tokens: Tensor) -> Tensor:
        """Goes on by one position.

        Args:
            tokens: The token at this position, of each row: (rows,).

        Returns:
            Logits of the next one, (rows, V).
        """
        weights = self.weights
        self._make_room()
        x = weights.embed(tokens, self._position())
        pasts = list(self._pasts())

        def attend_to_past(number: int, x: Tensor) -> Tensor:
            return self._attend_to_past(pasts[number], weights.layers[number], x)

        return self.lm_head(through_layers(weights, x, attend_to_past, self._attend_to_memory))

    def _make_room(self) -> None:
        """Goes to the next position; where it has no place in the caches, they grow."""
        if self.length == self.past.shape[1]:
            self.past = torch.cat([self.past, torch.empty_like(self.past)], dim=1)
        self.length += 1

    def _position(self) -> Tensor:
        """Returns the embedding of this step's position, (1, d_model): looked up for as many as caches have room."""
        if self.length > len(self.position_embeddings):
            table, room = self.weights.positions, self.past.shape[1]
            room = max(min(room, getattr(table, "num_embeddings", room)), self.length)  # learned ones end somewhere
            found: Tensor = table(torch.arange(room, device=self.past.device), room)
            self.position_embeddings = found.to(self.weights.dtype)
        return self.position_embeddings[self.length - 1 : self.length]

    def _pasts(self) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        """Makes views for each layer: where keys and values of this step belong, and keys and values up to it.

        They are (rows, h d_k + h d_v), (rows, h, length, d_k) and (rows, h, length, d_v).
        """
        past, heads = self.past[:, : self.length, : self.num_rows], self.weights.heads
        parts = past.split_with_sizes(self.weights.qkv_sizes[1:], dim=-1)
        keys, values = (part.view(*part.shape[:-1], heads, -1).permute(0, 2, 3, 1, 4).unbind() for part in parts)
        return zip(past[:, -1].unbind(), keys, values, strict=True)

    def _attend_to_past(self, past: tuple[Tensor, Tensor, Tensor], layer: LayerWeights, x: Tensor) -> Tensor:
        weights, (place, keys, values) = self.weights, past
        query, new = layer.qkv(x).split_with_sizes([weights.qkv_sizes[0], place.shape[1]], dim=-1)
        place.copy_(new)
        query = query.view(self.num_rows, weights.heads, 1, -1)
        return F.scaled_dot_product_attention(query, keys, values, scale=1.0).reshape(self.num_rows, -1)

    def _attend_to_memory(self, number: int, x: Tensor, residual: Tensor) -> Tensor:
        rows, heads, sentences = self.num_rows, self.weights.heads, self.num_sentences
        layer = self.weights.layers[number]
        is_shown = self.keep_attention and number == len(self.weights.layers) - 1
        if self.folded:
            x, shares = self.folded[number](x, residual)
            if is_shown:
                self.attention = shares.mean(dim=1).float()
            return x
        keys, values = self.cross_caches[number]
        # The rows of a sentence are so many queries to the same keys: (B h, rows a sentence, d_k).
        query = layer.cross_query(x).view(sentences, -1, heads, self.weights.key_dim)
        query = query.transpose(1, 2).reshape(sentences * heads, -1, self.weights.key_dim)
        bias = self.cross_bias
        scores = torch.bmm(query, keys) if bias is None else torch.baddbmm(bias, query, keys)  # (B h, ..., S')
        shares = _softmax(scores)
        if is_shown:
            mean = shares.view(sentences, heads, rows // sentences, -1).mean(dim=1).flatten(0, 1).float()
            self.attention = mean[:, : self.source_mask.shape[1]]
        found = torch.bmm(shares, values).view(sentences, heads, -1, self.weights.value_dim)
        return layer.cross_out(found.transpose(1, 2).reshape(rows, -1), residual)

    def move(self, rows: Sequence[int], sentences: Sequence[int]) -> None:
        """Gives each row the past of one of the rows so far, and each sentence the source of one of those so far.

        Only what changes its place is copied.

        Args:
            rows: The old row that each new one continues; equally many for each sentence, in the sentences' order.
            sentences: The old number of each sentence.
        """
        _copy(rows, self.past[:, : self.length], dim=2)
        _copy(sentences, self.memory_keys, self.memory_values, dim=1)
        if self.memory_bias is not None:
            _copy(sentences, self.memory_bias, self.source_mask, dim=0)
        self.source_mask = self.source_mask[: len(sentences)]
        if (len(rows), len(sentences)) != (self.num_rows, self.num_sentences):
            self.num_rows, self.num_sentences = len(rows), len(sentences)
            self._view()


def _softmax(scores: Tensor) -> Tensor:
    if scores.dtype in (torch.float32, torch.float64):
        return torch.softmax(scores, dim=-1)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


def _copy(sources: Sequence[int], *tensors: Tensor, dim: int) -> None:
    """Writes what is at sources[i] of a dimension to i, in place, for each tensor."""
    moves = [(source, target) for target, source in enumerate(sources) if source != target]
    if moves:
        froms, tos = torch.tensor(moves, device=tensors[0].device).unbind(dim=1)
        for tensor in tensors:
            tensor.index_copy_(dim, tos, tensor.index_select(dim, froms))


class EnsembleDecoder:
    """Several decoders that are asked as one: the mean of their probabilities.

    Args:
        decoders: The members, of the same batch.
    """

    def __init__(self, decoders: Sequence[IncrementalDecoder]) -> None:
        self.decoders = decoders

    @property
    def attention(self) -> Tensor | None:
        """The mean of what the members attend to, (rows, S)."""
        kept = [decoder.attention for decoder in self.decoders if decoder.attention is not None]
        return torch.stack(kept).mean(dim=0) if kept else None

    @property
    def source_mask(self) -> Tensor:
        """Which positions of the source are no padding, (B, S)."""
        return self.decoders[0].source_mask

    def step(self, tokens: Tensor) -> Tensor:
        """Goes on by one position with each member: log-probabilities, (rows, V), in float32."""
        found = torch.stack([decoder.step(tokens).float().log_softmax(dim=-1) for decoder in self.decoders])
        return found.logsumexp(dim=0).sub_(torch.tensor(float(len(found))).log())

    def move(self, rows: Sequence[int], sentences: Sequence[int]) -> None:
        """Moves the rows of each member, as `IncrementalDecoder.move`."""
        for decoder in self.decoders:
            decoder.move(rows, sentences)


__all__ = [
    "COMPUTE_TYPES",
    "EnsembleDecoder",
    "IncrementalDecoder",
    "Weights",
    "encode",
    "weights_of",
    "why_not",
]
