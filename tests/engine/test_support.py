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


def _put_in(make, model):
    """Replaces a map of each layer."""
    for layer in model.model.decoder.layers:
        layer.feed_forward.fc2 = make(layer.feed_forward.fc2)


def _adapt(model):
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2)).eval()


def _set(place, name, value):
    """Sets an attribute of a module, or of the configuration, below the model."""
    return lambda model: setattr(model.get_submodule(place) if place != "config" else model.config, name, value)


NETWORK = "model.decoder.layers.0.feed_forward"
CHANGES = {
    "a subclass": (_set("", "__class__", Derived), "Derived is not VanillaTransformerForCond"),
    "remote code": (_set("", "__class__", Remote), "its class came with the checkpoint; import hf_"),
    "adapters below": (_adapt, "Linear is not what the configuration says"),
    "a hook": (lambda model: model.get_submodule(NETWORK).register_forward_hook(print), "FeedForward has hooks"),
    "a patched module": (_set(NETWORK, "forward", lambda x: 3 * x), "FeedForward has a forward of its own"),
    "a foreign map": (functools.partial(_put_in, lambda old: Halved(48, 32)), "Halved is not what"),
    "a parametrized map": (functools.partial(_put_in, nn.utils.parametrizations.weight_norm), "ParametrizedLinear"),
    "another head size": (_set("model.encoder.layers.0.self_attn", "head_dim", 4), "Attention is not what"),
    "norms elsewhere": (_set("config", "norm_position", "pre"), "PostNormResidual is not what"),
    "renormalised embeddings": (_set("model.decoder.embed_tokens", "max_norm", 1.0), "Embedding is not what"),
    "an attention of one's own": (_set("config", "_attn_implementation", "own"), "the attention is own"),
    "no causal mask": (_set("config", "is_causal", False), "the configuration has `is_causal`"),
    "several types": (lambda model: model.get_submodule(NETWORK).to(torch.bfloat16), "of one floating-point type"),
    "no values": (lambda model: model.to("meta"), "of one floating-point type, on one device"),
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
