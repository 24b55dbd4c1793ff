"""Which models the engine refuses, and what it says of them."""

import functools

import pytest
import torch
from test_generation import lively_model
from torch import nn

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration, engine


class Derived(VanillaTransformerForConditionalGeneration):
    pass


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def _networks(model):
    return [layer.feed_forward for layer in model.model.decoder.layers]


def _put_in(make, model):
    """Replaces a map of each layer."""
    for network in _networks(model):
        network.fc2 = make(network.fc2)


def _hook(model):
    _networks(model)[0].register_forward_hook(lambda module, args, output: output * 3)


def _patch(model):
    network = _networks(model)[0]
    network.forward = functools.partial(lambda plain, x: 3 * plain(x), network.forward)


def _mix_types(model):
    _networks(model)[1].to(torch.bfloat16)


def _scale(model):
    model.model.encoder.layers[0].self_attn.head_dim = 4


def _move_norm(model):
    model.config.norm_position = "pre"


def _renormalise(model):
    model.model.decoder.embed_tokens.max_norm = 1.0


CHANGES = {
    "a subclass": (lambda model: setattr(model, "__class__", Derived), {}, "Derived is not"),
    "a hook": (_hook, {}, "FeedForward has hooks"),
    "a patched module": (_patch, {}, "FeedForward has a forward of its own"),
    "a foreign map": (functools.partial(_put_in, lambda old: Halved(48, 32)), {}, "Halved is not one"),
    "a parametrized map": (functools.partial(_put_in, nn.utils.parametrizations.weight_norm), {}, "ParametrizedLinear"),
    "another head size": (_scale, {}, "Attention is another one than the configuration"),
    "norms elsewhere": (_move_norm, {}, "PostNormResidual is not one of the model"),
    "renormalised embeddings": (_renormalise, {}, "Embedding is another one than the configuration"),
    "an attention of one's own": (lambda model: setattr(model.config, "_attn_implementation", "own"), {}, "is own"),
    "several types": (_mix_types, {}, "several devices or types"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_models_that_are_refused(change):
    apply, fields, said = CHANGES[change]
    model = lively_model(**fields)
    assert engine.unsupported_reason(model) is None
    apply(model)
    with pytest.raises(engine.EngineError, match=f"can't be attached to this model: .*({said})"):
        engine.attach(model)
    assert model.engine is None


def test_a_model_that_has_shown_its_attention_is_supported():
    """transformers' hooks that collect outputs stay on the modules, and do nothing unless asked."""
    model, ids = lively_model(), torch.tensor([[5, 9]])
    model(input_ids=ids, decoder_input_ids=ids, output_attentions=True, output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert engine.unsupported_reason(model) is None
