"""What is done to weights and numbers of a model that has generated before: `generate()` sees all of it."""

import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from contract import LENGTH, assert_served, check, generated, naive, new_model
from test_generation import lively_model
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

# The sooner the tests of one edit each are done, the better: greedy decoding shows it as well as beams do.
GREEDY = {"modes": (1,)}

# One element of every kind of weight: the variant of the model, the weight, the place.
ELEMENTS = {
    "embedding": ("all biases", "model.encoder.embed_tokens.weight", (2, 8)),
    "tied embedding": ("tied", "lm_head.weight", (1, 6)),
    "learned positions of the source": ("learned positions", "model.encoder.embed_positions.weight", (1, 4)),
    "learned positions of the target": ("learned positions", "model.decoder.embed_positions.weight", (2, 4)),
    "encoder q": ("attentive", "model.encoder.layers.0.self_attn.q_proj.weight", (3, 7)),
    "encoder v": ("attentive", "model.encoder.layers.1.self_attn.v_proj.weight", (31, 31)),
    "encoder out": ("attentive", "model.encoder.layers.1.self_attn.out_proj.weight", (1, 2)),
    "encoder fc1": ("attentive", "model.encoder.layers.0.feed_forward.fc1.weight", (9, 14)),
    "encoder norm": ("attentive", "model.encoder.layers.1.self_attn_layer_norm.weight", (9,)),
    "encoder's last norm": ("all biases", "model.encoder.layer_norm.bias", (9,)),
    "self q": ("attentive", "model.decoder.layers.0.self_attn.q_proj.weight", (12, 7)),
    "self k": ("attentive", "model.decoder.layers.0.self_attn.k_proj.weight", (8, 22)),
    "self v": ("attentive", "model.decoder.layers.1.self_attn.v_proj.weight", (8, 1)),
    "self out": ("attentive", "model.decoder.layers.1.self_attn.out_proj.weight", (8, 1)),
    "cross q bias": ("attentive", "model.decoder.layers.0.encoder_attn.q_proj.bias", (24,)),
    "self out bias": ("attentive", "model.decoder.layers.1.self_attn.out_proj.bias", (5,)),
    "cross q": ("attentive", "model.decoder.layers.0.encoder_attn.q_proj.weight", (3, 7)),
    "cross k": ("attentive", "model.decoder.layers.0.encoder_attn.k_proj.weight", (8, 15)),
    "cross v": ("attentive", "model.decoder.layers.1.encoder_attn.v_proj.weight", (31, 31)),
    "cross out": ("attentive", "model.decoder.layers.1.encoder_attn.out_proj.weight", (0, 0)),
    "cross v bias": ("attentive", "model.decoder.layers.1.encoder_attn.v_proj.bias", (2,)),
    "fc1": ("attentive", "model.decoder.layers.0.feed_forward.fc1.weight", (11, 5)),
    "fc1 bias": ("attentive", "model.decoder.layers.0.feed_forward.fc1.bias", (11,)),
    "fc2": ("attentive", "model.decoder.layers.1.feed_forward.fc2.weight", (24, 9)),
    "fc2 bias": ("attentive", "model.decoder.layers.1.feed_forward.fc2.bias", (20,)),
    "norm": ("attentive", "model.decoder.layers.1.final_layer_norm.weight", (13,)),
    "norm bias": ("attentive", "model.decoder.layers.0.encoder_attn_layer_norm.bias", (13,)),
    "last norm": ("all biases", "model.decoder.layer_norm.weight", (13,)),
    "lm_head": ("all biases", "lm_head.weight", (4, 14)),
    "lm_head bias": ("all biases", "lm_head.bias", (9,)),
    "sinusoids of the source": ("default", "model.encoder.embed_positions.table", (1, 4)),
    "sinusoids of the target": ("default", "model.decoder.embed_positions.table", (2, 4)),
}
STEP = 40.0  # large beside every weight, so that a single one changes tokens


def weight_of(model, name):
    module, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(module), attribute)


def by_data(weight, place):
    weight.data[place] += STEP


def by_numpy(weight, place):
    weight.detach().numpy()[place] += STEP


def without_grad(weight, place):
    with torch.no_grad():
        weight[place] += STEP


def by_other_data(weight, place):
    weight.data = weight.data.clone()
    weight.data[place] += STEP


WAYS = {".data": by_data, "numpy": by_numpy, "no_grad": without_grad, "other .data": by_other_data}


# The first two ways leave no trace in what torch counts.
SLOW = {"no_grad", "other .data"}
OF_WAYS = [pytest.param(way, marks=pytest.mark.slow if way in SLOW else ()) for way in WAYS]


@pytest.mark.parametrize("way", OF_WAYS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_one_element(element, way):
    variant, name, place = ELEMENTS[element]
    check(new_model(variant), lambda model, changes: WAYS[way](weight_of(model, name), place), **GREEDY)


@pytest.mark.parametrize("element", [name for name in ELEMENTS if "sinusoids" not in name])
def test_one_element_of_an_array_that_shares_its_memory(element):
    variant, name, place = ELEMENTS[element]
    model, arrays = new_model(variant), {}
    for path, parameter in model.named_parameters():
        arrays[path] = parameter.detach().numpy().copy()
        parameter.data = torch.from_numpy(arrays[path])
    name = "model.encoder.embed_tokens.weight" if element == "tied embedding" else name  # the name of the two

    def edit(model, changes):
        arrays[name][place] += STEP

    check(model, edit, **GREEDY)


def test_one_element_with_beams():
    check(new_model(), lambda model, changes: by_data(model.lm_head.weight, (9, 9)))


# ---- Weights that are the same, at other places ----
def exchange_elements(weight):
    values = weight.detach().numpy()
    values[0, 0], values[5, 5] = 20.0, -20.0
    yield
    values[0, 0], values[5, 5] = -20.0, 20.0


def exchange_rows(weight):
    yield
    weight.data[[5, 7]] = weight.data[[7, 5]]


def exchange_all_rows(weight):
    yield
    weight.data.copy_(weight.data.flip(0).clone())


def exchange_columns(weight):
    yield
    weight.data[:, [5, 7]] = weight.data[:, [7, 5]].clone()


def rectangle(weight):
    """Every sum of a row and of a column stays as it was."""
    yield
    weight.data[5:7, 5:7] += torch.tensor([[20.0, -20.0], [-20.0, 20.0]])


@pytest.mark.parametrize("name", ["lm_head.weight", "model.decoder.layers.1.encoder_attn.v_proj.weight"])
@pytest.mark.parametrize("way", [exchange_elements, exchange_rows, exchange_all_rows, exchange_columns, rectangle])
def test_exchanged_elements(way, name):
    model = new_model()
    steps = way(weight_of(model, name))
    next(steps)
    check(model, lambda model, changes: next(steps, None), **GREEDY)


def exchange_layers(model, changes):
    for stack in (model.model.encoder, model.model.decoder):
        stack.layers[0], stack.layers[1] = stack.layers[1], stack.layers[0]


def exchange_q_and_k(model, changes):
    for layer in model.model.encoder.layers:
        attention = layer.self_attn
        attention.q_proj, attention.v_proj = attention.v_proj, attention.q_proj


def exchange_attentions(model, changes):
    """The weights of self-attention for those of the attention to the source; both have their own layer numbers."""
    for layer in model.model.decoder.layers:
        own, other = layer.self_attn, layer.encoder_attn
        own.v_proj, other.v_proj = other.v_proj, own.v_proj


def exchange_norms(model, changes):
    layer = model.model.decoder.layers[0]
    layer.final_layer_norm, layer.self_attn_layer_norm = layer.self_attn_layer_norm, layer.final_layer_norm


def exchange_weights(model, changes):
    first, second = (layer.feed_forward.fc1 for layer in model.model.decoder.layers)
    first.weight, second.weight = second.weight, first.weight


def exchange_data(model, changes):
    first, second = (layer.feed_forward.fc1.weight for layer in model.model.decoder.layers)
    first.data, second.data = second.data, first.data


def exchange_stacks(model, changes):
    encoder = new_model("all biases").model.encoder
    encoder.config = model.config
    for layer in encoder.layers:
        layer.self_attn.config = model.config
    model.model.encoder = encoder


def drop_layers(model, changes):
    del model.model.decoder.layers[1]
    model.model.encoder.layers = nn.ModuleList(model.model.encoder.layers[1:])


def repeat_a_layer(model, changes):
    layers = model.model.encoder.layers
    model.model.encoder.layers = nn.ModuleList([layers[0], layers[1], layers[0]])


def one_module_for_two(model, changes):
    model.model.decoder.layers[1].feed_forward = model.model.decoder.layers[0].feed_forward


def another_last_norm(model, changes):
    model.model.decoder.layer_norm = nn.LayerNorm(32)
    model.model.decoder.layer_norm.weight.data.mul_(torch.linspace(-1, 2, 32))


def a_bias_where_none_was(model, changes):
    model.lm_head.bias = nn.Parameter(torch.linspace(-9, 9, 24))


def a_bias_of_attention(model, changes):
    model.model.decoder.layers[0].encoder_attn.v_proj.bias = nn.Parameter(torch.linspace(-9, 9, 32))


def no_bias(model, changes):
    model.model.decoder.layers[0].feed_forward.fc1.bias = None


def transposed_strides(model, changes):
    weight = model.model.decoder.layers[0].self_attn.v_proj.weight
    weight.data = weight.data.clone().t()


def other_weights(model, changes):
    model.load_state_dict(lively_model(seed=11).state_dict())


def assigned_weights(model, changes):
    model.load_state_dict(lively_model(seed=11).state_dict(), assign=True)


def a_training_step(model, changes):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    model(input_ids=torch.tensor([[5, 9, 2]]), labels=torch.tensor([[7, 8, 2]])).loss.backward()
    optimizer.step()
    model.eval()


MOVES = {
    function.__name__.replace("_", " "): function
    for function in (
        exchange_layers,
        exchange_q_and_k,
        exchange_attentions,
        exchange_norms,
        exchange_weights,
        exchange_data,
        exchange_stacks,
        drop_layers,
        repeat_a_layer,
        one_module_for_two,
        another_last_norm,
        a_bias_where_none_was,
        a_bias_of_attention,
        no_bias,
        transposed_strides,
        other_weights,
        assigned_weights,
        a_training_step,
    )
}


@pytest.mark.parametrize("name", MOVES)
def test_moved_weights_and_modules(name):
    check(new_model(), MOVES[name], **GREEDY)


# ---- Numbers beside the weights ----
def set_all(cls_name, attribute, value):
    def change(model, changes):
        for module in model.modules():
            if cls_name in [cls.__name__ for cls in type(module).__mro__]:
                setattr(module, attribute, value)

    return change


def one_head_more_or_less(model, changes):
    for layer in model.model.decoder.layers:
        layer.self_attn.head_dim = layer.self_attn.value_head_dim = 16


NUMBERS = {
    "eps of all norms": ("default", set_all("LayerNorm", "eps", 2.0)),
    "eps of one norm": (
        "default",
        lambda model, _: setattr(model.model.encoder.layers[1].final_layer_norm, "eps", 9.0),
    ),
    "scaling of all attentions": ("default", set_all("VanillaTransformerAttention", "scaling", 1.5)),
    "scaling of one": ("default", lambda model, _: setattr(model.model.encoder.layers[0].self_attn, "scaling", -9.0)),
    "scale_embedding": ("default", lambda model, _: setattr(model.config, "scale_embedding", False)),
    "d_model of the configuration": ("default", lambda model, _: setattr(model.config, "d_model", 512)),
    "another configuration": (
        "default",
        lambda model, _: [
            setattr(module, "config", VanillaTransformerConfig(**model.config.to_dict() | {"scale_embedding": False}))
            for module in model.modules()
            if hasattr(module, "config")
        ],
    ),
    "head_dim": ("default", one_head_more_or_less),
    "act of GELU": ("gelu", set_all("GELUActivation", "act", torch.tanh)),
    "max_norm of embeddings": ("default", lambda model, _: setattr(model.model.encoder.embed_tokens, "max_norm", 0.01)),
    "a longer table of other positions": (
        "default",
        lambda model, _: setattr(model.model.decoder.embed_positions, "table", nn.Buffer(torch.randn(64, 32))),
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_beside_the_weights(name):
    variant, change = NUMBERS[name]
    check(new_model(variant), change, **GREEDY)


# ---- Parametrizations ----
class Roll(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        """Rolls the rows."""
        return weight.roll(1, 0)


def weight_norm(model, changes):
    parametrizations.weight_norm(model.lm_head)
    model.lm_head.parametrizations.weight.original0.data[5:] *= torch.linspace(0.2, 3, 19)[:, None]


def old_weight_norm(model, changes):
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model.lm_head)
    model.lm_head.weight_g.data[5:] *= torch.linspace(0.2, 3, 19)[:, None]


def parametrization(name, weight="weight"):
    def change(model, changes):
        parametrize.register_parametrization(model.get_submodule(name), weight, Roll())

    return change


def removed_parametrization(model, changes):
    parametrize.register_parametrization(model.lm_head, "weight", Roll())
    parametrize.remove_parametrizations(model.lm_head, "weight")


def pruned(name):
    def change(model, changes):
        prune.random_unstructured(model.get_submodule(name), "weight", amount=0.5)

    return change


def pruning_removed(model, changes):
    pruned("lm_head")(model, changes)
    prune.remove(model.lm_head, "weight")


def pruned_more_later(model, changes):
    pruned("lm_head")(model, changes)
    generated(model)
    model.lm_head.weight_mask[:, ::2] = 0


PARAMETRIZATIONS = {
    "weight_norm": weight_norm,
    "torch's former weight_norm": old_weight_norm,
    "of an embedding": parametrization("model.decoder.embed_tokens"),
    "of lm_head": parametrization("lm_head"),
    "of a bias": parametrization("model.decoder.layers.0.final_layer_norm", "bias"),
    "of fc2": parametrization("model.encoder.layers.0.feed_forward.fc2"),
    "removed": removed_parametrization,
    "pruning": pruned("lm_head"),
    "pruning of v_proj": pruned("model.decoder.layers.1.encoder_attn.v_proj"),
    "pruning removed": pruning_removed,
    "another mask": pruned_more_later,
}


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_parametrizations(name):
    check(new_model("all biases"), PARAMETRIZATIONS[name], **GREEDY)


# ---- Tensors of other classes ----
class RollingTensor(torch.Tensor):
    """A tensor with which F.linear is another function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Calls the function, and rolls F.linear's output."""
        output = super().__torch_function__(func, types, args, kwargs)
        return output.as_subclass(torch.Tensor).roll(1, -1) if func is F.linear else output


class RollingParameter(nn.Parameter):
    """The same as a subclass of nn.Parameter."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Calls the function, and rolls F.linear's output."""
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **(kwargs or {}))
        return output.roll(1, -1) if func is F.linear else output


@pytest.mark.parametrize(
    "name", ["lm_head", "model.decoder.layers.1.encoder_attn.out_proj", "model.encoder.layers.0.feed_forward.fc1"]
)
@pytest.mark.parametrize("kind", [RollingTensor, RollingParameter])
def test_a_subclass_of_tensor_as_a_parameter(kind, name):
    def change(model, changes):
        linear = model.get_submodule(name)
        data = linear.weight.detach()
        linear.weight = kind(data) if kind is RollingParameter else nn.Parameter(data.as_subclass(RollingTensor))

    check(new_model(), change, **GREEDY)


# ---- Types ----
def coarse_model():
    """A model whose output projection bfloat16 and half precision round to something else."""
    model = new_model()
    with torch.no_grad():
        model.lm_head.weight += 4096.0 * torch.randn(32)  # the same for all tokens, of which no choice depends
    return model.double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_to_another_type_and_back(dtype):
    def there_and_back(model, changes):
        model.to(dtype)
        generated(model, modes=(1,))
        model.double()

    check(coarse_model(), there_and_back)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_layer_of_another_type(dtype):
    class Cast(nn.Module):
        def forward(self, x):
            return x.to(dtype)

    def change(model, changes):
        layer = model.model.decoder.layers[1]
        layer.feed_forward = nn.Sequential(Cast(), layer.feed_forward.to(dtype), Rolled32())

    check(new_model(), change, **GREEDY)


class Rolled32(nn.Module):
    """Back to float32, and rolled."""

    def forward(self, x):
        """Casts and rolls."""
        return x.float().roll(1, -1)


def test_double():
    check(new_model(), lambda model, changes: model.double(), differs=False)


# ---- Models that are copied, resized and untied ----
def edited(model):
    by_data(model.lm_head.weight, (9, 9))
    return model


COPIES = {
    "deepcopy": lambda model: copy.deepcopy(model),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "copy": lambda model: copy.copy(model),
}


@pytest.mark.parametrize("way", COPIES)
def test_copies(way):
    model = new_model()
    before = generated(model)
    other = COPIES[way](model)
    assert generated(other) == naive(other) == before
    check(other, lambda model, changes: edited(model))
    if way != "copy":  # which has the very same modules
        assert generated(model) == before


def test_a_loaded_model(tmp_path):
    model = new_model()
    model.save_pretrained(tmp_path)
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    assert generated(loaded) == generated(model) == naive(loaded)
    check(loaded, lambda model, changes: edited(model))


@pytest.mark.parametrize("variant", ["default", "tied"])
def test_a_resized_vocabulary(variant):
    def resize(model, changes):
        model.resize_token_embeddings(30)
        with torch.no_grad():
            model.lm_head.weight[24:] = 1.5 * model.lm_head.weight[6:12]

    check(new_model(variant), resize)


def test_an_untied_model():
    def untie(model, changes):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().roll(3, 0).clone())

    check(new_model("tied"), untie)


def test_a_tied_model():
    def tie(model, changes):
        model.lm_head.weight = model.model.encoder.embed_tokens.weight

    check(new_model(), tie)


# ---- Inference mode ----
def made_in_inference_mode():
    with torch.inference_mode():
        return lively_model()


def loaded_in_inference_mode(folder):
    new_model().save_pretrained(folder)
    with torch.inference_mode():
        return VanillaTransformerForConditionalGeneration.from_pretrained(folder).eval()


@pytest.mark.parametrize("way", ["made", "loaded"])
@pytest.mark.parametrize("element", ["lm_head.weight", "model.encoder.layers.0.feed_forward.fc1.weight"])
def test_a_model_of_inference_mode(way, element, tmp_path):
    def edit(model, changes):
        with torch.inference_mode():
            weight_of(model, element)[9, 9] += STEP

    model = made_in_inference_mode() if way == "made" else loaded_in_inference_mode(tmp_path)
    check(model, edit, **GREEDY)


# ---- Threads ----
def test_several_threads():
    """Three models, one of them three times at a time, one changed in between."""
    models = [new_model(), new_model("pre-norm"), new_model("tied")]
    expected = [naive(model) for model in models]
    with ThreadPoolExecutor(5) as pool:
        order = [0, 1, 0, 2, 0] * 3
        assert list(pool.map(generated, [models[i] for i in order])) == [expected[i] for i in order]
        edited(models[0])
        changed = naive(models[0])
        assert list(pool.map(generated, [models[i] for i in order])) == [expected[i] if i else changed for i in order]
    assert changed != expected[0]


def test_a_model_prepared_by_several_threads_at_once():
    for seed in range(3):
        model = lively_model(seed=seed + 20)
        expected = naive(model, length=4)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(functools.partial(generated, length=4), [model] * 4))
        assert found == [expected] * 4
        assert_served(model)
        assert LENGTH > 4
