"""Translating, scoring, training and averaging on a device, compared with the CPU in float32."""

from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file
from small_runs import recipe_in
from transformers import AutoTokenizer, DataCollatorForSeq2Seq

from hf_vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.checkpoints.averaging import average_checkpoints
from hf_vanilla_transformer.cli import main
from hf_vanilla_transformer.training.arguments import VanillaTransformerTrainingArguments
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer
from hf_vanilla_transformer.translation.ensembles import ensemble
from hf_vanilla_transformer.translation.scoring import score_targets
from hf_vanilla_transformer.translation.translator import DeviceError
from tests.decoding import decode

SOURCES = ["half past nine", "it", "three euros and five cents", "", "the fourth of May"]
TARGETS = ["halb zehn", "es", "drei Euro und fünf Cent", "", "der vierte Mai"]
LIMIT = {"max_extra_length": 8}
ROUNDING = 1e-4  # relatively: float32 sums in another order


def test_a_translator_returns_the_cpus_translations(tiny_checkpoint, device):
    expected, found = (Translator(tiny_checkpoint, where) for where in ("cpu", device))
    assert found.device.type == device.type
    for num_beams in (1, 4):
        texts = expected(SOURCES, num_beams=num_beams, **LIMIT)
        assert len(set(texts)) > 2
        assert found(SOURCES, num_beams=num_beams, **LIMIT) == texts


@pytest.mark.gpu
def test_a_translator_takes_cuda_where_there_is_one_and_no_other_device(tiny_checkpoint):
    assert Translator(tiny_checkpoint).device.type == "cuda"
    with pytest.raises(DeviceError, match=r"device cuda:99 can't be used here .*; try cpu"):
        Translator(tiny_checkpoint, "cuda:99")


def test_likelihoods_and_ensembles_are_the_cpus(tiny_checkpoint, device):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    models = [VanillaTransformerForConditionalGeneration.from_pretrained(tiny_checkpoint) for _ in range(2)]
    for parameter in models[1].parameters():
        parameter.data *= 1.1
    both = ensemble(models, [tokenizer] * 2)
    expected = [score_targets(model, tokenizer, SOURCES, TARGETS) for model in (models[0], both)]
    translations = decode(both, tokenizer, SOURCES, num_beams=4, max_new_tokens=12)
    both = ensemble([model.to(device) for model in models], [tokenizer] * 2)
    found = [score_targets(model, tokenizer, SOURCES, TARGETS) for model in (models[0], both)]
    for one, other in zip(found, expected, strict=True):
        assert one.num_tokens == other.num_tokens
        assert one.negative_log_probability == pytest.approx(other.negative_log_probability, rel=ROUNDING)
    assert decode(both, tokenizer, SOURCES, num_beams=4, max_new_tokens=12) == translations


def trained(checkpoint: Path, folder: Path, device: torch.device, **options) -> VanillaTransformerTrainer:
    """A run of three updates without dropout, which saves after each."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    arguments = VanillaTransformerTrainingArguments(
        output_dir=str(folder), use_cpu=device.type == "cpu", max_steps=3, save_steps=1, learning_rate=0.01,
        warmup_steps=1, per_device_train_batch_tokens=64, logging_steps=1, disable_tqdm=True, report_to="none",
        predict_with_generate=False, **options,
    )  # fmt: skip
    trainer = VanillaTransformerTrainer(
        model=VanillaTransformerForConditionalGeneration.from_pretrained(checkpoint, dropout=0.0),
        args=arguments,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        train_dataset=Dataset.from_dict(dict(tokenizer(SOURCES * 4, text_target=TARGETS * 4))),
    )
    trainer.train()
    assert trainer.model.device.type == device.type
    return trainer


def losses(trainer: VanillaTransformerTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_updates_are_the_cpus_and_checkpoints_are_averaged(tiny_checkpoint, device, tmp_path, bf16):
    expected = trained(tiny_checkpoint, tmp_path / "cpu", torch.device("cpu"), training_shortcuts=False)
    found = trained(tiny_checkpoint, tmp_path / "run", device, training_shortcuts=True, bf16=bf16)
    assert losses(found) == pytest.approx(losses(expected), rel=0.02 if bf16 else ROUNDING)
    assert losses(found)[2] < losses(found)[0]
    assert {parameter.dtype for parameter in found.model.parameters()} == {torch.float32}
    if bf16:
        return
    checkpoints = [tmp_path / "run" / f"checkpoint-{step}" for step in (2, 3)]
    average_checkpoints(checkpoints, tmp_path / "mean")
    mean, *weights = (load_file(folder / "model.safetensors") for folder in (tmp_path / "mean", *checkpoints))
    for name, value in mean.items():
        torch.testing.assert_close(value, (weights[0][name] + weights[1][name]) / 2)
    texts = [Translator(tmp_path / "mean", where)("half past nine", **LIMIT) for where in (device, "cpu")]
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(  # on a CPU, tests/cli has it too
    "device", [pytest.param("cpu", marks=pytest.mark.hard), pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_the_command_trains_resumes_evaluates_and_averages(device, tmp_path, capsys):
    """All of a run: the trial before it, checkpoints, the random numbers they keep, scores, and the model card."""
    recipe = recipe_in(tmp_path) | {"eval_strategy": "steps", "eval_steps": 2, "generation_max_length": 12}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = ["train", "--config", str(tmp_path / "recipe.yaml"), "--use-cpu", str(device.type == "cpu")]
    assert not main(command)
    assert not main([*command, "--resume", "--max-steps", "6"])
    assert "checkpoint-4" in capsys.readouterr().out
    assert not main([*command, "--dry-run"])
    output = capsys.readouterr().out
    assert "Memory of the process" in output
    assert ("Peak memory of the GPU" in output) == (device.type == "cuda")
    options = {**LIMIT, "min_new_tokens": 3}
    texts = [Translator(tmp_path / "run", where)("half past nine", **options) for where in ("cpu", device)]
    assert texts[0] == texts[1]
