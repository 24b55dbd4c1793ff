"""The trainer with shortcuts: they are in while it trains and at no other time, and change nothing that it computes."""

import peft
import pytest
import torch
from test_training import losses, rows, trainer_of, without_dropout
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, TrainerCallback

from hf_vanilla_transformer.engine.training import shortcuts
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer


def has_shortcuts(model) -> bool:
    """Whether the shortcuts are in a model."""
    is_in = model.config._attn_implementation == shortcuts.SDPA_IN_FLOAT32
    assert is_in == ("loss_of_targets" in vars(model))
    return is_in


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
def test_shortcuts_are_in_while_training_and_change_no_loss(tiny_checkpoint, tmp_path, monkeypatch, options):
    found = []
    compute, steps = shortcuts.projected_cross_entropy, []
    monkeypatch.setattr(shortcuts, "projected_cross_entropy", lambda *given: steps.append(1) or compute(*given))
    for uses in (True, False):
        folder, saving = tmp_path / str(uses), {"save_strategy": "steps", "save_steps": 3}
        trainer = mixed_batches(tiny_checkpoint, folder, training_shortcuts=uses, **saving, **options)
        trainer.add_callback(watch := Watch())
        trainer.train()
        assert watch.seen == [uses] * 3
        assert len(steps) == (5 if "gradient_accumulation_steps" in options else 3)  # batches; an epoch has five
        assert not has_shortcuts(trainer.model)
        saved = AutoModelForSeq2SeqLM.from_pretrained(folder / "checkpoint-3")
        assert all(torch.equal(saved.get_parameter(name), one) for name, one in trainer.model.named_parameters())
        assert saved.config.architectures == ["VanillaTransformerForConditionalGeneration"]
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=1e-2 if options.get("bf16") else 1e-5)


@pytest.mark.parametrize("moment", ["forward", "evaluation"])
def test_an_exception_takes_them_out(tiny_checkpoint, tmp_path, moment):
    def fail(*args):
        if moment == "evaluation" or trainer.state.global_step == 1:
            raise KeyError(moment)

    options = {"eval_strategy": "steps", "eval_steps": 1, "compute_metrics": fail}
    options["eval_dataset"] = rows(AutoTokenizer.from_pretrained(tiny_checkpoint), 4)
    trainer = mixed_batches(tiny_checkpoint, tmp_path, **(options if moment == "evaluation" else {}))
    if moment == "forward":
        trainer.model.model.encoder.layers[1].feed_forward.fc1.register_forward_hook(fail)
    with pytest.raises(KeyError, match=moment):
        trainer.train()
    assert not has_shortcuts(trainer.model)


def test_a_model_made_by_model_init(tiny_checkpoint, tmp_path):
    example = trainer_of(tiny_checkpoint, tmp_path)
    parts = {"processing_class": example.processing_class, "data_collator": example.data_collator}
    trainer = VanillaTransformerTrainer(
        model_init=lambda: AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint), args=example.args,
        train_dataset=example.train_dataset, **parts,
    )  # fmt: skip
    trainer.add_callback(watch := Watch())
    trainer.train()
    assert watch.seen == [True] * 4
    assert not has_shortcuts(trainer.model)


@pytest.mark.parametrize("wrapped", [True, False], ids=["PeftModel", "adapter"])
def test_lora_learns(tiny_checkpoint, tmp_path, wrapped):
    trainer, targets = mixed_batches(tiny_checkpoint, tmp_path, max_steps=2), ["lm_head", "q_proj", "v_proj"]
    settings = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False)
    if wrapped:
        model = peft.get_peft_model(AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint), settings)
        trainer = VanillaTransformerTrainer(
            model=model, args=trainer.args, processing_class=trainer.processing_class,
            data_collator=trainer.data_collator, train_dataset=trainer.train_dataset,
        )  # fmt: skip
    else:
        peft.inject_adapter_in_model(settings, trainer.model)  # add_adapter without its check of PEFT's version
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert {name.split(".lora_")[0].split(".")[-1] for name in moved} == {*targets}
