"""Captured steps of decoding, run uncaptured on the CPU, against the packed decoder and its search."""

import contextlib
import functools
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_generation import BOS, EOS, PAD, SOURCES, VARIANTS, lively_model
from test_module import assert_same as assert_same_hypotheses
from test_module import found
from test_packed import varied

from hf_vanilla_transformer.engine.decoding.graph import Bucket, Graph, Steps
from hf_vanilla_transformer.engine.decoding.packed import Packed
from hf_vanilla_transformer.engine.decoding.weights import Weights
from hf_vanilla_transformer.plan_vanilla_transformer import GNMTLengthPenalty, Plan

PLAN = Plan(limit=("max_extra_length", 6), start=BOS, ends=(EOS,), padding=PAD, length_penalty=GNMTLengthPenalty(0.6))
BEAMS = replace(PLAN, num_beams=3, num_hypotheses=2)


@functools.cache
def prepared(name="default"):
    """A graph and what it is compared with."""
    model = varied(name)
    return Graph(model), Packed(model)


def assert_same(graph, packed, plan, sources=SOURCES, side="right"):
    assert graph.captures(plan)
    assert_same_hypotheses(found(graph, plan, sources, side), found(packed, plan, sources, side))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_model(name):
    for plan, side in ((PLAN, "right"), (BEAMS, "left")):
        assert_same(*prepared(name), plan, side=side)


@pytest.mark.parametrize("plan", [PLAN, BEAMS])
@pytest.mark.parametrize(
    "settings",
    [
        *({"num_beams": 2, "early_stopping": one, "length_penalty": 2.0} for one in (True, False, "never")),
        *({"num_beams": 5, "early_stopping": one, "length_penalty": -0.5} for one in (True, False, "never")),
        {"early_stopping": False},
        {"early_stopping": "never"},
        {"ends": (EOS, 18, 99)},
        {"ends": ()},
        {"min_new_tokens": 5},
        {"min_length": 3, "ends": (EOS, 18)},
        {"barred": (5, 9, 99), "barred_words": ((12,), (EOS,))},
        {"barred_at_begin": (7, 8, 11), "renormalize": True, "min_new_tokens": 2},
        {"barred": tuple(range(3, 22))},  # fewer tokens are left than a search looks at
        {"limit": ("max_new_tokens", 5), "forced_end": (EOS,), "min_new_tokens": 5, "barred": (5,)},
        {"limit": ("max_new_tokens", 1), "forced_end": (EOS,), "min_new_tokens": 5},
        {"limit": ("max_new_tokens", 40)},  # beyond the positions that the first steps see
    ],
    ids=str,
)
def test_searches_ends_bars_and_limits(plan, settings):
    assert_same(*prepared(), replace(plan, **settings))


@pytest.mark.parametrize("count", [1, 5, 17])
def test_batches_are_filled_up_and_buckets_are_used_again(count):
    graph, packed = Graph(lively_model()), Packed(lively_model())
    for shift, plan in itertools.product(range(3), (BEAMS, replace(BEAMS, length_penalty=2.0))):
        assert_same(graph, packed, plan, (SOURCES * 5)[shift : shift + count])
    assert len(graph._steps) == 1


def test_buckets_are_freed_and_large_batches_divided_by_the_budget():
    graph, packed = Graph(lively_model()), Packed(lively_model())
    graph.budget = 1_200_000
    assert_same(graph, packed, BEAMS, SOURCES * 8)  # 16, 16 and 8 sentences
    assert [one.sentences for one in graph._steps] == [16]
    made = set(graph._steps.values())
    for plan in (BEAMS, PLAN, replace(BEAMS, num_beams=2), BEAMS):
        assert_same(graph, packed, plan, SOURCES * 8)
        assert sum(map(graph._bytes, graph._steps)) <= graph.budget
        made.update(graph._steps.values())
    assert len(made) == 4  # BEAMS's is made twice; PLAN's first one, for 32 sentences, has gone at once
    assert_same(graph, packed, BEAMS)
    graph.budget = 1000  # for which no bucket is small enough
    assert_same(graph, packed, BEAMS)


def test_what_captured_steps_lack_is_left_to_others():
    graph, packed = prepared("learned positions")
    lacking = [{"coverage_penalty": 0.2}, {"alignments": True}, {"no_repeat_ngram_size": 2}]
    lacking += [{"repetition_penalty": 2.0}, {"forced_begin": 4}, {"forced_end": (99,)}]
    lacking += [{"barred_words": ((4, 5),)}, {"ends": tuple(range(3, 14))}]
    buckets = list(graph._steps)
    for settings in lacking:
        plan = replace(BEAMS, limit=("max_length", 9), **settings)
        assert not graph.captures(plan)
        if "forced_end" not in settings:  # a token that the vocabulary lacks
            assert found(graph, plan)[0][0].tokens == found(packed, plan)[0][0].tokens
    assert graph.unsupported(replace(PLAN, others=("do_sample=True",))) == "`do_sample=True` is given"
    assert found(graph, BEAMS, prompt=(BOS, BOS)) == found(packed, BEAMS, prompt=(BOS, BOS))
    assert list(graph._steps) == buckets
    assert_same(graph, packed, replace(BEAMS, limit=("max_new_tokens", 40)))  # all positions that are learned


@pytest.mark.parametrize("settings", [{}, {"num_beams": 4}, {"num_beams": 2, "min_new_tokens": 2, "ends": (3, 4)}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_step_stays_on_its_device(settings, dtype):
    """As a captured one has to: here are no values to be read, and tensors of other devices can't be mixed in."""
    plan, weights = replace(PLAN, forced_end=(EOS,), **settings), Weights(lively_model().to("meta", dtype))
    bucket = Bucket(4, 64, 32, plan.num_beams, len(plan.ends), False, False, bool(plan.min_new_tokens), False, True)
    Steps(weights, bucket, plan, None)._step(32)


def test_capture_changes_nothing_and_happens_once(monkeypatch):
    """With CUDA's functions replaced: a step in a capture isn't run but recorded, and run by each replay."""
    step, graphs, captured = Steps._step, [], []
    stream = SimpleNamespace(wait_stream=lambda other: None, device="cuda")

    def step_or_record(*call):
        if not graphs:
            return step(*call)
        captured.append(call[1])
        graphs[-1].replay = lambda: step(*call)

    @contextlib.contextmanager
    def capturing(graph, pool, stream, capture_error_mode):
        graphs.append(graph)
        yield
        graphs.pop()

    fakes = {"CUDAGraph": SimpleNamespace, "graph": capturing, "current_stream": lambda: stream}
    fakes |= dict.fromkeys(("stream", "device"), contextlib.nullcontext) | {"graph_pool_handle": object}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(Steps, "_step", step_or_record)
    graph, packed = Graph(lively_model()), Packed(lively_model())
    graph._stream = stream
    plans = [replace(one, limit=("max_new_tokens", 70), barred=(EOS,)) for one in (PLAN, BEAMS)]
    for plan in plans * 2:
        assert_same(graph, packed, plan)
    assert captured == [32, 64, 128] * 2
