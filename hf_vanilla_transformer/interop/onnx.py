"""This package's models as ONNX graphs: an encoder, and a decoder that begins a translation or continues it.

Files, inputs and outputs have the names that Optimum and transformers.js know; the decoder begins with an `If` between
the past that it is given and the first one. The graphs are made by torch.onnx, as transformers' own exporter
(`transformers.exporters`, 5.23) can't make them: its export_for_generation writes no encoder, fixes the lengths of
target and past at 1, and keeps sinusoids as a table with an end.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import onnxscript  # noqa: F401  # torch.onnx imports it too late for a good error
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx_ir.passes import Sequential, common
from onnxruntime import InferenceSession
from torch import Tensor, nn
from transformers import EncoderDecoderCache, PreTrainedTokenizerBase

from ..errors import first_line
from ..modeling_vanilla_transformer import (
    SinusoidalPositions,
    VanillaTransformerForConditionalGeneration,
    sinusoidal_table,
)
from .interface import ConversionError, check_distance, check_savable, check_unquantized, distance, in_float32

ENCODER, DECODER, FLAG = "encoder_model", "decoder_model_merged", "use_cache_branch"
KINDS = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
LARGEST = 1_500_000_000  # bytes of weights in a graph; more are in a file beside it, as protobuf ends at 2 GB
SPAN = 512  # rows of each of the two tables of sinusoids; together they are as large as one of 1,024 positions
Progress = Callable[[str], object]  # is told what is done next
Arrays = dict[str, NDArray[np.generic]]
# A branch has no weights of its own, and none of its names is also one of the graph around it.
SHARE = Sequential(
    common.LiftSubgraphInitializersToMainGraphPass(), common.DeduplicateInitializersPass(LARGEST), common.NameFixPass()
)


class Sizes(NamedTuple):
    """Sizes of an example, whose target continues `past` tokens."""

    batch: int
    source: int
    past: int
    target: int


TRACED = Sizes(batch=2, source=5, past=3, target=4)
COMPARED = (Sizes(batch=3, source=7, past=2, target=1), Sizes(batch=1, source=1, past=1, target=9))


def write_onnx(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    progress: Progress = lambda step: None,
) -> list[str]:
    """Writes a model as graphs for onnxruntime, with its settings and its tokenizer's files: a writer of `export`."""
    check_savable(model.generation_config)
    write_graphs(model, folder, progress)
    progress("comparison")
    notes = _notes(model, check_distance(difference(model, folder), "onnx"))
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return notes


@torch.no_grad()
def write_graphs(model: VanillaTransformerForConditionalGeneration, folder: Path, progress: Progress) -> None:
    """Writes both graphs into a folder; raises `ConversionError` if torch.onnx can't express them."""
    check_unquantized(model)
    exact = _eager(model)
    for stack in (exact.model.encoder, exact.model.decoder):
        if isinstance(stack.embed_positions, SinusoidalPositions):
            stack.embed_positions = Sinusoids(stack.embed_positions.layout)
    source, mask, target = _example(model, TRACED)
    encoder, first_past, decoder = Encoder(exact), FirstPast(exact), Decoder(exact)
    of_source, of_target = {0: "batch", 1: "source_length"}, {0: "batch", 1: "target_length"}
    names = [f"{layer}.{kind}" for layer in range(model.config.decoder_layers) for kind in KINDS]
    past, present = ([f"{what}.{name}" for name in names] for what in ("past_key_values", "present"))
    axes = {name: {0: "batch", 2: "past_length" if ".decoder." in name else "source_length"} for name in past}
    with quiet():
        progress(ENCODER)
        of_encoder = {"input_ids": of_source, "attention_mask": of_source}
        save(_traced(encoder, (source, mask), of_encoder, ["last_hidden_state"]), folder / f"{ENCODER}.onnx")
        progress(DECODER)
        memory = encoder(source, mask)
        first = _traced(first_past, (memory,), {"encoder_hidden_states": of_source}, past)
        given = list(decoder(mask, target[:, : TRACED.past], [*first_past(memory)])[1:])
        axes = {"encoder_attention_mask": of_source, "input_ids": of_target, **axes}
        further = _traced(decoder, (mask, target[:, TRACED.past :], given), axes, ["logits", *present])
        save(_merged(first, further), folder / f"{DECODER}.onnx")


def save(graph: ir.Model, file: Path) -> None:
    """Writes a graph; many weights are in a file beside it."""
    weights = [value.const_value for value in graph.graph.initializers.values()]
    is_large = sum(one.nbytes for one in weights if one is not None) > LARGEST
    ir.save(graph, file, external_data=f"{file.name}.data" if is_large else None)


# ---- What the graphs compute ----
class Sinusoids(nn.Module):
    """Sinusoids of `SPAN * SPAN` positions, as sums of two angles from tables in float32.

    A browser's onnxruntime can't compute them: that takes float64. With p = far * SPAN + near, sin(p w) is sin(near w)
    cos(far SPAN w) + cos(near w) sin(far SPAN w). The first `SPAN` positions are the model's to the bit; all are within
    3e-7 of its formula in float64. A later position is an error in onnxruntime.
    """

    def __init__(self, layout: tuple[int, str, int]) -> None:
        super().__init__()
        self.d_model, self.encoding, first = layout
        self.near = nn.Buffer(self._waves(range(first, first + SPAN)))
        self.far = nn.Buffer(self._waves(range(0, SPAN * SPAN, SPAN)))

    def _waves(self, positions: range) -> Tensor:
        """Sine and cosine of each frequency: (positions, 2, frequencies)."""
        if self.encoding in ("paper", "marian"):  # twice the width has these frequencies in pairs, if it is odd too
            rows = [sinusoidal_table(1, 2 * self.d_model, "paper", one).view(-1, 2)[::2].T for one in positions]
        else:
            rows = [sinusoidal_table(1, self.d_model // 2 * 2, self.encoding, one).view(2, -1) for one in positions]
        return torch.stack(rows)

    def forward(self, position_ids: Tensor, length: int) -> Tensor:
        """Maps positions, (1 or B, T), to (1 or B, T, d_model)."""
        near, far = self.near[position_ids % SPAN], self.far[position_ids // SPAN]
        turned = torch.stack([near[..., 1, :], -near[..., 0, :]], dim=-2)
        pair = near * far[..., 1:, :] + turned * far[..., :1, :]  # of the sum, (1 or B, T, 2, frequencies)
        row = pair.transpose(-1, -2).flatten(-2) if self.encoding == "paper" else pair.flatten(-2)
        return F.pad(row, (0, max(self.d_model - row.shape[-1], 0)))[..., : self.d_model]


class Encoder(nn.Module):
    """Source tokens to the encoder's output."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration) -> None:
        super().__init__()
        self.encoder = model.get_encoder()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Maps (B, S) and (B, S) to (B, S, d_model)."""
        return self.encoder(input_ids, attention_mask).last_hidden_state


class Decoder(nn.Module):
    """Further target tokens to logits, and to the keys and values of target and source."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration) -> None:
        super().__init__()
        self.decoder, self.lm_head = model.get_decoder(), model.lm_head

    def forward(self, mask: Tensor, input_ids: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        """Maps (B, S), (B, T) and four tensors a layer to (B, T, V) and four tensors a layer."""
        parts = [past[first : first + 4] for first in range(0, len(past), 4)]
        memory = past[2].new_zeros(past[2].shape[0], past[2].shape[2], 1)  # nothing of it is read but its length
        cache = EncoderDecoderCache([tuple(part) for part in parts])
        output = self.decoder(input_ids, None, memory, mask, cache, use_cache=True)
        layers = zip(output.cache.self_attention_cache.layers, parts, strict=True)
        tensors = (tensor for layer, part in layers for tensor in (layer.keys, layer.values, *part[2:]))
        return self.lm_head(output.last_hidden_state), *tensors


class FirstPast(nn.Module):
    """The past before the first target token: nothing of the target, and the keys and values of the source."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration) -> None:
        super().__init__()
        self.layers = model.get_decoder().layers

    def forward(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Maps (B, S, d_model) to four tensors a layer."""
        tensors: list[Tensor] = []
        for layer in self.layers:
            source = layer.encoder_attn.keys_and_values(memory)
            target = (one.new_zeros(*one.shape[:2], 0, one.shape[3]) for one in source)
            tensors += [*target, *source]
        return tuple(tensors)


# ---- Tracing ----
def _example(model: VanillaTransformerForConditionalGeneration, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Makes a source, (B, S), its mask with padding on both sides, and a target, (B, past + target), of any tokens."""
    generator, config = torch.Generator().manual_seed(0), model.config
    longest = config.max_position_embeddings if config.position_encoding == "learned" else None
    source = torch.randint(config.vocab_size, (sizes.batch, sizes.source), generator=generator)[:, :longest]
    target = torch.randint(config.target_vocab_size, (sizes.batch, sizes.past + sizes.target), generator=generator)
    mask = torch.ones_like(source)
    mask[1:2, :1] = mask[1:2, -1:] = mask[2:, :2] = 0
    return source, mask, target[:, :longest]


def _traced(
    module: nn.Module, arguments: tuple[Tensor | list[Tensor], ...], axes: dict[str, dict[int, str]], outputs: list[str]
) -> ir.Model:
    """Traces a module; `axes` are, by the name of an input, those that have any length."""
    dynamic: list[object] = [*axes.values()]
    if isinstance(arguments[-1], list):
        dynamic = [*dynamic[: len(arguments) - 1], dynamic[len(arguments) - 1 :]]
    options: Any = {"dynamic_shapes": tuple(dynamic), "dynamo": True, "verbose": False}
    try:
        program = torch.onnx.export(module.eval(), arguments, input_names=[*axes], output_names=outputs, **options)
    except Exception as error:  # of any class, as a model may have modules that were never traced before
        raise ConversionError(f"torch.onnx can't express the {type(module).__name__}: {first_line(error)}") from error
    assert program is not None, "with dynamo=True"
    common.ClearMetadataAndDocStringPass()(program.model)  # stack traces of this machine
    return program.model


def _merged(first_past: ir.Model, decoder_with_past: ir.Model) -> ir.Model:
    """Makes one graph, with the inputs of both: the second with the past that it is given, or the first one's."""
    first, graph = first_past.graph, decoder_with_past.graph
    (inner,) = first.inputs
    memory = _like(inner, inner.name)
    inner.replace_all_uses_with(memory)
    first.inputs.clear()
    flag = ir.Value(name=FLAG, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    given = [value for value in graph.inputs if str(value.name).startswith("past_key_values")]
    past = [_like(value, f"{value.name}.read") for value in given]
    for value, chosen in zip(given, past, strict=True):
        value.replace_all_uses_with(chosen)
    same = [ir.node("Identity", [value], outputs=[_like(value, f"{value.name}.given")]) for value in given]
    branches = {
        "then_branch": ir.Graph([], [one.outputs[0] for one in same], nodes=same, name="given"),
        "else_branch": first,
    }
    graph.insert_before(graph[0], ir.node("If", [flag], branches, outputs=past))
    graph.inputs.extend([memory, flag])
    return SHARE(ir.Model(graph, ir_version=decoder_with_past.ir_version)).model


def _like(value: ir.Value, name: str | None) -> ir.Value:
    return ir.Value(name=name, type=value.type, shape=value.shape)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the messages of torch.onnx and onnxruntime."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# ---- Comparing ----
@torch.no_grad()
def difference(model: VanillaTransformerForConditionalGeneration, folder: Path, end: str = "") -> float:
    """Returns the distance of the logits of a folder's graphs, whose names have this end, to a model's in float32."""
    files = [str(folder / f"{name}{end}.onnx") for name in (ENCODER, DECODER)]
    sessions = [InferenceSession(file, providers=["CPUExecutionProvider"]) for file in files]
    exact, found = _eager(model), []
    for sizes in COMPARED:
        source, mask, target = _example(model, sizes)
        real = torch.ones_like(target)  # padding's id is a token like others here
        logits = exact(source, mask, target, real, use_cache=False).logits
        found.append(distance(_logits_of_graphs(sessions, _example(model, sizes), sizes.past), logits))
    return max(found, key=lambda one: (one != one, one))  # NaN is the largest


def _eager(model: VanillaTransformerForConditionalGeneration) -> VanillaTransformerForConditionalGeneration:
    exact = in_float32(model)
    exact.set_attn_implementation("eager")
    return exact


def _logits_of_graphs(sessions: list[InferenceSession], example: tuple[Tensor, Tensor, Tensor], past: int) -> Tensor:
    """Computes an example's logits, (B, past + target, V): without a past, and with the one that this gives."""
    source, mask, target = (tensor.numpy() for tensor in example)
    memory = _run(sessions[0], {"input_ids": source, "attention_mask": mask})["last_hidden_state"]
    inputs, logits = {"encoder_hidden_states": memory, "encoder_attention_mask": mask}, []
    for one in sessions[1].get_inputs():
        if one.name.startswith("past_key_values"):  # Optimum gives a past of one position in place of none
            shape = [{"batch": len(mask)}.get(size, 1) if isinstance(size, str) else size for size in one.shape]
            inputs[one.name] = np.zeros(shape, np.float32)
    for number, ids in enumerate((target[:, :past], target[:, past:])):
        output = _run(sessions[1], {**inputs, "input_ids": ids, FLAG: np.array([number > 0])})
        logits.append(torch.from_numpy(output.pop("logits")))
        inputs |= {name.replace("present", "past_key_values"): value for name, value in output.items()}
    return torch.cat(logits, dim=1)


def _run(session: InferenceSession, inputs: Arrays) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def _notes(model: VanillaTransformerForConditionalGeneration, difference: float) -> list[str]:
    config = model.config
    found = [
        f"in float32, logits differ from the model's by at most {difference:.0e} of the largest (of random tokens)",
        "the graphs have no mask of the target: those of one batch may have padding behind them, but not before them",
        "the program that runs the graphs does the search; generation_config.json has the model's settings",
    ]
    if model.dtype is not torch.float32:
        found.append(f"the weights were {str(model.dtype).removeprefix('torch.')} and are float32 now")
    if config.position_encoding == "learned":
        found.append(f"positions end at {config.max_position_embeddings:,}: longer inputs are an error in onnxruntime")
    return found
