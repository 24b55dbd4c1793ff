"""A call of `generate()` as a search of the engine: transformers prepares it, and the search takes its loop's place."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode, logits_process, stopping_criteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput

from ...generation_vanilla_transformer import ENGINE_OPTIONS, ForcedEndPerSentence, MaxLengthPerSentence
from .incremental import EnsembleDecoder, IncrementalDecoder, encode
from .search import BeamRules, BeamSearch, ScoreProcessor, beam_search, greedy_search
from .weights import Weights

# Modes of decoding that the engine has.
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.BEAM_SEARCH)
# Arguments that change more than the loop.
NEEDING_TRANSFORMERS = (
    "cache_implementation",
    "custom_generate",
    "low_memory",
    "penalty_alpha",
    "prefill_chunk_size",
    "stop_strings",
    "synced_gpus",
    "token_healing",
)
OUTPUTS_OF_STEPS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")
# Seq2SeqTrainer gives its labels too; transformers keeps them from the model.
KNOWN_ARGUMENTS = {"encoder_outputs", "attention_mask", "past_key_values", "use_cache", "logits_to_keep", "labels"}

# Processors that change the scores of a row in view of that row alone, whatever the batch. The exponential decay is not
# among them: it makes infinities and NaN of tokens that another one bars, and torch's top-k leaves their order
# open.
ROW_BY_ROW = (
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
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
# This can raise scores above 0; bounds on the later score of a beam are then no bounds.
RAISING = (logits_process.SequenceBiasLogitsProcessor,)
CRITERIA = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria, MaxLengthPerSentence)


Decoder = IncrementalDecoder | EnsembleDecoder
Output: TypeAlias = GenerateBeamEncoderDecoderOutput | GenerateEncoderDecoderOutput | Tensor
Batch = tuple[Decoder, Tensor, list[int]]  # the decoder, prompts (B, P), and the longest translation of each sentence


class Uncovered(Exception):  # noqa: N818  # no error: transformers' loop takes the call
    """What keeps the engine from a call, found while transformers prepared it, or at its end."""


def _set_in(config: GenerationConfig | None) -> dict[str, Any]:
    """Returns the options that a caller's generation config sets; for None, the model's own counts."""
    return {} if config is None else {name: value for name, value in vars(config).items() if value is not None}


class Request:
    """A call of `generate()`.

    Args:
        model: The model, or an ensemble.
        arguments: Those of `generate()`, with the engine's own options.

    Attributes:
        model: The model.
        coverage_penalty: beta; 0: none.
        output_alignments: Whether the output has alignments.
        own_option: The name of one of these that is set; then attention of the decoder is kept.
        arguments: What transformers' `generate()` takes: without the engine's options, with the paper's length penalty
            and limits as it knows them.
        settings: Every option of transformers as it counts.

    Raises:
        ValueError: An option has a wrong value, or two contradict each other.
    """

    def __init__(self, model: PreTrainedModel, arguments: dict[str, Any]) -> None:
        own = vars(model.generation_config)
        asked = {**own, **_set_in(arguments.get("generation_config")), **arguments}
        beta = asked.get("coverage_penalty")
        is_number = isinstance(beta, (int, float)) and not isinstance(beta, bool)
        if beta is not None and not (is_number and 0 <= beta < math.inf):
            raise ValueError(f"`coverage_penalty` is {beta!r}; it has to be a number from 0 up (0.2) or None.")
        self.model = model
        self.coverage_penalty, self.output_alignments = beta or 0.0, bool(asked.get("output_alignments"))
        self.own_option = next((name for name in ENGINE_OPTIONS if asked.get(name)), None)
        plain = {name: value for name, value in arguments.items() if name not in ENGINE_OPTIONS}
        self.arguments = model.prepare_decoding(plain)
        self.settings = {**own, **_set_in(self.arguments["generation_config"]), **self.arguments}

    @property
    def source(self) -> tuple[Tensor | None, Tensor | None]:
        """Ids and mask of the source, (B, S) each, as they are given."""
        ids = self.arguments.get("input_ids")
        return self.arguments.get("inputs") if ids is None else ids, self.arguments.get("attention_mask")

    def reason_for_transformers(self) -> str | None:
        """Says why the call has to reach transformers as it is, or None."""
        config = GenerationConfig()
        vars(config).update(self.settings)
        mode = config.get_generation_mode(self.arguments.get("assistant_model"))
        needing = [name for name in NEEDING_TRANSFORMERS if self.settings.get(name)]
        if needing:
            return f"`{needing[0]}` is given"
        if self.settings.get("use_cache") is False:
            return "`use_cache` is off"
        if mode not in MODES:
            return f"{mode.value.replace('_', ' ')} is not greedy or beam search"
        if self.settings.get("streamer") is not None and mode is GenerationMode.BEAM_SEARCH:
            return "beams can't be streamed"
        criteria = self.arguments.get("stopping_criteria") or ()
        if own := [type(one).__name__ for one in criteria if type(one) is not MaxLengthPerSentence]:
            return f"{own[0]} is the caller's own"
        return self._reason_of_source()

    def _reason_of_source(self) -> str | None:
        ids, mask = self.source
        encoded = self.arguments.get("encoder_outputs")
        if encoded is not None:
            if hasattr(encoded, "items") and mask is not None and mask.shape == next(iter(encoded.values())).shape[:2]:
                return None
            return "`encoder_outputs` has no `attention_mask` of its shape, or is a tuple"
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
            return "the source isn't token ids, (batch, length)"
        return None if mask is None or mask.shape == ids.shape else "`attention_mask` has another shape than the source"

    def memories(self, weights: Sequence[Weights]) -> list[Tensor]:
        """Returns the encoder's output of each model, (B, S, d_model); where it isn't given, it is computed here."""
        encoded, (ids, mask) = self.arguments.get("encoder_outputs"), self.source
        if encoded is not None:
            outputs = [value for value in encoded.values() if isinstance(value, Tensor)]
            return outputs[: len(weights)]
        assert ids is not None
        return [encode(one, ids.to(one.device), None if mask is None else mask.to(one.device)) for one in weights]


def search(request: Request, weights: Sequence[Weights]) -> Output:
    """Searches as a call asks for, with the weights of each of the models that decode as one.

    Raises:
        Uncovered: The engine doesn't know a setting.
    """
    streamer = request.arguments.get("streamer")
    arguments = {**request.arguments, "streamer": None, "encoder_outputs": _Unexpanded(request)}
    arguments["custom_generate"] = partial(_Call(request, weights).search, streamer)
    output: Output = GenerationMixin.generate(request.model, **arguments)
    return output


class _Unexpanded:
    """Replaces the encoder's output while transformers prepares a call: it would be repeated for each beam."""

    def __init__(self, request: Request) -> None:
        given = request.arguments.get("encoder_outputs")
        self.last_hidden_state = None if given is None else next(iter(given.values()))  # its shape may be looked at

    def __iter__(self) -> Iterator[str]:
        return iter(())


@dataclass
class _Call:
    request: Request
    weights: Sequence[Weights]

    def search(
        self,
        streamer: BaseStreamer | None,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: logits_process.LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: object,
    ) -> Output:
        """Searches, as `custom_generate` of transformers."""
        config, expansion = generation_config, max(generation_config.num_beams, generation_config.num_return_sequences)
        prompts, mask = input_ids[::expansion], self.request.source[1]
        reason = _uncovered(logits_processor, stopping_criteria, config, model_kwargs)
        reason = reason or _uncovered_batch(prompts, mask, config, streamer)
        if reason is not None:
            raise Uncovered(reason)
        longest = [config.max_length - prompts.shape[1]] * len(prompts)
        for limit in stopping_criteria:
            if isinstance(limit, MaxLengthPerSentence):
                longest = [min(pair) for pair in zip(longest, limit.max_new_tokens.tolist(), strict=True)]
        decoder = self._decoder(mask, config.num_beams)
        batch = (decoder, prompts.to(self.weights[0].device), longest)
        process = _process_by(logits_processor, self.weights[0].vocab_size)
        if config.num_beams > 1:
            return self._beam_search(batch, process, config)
        return self._greedy_search(batch, process, config, streamer)

    def _decoder(self, mask: Tensor | None, beams: int) -> Decoder:
        keeps = self.request.own_option is not None
        decoders = [
            IncrementalDecoder(
                one, memory, None if mask is None else mask.to(memory.device), beams=beams, keep_attention=keeps
            )
            for one, memory in zip(self.weights, self.request.memories(self.weights), strict=True)
        ]
        return decoders[0] if len(decoders) == 1 else EnsembleDecoder(decoders)

    def _beam_search(self, batch: Batch, process: ScoreProcessor | None, config: GenerationConfig) -> Output:
        request, prompts = self.request, batch[1]
        penalties = (config.length_penalty, config.early_stopping, request.coverage_penalty)
        rules = BeamRules(config.num_beams, _ends(config), *penalties)
        searches, attention = beam_search(*batch, rules, process, request.output_alignments)
        is_short = any(len(search.finished) < config.num_return_sequences for search in searches)
        if is_short and not self.weights[0].is_int8 and request.own_option is None:
            # transformers fills the list up from its impossible beams.
            raise Uncovered("a search ended with fewer hypotheses than are asked for")
        output = _beam_output(searches, attention, prompts, config)
        return output if config.return_dict_in_generate else output.sequences

    def _greedy_search(
        self, batch: Batch, process: ScoreProcessor | None, config: GenerationConfig, streamer: BaseStreamer | None
    ) -> Output:
        shows, prompts = self.request.output_alignments, batch[1]
        on_token = None if streamer is None else lambda token: streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.put(prompts.cpu())
        tokens, attention = greedy_search(*batch, _ends(config), process, on_token, shows)
        if streamer is not None:
            streamer.end()
        padding = config._pad_token_tensor
        sequences = _fill(tokens, prompts, 0 if padding is None else int(padding))
        alignments = _padded([torch.stack(rows) for rows in attention]) if shows else None
        output = GreedySearchOutput(sequences, alignments=alignments)
        return output if config.return_dict_in_generate else sequences


@dataclass
class GreedySearchOutput(GenerateEncoderDecoderOutput):
    """What transformers' greedy search returns, with `alignments` as those of `BeamSearchOutput`, (B, T, S)."""

    alignments: Tensor | None = None


@dataclass
class BeamSearchOutput(GenerateBeamEncoderDecoderOutput):
    """What transformers' beam search returns, with alignments, and always with `sequences_scores`.

    Attributes:
        alignments: With `output_alignments`, how much each new token attends to each position of
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
            # transformers' own scores and contents, where a search ended with fewer hypotheses.
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
        sequences_scores=torch.tensor(scores, dtype=torch.float32, device=device),
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


# ---- Settings of the searches ----
def _ends(config: GenerationConfig) -> frozenset[int]:
    return frozenset([] if config._eos_token_tensor is None else config._eos_token_tensor.tolist())


def _uncovered(
    processors: logits_process.LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    arguments: dict[str, Any],
) -> str | None:
    """Says which of the settings the searches don't know, or None."""
    shown = [name for name in OUTPUTS_OF_STEPS if config.return_dict_in_generate and getattr(config, name)]
    foreign = [type(one).__name__ for one in processors if type(one) not in (*ROW_BY_ROW, ForcedEndPerSentence)]
    foreign += [type(one).__name__ for one in criteria if type(one) not in CRITERIA]
    raising = any(type(one) in RAISING for one in processors)
    forcing = [one for one in processors if type(one) is logits_process.ForcedEOSTokenLogitsProcessor]
    others = {name for name, value in arguments.items() if value is not None and value is not False} - KNOWN_ARGUMENTS
    reasons = {
        'scores may rise, and `early_stopping` is "never"': config.early_stopping == "never" and raising,
        f"`{' and '.join(shown)}` asks for what each step computes": shown,
        f"{' and '.join(foreign)} may look at more than one row": foreign,
        "an end is forced at each sentence's own limit": ForcedEndPerSentence in map(type, processors),
        "several tokens are forced at the end, and their scores are equal": any(
            one.eos_token_id.numel() > 1 for one in forcing
        ),
        f"`{' and '.join(sorted(others))}` is given": others,
        "`past_key_values` is given": getattr(arguments.get("past_key_values"), "_is_user_defined", False),
        "it assists another model": config.is_assistant,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _uncovered_batch(
    prompts: Tensor, mask: Tensor | None, config: GenerationConfig, streamer: BaseStreamer | None
) -> str | None:
    if config._pad_token_tensor is None and len(prompts) > 1:
        return "there is no padding token"
    if streamer is not None and len(prompts) > 1:
        return "several sentences are streamed"
    if mask is not None:
        if len(mask) != len(prompts) or not mask.any(dim=1).all():
            return "a source is all padding, or there is another number of prompts"
        if not ((mask == 0) | (mask == 1)).all():
            return "`attention_mask` has other values than 0 and 1"
    return None


def _process_by(processors: logits_process.LogitsProcessorList, vocab_size: int) -> ScoreProcessor | None:
    """Lets processors change scores, (rows, V), one after the other; on a CPU, some of them in place.

    There, copies of all scores, as transformers makes them, take up to a third of a step.
    """
    steps = [(one, _barred_by(one, vocab_size)) for one in processors]

    def process(tokens: Tensor, scores: Tensor) -> Tensor:
        for one, barred in steps:
            if scores.device.type == "cpu" and type(one) is logits_process.LogitNormalization:
                scores = torch.log_softmax(scores, -1, out=scores)
            elif barred is None or scores.device.type != "cpu":
                scores = one(tokens, scores)
            elif tokens.shape[1] < barred[1]:
                scores = scores.index_fill_(1, barred[0], -math.inf)
        return scores

    return process if steps else None


def _barred_by(processor: logits_process.LogitsProcessor, vocab_size: int) -> tuple[Tensor, float] | None:
    """Says which tokens a processor bars, and below which length; None: it does something else."""
    if type(processor) is logits_process.MinLengthLogitsProcessor:
        tokens, length = processor.eos_token_id, processor.min_length
    elif type(processor) is logits_process.MinNewTokensLengthLogitsProcessor:
        tokens, length = processor.eos_token_id, processor.prompt_length_to_skip + processor.min_new_tokens
    elif type(processor) is logits_process.SuppressTokensLogitsProcessor:
        tokens, length = processor.suppress_tokens, math.inf
    elif type(processor) is logits_process.NoBadWordsLogitsProcessor:
        words = list(processor.sequence_bias)
        if any(len(word) > 1 or word[0] >= vocab_size for word in words):  # the latter is an error of the processor's
            return None
        tokens, length = torch.tensor(words).flatten(), math.inf
    else:
        return None
    tokens = tokens.long()  # an empty list is a tensor of float32
    return tokens[(tokens >= 0) & (tokens < vocab_size)], length
