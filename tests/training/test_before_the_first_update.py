"""What the end of a run needs is checked before its first update; `--dry-run` stops there and leaves nothing."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import add_callback
from test_training import trainer_of
from transformers import AutoTokenizer, TrainerCallback

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.checkpoints.completeness import checkpoints_in
from hf_vanilla_transformer.training import finish
from hf_vanilla_transformer.training.evaluation import TranslationMetrics
from hf_vanilla_transformer.training.options import RecipeError
from hf_vanilla_transformer.training.preflight import preflight
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer

try:
    import resource
except ImportError:  # Windows
    resource = None


@pytest.fixture
def refused(train, recipe, monkeypatch):
    """Checks that a recipe is refused before any update, and returns the error."""

    def refuse(changes, *options):
        with monkeypatch.context() as patch:
            patch.setattr(VanillaTransformerTrainer, "train", lambda *_, **__: pytest.fail("it trained"))
            result = train({**recipe, **changes}, *options)
        assert result.code == 2, result.err
        assert not checkpoints_in(Path(recipe["output_dir"]))
        return result.error

    return refuse


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bleu_tokenize": "13b"}, "bleu_tokenize is '13b'"),
        ({"bleu_tokenize": "flores200"}, "bleu_tokenize is 'flores200'"),
    ],
)
def test_what_would_fail_at_the_end(refused, changes, message):
    assert message in refused(changes)


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("validation", b"neun\n\xff\n", ":2: not UTF-8"),
        ("test", b"neun\n", "ends after line 1"),
        ("test", b"", "the file is empty"),
    ],
)
def test_every_line_of_the_data(refused, recipe, part, content, message):
    file = Path(recipe["data_dir"], recipe[f"{part}_target"][0])
    file.write_bytes(content)
    error = refused({})
    assert file.name in error
    assert message in error


def rehearsed(checkpoint, folder, **options):
    """A trainer that would translate and score."""
    metrics = TranslationMetrics(AutoTokenizer.from_pretrained(checkpoint))
    return trainer_of(checkpoint, folder, compute_metrics=metrics, predict_with_generate=True, **options)


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (VanillaTransformerForConditionalGeneration, "generate"),
        (TranslationMetrics, "__call__"),
        (VanillaTransformerTrainer, "save_model"),
    ],
)
def test_each_step_of_the_end_is_rehearsed(tiny_checkpoint, tmp_path, monkeypatch, target, name):
    def fail(*args, **kwargs):
        raise ValueError("of the test")

    trainer = rehearsed(tiny_checkpoint, tmp_path)
    monkeypatch.setattr(target, name, fail)
    with pytest.raises(RecipeError, match="the run can't be completed with these options: of the test"):
        preflight(trainer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scheduler_kwargs": {"timescale": float("inf")}, "warmup_steps": 3}, "give a factor of nan"),
        ({"lr_scheduler_kwargs": {"timescale": 0}, "warmup_steps": 3}, "with these options: division by zero"),
        ({"optim": "sgd", "optim_args": "momentum"}, "not enough values"),
        ({"optim": "sgd", "optim_args": "momentm=0.5"}, "SGD has no 'momentm'"),
        ({"optim": "adamw_8bit"}, "You need to install `bitsandbytes`"),
        ({"adam_beta1": 1.5}, "Invalid beta parameter at index 0: 1.5"),
        ({"lr_scheduler_kwargs": {"a": 1}}, "unexpected keyword argument 'a'"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "One of min_lr or min_lr_rate should be set"),
    ],
)
def test_the_rehearsal_builds_optimizer_and_schedule(tiny_checkpoint, tmp_path, options, message):
    """What transformers and torch complain of is told before the first update."""
    with pytest.raises(RecipeError, match=message):
        preflight(rehearsed(tiny_checkpoint, tmp_path, **options))


def test_the_rehearsal_changes_nothing(tiny_checkpoint, tmp_path):
    weights = []
    for is_rehearsed in (True, False):
        torch.manual_seed(1)
        trainer = rehearsed(tiny_checkpoint, tmp_path, max_steps=2)
        if is_rehearsed:
            preflight(trainer)
        trainer.train()
        weights.append((trainer.model.state_dict(), torch.rand(1)))
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert not [*tmp_path.iterdir()]


# ---- Dry run ----
def test_a_dry_run_describes_and_leaves_nothing(train, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "finish_run", lambda *_: pytest.fail("it finished"))
    for name in ("val.en", "val.de"):
        with (tmp_path / name).open("a") as file:
            file.write("\n")
    before = {path.name for path in tmp_path.rglob("*")} | {"recipe.yaml"}
    result = train(recipe, "--dry-run")
    assert result.code == 0, result.err
    parts = ("parameters, vocabulary of", "Updates: ", " per epoch, 4 in all", "  source: ", "  target: ")
    parts += ("Memory of the process after 4 updates: ", "Time of an update: ", "after the first, which took")
    parts += ("Time of all 4 updates: about ", "Validation data during training: 5 pairs kept, 1 left out: 1 with an")
    assert all(one in result.out for one in parts)
    assert {path.name for path in tmp_path.rglob("*")} == before
    both = {"tokenizer": ["characters", "words"], "tied": "decoder"}
    result = train({**recipe, **both, "streaming": True, "shuffle_buffer_size": 20}, "--dry-run")
    assert result.code == 0, result.err
    assert "Updates: unknown per epoch, 4 in all" in result.out
    assert re.search(r"parameters, vocabularies of \d+ \(source\) and \d+ \(target\)\n", result.out)
    assert "leave --resume out" in train(recipe, "--resume", "--dry-run").error


# ---- A full disk ----
def test_a_checkpoint_that_cannot_be_saved(train, recipe, monkeypatch):
    plain = VanillaTransformerTrainer._save_optimizer_and_scheduler

    def fail(self, folder):
        if folder.endswith("checkpoint-4"):
            Path(folder, "optimizer.pt").write_bytes(b"half of it")
            raise RuntimeError("PytorchStreamWriter failed writing file data/7: file write failed")
        plain(self, folder)

    monkeypatch.setattr(VanillaTransformerTrainer, "_save_optimizer_and_scheduler", fail)
    result = train({**recipe, "save_total_limit": 2})
    assert result.code == 1
    reason = "PytorchStreamWriter failed writing file data/7: file write failed"
    assert f"checkpoint-4 can't be saved ({reason})" in result.err
    assert "if the disk is full" in result.err
    assert [checkpoint.name for checkpoint in checkpoints_in(Path(recipe["output_dir"]))] == ["checkpoint-2"]
    monkeypatch.undo()
    assert train(recipe, "--resume").code == 0
    assert load_file(Path(recipe["output_dir"], "model.safetensors"))


class FullDisk(TrainerCallback):
    """From the end of training on, no file can have more than 10,000 bytes."""

    def on_train_end(self, args, state, control, **kwargs):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.skipif(resource is None, reason="needs limits of Unix")
def test_a_model_that_cannot_be_saved_leaves_the_old_one(train, finished, monkeypatch):
    folder = Path(finished["output_dir"])
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    add_callback(monkeypatch, FullDisk())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        result = train(finished, "--resume", "--max-steps", "6")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.code == 1
    assert "the model can't be saved in" in result.error
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert {**after, "recipe.json": ""} == {**before, "recipe.json": ""}
    monkeypatch.undo()
    assert train(finished, "--resume", "--max-steps", "6").code == 0
    assert (folder / "model.safetensors").read_bytes() != before["model.safetensors"]
