"""How a call decodes: settings at several places, against what transformers' own loop makes of them."""

import copy

import pytest
import torch
from test_generation import EOS, SOURCES, lively_model, padded
from transformers import GenerationConfig

from hf_vanilla_transformer import engine


def outcome(model, **options):
    torch.manual_seed(0)
    try:
        found = model.generate(**options)
    except (ValueError, TypeError) as error:
        return type(error).__name__
    return found.tolist() if isinstance(found, torch.Tensor) else found.sequences.tolist()


OWN, SAMPLED = (GenerationConfig(max_new_tokens=9, **more) for more in ({}, {"do_sample": True}))
CALLS = {
    "end nowhere": ({"eos_token_id": None}, {}),
    "start by bos": ({"decoder_start_token_id": None, "bos_token_id": 3}, {}),
    "no padding": ({"pad_token_id": None, "num_beams": 1}, {}),
    "0 new tokens at least": ({"min_length": 6}, {"min_new_tokens": 0}),
    "forced and barred": ({}, {"forced_bos_token_id": 5, "suppress_tokens": [5], "num_beams": 1}),
    "more hypotheses than beams": ({}, {"num_return_sequences": 7}),
    "no time": ({}, {"max_time": 0.0, "num_beams": 1}),
    "a typing error": ({}, {"bad_words": []}),
    "two sources": ({}, {"inputs": torch.tensor([SOURCES[0]])}),
    "a number for a list": ({}, {"suppress_tokens": 5}),
    "a prompt without its start": ({}, {"decoder_input_ids": torch.full((5, 2), 7, dtype=torch.int32)}),
    "no dictionary": ({"return_dict_in_generate": True}, {"return_dict_in_generate": None}),
    # What a caller's configuration leaves out is the model's, such as its whole distribution.
    "samples of a model": (
        {"do_sample": True, "num_beams": 1, "top_k": 0},
        {"generation_config": OWN},
    ),
    "samples of a configuration": ({"num_beams": 3}, {"generation_config": SAMPLED}),
    "a length of a call and one of the model": ({"max_new_tokens": 7}, {"max_length": 5}),
    "a number beside a configuration": ({}, {"generation_config": GenerationConfig(num_beams=3), "num_beams": 2}),
    "no limit": ({}, {"max_extra_length": None}),
    "a string for a number": ({}, {"num_beams": "4"}),
    "None beside a configuration": ({}, {"generation_config": GenerationConfig(num_beams=2), "max_new_tokens": None}),
}


@pytest.mark.parametrize("kind", CALLS)
def test_an_attached_model_takes_settings_as_transformers_does(kind):
    own, options = CALLS[kind]
    model = lively_model(position_encoding="learned", max_position_embeddings=40).double()
    model.generation_config.update(max_extra_length=9, **own)
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    inputs = padded(SOURCES)
    expected = outcome(model, **inputs, **copy.deepcopy(options))
    with engine.attach(model):
        assert outcome(model, **inputs, **copy.deepcopy(options)) == expected


def test_padding_by_an_end_is_no_token_of_a_source():
    """Without a mask, it is attended to, but lengths aren't counted by it."""
    model, ids = lively_model(pad_token_id=EOS).double(), padded(SOURCES)["input_ids"]
    options = {"input_ids": ids.masked_fill(ids == 0, EOS), "num_beams": 1, "max_extra_length": 3}
    options |= {"suppress_tokens": [EOS], "early_stopping": False}
    expected = outcome(model, **options)
    with engine.attach(model) as attached:
        assert outcome(model, **options) == expected
    assert attached.calls == 1


def test_settings_in_the_configuration_are_refused():
    model = lively_model()
    model.config.num_beams = 2
    with engine.attach(model), pytest.raises(ValueError, match="modified the pretrained model configuration"):
        model.generate(**padded(SOURCES))
