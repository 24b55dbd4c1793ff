"""Encoder and decoder of section 3.1 for `generate()`: they compute as the modules do, the decoder step by step.

A step of decoding multiplies few rows with large matrices, so what counts is how weights lie in memory, how often they
are read, and how many operators are called. Here queries, keys and values are one product, the cross keys and values
of all layers another one, taken once a sentence whatever the number of beams, ReLU and residual are fused into the
products, caches are allocated ahead and are never copied for a beam that keeps its place, and for a single sentence the
projections of cross-attention are multiplied into its keys and values.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ...modeling_vanilla_transformer import VanillaTransformerAttention, positions_of
from ...plan_vanilla_transformer import Plan
from .linear import Linear
from .prepared import Prepared
from .search import Bar, Decoder
from .weights import Weights, through_layers

# Positions of a new cache; their number doubles when it is full.
FIRST_POSITIONS = 32


class FoldedAttention:
    """Multi-head attention to the one sentence of a batch, with the projections multiplied into its keys and values.

    softmax(x (W^Q K^T)) (V W^O) is two small products for each step, in place of two of (d_model, d_model) and two for
    each head: less to read, as long as h S <= d_model, and half as many operators.

    Keys are (h, S, d_k), values (h, S, d_v); the mask, (h, S), is added to the scores; None: there is no padding.
    """

    def __init__(self, cross: VanillaTransformerAttention, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
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
        scores = torch.mm(self.keys, x.t()).t()  # faster on some processors than x K^T is
        if self.bias is not None:
            scores = scores + self.bias
        shares = _softmax(scores.reshape(len(x), *self.shape))
        return torch.addmm(residual, shares.flatten(1), self.values), shares


class Packed(Prepared):
    """A model that `unsupported_reason` has nothing against; its weights are fused, packed and, if asked, in 8 bits."""

    def __init__(self, model: PreTrainedModel, is_int8: bool = False) -> None:
        self.weights = Weights(model, is_int8)
        self.device, self.vocab_size, self.is_exact = self.weights.device, self.weights.vocab_size, not is_int8

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Encodes a source, of which each sentence has at least one position; the output of padding is arbitrary."""
        stack, (batch, length) = self.weights.encoder, input_ids.shape
        if attention_mask is not None and attention_mask.all():
            attention_mask = None
        positions = stack.positions(positions_of(attention_mask, 0, input_ids), length).to(stack.dtype)
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()

        def attend(number: int, x: Tensor) -> Tensor:
            qkv = stack.layers[number].qkv(x).view(batch, length, -1)
            query, key, value = qkv.split_with_sizes(stack.qkv_sizes, dim=-1)
            return stack.attend(query, key, value, mask)

        x = stack.embed(input_ids, positions).flatten(0, 1)  # (B S, d_model)
        return through_layers(stack, x, attend).view(batch, length, -1)

    def decoder(self, memory: Tensor, attention_mask: Tensor | None, plan: Plan) -> "PackedDecoder":
        """Begins to decode a batch."""
        return PackedDecoder(self.weights, memory, attention_mask, plan.num_beams, plan.needs_attention)


class PackedDecoder(Decoder):
    """A decoder with its caches for a batch: each row is one hypothesis, and each sentence has equally many rows."""

    def __init__(
        self,
        weights: Weights,
        memory: Tensor,  # the encoder's output, (B, S, d_model)
        memory_mask: Tensor | None = None,  # (B, S), 0 for padding; each sentence has a position
        beams: int = 1,  # rows that a sentence will have at most; it begins with one
        keep_attention: bool = False,
    ) -> None:
        self.model, self.weights, self.keep_attention = weights, weights.decoder, keep_attention
        self.keeps_places = memory.device.type == "cpu"
        self.attention: Tensor | None = None  # (rows, S), of the last step: the last layer's, mean of its heads
        self.num_sentences = self.num_rows = len(memory)
        self.beams = beams
        self.length = 0
        stack, dtype = weights.decoder, weights.decoder.dtype
        # (layers, positions, rows, h d_k + h d_v): a step's keys and values are one piece, and so are a row's.
        shape = (len(stack.layers), FIRST_POSITIONS, beams * len(memory), sum(stack.qkv_sizes[1:]))
        self.past = memory.new_empty(shape, dtype=dtype)
        self.memory_keys, self.memory_values = self._project(memory.to(dtype), weights.memory)
        self.memory_bias = None
        if memory_mask is not None and not memory_mask.all():
            bias = torch.zeros_like(memory_mask, dtype=dtype)
            bias.masked_fill_(memory_mask == 0, torch.finfo(dtype).min)
            self.memory_bias = bias[:, None].expand(-1, stack.heads, -1).contiguous()  # (B, h, S)
        self.folded: list[FoldedAttention] = []
        if len(memory) == 1 and stack.heads * memory.shape[1] <= memory.shape[2]:
            mask = None if self.memory_bias is None else self.memory_bias[0]
            parts = zip(stack.layers, self.memory_keys[:, 0], self.memory_values[:, 0], strict=True)
            self.folded = [FoldedAttention(layer.cross, keys, values, mask) for layer, keys, values in parts]

    def _project(self, memory: Tensor, linear: Linear) -> Iterator[Tensor]:
        """Computes keys and values of all layers: (layers, B, h, S, d_k) and the same with d_v."""
        weights = self.weights
        batch, length, _ = memory.shape
        layers, heads = len(weights.layers), weights.heads
        fused = linear(memory.flatten(0, 1)).view(batch, length, layers, -1)
        for part in fused.split_with_sizes(weights.qkv_sizes[1:], dim=-1):
            yield part.view(batch, length, layers, heads, -1).permute(2, 0, 3, 1, 4).contiguous()

    def step(self, tokens: Tensor) -> Tensor:
        """Advances by one position, with the token of each row, (rows,); returns logits of the next, (rows, V)."""
        return self.model.lm_head(self._output(tokens))

    def best(self, tokens: Tensor, bar: Bar | None = None) -> Tensor:
        """Advances as `step` does; returns the most probable next token of each row, (rows,), of those not barred."""
        screen = self.model.screen_of_step(len(tokens))
        return super().best(tokens, bar) if screen is None else screen(self._output(tokens), bar)

    def _output(self, tokens: Tensor) -> Tensor:
        """Advances by one position; returns the stack's output, (rows, d_model)."""
        stack = self.weights
        self._make_room()
        place = torch.arange(self.length - 1, self.length, device=self.past.device)
        x = stack.embed(tokens, stack.positions(place, self.length).to(stack.dtype))
        pasts = list(self._pasts())

        def attend_to_past(number: int, x: Tensor) -> Tensor:
            here, keys, values = pasts[number]
            query, new = stack.layers[number].qkv(x).split_with_sizes([stack.qkv_sizes[0], here.shape[1]], dim=-1)
            here.copy_(new)
            query = query.view(self.num_rows, stack.heads, 1, -1)
            return F.scaled_dot_product_attention(query, keys, values, scale=1.0).reshape(self.num_rows, -1)

        def attend_to_memory(number: int, x: Tensor, residual: Tensor) -> Tensor:
            if self.folded:
                x, shares = self.folded[number](x, residual)
                self._show(number, shares)
                return x
            heads = self._attend_to_memory(number, stack.layers[number].cross_query(x))
            return stack.layers[number].cross_out(heads, residual)

        return through_layers(stack, x, attend_to_past, attend_to_memory)

    def _make_room(self) -> None:
        """Goes to the next position; where the caches have no room for it, they grow."""
        if self.length == self.past.shape[1]:
            layers, room, _, width = self.past.shape  # rows that have left need none any more
            past = self.past.new_empty(layers, 2 * room, self.beams * self.num_sentences, width)
            past[:, :room, : self.num_rows] = self.past[:, :, : self.num_rows]
            self.past = past
        self.length += 1

    def _pasts(self) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        """Makes views for each layer: where keys and values of this step belong, and keys and values up to it.

        They are (rows, h d_k + h d_v), (rows, h, length, d_k) and (rows, h, length, d_v).
        """
        past, heads = self.past[:, : self.length, : self.num_rows], self.weights.heads
        parts = past.split_with_sizes(self.weights.qkv_sizes[1:], dim=-1)
        keys, values = (part.view(*part.shape[:-1], heads, -1).permute(0, 2, 3, 1, 4).unbind() for part in parts)
        return zip(past[:, -1].unbind(), keys, values, strict=True)

    def _attend_to_memory(self, number: int, query: Tensor) -> Tensor:
        """Attends from queries of a layer, (rows, h d_k), to the source: (rows, h d_v)."""
        heads, sentences = self.weights.heads, self.num_sentences
        keys, values = (part[number, :sentences].flatten(0, 1) for part in (self.memory_keys, self.memory_values))
        # The rows of a sentence are queries to the same keys: (B h, rows per sentence, d_k).
        query = query.view(sentences, -1, heads, self.weights.key_dim)
        query = query.transpose(1, 2).reshape(sentences * heads, -1, self.weights.key_dim)
        keys, bias = keys.transpose(1, 2), self.memory_bias
        if bias is None:
            scores = torch.bmm(query, keys)  # (B h, ..., S)
        else:
            scores = torch.baddbmm(bias[:sentences].view(sentences * heads, 1, -1), query, keys)
        shares = _softmax(scores)
        self._show(number, shares.view(sentences, heads, -1, shares.shape[-1]).transpose(1, 2).flatten(0, 1))
        attended = torch.bmm(shares, values).view(sentences, heads, -1, self.weights.value_dim)
        return attended.transpose(1, 2).reshape(self.num_rows, -1)

    def _show(self, number: int, shares: Tensor) -> None:
        """Keeps a layer's shares, (rows, h, S), if they are asked for and it is the last one."""
        if self.keep_attention and number == len(self.weights.layers) - 1:
            self.attention = shares.mean(dim=1).float()

    def move(self, rows: Tensor, sentences: Tensor) -> None:
        """Gives each row the past of a former row, and each sentence the source of a former one.

        Each sentence has equally many rows, in the sentences' order. Rows that keep their place aren't copied.
        """
        _copy(rows, self.past[:, : self.length], dim=2)
        if len(sentences) < self.num_sentences:
            _copy(sentences, self.memory_keys, self.memory_values, dim=1)
            if self.memory_bias is not None:
                _copy(sentences, self.memory_bias, dim=0)
        self.num_rows, self.num_sentences = len(rows), len(sentences)


def _softmax(scores: Tensor) -> Tensor:
    if scores.dtype in (torch.float32, torch.float64):
        return torch.softmax(scores, dim=-1)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


def _copy(sources: Tensor, *tensors: Tensor, dim: int) -> None:
    """Copies from sources[i] of a dimension to i, in place, for each tensor."""
    if sources.device.type == "cpu":
        moves = [(source, target) for target, source in enumerate(sources.tolist()) if source != target]
        if not moves:
            return
        sources, targets = torch.tensor(moves).unbind(dim=1)
    else:  # to count those that move would be to wait for the device
        targets = torch.arange(len(sources), device=sources.device)
    for tensor in tensors:
        tensor.index_copy_(dim, targets, tensor.index_select(dim, sources))
