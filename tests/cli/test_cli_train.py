"""`vanilla-transformer train`: a run goes from text files to scores, is interrupted and resumed."""

import io
import json
import re
import shutil
import signal
import time
import weakref
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_runs import PAIRS, add_callback, recipe_in
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, TrainerCallback, TrainerState

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.engine import attach_if_supported
from hf_vanilla_transformer.metrics import corpus_bleu
from hf_vanilla_transformer.training import finish, run
from tests.decoding import decode

EVALUATIONS = {"eval_strategy": "steps", "eval_steps": 2, "generation_max_length": 12}
DECODING = {"num_beams": 2, "gnmt_length_penalty": 1.5, "early_stopping": False}


@pytest.fixture
def recipe(tmp_path: Path) -> dict:
    return recipe_in(tmp_path) | EVALUATIONS | {"num_beams": 1}


def saved(recipe: dict) -> Path:
    path = Path(recipe["data_dir"]) / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@pytest.fixture
def run_train(vanilla_transformer):
    """Runs `train` on a recipe: exit code, output, errors."""
    return lambda recipe, *options: vanilla_transformer("train", "--config", saved(recipe), *options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run with its corpus, what it printed, and the engine that has translated its test set."""
    folder, used = tmp_path_factory.mktemp("finished"), []
    path = saved(recipe_in(folder) | EVALUATIONS | DECODING)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr(finish, "attach_if_supported", lambda model: used.append(attach_if_supported(model)))
        assert cli.main(["train", "--config", str(path)]) == 0
    return folder, out.getvalue(), used[0]


def test_a_run_from_text_to_scores(finished):
    folder, out, _ = finished
    run = folder / "run"
    assert "Training data: 50 pairs kept, 0 left out" in out
    assert re.search(r"Batches: \d+ per epoch and device, \d+\.\d% padding", out)
    update = r"update 4, epoch \d\.\d, [\d,]+ target tokens: loss \d\.\d+, learning rate .*, [\d,]+ tokens/s"
    assert re.search(update, out)
    assert re.search(r"update 4, validation: perplexity [\d.]+, BLEU [\d.]+ \(nrefs:1.*tok:13a.*\), chrF", out)
    assert out.count("  reference:   ") == 6
    assert "Averaged the last 2 checkpoints" in out
    mean = load_file(run / "averaged-2" / "model.safetensors")
    parts = [load_file(run / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4)]
    for name, weight in mean.items():
        torch.testing.assert_close(weight, (parts[0][name] + parts[1][name]) / 2, rtol=0, atol=1e-7)

    scores = json.loads((run / "averaged-2" / "scores.json").read_text())
    translations = (run / "averaged-2" / "test.translations.txt").read_text(encoding="utf-8").splitlines()
    bleu = corpus_bleu(translations, [target for _, target in PAIRS[5:12]])
    assert scores[1]["scores"][0] == asdict(bleu)
    assert f"test: {bleu.details}" in out
    card = (run / "averaged-2" / "README.md").read_text(encoding="utf-8")
    assert bleu.signature in card
    assert "- 50 sentence pairs\n" in card
    assert str(folder) not in card


def test_the_model_is_saved_with_the_recipes_decoding(finished):
    """The engine has translated the validation and the test set, and transformers' loop finds the same."""
    folder, _, engine = finished
    assert engine.calls >= 2
    assert engine.fallbacks == 0
    averaged = folder / "run" / "averaged-2"
    model, tokenizer = (auto.from_pretrained(averaged) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
    assert {name: getattr(model.generation_config, name) for name in DECODING} == DECODING
    found = (averaged / "test.translations.txt").read_text(encoding="utf-8").splitlines()
    for options in ({}, DECODING):
        rows = decode(model.eval(), tokenizer, [source for source, _ in PAIRS[5:12]], **options)
        assert found == [row[0].text for row in rows]
    output = model.generate(**tokenizer(PAIRS[5][0], return_tensors="pt"))
    assert tokenizer.decode(output[0], skip_special_tokens=True) == found[0]
    card = (averaged / "README.md").read_text(encoding="utf-8")
    assert "beam 2, length penalty 1.5, early\\_stopping=False" in card


def test_a_finished_run_can_be_resumed(run_train, finished, tmp_path):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text().replace(str(finished[0]), str(tmp_path)))
    run = tmp_path / "run"
    assert "d_model 16, not 32" in run_train(recipe, "--resume", "--d-model", "32").error
    started = json.loads((run / "recipe.json").read_text())
    del started["source_normalization"], started["embeddings"]  # the run is older than these options
    (run / "recipe.json").write_text(json.dumps(started))
    code, out, _ = run_train({**recipe, "num_beams": 3}, "--resume", "--max-steps", "6")
    assert (code, f"Resuming from {run / 'checkpoint-4'}" in out) == (0, True)
    assert json.loads((run / "trainer_state.json").read_text())["global_step"] == 6
    assert AutoModelForSeq2SeqLM.from_pretrained(run).generation_config.num_beams == 3
    assert run_train(recipe, "--resume", "--max-steps", "6").code == 0  # no checkpoint is saved with it
    averaged = AutoModelForSeq2SeqLM.from_pretrained(run / "averaged-2").generation_config
    assert {name: getattr(averaged, name) for name in DECODING} == DECODING
    assert "beam 2, length penalty 1.5" in (run / "averaged-2" / "scores.json").read_text(encoding="utf-8")


def test_a_run_that_failed_before_training_can_be_started_again(run_train, recipe, tmp_path):
    """The second start streams the corpus."""
    assert "longer than a batch of 3 tokens" in run_train(recipe, "--per-device-train-batch-tokens", "3").error
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"recipe.json", "run.lock", "tokenizer"}
    stream = ("--streaming", "true", "--shuffle-buffer-size", "20", "--max-length", "9")
    options = ("--vocab-size", "290", "--eval-strategy", "no", "--average-last", "0")
    code, out, _ = run_train(recipe, *options, *stream)
    assert (code, "Trained 4 updates" in out) == (0, True)
    assert re.search(r"as far as the stream was read: \d+ pairs kept, \d+ left out: \d+ with more than 9 tokens", out)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run").config.vocab_size <= 290


def test_a_saved_model_trains_on_with_figures_for_tensorboard(
    run_train, recipe, tmp_path, tiny_checkpoint, monkeypatch
):
    calls = []
    monkeypatch.setattr(run, "keep_freed_memory", lambda: calls.append(1))
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "figures"))
    output = f"--output-dir={tmp_path / 'my run'}"  # a value with a space is no recipe
    options = ["--model-name-or-path", str(tiny_checkpoint), "--average-last=0"]
    code, out, _ = run_train(recipe, output, *options, "--report-to", "tensorboard", "--num-samples", "0")
    assert (code, calls, "translation:" in out) == (0, [1], False)
    saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "my run")
    assert saved.config.d_model == 32  # the model's own, not the recipe's
    assert (tmp_path / "my run" / "README.md").is_file()
    events = EventAccumulator(str(tmp_path / "figures"))
    events.Reload()
    assert {"train/loss", "train/tokens_per_second", "eval/perplexity", "eval/bleu"} <= set(events.Tags()["scalars"])


class CtrlC(TrainerCallback):
    """A key that is pressed after an update; `in_callback`: where Python drops the exception."""

    def __init__(self, update: int, in_callback: bool):
        self.update, self.in_callback = update, in_callback

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step != self.update:
            return
        if not self.in_callback:
            signal.raise_signal(signal.SIGINT)
        weakref.finalize(TrainerState(), signal.raise_signal, signal.SIGINT)
        for _ in range(900):
            time.sleep(0.01)


STARTS_OVER = "there is no checkpoint yet; the same command starts over"
RESUMES = "the same command with --resume resumes from {}/checkpoint-2"


@pytest.mark.parametrize(
    ("interruption", "advice", "options", "trained"),
    [
        (CtrlC(1, False), STARTS_OVER, (), "3 updates in"),
        (CtrlC(3, True), RESUMES, ("--resume",), "1 updates (3 in all)"),
    ],
)
def test_ctrl_c_says_how_the_run_is_resumed(
    run_train, monkeypatch, recipe, tmp_path, interruption, advice, options, trained
):
    add_callback(monkeypatch, interruption)
    recipe |= {"max_steps": 9, "eval_strategy": "no", "average_last": 0, "test_source": [], "test_target": []}
    result = run_train(recipe)
    assert result.code == 130
    assert f"warning: interrupted: {advice.format(tmp_path / 'run')}\n" in result.err
    monkeypatch.undo()
    assert f"Trained {trained}" in run_train(recipe, *options, "--max-steps", "3").out


def test_ctrl_c_while_processes_read_the_corpus(run_train, monkeypatch, recipe):
    """datasets raises a TimeoutError then (findings/datasets_interrupted_map.sh)."""

    def interrupted(*args):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise TimeoutError

    monkeypatch.setattr(run, "tokenize", interrupted)
    code, _, err = run_train(recipe)
    assert code == 130
    assert f"warning: interrupted: {STARTS_OVER}" in err
