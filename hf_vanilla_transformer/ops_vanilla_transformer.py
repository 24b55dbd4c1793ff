"""Functions of tensors that the model calls; they hold no parameters."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Logits that the fused loss has in memory at a time: 12 MB in float32. But no fewer rows than products are fast with,
# on a CPU and elsewhere.
LOGITS_A_CHUNK = 3_000_000
ROWS_A_CHUNK = (256, 512)

# Whether the backward pass that is running keeps its graph for another one. Not public in torch: where a build hasn't
# got it, it might.
_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def positions_of(attention_mask: Tensor | None, past_length: int | Tensor, x: Tensor) -> Tensor:
    """Numbers the positions of a batch from 0; padding counts for nothing, on whichever side it stands.

    Args:
        attention_mask: Which positions, those of the past included, are no padding: (B, past + T); or a causal mask,
            (B, 1, T, S), whose row for a position sees that position and all before it. None: no padding.
        past_length: Number of positions before these.
        x: The batch, (B, T, d_model).

    Returns:
        Positions, (1 or B, T); those of padding are arbitrary.
    """
    length = x.shape[1]
    if attention_mask is None:
        return (torch.arange(length, device=x.device) + past_length)[None]
    if attention_mask.ndim == 4:
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        return (visible[:, 0].sum(dim=-1) - 1).clamp(min=0)
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -length:]


def shift_right(labels: Tensor, start_token_id: int | None, pad_token_id: int | None) -> Tensor:
    """Makes the decoder's input of its labels: each row's first label is preceded by the start token (3.1).

    Args:
        labels: Target tokens, (B, T), padded with -100 on either side.
        start_token_id: Token that starts a target.
        pad_token_id: Token in place of -100.

    Returns:
        Token ids, (B, T).

    Raises:
        ValueError: One of the two tokens is None.
    """
    if start_token_id is None or pad_token_id is None:
        raise ValueError("Shifting labels right needs `decoder_start_token_id` and `pad_token_id` in the config.")
    real = labels != -100
    first = real & (real.cumsum(dim=-1) == 1)
    first[:, 0] |= ~real.any(dim=-1)  # a row without labels starts too
    shifted = F.pad(labels, (1, -1), value=-100)
    return shifted.masked_fill(shifted == -100, pad_token_id).masked_fill(first, start_token_id)


def left_padding(token_ids: Tensor | None, labels: Tensor | None, config: Any) -> Tensor | None:
    """Finds out which positions of a whole target are padding before its first token.

    Padding after the last token needs no mask, since nothing looks ahead.

    Args:
        token_ids: The decoder's input, (B, T), or None.
        labels: The labels that the input was made of, (B, T), or None.
        config: Has `decoder_start_token_id` and `pad_token_id`.

    Returns:
        A mask, (B, T), False for padding on the left; None where there is none, or where it can't be told from a start
        token.
    """
    if token_ids is None or torch.compiler.is_compiling():
        return None
    pad = config.pad_token_id or 0
    if labels is None and config.decoder_start_token_id == pad:
        return None
    started = (token_ids.ne(pad) if labels is None else labels.ne(-100)).cumsum(dim=-1) > 0
    return None if started.all() else started


def label_smoothed_cross_entropy(
    logits: Tensor | None,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    label_smoothing: float = 0.0,
    hidden: Tensor | None = None,
    projection: nn.Linear | None = None,
    **kwargs: Any,
) -> Tensor:
    """Cross-entropy with eps_ls spread over the whole vocabulary (section 5.4), a mean over target tokens.

    Args:
        logits: (B, T, V); None: they are not wanted, and the loss is that of `projected_cross_entropy`.
        labels: (B, T), -100 where there is no target.
        num_items_in_batch: Targets of the whole batch, of which this may be a part (gradient accumulation, several
            processes); None: those of `labels`.
        label_smoothing: eps_ls.
        hidden: What the logits are made of, (B, T, d_model); needed where they are None.
        projection: The map from `hidden` to the logits, likewise.
        **kwargs: Ignored; transformers hands more to a loss function.

    Returns:
        The loss, in float32 at least; 0 where there is no target.

    Raises:
        IndexError: A label is outside of the vocabulary (on a CPU).
    """
    if logits is None:
        assert hidden is not None
        assert projection is not None
        return projected_cross_entropy(hidden, projection, labels, num_items_in_batch, label_smoothing)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    labels = labels.to(logits.device).flatten()
    try:
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum", label_smoothing=label_smoothing)
    except IndexError as error:
        raise _outside_vocabulary(labels[labels != -100], logits.shape[-1]) from error
    if num_items_in_batch is None:
        num_items_in_batch = (labels != -100).sum()
    return loss / torch.as_tensor(num_items_in_batch, device=loss.device).clamp(min=1)


def projected_cross_entropy(
    hidden: Tensor,
    projection: nn.Linear,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """What `label_smoothed_cross_entropy(projection(hidden), labels, ...)` is, without ever holding all logits.

    Only real targets are projected, some at a time, and each chunk's gradients are computed with its loss: nothing of
    size (B T, V) is kept, and padding costs nothing. Double backward is not possible.

    Args:
        hidden: The decoder's output, (B, T, d_model).
        projection: To the vocabulary; its weight is (V, d_model).
        labels: (B, T), -100 where there is no target.
        num_items_in_batch: As in `label_smoothed_cross_entropy`.
        label_smoothing: eps_ls.

    Returns:
        The loss in float32 (float64 for such weights); 0 where there is no target.

    Raises:
        IndexError: A label is outside of the vocabulary (on a CPU).
    """
    labels = labels.to(hidden.device)
    real = labels != -100
    hidden, labels = hidden[real], labels[real]  # (N, d_model), (N)
    weight, bias = projection.weight, projection.bias
    if labels.device.type == "cpu" and len(labels) and not 0 <= labels.min() <= labels.max() < len(weight):
        raise _outside_vocabulary(labels, len(weight))
    loss: Tensor = _ProjectedCrossEntropy.apply(hidden, weight, bias, labels, label_smoothing)  # type: ignore[no-untyped-call]
    items = len(labels) if num_items_in_batch is None else num_items_in_batch
    return loss / torch.as_tensor(items, device=loss.device).clamp(min=1)


class _ProjectedCrossEntropy(torch.autograd.Function):
    """The summed loss of N targets: lse(z) - (1 - eps) z_y - eps mean(z), whose gradient is softmax - (smoothed y)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, eps: float) -> Tensor:
        dtype = torch.get_autocast_dtype(hidden.device.type) if _autocasts(hidden) else hidden.dtype
        exact = torch.promote_types(dtype, torch.float32)
        table, vocab_size = weight.to(dtype), len(weight)
        loss = torch.zeros((), dtype=exact, device=hidden.device)
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=exact)
        of_weight = None if len(labels) else torch.zeros_like(weight, dtype=exact)
        grads: list[Any] = [torch.empty_like(hidden, dtype=exact), of_weight, of_bias]
        wanted = any(ctx.needs_input_grad)
        step = max(LOGITS_A_CHUNK // vocab_size, ROWS_A_CHUNK[hidden.device.type != "cpu"])
        with _without_autocast(hidden.device.type):
            for start in range(0, len(labels), step):
                rows, targets = hidden[start : start + step].to(dtype), labels[start : start + step, None]
                logits = _product(rows, table, None if bias is None else bias.to(dtype)).to(exact)
                at_target = logits.gather(1, targets).sum()
                smoothed = (1 - eps) * at_target + eps / vocab_size * logits.sum()
                highest = logits.amax(dim=1)
                probabilities = torch.softmax(logits, dim=1, out=logits)
                # lse(z) is max z - log max p, and the highest of V numbers with sum 1 is never lost to rounding.
                loss += (highest - probabilities.amax(dim=1).log()).sum() - smoothed
                if wanted:
                    gradient = probabilities.sub_(eps / vocab_size)
                    gradient.scatter_add_(1, targets, gradient.new_full(targets.shape, eps - 1))
                    _accumulate(grads, slice(start, start + step), gradient.to(dtype), rows, table)
                    del gradient
                del logits, probabilities  # before there are the next ones
        if wanted:
            grads[1] = grads[1].contiguous()
        ctx.save_for_backward(*grads)
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads, kept = [], torch.compiler.is_compiling() or _keeps_graph()
        for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            if grad is not None:  # that of the weights is as large as they are: scaled where it lies, if it may be
                grad = (grad * grad_output if kept else grad.mul_(grad_output)).to(dtype)
            grads.append(grad)
        return *grads, None, None


def _accumulate(grads: list[Any], rows: slice, gradient: Tensor, hidden: Tensor, table: Tensor) -> None:
    of_hidden, of_weight, of_bias = grads
    of_hidden[rows] = _product(gradient, table.t())
    if of_weight is None or of_weight.dtype == gradient.dtype:
        grads[1] = _gradient_of_weight(gradient, hidden, of_weight).to(of_hidden.dtype)
    else:  # on a CPU, a sum of two types first makes one of them the other's, here of a few rows at a time
        step = 2_048 if hidden.device.type == "cpu" else len(table)
        more = _gradient_of_weight(gradient, hidden)
        for total, part in zip(torch.split(of_weight, step), torch.split(more, step), strict=True):
            total += part
    if of_bias is not None:
        of_bias += gradient.sum(dim=0)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Lets what is inside compute in the types that it is given; where that is so already, at no cost."""
    is_on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()


def _autocasts(x: Tensor) -> bool:
    return x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)


class Dropout(nn.Dropout):
    """Dropout (5.4) whose mask, on a CPU, is drawn from 16 random bits an element: several times as fast there.

    The probability is rounded to a multiple of 2^-16, and what is kept is scaled to match.
    """

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Zeroes each element of `input` with probability p in training and scales the others by 1 / (1 - p).

        With `residual`, of the same shape and type: the sum of both.
        """
        if not self.training or input.device.type != "cpu" or not 0 < self.p < 1 or torch.compiler.is_compiling():
            return super().forward(input) if residual is None else residual + super().forward(input)
        dropped: Tensor = _CheapDropout.apply(input, residual, round(self.p * 65536))  # type: ignore[no-untyped-call]
        return dropped


def add_dropped(x: Tensor, dropout: nn.Module, y: Tensor) -> Tensor:
    """Computes `x + dropout(y)` (3.1 and 5.4), whatever module stands for dropout."""
    adds = type(dropout) is Dropout and _is_untouched(dropout) and (x.dtype, x.shape) == (y.dtype, y.shape)
    added: Tensor = dropout(y, x) if adds else x + dropout(y)
    return added


class _CheapDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, dropped: int) -> Tensor:  # of 65536
        bits = _room(torch.int64, (x.numel() + 3) // 4).random_(-(2**63), None)
        keep = (bits.view(torch.int16)[: x.numel()] >= dropped - 32768).view(x.shape)
        keep = keep.view(torch.int8)  # which becomes floating-point four times as fast
        ctx.save_for_backward(keep)
        ctx.scale, ctx.has_residual = 65536 / (65536 - dropped), residual is not None
        kept = _room(x.dtype, *x.shape).copy_(keep).mul_(x)
        return kept.mul_(ctx.scale) if residual is None else torch.add(residual, kept, alpha=ctx.scale, out=kept)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (keep,) = ctx.saved_tensors
        of_x = keep.to(grad_output.dtype).mul_(grad_output).mul_(ctx.scale)
        return of_x, grad_output if ctx.has_residual else None, None


def _room(dtype: torch.dtype, *shape: int) -> Tensor:
    """Makes room on the CPU for what is needed for a moment, with some to spare.

    Before 2.38, glibc can't give a freed block to the next tensor of the same size: aligning it might take more. Where
    freed memory is kept, such blocks would be lost until their neighbours are freed.
    """
    return torch.empty(math.prod(shape) + 64, dtype=dtype).resize_(shape)


# ---- Layer normalisation ----
# Where a gain is smaller, the input can't be told from the output with the precision that gradients need.
SMALLEST_INVERTIBLE_GAIN = 0.01


class LayerNorm(nn.LayerNorm):
    """Layer normalisation which, in training on a CPU, keeps its output for the gradients, not its input.

    The output is kept anyway, by the map behind it; the input is computed from it: x = (y - b) / w * sigma + mu.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalises (..., d_model) over the last dimension."""
        if not self._is_invertible(input):
            return super().forward(input)
        normed: Tensor = _LayerNormOfOutput.apply(input, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        return normed

    def _is_invertible(self, x: Tensor) -> bool:
        if not torch.is_grad_enabled() or x.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        if any(type(one) not in (nn.Parameter, Tensor) or one.dtype != x.dtype for one in (self.weight, self.bias)):
            return False
        return x.dtype.itemsize >= 4 and bool(self.weight.detach().abs().min() >= SMALLEST_INVERTIBLE_GAIN)


class _LayerNormOfOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, reciprocal = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(y, mean, reciprocal, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        y, mean, reciprocal, weight, bias = ctx.saved_tensors
        x = (y - bias).div_(weight).div_(reciprocal).add_(mean)
        wanted = list(ctx.needs_input_grad[:3])
        statistics = (weight.shape, mean, reciprocal, weight, bias)
        return *torch.ops.aten.native_layer_norm_backward(grad_output, x, *statistics, wanted), None


# ---- Linear maps ----
# Not public in torch: where a build hasn't got it, F.linear does.
ONEDNN_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)

# torch's own products are MKL's, which is ahead of oneDNN on Intel's processors and uses narrower vectors on others.
_processor: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
MKL_IS_FASTEST = "Intel" in _processor.get("cpu_name", "") and bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]


def _is_for_onednn(x: Tensor) -> bool:
    """Tells whether oneDNN multiplies: on a CPU in float32, unless MKL is faster."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and ONEDNN_LINEAR is not None and not MKL_IS_FASTEST


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Computes x W^T + b, or max(0, x W^T + b): (N, out) of (N, in), (out, in) and (out)."""
    if not _is_for_onednn(x):
        y = F.linear(x, weight, bias)
        return y.relu_() if relu else y
    if not weight.is_contiguous() and not weight.t().is_contiguous():  # gaps in memory make it a thousand times slower
        weight = weight.contiguous()
    y = ONEDNN_LINEAR(x, weight, bias, "relu" if relu else "none", [], "")
    return y


# oneDNN needs a transposed copy of one of the two matrices, which doesn't pay where both are narrow.
WIDTH_FOR_ONEDNN_GRADIENT = 768


def _gradient_of_weight(gradient: Tensor, x: Tensor, so_far: Tensor | None = None) -> Tensor:
    """Computes G^T x: (out, in) of (N, out) and (N, in); it may lie in memory as its transpose does.

    With the gradient of earlier rows, `so_far`, which may be overwritten: the sum of both.
    """
    is_narrow = max(gradient.shape[1], x.shape[1]) < WIDTH_FOR_ONEDNN_GRADIENT
    if not _is_for_onednn(x) or not len(x) or is_narrow:
        return gradient.t() @ x if so_far is None else so_far.addmm_(gradient.t(), x)
    gradient, x = gradient.contiguous(), x.contiguous()
    # oneDNN is faster with the narrower one as its input.
    is_transposed = gradient.shape[1] > x.shape[1]
    left, right = (x.t(), gradient.t()) if is_transposed else (gradient.t(), x.t())
    if so_far is None:
        product = _product(left, right)
    else:
        product = ONEDNN_LINEAR(left, so_far.t() if is_transposed else so_far, right, None, "add")
    return product.t() if is_transposed else product


def _is_plain(module: nn.Module) -> bool:
    """Tells whether a map is nothing but its weights: no adapter, hook, sharding or other type has to be asked."""
    parameters = [module.weight] if module.bias is None else [module.weight, module.bias]
    return (
        type(module) is nn.Linear
        and all(type(parameter) in (nn.Parameter, Tensor) for parameter in parameters)
        and _is_untouched(module)
    )


def _is_untouched(module: nn.Module) -> bool:
    """Tells whether calling a module runs its type's forward and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(hooks) and "forward" not in vars(module)


def linear(module: nn.Module, x: Tensor, activation: nn.Module | None = None) -> Tensor:
    """Computes `module(x)`, or `activation(module(x))`: in training, a ReLU is part of the product."""
    if activation is None:
        return project(x, module)[0]
    if type(activation) is not nn.ReLU or not _is_untouched(activation) or not _is_fused(module):
        return activation(linear(module, x))
    biases = [] if module.bias is None else [module.bias]
    return _FusedLinear.apply(x, 1, True, module.weight, *biases)[0]  # type: ignore[no-untyped-call]


def project(x: Tensor, *maps: nn.Module) -> tuple[Tensor, ...]:
    """Computes `tuple(map(x) for map in maps)`, in training as one product where all of them are plain linear maps.

    Args:
        x: What they have in common, (..., in).
        *maps: The maps, all of them with a bias or none.

    Returns:
        Their outputs, (..., out) each.
    """
    if not _is_fused(*maps):
        return tuple(one(x) for one in maps)
    biases = [one.bias for one in maps if one.bias is not None]
    return _FusedLinear.apply(x, len(maps), False, *(one.weight for one in maps), *biases)  # type: ignore[no-untyped-call]


def _is_fused(*maps: nn.Module) -> bool:
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and all(_is_plain(one) for one in maps)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """Makes one matrix of several with equally many rows; of neighbouring columns without a copy."""
    if len(parts) == 1:
        return parts[0]
    first, (*offsets, width) = parts[0], accumulate((part.shape[1] for part in parts), initial=0)
    start, memory = first.storage_offset(), (_storage_of(first), first.stride())
    are_neighbours = first.stride(1) == 1 and all(
        part.storage_offset() == start + offset and (_storage_of(part), part.stride()) == memory
        for part, offset in zip(parts, offsets, strict=True)
    )
    return first.as_strided((len(first), width), first.stride()) if are_neighbours else torch.cat(parts, dim=1)


def _storage_of(x: Tensor) -> int:
    """Identifies the memory that a tensor is a view of; fake tensors have one too."""
    return x.untyped_storage()._cdata


class _FusedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, relu: bool, *parameters: Tensor) -> tuple[Tensor, ...]:
        dtype = torch.get_autocast_dtype(x.device.type) if _autocasts(x) else x.dtype
        weights = [weight.to(dtype) for weight in parameters[:number]]
        biases = [bias.to(dtype) for bias in parameters[number:]]
        bias = _joined(biases) if biases else None
        with _without_autocast(x.device.type):
            y = _product(x.to(dtype).flatten(0, -2), _joined(weights), bias, relu)
        ctx.save_for_backward(x, y if relu else None, *weights)  # which are joined twice rather than kept
        ctx.sizes, ctx.dtypes = [len(one) for one in weights], [one.dtype for one in parameters]
        return tuple(y.view(*x.shape[:-1], y.shape[-1]).split_with_sizes(ctx.sizes, dim=-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, positive, *weights = ctx.saved_tensors
        parts = [grad.reshape(-1, size) for grad, size in zip(grads, ctx.sizes, strict=True)]
        gradient = _side_by_side(parts)
        if positive is not None:
            gradient = torch.ops.aten.threshold_backward(gradient, positive, 0)
        with _without_autocast(x.device.type):
            of_x = None
            if ctx.needs_input_grad[0]:
                of_x = _product(gradient, _joined(weights).t()).view(x.shape).to(x.dtype)
            if not any(ctx.needs_input_grad[3:]):  # frozen
                return of_x, None, None, *(None for _ in ctx.dtypes)
            of_weight = _gradient_of_weight(gradient, x.to(gradient.dtype).flatten(0, -2))
        of_parameters = list(of_weight.split_with_sizes(ctx.sizes))
        if len(ctx.dtypes) > len(parts):
            of_parameters += gradient.sum(dim=0).split_with_sizes(ctx.sizes)
        return of_x, None, None, *(one.to(dtype) for one, dtype in zip(of_parameters, ctx.dtypes, strict=True))


# ---- Padding ----
# Below this share of padding, leaving it out costs more than it spares.
WORTH_PACKING = 0.1


class Packing:
    """Which positions of a batch are none of padding, so that what is computed of each by itself can leave that out.

    Args:
        real: True where there is no padding, (B, T); None: nothing is left out.
    """

    def __init__(self, real: Tensor | None = None) -> None:
        self.places = None if real is None else real.flatten().nonzero().squeeze(1)  # (N,)
        self.shape = None if real is None else real.shape

    @classmethod
    def of(cls, mask: Tensor | None, **kwargs: Any) -> "Packing":
        """Leaves the padding out where that pays.

        Args:
            mask: 0 for padding, (B, T); None: there is none.
            **kwargs: What the caller was asked for; hidden states and attention weights are wanted with their padding.

        Returns:
            How to do it. On an accelerator nothing is left out: finding the places would have to wait for the device.
        """
        shown = kwargs.get("output_hidden_states") or kwargs.get("output_attentions")
        if mask is None or mask.ndim != 2 or mask.device.type != "cpu" or shown or torch.compiler.is_compiling():
            return cls()
        real = mask != 0
        return cls(real if 0 < real.float().mean() < 1 - WORTH_PACKING else None)

    def pack(self, x: Tensor) -> Tensor:
        """Takes the real positions out of (B, T, d): (N, d); or returns it as it is."""
        return x if self.places is None else x.flatten(0, 1).index_select(0, self.places)

    def unpack(self, x: Tensor) -> Tensor:
        """Puts (N, d) back into its places: (B, T, d), 0 at padding; or returns it as it is."""
        if self.places is None or self.shape is None:
            return x
        rows = x.new_zeros(self.shape.numel(), x.shape[-1])
        return rows.index_copy_(0, self.places, x).view(*self.shape, -1)

    def heads(self, x: Tensor, head_dim: int) -> Tensor:
        """Unpacks what was projected for h heads, (N or B, T, h * head_dim): (B, h, T, head_dim)."""
        x = self.unpack(x)
        return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


NOT_PACKED = (Packing(), Packing())  # of the queries' and of the keys' sequence


def up_to_last(labels: Tensor) -> Tensor:
    """Tells which positions of a target have a label at or behind them, (B, T): what comes after is padding."""
    return labels.ne(-100).flip(-1).cumsum(dim=-1).flip(-1) > 0


def look_up(embedding: nn.Embedding, token_ids: Any, embeddings: Tensor | None) -> Tensor:
    """Looks token ids up, unless their embeddings are given.

    Args:
        embedding: The table, (V, d_model).
        token_ids: Tensor (B, T), or None.
        embeddings: (B, T, d_model), or None.

    Returns:
        Embeddings, (B, T, d_model).

    Raises:
        ValueError: Both are given or neither.
        IndexError: An id is outside of the vocabulary (on a CPU).
    """
    if (token_ids is None) == (embeddings is None):
        raise ValueError(
            "Encoder and decoder each need exactly one of token ids and embeddings. The decoder's ids are "
            "`decoder_input_ids` (the target shifted right), made of `labels` where they are given; with the Trainer's "
            "`label_smoothing_factor`, use `DataCollatorForSeq2Seq(tokenizer, model=model)`."
        )
    if embeddings is not None:
        return embeddings
    try:
        return embedding(token_ids)
    except IndexError as error:
        raise _outside_vocabulary(token_ids, embedding.num_embeddings) from error


def _outside_vocabulary(token_ids: Tensor, vocab_size: int) -> IndexError:
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    return IndexError(
        f"Token id {outside[0].item()} is outside of the vocabulary of {vocab_size} tokens, 0 to {vocab_size - 1}. "
        "Do tokenizer and model belong together? Compare `len(tokenizer)` with `config.vocab_size` (and "
        "`config.decoder_vocab_size`), or call `model.resize_token_embeddings(len(tokenizer))` after adding tokens."
    )


# On a CPU, torch's sdpa is made for long sentences: up to so many scores a head and sentence, eq. 1 as it stands trains
# faster.
SCORES_OF_SHORT_SENTENCES = 32 * 32


def attention_kernel(
    module: Any,
    query: Tensor,
    key: Tensor,
    mask: Any,
    is_cross: bool,
    output_attentions: bool | None = False,
    **kwargs: Any,
) -> tuple[str, Any]:
    """Names the implementation of eq. 1 to take: the configuration's, where it can do what is asked for.

    Args:
        module: The attention, with its configuration, `head_dim` and `value_head_dim`.
        query: (B, h, T, d_k).
        key: (B, h, S, d_k).
        mask: As transformers makes it for the configuration's implementation.
        is_cross: Whether the keys are another sequence's than the queries.
        output_attentions: Whether weights are asked for.
        **kwargs: Ignored.

    Returns:
        Its name, and the mask in its form.

    Raises:
        ValueError: Flash attention can't have values wider than keys.
    """
    name = module.config._attn_implementation or "eager"
    if name == "sdpa" and (output_attentions or _trains_on_short_sentences(module, query, key)):
        return "eager", mask  # sdpa has no weights to show, and its masks are understood
    if "flash" in name and module.value_head_dim > module.head_dim:
        raise ValueError(f'{name} needs d_v <= d_k (`value_head_dim`, `head_dim`); use attn_implementation="sdpa".')
    if "flash" in name and is_cross and mask is not None:
        return "sdpa", mask[:, None, None, :].bool()  # there, transformers would unpad queries by the keys' mask
    return name, mask


def _trains_on_short_sentences(module: Any, query: Tensor, key: Tensor) -> bool:
    # Not by whether gradients are wanted: where layers are computed a second time for them, both times have to agree.
    if not module.training or query.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return query.shape[2] * key.shape[2] <= SCORES_OF_SHORT_SENTENCES


def on_cpu(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a CPU compute what is configured to be sdpa's faster than torch's sdpa does, with the same result.

    Short sentences are trained head by head (`_ShortAttention`), and bfloat16 is computed in float32, since torch's
    backward pass takes seven times as long otherwise.
    """

    def attend_on_cpu(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        if q.device.type != "cpu" or module.config._attn_implementation != "sdpa":
            return attend(module, q, k, v, mask, **kwargs)
        is_plain = not kwargs.get("output_attentions") and not kwargs.get("dropout")
        is_plain = is_plain and (mask is None or mask.dtype == torch.bool)
        kernel = _attend_in_short_sentences if is_plain and _trains_on_short_sentences(module, q, k) else attend
        if q.dtype != torch.bfloat16:
            return kernel(module, q, k, v, mask, **kwargs)
        mask = mask.float() if mask is not None and mask.is_floating_point() else mask
        with _without_autocast("cpu"):
            heads, weights = kernel(module, q.float(), k.float(), v.float(), mask, **kwargs)
        return heads.to(q.dtype), weights

    return attend_on_cpu


def _attend_in_short_sentences(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    if mask is None and module.is_causal and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
    heads: Tensor = _ShortAttention.apply(query, key, value, mask, scaling)  # type: ignore[no-untyped-call]
    return heads, None


class _ShortAttention(torch.autograd.Function):
    """Eq. 1, one batched product for each head: each reads its operands where they lie, so that none is copied.

    query (B, h, T, d_k), key (B, h, S, d_k), value (B, h, S, d_v), mask (1 or B, 1 or h, T, S), False where nothing may
    be looked at -> (B, T, h, d_v); a query that may look at nothing gets zeros.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        batch, heads, length, _ = query.shape
        shares = query.new_empty(heads, batch, length, key.shape[2])
        for head, scores in enumerate(shares):
            torch.baddbmm(scores, query[:, head], key[:, head].mT, beta=0, alpha=scaling, out=scores)
        _softmax_of_short_rows(shares, None if mask is None else ~mask.transpose(0, 1))
        found = _room(query.dtype, heads, batch, length, value.shape[3])
        for head, rows in enumerate(found):
            torch.bmm(shares[head], value[:, head], out=rows)
        ctx.save_for_backward(query, key, value, shares)
        ctx.scaling = scaling
        return found.permute(1, 2, 0, 3).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, shares = ctx.saved_tensors
        of_scores, scale = torch.empty_like(shares), ctx.scaling
        for head, rows in enumerate(of_scores):
            torch.baddbmm(rows, gradient[:, :, head], value[:, head].mT, beta=0, alpha=scale, out=rows)
        of_scores.sub_((of_scores * shares).sum(dim=-1, keepdim=True)).mul_(shares)  # the softmax's gradient
        of_query, of_key, of_value = _room_for_gradients(query, key, value)
        for head, (of_score, share) in enumerate(zip(of_scores, shares, strict=True)):
            of_query[:, head] = torch.bmm(of_score, key[:, head])
            of_key[:, head] = torch.bmm(of_score.mT, query[:, head])
            of_value[:, head] = torch.bmm(share.mT, gradient[:, :, head])
        return of_query, of_key, of_value, None, None


def _softmax_of_short_rows(scores: Tensor, hidden: Tensor | None) -> None:
    """Turns scores (..., S) into their softmax, 0 where hidden: torch's own takes ten times as long for so few."""
    if hidden is not None:
        scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)
    scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    if hidden is not None:
        scores.masked_fill_(hidden, 0.0)
    scores.div_(scores.sum(dim=-1, keepdim=True).clamp_(min=1))  # the highest alone is 1; 0: all of a row are hidden


def _room_for_gradients(*tensors: Tensor) -> list[Tensor]:
    """Makes room for tensors' gradients that lie in memory as they do: parts of one product are one piece again."""
    pieces: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        pieces.setdefault(_storage_of(tensor), []).append(tensor)
    rooms = {}
    for place, parts in pieces.items():
        size = parts[0].untyped_storage().nbytes() // parts[0].itemsize
        are_apart = len({part.storage_offset() for part in parts}) == len(parts)
        is_whole = are_apart and sum(part.numel() for part in parts) == size
        rooms[place] = parts[0].new_empty(size) if is_whole else None
    return [
        torch.empty_like(tensor)
        if (room := rooms[_storage_of(tensor)]) is None
        else room.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        for tensor in tensors
    ]


# ---- The vocabulary ----
class VocabularyResizing:
    """Resizes the embeddings of both stacks and the output projection; for a model, before `PreTrainedModel`."""

    def _resize_token_embeddings(self: Any, *size: Any) -> nn.Module:
        stacks = [self.get_encoder(), self.get_decoder()]
        return self._resize_vocabulary_of(stacks if self.config.decoder_vocab_size is None else stacks[:1], *size)

    def resize_decoder_token_embeddings(self: Any, *size: Any) -> nn.Module:
        """Resizes a target vocabulary of its own; arguments as those of `resize_token_embeddings`."""
        if self.config.decoder_vocab_size is None:
            raise ValueError("Source and target have one vocabulary here: call `resize_token_embeddings` instead.")
        embeddings = self._resize_vocabulary_of([self.get_decoder()], *size)
        self.config.decoder_vocab_size = embeddings.num_embeddings
        self.tie_weights()
        return embeddings

    def _resize_vocabulary_of(self: Any, stacks: list[Any], *size: Any) -> Any:
        for stack in stacks:
            stack.embed_tokens = embeddings = self._get_resized_embeddings(stack.embed_tokens, *size)
        if self.get_decoder() in stacks and (head := self.get_output_embeddings()) is not None:
            self.set_output_embeddings(self._get_resized_lm_head(head, embeddings.num_embeddings))
        return stacks[0].embed_tokens


__all__ = [
    "NOT_PACKED",
    "Dropout",
    "LayerNorm",
    "Packing",
    "VocabularyResizing",
    "add_dropped",
    "attention_kernel",
    "label_smoothed_cross_entropy",
    "left_padding",
    "linear",
    "look_up",
    "on_cpu",
    "positions_of",
    "project",
    "projected_cross_entropy",
    "shift_right",
    "up_to_last",
]
