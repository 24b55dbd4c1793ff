"""A call of `generate()` with the engine attached: what it leaves to transformers' loop, and odd input."""

import pytest
import torch
from test_generation import BOS, EOS, PAD, SOURCES, lively_model, padded
from test_search import by_us, exact_model
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.generation.streamers import BaseStreamer

from hf_vanilla_transformer import engine
from hf_vanilla_transformer.integration_vanilla_transformer import CACHE


@pytest.fixture
def model():
    """Shared: tests leave it as it is."""
    return exact_model()


class OnlySevens(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[-1]) != 7, -torch.inf)


# ---- what is left to transformers ----


def _cache():
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def _batch(change):
    inputs = padded(SOURCES[:3])
    change(inputs["attention_mask"])
    return inputs


def _encoded():
    inputs = padded(SOURCES[:3])
    return {"input_ids": None, "encoder_outputs": (exact_model().get_encoder()(**inputs).last_hidden_state,)}


def _embedded():
    inputs = padded(SOURCES[:3])
    embeddings = exact_model().get_input_embeddings()(inputs["input_ids"]).detach()
    return {"input_ids": None, "inputs_embeds": embeddings}


def _decode(model, input_ids, **kwargs):
    return input_ids


class Recorder(BaseStreamer):
    def __init__(self):
        self.pieces = []

    def put(self, value):
        self.pieces.append(value)

    def end(self):
        assert len(self.pieces) > 1


# Why: what is said, beams, arguments.
REASONS = {
    "sampling": ("`do_sample=True` is given", 1, lambda: {"do_sample": True, "temperature": 0.7}),
    "a method of one's own": ("`custom_generate` is given", 1, lambda: {"custom_generate": _decode}),
    "a processor": ("`logits_processor` is", 3, lambda: {"logits_processor": LogitsProcessorList([OnlySevens()])}),
    "several forced ends": ("several tokens are", 3, lambda: {"forced_eos_token_id": [PAD, 5], "max_new_tokens": 3}),
    "an end forced at several limits": ("each sentence's own limit", 3, lambda: {"forced_eos_token_id": EOS}),
    "a cache": (f"`{CACHE}` is given", 1, lambda: {"past_key_values": _cache()}),
    "a streamer": ("`streamer` is given", 1, lambda: {"streamer": Recorder()}),
    "scores": ("`output_scores=True`", 1, lambda: {"output_scores": True, "return_dict_in_generate": True}),
    "a mask of the target": (
        "`decoder_attention_mask` is", 3, lambda: padded([[BOS, 5, 9], [BOS, 13], [BOS, 4, 4]], "left", "decoder_")
    ),
    "padded prompts": (
        "prompts have padding", 3, lambda: {"decoder_input_ids": torch.tensor([[PAD, 5], [7, 9], [8, 8]])}
    ),
    "an empty source": ("all padding", 3, lambda: _batch(lambda mask: mask[1].zero_())),
    "another mask": ("isn't 0 or 1", 3, lambda: _batch(lambda mask: mask.mul_(2))),
    "embeddings": ("`inputs_embeds` is given", 3, _embedded),
    "an encoded tuple": ("isn't token ids", 1, _encoded),
}  # fmt: skip


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_not_covered_is_left_to_transformers(model, reason):
    """With the reason in a warning; an option of the engine is then an error, which names it too."""
    said, num_beams, arguments = REASONS[reason]

    def options():
        return {**padded(SOURCES[:3]), "num_beams": num_beams, "max_extra_length": 2, **arguments()}

    found = []
    with engine.attach(model) as attached, torch.no_grad():
        torch.manual_seed(0)
        found.append(model.generate(**options()))
        assert (attached.calls, attached.fallbacks) == (0, 1)
        assert said in attached.last_reason
        with pytest.raises(engine.EngineError, match="`output_alignments` needs the engine") as raised:
            model.generate(**options(), output_alignments=True)
        assert said in str(raised.value)
    torch.manual_seed(0)
    with torch.no_grad():
        found.append(model.generate(**options()))
    assert torch.equal(*(one if isinstance(one, torch.Tensor) else one.sequences for one in found))


def test_assisted_decoding_is_transformers(model):
    """Of a model with the engine, and by an assistant with one: its candidates come from a loop with a cache."""
    helper = lively_model(7, encoder_layers=1, decoder_layers=1).double()
    options = {"input_ids": torch.tensor(SOURCES[:1]), "num_beams": 1, "max_extra_length": 6}
    expected = model.generate(**options)
    with engine.attach(model) as attached, engine.attach(helper):
        assert torch.equal(model.generate(**options, assistant_model=helper), expected)
        assert torch.equal(model.generate(**options, prompt_lookup_num_tokens=2), expected)
    assert (attached.calls, attached.fallbacks) == (0, 2)
    assert "`prompt_lookup_num_tokens=2` is given" in attached.last_reason


# ---- arguments ----


def test_arguments_by_position_and_arguments_of_none(model):
    """As transformers' own `generate()` takes them."""
    inputs = padded(SOURCES)
    expected = by_us(model, **inputs, num_beams=2, max_new_tokens=4).sequences
    config = GenerationConfig(num_beams=2, max_new_tokens=4)
    nothing = dict.fromkeys(("custom_generate", "streamer", "generation_config", "stopping_criteria"))
    with engine.attach(model) as attached:
        found = model.generate(inputs["input_ids"], config, attention_mask=inputs["attention_mask"])
        assert torch.equal(found, expected)
        assert torch.equal(model.generate(**inputs, num_beams=2, max_new_tokens=4, **nothing), expected)
    assert attached.calls == 2


def test_options_of_the_generation_config(model):
    """The engine's options may stand there too."""
    options = {**padded(SOURCES), "num_beams": 3, "max_extra_length": 3}
    expected = by_us(model, **options, coverage_penalty=0.4, output_alignments=True)
    config = GenerationConfig(num_beams=3, max_extra_length=3, coverage_penalty=0.4, output_alignments=True)
    found = by_us(model, **padded(SOURCES), generation_config=config)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.alignments, expected.alignments)
