"""Shortcuts in a model: the plain model's loss and gradients, and aside wherever something else has to be asked."""

import copy
import pickle

import peft
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.engine.training import paused_shortcuts, shortcuts, training_shortcuts

V = 30
VARIANTS = {
    "post-norm": {},
    "pre-norm": {"norm_position": "pre", "final_layer_norm": True},
    "biases": {"attention_bias": True, "output_bias": True},
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


def batch_of(**options):
    torch.manual_seed(2)
    source, labels = torch.randint(5, V, (4, 9)), torch.randint(5, 20, (4, 7))
    mask = torch.arange(9) < torch.tensor([9, 2, 5, 1])[:, None]
    labels = labels.masked_fill(torch.arange(7) >= torch.tensor([2, 7, 4, 1])[:, None], -100)
    labels[1, 2] = -100  # in the middle: no target, but seen by later ones
    return {"input_ids": source, "attention_mask": mask.long(), "labels": labels, "skip_logits": True, **options}


def gradients_of(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def has_shortcuts(model):
    is_in = model.config._attn_implementation == shortcuts.SDPA_IN_FLOAT32
    assert is_in == ("loss_of_targets" in vars(model))
    return is_in


@pytest.fixture
def parted(monkeypatch):
    """The numbers of positions whose loss was computed in chunks."""
    calls, compute = [], shortcuts.projected_cross_entropy

    def record(hidden, *arguments):
        calls.append(hidden.shape[:2].numel())
        return compute(hidden, *arguments)

    monkeypatch.setattr(shortcuts, "projected_cross_entropy", record)
    return calls


def check(model, batch, parted, is_parted=True):
    """Compares a step with shortcuts with the plain model's: float64, so that only the order of sums differs."""
    expected = gradients_of(model, batch)
    with training_shortcuts(model):
        found = gradients_of(model, batch)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
    assert len(parted) == is_parted


# ---- The same loss and gradients ----
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_the_plain_models(variant, parted):
    check(model_of(**VARIANTS[variant]), batch_of(), parted)


@pytest.mark.parametrize("items", [11, torch.tensor(11)], ids=str)
def test_the_loss_is_a_mean_over_the_targets_of_the_update(items, parted):
    """With gradient checkpointing too."""
    model = model_of()
    model.gradient_checkpointing_enable()
    check(model, batch_of(num_items_in_batch=items), parted)


def test_frozen_parameters_get_no_gradient(parted):
    model = model_of()
    model.lm_head.requires_grad_(False)
    model.model.encoder.requires_grad_(False)
    check(model, batch_of(), parted)
    assert model.lm_head.weight.grad is None


def test_bfloat16_autocast_is_as_exact_as_the_plain_model(parted):
    """Both are compared with float32; measured: 0.6 and 0.8% of the gradients' norm."""
    model, batch, found = model_of(torch.float32), batch_of(), []
    for is_short, shortens in ((False, paused_shortcuts), (True, paused_shortcuts), (True, training_shortcuts)):
        with shortens(model), torch.autocast("cpu", torch.bfloat16, enabled=is_short):
            model.zero_grad()
            loss = model(**batch).loss
        loss.backward()
        found.append((loss.item(), torch.cat([one.grad.flatten() for one in model.parameters()])))
    (loss, gradient), *others = found
    errors = [(value - gradient).norm() / gradient.norm() for _, value in others]
    assert errors[1] < max(1.2 * errors[0], 0.01)
    assert all(value == pytest.approx(loss, rel=2e-3) for value, _ in others)
    assert parted == [28]


# ---- Aside ----
def with_lora(model):
    config = peft.LoraConfig(target_modules=["lm_head", "q_proj"], r=2, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    model.double()


def with_own_forward(model):
    model.lm_head.forward = lambda x: 2 * nn.functional.linear(x, model.lm_head.weight)


class Doubled(VanillaTransformerForConditionalGeneration):
    def loss_of_targets(self, hidden, labels, **kwargs):
        return 2 * super().loss_of_targets(hidden, labels, **kwargs)


CHANGES = {
    "a subclass": lambda model: setattr(model, "__class__", Doubled),
    "a hook": lambda model: model.lm_head.register_forward_hook(lambda module, args, output: 2 * output),
    "its own forward": with_own_forward,
    "an adapter": with_lora,
    "its own loss": lambda model: setattr(
        model, "loss_function", lambda logits, labels, **kwargs: nn.functional.cross_entropy(logits, labels)
    ),
    "its own method": lambda model: setattr(
        model, "loss_of_targets", lambda hidden, labels, **kwargs: hidden.square().mean()
    ),
    "another projection": lambda model: setattr(model, "lm_head", nn.Sequential(model.lm_head, nn.Tanh())),
    "a hook of the backward pass": lambda model: model.lm_head.register_full_backward_hook(
        lambda module, grads, _: (2 * grads[0],)
    ),
    "a parametrization": lambda model: parametrizations.weight_norm(model.lm_head),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_in_the_way_is_computed(change, parted):
    model = model_of(tie_word_embeddings=False)
    CHANGES[change](model)
    check(model, batch_of(), parted, is_parted=False)


def test_logits_evaluation_and_what_needs_no_gradient(parted):
    model = model_of()
    expected = model(**batch_of(skip_logits=False)).logits
    with training_shortcuts(model):
        torch.testing.assert_close(model(**batch_of(skip_logits=False)).logits, expected, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            model(**batch_of())
        model.eval()(**batch_of())
    assert not parted


# ---- In and out ----
def test_nested_use_pauses_and_exceptions():
    model, names = model_of(), set(vars(model_of()))
    with paused_shortcuts(model):
        assert not has_shortcuts(model)
    with training_shortcuts(model):
        with training_shortcuts(nn.ModuleDict({"wrapped": model})), paused_shortcuts(model):
            assert not has_shortcuts(model)
            with training_shortcuts(model):
                assert has_shortcuts(model)
            assert not has_shortcuts(model)
        assert has_shortcuts(model)
    with pytest.raises(IndexError), training_shortcuts(model):
        model(torch.full((1, 1), V))
    assert not has_shortcuts(model)
    assert set(vars(model)) == names
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_by_their_own_weights(duplicate):
    model, batch = model_of(), batch_of()
    with training_shortcuts(model):
        twin = duplicate(model)
    expected = gradients_of(model, batch)["loss"]
    with torch.no_grad():
        model.lm_head.weight.zero_()
    torch.testing.assert_close(gradients_of(twin, batch)["loss"], expected, rtol=1e-12, atol=1e-12)
