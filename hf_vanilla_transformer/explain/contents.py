"""What a page says about a model: its configuration, decoding, tokenizer and weights, and the lines of our code."""

import base64
import dataclasses
import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import (
    modeling_vanilla_transformer,
    plan_vanilla_transformer,
    tokenization_dictionary,
    tokenization_vanilla_transformer,
)
from ..engine.decoding import search
from ..engine.support import unsupported_reason
from ..plan_vanilla_transformer import READERS, GNMTLengthPenalty, Plan
from .tokenizer import PageError, tokenizer_of

Quantization = Literal["float32", "int8"]
MOST_BYTES = 20_000_000  # of weights as base64: a page that a phone still opens
MOST_BEAMS = 10
LEVELS = 127  # of 8 bits, on either side of 0

# Functions of `ACTIVATIONS` in page/tensor.mjs.
ACTIVATIONS = (
    "relu", "tanh", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "silu", "swish", "sigmoid",
)  # fmt: skip
FIELDS = (
    "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads",
    "activation_function", "max_position_embeddings", "position_encoding", "norm_position", "final_layer_norm",
    "layer_norm_eps", "vocab_size", "target_vocab_size", "embedding_scale",
)  # fmt: skip
# Fields of a plan that the page's search has; others have to be off.
SEARCHED = (
    "num_beams", "num_hypotheses", "limit", "length_penalty", "early_stopping", "start", "ends", "padding",
    "forced_end", "barred", "barred_words", "renormalize", "others",
)  # fmt: skip
PLANNED = ("num_beams", "limit", "early_stopping", "start", "ends", "forced_end", "renormalize")  # as they are
# What a view shows -> the line that computes it.
LINES: dict[str, tuple[ModuleType, str]] = {
    "tokens": (tokenization_vanilla_transformer, "trainer = trainers.BpeTrainer("),
    "pieces": (tokenization_dictionary, "def pieces(self, text: str)"),
    "embedding": (modeling_vanilla_transformer, "return self.dropout(x + self.embed_positions("),
    "positions": (modeling_vanilla_transformer, "pair = [angles.sin(), angles.cos()]"),
    "heads": (modeling_vanilla_transformer, "query = self.split(self.q_proj(x), self.head_dim)"),
    "scores": (modeling_vanilla_transformer, "scores = torch.matmul(query, key.transpose(-2, -1)) * scaling"),
    "causal": (modeling_vanilla_transformer, "mask = create_causal_mask(self.config, x, attention_mask, own)"),
    "masked": (modeling_vanilla_transformer, "scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)"),
    "softmax": (modeling_vanilla_transformer, "weights = F.softmax(scores, dim=-1"),
    "average": (modeling_vanilla_transformer, "return torch.matmul(weights, value).transpose(1, 2), weights"),
    "post": (modeling_vanilla_transformer, "return super().forward(x + self.dropout(sublayer(x)))"),
    "pre": (modeling_vanilla_transformer, "return x + self.dropout(sublayer(nn.LayerNorm.forward(self, x)))"),
    "feed": (modeling_vanilla_transformer, "return self.fc2(self.dropout(self.activation(self.fc1(x))))"),
    "cross": (modeling_vanilla_transformer, "x = self.encoder_attn_layer_norm(x, lambda x:"),
    "projection": (modeling_vanilla_transformer, "logits = self.lm_head(hidden)"),
    "penalty": (plan_vanilla_transformer, "return ((5 + length) / 6) ** float(self)"),
    "search": (search, "def advance("),
    "shifted": (modeling_vanilla_transformer, "return shifted.masked_fill(shifted == -100, pad).masked_fill(first"),
}


def contents_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    quantization: Quantization = "float32",
    examples: Sequence[str] = (),
) -> dict[str, Any]:
    """Returns what the page's script needs to compute a `VanillaTransformerForConditionalGeneration`, as JSON values.

    It is computed in float32, whatever its type; "int8" quantization is matrices with 8 bits per weight and a scale for
    each row. A model, search or tokenizer that the page doesn't compute, or more than 20 MB, raises `PageError`.
    """
    if reason := unsupported_reason(model):
        raise PageError(f"the page computes the paper's model only: {reason}")
    config: Any = model.config
    if config.activation_function not in ACTIVATIONS:
        raise PageError(f"the page has no activation {config.activation_function}; it has {', '.join(ACTIVATIONS)}")
    first = (config.pad_token_id or 0) + 1 if config.position_encoding == "fairseq" else 0
    return {
        "config": {**{name: getattr(config, name) for name in FIELDS}, "first_position": first},
        "parameters": model.num_parameters(),
        "plan": _plan(Plan.of({}, model.generation_config)),
        "tokenizer": tokenizer_of(tokenizer, (config.vocab_size, config.target_vocab_size), examples),
        "examples": list(examples),
        **_weights(model, quantization),
    }


def lines_of_code() -> dict[str, tuple[str, int, str]]:
    """Returns file, line and text of each line that a view names."""
    found = {}
    for view, (module, text) in LINES.items():
        lines = inspect.getsource(module).splitlines()
        (number,) = (number for number, line in enumerate(lines, start=1) if text in line)
        found[view] = (f"{module.__name__.split('.', 1)[1].replace('.', '/')}.py", number, lines[number - 1].strip())
    return found


def _plan(plan: Plan) -> dict[str, Any]:
    """Returns how the page searches; raises `PageError` for settings beyond that."""
    beyond = [field for field in dataclasses.fields(plan) if field.name not in SEARCHED]
    changed = [field.name for field in beyond if getattr(plan, field.name) != field.default]
    if others := [*plan.others, *(READERS[name][0] if name in READERS else name for name in changed)]:
        raise PageError(f"the page's search has no {others[0]}; remove it from generation_config.json")
    if plan.start is None or not plan.ends:
        raise PageError("generation_config.json has no decoder_start_token_id or no eos_token_id; the page needs both")
    if plan.num_beams > MOST_BEAMS:
        raise PageError(f"num_beams is {plan.num_beams}; the page's tree has at most {MOST_BEAMS}")
    if words := [one for one in plan.barred_words if len(one) > 1]:
        raise PageError(f"the page's search bars single tokens alone; remove {words[0]} from bad_words_ids")
    fields = {name: getattr(plan, name) for name in PLANNED}
    is_gnmt = isinstance(plan.length_penalty, GNMTLengthPenalty)
    barred = [*plan.barred, *(token for one in plan.barred_words for token in one)]
    return {**fields, "length_penalty": float(plan.length_penalty), "is_gnmt": is_gnmt, "barred": barred}


def _weights(model: PreTrainedModel, quantization: Quantization) -> dict[str, Any]:
    """Returns the list of tensors, and their numbers one after another, as base64."""
    names: dict[int, str] = {}  # of storages, as matrices may be shared
    tensors, aliases, parts = [], {}, []
    for name, tensor in model.state_dict().items():
        if (first := names.setdefault(tensor.data_ptr(), name)) != name:
            aliases[name] = first
            continue
        kind: Quantization = quantization if tensor.ndim == 2 else "float32"
        numbers = tensor.detach().to("cpu", torch.float32)
        rows = numbers.reshape(-1, numbers.shape[-1])
        tensors.append((name, *rows.shape, kind))
        parts.append(_rows_in_8_bits(rows) if kind == "int8" else rows.numpy().astype("<f4").tobytes())
    _check_size(sum(map(len, parts)), model, quantization)
    weights = base64.b64encode(b"".join(parts)).decode("ascii")
    return {"quantization": quantization, "tensors": tensors, "aliases": aliases, "weights": weights}


def _rows_in_8_bits(rows: Tensor) -> bytes:
    """Returns the scale of each row, in float32, and the row in steps of it, padded to a multiple of 4 bytes."""
    scales = rows.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / LEVELS
    steps = (rows / scales[:, None]).round().to(torch.int8).numpy().tobytes()
    return scales.numpy().astype("<f4").tobytes() + steps + bytes(-len(steps) % 4)


def _check_size(size: int, model: PreTrainedModel, quantization: Quantization) -> None:
    size = 4 * -(-size // 3)
    if size > MOST_BYTES:
        is_enough = quantization == "float32" and 1.1 * size / 4 < MOST_BYTES
        raise PageError(
            f"{model.num_parameters():,} parameters in {quantization} take {size / 1e6:.0f} MB, and the page has "
            f"at most {MOST_BYTES / 1e6:.0f}; give {'--quantization int8 (8 bits), or ' * is_enough}a smaller model"
        )
