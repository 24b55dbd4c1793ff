"""Decoding by the model's own modules against the packed weights of the engine."""

import copy
import itertools

import peft
import pytest
import torch
from test_generation import BOS, EOS, SOURCES, padded
from test_packed import varied

from hf_vanilla_transformer.engine.decoding.module import Module
from hf_vanilla_transformer.engine.decoding.packed import Packed
from hf_vanilla_transformer.plan_vanilla_transformer import GNMTLengthPenalty, Plan

GREEDY = Plan(limit=("max_extra_length", 5), start=BOS, ends=(EOS,), padding=0)
BEAMS = Plan(4, 4, ("max_extra_length", 5), 0, 0, GNMTLengthPenalty(0.6), True, start=BOS, ends=(EOS,), padding=0)
PLANS = {
    "greedy": GREEDY,
    "beams": BEAMS,
    "no repetition, several ends": Plan(
        3, 3, ("max_new_tokens", 9), 2, early_stopping=False, ends=(EOS, 18), no_repeat_ngram_size=2
    ),
    "barred, never": Plan(2, 2, ("max_new_tokens", 7), ends=(EOS,), barred=(5, 9), early_stopping="never"),
    "coverage, alignments": Plan(3, 3, ("max_new_tokens", 7), ends=(EOS,), coverage_penalty=0.3, alignments=True),
    "alignments": Plan(limit=("max_new_tokens", 7), ends=(EOS,), alignments=True),
}


@torch.inference_mode()
def found(prepared, plan, sources=SOURCES, side="right", prompt=(BOS,)):
    """What a search for all sources finds."""
    inputs = padded(sources, side)
    longest = [plan.max_new_tokens(len(source)) for source in sources]
    prompts = torch.tensor([prompt] * len(sources))
    return prepared.search(plan, prepared.encode(**inputs), inputs["attention_mask"], prompts, longest)


def assert_same(ours, others):
    assert [[(one.tokens, list(one.beams)) for one in own] for own in ours] == [
        [(one.tokens, list(one.beams)) for one in own] for own in others
    ]
    for one, other in zip(itertools.chain(*ours), itertools.chain(*others), strict=True):
        assert one.score == (None if other.score is None else pytest.approx(other.score, abs=1e-5, rel=1e-5))
        assert (one.attention is None) == (other.attention is None)
        if other.attention is not None:
            torch.testing.assert_close(one.attention, other.attention, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["pre-norm without a last one", "two vocabularies"])
def test_modules_find_what_packed_weights_do(name, plan):
    model = varied(name, torch.float64)
    for side, prompt in (("left", (BOS,)), ("right", (BOS, 9, 6))):
        assert_same(*(found(way(model), PLANS[plan], side=side, prompt=prompt) for way in (Module, Packed)))


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_adapters_count(kernel):
    """What they add is found by the modules, and by packed weights when they are merged."""
    model = copy.deepcopy(varied("default", torch.float64))
    model.set_attn_implementation(kernel)
    plain = found(Module(model), BEAMS)
    targets = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "lm_head"]
    lora = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora).eval()
    own = found(Module(adapted.get_base_model()), BEAMS)
    assert_same(own, found(Packed(adapted.merge_and_unload()), BEAMS))
    assert [row[0].tokens for row in own] != [row[0].tokens for row in plain]
