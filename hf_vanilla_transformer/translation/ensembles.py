"""Ensembles: one model whose probabilities are the mean of several models' probabilities."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from ..checkpoints.loading import tokenizer_fingerprint

# Fields that the members of an ensemble have in common, beside the tokenizer.
SHARED_FIELDS = ("vocab_size", "decoder_vocab_size", "decoder_start_token_id", "eos_token_id", "pad_token_id")


def ensemble(models: Sequence[PreTrainedModel], tokenizers: Sequence[PreTrainedTokenizerBase]) -> PreTrainedModel:
    """Makes one model of several: at each step, its probabilities are the mean of theirs.

    It decodes as the first model does, by that one's generation config and length penalty, greedily or with beams. It
    has no attention weights or hidden states to show, no loss, and can't be saved.

    Args:
        models: The members, on one device. Their sizes may differ, their vocabulary may not.
        tokenizers: Their tokenizers, in the same order.

    Returns:
        A model for `translate`, `decode`, `score_targets` and `generate()`. It holds the members and no copies.

    Raises:
        ValueError: There is no member, or they have different vocabularies or special tokens.
    """
    if not models or len(models) != len(tokenizers):
        raise ValueError(f"{len(models)} models and {len(tokenizers)} tokenizers; give each of at least one its own")
    fix = "an ensemble averages the probabilities of one vocabulary, so train its members with one tokenizer"
    vocabulary, fingerprint = tokenizers[0].get_vocab(), tokenizer_fingerprint(tokenizers[0])
    for number, (model, tokenizer) in enumerate(zip(models[1:], tokenizers[1:], strict=True), start=2):
        if tokenizer.get_vocab() != vocabulary or tokenizer_fingerprint(tokenizer) != fingerprint:
            raise ValueError(f"model {number} has another tokenizer than model 1; {fix}")
        for name in SHARED_FIELDS:
            own, wanted = getattr(model.config, name, None), getattr(models[0].config, name, None)
            if own != wanted:
                raise ValueError(f"model {number} has {name}={own} and model 1 {name}={wanted}; {fix}")
    # The first member's class may have options of decoding.
    base = type(models[0])
    return type(f"{base.__name__}Ensemble", (AveragedProbabilities, base), {})(models)


class MemberCaches:
    """Keys and values of each member of an ensemble; `generate()` takes them for one cache."""

    is_compileable = is_croppable = False

    def __init__(self, caches: list[EncoderDecoderCache]) -> None:
        self.caches = caches

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the number of positions, the same in all of them."""
        return self.caches[0].get_seq_length(layer_idx)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Gives each beam the past of the beam that it continues: `beam_idx`, (batch * beams,)."""
        for cache in self.caches:
            cache.reorder_cache(beam_idx)


class MemberEncoders(nn.Module):
    """The encoders of an ensemble's members."""

    def __init__(self, encoders: list[nn.Module]) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(encoders)

    def forward(self, input_ids: Tensor, **kwargs: object) -> dict[str, Tensor]:
        """Encodes a source (B, S) with each: {number of the member: (B, S, d_model)}; `generate()` expands it."""
        outputs = (encoder(input_ids=input_ids, **kwargs) for encoder in self.encoders)
        return {str(number): output.last_hidden_state for number, output in enumerate(outputs)}


class AveragedProbabilities(nn.Module):
    """Makes an ensemble of a model's class, the next one of the bases; `ensemble` builds it."""

    members: Any

    def __init__(self, members: Sequence[PreTrainedModel]) -> None:
        config = copy.deepcopy(members[0].config)
        configs = [member.config for member in members]
        if ends := [c.max_position_embeddings for c in configs if getattr(c, "position_encoding", None) == "learned"]:
            config.update({"position_encoding": "learned", "max_position_embeddings": min(ends)})
        PreTrainedModel.__init__(self, config)  # the class's own would build another model
        self.generation_config = members[0].generation_config
        self.members = nn.ModuleList(members)
        self.training = any(member.training for member in members)

    def save_pretrained(self, *args: object, **kwargs: object) -> None:
        """Raises `NotImplementedError`."""
        raise NotImplementedError("an ensemble can't be saved; save its members")

    def get_encoder(self, modality: str | None = None) -> MemberEncoders:
        """Returns the members' encoders as one."""
        return MemberEncoders([member.get_encoder() for member in self.members])

    def forward(
        self,
        input_ids: Tensor | None = None,  # (B, S)
        attention_mask: Tensor | None = None,  # (B, S)
        decoder_input_ids: Tensor | None = None,  # (B, T)
        decoder_attention_mask: Tensor | None = None,  # (B, past + T)
        encoder_outputs: dict[str, Tensor] | None = None,  # in place of input_ids
        past_key_values: MemberCaches | EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> Seq2SeqLMOutput:
        """Predicts the token at each target position: `logits`, (B, T, V), are log-probabilities in float32."""
        # Before the first step, generate() makes one empty cache; each member then makes its own.
        caches = past_key_values.caches if isinstance(past_key_values, MemberCaches) else [None] * len(self.members)
        outputs = [
            member(
                input_ids=input_ids,
                attention_mask=attention_mask,
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask,
                encoder_outputs=None if encoder_outputs is None else BaseModelOutput(encoder_outputs[str(number)]),
                past_key_values=cache,
                use_cache=use_cache,
            )
            for number, (member, cache) in enumerate(zip(self.members, caches, strict=True))
        ]
        log_probabilities = torch.stack([output.logits.float().log_softmax(dim=-1) for output in outputs])
        mean = log_probabilities.logsumexp(dim=0) - math.log(len(outputs))
        caches = [output.past_key_values for output in outputs]
        return Seq2SeqLMOutput(logits=mean, past_key_values=None if caches[0] is None else MemberCaches(caches))
