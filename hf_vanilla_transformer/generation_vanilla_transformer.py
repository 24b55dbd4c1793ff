"""Decoding as in section 6.1 of "Attention Is All You Need", on top of transformers' `generate()`.

Two options of `GenerationConfig` are ours, as the paper's decoding can't be said in transformers' own:

- `gnmt_length_penalty` (float, alpha of Wu et al. 2016, eq. 14): beam search divides a hypothesis's log-probability by
  ((5 + length) / 6) ** alpha. transformers' `length_penalty` is another formula, log-probability / length ** penalty;
  it keeps its meaning, and given to `generate()` it takes the place of ours.
- `max_extra_length` (int): a sentence gets at most as many new tokens as its source has, plus this number, whatever
  batch it is in. `max_new_tokens` or `max_length`, where given, take its place.
"""

import copy
import math
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

# Section 6.1: beam of 4, alpha 0.6, at most 50 tokens more than the source, termination as early as possible.
PAPER_DECODING: dict[str, Any] = {
    "num_beams": 4,
    "early_stopping": True,
    "gnmt_length_penalty": 0.6,
    "max_extra_length": 50,
}

# transformers' last resort for `max_length`. Seq2SeqTrainer writes it into the model's generation config at the first
# evaluation, so there it doesn't mean that anybody has asked for it.
FILLED_IN_MAX_LENGTH = 20


class GNMTLengthPenalty(float):
    """The alpha of Wu et al. 2016 (eq. 14), for which `length ** alpha` is ((5 + length) / 6) ** alpha.

    transformers' beam search divides scores by `length ** length_penalty`: with this number as its penalty, it ranks
    as the paper's does, and stops as its bounds say with the same formula.
    """

    def __rpow__(self, length: int, mod: None = None) -> float:  # type: ignore[override]
        """Returns the divisor of a hypothesis of `length` tokens, the end of sentence included."""
        return ((5 + length) / 6) ** float(self)


class MaxLengthPerSentence(StoppingCriteria):
    """Ends each hypothesis at its own sentence's maximum length, so that no sentence depends on its batch.

    Args:
        max_lengths: Maximum number of decoder tokens of each sentence, the prompt included, of shape (batch,).
    """

    def __init__(self, max_lengths: torch.Tensor) -> None:
        self.max_lengths = max_lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Tells which of `input_ids`, (batch * hypotheses a sentence, length), are at their end, as booleans."""
        max_lengths = self.max_lengths.to(input_ids.device)
        return input_ids.shape[1] >= max_lengths.repeat_interleave(input_ids.shape[0] // len(max_lengths))


class DecodingMixin:
    """Adds the two options to a model that inherits `GenerationMixin`, which comes after it in the bases."""

    generation_config: GenerationConfig

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """Keeps the paper's decoding where a checkpoint has no generation_config.json; called by `from_pretrained`."""
        paper = self.generation_config
        super().adjust_generation_fn(*args, **kwargs)  # type: ignore[misc]
        if self.generation_config._from_model_config:  # transformers' way out then: what config.json says of decoding
            self.generation_config = paper

    def _prepare_generation_config(
        self,
        generation_config: GenerationConfig | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        given = {**(generation_config.to_dict() if generation_config is not None else {}), **kwargs}
        # Ours are no attributes of a bare GenerationConfig, so they are taken out before it is asked for them.
        ours = {name: kwargs.pop(name) for name in ("gnmt_length_penalty", "max_extra_length") if name in kwargs}
        config, model_kwargs = super()._prepare_generation_config(generation_config, *args, **kwargs)  # type: ignore[misc]
        for name, value in ours.items():
            setattr(config, name, value)
        if given.get("length_penalty") is not None and given.get("gnmt_length_penalty") is None:
            config.gnmt_length_penalty = None
        configured = self.generation_config.to_dict()
        if _limits_length(given) or (
            given.get("max_extra_length") is None and _limits_length(configured, FILLED_IN_MAX_LENGTH)
        ):
            config.max_extra_length = None
        config._source_mask = model_kwargs.get("attention_mask")  # for `_prepare_generated_length`
        _validate(config)
        return config, model_kwargs

    def _prepare_generated_length(
        self,
        generation_config: GenerationConfig,
        has_default_max_length: bool,
        has_default_min_length: bool,
        model_input_name: str,
        input_ids_length: int,
        inputs_tensor: torch.Tensor,
    ) -> GenerationConfig:
        extra = getattr(generation_config, "max_extra_length", None)
        if extra is not None:
            pad, mask = self.config.pad_token_id, generation_config._source_mask  # type: ignore[attr-defined]
            lengths = _source_lengths(inputs_tensor, pad, mask)
            max_lengths = input_ids_length + lengths + extra
            if self.config.position_encoding == "learned":  # type: ignore[attr-defined]
                max_lengths = max_lengths.clamp(max=self.config.max_position_embeddings)  # type: ignore[attr-defined]
            generation_config.max_new_tokens = max(int(max_lengths.max()) - input_ids_length, 1)
            generation_config._max_lengths = max_lengths  # for `_get_stopping_criteria`
            has_default_max_length = True  # so that `max_new_tokens` is taken without a warning
        return super()._prepare_generated_length(  # type: ignore[misc]
            generation_config=generation_config,
            has_default_max_length=has_default_max_length,
            has_default_min_length=has_default_min_length,
            model_input_name=model_input_name,
            input_ids_length=input_ids_length,
            inputs_tensor=inputs_tensor,
        )

    def _get_stopping_criteria(
        self,
        generation_config: GenerationConfig,
        *args: Any,
        **kwargs: Any,
    ) -> StoppingCriteriaList:
        criteria = super()._get_stopping_criteria(generation_config, *args, **kwargs)  # type: ignore[misc]
        max_lengths = getattr(generation_config, "_max_lengths", None)
        if max_lengths is not None and len(max_lengths) > 1:  # one sentence alone ends at `max_length`
            criteria.append(MaxLengthPerSentence(max_lengths))
            if generation_config._pad_token_tensor is not None:
                criteria[-1].eos_token_id = None  # its presence makes sampling fill finished rows with padding
        return criteria

    def compute_transition_scores(
        self,
        sequences: torch.Tensor,
        scores: tuple[torch.Tensor, ...],
        beam_indices: torch.Tensor | None = None,
        normalize_logits: bool = False,
    ) -> torch.Tensor:
        """Looks up the scores of generated tokens; transformers' own presumes that the target has `vocab_size` tokens.

        Args:
            sequences: What `generate()` returned, (rows, length).
            scores: One tensor (rows, V) a step, with beams (batch * beams, V).
            beam_indices: Which row of `scores` each token of a beam comes from, (rows, steps), -1 behind the end.
            normalize_logits: Whether to make log-probabilities of the scores first.

        Returns:
            Scores, (rows, steps), 0 behind the end of a beam.
        """
        stacked = torch.stack(scores)  # (steps, rows, V)
        if normalize_logits:
            stacked = stacked.log_softmax(dim=-1)
        if beam_indices is None:
            beam_indices = torch.arange(stacked.shape[1], device=stacked.device)[:, None].expand(-1, len(scores))
        length = int((beam_indices >= 0).sum(dim=1).max())
        rows, steps = beam_indices[:, :length], torch.arange(length, device=beam_indices.device)
        found = stacked[steps, rows.clamp(min=0), sequences[:, sequences.shape[1] - length :]]
        return found.masked_fill(rows < 0, 0.0)

    def _beam_search(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        alpha = getattr(generation_config, "gnmt_length_penalty", None)
        if alpha is not None:
            generation_config = copy.copy(generation_config)
            generation_config.length_penalty = GNMTLengthPenalty(alpha)
        return super()._beam_search(  # type: ignore[misc]
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **kwargs,
        )


def _limits_length(options: dict[str, Any], default: int | None = None) -> bool:
    """Tells whether options of transformers' own limit the length, other than by `default`."""
    return options.get("max_new_tokens") is not None or options.get("max_length") not in (None, default)


def _source_lengths(inputs: torch.Tensor, pad_token_id: int | None, mask: torch.Tensor | None) -> torch.Tensor:
    """Counts source tokens, (batch,), of ids (batch, length) or embeddings (batch, length, d_model)."""
    if mask is not None and mask.ndim == 2:
        return (mask != 0).sum(dim=1)
    if inputs.is_floating_point() or pad_token_id is None:
        return torch.full((inputs.shape[0],), inputs.shape[1])
    return (inputs != pad_token_id).sum(dim=1)


def _validate(config: GenerationConfig) -> None:
    """Checks our two options and that only one length penalty is asked for."""
    alpha = getattr(config, "gnmt_length_penalty", None)
    extra = getattr(config, "max_extra_length", None)
    is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if alpha is not None and not (is_number and 0 <= alpha < math.inf):
        raise ValueError(
            f"`gnmt_length_penalty` is {alpha!r}; it has to be a number from 0 up (the paper: 0.6) or None."
        )
    if extra is not None and (isinstance(extra, bool) or not isinstance(extra, int) or extra < 0):
        raise ValueError(f"`max_extra_length` is {extra!r}; it has to be 0 or more tokens (the paper: 50) or None.")
    if alpha is not None and config.length_penalty not in (None, 1.0):
        raise ValueError(
            f"`gnmt_length_penalty` is {alpha} and `length_penalty` {config.length_penalty}: two formulas for one "
            "thing. Set one of the two to None."
        )


__all__ = ["PAPER_DECODING", "DecodingMixin"]
