"""Importing the package is all that transformers' Auto classes need."""

import importlib
import logging
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.pipelines import PIPELINE_REGISTRY

import hf_vanilla_transformer
from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
    VanillaTransformerTokenizer,
    VanillaTransformerTokenizerFast,
)

SMALL = {"vocab_size": 20, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1}
HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}


def assert_registered(checkpoint):
    config = AutoConfig.for_model("vanilla_transformer", **SMALL, **HEADS)
    assert type(config) is VanillaTransformerConfig
    assert config.d_model == 8
    assert type(AutoConfig.from_pretrained(checkpoint)) is VanillaTransformerConfig
    for auto, model_class in (
        (AutoModel, VanillaTransformerModel),
        (AutoModelForSeq2SeqLM, VanillaTransformerForConditionalGeneration),
    ):
        assert type(auto.from_config(config)) is model_class
        assert type(auto.from_pretrained(checkpoint)) is model_class
    assert type(AutoTokenizer.from_pretrained(checkpoint)) is VanillaTransformerTokenizerFast


def test_auto_classes_give_ours(tiny_checkpoint):
    assert_registered(tiny_checkpoint)


def test_auto_classes_give_the_same_model(tiny_checkpoint):
    batch = AutoTokenizer.from_pretrained(tiny_checkpoint)(["half past nine"], return_tensors="pt")
    expected = VanillaTransformerForConditionalGeneration.from_pretrained(tiny_checkpoint)(
        **batch, labels=batch["input_ids"]
    )
    output = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)(**batch, labels=batch["input_ids"])
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=0)
    assert output.loss == expected.loss


def test_auto_classes_take_options(tiny_checkpoint):
    model = AutoModelForSeq2SeqLM.from_pretrained(
        tiny_checkpoint, dtype=torch.bfloat16, attn_implementation="eager", dropout=0.3
    )
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert model.config.dropout == 0.3
    config, unused = AutoConfig.from_pretrained(tiny_checkpoint, d_model=64, nonsense=1, return_unused_kwargs=True)
    assert (config.d_model, unused) == (64, {"nonsense": 1})


@pytest.mark.parametrize("again", ["register", "reload", "import"])
def test_registering_again_is_harmless(tiny_checkpoint, again, caplog):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        if again == "register":
            hf_vanilla_transformer.register()
        elif again == "reload":
            assert importlib.reload(hf_vanilla_transformer) is hf_vanilla_transformer
        else:
            assert importlib.import_module("hf_vanilla_transformer") is hf_vanilla_transformer
        assert_registered(tiny_checkpoint)
    finally:
        logger.removeHandler(caplog.handler)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_one_tokenizer_under_two_names():
    assert VanillaTransformerTokenizer is VanillaTransformerTokenizerFast


def test_public_names():
    for name in hf_vanilla_transformer.__all__:
        assert getattr(hf_vanilla_transformer, name) is not None
    assert set(hf_vanilla_transformer.__all__) <= set(dir(hf_vanilla_transformer))
    everything = {}
    exec("from hf_vanilla_transformer import *", everything)
    assert everything.keys() >= set(hf_vanilla_transformer.__all__)


@pytest.mark.parametrize("name", ["VanillaTransformer", "nonsense", "_EXPORT"])
def test_unknown_name(name):
    with pytest.raises(AttributeError, match=rf"module 'hf_vanilla_transformer' has no attribute '{name}'"):
        getattr(hf_vanilla_transformer, name)


@pytest.mark.parametrize(
    ("arguments", "original", "is_command"),
    [
        # While Python looks for what -m names, its arguments begin with "-m".
        (["-m", "--help"], ["python", "-m", "hf_vanilla_transformer", "--help"], True),
        (["-m"], ["python", "-X", "utf8", "-m", "hf_vanilla_transformer"], True),
        (["-m", "-m"], ["python", "-m", "hf_vanilla_transformer", "-m"], True),
        (["-m"], ["python", "-mhf_vanilla_transformer"], True),
        (["-m", "train"], ["python", "-um", "hf_vanilla_transformer", "train"], True),
        (["-m"], ["python", "-m", "another_package"], False),
        (["-m"], ["python", "-manother_package"], False),
        (["-m"], ["python", "-m", "scripts.quickstart.corpus"], False),
        (["/usr/bin/vanilla-transformer", "translate"], ["python", "/usr/bin/vanilla-transformer", "translate"], True),
        (["vanilla-transformer.exe"], ["vanilla-transformer.exe"], True),
        (["train.py", "-m"], ["python", "train.py", "-m"], False),
        (["-c"], ["python", "-c", "import hf_vanilla_transformer"], False),
        ([""], ["python"], False),
    ],
)
def test_started_as_command(monkeypatch, arguments, original, is_command):
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert hf_vanilla_transformer._started_as_command() is is_command


@pytest.mark.parametrize("option", ["-m", "-um"])
def test_starts_with_options_of_python(option):
    command = [sys.executable, option, "hf_vanilla_transformer", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert hf_vanilla_transformer.__version__ in run.stdout


def test_transformers_has_no_pipeline_for_translation():
    """If it comes back, ours belongs there: until then README shows `generate()`."""
    assert not {"translation", "text2text-generation", "summarization"} & {*PIPELINE_REGISTRY.get_supported_tasks()}
