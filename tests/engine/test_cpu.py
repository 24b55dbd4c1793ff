"""What depends on the processor: both halves of the engine on any machine, and torch without its private functions."""

import ast
import copy
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_generation import SOURCES, padded
from test_incremental import CLOSE, by_transformers, by_us, cut, decode_at_random, forced, varied

from hf_vanilla_transformer import engine
from hf_vanilla_transformer.engine import cpu, torch_private
from hf_vanilla_transformer.engine.cpu import CPU, VARIABLE, this_processor
from hf_vanilla_transformer.engine.decoding import linear
from hf_vanilla_transformer.engine.decoding.incremental import encode
from hf_vanilla_transformer.engine.decoding.weights import Weights

needs_onednn = pytest.mark.skipif(not CPU.has_onednn, reason="this torch has no oneDNN")

# What the engine is to compute with, as the environment variable says it, and how it then keeps weights. The last ones
# have thresholds at which this test's small model comes to what is made for large ones.
HALVES = {
    "mkl_is_fastest=true": {"ColumnLinear"},
    "mkl_is_fastest=true,elements_for_mkl=1024,multiplications_for_mkl=4000": {"ColumnLinear", "MixedLinear"},
    "mkl_is_fastest=false": {"MixedLinear"},
    "mkl_is_fastest=false,elements_for_both=1024": {"MixedLinear", "PackedLinear"},
    "has_onednn=false,has_fast_bfloat16=false": {"PlainLinear"},
}


def use(monkeypatch, processor):
    """Lets the whole engine compute as it does on a processor."""
    users = [module for name, module in sys.modules.items() if name.startswith("hf_vanilla_transformer.engine.")]
    for module in users:
        if "CPU" in vars(module):
            monkeypatch.setattr(module, "CPU", processor)


def model_of_ones_own():
    """For which nothing is prepared yet."""
    return copy.deepcopy(varied())


def assert_same_decoding():
    """Greedy and beam search choose what transformers' loop does of the plain modules."""
    model, options = model_of_ones_own(), {**padded(SOURCES), "max_new_tokens": 12}
    for num_beams in (1, 3):
        expected = by_transformers(model, **options, num_beams=num_beams).sequences
        assert torch.equal(by_us(model, **options, num_beams=num_beams).sequences, expected)


@torch.no_grad()
def errors_of_steps(is_int8):
    """The largest error of logits of given tokens, and the root of the mean square divided by how logits vary."""
    model, inputs = model_of_ones_own(), padded(SOURCES)
    mask, wrong, expected = inputs["attention_mask"], [], []
    memory = encode(Weights(model, is_int8), **inputs)
    for i, tokens, logits, _ in decode_at_random(model, memory, mask, 8, beams=2, is_int8=is_int8):
        expected.append(forced(model, cut(inputs, i), tokens).logits[0])
        wrong.append(torch.stack(logits) - expected[-1])
    largest = max(one.abs().max().item() for one in wrong)
    return largest, (torch.cat(wrong).square().mean().sqrt() / torch.cat(expected).std()).item()


# ---- Both halves ----
@pytest.fixture(params=HALVES)
def half(request, monkeypatch):
    """One half of the engine, which is in use."""
    use(monkeypatch, this_processor(request.param))
    return request.param


@needs_onednn
def test_either_half_decodes_as_the_plain_model(half):
    assert_same_decoding()
    largest, _ = errors_of_steps(is_int8=False)
    assert largest < CLOSE[torch.float32]["atol"] + 20 * CLOSE[torch.float32]["rtol"]  # logits are up to 20
    layers = Weights(varied()).decoder.layers
    kinds = {type(one).__name__ for layer in layers for one in vars(layer).values()}
    assert {kind for kind in kinds if kind.endswith("Linear")} == HALVES[half]


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("changes", ["", "reduce_range=true", "mkl_is_fastest=true", "mkl_is_fastest=false"])
def test_either_half_decodes_in_8_bits(monkeypatch, changes):
    use(monkeypatch, this_processor(changes))
    _, error = errors_of_steps(is_int8=True)
    assert 1e-3 < error < 0.1  # as in test_8_bits_come_close; inputs of 7 bits are among the worst of them
    options = {**padded(SOURCES), "max_new_tokens": 6, "compute_type": "int8"}
    for num_beams in (1, 3):
        assert by_us(model_of_ones_own(), **options, num_beams=num_beams).sequences.shape[1] == 7


# ---- The variable ----
def test_what_follows_from_a_field_follows_from_its_new_value():
    by_mkl, by_onednn = (this_processor(f"mkl_is_fastest={value}") for value in ("true", "false"))
    assert (by_mkl.elements_for_mkl, by_mkl.elements_for_both) == (2**22, math.inf)
    assert (by_onednn.elements_for_mkl, by_onednn.elements_for_both) == (0, 2**16)
    assert by_mkl.multiplications_for_mkl > by_onednn.multiplications_for_mkl
    assert this_processor("mkl_is_fastest=true, elements_for_mkl=7").elements_for_mkl == 7


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("mkl=true", "'mkl=true'; write NAME=VALUE,NAME=VALUE with names of has_onednn, mkl_is_fastest, "),
        ("reduce_range=1", "reduce_range=1; give true or false"),
        ("rows_for_fbgemm=-1", "rows_for_fbgemm=-1; give an integer of at least 0"),
        ("elements_for_both=nan", "elements_for_both=nan; give a number of at least 0"),
    ],
)
def test_a_wrong_name_or_value_is_an_error(changes, said):
    with pytest.raises(ValueError, match=re.escape(f"The environment variable {VARIABLE} says {said}")):
        this_processor(f"reduce_range=true,{changes}")


def test_what_a_machine_lacks_cannot_be_set(monkeypatch):
    monkeypatch.setattr(torch_private, "find", lambda path: None)
    for name in ("has_onednn", "has_fast_bfloat16"):
        with pytest.raises(ValueError, match=f"{name}=true, which isn't available on this CPU .* leave it out"):
            this_processor(f"{name}=true")


@pytest.mark.parametrize("instructions", [*cpu.MULTIPLY_BFLOAT16, None])
def test_bfloat16_is_fast_by_instructions_that_multiply_it(monkeypatch, instructions):
    monkeypatch.setattr(torch_private, "has_onednn_bfloat16", lambda: True)  # as with AVX-512 alone
    capabilities = dict.fromkeys(cpu.MULTIPLY_BFLOAT16, False) | {"avx512_f": True, instructions: True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert this_processor().has_fast_bfloat16 is (CPU.has_onednn and instructions is not None)
    monkeypatch.setattr(torch_private, "has_onednn_bfloat16", lambda: False)
    assert not this_processor().has_fast_bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("value", ["true"])
def test_the_environment_reaches_the_whole_engine(value):
    script = (
        "import torch\n"
        "from hf_vanilla_transformer.engine.decoding.linear import kind_of_linear\n"
        "weight = torch.ones(512, 512)\n"
        "kept = kind_of_linear(False, weight)(weight, None)\n"
        "print(type(kept).__name__)\n"
    )
    environment = os.environ | {VARIABLE: f"mkl_is_fastest={value}"}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    has = CPU.has_onednn
    expected = {"true": "ColumnLinear", "false": "PackedLinear" if has else "PlainLinear"}[value]
    assert (result.stderr, result.stdout.strip()) == ("", expected)


# ---- Private functions of torch ----


PATHS = sorted(
    node.value
    for node in ast.walk(ast.parse(Path(torch_private.__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value))
)
INT8 = (torch_private.PACK_INT8, torch_private.LINEAR_INT8)
HOOKS = "torch.nn.modules.module._has_any_global_hook"


@pytest.fixture(params=PATHS)
def hidden(request, monkeypatch):
    """Takes one private function away from torch, as far as the package can see, and sees to it that it is missed."""
    find, asked = torch_private.find, []

    def find_others(path):
        asked.append(path)
        return None if path == request.param else find(path)

    monkeypatch.setattr(torch_private, "find", find_others)
    use(monkeypatch, this_processor("mkl_is_fastest=false,elements_for_both=0"))
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
    _, error = errors_of_steps(is_int8=True)
    assert error < 0.1
    kind = type(Weights(varied(), is_int8=True).lm_head)
    assert kind is (linear.RoundedLinear if hidden in INT8 else linear.Int8Linear)
    this_processor()


def test_8_bits_without_their_products_are_said_to_be_slow(monkeypatch, caplog):
    find = torch_private.find
    monkeypatch.setattr(torch_private, "find", lambda path: None if path in INT8 else find(path))
    linear.logger.warning_once.cache_clear()
    _, error = errors_of_steps(is_int8=True)
    assert 1e-3 < error < 0.1
    assert 'takes as long as "default": torch' in caplog.text
