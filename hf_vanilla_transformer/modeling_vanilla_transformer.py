# SPDX-License-Identifier: Apache-2.0
"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017, arXiv:1706.03762), read top to bottom.

Shapes: B sentences, T positions of the queries, S positions of the keys, h heads of width d_k (values: d_v), V tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, initialization
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import OutputRecorder

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .generation_vanilla_transformer import PAPER_DECODING, DecodingMixin
from .integration_vanilla_transformer import (
    CACHE,
    DecoderOutput,
    IntegratedModel,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SharedEmbeddings,
    TargetsMixin,
    cache_of_both,
    kernel_and_mask,
    known_arguments,
    lengths_of_inputs,
    model_forward,
    naming_ids,
    padding_mask,
    stack_forward,
    tensor_parallel_plan,
    through_cache,
)


# ---- 3.5 Positional encoding ----
def sinusoidal_table(length: int, d_model: int, encoding: str = "paper", first_position: int = 0) -> Tensor:
    """Returns sinusoids for `length` positions, computed in float64: float32 of shape (length, d_model).

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos(same); `encoding` as in the configuration.
    """
    positions = torch.arange(first_position, first_position + length, dtype=torch.float64)[:, None]
    if encoding in ("paper", "marian"):
        exponent = torch.arange(0, d_model, 2, dtype=torch.float64) / d_model
    else:
        exponent = torch.arange(d_model // 2, dtype=torch.float64) / max(d_model // 2 - 1, 1)
    angles = positions / 10000**exponent  # (length, d_model / 2)
    pair = [angles.sin(), angles.cos()]
    table = torch.stack(pair, dim=-1).flatten(1) if encoding == "paper" else torch.cat(pair, dim=1)
    # An odd width has one cosine fewer than sines; in tensor2tensor and fairseq a zero at the end.
    return F.pad(table, (0, max(d_model - table.shape[1], 0)))[:, :d_model].float()


class SinusoidalPositions(nn.Module):
    """A table of sinusoids, never saved; longer texts get a longer one. fairseq's begins after its padding index."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__()
        first = (config.pad_token_id or 0) + 1 if config.position_encoding == "fairseq" else 0
        self.layout = (config.d_model, config.position_encoding, first)
        self.table = nn.Buffer(sinusoidal_table(config.max_position_embeddings, *self.layout), persistent=False)

    def forward(self, position_ids: Tensor, length: int) -> Tensor:
        """Looks up `position_ids`, all below `length`: (1 or B, T, d_model)."""
        # For longer texts, a table of this call alone: DDP needs buffers of one size in all processes.
        table = self.table if length <= len(self.table) else sinusoidal_table(length, *self.layout).to(self.table)
        return F.embedding(position_ids, table)


class LearnedPositions(nn.Embedding):
    """A trained table in place of the sinusoids (Table 3, row E)."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config.max_position_embeddings, config.d_model)

    def forward(self, position_ids: Tensor, length: int) -> Tensor:  # type: ignore[override]
        """Looks up `position_ids`, all below `length`: (1 or B, T, d_model)."""
        if length > self.num_embeddings:
            limit = f"{self.num_embeddings} learned positions (`max_position_embeddings`)"
            raise ValueError(f"{length} tokens are more than {limit}. Truncate the text, or train with sinusoids.")
        return super().forward(position_ids)


def positions_of(mask: Tensor | None, past_length: int | Tensor, x: Tensor) -> Tensor:
    """Numbers the positions of x, (B, T, d_model), from 0 without padding, by the mask of its own side: (1 or B, T)."""
    if mask is None:
        return (torch.arange(x.shape[1], device=x.device) + past_length)[None]
    if mask.ndim == 4:  # a position sees itself and all before it
        return ((mask if mask.dtype == torch.bool else mask == 0)[:, 0].sum(dim=-1) - 1).clamp(min=0)
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -x.shape[1] :]


# ---- 3.2.1 Scaled dot-product attention ----
def eager_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, dropout: float = 0, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """softmax(Q K^T / sqrt(d_k)) V (eq. 1), and the weights; a query that may look at nothing gets zeros.

    Query (B, h, T, d_k), key (B, h, S, d_k), value (B, h, S, d_v), mask (B, 1, T, S), boolean, added to scores or None.
    """
    scores = torch.matmul(query, key.transpose(-2, -1)) * scaling  # (B, h, T, S)
    if mask is None:  # nothing is masked, or sdpa is told by `is_causal` what is
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        mask = mask.tril() if module.is_causal and query.shape[-2] > 1 else mask
    if mask.dtype != torch.bool:
        scores = scores + mask
        mask = mask > torch.finfo(mask.dtype).min
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    weights = F.dropout(weights.masked_fill(~mask, 0.0), p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2), weights  # (B, T, h, d_v), (B, h, T, S)


# ---- 3.2.2 Multi-head attention ----
class VanillaTransformerAttention(nn.Module):
    """Concat(head_1, ..., head_h) W^O with head_i = Attention(Q W^Q_i, K W^K_i, V W^V_i)."""

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, layer_idx: int, causal: bool = False) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = causal
        self.head_dim = config.head_dim or config.d_model // num_heads  # d_k
        self.value_head_dim = config.value_head_dim or config.d_model // num_heads  # d_v
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.q_proj = nn.Linear(config.d_model, num_heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.d_model, num_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.d_model, num_heads * self.value_head_dim, bias=config.attention_bias)
        self.out_proj = nn.Linear(num_heads * self.value_head_dim, config.d_model, bias=config.attention_bias)
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            projection.init_gain = config.attention_init_gain  # type: ignore[assignment]

    def forward(self, x: Tensor, memory: Any, mask: Any, cache: Any = None, **kwargs: object) -> tuple[Tensor, Any]:
        """Attends from x, (B, T, d_model), to memory, (B, S, d_model), or without it to x; the weights may be None."""
        query = self.split(self.q_proj(x), self.head_dim)  # (B, h, T, d_k)
        source = x if memory is None else memory
        key, value = through_cache(cache, self.layer_idx, memory is not None, lambda: self.keys_and_values(source))
        name, mask = kernel_and_mask(self, mask, memory is not None, kwargs.get("output_attentions"))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention)
        kwargs["dropout"] = self.attention_dropout if self.training else 0.0
        heads, weights = attend(self, query, key, value, mask, scaling=self.scaling, **kwargs)
        return self.out_proj(heads.flatten(2)), weights

    def split(self, x: Tensor, head_dim: int) -> Tensor:
        """Gives each head its part of (B, T, h * head_dim): (B, h, T, head_dim)."""
        return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # type: ignore[no-untyped-call]

    def keys_and_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Projects (B, S, d_model) to the heads' keys, (B, h, S, d_k), and values, (B, h, S, d_v)."""
        return self.split(self.k_proj(source), self.head_dim), self.split(self.v_proj(source), self.value_head_dim)


# ---- 3.3 Position-wise feed-forward networks ----
class VanillaTransformerFeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2 (eq. 2)."""

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, config.d_model)
        self.activation = ACT2FN[config.activation_function]
        self.dropout = nn.Dropout(config.activation_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps each position of (B, T, d_model) by itself."""
        return self.fc2(self.dropout(self.activation(self.fc1(x))))


# ---- 3.1 Encoder and decoder stacks ----
def shift_right(labels: Tensor, start: int | None, pad: int | None) -> Tensor:
    """Shifts targets, (B, T), padded with -100 on either side, right: each begins with the token `start`.

    Raises:
        ValueError: There is no such token, or none for padding.
    """
    if start is None or pad is None:
        raise ValueError("Shifting labels right needs `decoder_start_token_id` and `pad_token_id` in the config.")
    real = labels != -100
    first = real & (real.cumsum(dim=-1) == 1)
    first[:, 0] |= ~real.any(dim=-1)  # a row without labels starts too
    shifted = F.pad(labels, (1, -1), value=-100)
    return shifted.masked_fill(shifted == -100, pad).masked_fill(first, start)


class PostNormResidual(nn.LayerNorm):
    """LayerNorm(x + Dropout(Sublayer(x))): section 3.1, with the dropout of 5.4."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config.d_model, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        """Wraps `sublayer`, a map from (B, T, d_model) to the same shape, around x."""
        return super().forward(x + self.dropout(sublayer(x)))


class PreNormResidual(PostNormResidual):
    """x + Dropout(Sublayer(LayerNorm(x))), as checkpoints after the paper have it."""

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:  # type: ignore[override]
        """Wraps `sublayer`, a map from (B, T, d_model) to the same shape, around x."""
        return x + self.dropout(sublayer(nn.LayerNorm.forward(self, x)))


class VanillaTransformerEncoderLayer(GradientCheckpointingLayer):
    """Self-attention, then feed-forward."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        residual = PreNormResidual if config.norm_position == "pre" else PostNormResidual
        self.self_attn = VanillaTransformerAttention(config, config.encoder_attention_heads, layer_idx)
        self.self_attn_layer_norm = residual(config)  # LayerNorm with dropout and the residual connection
        self.feed_forward = VanillaTransformerFeedForward(config, config.encoder_ffn_dim)
        self.final_layer_norm = residual(config)  # of the feed-forward network

    @known_arguments
    def forward(self, x: Tensor, mask: Any, **kwargs: object) -> Tensor:
        """Maps (B, S, d_model) to the same shape."""
        x = self.self_attn_layer_norm(x, lambda x: self.self_attn(x, memory=None, mask=mask, **kwargs)[0])
        return self.final_layer_norm(x, lambda x: self.feed_forward(x))  # accelerate moves modules that are arguments


class VanillaTransformerDecoderLayer(GradientCheckpointingLayer):
    """Masked self-attention, attention to the encoder's output, then feed-forward."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        residual = PreNormResidual if config.norm_position == "pre" else PostNormResidual
        self.self_attn = VanillaTransformerAttention(config, config.decoder_attention_heads, layer_idx, causal=True)
        self.self_attn_layer_norm = residual(config)  # LayerNorm with dropout and the residual connection
        self.encoder_attn = VanillaTransformerAttention(config, config.decoder_attention_heads, layer_idx)
        self.encoder_attn_layer_norm = residual(config)
        self.feed_forward = VanillaTransformerFeedForward(config, config.decoder_ffn_dim)
        self.final_layer_norm = residual(config)  # of the feed-forward network

    @known_arguments
    def forward(self, x: Tensor, memory: Tensor, mask: Any, cross: Any, cache: Any = None, **kwargs: Any) -> Tensor:
        """Maps (B, T, d_model) to the same shape, looking at memory, (B, S, d_model)."""
        kwargs["cache"] = cache
        x = self.self_attn_layer_norm(x, lambda x: self.self_attn(x, memory=None, mask=mask, **kwargs)[0])
        x = self.encoder_attn_layer_norm(x, lambda x: self.encoder_attn(x, memory=memory, mask=cross, **kwargs)[0])
        return self.final_layer_norm(x, lambda x: self.feed_forward(x))  # accelerate moves modules that are arguments


class VanillaTransformerPreTrainedModel(IntegratedModel):
    """The base of all models here: their initialisation."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Embeddings N(0, 1 / d_model), projections Glorot uniform, as the paper's own code (tensor2tensor) has it."""
        if isinstance(module, nn.Embedding) or module is getattr(self, "lm_head", None):
            initialization.normal_(module.weight, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.Linear):
            initialization.xavier_uniform_(module.weight, gain=getattr(module, "init_gain", 1.0))
        elif isinstance(module, nn.LayerNorm):
            initialization.ones_(module.weight)
        elif isinstance(module, SinusoidalPositions):
            initialization.copy_(module.table, sinusoidal_table(len(module.table), *module.layout))
        if getattr(module, "bias", None) is not None:
            initialization.zeros_(module.bias)


# ---- 3.4 Embeddings, and 3.1 the stacks ----
class VanillaTransformerStack(VanillaTransformerPreTrainedModel):
    """The base of the two stacks: embeddings with positions, N layers, an optional last LayerNorm."""

    _fsdp_plan = {"layers.*": "free_full_weight"}

    def __init__(self, config: VanillaTransformerConfig, vocab_size: int, layers: Sequence[nn.Module]) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model, config.pad_token_id)
        positions = LearnedPositions if config.position_encoding == "learned" else SinusoidalPositions
        self.embed_positions = positions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(layers)
        last_norm = config.final_layer_norm
        self.layer_norm = nn.LayerNorm(config.d_model, config.layer_norm_eps) if last_norm else nn.Identity()
        self.post_init()

    def embed(self, ids: Tensor | None, embeds: Tensor | None, mask: Tensor | None, cache: Any = None) -> Tensor:
        """sqrt(d_model) times the tokens' embeddings (3.4), plus positions (3.5), with dropout (5.4)."""
        past, length = lengths_of_inputs(ids, embeds, mask, cache)
        if embeds is None:
            embeds = naming_ids(lambda: self.embed_tokens(ids), ids, lambda: len(self.embed_tokens.weight))
        x = embeds * self.config.embedding_scale
        return self.dropout(x + self.embed_positions(positions_of(mask, past, x), length).to(x.dtype))


class VanillaTransformerEncoder(VanillaTransformerStack):
    """N layers over the source (3.1)."""

    _tp_plan = tensor_parallel_plan("self_attn")
    _can_record_outputs = {"hidden_states": VanillaTransformerEncoderLayer, "attentions": VanillaTransformerAttention}

    def __init__(self, config: VanillaTransformerConfig) -> None:
        layers = [VanillaTransformerEncoderLayer(config, i) for i in range(config.encoder_layers)]
        super().__init__(config, config.vocab_size, layers)

    @stack_forward
    def forward(
        self,
        input_ids: Tensor | None = None,  # (B, S)
        attention_mask: Tensor | None = None,  # (B, S), 0 for padding; or (B, 1, S, S), what each may look at
        inputs_embeds: Tensor | None = None,  # (B, S, d_model), in place of input_ids, not yet scaled
        **others: object,  # for transformers and the kernel; generate() would give all that it has to `**kwargs`
    ) -> BaseModelOutput:
        """Encodes the source into (B, S, d_model)."""
        padding = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
        x = self.embed(input_ids, inputs_embeds, padding)
        mask = padding_mask(self.config, x, attention_mask)
        for layer in self.layers:
            x = layer(x, mask=mask, **others)
        return BaseModelOutput(last_hidden_state=self.layer_norm(x))


class VanillaTransformerDecoder(VanillaTransformerStack):
    """N layers over the target as far as it is known, each attending to the encoder's output (3.1)."""

    _tp_plan = tensor_parallel_plan("self_attn", "encoder_attn")
    _can_record_outputs = {
        "hidden_states": OutputRecorder(VanillaTransformerDecoderLayer),
        "attentions": OutputRecorder(VanillaTransformerAttention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(VanillaTransformerAttention, index=1, layer_name="encoder_attn"),
    }
    _can_record_outputs["hidden_states"].num_hidden_layers_key = "decoder_layers"  # which negative indices count from

    def __init__(self, config: VanillaTransformerConfig) -> None:
        layers = [VanillaTransformerDecoderLayer(config, i) for i in range(config.decoder_layers)]
        super().__init__(config, config.target_vocab_size, layers)

    @stack_forward
    def forward(
        self,
        input_ids: Tensor | None = None,  # (B, T), the target shifted right
        attention_mask: Tensor | None = None,  # (B, past + T), 0 for padding; or causal, (B, 1, T, past + T)
        encoder_hidden_states: Tensor | None = None,  # (B, S, d_model)
        encoder_attention_mask: Tensor | None = None,  # (B, S), 0 for padding
        cache: Cache | None = None,  # keys and values of earlier positions and of the source; extended in place
        inputs_embeds: Tensor | None = None,  # (B, T, d_model), in place of input_ids, not yet scaled
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> DecoderOutput:
        """Decodes T positions into (B, T, d_model), after those which `cache` holds."""
        memory = encoder_hidden_states
        if memory is None:
            raise ValueError("The decoder attends to the encoder's output: pass `encoder_hidden_states`.")
        cache = cache_of_both(cache, use_cache)
        own = cache.self_attention_cache if cache is not None else None
        x = self.embed(input_ids, inputs_embeds, attention_mask, own)
        # 3.2.3: a position doesn't see later ones, so that a prediction depends on known outputs alone.
        mask = create_causal_mask(self.config, x, attention_mask, own)
        cross = padding_mask(self.config, x, encoder_attention_mask, memory)
        for layer in self.layers:
            x = layer(x, memory, mask=mask, cross=cross, **{CACHE: cache}, **kwargs)  # under transformers' name for it
        return DecoderOutput(last_hidden_state=self.layer_norm(x), **{CACHE: cache})


class VanillaTransformerModel(SharedEmbeddings, VanillaTransformerPreTrainedModel):
    """Encoder and decoder, without the output projection."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        if config.share_encoder_decoder_embeddings:
            self._tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}
        self.encoder = VanillaTransformerEncoder(config)
        self.decoder = VanillaTransformerDecoder(config)
        self.post_init()

    @model_forward
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> Seq2SeqModelOutput:
        """Runs the encoder, unless `encoder_outputs` are given, and the decoder; arguments are theirs."""
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        is_output = isinstance(encoder_outputs, BaseModelOutput)
        memory: Any = encoder_outputs if is_output else BaseModelOutput(*encoder_outputs[:3])
        outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=memory.last_hidden_state,
            encoder_attention_mask=attention_mask,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            **{CACHE: outputs.get(CACHE)},
            **{f"encoder_{name}": value for name, value in memory.items()},
        )


# ---- 5.4 Regularization: label smoothing ----
def label_smoothed_cross_entropy(
    logits: Tensor, labels: Tensor, num_items_in_batch: Any = None, label_smoothing: float = 0.0, **kwargs: Any
) -> Tensor:
    """Cross-entropy of (..., V) and labels, (...), eps_ls spread over V (5.4): the mean over labels other than -100."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    labels = labels.to(logits.device).flatten()
    loss = naming_ids(
        lambda: F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum", label_smoothing=label_smoothing),
        labels,
        lambda: logits.shape[-1],
        ignore_index=-100,
    )
    items = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return loss / (items.to(loss.device).clamp(min=1) if isinstance(items, Tensor) else max(items, 1))


# ---- 3.4 Softmax: the complete model ----
class VanillaTransformerForConditionalGeneration(
    VanillaTransformerPreTrainedModel, DecodingMixin, TargetsMixin, GenerationMixin
):
    """The complete model, with the projection to the vocabulary that shares the embeddings' matrix."""

    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        if config.tie_word_embeddings:
            stack = "encoder" if config.share_encoder_decoder_embeddings else "decoder"
            self._tied_weights_keys = {"lm_head.weight": f"model.{stack}.embed_tokens.weight"}
        self.model = VanillaTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.target_vocab_size, bias=config.output_bias)
        self.loss_function = label_smoothed_cross_entropy
        self.generation_config = GenerationConfig(**PAPER_DECODING, **config.decoding_tokens)
        self.post_init()

    @model_forward
    def forward(
        self,
        input_ids: Tensor | None = None,  # (B, S), source tokens
        attention_mask: Tensor | None = None,  # (B, S), 0 for padding
        decoder_input_ids: Tensor | None = None,  # (B, T), the target shifted right; made of the labels where absent
        decoder_attention_mask: Tensor | None = None,  # (B, past + T), 0 for padding
        encoder_outputs: BaseModelOutput | tuple[Tensor, ...] | None = None,  # in place of the source
        cache: Cache | None = None,  # extended in place
        inputs_embeds: Tensor | None = None,  # (B, S, d_model), in place of input_ids
        decoder_inputs_embeds: Tensor | None = None,  # (B, T, d_model), in place of decoder_input_ids
        labels: Tensor | None = None,  # (B, T), -100 where there is none; not shifted again
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,  # the number of last positions (0: all), or the indices of positions
        skip_logits: bool = False,  # with labels: the loss alone, for which padding is never projected
        **kwargs: Any,  # output_attentions, output_hidden_states, num_items_in_batch ...
    ) -> Seq2SeqLMOutput:
        """Predicts the token at each target position: `logits`, (B, T, V), and with labels `loss`."""
        if labels is not None or (self.training and use_cache is None):
            use_cache = False
        shifted = labels if decoder_input_ids is None and decoder_inputs_embeds is None else None
        if decoder_attention_mask is None and not use_cache and cache is None:
            decoder_attention_mask = self.mask_of_left_padding(decoder_input_ids, shifted)
        if shifted is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(shifted)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            cache=cache,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = outputs.last_hidden_state[:, kept]
        logits = loss = None
        if labels is not None:
            labels = labels[:, kept]
            kwargs["label_smoothing"] = self.config.label_smoothing if self.training else 0.0
        if labels is not None and skip_logits:
            loss = self.loss_of_targets(hidden, labels, **kwargs)
        else:
            logits = self.lm_head(hidden)
            loss = None if labels is None else self.loss_function(logits, labels, **kwargs)
        kept_outputs = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **kept_outputs)

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Returns what the decoder is given to predict labels, (B, T): `shift_right` by the configuration's tokens."""
        return shift_right(labels, self.config.decoder_start_token_id, self.config.pad_token_id)
