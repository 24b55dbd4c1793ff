"""Decoding as in section 6.1 of "Attention Is All You Need", on top of transformers' `generate()`.

`generate()` takes our own search and incremental decoder wherever the settings allow it, and transformers' own loop
where they don't; both find the same. Why the latter was taken is logged once at debug level. With
`return_dict_in_generate=True`, our beam search returns `sequences_scores` also without `output_scores`, which asks for
the scores of all tokens at each step, and no `past_key_values`.

These options of `GenerationConfig` are ours, as the paper's decoding can't be said in transformers' own:

- `gnmt_length_penalty` (float, alpha of Wu et al. 2016, eq. 14): beam search divides a hypothesis's log-probability by
  ((5 + length) / 6) ** alpha. transformers' `length_penalty` is another formula, log-probability / length ** penalty;
  it keeps its meaning, and given to `generate()` it takes the place of ours.
- `coverage_penalty` (float, beta of the same): adds beta * sum_i log(min(sum_j p_ij, 1)) to the score of a hypothesis
  that has ended, p_ij being how much its token j attends to source token i (last layer, mean of the heads).
- `max_extra_length` (int): a sentence gets at most as many new tokens as its source has, plus this number, whatever
  batch it is in. `max_new_tokens` or `max_length`, where given, take its place.
- `output_alignments` (bool): the output has that attention as `alignments`; see `BeamSearchOutput`.
- `compute_type` ("default", "int8" or "compiled"): how a step of decoding is computed; see `COMPUTE_TYPES`.

And `generate(..., progress=function)` calls the function with the number of sentences found since its last call.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerationMode, logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from .compiled_vanilla_transformer import CompiledDecoder
from .incremental_vanilla_transformer import COMPUTE_TYPES, IncrementalDecoder, encode, weights_of, why_not
from .search_vanilla_transformer import BeamRules, BeamSearch, Processor, beam_search, greedy_search, ignore

logger = logging.get_logger(__name__)
_reported: set[str] = set()  # why transformers' own loop was taken, so far

OWN_OPTIONS = ("gnmt_length_penalty", "max_extra_length", "coverage_penalty", "output_alignments", "compute_type")
# Those that transformers' own loop can't do.
NEEDING_OWN_SEARCH = ("coverage_penalty", "output_alignments", "compute_type")

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


@dataclass
class GenerateCall:
    """What one call of `generate()` knows, kept in its generation config as `_call` from one hook to the next.

    Attributes:
        progress: Called with the number of sentences found since the last time.
        source_mask: The `attention_mask` that the caller has given, if any.
        max_lengths: Of `MaxLengthPerSentence`, (batch,); None where all sentences have one limit.
        is_checked: Whether `reason_against` has been found out.
        reason_against: What speaks against computing with prepared weights, or None.
        weights: The prepared weights, once they are needed.
    """

    progress: Callable[[int], Any] = ignore
    source_mask: Tensor | None = None
    max_lengths: Tensor | None = None
    is_checked: bool = False
    reason_against: str | None = None
    weights: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "GenerateCall":
        """Is the same call in a copy of the config: weights are large, and progress has one place to go."""
        return self


def _call_of(config: GenerationConfig) -> GenerateCall:
    call: GenerateCall | None = getattr(config, "_call", None)
    return GenerateCall() if call is None else call  # assisted decoding prepares the assistant's config by itself


class DecodingMixin:
    """Adds our options and our search to a model that inherits `GenerationMixin`, which comes after it in the bases."""

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
        given = {**(vars(generation_config) if generation_config is not None else {}), **kwargs}
        # Ours are no attributes of a bare GenerationConfig, so they are taken out before it is asked for them.
        ours = {name: kwargs.pop(name) for name in OWN_OPTIONS if name in kwargs}
        progress = kwargs.pop("progress", None) or ignore
        config, model_kwargs = super()._prepare_generation_config(generation_config, *args, **kwargs)  # type: ignore[misc]
        for name, value in ours.items():
            setattr(config, name, value)
        if given.get("length_penalty") is not None and given.get("gnmt_length_penalty") is None:
            config.gnmt_length_penalty = None
        configured = vars(self.generation_config)
        if _limits_length(given) or (
            given.get("max_extra_length") is None and _limits_length(configured, FILLED_IN_MAX_LENGTH)
        ):
            config.max_extra_length = None
        config._call = GenerateCall(progress, model_kwargs.get("attention_mask"))
        _validate(config)
        return config, model_kwargs

    def _prepare_text_encoder_decoder_kwargs_for_generation(
        self,
        inputs_tensor: Tensor,
        model_kwargs: dict[str, Any],
        model_input_name: str | None,
        generation_config: GenerationConfig,
    ) -> dict[str, Any]:
        config, mask = generation_config, model_kwargs.get("attention_mask")
        shows = config.output_attentions or config.output_hidden_states
        if model_input_name == "input_ids" and not shows and self._reason_against(_call_of(config), mask) is None:
            with torch.no_grad():
                model_kwargs["encoder_outputs"] = self._encode(self._prepared(config), inputs_tensor, mask)
            return model_kwargs
        return super()._prepare_text_encoder_decoder_kwargs_for_generation(  # type: ignore[misc]
            inputs_tensor, model_kwargs, model_input_name, generation_config
        )

    def _reason_against(self, call: GenerateCall, mask: Tensor | None) -> str | None:
        """Says what speaks against computing with prepared weights, or None; finds out once a call."""
        if not call.is_checked:
            call.is_checked, call.reason_against = True, self._why_not_incremental()
            if mask is not None and (mask.ndim != 2 or not mask.any(dim=1).all()):
                call.reason_against = "a source is all padding"
        return call.reason_against

    def _prepared(self, config: GenerationConfig) -> Any:
        """Returns the weights to compute with, prepared once a call."""
        call = _call_of(config)
        if call.weights is None:
            call.weights = self._weights(getattr(config, "compute_type", None) or "default")
        return call.weights

    def _validate_generation_mode(self, generation_mode: Any, generation_config: GenerationConfig, *args: Any) -> None:
        super()._validate_generation_mode(generation_mode, generation_config, *args)  # type: ignore[misc]
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            _refuse_own_options(generation_config, "assisted decoding has a loop of its own")

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
            pad, mask = self.config.pad_token_id, _call_of(generation_config).source_mask  # type: ignore[attr-defined]
            lengths = _source_lengths(inputs_tensor, pad, mask)
            max_lengths = input_ids_length + lengths + extra
            if self.config.position_encoding == "learned":  # type: ignore[attr-defined]
                max_lengths = max_lengths.clamp(max=self.config.max_position_embeddings)  # type: ignore[attr-defined]
            generation_config.max_new_tokens = max(int(max_lengths.max()) - input_ids_length, 1)
            _call_of(generation_config).max_lengths = max_lengths  # for `_get_stopping_criteria`
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
        max_lengths = _call_of(generation_config).max_lengths
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
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        alpha = getattr(generation_config, "gnmt_length_penalty", None)
        if alpha is not None:
            generation_config = copy.copy(generation_config)
            generation_config.length_penalty = GNMTLengthPenalty(alpha)
        settings = (input_ids, logits_processor, stopping_criteria, generation_config)
        batch = self._incremental_batch(*settings, synced_gpus=synced_gpus, **model_kwargs)
        if batch is None:
            found = super()._beam_search(*settings, synced_gpus=synced_gpus, **model_kwargs)  # type: ignore[misc]
            _report_all(generation_config, len(input_ids))
            return found
        beta = getattr(generation_config, "coverage_penalty", None) or 0.0
        keeps_attention = getattr(generation_config, "output_alignments", None) or False
        rules = BeamRules(
            generation_config.num_beams,
            batch.ends,
            generation_config.length_penalty,
            generation_config.early_stopping,
            beta,
        )
        searches, attention = beam_search(
            batch.decoder,
            batch.prompts,
            batch.max_new_tokens,
            rules,
            batch.process,
            keeps_attention,
            _call_of(generation_config).progress,
        )
        output = _beam_output(searches, attention, batch.prompts, generation_config)
        return output if generation_config.return_dict_in_generate else output.sequences

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        settings = (input_ids, logits_processor, stopping_criteria, generation_config)
        others = {"synced_gpus": synced_gpus, "streamer": streamer, **model_kwargs}
        batch = self._incremental_batch(*settings, **others)
        if batch is None:
            sampled = super()._sample(*settings, **others)  # type: ignore[misc]
            _report_all(generation_config, len(input_ids))
            return sampled
        keeps_attention = getattr(generation_config, "output_alignments", None) or False
        found, attention = greedy_search(
            batch.decoder,
            batch.prompts,
            batch.max_new_tokens,
            batch.ends,
            batch.process,
            ignore if streamer is None else lambda token: streamer.put(torch.tensor([token])),
            keeps_attention,
            _call_of(generation_config).progress,
        )
        if streamer is not None:
            streamer.end()
        padding = generation_config._pad_token_tensor
        sequences = _fill(found, batch.prompts, 0 if padding is None else int(padding))
        alignments = _padded([torch.stack(rows) for rows in attention]) if keeps_attention else None
        output = GreedySearchOutput(sequences, alignments=alignments)
        return output if generation_config.return_dict_in_generate else sequences

    def _incremental_batch(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        **model_kwargs: Any,
    ) -> "IncrementalBatch | None":
        """Prepares what is decoded here; None: transformers' own loop has to do it."""
        memory_mask = model_kwargs.get("attention_mask")
        reason = _not_covered(logits_processor, stopping_criteria, config, model_kwargs)
        reason = reason or self._reason_against(_call_of(config), memory_mask)
        if reason is not None:
            _refuse_own_options(config, reason)
            if reason not in _reported:
                _reported.add(reason)
                logger.debug(f"generate() takes transformers' own loop, as {reason}.")
            return None
        expansion = max(config.num_beams, config.num_return_sequences)
        limits = [criterion for criterion in stopping_criteria if isinstance(criterion, MaxLengthPerSentence)]
        prompts = input_ids[::expansion]
        longest = [config.max_length - prompts.shape[1]] * len(prompts)
        for limit in limits:
            own_longest = (limit.max_lengths - prompts.shape[1]).clamp(min=1).tolist()
            longest = [min(pair) for pair in zip(longest, own_longest, strict=True)]
        decoder = self._incremental_decoder(
            self._prepared(config),
            {name: value[::expansion] for name, value in model_kwargs["encoder_outputs"].items() if value is not None},
            None if memory_mask is None else memory_mask[::expansion],
            beams=config.num_beams,
            keep_attention=any(getattr(config, name, None) for name in ("coverage_penalty", "output_alignments")),
        )
        ends = [] if config._eos_token_tensor is None else config._eos_token_tensor.tolist()
        process = _process_by(logits_processor, self.config.target_vocab_size)  # type: ignore[attr-defined]
        return IncrementalBatch(decoder, prompts, longest, frozenset(ends), process)

    def _why_not_incremental(self) -> str | None:
        return why_not(self)

    def _weights(self, compute_type: str) -> Any:
        return weights_of(self, compute_type)  # type: ignore[arg-type]

    def _encode(self, weights: Any, input_ids: Tensor, mask: Tensor | None) -> Any:
        return BaseModelOutput(encode(weights, input_ids, mask))

    def _incremental_decoder(
        self, weights: Any, encoder_outputs: dict[str, Tensor], mask: Tensor | None, **settings: Any
    ) -> Any:
        kind = CompiledDecoder if weights.is_compiled else IncrementalDecoder
        return kind(weights, encoder_outputs["last_hidden_state"], mask, **settings)


@dataclass
class IncrementalBatch:
    """A batch that is ready to be searched.

    Attributes:
        decoder: With a row for each sentence.
        prompts: What each translation begins with, (B, P).
        max_new_tokens: Longest translation of each sentence.
        ends: Tokens that end a translation.
        process: Changes scores, as in `beam_search`; None: nothing does.
    """

    decoder: Any
    prompts: Tensor
    max_new_tokens: list[int]
    ends: frozenset[int]
    process: Processor | None


@dataclass
class GreedySearchOutput(GenerateEncoderDecoderOutput):
    """What transformers' greedy search returns, with alignments.

    Attributes:
        alignments: As of `BeamSearchOutput`, (B, T, S).
    """

    alignments: Tensor | None = None


@dataclass
class BeamSearchOutput(GenerateBeamEncoderDecoderOutput):
    """What transformers' beam search returns, with alignments.

    Attributes:
        alignments: Where it was asked for by `output_alignments`: how much each new token attends to each position of
            the source, the mean of the last layer's heads, (B * num_return_sequences, T, S), 0 behind the end.
    """

    alignments: Tensor | None = None


def _beam_output(
    searches: list[BeamSearch], attention: list[Tensor], prompts: Tensor, config: GenerationConfig
) -> BeamSearchOutput:
    num_beams, device = config.num_beams, prompts.device
    tokens: list[list[int]] = []
    scores, beam_indices, alignments = [], [], []
    for search in searches:
        for number in range(config.num_return_sequences):
            # transformers' own scores and contents where a search found fewer than that.
            score, steps = -1e9, []
            if number < len(search.finished):
                score, last = search.finished[number]
                steps = last.path()
            tokens.append([step.token for step in steps])
            scores.append(score)
            beams = [step.beam + search.index * num_beams for step in steps]
            beam_indices.append(torch.tensor(beams, dtype=torch.int32))
            if attention:
                rows = [kept[step.row] for kept, step in zip(attention, steps, strict=False)]
                alignments.append(torch.stack(rows) if rows else attention[0][:0])
    return BeamSearchOutput(
        sequences=_fill(tokens, prompts.repeat_interleave(config.num_return_sequences, dim=0), _filling(config)),
        sequences_scores=torch.tensor(scores, device=device),
        beam_indices=_padded(beam_indices, -1).to(device),
        alignments=_padded(alignments) if attention else None,
    )


def _padded(rows: list[Tensor], filling: int = 0) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filling)


def _filling(config: GenerationConfig) -> int:
    """Returns what stands behind a hypothesis: as in transformers' beam search, `</s>` where padding has the id 0."""
    pad, ends = config._pad_token_tensor, config._eos_token_tensor
    if ends is None:
        return -1
    return int(pad) if pad is not None and int(pad) else int(ends[0])


def _fill(tokens: list[list[int]], prompts: Tensor, filling: int) -> Tensor:
    """Puts new tokens behind their prompts, (B, P): (B, P + longest)."""
    longest = max(map(len, tokens))
    rows = [own + [filling] * (longest - len(own)) for own in tokens]
    return torch.cat([prompts, torch.tensor(rows, dtype=prompts.dtype, device=prompts.device)], dim=1)


# What changes the scores of a row in view of that row alone, whatever the batch.
ROW_BY_ROW = (
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
)
KNOWN_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, MaxLengthPerSentence)
OUTPUTS_OF_STEPS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")
KNOWN_ARGUMENTS = {"encoder_outputs", "attention_mask", "past_key_values", "use_cache", "logits_to_keep", "streamer"}


def _not_covered(
    processors: Any, criteria: StoppingCriteriaList, config: GenerationConfig, arguments: dict[str, Any]
) -> str | None:
    """Says which of the settings our own search doesn't know, or None."""
    shown = [name for name in OUTPUTS_OF_STEPS if config.return_dict_in_generate and getattr(config, name)]
    foreign = [type(one).__name__ for one in processors if type(one) not in ROW_BY_ROW]
    foreign += [type(one).__name__ for one in criteria if type(one) not in KNOWN_CRITERIA]
    others = {name for name, value in arguments.items() if value is not None and value is not False} - KNOWN_ARGUMENTS
    cache, memory = arguments.get("past_key_values"), arguments["encoder_outputs"]
    if not hasattr(memory, "items"):
        return "`encoder_outputs` is a tuple"
    batch_size = len(next(iter(memory.values())))
    reasons = {
        "it samples": config.do_sample,
        f"`{' and '.join(shown)}` asks for what each step computes": shown,
        f"{' and '.join(foreign)} may look at more than one row": foreign,
        f"`{' and '.join(others)}` is given": others,
        "`past_key_values` is given": getattr(cache, "_is_user_defined", False),
        "the cache is another than the usual one": not config.use_cache or config.cache_implementation is not None,
        "it assists another model": config.is_assistant,
        "several sentences are streamed": arguments.get("streamer") is not None and batch_size > 1,
        "there is no padding token": config._pad_token_tensor is None and batch_size > 1,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _process_by(processors: Any, vocab_size: int) -> Processor | None:
    """Lets processors change scores, (rows, V), one after the other; on a CPU, tokens are barred in place.

    There, copies of all scores, as transformers makes them, take up to a third of a step.
    """
    steps = [(one, _barred_by(one, vocab_size)) for one in processors]

    def process(tokens: Tensor, scores: Tensor) -> Tensor:
        for one, barred in steps:
            if barred is None or scores.device.type != "cpu":
                scores = one(tokens, scores)
            elif tokens.shape[1] < barred[1]:
                scores = scores.index_fill_(1, barred[0], -math.inf)
        return scores

    return process if steps else None


def _barred_by(processor: Any, vocab_size: int) -> tuple[Tensor, float] | None:
    """Says which tokens a processor bars, and below which length; None: it does something else."""
    if type(processor) is logits_process.MinLengthLogitsProcessor:
        tokens, length = processor.eos_token_id, processor.min_length
    elif type(processor) is logits_process.MinNewTokensLengthLogitsProcessor:
        tokens, length = processor.eos_token_id, processor.prompt_length_to_skip + processor.min_new_tokens
    elif type(processor) is logits_process.SuppressTokensLogitsProcessor:
        tokens, length = processor.suppress_tokens, math.inf
    else:
        return None
    return tokens[(tokens >= 0) & (tokens < vocab_size)], length


def _refuse_own_options(config: GenerationConfig, reason: str) -> None:
    for name in NEEDING_OWN_SEARCH:
        if getattr(config, name, None) not in (None, False, 0, "default"):
            raise ValueError(f"`{name}` can't be had here, as {reason}; leave it out, or change that.")


def _report_all(config: GenerationConfig, num_rows: int) -> None:
    """Tells a progress callback that a whole batch is done."""
    _call_of(config).progress(num_rows // max(config.num_beams, config.num_return_sequences))


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
    """Checks our options and that only one length penalty is asked for."""
    alpha = getattr(config, "gnmt_length_penalty", None)
    extra = getattr(config, "max_extra_length", None)
    is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if alpha is not None and not (is_number and 0 <= alpha < math.inf):
        raise ValueError(
            f"`gnmt_length_penalty` is {alpha!r}; it has to be a number from 0 up (the paper: 0.6) or None."
        )
    if extra is not None and (isinstance(extra, bool) or not isinstance(extra, int) or extra < 0):
        raise ValueError(f"`max_extra_length` is {extra!r}; it has to be 0 or more tokens (the paper: 50) or None.")
    beta = getattr(config, "coverage_penalty", None)
    is_number = isinstance(beta, (int, float)) and not isinstance(beta, bool)
    if beta is not None and not (is_number and 0 <= beta < math.inf):
        raise ValueError(f"`coverage_penalty` is {beta!r}; it has to be a number from 0 up (0.2 in Wu et al.) or None.")
    compute_type = getattr(config, "compute_type", None)
    if compute_type not in (None, *COMPUTE_TYPES):
        choices = ", ".join(map(repr, COMPUTE_TYPES))
        raise ValueError(f"`compute_type` is {compute_type!r}; choose one of {choices}, or None.")
    if alpha is not None and config.length_penalty not in (None, 1.0):
        raise ValueError(
            f"`gnmt_length_penalty` is {alpha} and `length_penalty` {config.length_penalty}: two formulas for one "
            "thing. Set one of the two to None."
        )


__all__ = ["PAPER_DECODING", "DecodingMixin"]
