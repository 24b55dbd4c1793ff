"""This package's models as ONNX graphs: an encoder, a decoder, and a decoder that continues what it has decoded.

Files, inputs and outputs have the names that Optimum gives them, as other programs expect. The graphs are made by
torch.onnx, as transformers' own exporter (`transformers.exporters`, 5.23) can't make them: its export_for_generation
writes no encoder, fixes the lengths of target and past at 1, and keeps sinusoids as a table with an end.
"""

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import onnxruntime
import onnxscript  # noqa: F401  # torch.onnx imports it too late for a good error
import torch
import torch.nn.functional as F
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import Tensor, nn
from transformers import EncoderDecoderCache, PreTrainedTokenizerBase

from ..errors import first_line
from ..modeling_vanilla_transformer import (
    SinusoidalPositions,
    VanillaTransformerForConditionalGeneration,
    sinusoidal_table,
)
from .interface import ConversionError, check_savable

ENCODER, DECODER, DECODER_WITH_PAST = "encoder_model", "decoder_model", "decoder_with_past_model"
FIRST_PAST = "first_past"  # not one of Optimum's: what a decoder with a past begins with
# How far logits may be from the model's, as a part of the largest where that is above 1.
TOLERANCE = 1e-4
SPAN = 512  # rows of each of the two tables of sinusoids; together they are as large as one of 1,024 positions
Run = Callable[[str, dict[str, Any]], dict[str, Any]]  # a graph's name, inputs -> outputs
Progress = Callable[[str], object]  # is told what is done next


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
    """Writes a model as graphs for onnxruntime, with its settings and its tokenizer's files: a writer of `export`.

    Raises:
        ConversionError: It is quantized, torch.onnx can't express it, or onnxruntime computes something else.
    """
    check_savable(model.generation_config)
    write_graphs(model, folder, (ENCODER, DECODER, DECODER_WITH_PAST), progress)
    progress("comparison")
    opened = opener(folder)
    notes = _notes(model, difference(model, lambda name, inputs: run_graph(opened(name), inputs)))
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return notes


@torch.no_grad()
def write_graphs(
    model: VanillaTransformerForConditionalGeneration, folder: Path, names: Container[str], progress: Progress
) -> None:
    """Writes the graphs of these names into a folder; raises `ConversionError` if torch.onnx can't express one."""
    if getattr(model, "is_quantized", False):
        raise ConversionError("its weights are quantized; export the original")
    exact: Any = _in_float32(model)
    for stack in (exact.model.encoder, exact.model.decoder):
        if isinstance(stack.embed_positions, SinusoidalPositions):
            stack.embed_positions = Sinusoids(stack.embed_positions.layout)
    with quiet():
        for name, module, arguments, axes, outputs in graphs_of(exact):
            if name in names:
                progress(name)
                _write(folder / f"{name}.onnx", module, arguments, axes, outputs)


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
    """Target tokens to logits, and to the keys and values of target and source."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration) -> None:
        super().__init__()
        self.decoder, self.lm_head = model.get_decoder(), model.lm_head

    def forward(self, mask: Tensor, input_ids: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        """Maps (B, S), (B, T) and (B, S, d_model) to (B, T, V) and four tensors a layer."""
        output = self.decoder(input_ids, None, memory, mask, use_cache=True)
        cache = output.cache
        layers = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
        tensors = (tensor for pair in layers for layer in pair for tensor in (layer.keys, layer.values))
        return self.lm_head(output.last_hidden_state), *tensors


class DecoderWithPast(Decoder):
    """Further target tokens to logits, and to the keys and values of the target."""

    def forward(self, mask: Tensor, input_ids: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Maps (B, S), (B, T) and four tensors a layer to (B, T, V) and two tensors a layer."""
        cache = EncoderDecoderCache([tuple(past[i : i + 4]) for i in range(0, len(past), 4)])
        memory = past[2].new_zeros(past[2].shape[0], past[2].shape[2], 1)  # nothing of it is read but its length
        output = self.decoder(input_ids, None, memory, mask, cache, use_cache=True)
        layers = output.cache.self_attention_cache.layers
        tensors = (tensor for layer in layers for tensor in (layer.keys, layer.values))
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
def graphs_of(
    model: VanillaTransformerForConditionalGeneration,
) -> Iterator[tuple[str, nn.Module, Any, Any, list[str]]]:
    """Yields the graphs: name, module, its arguments, by name the axes that have any length, and names of outputs."""
    layers, kinds = range(model.config.decoder_layers), ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
    names = [f"{layer}.{kind}" for layer in layers for kind in kinds]
    present = ["logits", *(f"present.{name}" for name in names)]
    source, mask, target = _example(model, TRACED)
    first, more = target[:, : TRACED.past], target[:, TRACED.past :]
    encoder, decoder = Encoder(model), Decoder(model)
    of_source, of_target = {0: "batch", 1: "source_length"}, {0: "batch", 1: "target_length"}
    axes = {"input_ids": of_source, "attention_mask": of_source}
    yield ENCODER, encoder, (source, mask), axes, ["last_hidden_state"]

    memory, inputs = encoder(source, mask), {"encoder_attention_mask": of_source, "input_ids": of_target}
    yield DECODER, decoder, (mask, first, memory), inputs | {"encoder_hidden_states": of_source}, present

    past = [f"past_key_values.{name}" for name in names]
    yield FIRST_PAST, FirstPast(model), (memory,), {"encoder_hidden_states": of_source}, past

    lengths = {"decoder": "past_length", "encoder": "source_length"}
    axes = inputs | {name: {0: "batch", 2: lengths[name.split(".")[2]]} for name in past}
    arguments = (mask, more, list(decoder(mask, first, memory)[1:]))
    yield DECODER_WITH_PAST, DecoderWithPast(model), arguments, axes, [n for n in present if ".encoder." not in n]


def _example(model: VanillaTransformerForConditionalGeneration, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Makes a source, (B, S), its mask with padding on both sides, and a target, (B, past + target), of any tokens."""
    generator, config = torch.Generator().manual_seed(0), model.config
    longest = config.max_position_embeddings if config.position_encoding == "learned" else None
    source = torch.randint(config.vocab_size, (sizes.batch, sizes.source), generator=generator)[:, :longest]
    target = torch.randint(config.target_vocab_size, (sizes.batch, sizes.past + sizes.target), generator=generator)
    mask = torch.ones_like(source)
    mask[1:2, :1] = mask[1:2, -1:] = mask[2:, :2] = 0
    return source, mask, target[:, :longest]


def _write(file: Path, module: nn.Module, arguments: Any, axes: dict[str, Any], outputs: list[str]) -> None:
    """Traces a module and writes its graph; weights of more than 2 GB are in a file beside it."""
    dynamic = list(axes.values())
    if isinstance(arguments[-1], list):
        dynamic = [*dynamic[: len(arguments) - 1], dynamic[len(arguments) - 1 :]]
    options: Any = {"dynamic_shapes": tuple(dynamic), "dynamo": True, "verbose": False}
    try:
        program: Any = torch.onnx.export(module.eval(), arguments, input_names=[*axes], output_names=outputs, **options)
    except Exception as error:  # of any class, as a model may have modules that were never traced before
        raise ConversionError(f"torch.onnx can't express the {file.stem}: {first_line(error)}") from error
    ClearMetadataAndDocStringPass()(program.model)  # stack traces of this machine
    program.save(str(file))


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
def difference(model: VanillaTransformerForConditionalGeneration, run: Run, tolerance: float = TOLERANCE) -> float:
    """Compares the logits of graphs with a model's.

    Args:
        model: The model; it is compared in float32.
        run: Computes one of the three graphs: its name and inputs -> its outputs, by their names.
        tolerance: The most by which they may differ.

    Returns:
        How far logits of random tokens differ at most, as a part of the largest where that is above 1.

    Raises:
        ConversionError: It is more than the tolerance.
    """
    exact, differences = _in_float32(model), []
    for sizes in COMPARED:
        ours, theirs = _logits_of_graphs(model, sizes, run), _logits(exact, sizes)
        differences.append(((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1)).item())
    if not all(one <= tolerance for one in differences):  # NaN isn't either
        raise ConversionError(f"onnxruntime's logits differ from the model's by {differences} of the largest")
    return max(differences)


def opener(folder: Path, end: str = "") -> Callable[[str], Any]:
    """Returns a function that opens a folder's graph by its name without this end, each once as it takes a while."""
    return functools.cache(
        lambda name: onnxruntime.InferenceSession(folder / f"{name}{end}.onnx", providers=["CPUExecutionProvider"])
    )


def run_graph(session: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Computes a graph's outputs; inputs and outputs are arrays by name."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def _in_float32(model: VanillaTransformerForConditionalGeneration) -> VanillaTransformerForConditionalGeneration:
    exact = copy.deepcopy(model).cpu().float().eval()
    exact.set_attn_implementation("eager")
    return exact


@torch.no_grad()
def _logits(model: VanillaTransformerForConditionalGeneration, sizes: Sizes) -> Tensor:
    """Computes the logits of an example, (B, past + target, V)."""
    source, mask, target = _example(model, sizes)
    real = torch.ones_like(target)  # padding's id is a token like others here
    return model(source, mask, target, real, use_cache=False).logits


def _logits_of_graphs(model: VanillaTransformerForConditionalGeneration, sizes: Sizes, run: Run) -> Tensor:
    """Computes the same with the graphs, the one with a past included."""
    source, mask, target = (tensor.numpy() for tensor in _example(model, sizes))
    memory = run(ENCODER, {"input_ids": source, "attention_mask": mask})["last_hidden_state"]
    first, more = target[:, : sizes.past], target[:, sizes.past :]
    one = run(DECODER, {"encoder_attention_mask": mask, "input_ids": first, "encoder_hidden_states": memory})
    past = {name.replace("present", "past_key_values"): value for name, value in one.items() if name != "logits"}
    two = run(DECODER_WITH_PAST, {"encoder_attention_mask": mask, "input_ids": more, **past})
    return torch.cat([torch.from_numpy(output["logits"]) for output in (one, two)], dim=1)


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
