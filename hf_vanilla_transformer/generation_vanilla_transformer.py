# SPDX-License-Identifier: Apache-2.0
"""Decoding as in section 6.1 of "Attention Is All You Need", as options on transformers' own `generate()`.

These options of `GenerationConfig` are added, as transformers has no equivalent of the paper's decoding:

- `gnmt_length_penalty` (float, alpha of Wu et al. 2016, eq. 14): beam search divides a hypothesis's log-probability by
  ((5 + length) / 6) ** alpha. transformers' `length_penalty` is another formula, log-probability / length ** penalty;
  it keeps its meaning, and given to `generate()` it takes the place of the paper's.
- `max_extra_length` (int): a sentence gets at most as many new tokens as its source has, plus this number, whatever
  batch it is in. `max_new_tokens` or `max_length`, where given, take its place.

The package hf_vanilla_transformer has an engine for faster decoding: `engine.attach(model)` puts it on a model, and it
adds options of its own. Without it, `generate()` is transformers' loop.
"""

import contextlib
import copy
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers import __version__ as transformers_version

from .integration_vanilla_transformer import CACHE, TESTED_VERSIONS, cache_by_either_name
from .plan_vanilla_transformer import OPTIONS, GNMTLengthPenalty, Plan

# Section 6.1: beam of 4, alpha 0.6, at most 50 tokens more than the source, termination as early as possible.
PAPER_DECODING: dict[str, float | bool] = {
    "num_beams": 4,
    "early_stopping": True,
    "gnmt_length_penalty": 0.6,
    "max_extra_length": 50,
}

# How far logits of a step with a cache may be from those without, as a part of the largest, in any floating-point type.
CACHE_TOLERANCE = 0.05

POSITIONAL = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]


class MaxLengthPerSentence(StoppingCriteria):
    """Ends each hypothesis at its own sentence's maximum length, so that no sentence depends on its batch."""

    def __init__(self, max_new_tokens: Tensor) -> None:
        self.max_new_tokens = max_new_tokens  # of each sentence, (B,)
        self.prompt_length: int | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Tells which of `input_ids`, (batch * hypotheses per sentence, length), are at their end, as booleans."""
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1] - 1  # it is asked for the first time after the first new token
        longest = self.max_new_tokens.to(input_ids.device)
        return input_ids.shape[1] - self.prompt_length >= longest.repeat_interleave(len(input_ids) // len(longest))


class ForcedEndPerSentence(LogitsProcessor):
    """Makes `ends` the last token of each sentence's own maximum length; transformers' processor knows the batch's."""

    def __init__(self, limit: MaxLengthPerSentence, ends: int | list[int]) -> None:
        self.limit, self.ends = limit, torch.tensor(ends).flatten()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns scores, (rows, V), -inf but for the ends (0) where the next token is a sentence's last."""
        is_last = self.limit(F.pad(input_ids, (0, 1)), scores)
        forced = torch.full_like(scores, -math.inf).index_fill(1, self.ends.to(scores.device), 0.0)
        return torch.where(is_last[:, None], forced, scores)


class DecodingMixin:
    """Adds the options above to a model whose next base is `GenerationMixin`."""

    generation_config: GenerationConfig
    config: Any
    device: torch.device
    training: bool
    eval: Any
    train: Any
    mask_of_left_padding: Any  # the model's
    engine: Any = None  # what `hf_vanilla_transformer.engine.attach` puts there: it decodes in place of this file
    has_checked_cache = transformers_version.startswith(tuple(f"{one}." for one in TESTED_VERSIONS))

    @cache_by_either_name(CACHE)
    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates as `GenerationMixin.generate` does, with its arguments and the options above.

        Raises:
            ValueError: An option has a wrong value, two contradict each other, or one needs the engine.
        """
        kwargs = dict(zip(POSITIONAL, args, strict=False)) | kwargs
        if self.engine is not None:
            return self.engine.generate(self, kwargs)
        return self.generate_by_transformers(kwargs)

    def generate_by_transformers(self, kwargs: dict[str, Any]) -> Any:
        """Generates by transformers' own loop; `kwargs` as for `prepare_decoding`."""
        if not DecodingMixin.has_checked_cache and kwargs.get("use_cache", True) is not False:
            self.check_cache()
        return super().generate(**self.prepare_decoding(kwargs))  # type: ignore[misc]

    def check_cache(self) -> None:
        """Compares a step with a cache to one without: once in a process, under a version that no test has run with.

        Raises:
            RuntimeError: They differ, so that translations would be wrong.
        """
        expected, difference = self.logits_of_second_step(use_cache=False), math.inf
        with contextlib.suppress(TypeError):  # a forward that refuses a keyword
            difference = float((self.logits_of_second_step(use_cache=True) - expected).abs().max())
        if not difference <= CACHE_TOLERANCE * float(expected.abs().max()):
            raise RuntimeError(
                f"Under transformers {transformers_version}, this model decodes something else with a cache than "
                f"without: it was tested with {' and '.join(TESTED_VERSIONS)} alone. Install one of these, or pass "
                "`use_cache=False`: correct, but slower."
            )
        DecodingMixin.has_checked_cache = True

    def logits_of_second_step(self, use_cache: bool) -> Tensor:
        """Decodes two tokens for a source of five, greedily; returns the logits of the second, (1, V)."""
        source = torch.arange(5, device=self.device)[None] % self.config.vocab_size
        config = GenerationConfig(
            num_beams=1,
            early_stopping=False,
            do_sample=False,
            min_new_tokens=2,
            max_new_tokens=2,
            return_dict_in_generate=True,
            output_logits=True,
            **(self.config.decoding_tokens | {"use_cache": use_cache}),
        )
        was_training = self.training
        try:
            inputs = {"input_ids": source, "attention_mask": torch.ones_like(source), "generation_config": config}
            output = GenerationMixin.generate(self.eval(), **inputs)
        finally:
            self.train(was_training)
        return output.logits[1]

    def prepare_decoding(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Puts the options above into terms of transformers: a length penalty, lengths and a stopping criterion.

        It returns arguments of `GenerationMixin.generate`; `kwargs`, those of `generate()` by name, stay as they are.

        Raises:
            ValueError: An option has a wrong value, two contradict each other, or one needs the engine.
        """
        if "compute_type" in kwargs:
            raise ValueError(
                "`compute_type` is no option of `generate()`; call hf_vanilla_transformer.engine.attach(model, "
                "compute_type=...) before."
            )
        plan = Plan.of(kwargs, self.generation_config)
        if plan.needs_attention:
            name = "coverage_penalty" if plan.coverage_penalty else "output_alignments"
            raise ValueError(
                f"`{name}` needs the engine: call hf_vanilla_transformer.engine.attach(model), or set it to None."
            )
        kwargs = {name: value for name, value in kwargs.items() if name not in OPTIONS}
        if kwargs.get("use_cache", True) is None:  # transformers would feed complete prefixes into a cache
            del kwargs["use_cache"]
        kwargs["generation_config"] = copy.deepcopy(kwargs.get("generation_config"))
        if isinstance(plan.length_penalty, GNMTLengthPenalty) and plan.num_beams > 1:
            _put(kwargs, "length_penalty", plan.length_penalty)
        self.mask_padding(plan, kwargs)
        _go_on_from_cache(plan, kwargs)
        if plan.limit[0] == "max_extra_length":
            self._limit_lengths(plan, kwargs)
        return kwargs

    def source_lengths(self, source: Tensor, mask: Tensor | None) -> list[int]:
        """Counts tokens without padding, of ids, (B, S), embeddings or the encoder's output, (B, S, d_model)."""
        if mask is not None and mask.ndim == 2:
            return (mask != 0).sum(dim=1).tolist()
        if source.is_floating_point() or self.config.pad_token_id is None:
            return [source.shape[1]] * len(source)
        return (source != self.config.pad_token_id).sum(dim=1).tolist()

    def max_new_tokens(self, plan: Plan, source_lengths: Sequence[int], prompt_length: int = 1) -> list[int]:
        """Returns how many tokens each sentence gets at most: those of its plan, or fewer where positions end."""
        longest = [plan.max_new_tokens(length, prompt_length) for length in source_lengths]
        if plan.limit[0] == "max_extra_length" and self.config.position_encoding == "learned":
            known = max(self.config.max_position_embeddings - prompt_length, 1)
            longest = [min(one, known) for one in longest]
        return longest

    def mask_padding(self, plan: Plan, kwargs: dict[str, Any]) -> None:
        """Masks padding of source ids, and before the first token of prompts, where the caller gives no mask.

        Padding is recognised only if its id is neither an end's nor the start token's.
        """
        ids: Any = kwargs.get("input_ids") if kwargs.get("inputs") is None else kwargs["inputs"]
        prompt, pad = kwargs.get("decoder_input_ids"), self.config.pad_token_id
        are_ids = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.ndim == 2
        if are_ids and kwargs.get("attention_mask") is None and pad is not None and pad not in plan.ends:
            kwargs["attention_mask"] = (ids != pad).long() if (ids == pad).any() else None
        if prompt is None or kwargs.get("decoder_attention_mask") is not None or plan.start == pad:
            return
        mask = self.mask_of_left_padding(prompt, None)
        if mask is not None and not mask.all():
            kwargs["decoder_attention_mask"] = mask.long()

    def _limit_lengths(self, plan: Plan, kwargs: dict[str, Any]) -> None:
        """Gives each sentence its maximum length by `max_extra_length`."""
        source, mask, prompt = _source_of(kwargs), kwargs.get("attention_mask"), kwargs.get("decoder_input_ids")
        if source is None:
            return
        begin = 1
        if prompt is not None:  # transformers sets the start token before one without it
            begin = prompt.shape[1] + int(plan.start is not None and bool((prompt[:, 0] != plan.start).all()))
        longest = self.max_new_tokens(plan, self.source_lengths(source, mask), begin)
        _put(kwargs, "max_new_tokens", max(longest))
        _put(kwargs, "max_length", None)
        if len(source) > 1:  # one sentence alone ends at `max_new_tokens`
            criterion = MaxLengthPerSentence(torch.tensor(longest))
            if plan.padding is not None or plan.ends:
                criterion.eos_token_id = None  # sampling then fills finished rows
            kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), criterion])
            if plan.forced_end and len(set(longest)) > 1:
                forcing = ForcedEndPerSentence(criterion, list(plan.forced_end))
                kwargs["logits_processor"] = [*(kwargs.get("logits_processor") or []), forcing]


def _go_on_from_cache(plan: Plan, kwargs: dict[str, Any]) -> None:
    """Masks a prompt whose beginning is in the cache: without a mask, transformers would feed that once more."""
    cache, prompt = kwargs.get(CACHE), kwargs.get("decoder_input_ids")
    past = 0 if cache is None else int(cache.get_seq_length())
    if past and plan.num_beams > 1:  # a search leaves other hypotheses in it than the prompt
        raise ValueError(f"`{CACHE}` has a past, from which only num_beams=1 goes on; leave it out, or search greedily")
    if past and prompt is not None and prompt.shape[1] > past and kwargs.get("decoder_attention_mask") is None:
        kwargs["decoder_attention_mask"] = torch.ones_like(prompt)


def _put(kwargs: dict[str, Any], name: str, value: object) -> None:
    """Writes to the caller's generation_config if there is one; transformers warns of options at both places."""
    if kwargs["generation_config"] is None:
        kwargs[name] = value
    else:
        kwargs.pop(name, None)  # an explicit None would override the configuration's
        setattr(kwargs["generation_config"], name, value)


def _source_of(kwargs: dict[str, Any]) -> Tensor | None:
    """Returns source ids, (B, S), or embeddings or the encoder's output, (B, S, d_model); None: there is none."""
    encoded = kwargs.get("encoder_outputs")
    encoded = None if encoded is None else encoded[0]
    sources = (kwargs.get("inputs"), kwargs.get("input_ids"), kwargs.get("inputs_embeds"), encoded)
    source = next((one for one in sources if one is not None), None)
    return source if isinstance(source, Tensor) and source.ndim >= 2 else None


__all__ = ["PAPER_DECODING", "DecodingMixin"]
