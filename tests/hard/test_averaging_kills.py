"""`average` killed at any moment: the output is the old model, the new one or absent, and the next call succeeds."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from killed_runs import KILLED, Forks
from trainer_runs import stock_trainer
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.checkpoints.averaging import average_checkpoints

WAYS = ("new", "replacing")  # there is no output yet; there is one
PER_KIND = 3  # kills at random, in each way: before a change in the file system, and at any call


@pytest.fixture(scope="module")
def run(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed_averages") / "run"
    stock_trainer(tiny_checkpoint, folder, max_steps=3).train()
    average_checkpoints([folder / "checkpoint-1"], folder / "old")
    average_checkpoints([folder / "checkpoint-2", folder / "checkpoint-3"], folder / "new")
    for name in ("old", "new"):
        AutoModelForSeq2SeqLM.from_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def forks(run: Path) -> Iterator[Forks]:
    with Forks(run.parent / "log", run.parent / "caches") as forks:
        yield forks


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


class Kills:
    """Kills `average` in one of the ways, and checks what it leaves."""

    def __init__(self, run: Path, forks: Forks, way: str) -> None:
        self.run, self.forks, self.way = run, forks, way
        self.output = run / "averaged"
        self.old, self.new = contents(run / "old"), contents(run / "new")
        self.entries = {entry.name for entry in run.iterdir()} | {"averaged"}
        self.chosen = random.Random(way)

    def average(self, moment: str) -> int:
        """Starts with the old output, or with none."""
        shutil.rmtree(self.output, ignore_errors=True)
        overwrite = [] if self.way == "new" else ["--overwrite"]
        if overwrite:
            shutil.copytree(self.run / "old", self.output)
        command = ["average", self.run, "--last", "2", "--output", self.output, *overwrite]
        return self.forks.run(moment, *command)

    def totals(self) -> dict[str, int]:
        """The numbers of changes and calls until the end."""
        assert self.average("count") == 0
        assert contents(self.output) == self.new
        return self.forks.totals

    def at_random(self, kind: str, number: int) -> list[str]:
        total = self.totals()[kind]
        return [f"{kind}:{place}" for place in self.chosen.sample(range(1, total + 1), number)]

    def kill(self, moment: str) -> None:
        assert self.average(moment) == KILLED, moment
        if self.output.exists():
            assert contents(self.output) in (self.old, self.new), moment
        elif self.way == "replacing":
            assert contents(self.output.with_name(".averaged.old")) == self.old, moment
        self.average_again(moment)
        assert contents(self.output) == self.new, moment
        assert {entry.name for entry in self.run.iterdir()} == self.entries, moment

    def average_again(self, moment: str) -> None:
        """As a user would: with `--overwrite` if an output is there."""
        command = ["average", str(self.run), "--last", "2", "--output", str(self.output)]
        there = self.output.exists() or self.way == "replacing"
        assert cli.main(command) == (2 if there else 0), moment
        if there:
            assert contents(self.output) in (self.old, self.new), moment
            assert cli.main([*command, "--overwrite"]) == 0, moment


@pytest.fixture
def kills(run: Path, forks: Forks, request: pytest.FixtureRequest) -> Iterator[Kills]:
    kills = Kills(run, forks, request.param)
    yield kills
    shutil.rmtree(kills.output, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_average_that_is_killed(run: Path, forks: Forks) -> None:
    Kills(run, forks, "new").kill("weights:1")
    last = Kills(run, forks, "replacing")
    for moment in ("copy:3", *last.at_random("change", 1)):
        last.kill(moment)
    shutil.rmtree(last.output)


@pytest.mark.kill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", WAYS, indirect=True)
def test_an_average_that_is_killed_anywhere(kills: Kills) -> None:
    moments = [*kills.at_random("change", PER_KIND), *kills.at_random("call", PER_KIND), "weights:1", "copy:2"]
    for moment in moments:
        kills.kill(moment)


@pytest.mark.kill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", WAYS, indirect=True)
def test_an_average_that_is_killed_before_each_change(kills: Kills) -> None:
    for number in range(1, kills.totals()["change"] + 1):
        kills.kill(f"change:{number}")
