"""What the end of a run needs is checked before its first update; `--dry-run` stops there and leaves nothing."""

import re
from pathlib import Path

import pytest
import torch
from small_runs import add_callback
from transformers import TrainerCallback

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.checkpoints.completeness import checkpoints_in
from hf_vanilla_transformer.training import finish
from hf_vanilla_transformer.training.evaluation import TranslationMetrics
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
        ({"encoder_layers": 10**6}, "at most 1,000 layers"),
        ({"lr_scheduler_kwargs": {"timescale": 0}, "warmup_steps": 3}, "division by zero"),
        ({"lr_scheduler_kwargs": {"timescale": "inf"}, "warmup_steps": 3}, "give a factor of nan"),
    ],
)  # fmt: skip
def test_what_would_fail_at_the_end(refused, changes, message):
    assert message in refused(changes)


@pytest.mark.parametrize("part", ["validation", "test"])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"neun\n\xff\n", ":2: not UTF-8"), (b"neun\n", "ends after line 1"), (b"", "the file is empty")],
)
def test_every_line_of_the_data(refused, recipe, part, content, message):
    file = Path(recipe["data_dir"], recipe[f"{part}_target"][0])
    file.write_bytes(content)
    error = refused({})
    assert file.name in error
    assert message in error


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (VanillaTransformerForConditionalGeneration, "generate"),
        (TranslationMetrics, "__call__"),
        (VanillaTransformerTrainer, "save_model"),
    ],
)
def test_each_step_of_the_end_is_rehearsed(refused, monkeypatch, target, name):
    def fail(*args, **kwargs):
        raise ValueError("of the test")

    monkeypatch.setattr(target, name, fail)
    assert "the run can't be completed with these options: of the test" in refused({})


def test_the_rehearsal_changes_nothing(train, recipe, monkeypatch):
    from safetensors.torch import load_file

    weights = []
    for rehearsed in (True, False):
        if not rehearsed:
            monkeypatch.setattr("hf_vanilla_transformer.training.run.preflight", lambda *_: None)
        assert train({**recipe, "output_dir": recipe["output_dir"] + str(rehearsed)}).code == 0
        weights.append(load_file(Path(recipe["output_dir"] + str(rehearsed), "model.safetensors")))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# ---- Dry run ----
def test_a_dry_run_describes_and_leaves_nothing(train, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "finish_run", lambda *_: pytest.fail("it finished"))
    before = {path.name for path in tmp_path.rglob("*")} | {"recipe.yaml"}
    result = train(recipe, "--dry-run")
    assert result.code == 0, result.err
    parts = ("parameters, vocabulary of", "Updates: ", " per epoch, 4 in all", "  source: ", "  target: ")
    assert all(one in result.out for one in (*parts, "Memory of the process after 4 updates: ", "Time of an update: "))
    assert {path.name for path in tmp_path.rglob("*")} == before


def test_a_dry_run_resumes_nothing(train, finished):
    folder = Path(finished["output_dir"])
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    result = train(finished, "--resume", "--dry-run")
    assert (result.code, "leave --resume out" in result.error) == (2, True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


def test_a_dry_run_of_a_stream(train, recipe):
    result = train({**recipe, "streaming": True, "shuffle_buffer_size": 20}, "--dry-run")
    assert result.code == 0
    assert "Updates: unknown per epoch, 4 in all" in result.out


# ---- White space ----
@pytest.mark.parametrize("streaming", [False, True])
def test_pairs_of_white_space_are_left_out_and_counted(train, recipe, streaming):
    for side, blank in (("en", " "), ("de", " \t\u3000")):
        file = Path(recipe["data_dir"], f"train.{side}")
        lines = file.read_text().splitlines()
        lines[3 if side == "en" else 7] = blank
        file.write_text("".join(f"{line}\n" for line in lines))
    result = train({**recipe, "streaming": streaming, "shuffle_buffer_size": 50, "average_last": 0})
    assert result.code == 0
    counted = re.search(r"(\d+) with an empty side", result.out)  # a stream is read more than once
    assert counted
    assert int(counted[1]) == 2 or (streaming and int(counted[1]) % 2 == 0)


# ---- A full disk ----
def test_a_checkpoint_that_cannot_be_saved(train, recipe, monkeypatch):
    import safetensors.torch

    plain = VanillaTransformerTrainer._save_optimizer_and_scheduler

    def fail(self, folder):
        if folder.endswith("checkpoint-4"):
            Path(folder, "optimizer.pt").write_bytes(b"half of it")
            raise RuntimeError("PytorchStreamWriter failed writing file data/7: file write failed")
        plain(self, folder)

    monkeypatch.setattr(VanillaTransformerTrainer, "_save_optimizer_and_scheduler", fail)
    result = train({**recipe, "save_total_limit": 2})
    assert result.code == 1
    assert (
        "checkpoint-4 can't be saved (PytorchStreamWriter failed writing file data/7: file write failed)" in result.err
    )
    assert "if the disk is full" in result.err
    assert [checkpoint.name for checkpoint in checkpoints_in(Path(recipe["output_dir"]))] == ["checkpoint-2"]
    monkeypatch.undo()
    assert train(recipe, "--resume").code == 0
    assert safetensors.torch.load_file(Path(recipe["output_dir"], "model.safetensors"))


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
    changed = {"recipe.json"}
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in before.keys() - changed)
    monkeypatch.undo()
    assert train(finished, "--resume", "--max-steps", "6").code == 0
    assert (folder / "model.safetensors").read_bytes() != before["model.safetensors"]
