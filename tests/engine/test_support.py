"""Which models the engine refuses, and what it says of them."""

import functools

import peft
import pytest
import torch
from test_generation import lively_model
from torch import nn

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration, engine


class Derived(VanillaTransformerForConditionalGeneration):
    pass


class Remote(VanillaTransformerForConditionalGeneration):
    """As it comes with a checkpoint."""

    __module__ = "transformers_modules.folder.modeling_vanilla_transformer"
    __qualname__ = "VanillaTransformerForConditionalGeneration"


Remote.__name__ = Remote.__qualname__


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


def _networks(model):
    return [layer.feed_forward for layer in model.model.decoder.layers]


def _put_in(make, model):
    """Replaces a map of each layer."""
    for network in _networks(model):
        network.fc2 = make(network.fc2)


def _patch(model):
    network = _networks(model)[0]
    network.forward = functools.partial(lambda plain, x: 3 * plain(x), network.forward)


def _adapt(model):
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2)).eval()


CHANGES = {
    "a subclass": (lambda model: setattr(model, "__class__", Derived), "Derived is not VanillaTransformerForCond"),
    "remote code": (
        lambda model: setattr(model, "__class__", Remote),
        "its class came with the checkpoint; import hf_",
    ),
    "adapters below": (_adapt, "Linear is not one of the model's own"),
    "a hook": (lambda model: _networks(model)[0].register_forward_hook(print), "FeedForward has hooks"),
    "a patched module": (_patch, "FeedForward has a forward of its own"),
    "a foreign map": (functools.partial(_put_in, lambda old: Halved(48, 32)), "Halved is not one"),
    "a parametrized map": (functools.partial(_put_in, nn.utils.parametrizations.weight_norm), "ParametrizedLinear"),
    "another head size": (
        lambda model: setattr(model.model.encoder.layers[0].self_attn, "head_dim", 4),
        "Attention is another one than the configuration",
    ),
    "norms elsewhere": (
        lambda model: setattr(model.config, "norm_position", "pre"),
        "PostNormResidual is not one of the model",
    ),
    "renormalised embeddings": (
        lambda model: setattr(model.model.decoder.embed_tokens, "max_norm", 1.0),
        "Embedding is another one than the configuration",
    ),
    "an attention of one's own": (lambda model: setattr(model.config, "_attn_implementation", "own"), "is own"),
    "several types": (lambda model: _networks(model)[1].to(torch.bfloat16), "several devices or types"),
    "no values": (lambda model: model.to("meta"), "its parameters are of type Parameter, torch.float32"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_models_that_are_refused(change):
    apply, said = CHANGES[change]
    model = lively_model()
    assert engine.unsupported_reason(model) is None
    apply(model)
    assert said in engine.unsupported_reason(model)
    with pytest.raises(engine.EngineError, match=f"can't be attached to this model: .*{said}"):
        engine.attach(model)
    assert model.engine is None


def test_a_model_that_has_shown_its_attention_is_supported():
    """transformers' hooks that collect outputs stay on the modules, and do nothing unless asked."""
    model, ids = lively_model(), torch.tensor([[5, 9]])
    model(input_ids=ids, decoder_input_ids=ids, output_attentions=True, output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert engine.unsupported_reason(model) is None
