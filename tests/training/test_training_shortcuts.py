"""The trainer with shortcuts: they are in while it trains and at no other time, and change nothing that it computes."""

import copy
import json

import peft
import pytest
import torch
from test_training import losses, rows, trainer_of, without_dropout
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, TrainerCallback

from hf_vanilla_transformer.engine.training import shortcuts
from hf_vanilla_transformer.engine.training.layers import FAST_LAYERS
from hf_vanilla_transformer.training.recipe import VanillaTransformerTrainingArguments
from hf_vanilla_transformer.training.trainer import TranslationMetrics, VanillaTransformerTrainer


def has_shortcuts(model) -> bool:
    """Whether anything of the shortcuts is in a model."""
    layers = any(type(module) in FAST_LAYERS.values() for module in model.modules())
    hooks = any(hook is shortcuts._add_shortcuts for hook in model._forward_pre_hooks.values())
    assert layers == hooks == ("loss_of_targets" in vars(model))
    return layers


class Watch(TrainerCallback):
    """Notes at each step whether the shortcuts are in the model."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(has_shortcuts(model))


def mixed_batches(checkpoint, tmp_path, **options):
    """A trainer without dropout whose batches have padding on both sides."""
    options = {"per_device_train_batch_tokens": 0, "per_device_train_batch_size": 8, "max_steps": 3, **options}
    trainer = trainer_of(checkpoint, tmp_path, **options)
    without_dropout(trainer.model)
    return trainer


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_shortcuts_are_in_while_training_and_change_no_loss(tiny_checkpoint, tmp_path, options):
    found = []
    for uses in (True, False):
        trainer = mixed_batches(tiny_checkpoint, tmp_path / str(uses), training_shortcuts=uses, **options)
        trainer.add_callback(watch := Watch())
        trainer.train()
        assert watch.seen == [uses] * 3
        assert not has_shortcuts(trainer.model)
        found.append(losses(trainer))
    assert not shortcuts._installations
    assert found[0] == pytest.approx(found[1], rel=1e-2 if options.get("bf16") else 1e-5)


def test_every_step_takes_them(tiny_checkpoint, tmp_path, monkeypatch):
    plans, find = [], shortcuts.shortcuts_of_call

    def record(*arguments):
        plans.append(find(*arguments))
        return plans[-1]

    monkeypatch.setattr(shortcuts, "shortcuts_of_call", record)
    for bf16 in (False, True):  # for which accelerate wraps `forward`
        plans.clear()
        mixed_batches(tiny_checkpoint, tmp_path, bf16=bf16).train()
        assert [(len(plan.layers), plan.fuses_loss, bool(plan.source)) for plan in plans] == [(4, True, True)] * 3


def test_evaluations_and_checkpoints_see_the_plain_model(tiny_checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    seen, metrics = [], TranslationMetrics(tokenizer)

    def compute_metrics(predictions):
        seen.append((has_shortcuts(trainer.model), {type(layer) for layer in trainer.model.model.encoder.layers}))
        return metrics(predictions)

    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2}
    trainer = mixed_batches(
        tiny_checkpoint, tmp_path, eval_dataset=rows(tokenizer, 4), compute_metrics=compute_metrics, max_steps=2,
        predict_with_generate=True, generation_num_beams=1, generation_max_length=5, **options,
    )  # fmt: skip
    trainer.add_callback(watch := Watch())
    plain = {type(layer) for layer in trainer.model.model.encoder.layers}
    trainer.train()
    assert watch.seen == [True, True]
    assert seen == [(False, plain)] * 2
    saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "checkpoint-2")
    assert {type(layer) for layer in saved.model.encoder.layers} == plain
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(saved.get_parameter(name), parameter)
    config = json.loads((tmp_path / "checkpoint-2" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["VanillaTransformerForConditionalGeneration"]


@pytest.mark.parametrize("moment", ["forward", "callback", "evaluation"])
def test_an_exception_takes_them_out(tiny_checkpoint, tmp_path, moment):
    class Fail(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2 and moment == "callback":
                raise KeyError(moment)

    def fail(*args):
        if trainer.state.global_step == 1 and moment == "forward":
            raise KeyError(moment)

    def compute_metrics(predictions):
        raise KeyError(moment)

    options = {"eval_strategy": "steps", "eval_steps": 1, "compute_metrics": compute_metrics}
    data = rows(AutoTokenizer.from_pretrained(tiny_checkpoint), 4)
    trainer = mixed_batches(
        tiny_checkpoint, tmp_path, **(options | {"eval_dataset": data} if moment == "evaluation" else {})
    )
    trainer.add_callback(Fail())
    trainer.model.model.encoder.layers[1].feed_forward.fc1.register_forward_hook(fail)
    with pytest.raises(KeyError, match=moment):
        trainer.train()
    assert not has_shortcuts(trainer.model)
    assert not shortcuts._installations


def test_a_model_made_by_model_init(tiny_checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    example = trainer_of(tiny_checkpoint, tmp_path)
    trainer = VanillaTransformerTrainer(
        model_init=lambda: AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint), args=example.args,
        processing_class=tokenizer, data_collator=DataCollatorForSeq2Seq(tokenizer), train_dataset=rows(tokenizer),
    )  # fmt: skip
    trainer.add_callback(watch := Watch())
    trainer.train()
    assert watch.seen == [True] * 4
    assert not has_shortcuts(trainer.model)


PLACES = [
    "model.encoder.layers.0", "model.encoder.layers.1.self_attn", "model.encoder.layers.0.feed_forward",
    "model.decoder.layers.0.encoder_attn.k_proj", "model.decoder.layers.1.final_layer_norm",
    "model.decoder.layers.0.feed_forward.dropout", "model.decoder.layers.1.feed_forward.activation",
    "model.encoder", "model.decoder.layers.0.self_attn_layer_norm.dropout",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_hooks_see_whole_batches(tiny_checkpoint, tmp_path, place):
    trainer, seen, batches = mixed_batches(tiny_checkpoint, tmp_path), [], []

    def note(module, args, kwargs, output):
        output = output if isinstance(output, torch.Tensor) else output[0]
        seen.append((output.ndim, *output.shape[:2]))

    def note_batch(module, args, kwargs):
        side = "input_ids" if "encoder" in place else "labels"
        batches.append((3, *kwargs[side].shape))
        assert (kwargs["labels"] == -100).any()

    trainer.model.get_submodule(place).register_forward_hook(note, with_kwargs=True)
    trainer.model.register_forward_pre_hook(note_batch, with_kwargs=True)
    trainer.train()
    assert seen == batches


def test_a_global_hook_sees_every_linear_map(tiny_checkpoint, tmp_path):
    trainer, seen = mixed_batches(tiny_checkpoint, tmp_path, max_steps=2), []
    linear = [module for module in trainer.model.modules() if type(module) is nn.Linear]
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        trainer.train()
    finally:
        handle.remove()
    assert sum(type(module) is nn.Linear for module in seen) == 2 * len(linear)


def test_a_patch_of_linear_maps_counts(tiny_checkpoint, tmp_path, monkeypatch):
    original, found = nn.Linear.forward, []
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 1.5 * original(self, x))
    for uses in (True, False):
        trainer = mixed_batches(tiny_checkpoint, tmp_path / str(uses), training_shortcuts=uses)
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == found[1]


def test_flops_are_counted(tiny_checkpoint, tmp_path):
    totals = []
    for uses in (True, False):
        trainer = mixed_batches(tiny_checkpoint, tmp_path / str(uses), training_shortcuts=uses, max_steps=1)
        with FlopCounterMode(display=False) as counter:
            trainer.train()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_a_projection_without_a_weight_trains(tiny_checkpoint, tmp_path):
    found = []
    for uses in (True, False):
        trainer = mixed_batches(tiny_checkpoint, tmp_path / str(uses), training_shortcuts=uses)
        for stack in (trainer.model.model.encoder, trainer.model.model.decoder):
            attention = stack.layers[0].self_attn
            attention.q_proj = nn.Sequential(attention.q_proj, nn.Tanh())
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "v_proj"]], ids=str)
@pytest.mark.parametrize("wrapped", [True, False], ids=["PeftModel", "adapter"])
def test_lora_learns(tiny_checkpoint, tmp_path, targets, wrapped):
    trainer = mixed_batches(tiny_checkpoint, tmp_path)
    settings = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False)
    if wrapped:
        model = peft.get_peft_model(AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint), settings)
        trainer = VanillaTransformerTrainer(
            model=model, args=trainer.args, processing_class=trainer.processing_class,
            data_collator=trainer.data_collator, train_dataset=trainer.train_dataset,
        )  # fmt: skip
    else:
        trainer.model.add_adapter(settings)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert len(moved) > 1


def test_a_copy_made_while_training_is_plain(tiny_checkpoint, tmp_path):
    class Copy(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                kept.append((copy.deepcopy(model), {n: p.detach().clone() for n, p in model.named_parameters()}))

    kept = []
    trainer = mixed_batches(tiny_checkpoint, tmp_path)
    trainer.add_callback(Copy())
    trainer.train()
    ((twin, weights),) = kept
    ids = torch.tensor([[5, 6, 7]])
    assert twin.eval()(ids, labels=ids).loss > 0
    assert not has_shortcuts(twin)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in twin.named_parameters())


def test_a_second_run_of_the_same_trainer(tiny_checkpoint, tmp_path):
    trainer = mixed_batches(tiny_checkpoint, tmp_path)
    trainer.add_callback(watch := Watch())
    trainer.train()
    trainer.train()
    assert watch.seen == [True] * 6
    assert not has_shortcuts(trainer.model)


def test_the_example_of_the_docs(tiny_checkpoint, tmp_path):
    """Nothing but the defaults: the trainer owns the paper's schedule."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    args = {"per_device_train_batch_tokens": 4096, "output_dir": str(tmp_path)}
    trainer = VanillaTransformerTrainer(
        model=AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint),
        args=VanillaTransformerTrainingArguments(**args, max_steps=2, save_strategy="no", logging_steps=1),
        train_dataset=rows(tokenizer),
        eval_dataset=rows(tokenizer, 3),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        compute_metrics=TranslationMetrics(tokenizer),
    )
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.0, 32**-0.5 * 4000**-1.5])
