"""`vanilla-transformer average`: the last complete checkpoints of a run, or those that are named."""

import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_vanilla_transformer.checkpoints.averaging import average_checkpoints


@pytest.fixture
def folder(trained, tmp_path):
    """The run, to be changed."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def average(vanilla_transformer):
    return partial(vanilla_transformer, "average")


def assert_is_mean_of(output, run, steps):
    expected = output.with_name(f"expected-{len(steps)}")
    average_checkpoints([run / f"checkpoint-{step}" for step in steps], expected)
    weights, right = (load_file(folder / "model.safetensors") for folder in (output, expected))
    assert all(torch.equal(weights[name], value) for name, value in right.items())


def test_the_last_few(average, folder, tmp_path):
    output = folder / "averaged-5"
    assert average(folder) == (0, f"averaged 5 checkpoints (steps 2, 3, 4, 5, 6) into {output}\n", "")
    assert_is_mean_of(output, folder, [2, 3, 4, 5, 6])
    output = tmp_path / "mean"
    expected = (0, f"averaged 2 checkpoints (steps 5, 6) into {output}\n", "")
    assert average(folder, "--last", 2, "--output", output) == expected
    assert_is_mean_of(output, folder, [5, 6])
    assert average(folder, "--last", 1)[1] == f"averaged 1 checkpoint (step 6) into {folder / 'averaged-1'}\n"
    code, out, err = average(folder, "--last", 1)
    assert (code, out) == (2, "")
    assert re.fullmatch("vanilla-transformer: error: .*averaged-1 exists; choose another .*overwrite.*\n", err), err
    assert average(folder, "--last", 1, "--overwrite")[0] == 0


def test_damaged_ones_are_skipped(average, folder, caplog):
    (folder / "checkpoint-6" / "trainer_state.json").unlink()
    os.truncate(folder / "checkpoint-5" / "optimizer.pt", 10)  # no matter for the weights
    os.truncate(folder / "checkpoint-4" / "model.safetensors", 1000)
    code, out, _ = average(folder, "--last", 3)
    assert (code, out) == (0, f"averaged 3 checkpoints (steps 2, 3, 5) into {folder / 'averaged-3'}\n")
    sixth, fourth = (record.getMessage() for record in caplog.records)
    assert f"{folder / 'checkpoint-6'}: trainer_state.json is missing" in sixth
    assert f"{folder / 'checkpoint-4'}: model.safetensors is cut short" in fourth


def test_named_checkpoints(average, folder, tmp_path):
    named = [folder / f"checkpoint-{step}" for step in (1, 4, 6)]
    output = folder / "averaged-3"
    assert average("--checkpoints", *named) == (0, f"averaged 3 checkpoints (steps 1, 4, 6) into {output}\n", "")
    assert_is_mean_of(output, folder, [1, 4, 6])
    best = Path(shutil.copytree(named[0], tmp_path / "best"))
    code, out, err = average("--checkpoints", best, named[1], "--output", tmp_path / "two")
    assert (code, out, err) == (0, f"averaged 2 checkpoints ({best}, {named[1]}) into {tmp_path / 'two'}\n", "")


@pytest.mark.parametrize("output", ["/proc/average", f"{__file__}/average"])
def test_an_output_that_cannot_be_written_is_one_line(average, folder, output):
    before = sorted(folder.parent.iterdir())
    code, out, err = average(folder, "--output", output)
    assert (code in (1, 2), out) == (True, "")
    assert re.fullmatch("vanilla-transformer: error: .*\n", err), err
    assert sorted(folder.parent.iterdir()) == before
