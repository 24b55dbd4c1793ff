# SPDX-License-Identifier: Apache-2.0
"""Decoding as in section 6.1 of "Attention Is All You Need", as options on transformers' own `generate()`.

These options of `GenerationConfig` are ours, as transformers has no equivalent of the paper's decoding:

- `gnmt_length_penalty` (float, alpha of Wu et al. 2016, eq. 14): beam search divides a hypothesis's log-probability by
  ((5 + length) / 6) ** alpha. transformers' `length_penalty` is another formula, log-probability / length ** penalty;
  it keeps its meaning, and given to `generate()` it takes the place of ours.
- `max_extra_length` (int): a sentence gets at most as many new tokens as its source has, plus this number, whatever
  batch it is in. `max_new_tokens` or `max_length`, where given, take its place.

These need an engine, which the package hf_vanilla_transformer provides when it is imported:

- `coverage_penalty` (float, beta of the same): adds beta * sum_i log(min(sum_j p_ij, 1)) to the score of a hypothesis
  that has ended, p_ij being how much its token j attends to source token i (last layer, mean of the heads).
- `output_alignments` (bool): the output has that attention as `alignments`, (rows, T, S).
- `compute_type`: how a step is computed: "default", "int8" (8-bit weights) or "compiled" (machine code), on a CPU.

And `generate(..., progress=function)` calls the function with the number of sentences translated since its last call.
The engine computes what transformers' loop does, faster, and leaves to the latter whatever it isn't sure of. With
`return_dict_in_generate=True`, beam search has `sequences_scores` either way; the engine's `past_key_values` is None.
"""

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

logger = logging.get_logger(__name__)

OPTIONS = ("gnmt_length_penalty", "max_extra_length", "coverage_penalty", "output_alignments", "compute_type")
COMPUTE_TYPES = ("default", "int8", "compiled")

# Section 6.1: beam of 4, alpha 0.6, at most 50 tokens more than the source, termination as early as possible.
PAPER_DECODING: dict[str, Any] = {
    "num_beams": 4,
    "early_stopping": True,
    "gnmt_length_penalty": 0.6,
    "max_extra_length": 50,
}

# transformers' default of `max_length`, and what Seq2SeqTrainer fills in beside it.
DEFAULT_MAX_LENGTH = 20
FILLED_IN = ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "num_return_sequences")
POSITIONAL = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:]


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
        max_new_tokens: Maximum number of new tokens of each sentence, of shape (batch,).
    """

    def __init__(self, max_new_tokens: Tensor) -> None:
        self.max_new_tokens = max_new_tokens
        self.prompt_length: int | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Tells which of `input_ids`, (batch * hypotheses per sentence, length), are at their end, as booleans."""
        if self.prompt_length is None:
            self.prompt_length = input_ids.shape[1] - 1  # it is asked for the first time after the first new token
        longest = self.max_new_tokens.to(input_ids.device)
        return input_ids.shape[1] - self.prompt_length >= longest.repeat_interleave(len(input_ids) // len(longest))


class EngineSlot:
    """The place for an engine, which the package fills when it is imported; before `PreTrainedModel` in the bases."""

    engine: ClassVar[Any] = None  # see `hf_vanilla_transformer.engine.Engine`

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """Loads a model; warns if the checkpoint has code of its own that differs from this, which is what runs."""
        loaded = super().from_pretrained(name, *args, **kwargs)  # type: ignore[misc]
        if cls.engine is not None:
            cls.engine.compare_code(name, loaded[0] if isinstance(loaded, tuple) else loaded, **kwargs)
        return loaded

    def train(self, mode: bool = True) -> Any:
        """Switches to training mode, in which the engine holds nothing of this model, or out of it."""
        if mode and self.engine is not None:
            self.engine.release(self)
        return super().train(mode)  # type: ignore[misc]


class DecodingMixin:
    """Adds our options to a model that inherits `GenerationMixin`, which comes after it in the bases."""

    generation_config: GenerationConfig
    config: Any
    engine: Any

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """Keeps the paper's decoding where a checkpoint has no generation_config.json; called by `from_pretrained`."""
        paper = self.generation_config
        super().adjust_generation_fn(*args, **kwargs)  # type: ignore[misc]
        if self.generation_config._from_model_config:  # transformers' way out then: what config.json says of decoding
            self.generation_config = paper

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shifts labels, (B, T), padded with -100 on either side, right: the target begins with the start token (3.1).

        Raises:
            ValueError: The configuration has no such token, or none for padding.
        """
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            raise ValueError("Shifting labels right needs `decoder_start_token_id` and `pad_token_id` in the config.")
        real = labels != -100
        first = real & (real.cumsum(dim=-1) == 1)
        first[:, 0] |= ~real.any(dim=-1)  # a row without labels starts too
        shifted = F.pad(labels, (1, -1), value=-100)
        return shifted.masked_fill(shifted == -100, pad).masked_fill(first, start)

    def mask_of_left_padding(self, decoder_input_ids: Tensor | None, labels: Tensor | None) -> Tensor | None:
        """Masks what stands before the first token of a target, (B, T); what stands behind the last, no token sees.

        None where padding can't be told from the start token.
        """
        pad = self.config.pad_token_id or 0
        if labels is not None:
            return (labels != -100).cumsum(dim=-1) > 0
        if decoder_input_ids is None or self.config.decoder_start_token_id == pad:
            return None
        return (decoder_input_ids != pad).cumsum(dim=-1) > 0

    @torch.no_grad()
    def generate(self, *args: Any, progress: Callable[[int], Any] | None = None, **kwargs: Any) -> Any:
        """Generates as `GenerationMixin.generate` does, whose arguments these are, with the options above.

        Raises:
            ValueError: An option has a wrong value, two contradict each other, or one can't be had here.
        """
        kwargs = dict(zip(POSITIONAL, args, strict=False)) | kwargs
        kwargs["generation_config"] = copy.deepcopy(kwargs.get("generation_config"))
        own_config = {} if kwargs["generation_config"] is None else vars(kwargs["generation_config"])
        given = {name: value for name, value in own_config.items() if value is not None} | kwargs
        if isinstance(given.get("length_penalty"), GNMTLengthPenalty):  # of a configuration that was prepared here
            given |= {"gnmt_length_penalty": float(given["length_penalty"]), "length_penalty": None}
        settings = {**dict.fromkeys(OPTIONS), **vars(self.generation_config), **given}
        if given.get("length_penalty") is not None and given.get("gnmt_length_penalty") is None:
            settings["gnmt_length_penalty"] = None
        _validate(settings)
        kwargs = {name: value for name, value in kwargs.items() if name not in OPTIONS}
        if settings["gnmt_length_penalty"] is not None and (settings.get("num_beams") or 1) > 1:
            _put(kwargs, "length_penalty", GNMTLengthPenalty(settings["gnmt_length_penalty"]))
        self._limit_lengths(settings, given, kwargs)
        if self.engine is not None:
            return self.engine.generate(self, super().generate, settings, given, kwargs, progress)  # type: ignore[misc]
        refuse(settings, given, "there is no engine; import hf_vanilla_transformer, which has one")
        output = super().generate(**kwargs)  # type: ignore[misc]
        if progress is not None:
            sequences = output if isinstance(output, Tensor) else output.sequences
            progress(len(sequences) // (settings.get("num_return_sequences") or 1))
        return output

    def _limit_lengths(self, settings: dict[str, Any], given: dict[str, Any], kwargs: dict[str, Any]) -> None:
        """Gives each sentence its maximum length by `max_extra_length`, where that counts."""
        extra, source, mask = settings["max_extra_length"], _source_of(kwargs), kwargs.get("attention_mask")
        limits = any(given.get(name) is not None for name in ("max_new_tokens", "max_length"))
        if given.get("max_extra_length") is None:
            limits = limits or _limits_length(self.generation_config)
        if extra is None or source is None or limits:
            return
        lengths = torch.full((len(source),), source.shape[1])  # (B,)
        if mask is not None and mask.ndim == 2:
            lengths = (mask != 0).sum(dim=1)
        elif not source.is_floating_point() and self.config.pad_token_id is not None:
            lengths = (source != self.config.pad_token_id).sum(dim=1)
        longest = lengths + extra
        if self.config.position_encoding == "learned":
            prompt = kwargs.get("decoder_input_ids")
            known = self.config.max_position_embeddings - (1 if prompt is None else prompt.shape[1])
            longest = longest.clamp(max=max(known, 0))
        _put(kwargs, "max_new_tokens", max(int(longest.max()), 1))
        _put(kwargs, "max_length", None)
        if len(source) > 1:  # one sentence alone ends at `max_new_tokens`
            criterion = MaxLengthPerSentence(longest.clamp(min=1))
            if settings.get("pad_token_id") is not None or settings.get("eos_token_id") is not None:
                criterion.eos_token_id = None  # sampling then fills finished rows
            kwargs["stopping_criteria"] = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or []), criterion])

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
        chosen = stacked[steps, rows.clamp(min=0), sequences[:, sequences.shape[1] - length :]]
        return chosen.masked_fill(rows < 0, 0.0)


def refuse(settings: dict[str, Any], given: dict[str, Any], reason: str) -> None:
    """Refuses options that only an engine can do, where there is none for this call.

    A `compute_type` that doesn't change the result, or that the caller hasn't asked for, is only warned of.

    Args:
        settings: Every option as it counts.
        given: Those that the caller of `generate()` has given.
        reason: What keeps the engine from it.

    Raises:
        ValueError: An option can't be had.
    """
    compute_type = settings.get("compute_type") or "default"
    wanted = [name for name in ("coverage_penalty", "output_alignments") if settings.get(name)]
    if compute_type == "int8" and given.get("compute_type") == "int8":
        wanted.append("compute_type")
    if wanted:
        raise ValueError(f"`{wanted[0]}` can't be had here, as {reason}; leave it out, or change that.")
    if compute_type != "default":
        logger.warning_once(f'`compute_type` is "default" and not "{compute_type}" here, as {reason}.')


def _put(kwargs: dict[str, Any], name: str, value: Any) -> None:
    """Sets an option where the caller has set his; transformers warns where there are options at both places."""
    if kwargs["generation_config"] is None:
        kwargs[name] = value
    else:
        setattr(kwargs["generation_config"], name, value)


def _source_of(kwargs: dict[str, Any]) -> Tensor | None:
    """Returns source ids, (B, S), or embeddings or the encoder's output, (B, S, d_model); None: there is nothing."""
    encoded = kwargs.get("encoder_outputs")
    if encoded is not None:
        encoded = encoded[0] if isinstance(encoded, tuple) else next(iter(encoded.values()))
    sources = (kwargs.get("inputs"), kwargs.get("input_ids"), kwargs.get("inputs_embeds"), encoded)
    source = next((one for one in sources if one is not None), None)
    return source if isinstance(source, Tensor) and source.ndim >= 2 else None


def _limits_length(config: GenerationConfig) -> bool:
    """Tells whether a model's own configuration limits the length by an option of transformers'.

    Its default for `max_length`, 20, doesn't count where it came with all other defaults: Seq2SeqTrainer writes them.
    """
    if config.max_new_tokens is not None or config.max_length not in (None, DEFAULT_MAX_LENGTH):
        return True
    filled_in = [getattr(config, name) is not None for name in FILLED_IN]
    if config.max_length is None or all(filled_in):
        return False
    if any(filled_in):
        logger.warning_once(
            f"`max_length` of the model's generation config is {DEFAULT_MAX_LENGTH}, which ends translations early. A "
            "Trainer may have written it; here it counts. Set it to None to let `max_extra_length` count."
        )
    return True


def _validate(settings: dict[str, Any]) -> None:
    """Checks our options and that only one length penalty is asked for."""
    alpha, beta = settings["gnmt_length_penalty"], settings["coverage_penalty"]
    for name, value, usual in (("gnmt_length_penalty", alpha, "the paper: 0.6"), ("coverage_penalty", beta, "0.2")):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 <= value < math.inf):
            raise ValueError(f"`{name}` is {value!r}; it has to be a number from 0 up ({usual}) or None.")
    extra, compute_type = settings["max_extra_length"], settings["compute_type"]
    if extra is not None and (isinstance(extra, bool) or not isinstance(extra, int) or extra < 0):
        raise ValueError(f"`max_extra_length` is {extra!r}; it has to be 0 or more tokens (the paper: 50) or None.")
    if compute_type not in (None, *COMPUTE_TYPES):
        choices = ", ".join(map(repr, COMPUTE_TYPES))
        raise ValueError(f"`compute_type` is {compute_type!r}; choose one of {choices}, or None.")
    if alpha is not None and settings.get("length_penalty") not in (None, 1.0):
        raise ValueError(
            f"`gnmt_length_penalty` is {alpha} and `length_penalty` {settings['length_penalty']}: two formulas for one "
            "thing. Set one of the two to None."
        )


__all__ = ["PAPER_DECODING", "DecodingMixin", "EngineSlot"]
