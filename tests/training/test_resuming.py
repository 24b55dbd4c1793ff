"""Resuming: the same data or a refusal, damaged files replaced by what is left, one process per folder."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from test_training import rows, trainer_of
from trainer_runs import change_json, change_weights
from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration

from hf_vanilla_transformer import VanillaTransformerTokenizerFast
from hf_vanilla_transformer.checkpoints.loading import load_checkpoint
from hf_vanilla_transformer.data import corpora
from hf_vanilla_transformer.training.options import RecipeError
from hf_vanilla_transformer.training.run_folder import only_process_in

SIDES = {"source": "train.en", "target": "train.de"}
UNSCORED = {"average_last": 0} | {f"{part}_{side}": [] for part in ("validation", "test") for side in SIDES}


# ---- Changed data ----
def test_changed_data_is_refused(train, finished):
    """Though size and time of its files stay."""
    for name in SIDES.values():
        file = Path(finished["data_dir"], name)
        status = file.stat()
        file.write_text(file.read_text().replace("nine 7", "nine 8").replace("neun 7", "neun 8"))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    result = train(finished, "--resume", "--max-steps", "6")
    assert result.code == 2
    assert "the training data has changed since the run in" in result.error
    assert "remove data_fingerprint from its recipe.json to train on" in result.error
    assert not Path(finished["output_dir"], "checkpoint-6").exists()
    file = Path(finished["output_dir"], "recipe.json")
    before = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in before.items() if name != "data_fingerprint"}))
    assert train(finished | UNSCORED, "--resume", "--max-steps", "6").code == 0
    after = json.loads(file.read_text())  # it is the run's data from then on
    assert after.pop("data_fingerprint") != before.pop("data_fingerprint")
    assert after == before


def test_changed_data_of_a_stream_is_refused(train, recipe):
    recipe |= UNSCORED | {"streaming": True, "shuffle_buffer_size": 20}
    assert train(recipe).code == 0
    for name in SIDES.values():
        with Path(recipe["data_dir"], name).open("a") as stream:
            stream.write("nine 50\n")
    result = train(recipe, "--resume", "--max-steps", "6")
    assert result.code == 2
    assert "the training data has changed since the run in" in result.error


def test_data_on_the_hub_that_changes(train, recipe, monkeypatch):
    word = "nine"

    def load(name, *args, **kwargs):
        return Dataset.from_list([{"source": f"{word} {n}", "target": f"neun {n}"} for n in range(50)])

    monkeypatch.setattr(corpora, "load_dataset", load)
    recipe |= UNSCORED | {"train_source": [], "train_target": [], "train_data": ["some/thing"]}
    assert train(recipe).code == 0
    moved = recipe | {"train_data": ["other/place"]}
    assert train(moved, "--resume", "--max-steps", "6").code == 0
    word = "ten"
    assert "the training data has changed" in train(recipe, "--resume", "--max-steps", "8").error


def test_what_may_differ(train, finished, tmp_path):
    """Where the data is, what it is scored on, how and on how many checkpoints, and what is said."""
    (tmp_path / "elsewhere").mkdir()
    for file in Path(finished["data_dir"]).glob("train.??"):
        (tmp_path / "elsewhere" / file.name).write_bytes(file.read_bytes())  # with another time
        file.unlink()
    for side, name in (("source", "other.en"), ("target", "other.de")):
        (tmp_path / "elsewhere" / name).write_text("nine 3\n")
        finished |= {f"train_{side}": [str(tmp_path / "elsewhere" / SIDES[side])], f"test_{side}": [name]}
    finished |= {"data_dir": str(tmp_path / "elsewhere"), "validation_source": [], "validation_target": []}
    options = ("--logging-steps", "1", "--report-to", "tensorboard", "--num-beams", "2", "--average-last", "40")
    result = train(finished, "--resume", "--max-steps", "6", *options)
    assert result.code == 0, result.err
    assert "The run has 3 complete checkpoints, not 40: all of them are averaged" in result.out
    assert (tmp_path / "run" / "averaged-3" / "test.translations.txt").read_text().count("\n") == 1


# ---- A wrong test file never needs a new training ----
def test_a_test_file_that_breaks_during_training(train, finished, tmp_path):
    (tmp_path / "test.de").write_bytes(b"neun\n\xff\xfe\n")
    result = train(finished, "--resume")
    assert (result.code, "test.de:2: not UTF-8" in result.error) == (2, True)
    (tmp_path / "test.de").write_text("neun\n" * 7)
    assert train(finished, "--resume").code == 0
    Path(finished["output_dir"], "recipe.json").write_bytes(b"{")
    result = train(finished, "--resume", "--max-steps", "6")
    assert (result.code, "recipe.json is cut short or not JSON" in result.error) == (2, True)


# ---- Damaged files ----
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_files_are_replaced_by_what_is_left(train, finished, damage):
    """The tokenizer by a checkpoint's, a checkpoint by the one before it."""
    tokenizer, optimizer = (
        Path(finished["output_dir"], name) for name in ("tokenizer/tokenizer.json", "checkpoint-4/optimizer.pt")
    )
    tokenizer.unlink() if damage == "gone" else tokenizer.write_bytes(tokenizer.read_bytes()[:100])
    optimizer.write_bytes(optimizer.read_bytes()[:-20])
    result = train(finished | UNSCORED, "--resume", "--max-steps", "6")
    assert result.code == 0
    assert all(text in result.out for text in ("Resuming from", "checkpoint-2", "Trained 4 updates (6 in all)"))
    load_checkpoint(finished["output_dir"])  # the tokenizer is the model's


def test_a_checkpoint_that_the_run_did_not_resume_from_is_not_averaged(train, finished):
    """Checkpoint 4 can be loaded, but is of the run before."""
    Path(finished["output_dir"], "checkpoint-4", "optimizer.pt").unlink()
    result = train(finished, "--resume", "--max-steps", "6", "--save-steps", "3")
    assert result.code == 0, result.err
    averaged = load_file(Path(finished["output_dir"], "averaged-2", "model.safetensors"))
    parts = [load_file(Path(finished["output_dir"], f"checkpoint-{n}", "model.safetensors")) for n in (3, 6)]
    for name, weight in averaged.items():
        torch.testing.assert_close(weight, (parts[0][name] + parts[1][name]) / 2, rtol=0, atol=1e-7)


def test_weights_of_another_model_are_not_completed_by_random_ones(train, finished):
    for checkpoint in Path(finished["output_dir"]).glob("checkpoint-*"):
        name = next(iter(load_file(checkpoint / "model.safetensors")))
        change_weights(checkpoint, **{name: None})
    result = train(finished, "--resume", "--max-steps", "6")
    assert result.code == 2
    assert f"only one of the two has {name}" in result.error


# ---- Options that change ----
def test_another_learning_rate_and_other_betas_take_effect(train, finished, caplog):
    """As the error of a run that diverged advises."""
    changes = {"learning_rate": 1e-4, "adam_beta2": 0.9, "adam_epsilon": 1e-6, "weight_decay": 0.1, **UNSCORED}
    with caplog.at_level("WARNING"):
        assert train(finished | changes, "--resume", "--max-steps", "6", "--logging-steps", "1").code == 0
    assert re.search(r"resuming with a learning rate of 6\.32e-05, not 0\.1", caplog.text), caplog.text
    log = json.loads(Path(finished["output_dir"], "trainer_state.json").read_text())["log_history"]
    rates = {entry["step"]: entry["learning_rate"] for entry in log if "learning_rate" in entry}
    assert rates[5] == pytest.approx(1e-4 * (2 / 5) ** 0.5)
    assert rates[6] == pytest.approx(1e-4 * (2 / 6) ** 0.5)
    saved = torch.load(Path(finished["output_dir"], "checkpoint-6", "optimizer.pt"), weights_only=True)
    assert [group["weight_decay"] for group in saved["param_groups"]] == [0.1, 0.0]
    assert {(group["eps"], tuple(group["betas"])) for group in saved["param_groups"]} == {(1e-6, (0.9, 0.9))}


TOKENS, SENTENCES = {"per_device_train_batch_tokens": 128}, {"per_device_train_batch_tokens": 0}
STREAM = {**TOKENS, "streaming": True, "shuffle_buffer_size": 20}
PAIRS = 40  # of an epoch


@pytest.mark.parametrize(
    ("before", "change", "told"),
    [
        (TOKENS, {"per_device_train_batch_tokens": 256}, "per_device_train_batch_tokens 256, not 128"),
        (
            TOKENS,
            {"gradient_accumulation_steps": 2, "length_tolerance": 0.5},
            "length_tolerance 0.5, not 0.0, devices times gradient_accumulation_steps 2, not 1",
        ),
        (TOKENS, {"packed": True}, "packed True, not False"),
        (TOKENS, SENTENCES, "per_device_train_batch_tokens 0, not 128"),
        (SENTENCES, {"per_device_train_batch_size": 4}, "per_device_train_batch_size 4, not 8"),
        (
            STREAM,
            {"shuffle_buffer_size": 30, "dataloader_num_workers": 1},
            "shuffle_buffer_size 30, not 20, dataloader_num_workers 1, not 0",
        ),
        # These change nothing of the order.
        ({**TOKENS, "data_seed": 1}, {"seed": 7, "dataloader_num_workers": 1, "shuffle_buffer_size": 5}, None),
        (SENTENCES, {"length_tolerance": 0.5, "rdrop_alpha": 1.0, "eval_strategy": "steps", "eval_steps": 5}, None),
        (STREAM, {"max_grad_norm": 1.0, "save_steps": 7}, None),
    ],
)
def test_other_batches_are_told_as_pairs_come_twice(tiny_checkpoint, tmp_path, seen, caplog, before, change, told):
    def trainer(streaming=False, **options):
        data = rows(AutoTokenizer.from_pretrained(tiny_checkpoint), PAIRS).add_column("id", ["a text"] * PAIRS)
        parts = {"train_dataset": data.to_iterable_dataset() if streaming else data, "eval_dataset": data.select([0])}
        return trainer_of(tiny_checkpoint, tmp_path, **{"save_strategy": "steps", "save_steps": 3} | parts | options)

    trainer(max_steps=3, **before).train()
    with caplog.at_level("WARNING"):
        trainer(max_steps=20, **before | change).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert len(seen) >= PAIRS
    assert (len(set(seen[:PAIRS])) < PAIRS) == (told is not None)
    warning = f"resuming with {told} makes other batches: in the rest of this epoch, some pairs come a second time and"
    assert (warning in caplog.text) == ("makes other batches" in caplog.text) == (told is not None)


def test_another_order_is_refused(train, finished):
    """A checkpoint of one seed isn't continued as a run of another, nor one of another optimizer."""
    for option, value in (("--seed", "7"), ("--data-seed", "7"), ("--optim", "sgd")):
        result = train(finished, "--resume", "--max-steps", "6", option, value)
        assert result.code == 2
        told = "optim 'adamw_torch_fused', not 'sgd'" if value == "sgd" else "seed 42, not 7"
        assert f"was started with {told}; resume with the same data, in the same order," in result.error
    evaluate = {**finished, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "bleu"}
    options = ("--seed", "7", "--data-seed", "42", "--early-stopping-patience", "9")
    assert train(evaluate, "--resume", "--max-steps", "6", *options).code == 0  # there was no metric before
    result = train(evaluate, "--resume", "--max-steps", "8", *options, "--metric-for-best-model", "perplexity")
    assert (result.code, "metric_for_best_model 'bleu', not 'perplexity'" in result.error) == (2, True)


# ---- One process per folder ----
def test_a_second_process_is_refused(train, finished, caplog):
    with only_process_in(Path(finished["output_dir"])):
        result = train(finished, "--resume", "--max-steps", "6")
    assert result.code == 2
    assert "another process is training in" in result.error
    with caplog.at_level("WARNING"):  # it warns of nothing
        result = train(finished | UNSCORED, "--resume", "--max-steps", "6")
    assert result.code == 0  # the file of the lock is still there
    assert "missing keys" not in result.err + caplog.text


def test_a_folder_that_is_refused_gets_no_file(train, recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("text")
    assert "is not empty" in train(recipe).error
    assert "no run to resume" in train(recipe, "--resume").error
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]
    with (
        pytest.raises(RecipeError, match="can't be written"),
        only_process_in(tmp_path / "run" / "thesis.tex" / "run"),
    ):
        pass


def test_models_alone_are_not_overwritten_by_a_new_start(train, finished):
    for checkpoint in Path(finished["output_dir"]).glob("checkpoint-*"):
        (checkpoint / "optimizer.pt").unlink()
    before = Path(finished["output_dir"], "checkpoint-4", "model.safetensors").read_bytes()
    result = train(finished, "--resume", "--max-steps", "6")
    assert result.code == 2
    assert "save_only_model leaves it out); start a new run from the weights with --model-name-or-path" in result.error
    assert Path(finished["output_dir"], "checkpoint-4", "model.safetensors").read_bytes() == before


# ---- Models and tokenizers of others ----
def test_a_saved_model_is_trained_with_the_recipes_dropout(train, recipe, checkpoint):
    options = ("--model-name-or-path", checkpoint, "--dropout", "0.25", "--label-smoothing", "0.2")
    assert train(recipe | UNSCORED, *options, "--max-steps", "0").code == 0
    config = json.loads(Path(recipe["output_dir"], "config.json").read_text())
    assert (config["dropout"], config["label_smoothing"]) == (0.25, 0.2)


OWN_CODE = """
from transformers import BartConfig, BartForConditionalGeneration
class OwnConfig(BartConfig):
    model_type = "own"
class OwnModel(BartForConditionalGeneration):
    config_class = OwnConfig
"""


def test_a_model_in_half_precision_with_code_of_its_own_is_fine_tuned(train, recipe, checkpoint):
    """In float32; its code is trusted to the end, and when the run is resumed."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16}
    config = BartConfig(vocab_size=len(tokenizer), **sizes, **ids, forced_eos_token_id=None)
    BartForConditionalGeneration(config).bfloat16().save_pretrained(checkpoint)
    (checkpoint / "own.py").write_text(OWN_CODE)
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForSeq2SeqLM": "own.OwnModel"}
    change_json(checkpoint / "config.json", model_type="own", auto_map=own)
    recipe |= UNSCORED | {"average_last": 2}
    options = ("--model-name-or-path", checkpoint, "--learning-rate", "0.01", "--trust-remote-code")
    refused = train(recipe, *options, "--gnmt-length-penalty", "1")
    assert refused.code == 2
    assert refused.error.endswith("gnmt_length_penalty has no effect on a OwnModel; leave it out")
    for further in ((), ("--resume", "--max-steps", "6")):
        result = train(recipe, *options, *further)
        assert result.code == 0, result.err
    weights = load_file(Path(recipe["output_dir"], "averaged-2", "model.safetensors"))
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_a_tokenizer_that_is_not_the_models(train, recipe, checkpoint):
    """It has changed since a run was started, or was given beside another model."""
    recipe |= UNSCORED | {"tokenizer_name_or_path": str(checkpoint), "max_steps": 2}
    recipe.pop("vocab_size", None)
    assert train(recipe).code == 0
    texts = [f"wort {number} {chr(97 + number % 26) * 3}" for number in range(3000)]
    size = len(AutoTokenizer.from_pretrained(checkpoint))
    other = VanillaTransformerTokenizerFast.train_from_iterator(texts, vocab_size=size, show_progress=False)
    other.save_pretrained(checkpoint)
    saved = ("--model-name-or-path", recipe["output_dir"], "--output-dir", checkpoint.with_name("tuned"))
    for options in (("--resume", "--max-steps", "6"), saved):
        result = train(recipe, *options)
        assert (result.code, "trained with another tokenizer" in result.error) == (2, True), result.err
