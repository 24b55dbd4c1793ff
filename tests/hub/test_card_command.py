"""`vanilla-transformer card`: the card of a run, what is added, what is kept, and what is left out."""

import json
import re
import shutil
from dataclasses import replace
from datetime import date
from functools import partial

import pytest
import yaml
from hub_client import change_weights
from huggingface_hub import ModelCard
from small_runs import recipe_in

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.hub.facts import CurvePoint, curve_of, read_facts
from hf_vanilla_transformer.hub.model_card import save_card


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four updates with evaluations; its model is in `averaged-2`."""
    folder = tmp_path_factory.mktemp("card")
    recipe = {**recipe_in(folder), "eval_strategy": "steps", "eval_steps": 2, "generation_num_beams": 1}
    assert trained_in(folder, **recipe) == 0
    return folder / "run"


def trained_in(folder, *options, **recipe):
    """Trains by a recipe in a folder; returns the exit code."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "num_beams": 1}), encoding="utf-8")
    return cli.main(["train", "--config", str(folder / "recipe.yaml"), *options])


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained / "averaged-2", tmp_path / "averaged-2")


@pytest.fixture
def card(vanilla_transformer):
    """Runs the command; returns code, output and errors."""
    return partial(vanilla_transformer, "card")


def data_of(folder):
    return ModelCard.load(folder / "README.md").data


def text_of(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def test_the_card_that_training_wrote(trained):
    text = text_of(trained / "averaged-2")
    tables = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", text, re.MULTILINE))
    config = json.loads((trained / "averaged-2" / "config.json").read_text())
    state = json.loads((trained / "trainer_state.json").read_text())
    assert {*re.findall(r'from_pretrained\("([^"]+)"', text)} == {"./averaged-2"}
    assert "trust_remote_code" not in text
    assert tables["width (d_model)"] == str(config["d_model"])
    assert tables["updates"] == "4"
    assert tables["target tokens in all"] == str(max(one.get("target_tokens", 0) for one in state["log_history"]))
    assert tables["averaged checkpoints"] == "2"
    assert tables["optimizer"].startswith("Adam, beta 0.9 and 0.98")
    assert tables["peak learning rate"] == "0.1768"  # (16 * 2)^-0.5
    assert (tables["schedule"], tables["seed"]) == ("inverse sqrt, 2 updates of warm-up", "42")
    assert re.fullmatch(r".+, \d+ threads?", tables["hardware"])
    assert re.fullmatch(r"\d:\d\d:\d\d", tables["time (h:mm:ss)"])
    rows = [re.split(r" \| ", line.strip("| ")) for line in text.splitlines() if re.match(r"\| [24] \|", line)]
    evaluations = [entry for entry in state["log_history"] if "eval_loss" in entry]
    assert [row[0] for row in rows] == ["2", "4"]
    assert [row[3:] for row in rows] == [
        [f"{one['eval_perplexity']:.2f}", f"{one['eval_bleu']:.2f}"] for one in evaluations
    ]
    scores = json.loads((trained / "averaged-2" / "scores.json").read_text())
    shown = [
        (one.dataset_split, one.metric_name, one.metric_args["signature"])
        for one in data_of(trained / "averaged-2").eval_results
    ]
    assert shown == [(one["split"], score["name"], score["signature"]) for one in scores for score in one["scores"]]


def test_what_the_user_says_is_added_and_the_rest_is_as_it_was(folder, card):
    before = text_of(folder)
    options = ["--source-lang", "en", "--target-lang", "de", "--license", "cc-by-4.0", "--dataset", "a/b", "c"]
    code, out, err = card(folder, *options, "--title", "Numbers", "--limits", "It knows numbers.", "--overwrite")
    assert (code, out, err) == (0, f"wrote {folder}/README.md\n", "")
    data, text = data_of(folder), text_of(folder)
    assert (data.language, data.license, data.datasets) == (["en", "de"], "cc-by-4.0", ["a/b", "c"])
    assert "that translates from `en` to `de`" in text
    assert "\n# Numbers\n" in text
    assert "## Limits\n\nIt knows numbers.\n\nThe model translates one sentence" in text
    old, new = ({one for one in card.splitlines() if one.startswith("|")} for card in (before, text))
    assert old == new
    # and once more, without options
    assert card(folder, "--overwrite")[0] == 0
    assert text_of(folder) == text


@pytest.mark.parametrize("name", ["README.md", "model_card.json"])
@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_written_through_a_link(folder, card, tmp_path, name, there):
    target, link = tmp_path / "precious", folder / name
    if there:
        target.write_text("{}")
    link.unlink()
    link.symlink_to(target)
    code, _, err = card(folder, "--overwrite")
    assert code == 2
    assert f"is a link to {target}" in err
    assert target.exists() is there
    assert not there or target.read_text() == "{}"


def test_nothing_is_guessed(folder, card):
    code, out, _ = card(folder, "--overwrite")
    assert code == 0
    assert out.splitlines()[1:] == [
        "note: the card names no languages (--source-lang, --target-lang)",
        "note: the card names no licence (--license)",
    ]
    assert data_of(folder).to_dict().keys() == {"library_name", "pipeline_tag", "tags", "model-index"}
    assert "needed" not in text_of(folder).lower()


def test_an_existing_card_stays(folder, card):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, _, err = card(folder, "--license", "mit")
    assert code == 2
    assert err == f"vanilla-transformer: error: {folder}/README.md exists; give --overwrite to replace it\n"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_what_the_user_has_written_into_the_metadata_is_kept(folder, card):
    file = folder / "README.md"
    own = "---\nlicense: mit\nlanguage: fr\nbase_model: some/body\ndatasets: [a/b]\ntags: [mine]\n"
    file.write_text(
        text_of(folder)
        .replace("---\n", own, 1)
        .replace("tags:\n- vanilla_transformer\n- attention-is-all-you-need\n", "")
    )
    assert card(folder, "--overwrite")[0] == 0
    data = data_of(folder)
    assert (data.license, data.language, data.base_model, data.datasets) == ("mit", ["fr"], "some/body", ["a/b"])
    assert data.tags == ["vanilla_transformer", "attention-is-all-you-need", "mine"]
    assert card(folder, "--language", "en", "de", "--language", "cs", "--overwrite")[0] == 0
    assert data_of(folder).language == ["en", "de", "cs"]


def test_fields_of_the_metadata_that_no_card_has_by_itself_are_kept(folder, card):
    said = {"license": "other", "license_name": "ours", "widget": [{"text": "a: b"}], "since": date(2026, 1, 2)}
    said |= {"language": ["de", False], "base_model": ["a/one", "b/two"], "pipeline_tag": "text2text-generation"}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(said)}---\n", encoding="utf-8")  # YAML's no is False
    for _ in range(2):
        assert card(folder, "--overwrite")[0] == 0
        data = data_of(folder).to_dict()
        assert data == data | said | {"language": ["de", "no"]}


def test_what_the_author_removed_or_changed_in_the_metadata_counts(folder, card):
    said = ["--license", "mit", "--dataset", "a/b", "--source-lang", "en", "--target-lang", "de"]
    assert card(folder, *said, "--overwrite")[0] == 0
    text = (
        text_of(folder)
        .replace("license: mit\n", "")
        .replace("datasets:\n- a/b\n", "")
        .replace("\n- de\n", "\n- fr\n", 1)
    )
    (folder / "README.md").write_text(text)
    assert card(folder, "--overwrite")[0] == 0
    data = data_of(folder)
    assert (data.license, data.datasets, data.language) == (None, None, ["en", "fr"])
    assert "`de`" not in text_of(folder)


@pytest.mark.slow
def test_what_the_author_has_said_survives_a_longer_training(tmp_path, card):
    """Of five checkpoints to be averaged, the run has two at first. The time of both trainings is unknown."""
    recipe = {**recipe_in(tmp_path), "eval_strategy": "no", "save_total_limit": 5, "average_last": 5}
    averaged = tmp_path / "run" / "averaged-2"
    assert trained_in(tmp_path, **recipe) == 0
    assert "\n| time (h:mm:ss) | " in text_of(averaged)
    said = ["--source-lang", "en", "--target-lang", "de", "--license", "mit", "--title", "Ours", "--limits", "Numbers."]
    assert card(averaged, *said, "--overwrite")[0] == 0
    assert trained_in(tmp_path, "--resume", **recipe) == 0
    text, data = text_of(averaged), data_of(averaged)
    assert (data.language, data.license) == (["en", "de"], "mit")
    assert all(one in text for one in ("# Ours\n", "from `en` to `de`", "Numbers.\n", "| updates | 4 |"))
    assert "\n| time (h:mm:ss) | " not in text


def test_other_weights_have_no_known_training(folder, card):
    change_weights(folder)
    said = ["--source-lang", "en", "--target-lang", "de"]
    code, out, _ = card(folder, "--license", "mit", *said, "--overwrite")
    assert code == 0
    assert (
        "note: the weights have changed since model_card.json was written: what it says of their training is left out"
        in out
    )
    text = text_of(folder)
    assert re.findall("^## (.*)", text, re.MULTILINE) == ["How to use", "Architecture", "Limits", "Citation"]
    assert "BLEU" not in text
    assert "parameters | 15,552" in text
    assert "note: the weights" not in card(folder, "--overwrite")[1]


# ---- What is wrong ----
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "my-run"], "--name my-run is not a repository's name; give user/name"),
        (["--lang", "en"], "unrecognized arguments: --lang"),
    ],
)
def test_wrong_options(folder, card, options, message):
    before = text_of(folder)
    code, _, err = card(folder, "--overwrite", *options)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert text_of(folder) == before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "is not a folder; DIR must be that of a saved model"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing; give a folder that"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing; give a folder"),
        (lambda folder: (folder / "model_card.json").write_text("{"), "model_card.json is cut short or not JSON"),
        (lambda folder: spoil_facts(folder, stepps=3), "unexpected keyword argument 'stepps'); correct it"),
        (lambda folder: spoil_facts(folder, recipe={"x": 1}), "model_card.json can't be read"),
        (lambda folder: spoil_facts(folder, evaluations=[3]), "model_card.json can't be read"),
        (lambda folder: (folder / "README.md").write_text("---\na: [\n---\n"), "README.md isn't a model card"),
        (lambda folder: (folder / "README.md").write_text("---\n- a\n---\n"), "README.md isn't a model card"),
        (lambda folder: (folder / "README.md").write_text("---\na: &x [y]\nb: *x\n---\n"), "has an alias of YAML"),
        (lambda folder: (folder / "README.md").write_bytes(b"\xff\xfe"), "README.md isn't a model card"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_told_in_one_line(folder, card, spoil, message):
    spoil(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, _, err = card(folder, "--overwrite")
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def spoil_facts(folder, **values):
    file = folder / "model_card.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


# ---- The facts ----
def test_facts_survive_the_file(folder):
    before, note = read_facts(folder)
    assert (before.recipe.steps, len(before.evaluations), len(before.samples), note) == (4, 2, 5, None)
    facts = replace(before, name="me/model", training_files=["/home/somebody/train.en", r"C:\data\train.de"])
    save_card(folder, facts)
    assert "somebody" not in (folder / "model_card.json").read_text()
    assert read_facts(folder) == (replace(facts, training_files=["train.en", "train.de"]), None)


def test_a_curve_has_ten_points_at_most_from_the_first_to_the_last():
    log = [{"step": n, "loss": 10 - n / 100, "target_tokens": n * 7} for n in range(10, 1001, 10)]
    points = curve_of(log)
    assert [point.step for point in points] == [10, 120, 230, 340, 450, 560, 670, 780, 890, 1000]
    assert points[-1] == CurvePoint(1000, 7000, 0.0)
    evaluated = [{"step": n, "eval_loss": 1.0, "eval_perplexity": 2.7, "eval_bleu": 1.5} for n in (500, 1000)]
    assert curve_of([*log, *evaluated]) == [CurvePoint(500, 3500, 5.0, 2.7, 1.5), CurvePoint(1000, 7000, 0.0, 2.7, 1.5)]
    of_the_best = {"step": 1000, "eval_loss": 0.9, "eval_perplexity": 2.5, "eval_bleu": 1.6}  # `evaluate()` at the end
    assert curve_of([*log, *evaluated, of_the_best]) == curve_of([*log, *evaluated])
    assert curve_of([{"train_runtime": 1.0}, {"step": 3, "train_runtime": 1.0}]) == []
