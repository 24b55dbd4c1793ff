"""Importing the package is all that transformers' Auto classes need."""

import importlib
import logging

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

import hf_vanilla_transformer
from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerModel,
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


def test_auto_classes_take_options(tiny_checkpoint):
    model = AutoModelForSeq2SeqLM.from_pretrained(
        tiny_checkpoint, dtype=torch.bfloat16, attn_implementation="eager", dropout=0.3
    )
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert model.config.dropout == 0.3
    config, unused = AutoConfig.from_pretrained(tiny_checkpoint, d_model=64, nonsense=1, return_unused_kwargs=True)
    assert (config.d_model, unused) == (64, {"nonsense": 1})


@pytest.mark.parametrize("again", ["register", "reload"])
def test_registering_again_is_harmless(tiny_checkpoint, again, caplog):
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    assert_registered(tiny_checkpoint)
    try:
        if again == "register":
            hf_vanilla_transformer.register()
        else:
            assert importlib.reload(hf_vanilla_transformer) is hf_vanilla_transformer
        assert_registered(tiny_checkpoint)
    finally:
        logger.removeHandler(caplog.handler)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_public_names():
    for name in hf_vanilla_transformer.__all__:
        assert getattr(hf_vanilla_transformer, name) is not None
    assert dir(hf_vanilla_transformer) == sorted(hf_vanilla_transformer.__all__)
    everything = {}
    exec("from hf_vanilla_transformer import *", everything)
    assert everything.keys() >= set(hf_vanilla_transformer.__all__)
