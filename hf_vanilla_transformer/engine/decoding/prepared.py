"""Models that are prepared for decoding: what each kind of decoder has in common, and several of them as one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...plan_vanilla_transformer import Plan
from .scores import score_processor
from .search import Decoder, Hypothesis, beam_search, greedy_search

Memory: TypeAlias = Any  # the output of an encoder, (B, S, d_model); of several as one, a list


class Prepared(ABC):
    """A model, prepared for decoding."""

    device: torch.device
    vocab_size: int  # V, of the target
    is_exact: bool = True  # it computes what the model's own modules do, but for rounding

    def unsupported(self, plan: Plan) -> str | None:
        """Says which setting of a plan it lacks and why, or None."""
        if plan.others:
            return f"`{plan.others[0]}` is given"
        if plan.limit[0] == "default":
            return "nothing limits the length, and transformers has a default"
        if plan.num_hypotheses > plan.num_beams:
            return "more hypotheses than beams are asked for"
        if plan.start is None:
            return "there is no start token"
        if plan.forced_begin in plan.barred or {*plan.forced_end} & {*plan.barred, *plan.barred_at_begin}:
            return "a token is forced and barred"
        if len(plan.forced_end) > 1:
            return "several tokens are forced at the end, and their scores are equal"
        if plan.forced_end and plan.limit[0] == "max_extra_length":
            return "an end is forced at each sentence's own limit"
        return None

    @abstractmethod
    def encode(self, input_ids: Tensor, attention_mask: Tensor | None) -> Memory:
        """Returns the encoder's output, (B, S, d_model), of ids and mask, (B, S) each."""

    @abstractmethod
    def decoder(self, memory: Memory, attention_mask: Tensor | None, plan: Plan) -> Decoder:
        """Begins to decode a batch: the encoder's output, its mask (None: there is no padding), and how."""

    def search(
        self,
        plan: Plan,  # `unsupported` has nothing against it
        memory: Memory,  # what `encode` returned
        attention_mask: Tensor | None,  # (B, S), 0 for padding
        prompts: Tensor,  # what each target begins with, (B, P), the start token first
        max_new_tokens: Sequence[int],  # of each sentence, from 1 up
    ) -> list[list[Hypothesis]]:
        """Searches for the translations of a batch: hypotheses of each sentence, the best first."""
        decoder = self.decoder(memory, attention_mask, plan)
        process = score_processor(plan, self.vocab_size, prompts, max(max_new_tokens))
        if plan.num_beams > 1:
            return beam_search(decoder, prompts, max_new_tokens, plan, process, attention_mask)
        return greedy_search(decoder, prompts, max_new_tokens, plan, process)


class Averaged(Prepared):
    """Models of one device and vocabulary as one: at each step, its probabilities are the mean of theirs."""

    def __init__(self, members: Sequence[Prepared]) -> None:
        self.members = members
        self.device, self.vocab_size = members[0].device, members[0].vocab_size

    def encode(self, input_ids: Tensor, attention_mask: Tensor | None) -> list[Memory]:
        """Encodes a source by each member."""
        return [one.encode(input_ids, attention_mask) for one in self.members]

    def decoder(self, memory: Memory, attention_mask: Tensor | None, plan: Plan) -> "AveragedDecoder":
        """Begins to decode a batch with each member."""
        pairs = zip(self.members, memory, strict=True)
        return AveragedDecoder([one.decoder(own, attention_mask, plan) for one, own in pairs])


class AveragedDecoder(Decoder):
    """Decoders of the same batch as one."""

    def __init__(self, decoders: Sequence[Decoder]) -> None:
        self.decoders, self.keeps_places = decoders, all(one.keeps_places for one in decoders)
        self.attention: Tensor | None = None  # the mean of the members'

    def step(self, tokens: Tensor) -> Tensor:
        """Advances by one position with each member: log-probabilities, (rows, V), in float32."""
        log_probabilities = torch.stack([one.step(tokens).float().log_softmax(dim=-1) for one in self.decoders])
        kept = [one.attention for one in self.decoders if one.attention is not None]
        self.attention = torch.stack(kept).mean(dim=0) if kept else None
        return log_probabilities.logsumexp(dim=0).sub_(math.log(len(self.decoders)))

    def move(self, rows: Tensor, sentences: Tensor) -> None:
        """Moves the rows of each member."""
        for one in self.decoders:
            one.move(rows, sentences)
