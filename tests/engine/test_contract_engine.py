"""When the engine serves a model and when it doesn't, what it holds, what `freeze` promises, and what comes out."""

import contextlib
import copy
import ctypes
import gc
import logging
import pickle
import weakref

import numpy as np
import psutil
import pytest
import torch
from contract import (
    BATCH,
    Changes,
    and_roll,
    by_the_loop_of_transformers,
    generated,
    has_engine,
    in_sequence,
    naive,
    new_model,
    rolled,
)
from test_generation import PAD, SOURCES, lively_model
from torch import nn
from torch.nn.utils import prune
from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration, engine
from hf_vanilla_transformer import generation_vanilla_transformer as generation
from hf_vanilla_transformer import modeling_vanilla_transformer as modeling


@pytest.fixture
def needs_engine():
    """Skips a test of what only an engine has."""
    if not has_engine():
        pytest.skip("hf_vanilla_transformer.engine has no unsupported_reason, or the slot is empty")


# ---- Served ----
def pickled(model):
    return pickle.loads(pickle.dumps(model))


def from_pretrained(model, folder):
    model.save_pretrained(folder)
    return VanillaTransformerForConditionalGeneration.from_pretrained(folder)


def from_pretrained_in_inference_mode(model, folder):
    model.save_pretrained(folder)
    with torch.inference_mode():
        return VanillaTransformerForConditionalGeneration.from_pretrained(folder).eval()


def made_in_inference_mode():
    with torch.inference_mode():
        return lively_model()


def resized(model):
    model.resize_token_embeddings(30)


def untied(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def to_bfloat16_and_back(model):
    model.to(torch.bfloat16)
    model.float()


def trained(model):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=BATCH["input_ids"], labels=BATCH["input_ids"]).loss.backward()
    optimizer.step()
    model.eval()


def shown_attention(model):
    model(**BATCH, decoder_input_ids=BATCH["input_ids"], output_attentions=True, output_hidden_states=True)


def lora_merged(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"])).merge_and_unload().eval()


def lora_unloaded(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"])).unload().eval()


def checkpointing(model):
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.eval()


def foreign_attributes(model):
    model.something, model.model.encoder.name = {"of": "ours"}, "encoder"
    model.model.decoder.layers[0].note = lambda: None
    model.lm_head.calls = 3


def unused_submodules(model):
    model.critic = nn.Linear(3, 4)
    model.critic.register_forward_hook(lambda *args: None)


def unpruned(model):
    prune.random_unstructured(model.lm_head, "weight", amount=0.5)
    prune.remove(model.lm_head, "weight")


def dropped(model):
    del model.model.decoder.layers[1]
    model.model.encoder.layers = nn.ModuleList(model.model.encoder.layers[1:])


def unhooked(model):
    model.lm_head.register_forward_hook(lambda *args: None).remove()
    model.register_forward_pre_hook(lambda *args: None).remove()


SERVED = {
    "plain": ("default", lambda model: None),
    "deepcopy": ("default", copy.deepcopy),
    "pickle": ("default", pickled),
    "from_pretrained": ("default", from_pretrained),
    "loaded in inference mode": ("default", from_pretrained_in_inference_mode),
    "made in inference mode": ("default", lambda model: made_in_inference_mode()),
    "eager": ("default", lambda model: model.set_attn_implementation("eager")),
    "resized": ("default", resized),
    "untied": ("tied", untied),
    "tied": ("tied", lambda model: None),
    "float64": ("default", lambda model: model.double()),
    "to bfloat16 and back": ("default", to_bfloat16_and_back),
    "trained": ("default", trained),
    "attention was shown": ("default", shown_attention),
    "LoRA merged": ("default", lora_merged),
    "LoRA unloaded": ("default", lora_unloaded),
    "gradient checkpointing": ("default", checkpointing),
    "requires_grad off": ("default", lambda model: model.requires_grad_(False)),
    "foreign attributes": ("default", foreign_attributes),
    "unused submodules": ("default", unused_submodules),
    "pre-norm": ("pre-norm", lambda model: None),
    "learned positions": ("learned positions", lambda model: None),
    "gelu": ("gelu", lambda model: None),
    "shared memory": ("default", lambda model: model.share_memory()),
    "pruning removed": ("default", unpruned),
    "layers dropped": ("default", dropped),
    "hooks removed": ("default", unhooked),
}


@pytest.mark.parametrize("name", SERVED)
def test_the_engine_serves(name, tmp_path):
    """Otherwise a guard that refuses everything would pass all other tests."""
    variant, change = SERVED[name]
    model = new_model(variant)
    generated(model, length=3)
    changed = change(model, tmp_path) if "pretrained" in change.__name__ else change(model)
    model = changed if isinstance(changed, nn.Module) else model
    assert generated(model) == naive(model)
    if has_engine():
        assert engine.unsupported_reason(model) is None


# ---- Refused ----
def halved(module):
    class Halved(type(module)):
        """Another class with the same weights."""

    module.__class__ = Halved


REFUSED = {
    "hook": lambda model, changes: model.lm_head.register_forward_hook(lambda m, args, output: rolled(output)),
    "instance override": lambda model, changes: changes.wrap(model.model.encoder.layers[0], "forward", and_roll),
    "prepare_inputs_for_generation": lambda model, changes: changes.wrap(
        model, "prepare_inputs_for_generation", lambda original, *args, **kwargs: original(*args, **kwargs)
    ),
    "patched class": lambda model, changes: changes.wrap(nn.Linear, "forward", and_roll),
    "patched own class": lambda model, changes: changes.wrap(
        modeling.PostNormResidual, "forward", and_roll, wraps=True
    ),
    "patched function": lambda model, changes: changes.wrap(nn.functional, "layer_norm", and_roll),
    "replaced module": in_sequence("model.decoder.layers.0.feed_forward.fc1"),
    "another class": lambda model, changes: halved(model.lm_head),
    "training mode of a module": lambda model, changes: model.model.decoder.layers[0].feed_forward.dropout.train(),
    "autocast": lambda model, changes: changes.enter_context(torch.autocast("cpu", torch.bfloat16)),
    "parametrization": lambda model, changes: nn.utils.parametrizations.weight_norm(model.lm_head),
    "pruning": lambda model, changes: prune.random_unstructured(model.lm_head, "weight", amount=0.5),
}


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("name", REFUSED)
def test_the_engine_refuses(needs_engine, name, frozen):
    """A promise about weights is none about code."""
    model = new_model()
    if frozen:
        engine.freeze(model)
    before = generated(model, length=4)
    with Changes() as changes:
        REFUSED[name](model, changes)
        reason = engine.unsupported_reason(model)
        assert isinstance(reason, str)
        assert len(reason) > 5
        found = generated(model)
        assert found == by_the_loop_of_transformers(generated, model)
        if name != "autocast":  # in which two ways differ
            assert found == naive(model)
    assert before


# ---- Frozen ----
def by_numpy(weight):
    weight.detach().numpy()[9, 9:12] += 40.0


@pytest.mark.parametrize("end", ["release", "train"])
def test_weights_are_compared_again_after_freezing(needs_engine, end):
    model = new_model()
    engine.freeze(model)
    before = generated(model)
    by_numpy(model.model.decoder.layers[1].feed_forward.fc2.weight.t())
    assert generated(model) == before, "a frozen model isn't looked at"
    if end == "release":
        engine.release(model)
    else:
        model.train()
        model.eval()
    after = generated(model)
    assert after == naive(model) != before
    by_numpy(model.lm_head.weight)
    assert generated(model) == naive(model) != after, "the promise has ended"


def test_freezing_ends_with_the_step_of_an_optimizer(needs_engine):
    """torch counts these writes, which costs nothing to read."""
    model = new_model()
    engine.freeze(model)
    before = generated(model)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(3, 0))
    assert generated(model) == naive(model) != before


@pytest.mark.parametrize("freezing", [engine.freeze, engine.frozen])
@pytest.mark.parametrize("write", [by_numpy, lambda weight: weight.data[9, 9:12].add_(40.0)])
def test_a_change_before_freezing_counts(needs_engine, freezing, write):
    """torch counts neither of these writes, so a frozen model would keep what was prepared before them."""
    model = new_model()
    before = generated(model)
    write(model.lm_head.weight)
    with freezing(model) or contextlib.nullcontext():
        assert generated(model) == naive(model) != before


def test_freezing_a_model_before_it_has_generated_and_twice(needs_engine):
    model = new_model()
    engine.freeze(model)
    engine.freeze(model)
    assert engine.unsupported_reason(model) is None
    assert generated(model) == naive(model)
    engine.release(model)
    engine.release(model)
    by_numpy(model.lm_head.weight)
    assert generated(model) == naive(model)


def test_a_copy_of_a_frozen_model_is_not_frozen(needs_engine):
    model = new_model()
    engine.freeze(model)
    before = generated(model)
    other = copy.deepcopy(model)
    assert generated(other) == before
    by_numpy(other.lm_head.weight)
    assert generated(other) == naive(other) != before
    assert generated(model) == before


def test_release_of_what_is_not_held(needs_engine):
    engine.release(new_model())
    model = new_model()
    model.train()
    engine.release(model)


# ---- Memory ----
def bytes_of_tensors():
    """What Python's tensors take, oneDNN's too; what the engine keeps is among them or in the process's memory."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return sum(one.nelement() * one.element_size() for one in tensors)


def resident_memory():
    """Bytes of this process, after freed ones have gone back to the system."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss


def large_model():
    """One of 20 million parameters, 80 MB."""
    sizes = {"vocab_size": 8000, "d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
    return lively_model(**sizes, encoder_layers=2, decoder_layers=3)


ENDS = {
    "release": lambda model: engine.release(model),
    "train": lambda model: model.train(),
    "release after freezing": lambda model: engine.release(model),
}


@pytest.mark.parametrize("end", ENDS)
def test_memory_is_let_go_of(needs_engine, end):
    generated(new_model())  # what is made once a process
    model = new_model()
    if "freezing" in end:
        engine.freeze(model)
    before = bytes_of_tensors()
    generated(model)
    held = bytes_of_tensors() - before
    ENDS[end](model)
    left = bytes_of_tensors() - before
    assert left <= max(0.05 * held, 4096), f"{left} of {held} bytes are held on"


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_resident_memory_is_let_go_of(needs_engine, end):
    model = large_model()
    if "freezing" in end:
        engine.freeze(model)
    size = sum(parameter.nbytes for parameter in model.parameters())
    before = resident_memory()
    model.generate(BATCH["input_ids"], max_new_tokens=3)
    held = resident_memory() - before
    ENDS[end](model)
    left = resident_memory() - before
    assert left < 0.25 * size, f"{left / size:.2f} of the parameters' size are held on, of {held / size:.2f}"


def test_a_model_is_not_kept_alive(needs_engine):
    model = new_model()
    before = bytes_of_tensors()
    size = sum(parameter.nbytes for parameter in model.parameters())
    engine.freeze(model)
    generated(model)
    reference, weight = weakref.ref(model), weakref.ref(model.lm_head.weight)
    del model
    left = bytes_of_tensors() - before
    assert reference() is None
    assert weight() is None
    assert left <= -0.9 * size


# ---- Outputs ----
@pytest.mark.parametrize("num_beams", [1, 3])
def test_fields_of_the_output(num_beams):
    options = {**BATCH, "num_beams": num_beams, "max_new_tokens": 6, "return_dict_in_generate": True}
    for scores in (False, True):
        model = new_model()
        found = model.generate(**options, output_scores=scores)
        expected = by_the_loop_of_transformers(model.generate, **options, output_scores=scores)
        assert isinstance(found, type(expected))
        fields = {name for name, value in found.items() if value is not None} - {"past_key_values"}
        missing = {name for name, value in expected.items() if value is not None} - {"past_key_values"} - fields
        assert not missing
        assert torch.equal(found.sequences, expected.sequences)
        if num_beams > 1:
            assert torch.equal(found.beam_indices, expected.beam_indices)
        if num_beams > 1 and scores:
            torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_return_sequences", [1, 3])
def test_scores_of_hypotheses_are_those_of_transformers(num_return_sequences):
    model = new_model().double()
    options = {**BATCH, "num_beams": 3, "num_return_sequences": num_return_sequences, "max_new_tokens": 6}
    options["return_dict_in_generate"] = True
    found = model.generate(**options)
    expected = by_the_loop_of_transformers(model.generate, **options, output_scores=True)
    assert torch.equal(found.sequences, expected.sequences)
    if found.sequences_scores is not None:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-6, rtol=0)


# ---- max_length ----
ENDLESS = {"suppress_tokens": [2]}
SOURCE = torch.tensor([SOURCES[1]])  # 4 tokens: up to 54 by `max_extra_length`
TO_THE_END = 1 + len(SOURCES[1]) + 50


def length_of(model, **options):
    return model.generate(SOURCE, **ENDLESS, **options).shape[1]


@pytest.fixture
def warnings_of_generation(monkeypatch, caplog):
    """What generation warns of; each warning is new in each test."""
    generation.logger.warning_once.cache_clear()
    monkeypatch.setattr(generation.logger, "propagate", True)
    caplog.set_level(logging.WARNING)
    return lambda: [one.getMessage() for one in caplog.records if "max_length" in one.getMessage()]


@pytest.mark.parametrize("num_beams", [1, 4])
def test_max_length_that_the_user_sets_counts(num_beams):
    model = new_model()
    assert length_of(model, num_beams=num_beams) == TO_THE_END
    assert length_of(model, num_beams=num_beams, max_length=20) == 20
    config = GenerationConfig(max_length=20, num_beams=num_beams, decoder_start_token_id=1, pad_token_id=PAD)
    assert length_of(model, generation_config=config) == 20
    assert length_of(model, num_beams=num_beams) == TO_THE_END


def test_max_length_of_generation_config_json_counts(tmp_path, warnings_of_generation):
    model = new_model()
    model.generation_config.max_length = 20
    assert length_of(model) == 20
    loaded = from_pretrained(model, tmp_path)
    assert loaded.generation_config.max_length == 20
    assert length_of(loaded) == 20
    assert not warnings_of_generation()


@pytest.mark.parametrize("num_beams", [1, 4])
def test_max_length_that_a_trainer_filled_in_does_not_count(tmp_path, num_beams, warnings_of_generation):
    model = new_model()
    model.generation_config.num_beams = num_beams
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, report_to="none", use_cpu=True, disable_tqdm=True
    )
    example = {"input_ids": SOURCES[1], "labels": SOURCES[1]}

    def collate(rows):
        return {name: torch.tensor([row[name] for row in rows]) for name in example}

    Seq2SeqTrainer(model, arguments, data_collator=collate).predict([example])
    assert model.generation_config.max_length == 20, "transformers no longer does that; this test can go"
    assert length_of(model) == TO_THE_END
    assert length_of(model, max_length=20) == 20
    assert not warnings_of_generation()


def test_max_length_beside_some_defaults_counts_and_is_warned_of_once(warnings_of_generation):
    model = new_model()
    model.generation_config.update(max_length=20, temperature=1.0, top_k=50)
    assert [length_of(model) for _ in range(3)] == [20] * 3
    assert len(warnings_of_generation()) == 1


def test_arrays_are_no_tensors_of_ours(needs_engine):
    """Reading the weights by numpy neither locks nor copies them."""
    model = new_model()
    array = model.lm_head.weight.detach().numpy()
    generated(model)
    assert np.shares_memory(array, model.lm_head.weight.detach().numpy())
    assert array.flags.writeable
