"""Recipes: what a YAML file and the command line say arrives, and what they get wrong is named."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import yaml
from small_runs import recipe_in
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.data.corpora import Corpus
from hf_vanilla_transformer.training import train
from hf_vanilla_transformer.training.arguments import (
    DataArguments,
    ModelArguments,
    VanillaTransformerTrainingArguments,
)
from hf_vanilla_transformer.training.options import UNSUPPORTED, RecipeError
from hf_vanilla_transformer.training.recipe import RECIPES, describe_options, describe_recipes, options_of, parse_recipe
from hf_vanilla_transformer.training.run_folder import check_folder, fixed_options, write_recipe
from hf_vanilla_transformer.training.supported import has_transformers, option_names

ROOT = Path(__file__).parents[2]
PACKAGED = sorted(RECIPES.glob("*.yaml"))


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe and reads it, with what the command line says."""

    def recipe(text, *overrides):
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return parse_recipe([path], options_of(overrides))

    return recipe


# Values


def test_defaults_are_the_papers():
    data, model, training = parse_recipe()
    assert (data, model) == (DataArguments(), ModelArguments())
    assert not data.corpus("train")
    assert model.config(37_000) == VanillaTransformerConfig.from_preset("base", vocab_size=37_000)
    assert (training.adam_beta1, training.adam_beta2, training.adam_epsilon) == (0.9, 0.98, 1e-9)
    assert (training.warmup_steps, training.max_steps, training.lr_scheduler_type) == (4000, 100_000, "inverse_sqrt")
    assert (training.learning_rate, training.weight_decay, training.max_grad_norm) == (None, 0.0, 0.0)
    assert (training.report_to, training.predict_with_generate) == ([], True)
    # Nothing is written where nobody said so; transformers would take "trainer_output".
    assert training.output_dir == ""


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("max_steps: -1\nnum_train_epochs: 3", "max_steps", -1),
        ("num_train_epochs: 3", "max_steps", -1),
        ("max_steps: '1000'", "max_steps", 1000),
        ("learning_rate: 1e-4", "learning_rate", 1e-4),
        ("max_steps: 1_000", "max_steps", 1000),
        ("learning_rate: 1", "learning_rate", 1.0),
        ("learning_rate: null", "learning_rate", None),
        ("max_grad_norm: ~", "max_grad_norm", 0.0),
        ("warmup_steps: 4e3", "warmup_steps", 4000),
        ("bf16: true", "bf16", True),
        ("predict_with_generate: false", "predict_with_generate", False),
        ("eval_strategy: no", "eval_strategy", IntervalStrategy.NO),
        ("eval_strategy: steps\neval_steps: 10", "eval_strategy", IntervalStrategy.STEPS),
        ("run_name: a = b # c", "run_name", "a = b"),
        ("\ufeffrun_name: a", "run_name", "a"),
        ("report_to: tensorboard", "report_to", ["tensorboard"]),
        ("report_to: none", "report_to", []),
        (
            "lr_scheduler_kwargs:\n  a: 1e-6\n  b: -1\n  c: {d: true, e: no}",
            "lr_scheduler_kwargs",
            {"a": 1e-6, "b": -1, "c": {"d": True, "e": "no"}},
        ),
        ("lr_scheduler_kwargs: '{\"timescale\": 1}'", "lr_scheduler_kwargs", {"timescale": 1}),
        ("average-last: 5", "average_last", 5),
    ],
)
def test_values_of_every_kind(recipe, text, name, value):
    *_, training = recipe(text)
    arrived = getattr(training, name)
    assert arrived == value
    assert isinstance(arrived, bool) == isinstance(value, bool)


def test_lists_of_files_and_words_that_look_like_something_else(recipe):
    data, *_ = recipe(
        "train_source: [a b.en, 'c,d.en', ü.en]\n"
        "train_target:\n- '-1'\n- '2.5'\n- no\n"
        "train_data: one.tsv\n"  # a single one needs no list
        "validation_data: []\n"
        "source_column: no\n"  # Norwegian, which YAML 1.1 takes for `false`
        "target_column: 2024-12-13\n"
    )
    assert data.train_source == ["a b.en", "c,d.en", "ü.en"]
    assert data.train_target == ["-1", "2.5", "no"]
    assert (data.train_data, data.validation_data) == (["one.tsv"], [])
    assert (data.source_column, data.target_column) == ("no", "2024-12-13")


def test_the_command_line_overrides_the_file(recipe):
    text = (
        "max_steps: 5\npreset: tiny\ntrain_source: [a, b]\npredict_with_generate: true\nbf16: true\nseed: 3\n"
        "lr_scheduler_kwargs: {timescale: 1}"
    )
    data, model, training = recipe(
        text, "--max-steps", "7", "--preset=big", "--train-source", "c", "d", "e", "--predict-with-generate=false",
        "--bf16", "false", "--lr-scheduler-kwargs", '{"timescale": 2}', "--d-model", "64",
    )  # fmt: skip
    assert (training.max_steps, training.predict_with_generate, training.bf16, training.seed) == (7, False, False, 3)
    assert (model.preset, model.d_model, data.train_source) == ("big", 64, ["c", "d", "e"])
    assert training.lr_scheduler_kwargs == {"timescale": 2}
    words = ["--train-data", "a.tsv", "b.tsv", "--dropout", "0", "--fp16=false", "--train-data=c.tsv", "--seed", "1"]
    data, model, training = parse_recipe([], options_of([*words, "--seed", "2"]))  # without a file
    assert (data.train_data, model.dropout, training.fp16) == (["a.tsv", "b.tsv", "c.tsv"], 0.0, False)
    assert training.seed == 2


SAVED = "model_name_or_path: saved"


@pytest.mark.parametrize(
    ("text", "words", "lost"),
    [
        (f"{SAVED}\nvocab_size: 300\npreset: tiny", [], "vocab_size"),
        ("", ["--model-name-or-path", "saved", "--encoder-layers", "6", "--tokenizer", "words"], "tokenizer, enc.*"),
        (SAVED, ["--tied", "none"], "tied"),
        (f"{SAVED}\nd_model: 64", ["--d-model", "null"], None),
        (f"{SAVED}\ndropout: 0.2\nnum_beams: 1", ["--tokenizer-name-or-path", "its"], None),
        # The model of the recipe, which the saved one replaces.
        ("vocab_size: 300\nd_model: 64", ["--model-name-or-path", "saved"], None),
    ],
)
def test_options_of_a_new_model_beside_a_saved_one(recipe, text, words, lost):
    if lost is None:
        assert recipe(text or "seed: 1", *words)[1].model_name_or_path == "saved"
        return
    with pytest.raises(RecipeError, match=f"^{lost} would have no effect: model_name_or_path has its own"):
        recipe(text or "seed: 1", *words)


def test_options_of_a_new_tokenizer_beside_a_saved_one(recipe):
    saved = ["--tokenizer-name-or-path", "saved"]
    assert recipe("vocab_size: 300", *saved)[1].vocab_size == 300  # of the recipe, whose tokenizer it replaces
    with pytest.raises(RecipeError, match=r"^tokenizer, vocab_size would have no effect: tokenizer_name_or_path has"):
        recipe("seed: 1", *saved, "--vocab-size", "300", "--tokenizer", "words")


def test_a_run_that_named_such_an_option_is_resumed_without_it(tmp_path):
    arguments = parse_recipe([], {"tokenizer_name_or_path": "saved", "output_dir": str(tmp_path)})
    write_recipe(tmp_path, {**fixed_options(arguments), "vocab_size": 300}, "data")
    check_folder(arguments, resume=True)


def test_values_need_not_be_text():
    options = {"learning_rate": 1, "bf16": False, "max-steps": 7, "report_to": ["none"], "seed": None}
    files = {"output_dir": Path("run"), "train_source": ("a", "b"), "train_target": ["c", "d"]}
    data, _, training = parse_recipe([], options | files)
    assert (training.learning_rate, training.bf16, training.max_steps, training.report_to) == (1.0, False, 7, [])
    assert (training.output_dir, data.train_source, data.train_target) == ("run", ["a", "b"], ["c", "d"])
    with pytest.raises(RecipeError, match=r"^max_steps is 1.5; give an integer$"):
        parse_recipe([], {"max_steps": 1.5})


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_bf16_works_on_a_cpu(recipe):
    *_, training = recipe("bf16: true")
    assert (training.bf16, training.use_cpu, training.device.type) == (True, True, "cpu")
    assert not training.dataloader_pin_memory  # which would warn


def test_several_gpus_without_a_launcher_train_no_data_parallel_model(monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    assert VanillaTransformerTrainingArguments()._n_gpu == 1


# What is wrong


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_step: 5", r"recipe\.yaml: unknown option 'max_step'; did you mean 'max_steps'\?"),
        ("xyzzy: 5", r"recipe\.yaml: unknown option 'xyzzy'$"),
        ("no_predict_with_generate: true", r"unknown option 'no_pred.*; did you mean 'predict_with_generate'\?"),
        ("max_steps: 5\nmax-steps: 6", r"recipe\.yaml:2: 'max_steps' is given twice"),
        ("max_steps: many", r"max_steps is 'many'; give an integer$"),
        ("max_steps: 1:30", r"max_steps is '1:30'; give an integer$"),
        ("max_steps: 1.5", r"max_steps is '1\.5'; give an integer$"),
        ("max_steps: [1, 2]", r"max_steps is \['1', '2'\]; give an integer$"),
        ("lr_scheduler_kwargs: [1]", r"lr_scheduler_kwargs is \['1'\]; give text or a mapping$"),
        ("learning_rate: fast", r"learning_rate is 'fast'; give a number$"),
        ("bf16: yes", r"bf16 is 'yes'; give true or false$"),
        (
            "train_source: [a, [b]]",
            r"train_source is \['a', \['b'\]\]; give a list of strings, or of mappings \{path: ",
        ),
        ("train_target: [a, [b]]", r"train_target is \['a', \['b'\]\]; give a list of strings$"),
        ("train_data: [a.tsv=2]", r"a weight has no effect on a single corpus; leave it out"),
        ("train_data: [a.tsv=0, b.tsv]", r"weights of training data are 0, 1; give numbers above 0"),
        ("train_data: [a.tsv, {path: b.tsv, weight: -1}]", r"weights of training data are 1, -1; give numbers"),
        ("train_data: [a.tsv=nan, b.tsv=inf]", r"weights of training data are nan, inf; give numbers above 0"),
        ("train_data: [a, {path: b, weight: heavy}]", r"list of strings, or of mappings \{path: NAME, weight:"),
        ("train_data: [a.tsv, {file: b.tsv, weight: 2}]", r"list of strings, or of mappings \{path: NAME, weight:"),
        ("validation_data: [{path: b.tsv, weight: 2}]", r"give a list of strings$"),
        ("eval_strategy: stepz", r"stepz is not a valid IntervalStrategy, please select one of"),
        ("log_level: loud", r"log_level is 'loud'; choose one of: detail, debug, "),
        ("lr_scheduler_type: cosin", r"cosin is not a valid SchedulerType, please select one of"),
        ("per_device_train_batch_tokens: -1", r"per_device_train_batch_tokens is -1; give 0 or more"),
        ("shuffle_buffer_size: 0", r"shuffle_buffer_size is 0; give 1 or more"),
        (
            "load_best_model_at_end: true\neval_strategy: steps\nsave_strategy: epoch",
            r"load_best_model_at_end requires .* Evaluation strategy: .* Save strategy: ",
        ),
        ("- max_steps: 5", r"recipe\.yaml is not a recipe; write one line per option, `max_steps: 1000`"),
        ("seed: 1\nmax_steps: 5: 6", r"recipe\.yaml:2: mapping values are not allowed here; write one line per"),
        ("seed: 1\n\tmax_steps: 5", r"recipe\.yaml:2: .*; write one line per option"),
        ("seed: 1\ntrain_data: [a\nbf16: true", r"recipe\.yaml:2: expected ',' or ']'"),
        ("train_data:\n  - a\n b: 1", r"recipe\.yaml:3: expected <block end>"),
        ("seed: !!python/object/apply:os.getcwd []", r"seed is \[\]; give an integer$"),
        (b"run_name: B\xfcsche", r"recipe\.yaml is not YAML: 'utf-8' codec can't decode byte 0xfc"),
    ],
)
def test_a_wrong_recipe_is_one_line_that_names_what_is_wrong(recipe, text, message):
    with pytest.raises(RecipeError, match=message) as caught:
        recipe(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--max-step", "5"], r"unrecognized arguments: --max-step 5; did you mean '--max-steps'\?"),
        (["--train-file=5"], r"unrecognized arguments: --train-file=5; did you mean '--train-split'\?"),
        (["--xyzzy"], r"unrecognized arguments: --xyzzy$"),
        (["max_steps", "5"], r"unrecognized arguments: max_steps 5"),
        (["--max-steps", "5", "6"], r"unrecognized arguments: 6$"),
        (["--max-steps"], r"argument --max-steps: expected one argument$"),
        (["--train-source"], r"argument --train-source: expected at least one argument$"),
        (["--lr-scheduler-kwargs", "{'a': 1}"], r"Expecting property name enclosed in double quotes"),
    ],
)
def test_wrong_overrides(recipe, overrides, message):
    with pytest.raises(RecipeError, match=message):
        recipe("seed: 1", *overrides)


# Corpora


def test_files_are_looked_up_in_data_dir(recipe, tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "data", tmp_path / "elsewhere.en"
    folder.mkdir()
    for path in (*(folder / name for name in ("a.en", "bpe", "a.de", "b.de", "a.tsv", "b.jsonl.gz")), elsewhere):
        path.write_text("x\n")
    data, *_ = recipe(
        f"data_dir: {folder}\n"
        "train_source: [a.en, bpe]\n"  # a text file needs no suffix
        "train_target: [a.de, b.de]\n"
        "train_data: [a.tsv, wmt/wmt14, user/corpus.v1, b.jsonl.gz]\n"  # a name on the Hub may have one
        f"test_source: [{elsewhere}]\n"
        "test_target: [a.de]\n"
        "source_column: en\ntarget_column: de\ndataset_config_name: de-en\nvalidation_split: dev\n"
        "validation_data: [wmt/wmt14]\n"
    )
    columns = {"source_column": "en", "target_column": "de", "configuration": "de-en"}
    assert data.corpus("train") == Corpus(
        source=(f"{folder}/a.en", f"{folder}/bpe"),
        target=(f"{folder}/a.de", f"{folder}/b.de"),
        tables=(f"{folder}/a.tsv", "wmt/wmt14", "user/corpus.v1", f"{folder}/b.jsonl.gz"),
        split="train",
        **columns,
    )
    assert data.corpus("test") == Corpus((str(elsewhere),), (f"{folder}/a.de",), split="test", **columns)
    assert data.corpus("validation") == Corpus(tables=("wmt/wmt14",), split="dev", **columns)
    monkeypatch.chdir(folder)
    assert DataArguments(train_data=["a.tsv"]).corpus("train").tables == ("a.tsv",)
    monkeypatch.setenv("HOME", str(folder))
    assert DataArguments(data_dir="~", train_data=["a.tsv"]).corpus("train").tables == (f"{folder}/a.tsv",)


def test_corpora_have_weights_in_recipes_and_on_the_command_line(recipe):
    text = "train_data: [a.tsv, {path: b.tsv, weight: 2.5}, user/set=3]\ntrain_source: [c.en=4]\ntrain_target: [c.de]"
    data, *_ = recipe(text)
    assert (data.train_source, data.train_data) == (["c.en"], ["a.tsv", "b.tsv", "user/set"])
    assert data.train_weights == [4.0, 1.0, 2.5, 3.0]  # in the order in which corpora are read
    data, *_ = recipe(text, "--train-data", "x.tsv", "y.tsv=1e-1")
    assert (data.train_data, data.train_weights) == (["x.tsv", "y.tsv"], [4.0, 1.0, 0.1])
    assert recipe("train_data: [a.tsv, b.tsv]")[0].train_weights == []
    assert recipe("train_source: [a.tsv=2, b.tsv]")[0].train_weights == [2.0, 1.0]  # tables have both sides
    data, *_ = recipe("train_source: [=2, b=2, c=d]\ntrain_target: [x, y, z]")
    assert (data.train_source, data.train_weights) == (["=2", "b", "c=d"], [1.0, 2.0, 1.0])


# Models


def test_presets_and_overrides_reach_the_configuration(recipe):
    _, model, _ = recipe(
        "preset: tiny\ndropout: 0\nlabel_smoothing: 0.2\nencoder_layers: 3\nposition_encoding: learned\n"
        "norm_position: pre\nfinal_layer_norm: true\ntied: none\n"
        "head_dim: 16\nmax_position_embeddings: 99\nvocab_size: 5000"
    )
    config = model.config(321)
    assert config == VanillaTransformerConfig.from_preset(
        "tiny", vocab_size=321, dropout=0.0, label_smoothing=0.2, encoder_layers=3, position_encoding="learned",
        norm_position="pre", final_layer_norm=True, share_encoder_decoder_embeddings=False, tie_word_embeddings=False,
        head_dim=16, max_position_embeddings=99,
    )  # fmt: skip
    assert (config.decoder_layers, config.d_model, config.attention_dropout) == (2, 128, 0.0)  # the preset's


# The recipes that come with the package, and what is said about options


@pytest.mark.parametrize("path", PACKAGED, ids=lambda path: path.name)
def test_the_packages_recipes(path):
    data, model, training = parse_recipe([path], {"output_dir": "outputs/test"})
    assert len(data.train_source) == len(data.train_target)
    assert training.max_steps > 0 or training.num_train_epochs > 0
    assert not training.save_total_limit or training.save_total_limit >= training.average_last
    assert not training.save_only_model  # every run can be resumed
    config = model.config(model.vocab_size)
    with torch.device("meta"):
        parameters = VanillaTransformerForConditionalGeneration(config).num_parameters()
    text = path.read_text(encoding="utf-8")
    for within, millions in re.findall(r"(within )?(\d+(?:\.\d+)?) ?M parameters", text):  # what its comments say
        assert parameters <= float(millions) * 1e6 or not within
        assert within or f"{parameters / 1e6:.{len(millions.partition('.')[2])}f}" == millions
    if path.name.startswith("multi30k"):
        assert parameters < 10_000_000  # as small as the models that are compared on it
    # Nothing in it is left to be read otherwise by another YAML library.
    assert yaml.safe_load(text).keys() <= {*vars(data), *vars(model), *vars(training)}


def test_the_packages_recipes_have_names(tmp_path, monkeypatch):
    assert PACKAGED
    monkeypatch.chdir(tmp_path)
    named, by_path = (
        parse_recipe([one], {"output_dir": "x"}) for one in ("multi30k_tiny", RECIPES / "multi30k_tiny.yaml")
    )
    assert named[:2] == by_path[:2]
    (tmp_path / "multi30k_tiny").write_text("max_steps: 7", encoding="utf-8")  # a file of the user's goes first
    assert parse_recipe(["multi30k_tiny"], {"output_dir": "x"})[2].max_steps == 7
    with pytest.raises(RecipeError, match=r"multi30k_tiniest can't be read .* package's recipes: .*multi30k_tiny, "):
        parse_recipe(["multi30k_tiniest"])
    with pytest.raises(RecipeError, match=r"can't be read \(Is a directory\); give a YAML file"):
        parse_recipe([tmp_path])


def test_options_are_listed_with_their_defaults_and_recipes_with_a_sentence():
    groups = describe_options().split("\n\n")
    assert [group.partition(":")[0] for group in groups] == ["Data", "Model", "Training"]
    lines = {line.split()[0]: line for group in groups for line in group.splitlines()[1:]}
    parts = (DataArguments, ModelArguments, VanillaTransformerTrainingArguments)
    names = {field.name for part in parts for field in dataclasses.fields(part) if field.init}
    assert lines.keys() == {f"--{name.replace('_', '-')}" for name in names - UNSUPPORTED}
    assert names - UNSUPPORTED <= option_names() <= names  # by which a wrong one is an error at once
    assert all(map(has_transformers, UNSUPPORTED))
    assert all(len(line.split()) > 2 and line.count("default:") <= 1 for line in lines.values())
    assert lines["--max-steps"].endswith("as many as num_train_epochs says. (default: 100000)")
    recipes = describe_recipes().splitlines()
    for file in PACKAGED:
        (line,) = [line for line in recipes if line.split(" ")[0] == file.stem]
        assert line.endswith(".")
    assert {f"  {file}" for file in RECIPES.glob("accelerate/*.yaml")} <= {*recipes}


def test_later_recipes_override_earlier_ones(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("max_steps: 5\ndropout: 0.3\nseed: 1\n")
    second.write_text("dropout: 0.0\nseed: null\n")
    _, model, training = parse_recipe([first, second], {"max_steps": 7})
    assert (training.max_steps, model.dropout, training.seed) == (7, 0.0, 42)
    second.write_text("dropuot: 0.0\n")
    with pytest.raises(RecipeError, match=r"second\.yaml: unknown option 'dropuot'; did you mean 'dropout'"):
        parse_recipe([first, second])


def test_the_command_is_a_function(tmp_path):
    lines = []
    trainer = train(overrides={**recipe_in(tmp_path), "num_beams": 1}, dry_run=True, say=lines.append)
    assert trainer.state.global_step == 4
    assert "Training data: 50 pairs kept, 0 left out" in lines
    assert not (tmp_path / "run").exists()
