"""What depends on the processor: each one's ways on any machine, and torch without its private functions."""

import ast
import copy
import functools
import re
from pathlib import Path

import pytest
import torch
from test_generation import SOURCES, padded
from test_packed import CLOSE, errors_of_steps, varied
from test_search import by_transformers, by_us

from hf_vanilla_transformer import engine
from hf_vanilla_transformer.engine import torch_private
from hf_vanilla_transformer.engine.decoding import linear, weights
from hf_vanilla_transformer.engine.decoding.screen import Screen

needs_onednn = pytest.mark.skipif(torch_private.onednn_linear() is None, reason="this torch has no oneDNN")


def keep(monkeypatch, *layouts):
    """Lets the engine keep weights of float32 in these layouts alone."""
    monkeypatch.setattr(linear, "_layouts", lambda weight, is_int8: layouts)


def model_of_ones_own():
    """For which nothing is prepared yet."""
    return copy.deepcopy(varied())


@functools.cache
def expected(num_beams):
    """What transformers' loop finds by the plain modules."""
    return by_transformers(varied(), **padded(SOURCES), max_new_tokens=12, num_beams=num_beams).sequences


def assert_same_decoding():
    model = model_of_ones_own()
    for num_beams in (1, 3):
        found = by_us(model, **padded(SOURCES), max_new_tokens=12, num_beams=num_beams).sequences
        assert torch.equal(found, expected(num_beams))


# ---- Layouts ----
@needs_onednn
@pytest.mark.parametrize("layout", [linear.PlainLinear, linear.ColumnLinear, linear.PackedLinear])
def test_each_layout_decodes_as_the_plain_model(monkeypatch, layout):
    keep(monkeypatch, layout)
    assert_same_decoding()
    largest, _ = errors_of_steps(model_of_ones_own(), is_int8=False)
    assert largest < CLOSE[torch.float32]["atol"] + 20 * CLOSE[torch.float32]["rtol"]  # logits are up to 20
    with engine.attach(model_of_ones_own()) as attached:
        assert set(attached.layouts) == {"qkv", "out", "cross_query", "cross_out", "fc1", "fc2"}
        assert set(attached.layouts.values()) == {layout.__name__}


def taking(*seconds):
    """A layout whose products are said to take as long for each of ROWS."""
    return type("Timed", (linear.PlainLinear,), {"seconds": list(seconds)})


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        ((2, 2, 2), (6, 6, 6), "0000"),
        ((6, 6, 6), (2, 2, 2), "1111"),
        ((2, 2, 6), (6, 6, 2), "0001"),
        ((4, 4, 4), (3.8, 3.8, 3.8), "0000"),  # a close call keeps the first
    ],
)
def test_the_fastest_layout_is_chosen_for_each_number_of_rows(monkeypatch, first, second, chosen):
    layouts = taking(*first), taking(*second)
    monkeypatch.setattr(linear, "_measure", lambda maps, width, dtype: [one[0].seconds for one in maps])
    state = torch.random.get_rng_state()
    found = linear.fastest((8, 8), torch.float32, layouts, 4, 1)
    assert torch.equal(torch.random.get_rng_state(), state)  # a user's seed isn't used up
    assert "".join(str(layouts.index(one)) for one in found) == chosen
    keep(monkeypatch, *layouts)
    monkeypatch.setattr(linear, "fastest", lambda *shape: found)
    weight, bias, x = torch.randn(6, 8), torch.randn(6), torch.randn(40, 8)
    own = linear.linear_map(weight, bias)
    assert isinstance(own, linear.ByRows) is (len(set(found)) > 1)
    for rows in (1, 3, 12, 40):
        torch.testing.assert_close(own(x[:rows]), torch.nn.functional.linear(x[:rows], weight, bias))
    monkeypatch.setattr(linear, "ELEMENTS_FOR_BOTH", 8)  # no second copy of a large weight
    assert type(linear.linear_map(weight, bias)) is found[0]


def test_on_a_busy_machine_the_first_layout_is_taken(monkeypatch):
    monkeypatch.setattr(linear, "MEASURED_SECONDS", 0.0)
    layouts = taking(6, 6, 6), taking(2, 2, 2)
    assert linear.fastest((9, 9), torch.float32, layouts, 4, 1) == layouts[:1] * 4
    maps = [[kind(torch.randn(6, 8), None)] * 3 for kind in (linear.PlainLinear, linear.ColumnLinear)]
    found = linear._measure(maps, 8, torch.float32)
    assert [len(own) for own in found] == [len(linear.ROWS)] * 2
    assert all(0 < seconds < 1 for own in found for seconds in own)


def test_small_weights_stay_in_float32(monkeypatch):
    monkeypatch.setattr(linear, "ELEMENTS_FOR_INT8", 6 * 8)
    kinds = [repr(linear.linear_map(torch.randn(rows, 8), None, is_int8=True)) for rows in (5, 6)]
    assert ["FBGEMM" in kind or "OneDNN" in kind for kind in kinds] == [False, True]


# ---- The most probable tokens ----
def screened(monkeypatch, model, **options):
    """Decodes greedily with a screen from the first step on."""
    monkeypatch.setattr(weights, "ELEMENTS_TO_SCREEN", 0)
    monkeypatch.setattr(weights, "STEPS_TO_SCREEN", 0)
    monkeypatch.setattr(linear, "ELEMENTS_FOR_INT8", 0)
    monkeypatch.setattr(linear, "ELEMENTS_FOR_BOTH", 0)
    asked, call = [], Screen.__call__
    monkeypatch.setattr(Screen, "__call__", lambda self, *own: asked.append(1) or call(self, *own))
    options = {"max_new_tokens": 12, "num_beams": 1, **options}
    return by_us(copy.deepcopy(model), **padded(SOURCES), **options).sequences, len(asked)


@pytest.mark.parametrize("bias", [False, True])
def test_a_screen_finds_the_token_of_all_logits(bias):
    steps = 2_000
    for scale, width in ((1.0, 64), (0.01, 64), (30.0, 7)):
        weight = torch.randn(500, width) * scale * torch.rand(500, 1)
        weight[7] = weight[3]  # a tie
        shift = torch.randn(500) * scale if bias else None
        own = Screen(weight, shift, linear.OneDNNLinear(weight, shift), lambda: pytest.fail("too many tokens"))
        x = torch.randn(steps, width) * torch.rand(steps, 1) * 5
        x[: steps // 2] += weight[torch.randint(500, (steps // 2,))] / scale**2  # near a token, as trained models are
        logits = torch.nn.functional.linear(x.double(), weight.double(), shift if shift is None else shift.double())
        found = torch.cat([own(rows) for rows in x.split(16)])
        assert torch.equal(found, logits.argmax(dim=1))


def test_barred_tokens_are_never_found():
    weight, x = torch.randn(300, 16), torch.randn(8, 16)
    own = Screen(weight, None, linear.OneDNNLinear(weight, None), lambda: linear.PlainLinear(weight, None))
    best = (x @ weight.T).argmax(dim=1)
    bar = lambda scores: scores.scatter(1, best[:, None], -torch.inf)  # noqa: E731
    assert torch.equal(own(x, bar), bar(x @ weight.T).argmax(dim=1))
    alone = lambda scores: torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([5]), 0.0)  # noqa: E731
    assert own(x, alone).tolist() == [5] * 8
    assert own(x * torch.nan).tolist() == [0] * 8  # as argmax finds it


@pytest.mark.parametrize(
    ("options", "is_screened"),
    [
        ({}, True),
        ({"bad_words_ids": [[5], [7, 9]], "min_new_tokens": 6, "no_repeat_ngram_size": 2}, True),
        ({"forced_bos_token_id": 4, "suppress_tokens": [6]}, True),
        ({"repetition_penalty": 1.3}, False),  # needs all logits
        ({"num_beams": 3}, False),
    ],
    ids=str,
)
def test_greedy_search_with_a_screen(monkeypatch, options, is_screened):
    options = {"max_new_tokens": 12, "num_beams": 1, **options}
    expected = by_transformers(varied(), **padded(SOURCES), **options).sequences
    found, asked = screened(monkeypatch, varied(), **options)
    assert torch.equal(found, expected)
    assert bool(asked) is is_screened


def test_a_screen_is_made_after_some_steps_and_for_few_rows(monkeypatch):
    monkeypatch.setattr(weights, "ROWS_TO_SCREEN", len(SOURCES) - 1)
    assert screened(monkeypatch, varied())[1] == 0
    monkeypatch.setattr(weights, "ROWS_TO_SCREEN", 64)
    with monkeypatch.context() as context:
        _, asked = screened(context, varied())
        assert asked > 3
        context.setattr(weights, "STEPS_TO_SCREEN", 2)
        found = by_us(copy.deepcopy(varied()), **padded(SOURCES), max_new_tokens=12, num_beams=1).sequences
    assert torch.equal(found, expected(1))


# ---- Private functions of torch ----
PATHS = sorted(
    node.value
    for node in ast.walk(ast.parse(Path(torch_private.__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value))
)
INT8 = ("torch.ops.onednn.qlinear_prepack", "torch.ops.onednn.qlinear_pointwise")
HOOKS = "torch.nn.modules.module._has_any_global_hook"


@pytest.fixture(params=PATHS)
def hidden(request, monkeypatch):
    """Takes one private function away from torch, as far as the package can see, and sees to it that it is missed."""
    find, asked = torch_private.find, []

    def find_others(path):
        asked.append(path)
        return None if path == request.param else find(path)

    monkeypatch.setattr(torch_private, "find", find_others)
    monkeypatch.setattr(linear, "ELEMENTS_FOR_INT8", 0)
    yield request.param
    assert request.param in asked


def test_private_functions_exist():
    """In this version of torch; where one has gone, its replacement is in use: slower, or the engine is off."""
    assert len(PATHS) >= 8
    assert [path for path in PATHS if torch_private.find(path) is None] == []


def test_results_stay_without_a_private_function(hidden):
    if hidden == HOOKS:  # without which there might be some, so the engine steps aside
        model = model_of_ones_own()
        with engine.attach(model) as attached:
            model.generate(**padded(SOURCES), max_new_tokens=2)
        assert (attached.calls, attached.last_reason) == (0, "there are hooks on all modules")
    else:
        assert_same_decoding()
        linear.linear_map(torch.randn(4, 4).bfloat16(), None)
    if hidden in INT8:
        with pytest.raises(engine.EngineError, match=r"int8 needs products of 8 bits, and torch .* lacks them"):
            engine.attach(model_of_ones_own(), compute_type="int8")
    else:
        _, error = errors_of_steps(model_of_ones_own(), is_int8=True)
        assert error < 0.1
