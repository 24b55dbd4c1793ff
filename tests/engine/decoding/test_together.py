"""Searches of several batches at once give what each gives by itself."""

import threading
from unittest import mock

import pytest
import torch
from test_generation import SOURCES, lively_model, padded
from test_incremental import CLOSE, IN_TWO_PRECISIONS, varied

from hf_vanilla_transformer.engine.decoding import generate as generate_module
from hf_vanilla_transformer.engine.decoding import together as together_module
from hf_vanilla_transformer.engine.decoding.generate import Call
from hf_vanilla_transformer.engine.decoding.incremental import IncrementalDecoder, encode, step_together
from hf_vanilla_transformer.engine.decoding.prepared import weights_of
from hf_vanilla_transformer.engine.decoding.search import beam_search
from hf_vanilla_transformer.engine.decoding.together import Postponed, together

# A translation has two tokens more than its source, at most: so the first sentence of each batch ends last.
BATCHES = [[SOURCES[0] * 3, *SOURCES[first:], *SOURCES[:first]] for first in range(5)] + [SOURCES[:1]]
SETTINGS = {
    "greedy": {"num_beams": 1},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "prompts": {"num_beams": 2, "decoder_input_ids": [1, 5, 6]},
    "alignments": {"num_beams": 2, "output_alignments": True, "coverage_penalty": 0.2},
    "processors": {"num_beams": 1, "min_new_tokens": 4, "no_repeat_ngram_size": 2},
}


def decoder_of(model, sources, beams, side="right"):
    inputs = padded(sources, side)
    memory = encode(weights_of(model), **inputs)
    return IncrementalDecoder(weights_of(model), memory, inputs["attention_mask"], beams, keep_attention=True)


@IN_TWO_PRECISIONS
@torch.no_grad()
def test_steps_taken_together_are_those_of_each(name, dtype):
    model, random = varied(name, dtype), torch.Generator().manual_seed(3)
    vocabulary = model.config.target_vocab_size
    kinds = [(SOURCES[:3], 2, "right"), (SOURCES[1:3], 1, "left"), (SOURCES[2:], 3, "right")]
    alone, joint = ([decoder_of(model, *kind) for kind in kinds] for _ in range(2))
    for step in range(40):  # beyond the room that caches have at first
        count = 1 + step % 3 if step < 6 else 3  # the first ones are ahead
        tokens = [torch.randint(vocabulary, (one.num_rows,), generator=random) for one in alone[:count]]
        expected = [one.step(own) for one, own in zip(alone, tokens, strict=False)]
        found = step_together(joint[:count], tokens)
        for mine, theirs, logits, own in zip(joint, alone, found, expected, strict=False):
            torch.testing.assert_close(logits, own, **CLOSE[dtype])
            torch.testing.assert_close(mine.attention, theirs.attention, **CLOSE[dtype])
        if step == 3:
            for one in (alone[0], joint[0]):
                one.move([0, 0, 1, 1, 2, 2], [0, 1, 2])
        if step == 8:  # beams go on from others, and a sentence leaves
            for one in (alone[0], joint[0]):
                one.move([1, 0, 4, 4], [0, 2])


def run(model, settings, is_together=True):
    """Each batch's output, and how many searches took each step."""
    widths = []

    def step(decoders, tokens):
        widths.append(len(decoders))
        return step_together(decoders, tokens)

    def generate(number):
        inputs, given = padded(BATCHES[number]), dict(settings)
        if prompt := given.pop("decoder_input_ids", None):
            given["decoder_input_ids"] = torch.tensor([prompt] * len(BATCHES[number]))
        return model.generate(**inputs, return_dict_in_generate=True, max_extra_length=2, **given)

    if not is_together:
        return [generate(number) for number in range(len(BATCHES))], widths
    with mock.patch.object(together_module, "step_together", step):
        outputs = dict(together(model, generate, range(len(BATCHES))))
    return [outputs[number] for number in range(len(BATCHES))], widths


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(one[name], value, **CLOSE[torch.float32])


@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_are_those_of_each_call(name):
    model = varied()
    expected, _ = run(model, SETTINGS[name], is_together=False)
    found, widths = run(model, SETTINGS[name])
    assert_same(found, expected)
    assert max(widths) >= 2  # they did run together


def test_lists_that_transformers_has_to_fill_up():
    """Where a search ends with too few hypotheses, transformers' loop is asked at its end."""
    model = varied()
    expected, _ = run(model, SETTINGS["beams"], is_together=False)

    def short_search(*settings):
        searches, attention = yield from beam_search(*settings)
        for search in searches:
            del search.finished[1:]
        return searches, attention

    with (
        mock.patch.object(generate_module, "beam_search", short_search),
        mock.patch.object(Call, "_by_transformers", autospec=True, side_effect=Call._by_transformers) as asked,
    ):
        found, _ = run(model, SETTINGS["beams"])
    assert len(asked.mock_calls) == len(BATCHES)
    assert [one.sequences.tolist() for one in found] == [one.sequences.tolist() for one in expected]


def test_a_single_sentence_runs_by_itself():
    """Its attention is folded."""
    outputs = dict(together(varied(), lambda ids: varied().generate(torch.tensor([ids])), map(tuple, SOURCES[:2])))
    for ids, output in outputs.items():
        assert output.equal(varied().generate(torch.tensor([ids])))


def test_a_model_that_the_engine_refuses_is_asked_as_ever():
    model = lively_model()
    expected, _ = run(model, {"num_beams": 2}, is_together=False)
    handle = model.model.decoder.layers[0].register_forward_hook(lambda *_: None)
    found, widths = run(model, {"num_beams": 2})
    handle.remove()
    assert not widths
    assert [one.sequences.tolist() for one in found] == [one.sequences.tolist() for one in expected]


@pytest.mark.parametrize("is_of_class", [True, False])
def test_a_generate_of_the_users_gets_results(is_of_class):
    """It may look at what `generate()` returns."""
    model = lively_model()
    plain = type(model).generate
    expected, _ = run(model, {}, is_together=False)

    def generate(*arguments, **options):
        output = plain(model, **options)
        output.sequences = output.sequences[:, 1:]
        return output

    if is_of_class:
        model.__class__ = type("Own", (type(model),), {"generate": generate})
    else:
        model.generate = generate
    found, widths = run(model, {})
    assert not widths
    assert [one.sequences.tolist() for one in found] == [one.sequences[:, 1:].tolist() for one in expected]


def test_weights_that_change_between_batches_count_from_then_on():
    model = lively_model()
    expected = []

    def generate(number):
        if number == 3:
            with torch.no_grad():
                model.lm_head.weight.mul_(-1.0)
        return model.generate(**padded(BATCHES[number]), max_new_tokens=9)

    for _ in range(2):
        expected.append([generate(number) for number in range(6)])
    found = dict(together(model, generate, range(6)))  # the sign is now what it was at the beginning
    assert all(found[number].equal(expected[0][number]) for number in range(6))
    assert any(not one.equal(other) for one, other in zip(*expected, strict=True))


def test_nothing_is_postponed_outside():
    """Not after an error, not in another thread, not when the results are no longer wanted."""
    model, seen = varied(), []

    def ask():
        seen.append(model.generate(**padded(SOURCES), max_new_tokens=3))

    def generate(number):
        if number == 2:
            raise ValueError("two")
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return model.generate(**padded(SOURCES), max_new_tokens=3)

    with pytest.raises(ValueError, match="two"):
        list(together(model, generate, range(3)))
    ask()
    outputs = together(model, generate, range(2))
    next(outputs)
    outputs.close()
    ask()
    assert not any(isinstance(one, Postponed) for one in seen)
    assert len({tuple(one.flatten().tolist()) for one in seen}) == 1
