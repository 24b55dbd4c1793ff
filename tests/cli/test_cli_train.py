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


@pytest.fixture
def run_train(vanilla_transformer):
    """Runs `train` on a recipe: exit code, output, errors."""

    def run(recipe, *options):
        path = Path(recipe["data_dir"]) / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return vanilla_transformer("train", "--config", path, *options)

    return run


NO_DATA = {"train_source": [], "train_target": []}


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"output_dir": None}, (), "--output-dir"),
        (NO_DATA, (), "no training data"),
        ({"train_target": []}, (), "1 source files but 0 target files"),
        ({"validation_source": [], "validation_target": []}, (), "eval_strategy needs"),
        ({"test_source": ["nowhere.en"]}, (), "nowhere.en: no such file"),
        ({"average_last": 5, "save_total_limit": 3}, (), "keep at least 5"),
        ({"early_stopping": "soon"}, (), "early_stopping is 'soon'; give true, false or never"),
        ({"num_beams": 0}, (), "num_beams is 0; give 1 or more"),
        ({"gnmt_length_penalty": -1}, (), "gnmt_length_penalty is -1.0; give 0 or more"),
        ({"num_samples": -1}, (), "num_samples is -1; give 0 or more"),
        ({"max_length": 1}, (), "no sentence pair is left"),
        ({"gradient_accumulation_steps": 1000}, (), "50 sentence pairs are too few for 1 processes"),
        ({"streaming": True, "max_length": 129}, (), "129 may not fit into per_device_train_batch_tokens 128"),
        ({"vocab_size": 50}, (), "vocab_size=50: give an integer of at least 259"),
        ({"preset": "huge"}, (), "preset"),
        ({"d_model": 130}, (), "d_model"),
        ({"dropout": 2}, (), "dropout"),
        ({}, ("--resum",), "unrecognized arguments: --resum; did you mean '--resume'?"),
        ({}, ("--dry-ru",), "unrecognized arguments: --dry-ru; did you mean '--dry-run'?"),
        ({}, ("--list-recipe",), "unrecognized arguments: --list-recipe; did you mean '--list-recipes'?"),
        ({}, ("--max-step",), "unrecognized arguments: --max-step; did you mean '--max-steps'?"),
        ({}, ("--bf16-eval",), "did you mean '--bf16'?"),  # which `train` supports
        ({}, ("--max-steps", "many"), "max_steps is 'many'; give an integer"),
        ({}, ("--fsdp", "full_shard"), "fsdp isn't supported by `train`"),
        ({}, ("--config", "multi30k_tni"), "did you mean 'multi30k_tiny'?"),
        # Options that come later override earlier ones, alone too, and a value behind "=" may have spaces.
        ({}, ("--train-source=no where.en",), "no where.en: no such file"),
        (NO_DATA, ("--config", "more.yaml"), "nowhere.en: no such file"),
    ],
)  # fmt: skip
def test_wrong_use_is_told(run_train, recipe, corpus, monkeypatch, changes, options, message):
    monkeypatch.chdir(corpus)
    Path("more.yaml").write_text("train_source: [nowhere.en]\ntrain_target: [nowhere.de]\n")
    result = run_train(recipe | changes, *options)
    assert (result.code, message in result.error) == (2, True), result.err
    assert result.err.count("\n") == 1
    assert not list(corpus.glob("run/*.safetensors"))


def test_a_run_that_failed_before_training_can_be_started_again(run_train, recipe, corpus):
    assert "longer than a batch of 3 tokens" in run_train(recipe, "--per-device-train-batch-tokens", "3").error
    assert {path.name for path in (corpus / "run").iterdir()} == {"recipe.json", "run.lock", "tokenizer"}
    assert run_train(recipe, "--vocab-size", "290", "--eval-strategy", "no", "--average-last", "0").code == 0
    assert AutoModelForSeq2SeqLM.from_pretrained(corpus / "run").config.vocab_size <= 290


def test_all_options_are_listed(vanilla_transformer):
    code, listed, _ = vanilla_transformer("train", "--list-options")
    assert code == 0
    assert all(f"--{name} " in listed for name in ("train-source", "dropout", "learning-rate-factor", "adam-beta2"))
    assert "--train_source" not in listed


def test_a_run_from_text_to_scores(run_train, recipe, corpus):
    (code, out, _), run = run_train(recipe), corpus / "run"
    assert code == 0
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


def test_a_finished_run_can_be_resumed(run_train, recipe, corpus):
    assert run_train(recipe).code == 0
    assert "d_model 16, not 32" in run_train(recipe, "--resume", "--d-model", "32").error
    started = json.loads((corpus / "run" / "recipe.json").read_text())
    del started["source_normalization"], started["embeddings"]  # the run is older than these options
    (corpus / "run" / "recipe.json").write_text(json.dumps(started))
    code, out, _ = run_train(recipe, "--resume", "--max-steps", "6")
    assert code == 0
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


@pytest.mark.parametrize(
    ("interruption", "advice", "options", "trained"),
    [
        (CtrlC(1, False), "there is no checkpoint yet; the same command starts over", (), "3 updates in"),
        (
            CtrlC(3, True),
            "the same command with --resume resumes from {}/checkpoint-2",
            ("--resume",),
            "1 updates (3 in all)",
        ),
    ],
)
def test_ctrl_c_says_how_the_run_is_resumed(
    run_train, monkeypatch, recipe, corpus, interruption, advice, options, trained
):
    add_callback(monkeypatch, interruption)
    recipe |= {"max_steps": 9, "eval_strategy": "no", "average_last": 0, "test_source": [], "test_target": []}
    result = run_train(recipe)
    assert result.code == 130
    assert f"warning: interrupted: {advice.format(corpus / 'run')}\n" in result.err
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
    assert "warning: interrupted: there is no checkpoint yet; the same command starts over" in err


def test_the_model_is_saved_with_the_recipes_decoding(run_train, recipe, corpus, monkeypatch):
    """The engine has translated the validation and the test set, and transformers' loop finds the same."""
    used = []
    monkeypatch.setattr(finish, "attach_if_supported", lambda model: used.append(attach_if_supported(model)))
    decoding = {"num_beams": 2, "gnmt_length_penalty": 1.5, "early_stopping": False}
    assert run_train({**recipe, **decoding}).code == 0
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
    assert "beam 2, length penalty 1.5, early\\_stopping=False" in card
    assert run_train({**recipe, "num_beams": 3}, "--resume", "--max-steps", "6").code == 0
    assert AutoModelForSeq2SeqLM.from_pretrained(corpus / "run").generation_config.num_beams == 3
    assert run_train({**recipe, **decoding}, "--resume", "--max-steps", "6").code == 0  # no checkpoint is saved with it
    averaged = AutoModelForSeq2SeqLM.from_pretrained(corpus / "run" / "averaged-2").generation_config
    assert {name: getattr(averaged, name) for name in decoding} == decoding
    assert "beam 2, length penalty 1.5" in (corpus / "run" / "averaged-2" / "scores.json").read_text(encoding="utf-8")


def test_figures_go_to_tensorboard_and_no_samples_to_the_output(run_train, recipe, corpus, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(corpus / "figures"))
    output = f"--output-dir={corpus / 'my run'}"  # a value with a space is no recipe
    options = ("--report-to", "tensorboard", "--num-samples", "0", "--average-last=0")
    code, out, _ = run_train(recipe, output, *options)
    assert (code, "translation:" in out) == (0, False)
    assert (corpus / "my run" / "model.safetensors").is_file()
    events = EventAccumulator(str(corpus / "figures"))
    events.Reload()
    assert {"train/loss", "train/tokens_per_second", "eval/perplexity", "eval/bleu"} <= set(events.Tags()["scalars"])


def test_going_on_from_a_saved_model(run_train, recipe, corpus, tiny_checkpoint, monkeypatch):
    calls = []
    monkeypatch.setattr(run, "keep_freed_memory", lambda: calls.append(1))
    options = ["--model-name-or-path", str(tiny_checkpoint), "--average-last", "0"]
    assert (run_train(recipe, *options).code, calls) == (0, [1])
    saved = AutoModelForSeq2SeqLM.from_pretrained(corpus / "run")
    assert saved.config.d_model == 32  # the model's own, not the recipe's
    assert (corpus / "run" / "README.md").is_file()


def test_a_streamed_corpus_trains(run_train, recipe):
    out = run_train(recipe, "--streaming", "true", "--shuffle-buffer-size", "20", "--max-length", "9").out
    assert "Trained 4 updates" in out
    assert re.search(r"as far as the stream was read: \d+ pairs kept, \d+ left out: \d+ with more than 9 tokens", out)
