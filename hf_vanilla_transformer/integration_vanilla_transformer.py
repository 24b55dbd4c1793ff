# SPDX-License-Identifier: Apache-2.0
"""What transformers asks of a model and the paper doesn't: growing vocabularies, tied weights, kernels, caches, errors.

To read what the Transformer computes, leave this file out: the model's classes have bases from here.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, Pipeline, PreTrainedModel, modeling_outputs
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_vanilla_transformer import CACHE_NAMES, VanillaTransformerConfig

# The minor versions of transformers that the tests are run with.
TESTED_VERSIONS = ("5.23", "5.24")
# The installed version's name of the two; callers may use either.
OLD_NAME, NEW_NAME = CACHE_NAMES
CACHE = NEW_NAME if NEW_NAME in inspect.signature(create_causal_mask).parameters else OLD_NAME
# What forward passes hand down: it is read by transformers' decorators, the loss or the kernels of attention.
HANDED_DOWN = {
    *("output_attentions", "output_hidden_states", "return_dict", "use_cache", "is_causal", "num_items_in_batch"),
    *("debug_io", "debug_io_dir", "prune_layers"),
}
GIVEN_TO_KERNELS = {"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"}


# ---- Arguments by name ----
def cache_by_either_name(name: str = NEW_NAME) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Returns a decorator for functions that call a cache by this name: callers may use the other one too.

    Where transformers deprecates the other one, so does it; both at once are a ValueError.
    """
    is_deprecated = CACHE == name == NEW_NAME
    return deprecate_kwarg(
        OLD_NAME if name == NEW_NAME else NEW_NAME,
        version="5.40.0" if is_deprecated else "5.0.0",  # from which on transformers only renames
        new_name=name,
        raise_if_both_names=True,
        additional_message="If one is a prefix that PEFT has trained, generating with it needs transformers 5.23.",
    )


def model_forward(forward: Callable[..., object]) -> Callable[..., object]:
    """Decorates the `forward` of a model of two stacks, which return outputs with names and check their arguments."""

    @functools.wraps(forward)
    def handing_down(self: nn.Module, *args: object, **kwargs: object) -> object:
        return forward(self, *args, **kwargs, return_dict=True)

    return cache_by_either_name()(can_return_tuple(handing_down))


def stack_forward(forward: Callable[..., object]) -> Callable[..., object]:
    """Decorates the `forward` of a stack, whose layers' outputs transformers' hooks record."""
    return known_arguments(merge_with_config_defaults(capture_outputs(forward)))


def known_arguments(forward: Callable[..., object]) -> Callable[..., object]:
    """Decorates a `forward`: an argument that neither it nor anything that it calls reads is a TypeError.

    `**kwargs` would swallow it, and results be wrong, as when a version of transformers renames an argument.
    """
    known = HANDED_DOWN.union(inspect.signature(forward).parameters)

    @functools.wraps(forward)
    def checking(self: nn.Module, *args: object, **kwargs: object) -> object:
        if unknown := [name for name, value in kwargs.items() if name not in known and value is not None]:
            refuse_unread(self, unknown)
        return forward(self, *args, **kwargs)

    return cache_by_either_name()(checking) if NEW_NAME in known else checking


def refuse_unread(module: nn.Module, names: list[str]) -> None:
    """Raises a TypeError if the kernel of attention doesn't read one of these arguments either."""
    configs = (getattr(one, "config", None) for one in module.modules())
    kernel = next(one._attn_implementation for one in configs if one is not None)
    function = ALL_ATTENTION_FUNCTIONS.get(kernel)
    read = {} if function is None else inspect.signature(function).parameters
    for name in names:
        if name in GIVEN_TO_KERNELS or name not in read:
            raise TypeError(
                f"{type(module).__name__}.forward() got an unexpected keyword argument '{name}': neither the model nor "
                f"its attention, {kernel}, reads it."
            )


class BothNames:
    """An output whose cache has both names under 5.23 too; from 5.24 on, transformers' outputs have them."""

    if CACHE == OLD_NAME:

        @property
        def cache(self) -> Cache | None:
            """The keys and values of the positions so far."""
            return getattr(self, OLD_NAME)


@dataclass
class DecoderOutput(BothNames, modeling_outputs.BaseModelOutputWithPastAndCrossAttentions):
    """What the decoder returns."""


@dataclass
class Seq2SeqModelOutput(BothNames, modeling_outputs.Seq2SeqModelOutput):
    """What the model without the output projection returns."""


@dataclass
class Seq2SeqLMOutput(BothNames, modeling_outputs.Seq2SeqLMOutput):
    """What the complete model returns."""


# ---- Facts about the classes ----
class IntegratedModel(PreTrainedModel):
    """A `PreTrainedModel` with one vocabulary for source and target, or two."""

    config: VanillaTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _can_compile_fullgraph = True
    _no_split_modules = ["VanillaTransformerEncoderLayer", "VanillaTransformerDecoderLayer"]
    _skip_keys_device_placement = [*CACHE_NAMES]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Returns {alias: canonical name}: here `tie_word_embeddings` is about the output projection alone (3.4)."""
        return super().get_expanded_tied_weights_keys(True) if all_submodels else dict(self._tied_weights_keys or {})

    def _resize_token_embeddings(self, *size: int | None) -> nn.Module:
        stacks = [self.get_encoder(), self.get_decoder()]
        return self._resize_vocabulary_of(stacks if self.config.decoder_vocab_size is None else stacks[:1], *size)

    def resize_decoder_token_embeddings(self, *size: int | None) -> nn.Module:
        """Resizes a target vocabulary of its own; arguments as those of `resize_token_embeddings`."""
        if self.config.decoder_vocab_size is None:
            raise ValueError("Source and target have one vocabulary here: call `resize_token_embeddings` instead.")
        embeddings = self._resize_vocabulary_of([self.get_decoder()], *size)
        self.config.decoder_vocab_size = embeddings.num_embeddings
        self.tie_weights()
        return embeddings

    def _resize_vocabulary_of(self, stacks: list[PreTrainedModel], *size: int | None) -> nn.Embedding:
        for stack in stacks:
            stack.embed_tokens = embeddings = self._get_resized_embeddings(stack.embed_tokens, *size)
        if self.get_decoder() in stacks and (head := self.get_output_embeddings()) is not None:
            self.set_output_embeddings(self._get_resized_lm_head(head, embeddings.num_embeddings))
        return stacks[0].embed_tokens


class SharedEmbeddings:
    """Access to the embeddings of a model whose two stacks may share them."""

    config: VanillaTransformerConfig
    encoder: PreTrainedModel
    decoder: PreTrainedModel

    def get_input_embeddings(self) -> nn.Module:
        """Returns the source embeddings; they are the target's too if the two are shared."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the source embeddings, and the target's if the two are shared."""
        self.encoder.embed_tokens = value
        if self.config.share_encoder_decoder_embeddings:
            self.decoder.embed_tokens = value


def tensor_parallel_plan(*attentions: str) -> dict[str, str]:
    """Splits heads and inner feed-forward units over the devices."""
    split = {f"{name}.{p}_proj": "colwise" for name in attentions for p in "qkv"} | {"feed_forward.fc1": "colwise"}
    joined = {f"{name}.out_proj": "rowwise" for name in attentions} | {"feed_forward.fc2": "rowwise"}
    return {f"layers.*.{name}": style for name, style in (split | joined).items()}


# ---- What a forward pass is given ----
def kernel_and_mask(attention: Any, mask: Any, is_cross: bool, shows_weights: object) -> tuple[str, Any]:
    """Returns the name of the kernel for one call of an attention, and the mask that it takes."""
    name = attention.config._attn_implementation or "eager"
    if "flash" in name and attention.value_head_dim > attention.head_dim:
        raise ValueError(f'{name} needs d_v <= d_k (`value_head_dim`, `head_dim`); use attn_implementation="sdpa".')
    if "flash" in name and is_cross and mask is not None:
        return "sdpa", mask[:, None, None, :].bool()  # transformers would unpad queries by the keys' mask
    if name == "sdpa" and shows_weights:
        return "eager", mask  # sdpa has no weights to show, and its masks are understood
    return name, mask


def padding_mask(config: VanillaTransformerConfig, x: Tensor, mask: Tensor | None, memory: Tensor | None = None) -> Any:
    """Makes the mask that a kernel takes of one over keys, (B, S), 0 for padding; None where nothing is masked.

    Whether nothing is, only the mask's values tell. Eager attention isn't told, so that torch.func can transform it.
    """
    is_told = config._attn_implementation != "eager"
    return create_bidirectional_mask(config, x, mask, memory, allow_is_bidirectional_skip=is_told)


def cache_of_both(cache: Cache | None, use_cache: bool | None) -> EncoderDecoderCache | None:
    """Returns a cache of the target's keys and values and of the source's, or None if none is used."""
    if isinstance(cache, EncoderDecoderCache) or (cache is None and not use_cache):
        return cache
    return EncoderDecoderCache(DynamicCache() if cache is None else cache, DynamicCache())


def through_cache(
    cache: EncoderDecoderCache | None, layer_idx: int, is_cross: bool, project: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Returns a layer's keys, (B, h, S, d_k), and values, (B, h, S, d_v), after adding new ones to the cache.

    Those of the source are projected once; those of the target are the earlier positions' and the new ones'.
    """
    if cache is None:
        return project()
    if not is_cross:
        keys, values = cache.self_attention_cache.update(*project(), layer_idx)
    elif cache.is_updated.get(layer_idx):
        layer = cache.cross_attention_cache.layers[layer_idx]
        keys, values = layer.keys, layer.values
    else:
        cache.is_updated[layer_idx] = True
        keys, values = cache.cross_attention_cache.update(*project(), layer_idx)
    return keys, values


def lengths_of_inputs(
    ids: Tensor | None, embeds: Tensor | None, mask: Tensor | None, cache: Cache | None
) -> tuple[int | Tensor, int]:
    """Returns the number of positions in a cache, and with those of ids, (B, T), or embeddings, (B, T, d_model).

    Raises:
        ValueError: There aren't just ids or just embeddings, or the mask is another input's.
    """
    if (ids is None) == (embeds is None):
        advice = "Use `DataCollatorForSeq2Seq(tokenizer, model=model)`; without labels, `DataCollatorWithPadding`"
        raise ValueError(f"Give exactly one: ids, labels or embeddings. {advice} and `predict_with_generate=True`.")
    length = (embeds if ids is None else ids).shape[1]  # type: ignore[union-attr]
    if cache is not None:
        return cache.get_seq_length(), cache.get_mask_sizes(length, 0)[0]
    if mask is not None and mask.ndim == 2 and mask.shape[1] != length:
        raise ValueError(f"The attention mask has {mask.shape[1]} positions for {length} tokens.")
    return 0, length


def naming_ids(
    function: Callable[[], Tensor], ids: Any, vocab_size: Callable[[], int], ignore_index: int | None = None
) -> Tensor:
    """Calls a function; its IndexError then names the token ids, (...), that the vocabulary doesn't have."""
    try:
        return function()
    except IndexError as error:
        raise outside_vocabulary(ids if ignore_index is None else ids[ids != ignore_index], vocab_size()) from error


def outside_vocabulary(ids: Tensor, vocab_size: int) -> IndexError:
    """Makes the error for token ids, (...), that the vocabulary doesn't have."""
    return IndexError(
        f"Token ids go from {ids.min():d} to {ids.max():d}, but the vocabulary has {vocab_size} tokens, from 0 up. "
        "Compare `len(tokenizer)` with `config.vocab_size`; resize_token_embeddings adds tokens."
    )


# ---- The complete model ----
class TargetsMixin:
    """Padding on the left of targets, a loss that never projects padding, and scores of what was generated."""

    config: VanillaTransformerConfig
    generation_config: GenerationConfig
    lm_head: nn.Linear
    loss_function: Callable[..., Tensor]

    def adjust_generation_fn(self, *args: object, **kwargs: object) -> None:
        """Keeps the paper's decoding where a checkpoint has no generation_config.json; called by `from_pretrained`."""
        paper = self.generation_config
        super().adjust_generation_fn(*args, **kwargs)  # type: ignore[misc]
        if self.generation_config._from_model_config:  # transformers then takes the settings of config.json
            self.generation_config = paper

    def mask_of_left_padding(self, decoder_input_ids: Tensor | None, labels: Tensor | None) -> Tensor | None:
        """Masks what stands before the first token of a target, (B, T); what stands after the last, no token sees.

        None where padding can't be told from the start token.
        """
        pad = self.config.pad_token_id or 0
        if labels is not None:
            return (labels != -100).cumsum(dim=-1) > 0
        if decoder_input_ids is None or self.config.decoder_start_token_id == pad:
            return None
        return (decoder_input_ids != pad).cumsum(dim=-1) > 0

    def loss_of_targets(self, hidden: Tensor, labels: Tensor, **kwargs: object) -> Tensor:
        """Projects the positions of (B, T, d_model) that have a label, and returns their loss."""
        real = labels != -100
        return self.loss_function(self.lm_head(hidden[real]), labels[real], **kwargs)

    def compute_transition_scores(
        self,
        sequences: Tensor,
        scores: tuple[Tensor, ...],
        beam_indices: Tensor | None = None,
        normalize_logits: bool = False,
    ) -> Tensor:
        """Returns the scores of generated tokens, (rows, steps), 0 after the end of a beam, as transformers does.

        transformers' own presumes that the target has `vocab_size` tokens.
        """
        stacked = torch.stack(scores)  # (steps, rows, V)
        if normalize_logits:
            stacked = stacked.log_softmax(dim=-1)
        if beam_indices is None:
            beam_indices = torch.arange(stacked.shape[1], device=stacked.device)[:, None].expand(-1, len(scores))
        length = int((beam_indices >= 0).sum(dim=1).max())
        rows, steps = beam_indices[:, :length], torch.arange(length, device=beam_indices.device)
        chosen = stacked[steps, rows.clamp(min=0), sequences[:, sequences.shape[1] - length :]]
        return chosen.masked_fill(rows < 0, 0.0)


# ---- Without the package ----
class VanillaTransformerPipeline(Pipeline):
    """pipeline("vanilla-translation") by a checkpoint's own code: what pipeline("translation") was."""

    _load_tokenizer = True
    _load_processor = _load_image_processor = _load_video_processor = _load_feature_extractor = False

    def __call__(self, inputs: Any, **options: object) -> Any:
        """Translates a string or several, with options of `generate()`: {"translation_text": ...} for each."""
        is_list = isinstance(inputs, list)
        results = [] if is_list and not inputs else super().__call__(inputs, **options)
        return [rows[0] for rows in results] if is_list and all(len(rows) == 1 for rows in results) else results

    def _sanitize_parameters(self, **options: object) -> tuple[dict[str, object], dict[str, object], dict[str, object]]:
        return {}, options, {}

    def preprocess(self, text: str) -> dict[str, Tensor]:
        """Returns the token ids of a text, (1, S), with their mask, and whether there is any text, (1, 1)."""
        return {**self.tokenizer(text.strip(), return_tensors="pt"), "is_text": torch.tensor([[bool(text.strip())]])}

    def _forward(self, inputs: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
        is_text = inputs.pop("is_text")
        sequences = self.model.generate(**inputs, **options).unflatten(0, (len(is_text), -1))
        return {"sequences": sequences, "is_text": is_text}  # (B, hypotheses, T), (B, 1)

    def postprocess(self, outputs: dict[str, Tensor]) -> list[dict[str, str]]:
        """Returns the texts of one source's hypotheses, (1, hypotheses, T), in which unknown tokens are shown."""
        own, texts = self.tokenizer, []
        dropped = {*own.all_special_tokens} - {own.unk_token} | {own.pad_token, own.bos_token, own.eos_token}
        for ids in outputs["sequences"][0].tolist():
            kept = [token for token in ids if own.convert_ids_to_tokens(token) not in dropped]
            texts.append(own.decode(kept, skip_special_tokens=own.unk_token_id not in kept))
        return [{"translation_text": text if outputs["is_text"].item() else ""} for text in texts]


__all__ = ["IntegratedModel"]
