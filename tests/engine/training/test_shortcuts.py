"""Shortcuts in a model: the plain model's loss and gradients, and aside wherever something else has to be asked."""

import copy
import pickle
import subprocess
import sys
import threading
from functools import wraps
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer import modeling_vanilla_transformer as paper
from hf_vanilla_transformer.engine.training import layers as fast
from hf_vanilla_transformer.engine.training import paused_shortcuts, shortcuts, training_shortcuts

V = 30
VARIANTS = {
    "post-norm": {},
    "pre-norm": {"norm_position": "pre", "final_layer_norm": True},
    "learned positions": {"position_encoding": "learned"},
    "biases": {"attention_bias": True, "output_bias": True},
    "gelu": {"activation_function": "gelu"},
    "other d_k and d_v": {"head_dim": 3, "value_head_dim": 5},
    "untied": {"tie_word_embeddings": False},
    "two vocabularies": {"decoder_vocab_size": 23, "share_encoder_decoder_embeddings": False},
    "eager": {"attn_implementation": "eager"},
}


def model_of(dtype=torch.float64, **options):
    torch.manual_seed(1)
    settings = {
        "vocab_size": V, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.0,
        "label_smoothing": 0.1,
    }  # fmt: skip
    return VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**settings | options)).to(dtype).train()


def batch_of(padded=True, **options):
    torch.manual_seed(2)
    source, labels = torch.randint(5, V, (4, 9)), torch.randint(5, 20, (4, 7))
    if not padded:
        return {"input_ids": source, "labels": labels, "skip_logits": True, **options}
    mask = torch.arange(9) < torch.tensor([9, 2, 5, 1])[:, None]
    labels = labels.masked_fill(torch.arange(7) >= torch.tensor([2, 7, 4, 1])[:, None], -100)
    labels[1, 2] = -100  # in the middle: no target, but seen by later ones
    return {"input_ids": source, "attention_mask": mask.long(), "labels": labels, "skip_logits": True, **options}


def gradients_of(model, batch, **kwargs):
    model.zero_grad()
    loss = model(**batch, **kwargs).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected, tolerance=1e-10):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture
def plans(monkeypatch):
    """What was found about each call."""
    found, find = [], shortcuts.shortcuts_of_call

    def record(*arguments):
        found.append(find(*arguments))
        return found[-1]

    monkeypatch.setattr(shortcuts, "shortcuts_of_call", record)
    return found


def check(model, batch, plans, fast_layers=4, packs=True, fuses_loss=True):
    """Compares a step with shortcuts and without, and what was done in the former."""
    expected = gradients_of(model, batch)
    with training_shortcuts(model):
        found = gradients_of(model, batch)
    assert_same(found, expected)
    (plan,) = plans
    if fast_layers is None:
        assert plan is None
        return
    assert (len(plan.layers), bool(plan.source), bool(plan.target)) == (fast_layers, packs, packs)
    assert plan.fuses_loss == fuses_loss


def assert_untouched(model):
    assert not [m for m in model.modules() if "engine" in type(m).__module__]
    assert not model._forward_pre_hooks
    assert not model._forward_pre_hooks_with_kwargs
    assert "loss_of_targets" not in vars(model)
    assert not shortcuts._installations


# ---- The same loss and gradients ----
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "not padded"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_the_plain_models(variant, padded, plans):
    model, batch = model_of(**VARIANTS[variant]), batch_of(padded)
    check(model, batch, plans, packs=padded)
    assert_untouched(model)


def test_logits_are_those_of_every_position(plans):
    """Where logits are asked for, padding is computed as well."""
    model, batch = model_of(), batch_of(skip_logits=False)
    expected = model(**batch)
    with training_shortcuts(model):
        found = model(**batch)
    assert len(plans[0].layers) == 4
    assert not plans[0].source
    for name in ("loss", "logits", "encoder_last_hidden_state"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("items", [11, torch.tensor(11)], ids=["int", "tensor"])
def test_the_loss_is_a_mean_over_the_targets_of_the_update(items, plans):
    check(model_of(), batch_of(num_items_in_batch=items), plans)


def test_targets_given_as_inputs(plans):
    model, batch = model_of(), batch_of()
    batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    check(model, batch, plans)


def test_targets_with_padding_on_the_left(plans):
    batch = batch_of()
    batch["labels"], model = batch["labels"].flip(1), model_of()
    expected = gradients_of(model, batch)
    with training_shortcuts(model):
        assert_same(gradients_of(model, batch), expected)


def test_a_source_and_a_target_of_padding_alone(plans):
    batch = batch_of()
    batch["attention_mask"][1], batch["labels"][2] = 0, -100
    check(model_of(), batch, plans)


def test_frozen_parameters_get_no_gradient(plans):
    model = model_of()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name and "layers.0.self_attn.q_proj" not in name and "fc1" not in name)
    check(model, batch_of(), plans)


def test_a_graph_may_be_gone_through_twice():
    model, found = model_of(), []
    for put_in in (False, True):
        with training_shortcuts(model) if put_in else paused_shortcuts(model):
            loss = model(**batch_of()).loss
            parameters = list(model.parameters())
            once = torch.autograd.grad(loss, parameters, retain_graph=True)
            twice = torch.autograd.grad(2 * loss, parameters)
        found.append([*once, *twice])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.decoder.layers.0.encoder_attn.k_proj.weight"])
def test_gradients_of_gradients_are_refused(name):
    """They would be wrong without a word, as constants."""
    model = model_of()
    with training_shortcuts(model):
        loss = model(**batch_of()).loss
        with paused_shortcuts(model):
            plain = model(**batch_of(skip_logits=False)).loss
    with pytest.raises(RuntimeError, match=r"no gradients of gradients.*training_shortcuts=False"):
        torch.autograd.grad(loss, [model.get_parameter(name)], create_graph=True)
    assert torch.autograd.grad(plain, [model.get_parameter(name)], create_graph=True)[0].requires_grad


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_has_the_same_gradients(reentrant, plans):
    model, batch = model_of(), batch_of()
    expected = gradients_of(model, batch)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    with training_shortcuts(model):
        assert_same(gradients_of(model, batch), expected)
    assert (len(plans[0].layers), bool(plans[0].source)) == (4, False)


def test_gradient_checkpointing_draws_the_same_masks_again():
    model, batch, found = model_of(dropout=0.3), batch_of(padded=False), []
    for checkpoints in (False, True):
        if checkpoints:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(5)
        with training_shortcuts(model):
            found.append(gradients_of(model, batch))
    assert_same(*found)


def test_dropout_is_as_frequent_and_differs_from_step_to_step():
    model, batch = model_of(dropout=0.3), batch_of()
    with training_shortcuts(model):
        losses = torch.stack([model(**batch).loss.detach() for _ in range(200)])
    plain = torch.stack([model(**batch).loss.detach() for _ in range(200)])
    assert len(losses.unique()) == 200
    spread = ((losses.var() + plain.var()) / 200).sqrt()  # of the difference of the two means
    assert abs(losses.mean() - plain.mean()) < 5 * spread


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "not padded"])
def test_bfloat16_autocast(padded, plans):
    model, batch = model_of(torch.float32), batch_of(padded)
    exact = gradients_of(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients_of(model, batch)
        with training_shortcuts(model):
            found = gradients_of(model, batch)
    assert len(plans[0].layers) == 4
    assert {value.dtype for value in found.values()} == {torch.float32}
    for name, value in exact.items():  # as far from it as autocast is without shortcuts, as rounding goes
        error, of_plain = ((one[name] - value).norm() / value.norm() for one in (found, plain))
        assert error < 4 * of_plain + 2e-3, name


def test_bfloat16_attention_is_computed_in_float32(monkeypatch):
    seen = []

    def attend(module, query, key, value, mask, **options):
        seen.append((query.dtype, mask.dtype, torch.is_autocast_enabled("cpu")))
        return query, None

    monkeypatch.setattr(fast, "sdpa_attention_forward", attend)
    settings = {"_attn_implementation": "sdpa"}
    module = SimpleNamespace(config=SimpleNamespace(**settings), training=False, scaling=1.0)
    query, mask = torch.randn(1, 2, 3, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 3, 3, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert fast._attend(module, query, query, query, mask).dtype == torch.bfloat16
    assert seen == [(torch.float32, torch.float32, False)]


def test_attention_dropout(plans):
    model, batch = model_of(attention_dropout=0.5), batch_of()
    with training_shortcuts(model):
        assert len({model(**batch).loss.item() for _ in range(5)}) == 5
    assert len(plans[0].layers) == 4


# ---- What is in the way of a layer ----
def hook(module, args, output=None):
    return None


def replaced(layer):
    layer.self_attn.k_proj = nn.Sequential(layer.self_attn.k_proj)


def with_tensor_scaling(layer):
    layer.self_attn.scaling = torch.tensor(0.1, dtype=torch.float64)


def with_own_forward(layer):
    attention = layer.self_attn
    attention.forward = lambda *args, original=attention.forward, **kwargs: original(*args, **kwargs)


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def subclassed(layer):
    layer.feed_forward.fc2.__class__ = Doubling


def as_plain_tensor(layer):
    weight = layer.feed_forward.fc2.weight
    del layer.feed_forward.fc2.weight
    layer.feed_forward.fc2.weight = 2 * weight.detach()


IN_THE_WAY = {
    "a replaced projection": replaced,
    "weight_norm": lambda layer: nn.utils.parametrizations.weight_norm(layer.feed_forward.fc1),
    "old weight_norm": as_plain_tensor,
    "a subclass": subclassed,
    "an override": with_own_forward,
    "a tensor for scaling": with_tensor_scaling,
    "a forward hook": lambda layer: layer.self_attn.q_proj.register_forward_hook(hook),
    "a forward pre-hook": lambda layer: layer.final_layer_norm.register_forward_pre_hook(hook),
    "a backward hook": lambda layer: layer.feed_forward.register_full_backward_hook(hook),
    "a backward pre-hook": lambda layer: layer.register_full_backward_pre_hook(hook),
    "a hook on dropout": lambda layer: layer.feed_forward.dropout.register_forward_hook(hook),
    "a hook on an activation": lambda layer: layer.feed_forward.activation.register_forward_hook(hook),
    "another config": lambda layer: setattr(layer.self_attn, "config", copy.copy(layer.self_attn.config)),
    "another activation": lambda layer: setattr(layer.feed_forward, "activation", nn.Softplus()),
    "biases on one": lambda layer: layer.self_attn.q_proj.register_parameter(
        "bias", nn.Parameter(torch.ones(16, dtype=torch.float64))
    ),
}


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("change", IN_THE_WAY)
def test_a_layer_with_anything_else_is_computed_as_always(change, stack, plans):
    model = model_of()
    IN_THE_WAY[change](getattr(model.model, stack).layers[1])
    check(model, batch_of(), plans, fast_layers=3, packs=False)
    assert_untouched_but(model)


def assert_untouched_but(model):
    """For models that have hooks of their own."""
    assert not [m for m in model.modules() if "engine" in type(m).__module__]
    assert shortcuts._add_shortcuts not in model._forward_pre_hooks.values()
    assert "loss_of_targets" not in vars(model)


def test_an_override_of_a_layers_forward_leaves_the_call_alone(plans):
    model = model_of()
    layer = model.model.encoder.layers[0]
    layer.forward = lambda x, mask, use_cache: 2 * x  # takes no other keywords
    check(model, batch_of(), plans, fast_layers=None)


def test_a_replaced_layer_leaves_the_call_alone(plans):
    class Halving(nn.Module):
        def forward(self, x, memory, mask, memory_mask, past_key_values=None, use_cache=None):
            return x / 2

    model = model_of()
    model.model.decoder.layers[0] = Halving()
    check(model, batch_of(), plans, fast_layers=None)


@pytest.mark.parametrize("name", ["model", "model.encoder", "model.decoder.embed_tokens", "model.decoder", ""])
def test_a_hook_outside_of_the_layers_turns_packing_off(name, plans):
    model = model_of()
    module, seen = model.get_submodule(name), []
    module.register_forward_hook(lambda module, args, output: seen.append(output))
    check(model, batch_of(), plans, packs=False)
    plain, ours = (out if isinstance(out, torch.Tensor) else next(x for x in out.values() if x.ndim) for out in seen)
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)


def test_transformers_own_hooks_are_no_hindrance(plans):
    model = model_of()
    model(**batch_of(), output_attentions=True)
    assert model.model.encoder.layers[0].self_attn._forward_hooks
    check(model, batch_of(), plans)


@pytest.mark.parametrize("option", ["output_attentions", "output_hidden_states"])
def test_what_is_asked_for_is_shown(option, plans):
    model, found = model_of(attn_implementation="eager"), []
    for put_in in (False, True):
        with training_shortcuts(model) if put_in else paused_shortcuts(model):
            outputs = model(**batch_of(), **{option: True})
            found.append(outputs.decoder_attentions or outputs.decoder_hidden_states)
    assert plans == [None]
    for plain, ours in zip(*found, strict=True):
        assert torch.equal(plain, ours)


def test_unknown_keywords_leave_the_call_alone(plans):
    model = model_of()
    with training_shortcuts(model):
        model(**batch_of(), position_bias=torch.zeros(1, dtype=torch.float64))
    assert plans == [None]


@pytest.mark.parametrize("where", ["lm_head", "q_proj"])
def test_lora_learns(where, plans):
    model, batch = model_of(), batch_of()
    model.add_adapter(peft.LoraConfig(target_modules=[where, "v_proj"], r=2, lora_alpha=4, init_lora_weights=False))
    model.train()
    check(model, batch, plans, fast_layers=0, packs=False, fuses_loss=where != "lm_head")
    with training_shortcuts(model):
        names = gradients_of(model, batch).keys()
    assert any(where in name and "lora_A" in name for name in names)
    assert any(where in name and "lora_B" in name for name in names)


def test_a_model_of_peft_is_trained_too():
    model, batch = peft.get_peft_model(model_of(), peft.LoraConfig(target_modules=["q_proj"], r=2)), batch_of()
    expected = gradients_of(model, batch)
    with training_shortcuts(model):
        assert_same(gradients_of(model, batch), expected)
    assert_untouched_but(model)


def test_a_loss_function_of_the_users(plans):
    def constant(logits, labels, label_smoothing, return_dict):  # takes no further keyword
        return logits.square().mean()

    model = model_of()
    model.loss_function = constant
    check(model, batch_of(), plans, fuses_loss=False)
    plans.clear()
    check(model, batch_of(skip_logits=False), plans, fast_layers=None)


def test_methods_of_a_subclass():
    calls = []

    class Mine(VanillaTransformerForConditionalGeneration):
        def loss_of_targets(self, hidden, labels, label_smoothing, return_dict):
            calls.append("loss")
            return hidden.square().mean()

    class Narrow(VanillaTransformerForConditionalGeneration):
        def forward(self, input_ids, attention_mask, labels, skip_logits):
            calls.append("forward")
            return super().forward(input_ids, attention_mask, labels=labels, skip_logits=skip_logits)

    for kind in (Mine, Narrow):
        model = model_of()
        model.__class__ = kind
        expected = gradients_of(model, batch_of())
        with training_shortcuts(model):
            assert_same(gradients_of(model, batch_of()), expected)
        assert type(model) is kind
    assert calls == ["loss", "loss", "forward", "forward"]


def test_modules_with_another_type_of_numbers(plans):
    """A layer in float32 within a model in float64 is as wrong as ever."""
    model = model_of()
    model.model.encoder.layers[0].float()
    with training_shortcuts(model), pytest.raises(RuntimeError, match="dtype"):
        model(**batch_of())
    assert len(plans[0].layers) == 3


# ---- What is in the way of a call ----
def test_evaluation_and_what_needs_no_gradient(plans):
    model = model_of()
    with training_shortcuts(model):
        with torch.no_grad():
            model(**batch_of())
        model.eval()(**batch_of())
    assert plans == [None, None]


@pytest.mark.parametrize("trained", [True, False])
def test_global_hooks_see_every_linear_map(trained):
    model, seen = model_of(), []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(output.shape) if type(module) is nn.Linear else None
    )
    try:
        with training_shortcuts(model) if trained else paused_shortcuts(model):
            model(**batch_of())
    finally:
        handle.remove()
    linear = [module for module in model.modules() if type(module) is nn.Linear]
    assert len(seen) == len(linear)
    assert all(shape[:2] in ((4, 9), (4, 7)) for shape in seen[:-1])  # the last is the projection of the targets


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn.Linear, "forward"),
        (nn.LayerNorm, "forward"),
        (nn.Dropout, "forward"),
        (nn.Embedding, "forward"),
        (nn.Module, "__call__"),
        (F, "linear"),
        (F, "layer_norm"),
        (F, "dropout"),
        (F, "softmax"),
        (F, "cross_entropy"),
        (F, "scaled_dot_product_attention"),
        (paper, "eager_attention"),
        (paper, "label_smoothed_cross_entropy"),
        (paper.VanillaTransformerAttention, "forward"),
        (paper.VanillaTransformerAttention, "split"),
        (paper.VanillaTransformerFeedForward, "forward"),
        (paper.PostNormResidual, "forward"),
        (paper.VanillaTransformerEncoderLayer, "forward"),
        (paper.VanillaTransformerDecoderLayer, "forward"),
        (paper.VanillaTransformerForConditionalGeneration, "loss_of_targets"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_replaced_function_counts(owner, name, monkeypatch, plans):
    original, model = getattr(owner, name), model_of()

    @wraps(original)
    def changed(*args, **kwargs):
        return original(*args, **kwargs)

    with training_shortcuts(model):
        model(**batch_of())
        monkeypatch.setattr(owner, name, changed)
        model(**batch_of())
        monkeypatch.undo()
    assert plans[0] is not None
    assert len(plans) == 1 or plans[1] is None


def test_a_patch_of_linear_maps_counts_in_loss_and_gradients(monkeypatch):
    original, model = nn.Linear.forward, model_of()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * original(self, x))
    expected = gradients_of(model, batch_of())
    with training_shortcuts(model):
        assert_same(gradients_of(model, batch_of()), expected, tolerance=0)


def test_code_exchanged_in_place_counts(plans, monkeypatch):
    def forward(self, x):
        return self.fc2(x.repeat_interleave(24 // 16 + 1, dim=-1)[..., :24])

    model = model_of()
    feed_forward = paper.VanillaTransformerFeedForward.forward
    monkeypatch.setattr(feed_forward, "__code__", forward.__code__)
    check(model, batch_of(), plans, fast_layers=None)


EARLY = """
import functools, torch
from torch import nn
{patch}
from hf_vanilla_transformer.engine.support import surroundings_reason
print(surroundings_reason())
"""


@pytest.mark.parametrize(
    ("patch", "named"),
    [
        ("", "None"),
        (
            "nn.Linear.forward = functools.wraps(nn.Linear.forward)(lambda self, x: x)",
            "Linear.forward comes from <string>",
        ),
        (
            "nn.functional.linear = functools.partial(nn.functional.linear)",
            "linear of torch.nn.functional is a partial",
        ),
        ("nn.LayerNorm.forward = torch.no_grad()(nn.LayerNorm.forward)", "forward of LayerNorm is wrapped by "),
    ],
)
def test_a_patch_made_before_the_import_is_noticed(patch, named):
    code = EARLY.format(patch=patch)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert named in found.stdout


def test_a_registered_attention_of_the_users(plans):
    def double(module, query, key, value, mask, **kwargs):
        heads, weights = fast.sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return 2 * heads, weights

    original = fast.sdpa_attention_forward
    AttentionInterface.register("sdpa", double)
    try:
        check(model_of(), batch_of(), plans, fast_layers=None)
    finally:
        AttentionInterface.register("sdpa", original)


def test_flops_are_counted_as_the_plain_models():
    model, totals = model_of(), []
    for put_in in (False, True):
        with (
            training_shortcuts(model) if put_in else paused_shortcuts(model),
            FlopCounterMode(display=False) as counter,
        ):
            gradients_of(model, batch_of())
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_a_mode_sees_every_function():
    class Names(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(getattr(func, "__name__", ""))
            return func(*args, **kwargs or {})

    model, seen = model_of(), []
    for put_in in (False, True):
        with training_shortcuts(model) if put_in else paused_shortcuts(model), Names() as names:
            model(**batch_of())
        seen.append(names.names.count("linear"))
    assert seen[0] == seen[1] > 0


def test_a_default_device_is_no_mode(plans):
    torch.set_default_device("cpu")
    try:
        check(model_of(), batch_of(), plans)
    finally:
        torch.set_default_device(None)


def test_torch_func_is_left_alone():
    model, batch = model_of(attn_implementation="eager"), batch_of()
    parameters = dict(model.named_parameters(remove_duplicate=True))

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), batch | {"skip_logits": False}).loss

    expected = gradients_of(model, batch)
    with training_shortcuts(model):
        found = torch.func.grad(loss)(parameters)
    assert_same(found, {name: expected[name] for name in found})


def test_a_compiled_model_is_the_plain_one(plans):
    model, batch = model_of(torch.float32), batch_of(padded=False)
    expected = gradients_of(model, batch)
    torch.compiler.reset()
    with training_shortcuts(model):
        found = gradients_of(torch.compile(model, backend="eager"), batch)
    assert_same({name.removeprefix("_orig_mod."): value for name, value in found.items()}, expected, 1e-5)


# ---- Putting in and taking out ----
def test_nothing_is_left_behind():
    model = model_of()
    before = [(type(module), set(vars(module))) for module in model.modules()]
    with training_shortcuts(model):
        assert type(model.model.encoder.layers[0]) is fast.FastEncoderLayer
        assert type(model) is VanillaTransformerForConditionalGeneration
        with paused_shortcuts(model):
            assert_no_shortcuts(model)
        assert type(model.model.encoder.layers[0]) is fast.FastEncoderLayer
    assert [(type(module), set(vars(module))) for module in model.modules()] == before
    assert_untouched(model)


def assert_no_shortcuts(model):
    assert type(model.model.encoder.layers[0]) is paper.VanillaTransformerEncoderLayer
    assert not model._forward_pre_hooks
    assert "loss_of_targets" not in vars(model)


def test_an_exception_takes_them_out():
    model = model_of()
    with pytest.raises(KeyError), training_shortcuts(model):
        raise KeyError
    with pytest.raises(KeyError), training_shortcuts(model), paused_shortcuts(model):
        raise KeyError
    assert_untouched(model)


def test_nested_use():
    model = model_of()
    with training_shortcuts(model), training_shortcuts(model):
        with training_shortcuts(model):
            pass
        assert len(model._forward_pre_hooks) == 1
        with paused_shortcuts(model):
            with paused_shortcuts(model):
                pass
            assert_no_shortcuts(model)
            with training_shortcuts(model):
                assert_no_shortcuts(model)
    assert_untouched(model)


def test_threads_that_train_the_same_model():
    model, batch = model_of(), batch_of()
    expected, found, errors = model(**batch).loss.item(), [], []

    def work():
        try:
            for _ in range(5):
                with training_shortcuts(model):
                    found.append(model(**batch).loss.item())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert found == pytest.approx([expected] * 20, rel=1e-12)
    assert_untouched(model)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_plain(duplicate, plans):
    model, batch = model_of(), batch_of()
    expected = gradients_of(model, batch)
    with training_shortcuts(model):
        twin = duplicate(model)
        assert_same(gradients_of(twin, batch), expected, tolerance=0)
        assert not [m for m in twin.modules() if "engine" in type(m).__module__]
        assert_no_shortcuts(twin)
        assert_same(gradients_of(model, batch), expected)
    assert len(plans) == 1
    assert_same(gradients_of(twin, batch), expected, tolerance=0)


def test_a_users_own_hooks_and_attributes_stay():
    model, seen = model_of(), []
    model.loss_of_targets = lambda hidden, labels, **kwargs: hidden.square().mean()
    with training_shortcuts(model):
        model.register_forward_pre_hook(lambda module, args: seen.append(1))
        model(**batch_of())
    model(**batch_of())
    assert seen == [1, 1]
    assert "loss_of_targets" in vars(model)


def test_other_models_are_left_as_they_are():
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5))
    with training_shortcuts(model), paused_shortcuts(model):
        assert [type(module) for module in model] == [nn.Linear, nn.Dropout]


def test_a_layer_that_is_used_twice(plans):
    model = model_of()
    model.model.encoder.layers[1] = model.model.encoder.layers[0]
    check(model, batch_of(), plans, fast_layers=3)


def test_calls_of_a_part_of_the_model():
    model, batch = model_of(), batch_of()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model.model.encoder(**inputs).last_hidden_state
    with training_shortcuts(model):
        assert torch.equal(model.model.encoder(**inputs).last_hidden_state, expected)


def test_labels_outside_the_vocabulary():
    model, batch = model_of(), batch_of()
    batch["decoder_input_ids"] = batch["labels"].clamp(min=0)
    batch["labels"][0, 0] = V
    with training_shortcuts(model), pytest.raises(IndexError, match=f"to {V}, but the vocabulary has {V} tokens"):
        model(**batch)
