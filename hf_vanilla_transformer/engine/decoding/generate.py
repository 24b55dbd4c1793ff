"""`generate()` of an attached model: a thin adapter between transformers' arguments and outputs and a search."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput

from ...plan_vanilla_transformer import Plan
from .prepared import Prepared
from .search import Hypothesis

Output: TypeAlias = GenerateBeamEncoderDecoderOutput | GenerateEncoderDecoderOutput | Tensor
# Arguments that are no settings. Seq2SeqTrainer gives its labels too; transformers keeps them from the model.
INPUTS = ("inputs", "input_ids", "attention_mask", "decoder_input_ids", "encoder_outputs", "streamer", "labels")
NO_HYPOTHESIS = -1e9  # transformers' score of places that hold none


class Uncovered(Exception):  # noqa: N818  # no error: transformers' loop takes the call
    """What keeps the engine from a call."""


@dataclass(frozen=True)
class Call:
    """A call of `generate()` that the engine can decode.

    Attributes:
        plan: How it decodes.
        input_ids: The source, (B, S); None: it is encoded.
        encoded: The encoder's output, (B, S, d_model).
        attention_mask: (B, S), of ones and zeros; None: there is no padding.
        prompts: What each target begins with, (B, P).
        max_new_tokens: Longest translation of each sentence.
        streamer: Where tokens are shown as they are chosen.
        returns_dict: Whether an output with scores is asked for.
    """

    plan: Plan
    input_ids: Tensor | None
    encoded: Tensor | None
    attention_mask: Tensor | None
    prompts: Tensor
    max_new_tokens: list[int]
    streamer: Any
    returns_dict: bool


def plan_of(model: PreTrainedModel, arguments: Mapping[str, Any]) -> Plan:
    """Resolves how a call of `generate()` decodes; raises `ValueError` for wrong values of the package's options."""
    options = {name: value for name, value in arguments.items() if name not in INPUTS}
    return Plan.of(options, model.generation_config)


def call_of(model: PreTrainedModel, plan: Plan, arguments: Mapping[str, Any]) -> Call:
    """Reads the inputs of a call.

    Raises:
        Uncovered: They are not what the engine takes, or transformers refuses the setting.
    """
    given = {name: arguments.get(name) for name in INPUTS}
    if given["inputs"] is not None and given["input_ids"] is not None:
        raise Uncovered("`inputs` and `input_ids` are given")
    ids = given["input_ids"] if given["inputs"] is None else given["inputs"]
    mask, encoded = given["attention_mask"], given["encoder_outputs"]
    source = ids if encoded is None else None if isinstance(encoded, tuple) else next(iter(encoded.values()))
    if not isinstance(source, Tensor) or source.ndim != (2 if encoded is None else 3) or not source.numel():
        raise Uncovered("the source isn't token ids, (batch, length), or an output of the encoder")
    if encoded is None and source.is_floating_point():
        raise Uncovered("the source isn't token ids, (batch, length)")
    if encoded is None and mask is None:
        mask = model.mask_of_padding(source, plan.ends)
    _check_mask(mask, source, is_needed=encoded is not None)
    prompts = _prompts(model, plan, given["decoder_input_ids"], source)
    if plan.num_hypotheses > plan.num_beams:
        raise Uncovered("more hypotheses than beams are asked for")
    if plan.padding is None and len(prompts) > 1:
        raise Uncovered("there is no padding token")
    if plan.limit[0] == "max_length" and plan.limit[1] <= prompts.shape[1]:
        raise Uncovered("`max_length` leaves no room behind the prompt")
    streamer = given["streamer"]
    if streamer is not None and (len(prompts) > 1 or plan.num_beams > 1):
        raise Uncovered("beams or several sentences can't be streamed")
    lengths = [source.shape[1]] * len(source) if mask is None else (mask != 0).sum(dim=1).tolist()
    longest = model.max_new_tokens(plan, lengths, prompts.shape[1])
    returns_dict = _returns_dict(model, arguments)
    given_ids, encoded = (source, None) if encoded is None else (None, source)
    return Call(plan, given_ids, encoded, mask, prompts, longest, streamer, returns_dict)


def _returns_dict(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Tells whether an output with scores is asked for."""
    config = arguments.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise Uncovered("`generation_config` is none")
    if config is None and model.config._get_generation_parameters():
        raise Uncovered("the configuration has settings of decoding, which transformers refuses")
    if "return_dict_in_generate" in arguments:
        return bool(arguments["return_dict_in_generate"])
    asked = [one.return_dict_in_generate for one in (config, model.generation_config) if one is not None]
    return bool(next((one for one in asked if one is not None), False))


def _check_mask(mask: Tensor | None, source: Tensor, *, is_needed: bool) -> None:
    if mask is None:
        if is_needed:
            raise Uncovered("`encoder_outputs` has no `attention_mask`")
        return
    if mask.shape != source.shape[:2]:
        raise Uncovered("`attention_mask` has another shape than the source")
    if not mask.any(dim=1).all():
        raise Uncovered("a source is all padding")
    if not ((mask == 0) | (mask == 1)).all():
        raise Uncovered("`attention_mask` has other values than 0 and 1")


def _prompts(model: PreTrainedModel, plan: Plan, given: Tensor | None, source: Tensor) -> Tensor:
    """Returns what targets begin with, (B, P): the start token, before a prompt without it."""
    assert plan.start is not None, "else the plan isn't supported"
    start = torch.full((len(source), 1), plan.start, device=source.device)
    if given is None:
        return start
    if not isinstance(given, Tensor) or given.ndim != 2 or len(given) != len(source) or given.is_floating_point():
        raise Uncovered("`decoder_input_ids` aren't (batch, length)")
    mask = model.mask_of_left_padding(given, None)
    if mask is not None and plan.start != model.config.pad_token_id and not mask.all():
        raise Uncovered("prompts have padding")
    has_start = (given[:, :1] == start).any()
    return given.long() if has_start else torch.cat([start, given], dim=1)


def run(call: Call, prepared: Prepared) -> Output:
    """Decodes a call.

    Raises:
        Uncovered: transformers' loop would fill its output up.
    """
    plan, device, streamer = call.plan, prepared.device, call.streamer
    mask = None if call.attention_mask is None else call.attention_mask.to(device)
    memory: Any = call.encoded
    if memory is None:
        assert call.input_ids is not None
        memory = prepared.encode(call.input_ids.to(device), mask)
    prompts = call.prompts.to(device)
    if streamer is not None:
        streamer.put(call.prompts.cpu())
    on_token = None if streamer is None else lambda token: streamer.put(torch.tensor([token]))
    found = prepared.search(plan, memory, mask, prompts, call.max_new_tokens, on_token)
    if streamer is not None:
        streamer.end()
    is_short = any(len(own) < plan.num_hypotheses for own in found)
    if is_short and prepared.is_exact and not (plan.alignments or plan.coverage_penalty):
        raise Uncovered("a search ended with fewer hypotheses than are asked for")
    output = _beam_output(found, call, prompts) if plan.num_beams > 1 else _greedy_output(found, call, prompts)
    return output if call.returns_dict else output.sequences


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


def _greedy_output(found: list[list[Hypothesis]], call: Call, prompts: Tensor) -> GreedySearchOutput:
    rows = [one for (one,) in found]
    filling = 0 if call.plan.padding is None else call.plan.padding
    return GreedySearchOutput(_fill(rows, prompts, filling), alignments=_alignments(rows))


def _beam_output(found: list[list[Hypothesis]], call: Call, prompts: Tensor) -> BeamSearchOutput:
    plan, rows = call.plan, list[Hypothesis]()
    for sentence, own in enumerate(found):
        missing = [Hypothesis([], NO_HYPOTHESIS)] * (plan.num_hypotheses - len(own))
        shift = sentence * plan.num_beams
        rows += [replace_beams(one, shift) for one in (*own, *missing)]
    beams = [torch.tensor(one.beams, dtype=torch.int32) for one in rows]
    # As in transformers' beam search, `</s>` stands behind a hypothesis where padding has the id 0.
    filling = (plan.padding or plan.ends[0]) if plan.ends else -1
    return BeamSearchOutput(
        sequences=_fill(rows, prompts.repeat_interleave(plan.num_hypotheses, dim=0), filling),
        sequences_scores=torch.tensor([one.score for one in rows], dtype=torch.float32, device=prompts.device),
        beam_indices=_padded(beams, -1).to(prompts.device),
        alignments=_alignments(rows),
    )


def replace_beams(one: Hypothesis, shift: int) -> Hypothesis:
    """Counts the beams of a hypothesis among those of all sentences."""
    return one._replace(beams=[beam + shift for beam in one.beams])


def _alignments(rows: list[Hypothesis]) -> Tensor | None:
    shown = [one.attention for one in rows if one.attention is not None]
    if not shown:
        return None
    return _padded([shown[0][:0] if one.attention is None else one.attention for one in rows])


def _padded(rows: list[Tensor], filling: int = 0) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=filling)


def _fill(rows: list[Hypothesis], prompts: Tensor, filling: int) -> Tensor:
    """Puts new tokens behind their prompts, (B, P): (B, P + longest)."""
    longest = max(len(one.tokens) for one in rows)
    filled = [one.tokens + [filling] * (longest - len(one.tokens)) for one in rows]
    return torch.cat([prompts, torch.tensor(filled, dtype=prompts.dtype, device=prompts.device)], dim=1)
