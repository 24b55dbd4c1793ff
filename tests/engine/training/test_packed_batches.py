"""Packed batches in a model: loss and gradients of padded ones, and nothing of a sentence reaches another."""

import copy
import shutil

import pytest
import torch
from functorch.compile import nop
from test_shortcuts import VARIANTS as PLAIN_VARIANTS
from test_shortcuts import gradients_of, model_of
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

from hf_vanilla_transformer.data.packing import PackingCollator
from hf_vanilla_transformer.engine.training import loss as loss_module
from hf_vanilla_transformer.engine.training import packing, training_shortcuts

SHAPE = (6, 12, 10)
LENGTHS = [(5, 3), (1, 1), (12, 2), (3, 9), (2, 2), (7, 1), (1, 6), (4, 10)]  # the third and the last fill rows
VARIANTS = {
    **PLAIN_VARIANTS,
    "learned positions": {"position_encoding": "learned"},
    "positions of fairseq": {"position_encoding": "fairseq"},
    "positions of Marian": {"position_encoding": "marian"},
}


def pairs_of(lengths=LENGTHS, seed=1):
    random = torch.Generator().manual_seed(seed)
    ids = [[torch.randint(5, 23, (n,), generator=random).tolist() for n in pair] for pair in lengths]
    return [{"input_ids": source, "labels": target} for source, target in ids]


def padded(pairs):
    source, labels = ([pair[name] for pair in pairs] for name in ("input_ids", "labels"))
    width, target_width = (max(map(len, side)) for side in (source, labels))
    return {
        "input_ids": torch.tensor([ids + [0] * (width - len(ids)) for ids in source]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in source]),
        "labels": torch.tensor([ids + [-100] * (target_width - len(ids)) for ids in labels]),
        "skip_logits": True,
    }


def packed(model, pairs, shape=SHAPE):
    return {**PackingCollator(model.config, shape)(pairs), "skip_logits": True}


def relative_error(found, expected):
    """The largest of all gradients; those of `k_proj.bias` are nothing but rounding."""
    return max(((found[name] - one).norm() / one.norm().clamp(min=1e-2)).item() for name, one in expected.items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_padded_sentences(variant):
    model, pairs, items = model_of(torch.float32, **VARIANTS[variant]), pairs_of(), 55 if variant == "biases" else None
    expected = gradients_of(model, padded(pairs) | {"num_items_in_batch": items})
    with training_shortcuts(model):
        found = gradients_of(model, packed(model, pairs) | {"num_items_in_batch": items})
    assert packed(model, pairs)["encoder_attention_mask"][-1].max() == 0, "no row is empty"
    assert found.keys() == expected.keys()
    assert relative_error(found, expected) < 1e-5


def test_evaluation_and_dropout():
    """Dropout is the model's: none in evaluation, other random numbers in each pass."""
    model, pairs = model_of(torch.float32, dropout=0.3, attention_dropout=0.1), pairs_of()
    with training_shortcuts(model):
        losses = {model(**packed(model, pairs)).loss.item() for _ in range(2)}
        model.eval()
        torch.testing.assert_close(model(**packed(model, pairs)).loss, model(**padded(pairs)).loss)
    assert len(losses) == 2


def test_models_take_packed_batches_with_shortcuts_alone():
    model = model_of(torch.float32)
    with pytest.raises(TypeError, match="unexpected keyword argument 'encoder_attention_mask'"):
        model(**packed(model, pairs_of()))
    with training_shortcuts(model):
        twin = copy.deepcopy(model)
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(
            ValueError, match=r'flash_attention_2 has no masks for packed .* attn_implementation="sdpa"'
        ):
            model(**packed(model, pairs_of()))
        model.config._attn_implementation = "sdpa"
    assert "forward" not in vars(model.model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert twin(**packed(twin, pairs_of())).loss > 1


# ---- Compiled ----
@pytest.fixture
def warnings(monkeypatch):
    torch.compiler.reset()  # it compiles a function for eight models in a process at most
    found = []
    monkeypatch.setattr(packing.logger, "warning", found.append)
    return found


def check_compiled(backend, **options):
    """Batches with other sentences are those of the plain model, and nothing is compiled for the second."""
    model = model_of(torch.float32, **options)
    plain = copy.deepcopy(model)
    with training_shortcuts(model, {"backend": backend}):
        for seed, stance in ((1, "default"), (2, "fail_on_recompile")):
            pairs = pairs_of(LENGTHS[seed:], seed)
            with torch.compiler.set_stance(stance):
                found = gradients_of(model, packed(model, pairs))
            assert relative_error(found, gradients_of(plain, padded(pairs))) < 1e-5


def test_layers_of_a_kind_and_the_loss_are_compiled_once(warnings):
    counter = CompileCounterWithBackend("aot_eager")  # all of a compiler but its code
    check_compiled(counter, encoder_layers=3)
    assert counter.frame_count == 3
    assert not warnings


@pytest.mark.hard
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler of C++")
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_flex_attention_sees_what_dense_masks_show(attention, monkeypatch):
    """Without a backward pass, which it doesn't have on a CPU; tests/gpu has it with one."""
    model = model_of(torch.float32).eval()
    expected = [model(**padded(pairs_of(seed=seed))).loss for seed in (1, 2)]
    monkeypatch.setattr(packing, "BLOCKS_ON", ("cpu",))
    model.set_attn_implementation(attention)
    with training_shortcuts(model), torch.no_grad():
        for seed, stance in ((1, "default"), (2, "fail_on_recompile")):
            with torch.compiler.set_stance(stance):
                loss = model(**packed(model, pairs_of(seed=seed))).loss
            torch.testing.assert_close(loss, expected[seed - 1])


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_what_does_not_compile_runs_with_one_warning(warnings, when):
    def fail(graph, inputs):
        raise RuntimeError("no compiler")

    backend = aot_autograd(fw_compiler=fail if when == "forward" else nop, bw_compiler=fail)
    check_compiled(backend)
    assert len(warnings) == 1
    assert "no compiler" in warnings[0]


def test_the_loss_of_all_positions_under_autocast(monkeypatch):
    """Compiled, filler is projected too; in bfloat16 the loss is near that of the plain model in float32."""
    monkeypatch.setattr(loss_module, "ROWS_PER_CHUNK", 7)
    model, pairs = model_of(torch.float32, output_bias=True), pairs_of()
    expected = gradients_of(model, padded(pairs))
    with training_shortcuts(model, {"backend": "eager"}), torch.autocast("cpu", torch.bfloat16):
        found = gradients_of(model, packed(model, pairs))
    assert found["loss"] == pytest.approx(expected["loss"].item(), rel=0.01)
    assert all(gradient.isfinite().all() for gradient in found.values())
