"""`train` killed at any moment and resumed, again and again, ends with the weights of an uninterrupted run."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_runs import recipe_in

ROOT = Path(__file__).parents[2]
KILLS, UPDATES = 30, 60
PATIENCE = 240  # seconds for what takes some ten
# Files that appear before the first update, and while a checkpoint, the model or the average is saved.
MOMENTS = (
    "tokenizer", "checkpoint-*/model.safetensors", "checkpoint-*/rng_state.pth", ".saving/*",
    ".averaged-2.*.partial/model/*",
)  # fmt: skip


def start(folder: Path, run: str, *options: str) -> subprocess.Popen:
    """Starts `train` as users start it."""
    command = [sys.executable, "-m", "hf_vanilla_transformer", "train", "--config", str(folder / "recipe.yaml")]
    environment = os.environ | {"HF_HOME": str(folder / "caches"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "log").open("w", encoding="utf-8") as log:
        options = ("--output-dir", str(folder / run), *options)
        return subprocess.Popen([*command, *options], env=environment, stdout=log, stderr=subprocess.STDOUT)


def kill(process: subprocess.Popen, run: Path, pattern: str, seconds: float) -> None:
    """Kills a run some time after a new file appears that matches the pattern."""
    before, deadline = set(run.glob(pattern)), time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        if set(run.glob(pattern)) - before:
            time.sleep(seconds)
            break
    process.kill()
    process.wait(timeout=PATIENCE)


def assert_same(whole: Path, killed: Path) -> None:
    for name in ("model.safetensors", f"checkpoint-{UPDATES}/model.safetensors", "averaged-2/model.safetensors"):
        one, other = (load_file(run / name) for run in (whole, killed))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name
    states = [torch.load(run / f"checkpoint-{UPDATES}/optimizer.pt") for run in (whole, killed)]
    for index, state in states[0]["state"].items():
        assert all(torch.equal(value, states[1]["state"][index][key]) for key, value in state.items())
    counts = [json.loads((run / "trainer_state.json").read_text())["stateful_callbacks"] for run in (whole, killed)]
    assert counts[0] == counts[1]
    # Nothing is left over, but for a file or a folder that was being written.
    files = [
        {file.relative_to(run) for file in run.rglob("*") if ".partial" not in str(file)} for run in (whole, killed)
    ]
    assert files[0] == files[1]


@pytest.mark.timeout(3600)
@pytest.mark.kill
def test_a_killed_and_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path) | {
        "max_steps": UPDATES, "gradient_accumulation_steps": 2, "dropout": 0.1, "save_steps": 2, "save_total_limit": 2,
        "eval_strategy": "steps", "eval_steps": 20, "generation_num_beams": 1, "generation_max_length": 8,
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert start(tmp_path, "whole").wait(timeout=PATIENCE) == 0, (tmp_path / "log").read_text()
    chosen, resuming = random.Random(0), []
    for number in range(KILLS):
        process = start(tmp_path, "killed", *resuming)
        kill(process, tmp_path / "killed", MOMENTS[number % len(MOMENTS)], chosen.choice([0, 0.01, 0.3]))
        assert process.returncode in (-9, 0), (tmp_path / "log").read_text()[-5000:]  # 0: it was faster
        resuming = ["--resume"] if (tmp_path / "killed" / "recipe.json").exists() else []
    assert start(tmp_path, "killed", *resuming).wait(timeout=PATIENCE) == 0, (tmp_path / "log").read_text()[-5000:]
    assert_same(tmp_path / "whole", tmp_path / "killed")
