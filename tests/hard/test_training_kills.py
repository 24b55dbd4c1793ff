"""`train` killed at any moment and resumed, again and again, ends with the weights of a run that nobody disturbed."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import killed_runs
import psutil
import pytest
import torch
from killed_runs import KILLED, ROOT, Forks
from safetensors.torch import load_file

MID_SAVE = ("weights", "optimizer", "rng", "state", "removal", "copy")
SAVE_STEPS = 2


def moments(kills: int) -> list[str]:
    """Half of them at random, before a batch or before a change in the file system, and half of them in mid-save."""
    chosen = random.Random(0)
    anywhere = [(f"batch:{chosen.randint(1, 8)}", f"change:{chosen.randint(1, 100)}")[n % 2] for n in range(kills // 2)]
    saving = [f"{MID_SAVE[n % len(MID_SAVE)]}:{chosen.randint(1, 2)}" for n in range(kills - len(anywhere))]
    return [moment for pair in zip(anywhere, saving, strict=True) for moment in pair]


def write_corpus(folder: Path, name: str, number: int) -> None:
    sources = [f"{'twenty-one half past ' * (n % 5)}nine {n}" for n in range(number)]
    targets = [f"{'halb zehn ' * (n % 4)}einundzwanzig {n}" for n in range(number)]
    (folder / f"{name}.en").write_text("\n".join(sources) + "\n", encoding="utf-8")
    (folder / f"{name}.de").write_text("\n".join(targets) + "\n", encoding="utf-8")


def tiny_run(folder: Path, updates: int) -> list[str]:
    """A run of several epochs, with dropout, evaluations and old checkpoints removed."""
    write_corpus(folder, "train", 60)
    write_corpus(folder, "val", 7)
    options = {
        "data_dir": folder, "train_source": "train.en", "train_target": "train.de", "validation_source": "val.en",
        "validation_target": "val.de", "vocab_size": 300, "preset": "tiny", "d_model": 16, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32, "max_steps": updates, "warmup_steps": 4, "per_device_train_batch_tokens": 128,
        "gradient_accumulation_steps": 2, "save_steps": SAVE_STEPS, "save_total_limit": 2, "eval_strategy": "steps",
        "eval_steps": 8, "generation_num_beams": 1, "generation_max_length": 8, "logging_steps": 2, "average_last": 2,
    }  # fmt: skip
    return ["train", *(text for name, value in options.items() for text in (f"--{name}", str(value)))]


def kill_and_compare(folder: Path, killed_at: Sequence[str], updates: int) -> None:
    command, log = tiny_run(folder, updates), folder / "log"
    with Forks(log, folder / "caches") as forks:
        assert forks.run("", *command, "--output-dir", folder / "whole") == 0, log.read_text()
        resuming: list[str] = []
        for moment in killed_at:
            code = forks.run(moment, *command, "--output-dir", folder / "killed", *resuming)
            assert code == KILLED, f"{moment}: ended with {code}\n{log.read_text()[-5000:]}"
            if (folder / "killed" / "recipe.json").exists():
                resuming = ["--resume"]
        assert forks.run("", *command, "--output-dir", folder / "killed", "--resume") == 0, log.read_text()[-5000:]
    assert_same(folder / "whole", folder / "killed", updates)


def assert_same(whole: Path, killed: Path, updates: int) -> None:
    for name in ("model.safetensors", f"checkpoint-{updates}/model.safetensors", "averaged-2/model.safetensors"):
        one, other = (load_file(run / name) for run in (whole, killed))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name
    states = [torch.load(run / f"checkpoint-{updates}/optimizer.pt") for run in (whole, killed)]
    for index, state in states[0]["state"].items():
        assert all(torch.equal(value, states[1]["state"][index][key]) for key, value in state.items())
    seen = [json.loads((run / "trainer_state.json").read_text())["stateful_callbacks"] for run in (whole, killed)]
    assert seen[0] == seen[1]
    assert seen[0]["TargetTokens"]["attributes"]["count"] > 0
    # Nothing is left over, but for a file of the run that was being written.
    files = [{file.relative_to(run) for file in run.rglob("*") if file.suffix != ".partial"} for run in (whole, killed)]
    assert files[0] == files[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_and_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, moments(6), updates=18)


@pytest.mark.kill
@pytest.mark.timeout(3600)
def test_a_run_killed_again_and_again_ends_with_the_same_weights(tmp_path: Path) -> None:
    kill_and_compare(tmp_path, moments(24), updates=64)


# Which of two processes is killed, and when: while it computes, while it saves what both share or what is its own.
WORKERS = (("1", "batch:5"), ("0", "weights:2"), ("1", "rng:2"))
PATIENCE = 300  # seconds for what takes some ten


def two_processes(folder: Path, log: Path, *arguments: str, kill: tuple[str, str] = ("", "")) -> int:
    """Runs a command as torchrun starts it; `kill` is a process's rank and a moment."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = os.environ | {"HF_HOME": str(folder / "caches"), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*launcher, killed_runs.__file__, "--rank", *kill, *arguments]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait(timeout=PATIENCE)
        finally:
            process.terminate()  # it ends its processes too
            process.wait(timeout=PATIENCE)


@pytest.mark.slow
@pytest.mark.timeout(5 * PATIENCE)
@pytest.mark.kill
def test_one_of_two_processes_is_killed(tmp_path: Path) -> None:
    """The other ends too, and the run that is resumed ends with the same weights."""
    updates, log = 12, tmp_path / "log"
    command = [*tiny_run(tmp_path, updates), "--gradient-accumulation-steps", "1", "--output-dir"]
    assert two_processes(tmp_path, log, *command, str(tmp_path / "whole")) == 0, log.read_text()
    resuming: list[str] = []
    for kill in WORKERS:
        code = two_processes(tmp_path, log, *command, str(tmp_path / "killed"), *resuming, kill=kill)
        assert code not in (0, KILLED), kill
        assert "Signal 9 (SIGKILL)" in log.read_text(), log.read_text()
        left = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in (one.info["cmdline"] or [])]
        assert not left, kill
        resuming = ["--resume"]
    code = two_processes(tmp_path, log, *command, str(tmp_path / "killed"), *resuming)
    assert code == 0, log.read_text()
    assert "Resuming from" in log.read_text()
    assert_same(tmp_path / "whole", tmp_path / "killed", updates)


@pytest.mark.kill
@pytest.mark.timeout(1800)
def test_a_run_that_is_killed_before_its_first_update_is_started_or_resumed(tmp_path: Path) -> None:
    """Whatever it has written by then, the same command, or the same with `--resume`, trains."""
    command = [*tiny_run(tmp_path, 4), "--output-dir", tmp_path / "run"]
    with Forks(tmp_path / "log", tmp_path / "caches") as forks:
        for number in range(1, 13):
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            assert forks.run(f"change:{number}", *command) == KILLED
            resuming = ["--resume"] if (tmp_path / "run" / "recipe.json").exists() else []
            code = forks.run("batch:1", *command, *resuming)
            assert code == KILLED, f"after change {number}: ended with {code}\n{(tmp_path / 'log').read_text()[-2000:]}"
