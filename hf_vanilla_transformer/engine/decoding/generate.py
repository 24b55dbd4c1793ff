"""`generate()` of an attached model: a thin adapter between transformers' arguments and outputs and a search."""

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput, GenerateEncoderDecoderOutput
from transformers.utils import ModelOutput

from ...plan_vanilla_transformer import Plan, settings_in
from .prepared import Prepared
from .search import Hypothesis

Arguments: TypeAlias = Mapping[str, Any]  # of `generate()`
Output: TypeAlias = GenerateEncoderDecoderOutput | GenerateBeamEncoderDecoderOutput
SOURCES = ("inputs", "input_ids", "encoder_outputs")
# Arguments that are no settings. Seq2SeqTrainer gives its labels too; transformers keeps them from the model.
INPUTS = (*SOURCES, "attention_mask", "decoder_input_ids", "labels")
NO_HYPOTHESIS = -1e9  # transformers' score of places that hold none

_padded = partial(pad_sequence, batch_first=True)


class Uncovered(Exception):  # noqa: N818  # no error: transformers' loop takes the call
    """What keeps the engine from a call."""


def generate(model: PreTrainedModel, plan: Plan, arguments: Arguments, prepared: Prepared) -> Output | Tensor:
    """Decodes a call of `model.generate(**arguments)` by a plan that `prepared` supports, or raises `Uncovered`."""
    device, arguments = prepared.device, dict(arguments)
    model.mask_padding(plan, arguments)
    source, mask = _source(arguments), arguments.get("attention_mask")
    prompts = _prompts(plan, arguments.get("decoder_input_ids"), source)
    _check(model, plan, arguments, source, prompts)
    longest = model.max_new_tokens(plan, model.source_lengths(source, mask), prompts.shape[1])
    mask, prompts = None if mask is None else mask.to(device), prompts.to(device)
    memory = source if source.ndim == 3 else prepared.encode(source.to(device), mask)
    found = prepared.search(plan, memory, mask, prompts, longest)
    if not all(found):
        raise Uncovered("nothing is possible for one of the sources")
    output = _output(found, plan, prompts, source.shape[1])
    settings = settings_in(model.generation_config) | settings_in(arguments.get("generation_config")) | arguments
    return output if settings.get("return_dict_in_generate") else output.sequences


def _source(arguments: Arguments) -> Tensor:
    """Returns the source's ids, (B, S), or the encoder's output, (B, S, d_model)."""
    given = {name: one for name in SOURCES if (one := arguments.get(name)) is not None}
    source = next(iter(given.values())) if len(given) == 1 else None  # of several, transformers chooses or refuses
    if is_encoded := "encoder_outputs" in given and isinstance(source, ModelOutput):
        source = source[0]
    wanted = 2 + is_encoded, is_encoded  # dimensions, and whether they are floating-point numbers
    if isinstance(source, Tensor) and source.numel() and (source.ndim, source.is_floating_point()) == wanted:
        return source
    raise Uncovered("the source isn't token ids, (batch, length), or an output of the encoder")


def _prompts(plan: Plan, given: Tensor | None, source: Tensor) -> Tensor:
    """Returns what targets begin with, (B, P): the start token, before a prompt without it."""
    assert plan.start is not None, "else the plan isn't supported"
    start = torch.full((len(source), 1), plan.start, device=source.device)
    if given is None:
        return start
    if given.ndim != 2 or len(given) != len(source) or given.is_floating_point():
        raise Uncovered("`decoder_input_ids` aren't (batch, length)")
    return given.long() if (given[:, :1] == start).any() else torch.cat([start, given], dim=1)


def _check(model: PreTrainedModel, plan: Plan, arguments: Arguments, source: Tensor, prompts: Tensor) -> None:
    """Refuses what transformers refuses, and what the search has no order for."""
    mask, config, (limit, most) = arguments.get("attention_mask"), arguments.get("generation_config"), plan.limit
    is_usual = mask is None or (mask.shape == source.shape[:2] and (mask == mask.bool()).all() and mask.any(-1).all())
    obstacles = {
        "the configuration has settings of decoding": config is None and model.config._get_generation_parameters(),
        "`attention_mask` isn't 0 or 1 for each token of the source, or a source is all padding": not is_usual,
        "prompts have padding": arguments.get("decoder_attention_mask") is not None,
        "there is no padding token": plan.padding is None and len(source) > 1,
        "`max_length` leaves no room behind the prompt": limit == "max_length" and most <= prompts.shape[1],
    }
    if reason := next((reason for reason, is_in_the_way in obstacles.items() if is_in_the_way), None):
        raise Uncovered(reason)


def _output(found: list[list[Hypothesis]], plan: Plan, prompts: Tensor, source_length: int) -> Output:
    """Makes an output of transformers, with scores of a beam search; `alignments`, (rows, T, S), are 0 behind ends."""
    count, width, device = plan.num_hypotheses, plan.num_beams, prompts.device
    nothing = Hypothesis([], NO_HYPOTHESIS, attention=torch.zeros(0, source_length, device=device))
    rows = [one for own in found for one in own + [nothing] * (count - len(own))]
    filling = plan.padding or 0
    if width > 1:  # `</s>` stands behind a hypothesis where padding has the id 0, as in transformers' beam search
        filling = (plan.padding or plan.ends[0]) if plan.ends else -1
    tokens = _padded([torch.tensor(one.tokens, dtype=prompts.dtype) for one in rows], padding_value=filling)
    sequences = torch.cat([prompts.repeat_interleave(count, dim=0), tokens.to(device)], dim=1)
    output: Output = GenerateEncoderDecoderOutput(sequences)
    if width > 1:
        beams = [torch.tensor(one.beams, dtype=torch.int32) + n // count * width for n, one in enumerate(rows)]
        scores = torch.tensor([one.score for one in rows], dtype=torch.float32, device=device)
        indices = _padded(beams, padding_value=-1).to(device)
        output = GenerateBeamEncoderDecoderOutput(sequences, sequences_scores=scores, beam_indices=indices)
    if plan.alignments:
        output["alignments"] = _padded([one.attention for one in rows if one.attention is not None])
    return output
