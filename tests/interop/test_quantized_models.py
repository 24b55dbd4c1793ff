"""Models whose weights were quantized in place are refused by each format, before anything is written."""

import pytest
import torch
from torch import nn

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.checkpoints.loading import load_checkpoint
from hf_vanilla_transformer.errors import CheckpointError
from hf_vanilla_transformer.interop import FORMATS
from hf_vanilla_transformer.interop.export import export, writer_of
from hf_vanilla_transformer.interop.interface import ConversionError


class Int8Tensor(torch.Tensor):
    """A class of its own for a parameter, as torchao's and quanto's."""


def own_class(model):
    linear = model.model.encoder.layers[0].self_attn.q_proj
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Int8Tensor))
    return model


def dynamic(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def torchao(model):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao isn't installed")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def quanto(model):
    library = pytest.importorskip("optimum.quanto", reason="optimum-quanto isn't installed")
    library.quantize(model, weights=library.qint8)
    library.freeze(model)
    return model


WAYS = {
    "own class": (own_class, "Int8Tensor"),
    "dynamic": (dynamic, "Linear, LinearPackedParams"),
    "torchao": (torchao, "Int8Tensor"),
    "quanto": (quanto, "QLinear, WeightQBytesTensor"),
}


@pytest.mark.parametrize(("way", "to"), [*(("own class", to) for to in FORMATS), *((way, "stock") for way in WAYS)])
def test_each_format_refuses_them(way, to, tiny_checkpoint, tmp_path):
    try:
        writer_of(to)
    except ImportError as error:
        pytest.skip(f"{error.name} isn't installed")
    (quantize, name), (tokenizer, model) = WAYS[way], load_checkpoint(tiny_checkpoint)
    with pytest.raises(ConversionError, match=rf"its weights are quantized \({name}\); export the model as it was bef"):
        export(quantize(model), tmp_path / "out", to=to, tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


def test_so_does_a_translator_that_converts(tiny_checkpoint):
    pytest.importorskip("ctranslate2")
    tokenizer, model = load_checkpoint(tiny_checkpoint)
    with pytest.raises(CheckpointError, match="its weights are quantized"):
        Translator(own_class(model), tokenizer=tokenizer, backend="ctranslate2")
