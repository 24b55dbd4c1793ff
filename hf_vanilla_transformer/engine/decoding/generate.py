"""`generate()` of an attached model: a thin adapter between transformers' arguments and outputs and a search."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput

from ...plan_vanilla_transformer import Plan
from .prepared import Prepared
from .search import Hypothesis

Output: TypeAlias = GenerateBeamEncoderDecoderOutput | GenerateEncoderDecoderOutput | Tensor
# Arguments that are no settings. Seq2SeqTrainer gives its labels too; transformers keeps them from the model.
INPUTS = ("inputs", "input_ids", "attention_mask", "decoder_input_ids", "encoder_outputs", "streamer", "labels")
NO_HYPOTHESIS = -1e9  # transformers' score of places that hold none

_padded = partial(pad_sequence, batch_first=True)


class Uncovered(Exception):  # noqa: N818  # no error: transformers' loop takes the call
    """What keeps the engine from a call."""


def generate(model: PreTrainedModel, plan: Plan, arguments: Mapping[str, Any], prepared: Prepared) -> Output:
    """Decodes a call of `model.generate(**arguments)`, by a plan that `prepared` has nothing against.

    `Uncovered`: the engine doesn't take its inputs, or transformers' loop refuses it or fills its output up.
    """
    device, streamer, arguments = prepared.device, arguments.get("streamer"), dict(arguments)
    model.mask_padding(plan, arguments)
    source, mask = _source(arguments), arguments.get("attention_mask")
    prompts = _prompts(plan, arguments.get("decoder_input_ids"), source)
    _check(model, plan, arguments, source, prompts)
    longest = model.max_new_tokens(plan, model.source_lengths(source, mask), prompts.shape[1])
    mask = None if mask is None else mask.to(device)
    memory = source if source.ndim == 3 else prepared.encode(source.to(device), mask)
    if streamer is not None:
        streamer.put(prompts.cpu())
    on_token = None if streamer is None else lambda token: streamer.put(torch.tensor([token]))
    prompts = prompts.to(device)
    found = prepared.search(plan, memory, mask, prompts, longest, on_token)
    if streamer is not None:
        streamer.end()
    is_short = any(len(own) < plan.num_hypotheses for own in found)
    if is_short and prepared.is_exact and not plan.needs_attention:
        raise Uncovered("a search ended with fewer hypotheses than are asked for")
    output = _output(found, plan, prompts, source.shape[1])
    return output if _returns_dict(model, arguments) else output.sequences


def _source(arguments: Mapping[str, Any]) -> Tensor:
    """Returns the source's ids, (B, S), or the encoder's output, (B, S, d_model)."""
    ids, encoded = arguments.get("input_ids"), arguments.get("encoder_outputs")
    if (inputs := arguments.get("inputs")) is not None:
        ids = inputs if ids is None else None  # transformers refuses both
    if encoded is not None and not isinstance(encoded, tuple):
        encoded = next(iter(encoded.values()))
    source: Any = ids if encoded is None else encoded
    is_right = isinstance(source, Tensor) and source.ndim == (2 if encoded is None else 3) and source.numel()
    if not is_right or (encoded is None and source.is_floating_point()):
        raise Uncovered("the source isn't token ids, (batch, length), or an output of the encoder")
    return source


def _check(model: PreTrainedModel, plan: Plan, arguments: Mapping[str, Any], source: Tensor, prompts: Tensor) -> None:
    """Refuses what transformers refuses, and what the search has no order for."""
    mask: Any = arguments.get("attention_mask")
    is_masked, is_streamed = mask is not None, arguments.get("streamer") is not None
    settings, (limit, most) = model.config._get_generation_parameters(), plan.limit
    obstacles = {
        "the configuration has settings of decoding": settings and arguments.get("generation_config") is None,
        "`encoder_outputs` has no `attention_mask`": source.ndim == 3 and not is_masked,
        "`attention_mask` has another shape than the source": is_masked and mask.shape != source.shape[:2],
        "a source is all padding": is_masked and not mask.any(dim=-1).all(),
        "`attention_mask` has other values than 0 and 1": is_masked and not ((mask == 0) | (mask == 1)).all(),
        "prompts have padding": arguments.get("decoder_attention_mask") is not None,
        "more hypotheses than beams are asked for": plan.num_hypotheses > plan.num_beams,
        "there is no padding token": plan.padding is None and len(source) > 1,
        "`max_length` leaves no room behind the prompt": limit == "max_length" and most <= prompts.shape[1],
        "beams or several sentences can't be streamed": is_streamed and plan.num_beams * len(source) > 1,
    }
    for reason, is_in_the_way in obstacles.items():
        if is_in_the_way:
            raise Uncovered(reason)


def _returns_dict(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Tells whether an output with scores is asked for."""
    if "return_dict_in_generate" in arguments:
        return bool(arguments["return_dict_in_generate"])
    configs = (arguments.get("generation_config"), model.generation_config)
    asked = [one.return_dict_in_generate for one in configs if one is not None]
    return bool(next((one for one in asked if one is not None), False))


def _prompts(plan: Plan, given: Tensor | None, source: Tensor) -> Tensor:
    """Returns what targets begin with, (B, P): the start token, before a prompt without it."""
    assert plan.start is not None, "else the plan isn't supported"
    start = torch.full((len(source), 1), plan.start, device=source.device)
    if given is None:
        return start
    if not isinstance(given, Tensor) or given.ndim != 2 or len(given) != len(source) or given.is_floating_point():
        raise Uncovered("`decoder_input_ids` aren't (batch, length)")
    return given.long() if (given[:, :1] == start).any() else torch.cat([start, given], dim=1)


@dataclass
class GreedySearchOutput(GenerateEncoderDecoderOutput):
    """What transformers' greedy search returns, with `alignments` as those of `BeamSearchOutput`, (B, T, S)."""

    alignments: Tensor | None = None


@dataclass
class BeamSearchOutput(GenerateBeamEncoderDecoderOutput):
    """What transformers' beam search returns, with alignments, and always with `sequences_scores`.

    With `output_alignments`, `alignments` has how much each new token attends to each position of the source, the mean
    of the last layer's heads, (B * num_return_sequences, T, S), 0 behind the end.
    """

    alignments: Tensor | None = None


def _output(
    found: list[list[Hypothesis]], plan: Plan, prompts: Tensor, source_length: int
) -> GreedySearchOutput | BeamSearchOutput:
    count, width, device = plan.num_hypotheses, plan.num_beams, prompts.device
    nothing = Hypothesis([], NO_HYPOTHESIS, attention=torch.zeros(0, source_length, device=device))
    rows = [one for own in found for one in own + [nothing] * (count - len(own))]
    filling = plan.padding or 0
    if width > 1:  # `</s>` stands behind a hypothesis where padding has the id 0, as in transformers' beam search
        filling = (plan.padding or plan.ends[0]) if plan.ends else -1
    tokens = _padded([torch.tensor(one.tokens, dtype=prompts.dtype) for one in rows], padding_value=filling)
    sequences = torch.cat([prompts.repeat_interleave(count, dim=0), tokens.to(device)], dim=1)
    shown = [one.attention for one in rows if one.attention is not None]
    alignments = _padded(shown) if plan.alignments else None
    if width == 1:
        return GreedySearchOutput(sequences, alignments=alignments)
    beams = [torch.tensor(one.beams, dtype=torch.int32) + number // count * width for number, one in enumerate(rows)]
    return BeamSearchOutput(
        sequences=sequences,
        sequences_scores=torch.tensor([one.score for one in rows], dtype=torch.float32, device=device),
        beam_indices=_padded(beams, padding_value=-1).to(device),
        alignments=alignments,
    )
