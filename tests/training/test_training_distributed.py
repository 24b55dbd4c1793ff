"""Several processes: they train, evaluate and resume as one does.

Two processes on CPUs over gloo, started as users start them; in the shortest tests, forked as a launcher's would be.
"""

import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin, patch_environment
from recorded_run import process_of
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer.training.arguments import VanillaTransformerTrainingArguments
from hf_vanilla_transformer.training.options import RecipeError
from hf_vanilla_transformer.training.recipe import RECIPES
from hf_vanilla_transformer.training.sharding import ShardingTrainer

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((RECIPES / "accelerate").glob("*.yaml"))
RECORDED = str(ROOT / "tests" / "training" / "recorded_run.py")

WORDS = {"one": "eins", "two": "zwei", "half": "halb", "past": "nach", "nine": "neun", "euros": "Euro", "it": "es"}
VALIDATION_SENTENCES = 7  # an odd number, which two processes with batches of two can't share out evenly
UPDATES, SAVED_AT = 6, 3
RECIPE = {
    "train_source": ["train.en"], "train_target": ["train.de"],
    "validation_source": ["valid.en"], "validation_target": ["valid.de"],
    "preset": "tiny", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "vocab_size": 300, "dropout": 0.0,  # with dropout, processes draw other masks than one process does
    "max_length": 128, "per_device_train_batch_tokens": 128, "max_steps": UPDATES, "warmup_steps": 2,
    "learning_rate": 0.01,
    "adam_epsilon": 1e-6,  # Adam's first step is g / (|g| + epsilon), which would make rounding errors of g visible
    "logging_steps": 1, "save_steps": SAVED_AT, "eval_strategy": "steps", "eval_steps": UPDATES,
    "per_device_eval_batch_size": 2, "generation_num_beams": 1, "report_to": "none",
}  # fmt: skip

# Two processes add the same float32 numbers in another order than one: each sum differs by some 2^-24 of its size, and
# six updates of a rate of 0.01 make no more of it than 1e-5 (measured: 3e-6). A batch left out or counted twice, or a
# mean of the processes' means, changes losses in their second digit and weights by about the rate.
WEIGHTS_DIFFER_BY = 1e-5
LOSSES_DIFFER_BY = 1e-5  # relatively


PATIENCE = 200  # seconds for what takes some ten: processes that wait for each other would do so for half an hour
pytestmark = pytest.mark.timeout(2 * PATIENCE + 60)


# ---- Accelerate's configurations ----
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_takes_the_configuration(config: Path) -> None:
    values = load_config_from_file(str(config))  # refuses unknown keys of the first level
    arguments = launch_command_parser().parse_args(["--config_file", str(config), "--machine_rank", "0", "-m", "x"])
    for name, section in vars(values).items():
        if isinstance(section, dict):  # launch hands every key on, known or not
            assert [key for key in section if not hasattr(arguments, key)] == [], name
    assert values.num_processes % values.num_machines == 0
    text = config.read_text(encoding="utf-8")
    assert f"recipes/accelerate/{config.name} " in text, "the comment starts another configuration"
    assert "torchrun" in text
    assert ("--machine_rank R" in text) == (values.num_machines > 1)


def test_the_guide_names_every_configuration_and_no_other() -> None:
    files = [*(ROOT / "docs").glob("*.md"), *RECIPES.rglob("*.yaml")]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert set(re.findall(r"recipes/accelerate/(\w+)\.yaml", text)) == {path.stem for path in CONFIGS}
    guide = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    assert {path.stem for path in CONFIGS} <= set(re.findall(r"`(\w+)\.yaml`", guide))


# ---- FSDP's parts that need no second process ----
@pytest.mark.parametrize(("version", "kind"), [(1, "FULL"), (2, "SHARDED")])
def test_fsdp_that_saves_in_other_ways_is_refused(version, kind, tiny_checkpoint, tmp_path, monkeypatch) -> None:
    with patch_environment(FSDP_VERSION=version, FSDP_STATE_DICT_TYPE=f"{kind}_STATE_DICT"):
        plugin = FullyShardedDataParallelPlugin()
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    arguments = VanillaTransformerTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    create = ShardingTrainer.create_accelerator_and_postprocess

    def created(trainer: ShardingTrainer) -> None:
        create(trainer)
        trainer.is_fsdp_enabled, trainer.accelerator.state.fsdp_plugin = True, plugin

    monkeypatch.setattr(ShardingTrainer, "create_accelerator_and_postprocess", created)
    with pytest.raises(RecipeError, match="write `fsdp_version: 2` and `fsdp_state_dict_type: FULL_STATE_DICT`"):
        ShardingTrainer(model=model, args=arguments)


# ---- Runs ----
@dataclass
class Run:
    """A training run that has ended."""

    folder: Path
    log: str

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "model.safetensors")

    def logged(self, name: str) -> list[float]:
        history = json.loads((self.folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
        return [entry[name] for entry in history if name in entry]

    def evaluations(self, process: int) -> list[list[list[str]]]:
        """Of each evaluation: sources, translations and references."""
        return json.loads((self.folder.parent / f"evaluations-{process}.json").read_text(encoding="utf-8"))


MODULE = ["-m", "hf_vanilla_transformer"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", "0"]
FSDP = [
    *ACCELERATE, "--num_machines", "1", "--mixed_precision", "no", "--use_fsdp", "--fsdp_version", "2",
    "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_state_dict_type", "FULL_STATE_DICT",
    "--fsdp_cpu_ram_efficient_loading", "false",
]  # fmt: skip
DDP = [*ACCELERATE, "--config_file", str(RECIPES / "accelerate" / "cpu_ddp.yaml")]


def arguments_in(folder: Path, *options: str) -> list[str]:
    """Writes corpus and recipe into `folder`; returns the arguments of a command with output in `folder/run`."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for part, sentences in (("train", 96), ("valid", VALIDATION_SENTENCES)):
        pairs = [random.choice(list(WORDS), size=1 + 11 * n % 9) for n in range(sentences)]
        for suffix, text in (("en", lambda word: word), ("de", lambda word: WORDS[word])):
            lines = [" ".join(map(text, pair)) for pair in pairs]
            (folder / f"{part}.{suffix}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE), encoding="utf-8")
    return ["train", "--config", "recipe.yaml", "--output-dir", "run", *options]


def forked(folder: Path, processes: int, *options: str) -> Run:
    """Trains in processes that are forked from one that has imported all that they need."""
    context, arguments = multiprocessing.get_context("forkserver"), arguments_in(folder, *options)
    context.set_forkserver_preload(["hf_vanilla_transformer.training.run", "recorded_run"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = [
        context.Process(target=process_of, args=(rank, processes, port, folder, arguments)) for rank in range(processes)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(PATIENCE)
        process.kill()
    log = (folder / "log").read_text(encoding="utf-8")
    assert [process.exitcode for process in started] == [0] * processes, log[-5000:]
    return Run(folder / "run", log)


def train(folder: Path, launcher: list[str], *options: str) -> Run:
    """Runs `train` in `folder`, with output in `folder/run`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment["DS_ACCELERATOR"] = "cpu"
    command = [*launcher, *arguments_in(folder, *options)]
    with (folder / "log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        code = process.wait(timeout=PATIENCE)
    finally:
        process.terminate()  # a launcher then ends its processes too
    log = (folder / "log").read_text(encoding="utf-8")
    assert code == 0, log[-5000:]
    return Run(folder / "run", log)


def resume(folder: Path, begun: Run, launcher: list[str], *options: str) -> Run:
    """Goes on from a copy of what `begun` was when it had saved for the first time."""
    (folder / "run").mkdir(parents=True)
    for name in (f"checkpoint-{SAVED_AT}", "tokenizer"):
        shutil.copytree(begun.folder / name, folder / "run" / name)
    shutil.copy(begun.folder / "recipe.json", folder / "run")
    run = train(folder, launcher, "--resume", *options)
    assert f"checkpoint-{SAVED_AT}" in run.log
    assert "makes other batches" not in run.log
    return run


ALONE = [sys.executable, *MODULE]
AS_TWO = ("--gradient-accumulation-steps", "2")  # one process with it sees the updates of two


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return forked(tmp_path_factory.mktemp("one"), 1, *AS_TWO)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return forked(tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("sharded"), [*FSDP, RECORDED])


every_kind = pytest.mark.parametrize("kind", ["two", pytest.param("sharded", marks=pytest.mark.hard)])


def assert_same(run: Run, reference: Run) -> None:
    """The same weights, and the same losses from update SAVED_AT + 1 on."""
    after = UPDATES - SAVED_AT
    assert run.logged("loss")[-after:] == pytest.approx(reference.logged("loss")[-after:], rel=LOSSES_DIFFER_BY)
    expected, found = reference.weights, run.weights
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=WEIGHTS_DIFFER_BY, msg=name)


@pytest.mark.slow
@every_kind
def test_two_processes_train_and_evaluate_as_one(one: Run, kind: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(kind)
    assert_same(run, one)
    assert len(run.logged("loss")) == UPDATES
    assert run.logged("loss") == pytest.approx(one.logged("loss"), rel=LOSSES_DIFFER_BY)
    assert run.logged("target_tokens") == one.logged("target_tokens")
    assert len(re.findall(r"^update 1,", run.log, re.MULTILINE)) == 1, "each process reports"
    # An evaluation gathers every sentence once and in order; all processes score them, as each decides when to stop.
    expected = one.evaluations(0)
    assert [len(column) for column in expected[0]] == [VALIDATION_SENTENCES] * 3
    assert len(set(map(len, expected[0][1]))) > 1, "processes that decode equally long never wait for each other"
    assert run.evaluations(0) == run.evaluations(1) == expected
    for name in ("eval_loss", "eval_perplexity", "eval_bleu", "eval_chrf"):
        assert run.logged(name) == pytest.approx(one.logged(name), rel=LOSSES_DIFFER_BY), name


REGULARIZED, PACKED = ("--rdrop-alpha", "3"), ("--packed", "true", "--predict-with-generate", "false")


@pytest.mark.hard
@pytest.mark.timeout(4 * PATIENCE)
@pytest.mark.parametrize("options", [REGULARIZED, PACKED, ("--dry-run",), ("--streaming", "true")], ids=str)
def test_two_processes_of_a_launcher(options: tuple[str, ...], tmp_path: Path) -> None:
    """The main process trains the tokenizer, in a dry run in a temporary folder; each reads its own part of a stream.

    Packed, each has rows of its own, of the same shape; with FSDP too.
    """
    two = train(tmp_path / "two", [*TORCHRUN, *MODULE], *options)
    if options in (REGULARIZED, PACKED):
        one = forked(tmp_path / "one", 1, *AS_TWO, *options)
        assert_same(two, one)
        assert two.logged("target_tokens") == one.logged("target_tokens")
    if options is PACKED:
        assert_same(train(tmp_path / "sharded", [*FSDP, RECORDED], *options), one)


@pytest.mark.hard
def test_runs_go_on_from_checkpoints_of_other_kinds(one: Run, two: Run, sharded: Run, tmp_path: Path) -> None:
    assert_same(resume(tmp_path / "one", two, ALONE, *AS_TWO), one)
    assert_same(resume(tmp_path / "two", one, [*DDP, *MODULE]), one)
    assert_same(resume(tmp_path / "sharded", sharded, [*FSDP, RECORDED]), one)
