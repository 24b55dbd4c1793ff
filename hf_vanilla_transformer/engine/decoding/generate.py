"""The engine behind `generate()`: which calls it takes, and its searches in the place of transformers' loops."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import GenerationMode, logits_process
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from ...generation_vanilla_transformer import MaxLengthPerSentence, refuse
from .. import source, support
from .compiled import CompiledDecoder
from .incremental import EnsembleDecoder, IncrementalDecoder, encode
from .prepared import release, weights_of
from .search import BeamRules, BeamSearch, Processor, Search, beam_search, greedy_search, noop
from .together import run_or_postpone
from .weights import Weights

logger = logging.get_logger(__name__)
_reported: set[str] = set()  # why transformers' own loop was taken, so far

# transformers' loops that a search of ours can take the place of, as methods of GenerationMixin.
LOOPS = {
    GenerationMode.GREEDY_SEARCH: "_sample",
    GenerationMode.SAMPLE: "_sample",
    GenerationMode.BEAM_SEARCH: "_beam_search",
    GenerationMode.BEAM_SAMPLE: "_beam_search",
}
# What a callable for `custom_generate` would not be handed.
NEEDING_TRANSFORMERS = ("penalty_alpha", "stop_strings", "synced_gpus", "token_healing")


class Engine:
    """What fills the slot of the paper's models, `EngineSlot.engine`."""

    compare_code = staticmethod(source.warn_of_other_code)
    release = staticmethod(release)

    def members(self, model: Any) -> Sequence[Any]:
        """Returns the models that decode as one: here the model itself."""
        return [model]

    def as_encoder_outputs(self, memories: Sequence[Tensor]) -> Any:
        """Makes what `generate()` takes for the encoder's output of each member's, (B, S, d_model)."""
        return BaseModelOutput(memories[0])

    def memories(self, encoder_outputs: Any) -> Sequence[Tensor]:
        """Returns the encoder's output of each member, (rows, S, d_model)."""
        return [encoder_outputs["last_hidden_state"]]

    def unsupported_reason(self, model: Any, compute_type: str = "default", is_needed: bool = False) -> str | None:
        """Says what keeps the engine from decoding with a model, or None.

        Args:
            model: The model.
            compute_type: How a step is to be computed; one of `COMPUTE_TYPES`.
            is_needed: Whether the caller needs what the engine alone can do.
        """
        for member in self.members(model):
            reason = support.unsupported_reason(member, is_needed)
            if reason is not None:
                return reason
            weight = member.lm_head.weight
            if compute_type != "default" and (weight.device.type, weight.dtype) != ("cpu", torch.float32):
                kind = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device.type}"
                return f"{compute_type} needs a model in float32 on a CPU, and this one is in {kind}"
        return None

    def generate(
        self,
        model: Any,
        plain_generate: Callable[..., Any],
        settings: dict[str, Any],
        given: dict[str, Any],
        kwargs: dict[str, Any],
        progress: Callable[[int], Any] | None,
    ) -> Any:
        """Calls transformers' `generate()` with a search of ours as its loop, or with its own.

        Args:
            model: The model.
            plain_generate: `GenerationMixin.generate`, bound to the model.
            settings: Every option as it counts.
            given: Those that the caller has given.
            kwargs: The caller's arguments, without our options.
            progress: Called with the number of sentences translated since its last call.

        Raises:
            ValueError: An option that needs the engine can't be had.
        """
        call = Call(self, model, settings, given, progress or noop, kwargs.get("streamer"))
        if (reason := call.reason_for_plain(kwargs)) is not None:
            refuse(settings, given, reason)
            output = plain_generate(**kwargs)
            sequences = output if isinstance(output, Tensor) else output.sequences
            call.progress(len(sequences) // (settings.get("num_return_sequences") or 1))
            return output
        call.prepare()
        call.encode(kwargs)
        return plain_generate(**kwargs | {"custom_generate": call.loop})


@dataclass
class Call:
    """One call of `generate()`.

    Attributes:
        engine: The engine.
        model: The model, or an ensemble of some.
        settings: Every option as it counts.
        given: Those that the caller has given.
        progress: Called with the number of sentences translated since its last call.
        streamer: Gets each token of a single sentence.
        compute_type: How a step is computed.
        reason: What keeps the engine from this model, or None.
        weights: Of each of the models that decode as one.
        source: Ids and mask, (B, S) each, of what the engine has encoded.
    """

    engine: Engine
    model: Any
    settings: dict[str, Any]
    given: dict[str, Any]
    progress: Callable[[int], Any]
    streamer: Any = None
    compute_type: str = "default"
    reason: str | None = None
    weights: Sequence[Weights] = ()
    source: tuple[Tensor, Tensor | None] | None = None

    @property
    def needs_attention(self) -> bool:
        """Whether the user asked for what comes from the attention of the decoder, which the engine alone keeps."""
        return bool(self.settings["coverage_penalty"] or self.settings["output_alignments"])

    def prepare(self) -> None:
        """Finds out whether the engine serves the model, and gets its weights."""
        self.compute_type = self.settings["compute_type"] or "default"
        self.reason = self.engine.unsupported_reason(self.model, self.compute_type, self.needs_attention)
        if self.reason is not None and self.compute_type != "default":
            refuse(self.settings, self.given, self.reason)
            self.compute_type = "default"
            self.reason = self.engine.unsupported_reason(self.model, is_needed=self.needs_attention)
        if self.reason is None:
            self.weights = [weights_of(one, self.compute_type) for one in self.engine.members(self.model)]

    def reason_for_plain(self, kwargs: dict[str, Any]) -> str | None:
        """Says why the call has to reach transformers as it is, or None if a loop can take the place of its own."""
        config = GenerationConfig()
        vars(config).update(self.settings)
        mode = config.get_generation_mode(kwargs.get("assistant_model"))
        is_sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(self.model)
        settings = {"synced_gpus": is_sharded, **self.settings}
        needing = [name for name in NEEDING_TRANSFORMERS if settings.get(name)]
        if kwargs.get("custom_generate") is not None:
            return "`custom_generate` is a loop of its own"
        if mode not in LOOPS:
            return f"{mode.value.replace('_', ' ')} has a loop of its own"
        if self.streamer is not None and LOOPS[mode] == "_beam_search":
            return "beams can't be streamed"
        return f"`{needing[0]}` is given" if needing else None

    def encode(self, kwargs: dict[str, Any]) -> None:
        """Puts the encoder's output into the arguments, so that transformers doesn't run it."""
        ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        ids = kwargs.get("inputs") if ids is None else ids
        shows = any(self.settings.get(name) for name in ("output_attentions", "output_hidden_states"))
        if self.reason is not None or shows or kwargs.get("encoder_outputs") is not None:
            return
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
            return
        if mask is not None and (mask.shape != ids.shape or not mask.any(dim=1).all()):
            return
        self.source = (ids, mask)
        encoded = [encode(weights, *self.source) for weights in self.weights]
        kwargs["encoder_outputs"] = self.engine.as_encoder_outputs(encoded)

    def loop(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        """Decodes, as `custom_generate` of transformers: with a search of ours, or if need be by transformers' loop."""
        config, memory_mask = generation_config, model_kwargs.get("attention_mask")
        reason = self.reason or _uncovered(logits_processor, stopping_criteria, config, model_kwargs, self.streamer)
        if reason is None and memory_mask is not None and (memory_mask.ndim != 2 or not memory_mask.any(dim=1).all()):
            reason = "a source is all padding"
        arguments = (input_ids, logits_processor, stopping_criteria, config, model_kwargs)
        own_loop = partial(self._by_transformers, *arguments)
        if reason is not None:
            return own_loop(reason)
        batch = self._batch(*arguments)
        return run_or_postpone(self._search(batch, config, own_loop), batch.decoder)

    def _search(self, batch: "Batch", config: GenerationConfig, own_loop: Callable[[str], Any]) -> Search[Any]:
        """Searches, and returns what `generate()` does."""
        output = yield from (self._greedy_search if config.num_beams == 1 else self._beam_search)(batch, config)
        if output is None:
            self.progress = noop
            output = own_loop("a search ended with fewer hypotheses than are asked for")
        return output

    def _by_transformers(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        reason: str,
    ) -> Any:
        """Decodes with transformers' loop, for a reason."""
        refuse(self.settings, self.given, reason)
        if reason not in _reported:
            _reported.add(reason)
            logger.info(f"generate() takes transformers' own loop, as {reason}.")
        expansion = max(config.num_beams, config.num_return_sequences)
        if self.source is not None and self.compute_type == "int8":  # the decoder won't be in 8 bits
            members = self.engine.members(self.model)
            encoded = [encode(weights_of(one), *self.source).repeat_interleave(expansion, dim=0) for one in members]
            model_kwargs["encoder_outputs"] = self.engine.as_encoder_outputs(encoded)
        own_loop = partial(self.loop_of_transformers, input_ids, logits_processor, stopping_criteria)
        output = _with_sequences_scores(own_loop, config, model_kwargs)
        self.progress(len(input_ids) // expansion)
        return output

    def loop_of_transformers(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        """Decodes as transformers does by itself."""
        name = LOOPS[config.get_generation_mode()]
        streams = {} if name == "_beam_search" else {"streamer": self.streamer}
        settings = (input_ids, logits_processor, stopping_criteria, config)
        return getattr(type(self.model), name)(self.model, *settings, **streams, **model_kwargs)

    def _batch(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> "Batch":
        expansion = max(config.num_beams, config.num_return_sequences)
        prompts, mask = input_ids[::expansion], model_kwargs.get("attention_mask")
        longest = [config.max_length - prompts.shape[1]] * len(prompts)
        for limit in stopping_criteria:
            if isinstance(limit, MaxLengthPerSentence):
                longest = [min(pair) for pair in zip(longest, limit.max_new_tokens.tolist(), strict=True)]
        decoders = [
            (CompiledDecoder if weights.is_compiled else IncrementalDecoder)(
                weights,
                memory[::expansion],
                None if mask is None else mask[::expansion],
                beams=config.num_beams,
                keep_attention=self.needs_attention,
            )
            for weights, memory in zip(self.weights, self.engine.memories(model_kwargs["encoder_outputs"]), strict=True)
        ]
        ends = [] if config._eos_token_tensor is None else config._eos_token_tensor.tolist()
        process = _process_by(logits_processor, self.model.config.target_vocab_size)
        decoder = decoders[0] if len(decoders) == 1 else EnsembleDecoder(decoders)
        return Batch(decoder, prompts, longest, frozenset(ends), process)

    def _beam_search(self, batch: "Batch", config: GenerationConfig) -> Search[Any]:
        rules = BeamRules(
            config.num_beams,
            batch.ends,
            config.length_penalty,
            config.early_stopping,
            self.settings["coverage_penalty"] or 0.0,
        )
        shows = bool(self.settings["output_alignments"])
        settings = (rules, batch.process, shows, self.progress)
        searches, attention = yield from beam_search(batch.decoder, batch.prompts, batch.max_new_tokens, *settings)
        is_short = any(len(search.finished) < config.num_return_sequences for search in searches)
        if is_short and self.compute_type != "int8" and not rules.coverage_penalty and not shows:
            return None  # transformers fills the list up with what its impossible beams hold
        output = _beam_output(searches, attention, batch.prompts, config)
        return output if config.return_dict_in_generate else output.sequences

    def _greedy_search(self, batch: "Batch", config: GenerationConfig) -> Search[Any]:
        shows, streamer = bool(self.settings["output_alignments"]), self.streamer
        on_token = noop if streamer is None else lambda token: streamer.put(torch.tensor([token]))
        settings = (batch.ends, batch.process, on_token, shows, self.progress)
        tokens, attention = yield from greedy_search(batch.decoder, batch.prompts, batch.max_new_tokens, *settings)
        if streamer is not None:
            streamer.end()
        padding = config._pad_token_tensor
        sequences = _fill(tokens, batch.prompts, 0 if padding is None else int(padding))
        alignments = _padded([torch.stack(rows) for rows in attention]) if shows else None
        output = GreedySearchOutput(sequences, alignments=alignments)
        return output if config.return_dict_in_generate else sequences


@dataclass
class Batch:
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


# This can raise scores above 0, where bounds on what a beam may still become are not bounds.
RAISING = (logits_process.SequenceBiasLogitsProcessor,)
OUTPUTS_OF_STEPS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")
KNOWN_ARGUMENTS = {"encoder_outputs", "attention_mask", "past_key_values", "use_cache", "logits_to_keep"}


def _uncovered(
    processors: Any, criteria: StoppingCriteriaList, config: GenerationConfig, arguments: dict[str, Any], streamer: Any
) -> str | None:
    """Says which of the settings our searches don't know, or None."""
    shown = [name for name in OUTPUTS_OF_STEPS if config.return_dict_in_generate and getattr(config, name)]
    foreign = [type(one).__name__ for one in processors if type(one) not in support.ROW_BY_ROW]
    raising = any(type(one) in RAISING for one in processors)
    foreign += [type(one).__name__ for one in criteria if type(one) not in support.CRITERIA]
    others = {name for name, value in arguments.items() if value is not None and value is not False} - KNOWN_ARGUMENTS
    cache, memory = arguments.get("past_key_values"), arguments["encoder_outputs"]
    if not hasattr(memory, "items"):
        return "`encoder_outputs` is a tuple"
    batch_size = len(next(iter(memory.values())))
    reasons = {
        "it samples": config.do_sample,
        'scores may rise, and `early_stopping` is "never"': config.early_stopping == "never" and raising,
        f"`{' and '.join(shown)}` asks for what each step computes": shown,
        f"{' and '.join(foreign)} may look at more than one row": foreign,
        f"`{' and '.join(others)}` is given": others,
        "`past_key_values` is given": getattr(cache, "_is_user_defined", False),
        "the cache is another than the usual one": not config.use_cache or config.cache_implementation is not None,
        "it assists another model": config.is_assistant,
        "several sentences are streamed": streamer is not None and batch_size > 1,
        "there is no padding token": config._pad_token_tensor is None and batch_size > 1,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _with_sequences_scores(own_loop: Callable[..., Any], config: GenerationConfig, model_kwargs: dict[str, Any]) -> Any:
    """Runs transformers' loop, whose beam search gives `sequences_scores` only with the scores of all steps."""
    keeps_scores = config.output_scores
    config.output_scores = keeps_scores or (config.return_dict_in_generate and config.num_beams > 1)
    output = own_loop(config, **model_kwargs)
    if keeps_scores or not config.output_scores:
        return output
    return type(output)(**{name: value for name, value in output.items() if name != "scores"})


def _process_by(processors: Any, vocab_size: int) -> Processor | None:
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


def _barred_by(processor: Any, vocab_size: int) -> tuple[Tensor, float] | None:
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
    return tokens[(tokens >= 0) & (tokens < vocab_size)], length
