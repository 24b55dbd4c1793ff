"""What depends on the processor: each one's ways on any machine, and torch without its private functions."""

import ast
import copy
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_generation import SOURCES, padded
from test_packed import CLOSE, by_transformers, by_us, errors_of_steps, varied

from hf_vanilla_transformer import engine
from hf_vanilla_transformer.engine import cpu, torch_private
from hf_vanilla_transformer.engine.cpu import CPU, INTEL, OTHERS, this_processor
from hf_vanilla_transformer.engine.decoding.weights import Weights

needs_onednn = pytest.mark.skipif(not CPU.has_onednn, reason="this torch has no oneDNN")

# What the engine is to compute with, and how it then keeps weights. Some have thresholds at which this test's small
# model comes to what is made for large ones.
PROCESSORS = [
    (INTEL, {"ColumnLinear"}),
    (INTEL | {"elements_for_mkl": 1024, "multiplications_for_mkl": 4000}, ["ColumnLinear", "MixedLinear"]),
    (OTHERS, {"MixedLinear"}),
    (OTHERS | {"elements_for_both": 1024}, ["MixedLinear", "PackedLinear"]),
    ({"has_onednn": False, "has_fast_bfloat16": False}, {"PlainLinear"}),
]


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


# ---- Each processor ----
@needs_onednn
@pytest.mark.parametrize(("changes", "expected"), PROCESSORS, ids=str)
def test_each_processor_decodes_as_the_plain_model(monkeypatch, changes, expected):
    use(monkeypatch, replace(CPU, **changes))
    assert_same_decoding()
    largest, _ = errors_of_steps(model_of_ones_own(), is_int8=False)
    assert largest < CLOSE[torch.float32]["atol"] + 20 * CLOSE[torch.float32]["rtol"]  # logits are up to 20
    layers = Weights(varied()).decoder.layers
    kinds = {type(one).__name__ for layer in layers for one in vars(layer).values()}
    assert {kind for kind in kinds if kind.endswith("Linear")} == set(expected)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("changes", [{}, {"reduce_range": True}], ids=str)
def test_each_processor_decodes_in_8_bits(monkeypatch, changes):
    use(monkeypatch, replace(CPU, **changes))
    _, error = errors_of_steps(model_of_ones_own(), is_int8=True)
    assert 1e-3 < error < 0.1  # as in test_8_bits_come_close; inputs of 7 bits are among the worst of them
    options = {**padded(SOURCES), "max_new_tokens": 6, "compute_type": "int8"}
    for num_beams in (1, 3):
        assert by_us(model_of_ones_own(), **options, num_beams=num_beams).sequences.shape[1] == 7


# ---- The processor ----
@pytest.mark.parametrize("instructions", [*cpu.MULTIPLY_BFLOAT16, None])
def test_bfloat16_is_fast_by_instructions_that_multiply_it(monkeypatch, instructions):
    monkeypatch.setattr(torch_private, "has_onednn_bfloat16", lambda: True)  # as with AVX-512 alone
    capabilities = dict.fromkeys(cpu.MULTIPLY_BFLOAT16, False) | {"avx512_f": True, instructions: True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert this_processor().has_fast_bfloat16 is (CPU.has_onednn and instructions is not None)
    monkeypatch.setattr(torch_private, "has_onednn_bfloat16", lambda: False)
    assert not this_processor().has_fast_bfloat16


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
    use(monkeypatch, replace(this_processor(), **OTHERS | {"elements_for_both": 0}))
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
    if hidden in INT8:
        with pytest.raises(engine.EngineError, match=r"int8 needs products of 8 bits, and torch .* lacks them"):
            engine.attach(model_of_ones_own(), compute_type="int8")
    else:
        _, error = errors_of_steps(model_of_ones_own(), is_int8=True)
        assert error < 0.1
