"""The same Transformer by several implementations: post-norm, sinusoids, one embedding matrix, equal parameters."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

from .work import Size

DROPOUT = LABEL_SMOOTHING = 0.1
POSITIONS = 1024  # rows of positional tables
END, UNKNOWN = 0, 1  # token ids


def _fields(size: Size) -> dict[str, Any]:
    """The fields that the configurations of transformers' sequence-to-sequence models share."""
    both = {"attention_heads": size.heads, "ffn_dim": size.ffn_dim}
    return {
        "vocab_size": size.vocab_size,
        "d_model": size.d_model,
        "encoder_layers": size.encoder_layers,
        "decoder_layers": size.decoder_layers,
        **{f"{stack}_{name}": value for stack in ("encoder", "decoder") for name, value in both.items()},
        "activation_function": "swish" if size.is_opus_mt else "relu",
        "dropout": DROPOUT,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "max_position_embeddings": POSITIONS,
        "scale_embedding": True,
        "pad_token_id": size.pad,
        "decoder_start_token_id": size.pad,
        "bos_token_id": None,
        "eos_token_id": END,
    }


def vanilla(size: Size) -> VanillaTransformerForConditionalGeneration:
    """Ours, with what Marian has and the paper doesn't: biases on the projections, and its layout of the sinusoids."""
    others = {"position_encoding": "marian", "attention_bias": True, "layer_norm_eps": 1e-5}
    config = VanillaTransformerConfig(**_fields(size), **others, label_smoothing=LABEL_SMOOTHING)
    return VanillaTransformerForConditionalGeneration(config)


def marian(size: Size) -> MarianMTModel:
    """Hugging Face's Marian."""
    return MarianMTModel(MarianConfig(**_fields(size), forced_eos_token_id=None, init_std=size.d_model**-0.5))


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with embeddings, sinusoids and the projection; without final LayerNorms, as in the paper."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        layers = size.encoder_layers, size.decoder_layers
        self.transformer = nn.Transformer(size.d_model, size.heads, *layers, size.ffn_dim, DROPOUT, batch_first=True)
        self.transformer.encoder.norm = self.transformer.decoder.norm = None
        for module in self.modules():  # its dropout rate also applies to attention and feed-forward
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                module.dropout = nn.Dropout(0.0)
        self.embedding = nn.Embedding(size.vocab_size, size.d_model)
        nn.init.normal_(self.embedding.weight, std=size.d_model**-0.5)
        self.positions = nn.Buffer(_sinusoids(size.d_model), persistent=False)
        self.dropout = nn.Dropout(DROPOUT)
        self.scale = math.sqrt(size.d_model)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embedding(tokens) * self.scale + self.positions[: tokens.shape[1]])

    def forward(self, source: Tensor, padding: Tensor, target: Tensor) -> Tensor:
        """Logits, (B, T, V), of source (B, S), its padding (B, S), and the target shifted right, (B, T)."""
        length = target.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        hidden = self.transformer(
            self._embed(source),
            self._embed(target),
            tgt_mask=future,
            tgt_is_causal=True,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return F.linear(hidden, self.embedding.weight)


def _sinusoids(d_model: int) -> Tensor:
    angles = torch.arange(POSITIONS)[:, None] / 10000 ** (torch.arange(0, d_model, 2) / d_model)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def marian_to_decode(size: Size) -> MarianMTModel:
    """Marian with random weights; the padding's embedding is zero, as in OPUS-MT and CTranslate2."""
    torch.manual_seed(0)
    model = marian(size)
    with torch.no_grad():
        model.get_input_embeddings().weight[size.pad] = 0.0
        if size.is_opus_mt:
            model.final_logits_bias.normal_()
    if size.is_opus_mt:
        special = {"eos_token_id": END, "pad_token_id": size.pad, "decoder_start_token_id": size.pad}
        model.generation_config = GenerationConfig(
            **special, forced_eos_token_id=END, bad_words_ids=[[size.pad]], num_beams=4, max_length=512
        )
    return model
