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


def plan_of(model: PreTrainedModel, arguments: Mapping[str, Any]) -> Plan:
    """Resolves how a call of `generate()` decodes; raises `ValueError` for wrong values of the package's options."""
    options = {name: value for name, value in arguments.items() if name not in INPUTS}
    return Plan.of(options, model.generation_config)


def generate(model: PreTrainedModel, plan: Plan, arguments: Mapping[str, Any], prepared: Prepared) -> Output:
    """Decodes a call of `model.generate(**arguments)`, by a plan that `prepared` has nothing against.

    Raises:
        Uncovered: Its inputs are not what the engine takes, or transformers' loop refuses it or fills its output up.
    """
    device, streamer, returns_dict = prepared.device, arguments.get("streamer"), _returns_dict(model, arguments)
    source, is_encoded = _source(arguments)
    mask = arguments.get("attention_mask")
    if mask is None and not is_encoded:
        mask = model.mask_of_padding(source, plan.ends)
    _check_mask(mask, source, is_needed=is_encoded)
    prompts = _prompts(model, plan, arguments.get("decoder_input_ids"), source)
    _check_sizes(plan, prompts, streamer)
    lengths = [source.shape[1]] * len(source) if mask is None else (mask != 0).sum(dim=1).tolist()
    longest = model.max_new_tokens(plan, lengths, prompts.shape[1])
    mask = None if mask is None else mask.to(device)
    memory = source if is_encoded else prepared.encode(source.to(device), mask)
    if streamer is not None:
        streamer.put(prompts.cpu())
    on_token = None if streamer is None else lambda token: streamer.put(torch.tensor([token]))
    prompts = prompts.to(device)
    found = prepared.search(plan, memory, mask, prompts, longest, on_token)
    if streamer is not None:
        streamer.end()
    is_short = any(len(own) < plan.num_hypotheses for own in found)
    if is_short and prepared.is_exact and not (plan.alignments or plan.coverage_penalty):
        raise Uncovered("a search ended with fewer hypotheses than are asked for")
    output = _beam_output(found, plan, prompts) if plan.num_beams > 1 else _greedy_output(found, plan, prompts)
    return output if returns_dict else output.sequences


def _source(arguments: Mapping[str, Any]) -> tuple[Tensor, bool]:
    """Returns the source's ids, (B, S), or the encoder's output, (B, S, d_model), and whether it is the latter."""
    ids, encoded = arguments.get("input_ids"), arguments.get("encoder_outputs")
    if arguments.get("inputs") is not None:
        if ids is not None:
            raise Uncovered("`inputs` and `input_ids` are given")
        ids = arguments["inputs"]
    if encoded is not None and not isinstance(encoded, tuple):
        encoded = next(iter(encoded.values()))
    source: Any = ids if encoded is None else encoded
    is_right = isinstance(source, Tensor) and source.ndim == (2 if encoded is None else 3) and source.numel()
    if not is_right or (encoded is None and source.is_floating_point()):
        raise Uncovered("the source isn't token ids, (batch, length), or an output of the encoder")
    return source, encoded is not None


def _check_sizes(plan: Plan, prompts: Tensor, streamer: Any) -> None:
    """Refuses what transformers refuses, and what the search has no order for."""
    if plan.num_hypotheses > plan.num_beams:
        raise Uncovered("more hypotheses than beams are asked for")
    if plan.padding is None and len(prompts) > 1:
        raise Uncovered("there is no padding token")
    if plan.limit[0] == "max_length" and plan.limit[1] <= prompts.shape[1]:
        raise Uncovered("`max_length` leaves no room behind the prompt")
    if streamer is not None and (len(prompts) > 1 or plan.num_beams > 1):
        raise Uncovered("beams or several sentences can't be streamed")


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


def _greedy_output(found: list[list[Hypothesis]], plan: Plan, prompts: Tensor) -> GreedySearchOutput:
    rows = [one for (one,) in found]
    filling = 0 if plan.padding is None else plan.padding
    return GreedySearchOutput(_fill(rows, prompts, filling), alignments=_alignments(rows))


def _beam_output(found: list[list[Hypothesis]], plan: Plan, prompts: Tensor) -> BeamSearchOutput:
    rows, beams = list[Hypothesis](), list[Tensor]()
    for sentence, own in enumerate(found):
        rows += own + [Hypothesis([], NO_HYPOTHESIS)] * (plan.num_hypotheses - len(own))
        shifted = (torch.tensor(one.beams) + sentence * plan.num_beams for one in rows[len(beams) :])
        beams += [one.to(torch.int32) for one in shifted]
    # As in transformers' beam search, `</s>` stands behind a hypothesis where padding has the id 0.
    filling = (plan.padding or plan.ends[0]) if plan.ends else -1
    return BeamSearchOutput(
        sequences=_fill(rows, prompts.repeat_interleave(plan.num_hypotheses, dim=0), filling),
        sequences_scores=torch.tensor([one.score for one in rows], dtype=torch.float32, device=prompts.device),
        beam_indices=_padded(beams, -1).to(prompts.device),
        alignments=_alignments(rows),
    )


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
