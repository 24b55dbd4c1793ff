"""Weights that transformers has quantized: right without the engine, or refused."""

import json
import shutil

import pytest
import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from hf_vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.engine import EngineError, unsupported_reason
from hf_vanilla_transformer.errors import CheckpointError

TEXTS = ["twenty-one", "half past nine", "three euros and five cents", "the fourth of May"]


def torchao(name):
    quantization = pytest.importorskip("torchao.quantization", reason="torchao isn't installed")
    return TorchAoConfig(getattr(quantization, name)())


def quanto(weights):
    pytest.importorskip("optimum.quanto", reason="optimum-quanto isn't installed")
    return QuantoConfig(weights=weights)


def bitsandbytes(**options):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes isn't installed")
    return BitsAndBytesConfig(**options)


CONFIGS = {
    "torchao, int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao, int8 activations": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "quanto, int8": lambda: quanto("int8"),
    "quanto, int4": lambda: quanto("int4"),
    "bitsandbytes, int8": lambda: bitsandbytes(load_in_8bit=True),
}


@pytest.mark.peers
@pytest.mark.parametrize("name", CONFIGS)
def test_quantized_models_translate_without_the_engine(tiny_checkpoint, tokenizer, name):
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint, quantization_config=CONFIGS[name]())
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    for num_beams in (1, 3):
        found = model.generate(**inputs, num_beams=num_beams, max_new_tokens=9)
        translations = Translator(model, tokenizer=tokenizer)(TEXTS, num_beams=num_beams, max_new_tokens=9)
        assert translations == tokenizer.batch_decode(found, skip_special_tokens=True)
    with pytest.raises(EngineError, match="its weights are quantized"):
        Translator(model, compute_type="int8", tokenizer=tokenizer)


class WithoutInferenceMode(nn.Linear):
    """A linear map that can't compute in inference mode, as quanto's of 4 bits."""

    def forward(self, x):
        assert not torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
        return super().forward(x)


def test_the_engine_and_inference_mode_are_left_out(tiny_checkpoint, tokenizer):
    model = VanillaTransformerForConditionalGeneration.from_pretrained(tiny_checkpoint)
    assert unsupported_reason(model) is None
    expected = Translator(model, tokenizer=tokenizer)(TEXTS)
    model.is_quantized = True  # as transformers says it
    assert unsupported_reason(model) == "its weights are quantized"
    model.lm_head.__class__ = WithoutInferenceMode
    assert Translator(model, tokenizer=tokenizer)(TEXTS) == expected


def test_quantized_checkpoints_are_refused_before_they_are_loaded(tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao", "quant_type": {}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="its weights are quantized; give Translator what from_pretrained loads"):
        Translator(folder)
