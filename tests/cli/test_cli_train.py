"""`vanilla-transformer train`: wrong use is told before any work, and a run goes from text files to scores."""

import json
import re
import signal
import time
import weakref
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
from hf_vanilla_transformer.translation.decoding import decode


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    recipe_in(tmp_path)
    return tmp_path


@pytest.fixture
def recipe(corpus: Path) -> dict:
    return recipe_in(corpus) | {"eval_strategy": "steps", "eval_steps": 2, "generation_max_length": 12}


def train(recipe: dict, *options: str) -> int:
    path = Path(recipe["data_dir"]) / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return cli.main(["train", "--config", str(path), *options])


def complaint(capsys, recipe: dict, *options: str) -> str:
    assert train(recipe, *options) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("vanilla-transformer: error: ")
    assert "\n" not in error
    return error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_dir": None}, "--output-dir"),
        ({"train_source": [], "train_target": []}, "no training data"),
        ({"train_target": []}, "1 source files but 0 target files"),
        ({"validation_source": [], "validation_target": []}, "eval_strategy needs"),
        ({"test_source": ["nowhere.en"]}, "nowhere.en: no such file"),
        ({"average_last": 5, "save_total_limit": 3}, "keep at least 5"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'; give true, false or never"),
        ({"num_beams": 0}, "num_beams is 0; give 1 or more"),
        ({"gnmt_length_penalty": -1}, "gnmt_length_penalty is -1.0; give 0 or more"),
        ({"max_length": 1}, "no sentence pair is left"),
        ({"per_device_train_batch_tokens": 3}, "longer than a batch of 3 tokens"),
        ({"gradient_accumulation_steps": 1000}, "50 sentence pairs are too few for 1 processes"),
        ({"streaming": True, "max_length": 129}, "max_length 129 may not fit into per_device_train_batch_tokens 128"),
        ({"vocab_size": 50}, "vocab_size=50: give an integer of at least 259"),
    ],
)  # fmt: skip
def test_wrong_use_is_told(capsys, recipe, change, message):
    assert message in complaint(capsys, recipe | change)


@pytest.mark.parametrize(("option", "value"), [("preset", "huge"), ("d_model", 130), ("dropout", 2)])
def test_an_impossible_model_is_told_before_anything_is_written(capsys, recipe, corpus, option, value):
    assert option in complaint(capsys, recipe | {option: value})
    assert not (corpus / "run").exists()


def test_a_value_with_a_space_is_no_recipe(recipe, corpus):
    assert train(recipe, f"--output-dir={corpus / 'my run'}", "--eval-strategy", "no", "--average-last=0") == 0
    assert (corpus / "my run" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", ["--resume", "--dry-run", "--list-recipes", "--trust-remote-code", "--max-steps"])
def test_an_unknown_option_is_told_with_the_nearest(capsys, recipe, name):
    with pytest.raises(SystemExit, match=r"^2$"):
        train(recipe, name[:-1])
    assert f"error: unrecognized arguments: {name[:-1]}; did you mean {name!r}?" in capsys.readouterr().err


def test_options_that_train_refuses_are_not_suggested(capsys, recipe):
    with pytest.raises(SystemExit, match=r"^2$"):
        train(recipe, "--bf16-eval")
    assert "did you mean '--bf16'?" in capsys.readouterr().err


def test_a_value_behind_an_equals_sign_may_have_spaces(capsys, tmp_path):
    """Alone, without another option of recipes."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("train_source: [nowhere.en]\ntrain_target: [nowhere.de]\n")
    assert cli.main(["train", "--config", str(recipe), f"--output-dir={tmp_path}/My Drive"]) == 2
    assert "nowhere.en: no such file" in capsys.readouterr().err


def test_a_wrong_value_on_the_command_line_is_told(capsys, recipe):
    assert "max_steps is 'many'; give an integer" in complaint(capsys, recipe, "--max-steps", "many")
    assert "fsdp isn't supported by `train`" in complaint(capsys, recipe, "--fsdp", "full_shard")


def test_a_recipe_of_the_package_is_suggested(capsys):
    assert cli.main(["train", "--config", "multi30k_tni"]) == 2
    assert "did you mean 'multi30k_tiny'?" in capsys.readouterr().err


def test_recipes_may_be_given_one_by_one(capsys, tmp_path):
    """Neither is forgotten."""
    (tmp_path / "a.yaml").write_text("train_source: [nowhere.en]\ntrain_target: [nowhere.de]\n")
    (tmp_path / "b.yaml").write_text(f"output_dir: {tmp_path / 'run'}\n")
    recipes = ["--config", str(tmp_path / "a.yaml"), "--config", str(tmp_path / "b.yaml")]
    assert cli.main(["train", *recipes]) == 2
    assert "nowhere.en: no such file" in capsys.readouterr().err


def test_a_run_that_failed_before_training_can_be_started_again(capsys, recipe, corpus):
    complaint(capsys, recipe, "--per-device-train-batch-tokens", "3")
    assert {path.name for path in (corpus / "run").iterdir()} == {"recipe.json", "run.lock", "tokenizer"}
    assert train(recipe, "--vocab-size", "290", "--eval-strategy", "no", "--average-last", "0") == 0
    assert AutoModelForSeq2SeqLM.from_pretrained(corpus / "run").config.vocab_size <= 290


def test_all_options_are_listed(capsys):
    assert cli.main(["train", "--list-options"]) == 0
    listed = capsys.readouterr().out
    assert all(f"--{name} " in listed for name in ("train-source", "dropout", "learning-rate-factor", "adam-beta2"))
    assert "--train_source" not in listed


def test_a_run_from_text_to_scores(capsys, recipe, corpus):
    assert train(recipe) == 0
    out, run = capsys.readouterr().out, corpus / "run"
    assert "Training data: 50 pairs kept, 0 left out" in out
    assert re.search(r"Batches: \d+ per epoch and device, \d+\.\d% padding", out)
    assert re.search(
        r"update 4, epoch \d\.\d, [\d,]+ target tokens: loss \d\.\d+, learning rate .*, [\d,]+ tokens/s", out
    )
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
    assert str(corpus) not in card
    model = AutoModelForSeq2SeqLM.from_pretrained(run / "averaged-2").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "averaged-2")
    output = model.generate(**tokenizer(PAIRS[5][0], return_tensors="pt"))
    assert tokenizer.decode(output[0], skip_special_tokens=True) == translations[0]


def test_a_finished_run_can_be_resumed(capsys, recipe, corpus):
    assert train(recipe) == 0
    assert "d_model 16, not 32" in complaint(capsys, recipe, "--resume", "--d-model", "32")
    assert train(recipe, "--resume", "--max-steps", "6") == 0
    out = capsys.readouterr().out
    assert f"Resuming from {corpus / 'run' / 'checkpoint-4'}" in out
    assert json.loads((corpus / "run" / "trainer_state.json").read_text())["global_step"] == 6


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


@pytest.mark.parametrize("in_callback", [False, True])
@pytest.mark.parametrize(
    ("update", "advice", "options", "trained"),
    [
        (1, "there is no checkpoint yet; the same command starts over", (), "3 updates in"),
        (3, "the same command with --resume resumes from {}/checkpoint-2", ("--resume",), "1 updates (3 in all)"),
    ],
)
def test_ctrl_c_says_how_the_run_is_resumed(
    capsys, monkeypatch, recipe, corpus, update, advice, options, trained, in_callback
):
    add_callback(monkeypatch, CtrlC(update, in_callback))
    recipe |= {"max_steps": 9, "eval_strategy": "no", "average_last": 0}
    assert train(recipe) == 130
    assert f"warning: interrupted: {advice.format(corpus / 'run')}\n" in capsys.readouterr().err
    monkeypatch.undo()
    assert train(recipe, *options, "--max-steps", "3") == 0
    assert f"Trained {trained}" in capsys.readouterr().out


def test_ctrl_c_while_processes_read_the_corpus(capsys, monkeypatch, recipe):
    """datasets raises a TimeoutError then (findings/datasets_interrupted_map.sh)."""

    def interrupted(*args):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise TimeoutError

    monkeypatch.setattr(run, "tokenize", interrupted)
    assert train(recipe) == 130
    assert "warning: interrupted: there is no checkpoint yet; the same command starts over" in capsys.readouterr().err


def test_the_model_is_saved_with_the_recipes_decoding(recipe, corpus, monkeypatch):
    """The engine has translated the validation and the test set, and transformers' loop finds the same."""
    used = []
    monkeypatch.setattr(finish, "attach_if_supported", lambda model: used.append(attach_if_supported(model)))
    decoding = {"num_beams": 2, "gnmt_length_penalty": 1.5, "early_stopping": False}
    assert train({**recipe, **decoding}) == 0
    assert used[0].calls >= 2
    assert used[0].fallbacks == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(corpus / "run" / "averaged-2").eval()
    tokenizer = AutoTokenizer.from_pretrained(corpus / "run" / "averaged-2")
    assert {name: getattr(model.generation_config, name) for name in decoding} == decoding
    found = (corpus / "run" / "averaged-2" / "test.translations.txt").read_text(encoding="utf-8").splitlines()
    for options in ({}, decoding):
        rows = decode(model, tokenizer, [source for source, _ in PAIRS[5:12]], **options)
        assert found == [row[0].text for row in rows]
    card = (corpus / "run" / "averaged-2" / "README.md").read_text(encoding="utf-8")
    assert "beam 2, length penalty 1.5, searched further" in card
    assert train({**recipe, "num_beams": 3}, "--resume", "--max-steps", "6") == 0
    assert AutoModelForSeq2SeqLM.from_pretrained(corpus / "run").generation_config.num_beams == 3
    assert train({**recipe, **decoding}, "--resume", "--max-steps", "6") == 0  # no checkpoint is saved with it
    averaged = AutoModelForSeq2SeqLM.from_pretrained(corpus / "run" / "averaged-2").generation_config
    assert {name: getattr(averaged, name) for name in decoding} == decoding
    assert "beam 2, length penalty 1.5" in (corpus / "run" / "averaged-2" / "scores.json").read_text(encoding="utf-8")


def test_a_run_older_than_an_option_can_be_resumed(recipe, corpus):
    assert train(recipe) == 0
    started = json.loads((corpus / "run" / "recipe.json").read_text())
    del started["source_normalization"], started["embeddings"]
    (corpus / "run" / "recipe.json").write_text(json.dumps(started))
    assert train(recipe, "--resume", "--max-steps", "6") == 0


def test_figures_go_to_tensorboard(recipe, corpus, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(corpus / "figures"))
    assert train(recipe, "--report-to", "tensorboard") == 0
    events = EventAccumulator(str(corpus / "figures"))
    events.Reload()
    assert {"train/loss", "train/tokens_per_second", "eval/perplexity", "eval/bleu"} <= set(events.Tags()["scalars"])


def test_no_samples_are_shown_if_none_are_asked_for(capsys, recipe):
    assert train(recipe, "--num-samples", "0") == 0
    assert "translation:" not in capsys.readouterr().out
    assert "num_samples is -1; give 0 or more" in complaint(capsys, recipe, "--num-samples", "-1")


def test_going_on_from_a_saved_model(recipe, corpus, tiny_checkpoint):
    options = ["--model-name-or-path", str(tiny_checkpoint), "--average-last", "0"]
    assert train(recipe, *options) == 0
    saved = AutoModelForSeq2SeqLM.from_pretrained(corpus / "run")
    assert saved.config.d_model == 32  # the model's own, not the recipe's
    assert (corpus / "run" / "README.md").is_file()


def test_a_streamed_corpus_trains(capsys, recipe, corpus):
    assert train(recipe, "--streaming", "true", "--shuffle-buffer-size", "20", "--max-length", "9") == 0
    out = capsys.readouterr().out
    assert "Trained 4 updates" in out
    assert re.search(r"as far as the stream was read: \d+ pairs kept, \d+ left out: \d+ with more than 9 tokens", out)


def test_the_command_keeps_freed_memory(recipe, monkeypatch):
    calls = []
    monkeypatch.setattr(run, "keep_freed_memory", lambda: calls.append(1))
    changes = {"eval_strategy": "no", "max_steps": 1, "average_last": 0, "test_source": [], "test_target": []}
    assert train({**recipe, **changes, "validation_source": [], "validation_target": []}) == 0
    assert calls == [1]
