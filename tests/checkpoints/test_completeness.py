"""Checkpoints of the stock Trainer: complete ones, and those that a killed training or a full disk leaves."""

import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_runs import stock_trainer
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, TrainerState

from hf_vanilla_transformer.checkpoints import completeness as checkpoints
from hf_vanilla_transformer.checkpoints.completeness import (
    checkpoints_in,
    damage_of,
    last_complete_checkpoint,
    last_complete_checkpoints,
    step_of,
)


@pytest.fixture
def run(trained, tmp_path):
    """The same, to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def checkpoint(run):
    return run / "checkpoint-4"


@pytest.fixture
def sharded(checkpoint):
    """The last checkpoint with its weights in several files."""
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    model.save_pretrained(checkpoint, max_shard_size="40KB")
    assert len(list(checkpoint.glob("model-*.safetensors"))) > 2
    assert damage_of(checkpoint) is None
    return checkpoint


# What is there


def test_checkpoints_by_step(run, tmp_path):
    for nothing in (tmp_path, tmp_path / "nothing"):
        assert checkpoints_in(nothing) == []
        assert last_complete_checkpoint(nothing) is None
    (run / "checkpoint-10").mkdir()
    for name in ("checkpoint-", "checkpoint-5.tmp", "checkpoint-x", "my-checkpoint-6", "averaged-5"):
        (run / name).mkdir()
    (run / "checkpoint-7").write_text("a file")
    assert [folder.name for folder in checkpoints_in(run)] == [f"checkpoint-{n}" for n in (1, 2, 3, 4, 10)]
    assert [step_of(folder) for folder in checkpoints_in(run)] == [1, 2, 3, 4, 10]


# Cut short


FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "config.json", "trainer_state.json")


@pytest.mark.parametrize("name", [*FILES, *checkpoints.OPTIONAL_JSON])
def test_a_file_cut_anywhere(checkpoint, name):
    """Whatever the length, it is called damaged."""
    file = checkpoint / name
    if not file.exists():
        file.write_text(json.dumps({"some": {"more": ["values"]}}))
    content = file.read_bytes().rstrip() if file.suffix == ".json" else file.read_bytes()
    size = len(content)
    for length in {0, 1, 7, 8, 9, size // 3, size // 2, size - 8, size - 1} & {*range(size)}:
        file.write_bytes(content[:length])
        assert damage_of(checkpoint).startswith(name), length
    file.write_bytes(content)
    assert damage_of(checkpoint) is None


HEADERS = (b"[]", b"nonsense", b'{"a": 1}', b'{"a": {"data_offsets": ["x", "y"]}}', b'{"a": {}}')
OTHER_CONTENTS = {
    "config.json": [None],
    "optimizer.pt": [None],
    "scheduler.pt": [None],
    "rng_state.pth": [None],
    "trainer_state.json": [None, b"", b"[1, 2]", b"\xff\xfe", b"null", b"[" * 100_000],
    "tokenizer.json": [b"", b"[1, 2]", b"\xff\xfe"],
    # Of another format, and zeros, as a power cut leaves them.
    "model.safetensors": [None, *(len(one).to_bytes(8, "little") + one for one in HEADERS), bytes(100_000)],
}


@pytest.mark.parametrize("name", OTHER_CONTENTS)
def test_a_file_that_is_missing_or_something_else(checkpoint, name):
    for content in OTHER_CONTENTS[name]:
        (checkpoint / name).unlink() if content is None else (checkpoint / name).write_bytes(content)
        assert damage_of(checkpoint).startswith(name)


def test_the_state_of_another_step(run):
    (run / "checkpoint-4").rename(run / "checkpoint-40")
    assert damage_of(run / "checkpoint-40") == "trainer_state.json is of step 4"
    (run / "checkpoint-3").rename(run / "best")
    assert damage_of(run / "best") is None


def test_files_of_several_processes_and_of_float16(checkpoint):
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    for name in ("rng_state_1.pth", "scaler.pt"):
        shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / name)
    assert damage_of(checkpoint) is None
    for name in ("scaler.pt", "rng_state_1.pth", "rng_state_0.pth"):
        content = (checkpoint / name).read_bytes()
        os.truncate(checkpoint / name, 1000)
        assert damage_of(checkpoint).startswith(f"{name} can't be loaded")
        (checkpoint / name).write_bytes(content)


# Sharded weights


def test_every_shard_is_looked_at(sharded):
    for shard in sharded.glob("model-*.safetensors"):
        content = shard.read_bytes()
        for length in (0, 8, len(content) // 2, len(content) - 1):
            shard.write_bytes(content[:length])
            assert damage_of(sharded).startswith(shard.name)
        shard.unlink()
        assert damage_of(sharded) == f"{shard.name} is missing"
        shard.write_bytes(content)
    assert damage_of(sharded) is None


def test_an_index_that_does_not_fit(sharded):
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    first, second, *_ = sorted(set(index["weight_map"].values()))
    name = next(name for name, shard in index["weight_map"].items() if shard == first)
    file.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {name: second}}))
    assert damage_of(sharded) == f"{second} has no {name}, as model.safetensors.index.json says"
    for content in ("{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', json.dumps(index)[:-5], ""):
        file.write_text(content)
        assert damage_of(sharded).startswith("model.safetensors.index.json")
    (sharded / first).rename(sharded.parent / first)
    for place in (f"../{first}", f"{sharded.parent}/{first}", f"./{first}"):
        file.write_text(json.dumps(index | {"weight_map": index["weight_map"] | {name: place}}))
        assert "not a file beside it" in damage_of(sharded)


# Models alone


def test_models_alone_are_whole_but_not_to_resume(tiny_checkpoint, tmp_path):
    stock_trainer(tiny_checkpoint, tmp_path, max_steps=1, save_only_model=True).train()
    checkpoint = tmp_path / "checkpoint-1"
    assert damage_of(checkpoint, to_resume=False) is None
    assert damage_of(checkpoint).startswith("optimizer.pt is missing (save_only_model")
    assert last_complete_checkpoint(tmp_path) is None
    assert last_complete_checkpoint(tmp_path, to_resume=False) == checkpoint
    assert damage_of(tiny_checkpoint, to_resume=False) is None
    assert damage_of(tiny_checkpoint).startswith("trainer_state.json is missing")


# The last complete one


def test_the_last_few(run):
    assert [step_of(folder) for folder in last_complete_checkpoints(run, 2)] == [3, 4]
    os.truncate(run / "checkpoint-3" / "model.safetensors", 1000)
    assert [step_of(folder) for folder in last_complete_checkpoints(run, 3)] == [1, 2, 4]
    with pytest.raises(ValueError, match=r"3 complete checkpoints, not 4 \(checkpoint-1, checkpoint-2, checkpoint-4\)"):
        last_complete_checkpoints(run, 4)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        last_complete_checkpoints(run / "checkpoint-4", 1)


class Killed(BaseException):
    """Stands in for a signal: nothing of the Trainer's catches it."""


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (Seq2SeqTrainer, "_save_optimizer_and_scheduler"),
        (Seq2SeqTrainer, "_save_rng_state"),
        (TrainerState, "save_to_json"),
    ],
)
def test_a_training_killed_while_it_saves_goes_on(tiny_checkpoint, trained, tmp_path, monkeypatch, owner, method):
    original, calls = getattr(owner, method), []

    def killed_the_third_time(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise Killed
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, killed_the_third_time)
        with pytest.raises(Killed):
            stock_trainer(tiny_checkpoint, tmp_path).train()
    assert [step_of(folder) for folder in checkpoints_in(tmp_path)] == [1, 2, 3]
    last = last_complete_checkpoint(tmp_path)
    assert last == tmp_path / "checkpoint-2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the Trainer's about itself
        stock_trainer(tiny_checkpoint, tmp_path).train(resume_from_checkpoint=str(last))
    resumed, straight = (load_file(folder / "checkpoint-4" / "model.safetensors") for folder in (tmp_path, trained))
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), name
