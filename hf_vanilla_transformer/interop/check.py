"""Compares a converted model's logits with those that its original computed for an example."""

import copy
from pathlib import Path

import torch
from torch import Tensor

from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .conversion import ConversionError
from .pickles import read, tensors_of

INPUTS = ("input_ids", "attention_mask", "decoder_input_ids")
# How far logits may be from the original's, as a part of the largest where that is above 1.
TOLERANCE = 1e-4


def read_example(file: Path) -> dict[str, Tensor]:
    """Reads an example: a file of `torch.save`, or of safetensors.

    Returns:
        `input_ids` and `attention_mask`, (B, S), `decoder_input_ids`, (B, T), and `logits`, (B, T, V).

    Raises:
        ConversionError: The file can't be read, lacks one of these, or has them in another type or shape.
    """
    example = tensors_of(read(file), file)
    if missing := [name for name in (*INPUTS, "logits") if name not in example]:
        raise ConversionError(f"{file} has no {', '.join(missing)}")
    if example["logits"].dtype not in (torch.float32, torch.float64):
        raise ConversionError(f"{file}: compute the logits in float32 (model.float()), as rounding hides differences")
    source, mask, target = (example[name] for name in INPUTS)
    is_batch = source.ndim == target.ndim == 2 and source.shape == mask.shape and len(source) == len(target)
    if not (is_batch and source.numel() and target.numel()):
        shapes = ", ".join(f"{name} {tuple(example[name].shape)}" for name in INPUTS)
        raise ConversionError(f"{file}: {shapes}; give them with a row for each sentence and without other dimensions")
    return {**{name: example[name].long() for name in INPUTS}, "logits": example["logits"]}


@torch.no_grad()
def compare(model: VanillaTransformerForConditionalGeneration, example: dict[str, Tensor]) -> str:
    """Compares logits, except those of padding in the target.

    Returns:
        What the largest difference is.

    Raises:
        ConversionError: It is larger than rounding explains, or the example isn't the model's.
    """
    config, expected = model.config, example["logits"]
    for name, rows in (("input_ids", config.vocab_size), ("decoder_input_ids", config.target_vocab_size)):
        if not 0 <= int(example[name].min()) <= int(example[name].max()) < rows:
            raise ConversionError(f"the example's {name} are not all between 0 and {rows - 1}")
    exact = model if model.dtype in (torch.float32, torch.float64) else copy.deepcopy(model).float()
    found = exact(**{name: example[name] for name in INPUTS}, use_cache=False).logits
    if found.shape != expected.shape:
        raise ConversionError(f"the example's logits are {tuple(expected.shape)}, and the model's {tuple(found.shape)}")
    kept = example["decoder_input_ids"].ne(-1 if config.pad_token_id is None else config.pad_token_id)
    kept[:, 0] = True  # padding may be the start token
    difference, largest = ((found - expected)[kept].abs().max().item(), expected[kept].abs().max().item())
    if not difference <= TOLERANCE * max(1.0, largest):  # NaN isn't either
        raise ConversionError(
            f"the converted model isn't the original: its logits differ by up to {difference:.3g}, where the largest "
            f"is {largest:.3g}. Check what no tensor tells: heads, positions, activation, norms, epsilon, scaling"
        )
    return f"logits differ from the example's by at most {difference:.1g}, where the largest is {largest:.3g}"
