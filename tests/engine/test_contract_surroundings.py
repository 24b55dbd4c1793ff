"""What surrounds a model: registries, hooks and modes for all, training mode; and the encoder by itself."""

import random

import pytest
import torch
import torch.nn.functional as F
from contract import (
    BATCH,
    Changes,
    and_roll,
    by_the_loop_of_transformers,
    check,
    generated,
    in_sequence,
    new_model,
    rolled,
)
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_vanilla_transformer import engine
from hf_vanilla_transformer import modeling_vanilla_transformer as modeling
from hf_vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from hf_vanilla_transformer.generation_vanilla_transformer import EngineSlot


# ---- Registries ----
def my_attention(*args, **kwargs):
    return rolled(sdpa_attention_forward(*args, **kwargs))


def my_mask(*args, **kwargs):
    kwargs["attention_mask"] = None
    return masking_utils.sdpa_mask(*args, **kwargs)


@pytest.mark.parametrize(
    ("registry", "original", "mine"),
    [
        (AttentionInterface, sdpa_attention_forward, my_attention),
        (AttentionMaskInterface, masking_utils.sdpa_mask, my_mask),
    ],
    ids=["attention", "masks"],
)
def test_sdpa_registered_anew(registry, original, mine):
    def register(model, changes):
        registry.register("sdpa", mine)
        changes.callback(registry.register, "sdpa", original)

    check(new_model(), register, restored=True)


def test_an_attention_function_of_ones_own():
    def register(model, changes):
        AttentionInterface.register("my_attention", my_attention)
        AttentionMaskInterface.register("my_attention", masking_utils.sdpa_mask)
        model.set_attn_implementation("my_attention")

    check(new_model(), register)


def test_generate_calls_the_attention_that_was_chosen():
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("counted", counted)
    AttentionMaskInterface.register("counted", masking_utils.sdpa_mask)
    model, ids = new_model(), torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, max_new_tokens=4, min_new_tokens=4).tolist()
    model.set_attn_implementation("counted")
    assert engine.unsupported_reason(model) == "the attention is counted"
    assert model.generate(ids, max_new_tokens=4, min_new_tokens=4).tolist() == expected
    stacks = (model.config.encoder_layers, model.config.decoder_layers)
    assert len(calls) == stacks[0] + 4 * 2 * stacks[1]  # at each step, each decoder layer attends twice


def test_another_registry_in_modeling():
    def replace(model, changes):
        registry = AttentionInterface()
        registry["sdpa"] = my_attention
        changes.set(modeling, "ALL_ATTENTION_FUNCTIONS", registry)

    check(new_model(), replace, restored=True)


def test_attention_of_one_stack_alone():
    def replace(model, changes):
        model.model.decoder.config = VanillaTransformerConfig.from_dict(model.config.to_dict())
        for layer in model.model.decoder.layers:
            layer.encoder_attn.config = model.model.decoder.config
        model.model.decoder.config.scale_embedding = False

    check(new_model(), replace)


# ---- Surroundings ----
def roll_linear(module, args, output):
    return output.roll(1, -1) if isinstance(module, nn.Linear) else None


def roll_input_of_linear(module, args):
    return (args[0].roll(1, -1),) if isinstance(module, nn.Linear) else None


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_global_hook(when):
    def hook(model, changes):
        register, function = {
            "before": (torch_modules.register_module_forward_pre_hook, roll_input_of_linear),
            "after": (torch_modules.register_module_forward_hook, roll_linear),
        }[when]
        changes.callback(register(function).remove)

    check(new_model(), hook, restored=True)


class RollLinear(TorchFunctionMode):
    """Changes what F.linear returns."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Calls the function, and rolls F.linear's output."""
        output = func(*args, **(kwargs or {}))
        return output.roll(1, -1) if func is F.linear else output


class AbsForReLU(TorchDispatchMode):
    """Changes what the kernel of relu computes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Calls the kernel, or another one."""
        return args[0].abs() if func is torch.ops.aten.relu.default else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [RollLinear, AbsForReLU])
def test_an_active_mode(mode):
    check(new_model(), lambda model, changes: changes.enter_context(mode()), restored=True)


def flops_of(model):
    with FlopCounterMode(display=False) as counter:
        generated(model)
    return counter.get_total_flops()


def test_operations_are_counted():
    model = new_model()
    generated(model)
    assert flops_of(model) == by_the_loop_of_transformers(flops_of, model) > 0


def test_autocast():
    """In bfloat16, this output projection keeps little of what tells tokens apart."""
    model = new_model()
    with torch.no_grad():
        model.lm_head.weight += 64
    before = generated(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = generated(model)
        assert found == by_the_loop_of_transformers(generated, model)
    assert found != before
    assert generated(model) == before


def test_a_default_device():
    def set_device(model, changes):
        torch.set_default_device("cpu")
        changes.callback(torch.set_default_device, None)

    check(new_model(), set_device, differs=False, restored=True)


def test_inference_mode():
    check(
        new_model(), lambda model, changes: changes.enter_context(torch.inference_mode()), differs=False, restored=True
    )


# ---- Training mode ----
@pytest.mark.parametrize("name", ["encoder.layers.0", "decoder.layers.1"])
def test_a_dropout_module_left_in_training_mode(name):
    def train(model, changes):
        dropout = model.model.get_submodule(f"{name}.feed_forward.dropout")
        dropout.p = 1.0  # the only rate, beside 0, that leaves nothing to chance
        dropout.train()

    check(new_model(), train)


def test_attention_left_in_training_mode():
    def train(model, changes):
        attention = model.model.decoder.layers[0].self_attn
        attention.attention_dropout = 1.0
        attention.training = True

    check(new_model(), train)


def test_a_model_in_training_mode():
    def train(model, changes):
        model.train()
        model.model.decoder.layers[0].feed_forward.dropout.p = 1.0

    check(new_model("no dropout"), train)


def test_dropout_draws_what_it_draws_without_an_engine():
    model = new_model()
    before = generated(model)
    model.train()

    def seeded(model):
        torch.manual_seed(1)
        random.seed(1)
        return generated(model)

    found = seeded(model)
    assert found == by_the_loop_of_transformers(seeded, model)
    assert found != before
    assert generated(model.eval()) == before


# ---- The encoder, which generate() runs by itself ----
ENCODER_CHANGES = {
    "a hook on it": lambda model, changes: changes.callback(
        model.model.encoder.register_forward_hook(lambda module, args, output: rolled(output)).remove
    ),
    "a hook inside": lambda model, changes: changes.callback(
        model.model.encoder.layers[0].self_attn.q_proj.register_forward_hook(lambda m, args, output: -output).remove
    ),
    "a patched layer": lambda model, changes: changes.wrap(model.model.encoder.layers[1], "forward", and_roll),
    "a replaced module": in_sequence("model.encoder.layers.1.feed_forward.fc1"),
    "a patched class": lambda model, changes: changes.wrap(
        modeling.VanillaTransformerEncoderLayer, "forward", and_roll
    ),
    "another activation": lambda model, changes: setattr(
        model.model.encoder.layers[0].feed_forward, "activation", nn.GELU()
    ),
    "dropout": lambda model, changes: in_training(model.model.encoder.layers[0].feed_forward.dropout),
}


def in_training(dropout):
    dropout.p = 1.0
    dropout.train()


@pytest.mark.parametrize("decoder", ["supported", "by transformers' loop"])
@pytest.mark.parametrize("name", ENCODER_CHANGES)
def test_the_encoder(name, decoder):
    """Where transformers' loop decodes, the model's own encoder encodes."""

    def change(model, changes):
        if decoder != "supported":
            model.lm_head.register_forward_hook(lambda module, args, output: output.roll(1, -1))
        ENCODER_CHANGES[name](model, changes)

    check(new_model(), change)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_encoder_outputs_of_the_caller_are_those_that_count(num_beams):
    model = new_model()
    options = {"attention_mask": BATCH["attention_mask"], "num_beams": num_beams, "max_new_tokens": 8}

    @torch.no_grad()
    def encoded():
        return model.get_encoder()(**BATCH)  # a new one for each call, as transformers repeats it by beams in place

    before = model.generate(BATCH["input_ids"], **options)
    assert torch.equal(model.generate(encoder_outputs=encoded(), **options), before)
    found = model.generate(encoder_outputs=rolled(encoded()), **options)
    assert not torch.equal(found, before)
    with Changes() as changes:
        changes.set(EngineSlot, "engine", None)
        assert torch.equal(found, model.generate(encoder_outputs=rolled(encoded()), **options))
