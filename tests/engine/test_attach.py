"""The engine is put on and taken off, notices changes, and steps aside where it has to."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
from test_generation import SOURCES, lively_model, padded
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration, engine
from hf_vanilla_transformer.engine import EngineError

INPUTS = padded(SOURCES)
BEAMS = {"num_beams": 3, "max_extra_length": 5, "return_dict_in_generate": True}
GREEDY = {"num_beams": 1, "early_stopping": False, "max_extra_length": 5, "return_dict_in_generate": True}


@pytest.fixture
def model():
    return lively_model()


def translated(model, **options):
    return model.generate(**INPUTS, **{**BEAMS, **options})


def assert_same(found, expected):
    assert found.sequences.tolist() == expected.sequences.tolist()
    scores = getattr(expected, "sequences_scores", None)
    if scores is not None and found.sequences_scores is not None:
        torch.testing.assert_close(found.sequences_scores, scores, atol=1e-5, rtol=1e-5)


# ---- On and off ----
@pytest.mark.parametrize("options", [BEAMS, GREEDY], ids=["beams", "greedy"])
def test_importing_the_package_attaches_nothing(model, monkeypatch, options):
    """An untouched model's `generate()` is transformers' loop, and push_to_hub transformers' method."""
    assert "engine" not in vars(model)
    assert VanillaTransformerForConditionalGeneration.push_to_hub is PreTrainedModel.push_to_hub
    calls, generate = [], GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", lambda *args, **given: calls.append(1) or generate(*args, **given))
    expected = translated(model, **options)
    attached = engine.attach(model)
    assert model.engine is attached
    assert_same(translated(model, **options), expected)
    assert (attached.calls, attached.fallbacks, attached.last_reason, len(calls)) == (1, 0, None, 1)
    engine.detach(model)
    assert model.engine is None
    assert_same(translated(model, **options), expected)
    assert (attached.calls, len(calls)) == (1, 2)
    with engine.attach(model) as attached:
        translated(model, **options)
    assert model.engine is None
    assert (attached.calls, attached.is_on) == (1, False)
    with pytest.raises(RuntimeError, match="stop"), engine.attach(model):
        raise RuntimeError("stop")
    assert model.engine is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_of_weights(dtype):
    model = lively_model().to(dtype)
    name = str(dtype).removeprefix("torch.")
    for compute_type in ("int4", None, "float32"):
        with pytest.raises(EngineError, match=f"compute_type is {compute_type!r}; choose one of 'default', '{name}'"):
            engine.attach(model, compute_type)
    assert engine.attach(model).compute_type == engine.attach(model, name).compute_type == name
    with pytest.raises(EngineError, match=f"int8 needs a model in float32 on a CPU, and this one is in {name} on cpu"):
        engine.attach(model, "int8")
    translated(model)
    assert model.engine.calls == 1


# ---- Copies ----
def test_copies_and_saved_checkpoints_are_not_attached(model, tmp_path):
    engine.attach(model)
    model.save_pretrained(tmp_path)
    reloaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), reloaded):
        assert other.engine is None
        assert_same(translated(model), translated(other, output_scores=True))
    assert (model.engine.is_on, model.engine.calls) == (True, 3)


def test_a_checkpoint_with_edited_code_is_told(model, tmp_path, caplog):
    model.save_pretrained(tmp_path)
    message = f"{tmp_path} carries code that was edited, or is another version's: plan_vanilla_transformer.py."
    for code in ("# a comment\n", "EDITED = True\n"):
        with (tmp_path / "plan_vanilla_transformer.py").open("a", encoding="utf-8") as file:
            file.write(code)
        engine.attach(VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path))
        assert (message in caplog.text) == ("#" not in code)


# ---- What is noticed for good ----
def optimizer_step(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    model(**INPUTS, labels=INPUTS["input_ids"]).loss.backward()
    optimizer.step()


def merged_adapters(model):
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False))
    adapted.merge_and_unload()  # the modules are the old ones again


def swapped(model):
    attention = model.model.decoder.layers[0].self_attn
    attention.q_proj, attention.k_proj = attention.k_proj, attention.q_proj


def in_place(model):
    with torch.no_grad():
        model.lm_head.weight[7, 3] += 1


def patched(model):
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: 3 * plain(x)


FOR_GOOD = {
    "fused Adam": optimizer_step,
    "adapters merged": merged_adapters,
    "an average": lambda model: [one.data.copy_(0.9 * one.data) for one in model.parameters()],
    "modules swapped": swapped,
    "a parameter replaced": lambda model: setattr(model.lm_head, "weight", nn.Parameter(1.1 * model.lm_head.weight)),
    "one element": in_place,
    "a method patched": patched,
    "vocabulary resized": lambda model: model.resize_token_embeddings(60, mean_resizing=False),
}


@pytest.mark.parametrize("change", FOR_GOOD)
def test_changes_of_the_model_are_noticed(model, change, caplog):
    """Calls decode by transformers' loop, the first with a warning, until `attach` is called again."""
    attached = engine.attach(model)
    translated(model)
    FOR_GOOD[change](model)
    model.eval()
    for _ in range(2):
        found = translated(model)
    assert (attached.calls, attached.fallbacks) == (1, 2)
    assert not attached.is_on
    assert [record.levelname for record in caplog.records if "without the engine" in record.message] == ["WARNING"]
    engine.detach(model)
    assert_same(found, translated(model, output_scores=True))
    if change != "a method patched":
        attached = engine.attach(model)
        assert_same(translated(model), found)
        assert (attached.calls, attached.fallbacks) == (1, 0)


# ---- What is noticed for a call ----
def training_mode(model):
    model.train()
    for module in model.modules():  # so that the result is the same
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.eval


def autocast(model):
    context = torch.autocast("cpu", dtype=torch.bfloat16)
    context.__enter__()
    return lambda: context.__exit__(None, None, None)


OF_SURROUNDINGS = {  # what puts it there and returns what removes it, and the reason
    "global hook": (
        lambda model: nn.modules.module.register_module_forward_hook(lambda *call: None).remove,
        "there are hooks on all modules",
    ),
    "hook": (
        lambda model: model.model.encoder.register_forward_pre_hook(lambda *call: None).remove,
        "a VanillaTransformerEncoder has hooks",
    ),
    "training": (training_mode, "is in training mode"),
    "autocast": (autocast, "autocast is on"),
}


@pytest.mark.parametrize("kind", OF_SURROUNDINGS)
def test_surroundings_keep_it_from_a_call(model, kind, caplog):
    attached = engine.attach(model)
    put, reason = OF_SURROUNDINGS[kind]
    remove = put(model)
    try:
        found, again = translated(model), translated(model)
        with_it = translated(copy.deepcopy(model), output_scores=True)
    finally:
        remove()
    assert_same(found, with_it)
    assert_same(again, with_it)
    assert (attached.calls, attached.fallbacks) == (0, 2)
    assert reason in attached.last_reason
    assert caplog.text.count(reason) == 1
    translated(model)
    assert (attached.calls, attached.fallbacks) == (1, 2)


def test_options_of_the_engine_that_cannot_be(model):
    for option in ("coverage_penalty", "output_alignments", "compute_type"):
        with pytest.raises(ValueError, match=rf"`{option}` .*hf_vanilla_transformer.engine.attach\(model"):
            translated(model, **{option: 0.2})
    engine.attach(model)
    for value in (-0.1, float("nan")):
        with pytest.raises(ValueError, match=r"`coverage_penalty` is .*; .*a number from 0 up"):
            translated(model, coverage_penalty=value)


# ---- Several at a time ----
def test_threads_share_an_engine(model):
    attached = engine.attach(model)
    expected = [translated(model, num_beams=beams).sequences.tolist() for beams in (1, 2, 3, 4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda beams: translated(model, num_beams=beams).sequences.tolist(), [1, 2, 3, 4] * 2))
    assert found == expected * 2
    assert attached.fallbacks == 0
