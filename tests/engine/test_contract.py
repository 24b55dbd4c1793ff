"""What is done to code: overrides, patches, hooks, modes. `generate()` computes what `model(...)` does, always."""

import functools
import inspect

import pytest
import torch
import torch.nn.functional as F
import transformers
from contract import (
    Changes,
    Rolled,
    and_roll,
    assert_served,
    by_the_loop_of_transformers,
    check,
    generated,
    in_sequence,
    naive,
    new_model,
    plain_step,
    rolled,
)
from test_generation import SOURCES, padded
from torch import nn
from transformers import GenerationMixin, masking_utils
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_vanilla_transformer import modeling_vanilla_transformer as modeling
from hf_vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig

Model = modeling.VanillaTransformerForConditionalGeneration
# A wrapper that looks like what it wraps is the harder one to see.
WRAPS = [pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="functools.wraps")]


# ---- The reference itself ----
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", ["default", "all biases", "pre-norm", "learned positions", "tied", "gelu"])
def test_an_unchanged_model(variant, attention, side):
    model, batch = new_model(variant, attention), padded(SOURCES[:4], side)
    assert_served(model)
    assert generated(model, batch) == naive(model, batch)


# ---- Instances ----
MODULES = [
    "",
    "model",
    "model.encoder",
    "model.encoder.embed_tokens",
    "model.encoder.embed_positions",
    "model.encoder.dropout",
    "model.encoder.layers.0",
    "model.encoder.layers.1.self_attn",
    "model.encoder.layers.0.self_attn_layer_norm",
    "model.encoder.layers.1.feed_forward",
    "model.encoder.layer_norm",
    "model.decoder",
    "model.decoder.embed_positions",
    "model.decoder.dropout",
    "model.decoder.layers.1",
    "model.decoder.layers.0.self_attn",
    "model.decoder.layers.0.self_attn.q_proj",
    "model.decoder.layers.1.encoder_attn",
    "model.decoder.layers.1.encoder_attn.v_proj",
    "model.decoder.layers.0.encoder_attn_layer_norm",
    "model.decoder.layers.0.feed_forward",
    "model.decoder.layers.0.feed_forward.fc1",
    "model.decoder.layers.0.feed_forward.activation",
    "model.decoder.layers.0.feed_forward.dropout",
    "model.decoder.layers.1.final_layer_norm.dropout",
    "model.decoder.layer_norm",
    "lm_head",
]


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "the model")
def test_forward_of_an_instance(name):
    def override(model, changes):
        changes.wrap(model.get_submodule(name), "forward", and_roll, wraps=True)  # transformers reads the signature

    check(new_model(), override, restored=True, modes=(1,))


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "the model")
def test_a_hook(name):
    def hook(model, changes):
        handle = model.get_submodule(name).register_forward_hook(lambda module, args, output: rolled(output))
        changes.callback(handle.remove)

    check(new_model(), hook, restored=True, modes=(1,))


@pytest.mark.parametrize("name", ["model.decoder.layers.0", "model.decoder.layers.1.feed_forward.fc2", "lm_head"])
def test_a_hook_before_the_forward(name):
    def hook(model, changes):
        handle = model.get_submodule(name).register_forward_pre_hook(
            lambda module, args: (args[0].roll(1, -1), *args[1:])
        )
        changes.callback(handle.remove)

    check(new_model(), hook, restored=True, modes=(1,))


@pytest.mark.parametrize("attribute", ["_call_impl", "_compiled_call_impl"])
@pytest.mark.parametrize("name", ["model.encoder.layers.0.feed_forward", "lm_head"])
def test_what_torch_calls_in_place_of_forward(name, attribute):
    def override(model, changes):
        module = model.get_submodule(name)
        changes.set(module, attribute, lambda *args, **kwargs: rolled(module.forward(*args, **kwargs)))

    check(new_model(), override, restored=True)


HELPERS = {
    "embed of the encoder": ("model.encoder", "embed"),
    "embed of the decoder": ("model.decoder", "embed"),
    "split in the encoder": ("model.encoder.layers.0.self_attn", "split"),
    "split of the target": ("model.decoder.layers.0.self_attn", "split"),
    "split of the source": ("model.decoder.layers.1.encoder_attn", "split"),
}


@pytest.mark.parametrize("helper", HELPERS)
def test_a_helper_method_of_an_instance(helper):
    name, method = HELPERS[helper]
    check(new_model(), lambda model, changes: changes.wrap(model.get_submodule(name), method, and_roll), restored=True)


@pytest.mark.parametrize("name", ["encoder.layers.1.self_attn", "decoder.layers.1.encoder_attn"])
def test_keys_and_values_of_an_instance(name):
    def negative_keys(original, x, memory, cache):
        key, value = original(x, memory, None)
        if cache is not None and memory is not None:  # the memory's are computed anew in each step
            cache.is_updated.pop(name, None)
        return -key, value.roll(1, -1)

    def override(model, changes):
        changes.wrap(model.model.get_submodule(name), "keys_and_values", negative_keys)

    check(new_model(), override, restored=True)


def test_get_encoder_of_an_instance():
    class Wrapped(nn.Module):
        def __init__(self, encoder):
            super().__init__()
            self.encoder, self.main_input_name = encoder, "input_ids"

        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            return rolled(self.encoder(input_ids=input_ids, attention_mask=attention_mask, **kwargs))

    def override(model, changes):
        changes.set(model, "get_encoder", functools.partial(Wrapped, model.get_encoder()))

    check(new_model(), override, restored=True)


def exchanged(ids):
    """Other tokens for those that aren't special: the lowest for the highest."""
    return ids.where(ids < 5, 28 - ids)


def test_prepare_inputs_for_generation_of_an_instance():
    def prepare(original, *args, **kwargs):
        inputs = original(*args, **kwargs)
        return inputs | {"decoder_input_ids": exchanged(inputs["decoder_input_ids"])}

    def override(model, changes):
        changes.wrap(model, "prepare_inputs_for_generation", prepare)

    def step(model, memory, mask, ids):
        return plain_step(model, memory, mask, exchanged(ids))

    check(new_model(), override, restored=True, step=step)


def without_first_source_token(original, outputs, model_kwargs, *args, **kwargs):
    """Hides a token of the source after the first step."""
    model_kwargs = original(outputs, model_kwargs, *args, **kwargs)
    mask = model_kwargs["attention_mask"].clone()
    mask[:, 0] = 0
    return model_kwargs | {"attention_mask": mask}


def step_without_first_source_token(model, memory, mask, ids):
    """With one layer, no key depends on what an earlier step has seen of the source."""
    mask = mask.clone()
    mask[:, 0] &= ids.shape[1] == 1
    return plain_step(model, memory, mask, ids)


def test_update_model_kwargs_for_generation_of_an_instance():
    def override(model, changes):
        changes.wrap(model, "_update_model_kwargs_for_generation", without_first_source_token)

    check(new_model("one decoder layer"), override, restored=True, step=step_without_first_source_token)


def test_logits_processors_of_an_instance():
    def with_another(original, *args, **kwargs):
        return [*original(*args, **kwargs), lambda ids, scores: scores.roll(1, -1)]

    def processors(original, *args, **kwargs):
        found = with_another(original, *args, **kwargs)
        return transformers.LogitsProcessorList(found)

    def step(model, memory, mask, ids):
        return plain_step(model, memory, mask, ids).roll(1, -1)

    check(
        new_model(),
        lambda model, changes: changes.wrap(model, "_get_logits_processor", processors),
        restored=True,
        step=step,
    )


@pytest.mark.parametrize("cls", [Model, GenerationMixin])
@pytest.mark.parametrize(("name", "num_beams"), [("_sample", 1), ("_beam_search", 3)])
def test_a_loop_of_ones_own(name, num_beams, cls):
    """What another loop makes of the tokens is no business of `model(...)`, but counts too."""
    model = new_model()
    before = generated(model, modes=(num_beams,))
    with Changes() as changes:
        changes.wrap(cls, name, and_exchange, wraps=True)
        found = generated(model, modes=(num_beams,))
        assert found == by_the_loop_of_transformers(generated, model, modes=(num_beams,)) != before


def and_exchange(original, *args, **kwargs):
    return exchanged(original(*args, **kwargs))


class HalfLinear(nn.Linear):
    """Another class with the same weights."""

    def forward(self, x):
        """Rolls what nn.Linear returns."""
        return super().forward(x).roll(1, -1)


class RolledNorm(modeling.PostNormResidual):
    """Another class with the same weights."""

    def forward(self, x, sublayer):
        """Rolls what the residual returns."""
        return super().forward(x, sublayer).roll(1, -1)


class RolledModel(Model):
    """A model with another forward."""

    @functools.wraps(Model.forward)
    def forward(self, *args, **kwargs):
        """Rolls the logits."""
        return rolled(super().forward(*args, **kwargs))


class Reversed(nn.ModuleList):
    """Layers in another order than they are stored in."""

    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


SUBCLASSES = {
    "the model": ("", RolledModel),
    "q_proj": ("model.decoder.layers.0.self_attn.q_proj", HalfLinear),
    "fc2 of the encoder": ("model.encoder.layers.1.feed_forward.fc2", HalfLinear),
    "lm_head": ("lm_head", HalfLinear),
    "norm": ("model.decoder.layers.1.final_layer_norm", RolledNorm),
    "layers": ("model.decoder.layers", Reversed),
}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_an_instance_of_another_class(name):
    path, other = SUBCLASSES[name]
    check(
        new_model(),
        lambda model, changes: changes.exchange(model.get_submodule(path), "__class__", other),
        restored=True,
    )


def test_a_subclass_of_the_model_with_another_forward():
    model = new_model()
    other = RolledModel(model.config).eval()
    other.load_state_dict(model.state_dict())
    assert generated(other) == naive(other) != generated(model)


@pytest.mark.parametrize(
    "name",
    [
        "model.encoder.embed_tokens",
        "model.encoder.layers.0.self_attn.v_proj",
        "model.encoder.layers.1.feed_forward",
        "model.decoder.embed_tokens",
        "model.decoder.layers.0.self_attn.q_proj",
        "model.decoder.layers.0.self_attn.out_proj",
        "model.decoder.layers.1.encoder_attn.k_proj",
        "model.decoder.layers.1.encoder_attn.v_proj",
        "model.decoder.layers.1.feed_forward.fc1",
        "model.decoder.layer_norm",
        "lm_head",
    ],
)
def test_a_module_replaced_by_a_sequence(name):
    check(new_model(), in_sequence(name))


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("name", ["activation", "dropout", "all of it"])
def test_another_part_in_the_feed_forward_network(stack, name):
    def replace(model, changes):
        layer = model.get_submodule(f"model.{stack}.layers.0")
        if name == "all of it":
            layer.feed_forward = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        else:
            setattr(layer.feed_forward, name, nn.Tanh() if name == "activation" else Rolled())

    check(new_model(), replace)


# ---- Classes ----
OWN_CLASSES = [
    "SinusoidalPositions",
    "LearnedPositions",
    "VanillaTransformerAttention",
    "VanillaTransformerFeedForward",
    "PostNormResidual",
    "PreNormResidual",
    "VanillaTransformerEncoderLayer",
    "VanillaTransformerDecoderLayer",
    "VanillaTransformerEncoder",
    "VanillaTransformerDecoder",
    "VanillaTransformerModel",
    "VanillaTransformerForConditionalGeneration",
]
VARIANT_OF = {"LearnedPositions": "learned positions", "PreNormResidual": "pre-norm"}


@pytest.mark.parametrize("wraps", WRAPS)
@pytest.mark.parametrize("name", OWN_CLASSES)
def test_forward_of_an_own_class(name, wraps):
    if name in ("VanillaTransformerEncoder", "VanillaTransformerForConditionalGeneration") and not wraps:
        pytest.skip("transformers reads the signature of these")

    def patch(model, changes):
        changes.wrap(getattr(modeling, name), "forward", and_roll, wraps=wraps)

    check(new_model(VARIANT_OF.get(name, "default")), patch, restored=True)


@pytest.mark.parametrize("wraps", WRAPS)
@pytest.mark.parametrize("cls", [nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout, nn.ReLU, nn.Identity])
def test_forward_of_a_class_of_torch(cls, wraps):
    check(new_model(), lambda model, changes: changes.wrap(cls, "forward", and_roll, wraps=wraps), restored=True)


@pytest.mark.parametrize("cls", [nn.Linear, nn.LayerNorm, nn.Embedding, GradientCheckpointingLayer])
@pytest.mark.parametrize("place", ["nn.Module", "the class"])
def test_call_of_a_class(place, cls):
    def roll_some(original, module, *args, **kwargs):
        output = original(module, *args, **kwargs)
        return rolled(output) if isinstance(module, cls) else output

    def patch(model, changes):
        changes.wrap(nn.Module if place == "nn.Module" else cls, "__call__", roll_some)

    check(new_model(), patch, restored=True)


METHODS = {
    "embed": (modeling.VanillaTransformerStack, "embed"),
    "split": (modeling.VanillaTransformerAttention, "split"),
}


@pytest.mark.parametrize("wraps", WRAPS)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_a_class(name, wraps):
    check(new_model(), lambda model, changes: changes.wrap(*METHODS[name], and_roll, wraps=wraps), restored=True)


@pytest.mark.parametrize("cls", [Model, GenerationMixin])
def test_a_method_of_generation(cls):
    def patched(original, model, *args, **kwargs):
        return without_first_source_token(functools.partial(original, model), *args, **kwargs)

    def patch(model, changes):
        changes.wrap(cls, "_update_model_kwargs_for_generation", patched)

    check(new_model("one decoder layer"), patch, restored=True, step=step_without_first_source_token)


PROPERTIES = {
    "scaling of attention": (modeling.VanillaTransformerAttention, "scaling", 2.0),
    "embedding_scale of the configuration": (VanillaTransformerConfig, "embedding_scale", 1.0),
    "eps of layer normalisation": (nn.LayerNorm, "eps", 3.0),
    "weight of linear maps": (nn.Linear, "weight", None),
}


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_of_a_class(name):
    cls, attribute, value = PROPERTIES[name]

    def patch(model, changes):
        get = (lambda self: self._parameters["weight"].roll(1, 0)) if value is None else (lambda self: value)
        changes.set(cls, attribute, property(get, lambda self, value: None))

    check(new_model(), patch, restored=True)


def other_feed_forward(self, x):
    return self.fc2(self.dropout(self.activation(self.fc1(x)))).roll(1, -1)


def other_linear(self, input):
    return F.linear(input, self.weight, self.bias).roll(1, -1)


def other_sdpa(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, **kwargs):
    is_causal = attention_mask is None and module.is_causal and query.shape[2] > 1
    heads = torch.nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, 0.0, is_causal)
    return heads.transpose(1, 2).roll(1, -1), None


CODE = {
    "of a method": (modeling.VanillaTransformerFeedForward.forward, other_feed_forward),
    "of a method of torch": (nn.Linear.forward, other_linear),
    "of sdpa_attention_forward": (sdpa_attention_forward, other_sdpa),
}


@pytest.mark.parametrize("name", CODE)
def test_code_exchanged_in_place(name):
    function, other = CODE[name]
    check(new_model(), lambda model, changes: changes.exchange(function, "__code__", other.__code__), restored=True)


# ---- Functions ----
def next_position(original, *args):
    return original(*args) + 1


def without_start(original, *args, **kwargs):
    """A causal mask that hides the start token from all that come after it."""
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    inputs_embeds, past_key_values = given["inputs_embeds"], given.get("past_key_values")
    past = 0 if past_key_values is None else past_key_values.get_seq_length()
    length = inputs_embeds.shape[1]
    mask = torch.ones(length, past + length, dtype=torch.bool).tril(past)
    mask[:, 0] &= torch.arange(past, past + length) == 0
    return mask.expand(len(inputs_embeds), 1, -1, -1)


def without_padding(original, *args, **kwargs):
    given = inspect.signature(original).bind(*args, **kwargs)
    given.arguments["attention_mask"] = None
    return original(*given.args, **given.kwargs)


def no_padding_function(original, mask):
    return lambda *places: original(torch.ones_like(mask))(*places)


FUNCTIONS = {
    "positions_of": (modeling, "positions_of", next_position, "sdpa"),
    "eager_attention": (modeling, "eager_attention", and_roll, "eager"),
    "create_causal_mask": (modeling, "create_causal_mask", without_start, "sdpa"),
    "create_causal_mask, eager": (modeling, "create_causal_mask", without_start, "eager"),
    "create_bidirectional_mask": (modeling, "create_bidirectional_mask", without_padding, "sdpa"),
    "padding_mask_function": (masking_utils, "padding_mask_function", no_padding_function, "sdpa"),
    "F.linear": (F, "linear", and_roll, "sdpa"),
    "F.layer_norm": (F, "layer_norm", and_roll, "sdpa"),
    "F.scaled_dot_product_attention": (F, "scaled_dot_product_attention", and_roll, "sdpa"),
    "F.embedding": (F, "embedding", and_roll, "sdpa"),
    "F.relu": (F, "relu", and_roll, "sdpa"),
    "F.dropout": (F, "dropout", and_roll, "sdpa"),
    "F.softmax": (F, "softmax", lambda original, *args, **kwargs: original(*args, **kwargs) ** 2, "eager"),
    "torch.matmul": (torch, "matmul", lambda original, *args: -original(*args), "eager"),
}


@pytest.mark.parametrize("wraps", WRAPS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function(name, wraps):
    *place, wrapper, attention = FUNCTIONS[name]
    check(
        new_model(attention=attention),
        lambda model, changes: changes.wrap(*place, wrapper, wraps=wraps),
        restored=True,
    )


def test_sinusoidal_table():
    """Positions that a table lacks come from the function of that time."""

    def other_end(original, length, *layout):
        table = original(length, *layout)
        table[12:] = table[12:].roll(1, -1)
        return table

    model = new_model("short table")
    expected = naive(new_model("short table"), length=20)
    check(
        model,
        lambda model, changes: changes.wrap(modeling, "sinusoidal_table", other_end),
        first_length=4,
        length=20,
        differs=False,
    )
    # What the table has got in the meantime stays there.
    assert generated(model, length=20) == naive(model, length=20) != expected


def test_names_that_nobody_looks_up_are_no_matter():
    """transformers keeps the functions in a registry; the name in their module means nothing."""
    check(
        new_model(),
        lambda model, changes: changes.wrap(sdpa_attention, "sdpa_attention_forward", and_roll),
        differs=False,
        restored=True,
    )
