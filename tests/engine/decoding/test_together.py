"""Searches of several batches at once give what each gives by itself."""

from unittest import mock

import pytest
import torch
from test_generation import SOURCES, lively_model, padded
from test_incremental import CLOSE, varied

from hf_vanilla_transformer import engine
from hf_vanilla_transformer.engine.decoding import generate as generate_module
from hf_vanilla_transformer.engine.decoding import together as together_module
from hf_vanilla_transformer.engine.decoding.incremental import step_together
from hf_vanilla_transformer.engine.decoding.search import beam_search
from hf_vanilla_transformer.engine.decoding.together import run_together

# A translation has two tokens more than its source, at most: so the first sentence of each batch ends last.
BATCHES = [[SOURCES[0] * 3, *SOURCES[first:], *SOURCES[:first]] for first in range(5)] + [SOURCES[:1]]
SETTINGS = {
    "greedy": {"num_beams": 1},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "prompts": {"num_beams": 2, "decoder_input_ids": [1, 5, 6]},
    "alignments": {"num_beams": 2, "output_alignments": True, "coverage_penalty": 0.2},
    "processors": {"num_beams": 1, "min_new_tokens": 4, "no_repeat_ngram_size": 2},
}


def arguments_of(number, settings):
    given = {**padded(BATCHES[number]), "return_dict_in_generate": True, "max_extra_length": 2, **settings}
    if prompt := settings.get("decoder_input_ids"):
        given["decoder_input_ids"] = torch.tensor([prompt] * len(BATCHES[number]))
    return given


def one_by_one(model, settings):
    """Each batch's output."""
    with engine.attach(model):
        return [model.generate(**arguments_of(number, settings)) for number in range(len(BATCHES))]


def together(model, settings, before=lambda number: None):
    """Each batch's output, how many searches took each step, and the engine."""
    widths, attached = [], engine.Engine(model)

    def step(decoders, tokens):
        widths.append(len(decoders))
        return step_together(decoders, tokens)

    def begin(number):
        before(number)
        return attached.begin(model, arguments_of(number, settings))

    with mock.patch.object(together_module, "step_together", step):
        outputs = dict(run_together(begin, range(len(BATCHES))))
    return [outputs[number] for number in range(len(BATCHES))], widths, attached


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(one[name], value, **CLOSE[torch.float32])


@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_are_those_of_each_call(name):
    model = varied()
    found, widths, attached = together(model, SETTINGS[name])
    assert_same(found, one_by_one(model, SETTINGS[name]))
    assert max(widths) >= 2  # they did run together
    assert (attached.calls, attached.fallbacks) == (len(BATCHES), 0)


def test_lists_that_transformers_has_to_fill_up():
    """Where a search ends with too few hypotheses, transformers' loop is asked at its end."""
    model, settings = varied(), SETTINGS["beams"]

    def short_search(*arguments):
        searches, attention = yield from beam_search(*arguments)
        for search in searches:
            del search.finished[1:]
        return searches, attention

    with mock.patch.object(generate_module, "beam_search", short_search):
        found, _, attached = together(model, settings)
    assert attached.fallbacks == len(BATCHES)
    expected = one_by_one(model, settings)
    assert [one.sequences.tolist() for one in found] == [one.sequences.tolist() for one in expected]


def test_weights_that_change_between_batches_count_from_then_on():
    """The batches that have begun end with the old weights; transformers' loop takes the others."""
    model, settings = lively_model(), {"num_beams": 2}

    def change():
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.0)

    before = one_by_one(model, settings)
    found, _, attached = together(model, settings, lambda number: change() if number == 3 else None)
    assert (attached.calls, attached.fallbacks, attached.is_on) == (3, len(BATCHES) - 3, False)
    after = one_by_one(model, settings)
    expected = [*before[:3], *after[3:]]
    assert [one.sequences.tolist() for one in found] == [one.sequences.tolist() for one in expected]
    assert all(one.sequences.tolist() != other.sequences.tolist() for one, other in zip(before, after, strict=True))
