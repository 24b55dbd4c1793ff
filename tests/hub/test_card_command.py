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
from trainer_runs import change_json

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.checkpoints.kinds import FACTS
from hf_vanilla_transformer.data.symbols import train_tokenizer
from hf_vanilla_transformer.hub.facts import curve_of, inherited, read_facts
from hf_vanilla_transformer.hub.model_card import save_card


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four updates with evaluations; its model is in `averaged-2`."""
    folder = tmp_path_factory.mktemp("card")
    recipe = {**recipe_in(folder), "eval_strategy": "steps", "eval_steps": 2, "num_beams": 1}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert cli.main(["train", "--config", str(folder / "recipe.yaml")]) == 0
    return folder / "run"


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
    state = json.loads((trained / "trainer_state.json").read_text())
    assert {*re.findall(r'from_pretrained\("([^"]+)"', text)} == {"./averaged-2"}
    assert "trust_remote_code" not in text
    assert tables["optimizer"].startswith("Adam, beta 0.9 and 0.98")
    assert tables == tables | {
        "width (d_model)": "16", "updates": "4", "averaged checkpoints": "2", "seed": "42",
        "peak learning rate": "0.1768",  # (16 * 2)^-0.5
        "schedule": "inverse sqrt, 2 updates of warm-up",
        "target tokens in all": str(max(one.get("target_tokens", 0) for one in state["log_history"])),
    }  # fmt: skip
    assert re.fullmatch(r".+, \d+ threads?", tables["hardware"])
    assert re.fullmatch(r"\d:\d\d:\d\d", tables["time (h:mm:ss)"])
    rows = [re.split(r" \| ", line.strip("| "))[::3] for line in text.splitlines() if re.match(r"\| [24] \|", line)]
    evaluations = [entry for entry in state["log_history"] if "eval_loss" in entry]
    assert rows == [[str(one["step"]), f"{one['eval_perplexity']:.2f}"] for one in evaluations]
    scores = json.loads((trained / "averaged-2" / "scores.json").read_text())
    shown = [(one.dataset_split, one.metric_name) for one in data_of(trained / "averaged-2").eval_results]
    assert shown == [(one["split"], score["name"]) for one in scores for score in one["scores"]]


def test_what_the_user_says_is_added_and_the_rest_is_as_it_was(folder, card):
    before = text_of(folder)
    options = ["--source-lang", "en", "--target-lang", "de", "--license", "cc-by-4.0", "--dataset", "a/b", "c"]
    options += ["--base-model", "d/e", "--title", "Numbers", "--limits", "It knows numbers.", "--overwrite"]
    assert card(folder, *options) == (0, f"wrote {folder}/README.md\n", "")
    data, text = data_of(folder), text_of(folder)
    said = (data.language, data.license, data.datasets, data.base_model)
    assert said == (["en", "de"], "cc-by-4.0", ["a/b", "c"], "d/e")
    assert "that translates from `en` to `de`" in text
    assert "\n# Numbers\n" in text
    assert "## Limits\n\nIt knows numbers.\n\nThe model translates one sentence" in text
    old, new = ({one for one in card.splitlines() if one.startswith("|")} for card in (before, text))
    assert old == new
    assert inherited(str(folder)) == {"license": "cc-by-4.0", "base_model": "d/e", "metadata": {}}
    # and once more, without options
    assert card(folder, "--overwrite")[0] == 0
    assert text_of(folder) == text


@pytest.mark.parametrize("name", ["README.md", "model_card.json"])
def test_nothing_is_written_through_a_link(folder, card, tmp_path, name):
    target, link = tmp_path / "precious", folder / name
    target.write_text("{}")
    link.unlink()
    link.symlink_to(target)
    code, _, err = card(folder, "--overwrite")
    assert (code, f"is a link to {target}" in err, target.read_text()) == (2, True, "{}")


def test_nothing_is_guessed(folder, card):
    code, out, _ = card(folder, "--overwrite")
    assert code == 0
    missing = ["languages (--source-lang, --target-lang)", "licence (--license)"]
    assert out.splitlines()[1:] == [f"note: the card names no {one}" for one in missing]
    assert data_of(folder).to_dict().keys() == {"library_name", "pipeline_tag", "tags", "model-index"}
    assert "needed" not in text_of(folder).lower()


def test_what_the_user_has_written_into_the_metadata_is_kept(folder, card):
    said = {"license": "other", "license_name": "ours", "widget": [{"text": "a: b"}], "since": date(2026, 1, 2)}
    said |= {"language": ["de", False], "base_model": ["a/one", "b/two"], "pipeline_tag": "text2text-generation"}
    said |= {"datasets": ["a/b"], "tags": ["mine"], "library_name": "ours"}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(said)}---\n", encoding="utf-8")  # YAML's no is False
    made = {"language": ["de", "no"], "tags": ["vanilla_transformer", "attention-is-all-you-need", "mine"]}
    for _ in range(2):
        assert card(folder, "--overwrite")[0] == 0
        data = data_of(folder).to_dict()
        assert data == data | said | made
    assert inherited(str(folder))["metadata"] == {"license_name": "ours", "base_model": ["a/one", "b/two"]}
    assert card(folder, "--language", "en", "de", "--language", "cs", "--base-model", "c/d", "--overwrite")[0] == 0
    assert (data_of(folder).language, data_of(folder).base_model) == (["en", "de", "cs"], "c/d")


def test_what_the_author_removed_or_changed_in_the_metadata_counts(folder, card):
    said = ["--license", "mit", "--dataset", "a/b", "--source-lang", "en", "--target-lang", "de"]
    assert card(folder, *said, "--overwrite")[0] == 0
    text = text_of(folder).replace("license: mit\n", "").replace("datasets:\n- a/b\n", "")
    (folder / "README.md").write_text(text.replace("\n- de\n", "\n- fr\n", 1))
    assert card(folder, "--overwrite")[0] == 0
    data = data_of(folder)
    assert (data.license, data.datasets, data.language) == (None, None, ["en", "fr"])
    assert "`de`" not in text_of(folder)


@pytest.mark.slow
def test_what_the_author_has_said_survives_a_resumed_training(trained, tmp_path, card):
    """The time of both trainings is unknown."""
    shutil.copytree(trained.parent, tmp_path, dirs_exist_ok=True)
    averaged = tmp_path / "run" / "averaged-2"
    assert "\n| time (h:mm:ss) | " in text_of(averaged)
    said = ["--source-lang", "en", "--target-lang", "de", "--license", "mit", "--title", "Ours", "--limits", "Numbers."]
    assert card(averaged, *said, "--overwrite")[0] == 0
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(trained.parent), str(tmp_path)))
    assert cli.main(["train", "--config", str(recipe), "--resume"]) == 0
    text, data = text_of(averaged), data_of(averaged)
    assert (data.language, data.license) == (["en", "de"], "mit")
    assert all(one in text for one in ("# Ours\n", "from `en` to `de`", "Numbers.\n", "| updates | 4 |"))
    assert "\n| time (h:mm:ss) | " not in text


def test_other_weights_have_no_known_training(folder, card):
    change_weights(folder)
    code, out, _ = card(folder, "--license", "mit", "--source-lang", "en", "--target-lang", "de", "--overwrite")
    assert code == 0
    left_out = "the weights have changed since model_card.json was written: what it says of their training is left out"
    assert f"note: {left_out}\n" in out
    text = text_of(folder)
    assert re.findall("^## (.*)", text, re.MULTILINE) == ["How to use", "Architecture", "Limits", "Citation"]
    assert "BLEU" not in text
    assert "parameters | 15,552" in text
    assert "note: the weights" not in card(folder, "--overwrite")[1]


def test_the_task_is_known_without_a_training(folder, card):
    """Of checkpoints that were averaged by hand, say."""
    for name in ("README.md", "model_card.json"):
        (folder / name).unlink()
    pairs = [{"source": "cat", "target": "K AE T"}]
    train_tokenizer(pairs, ["characters", "words"]).save_pretrained(folder)
    assert card(folder)[0] == 0
    assert data_of(folder).tags[-1] == "text2text-generation"
    assert "translat" not in text_of(folder).lower()


# ---- What is wrong ----
def become_another(folder):
    (folder / FACTS).unlink()
    change_json(folder / "config.json", model_type="t5")


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing; give a folder that"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing; give a folder"),
        (become_another, "has neither a model of this package nor model_card.json; write its README.md by hand"),
        (write("model_card.json", b"{"), "model_card.json is cut short or not JSON"),
        (lambda folder: change_json(folder / FACTS, stepps=3), "unexpected keyword argument 'stepps'); correct it"),
        (lambda folder: change_json(folder / FACTS, recipe={"x": 1}), "model_card.json can't be read"),
        (write("README.md", b"---\na: [\n---\n"), "README.md isn't a model card"),
        (write("README.md", b"\xff\xfe"), "README.md isn't a model card"),
    ],
)
def test_a_damaged_folder_is_told_in_one_line(folder, card, spoil, message):
    spoil(folder)
    before = contents(folder)
    code, _, err = card(folder, "--overwrite")
    assert (code, err.count("\n"), contents(folder)) == (2, 1, before)
    assert message in err


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- The facts ----
def test_facts_of_version_0_3_are_read(folder, card):
    point = {"step": 4, "target_tokens": 7, "loss": None, "perplexity": 2.0, "bleu": None, "scores": {"WER": 3.0}}
    change_json(folder / FACTS, curve=[point])
    assert card(folder, "--overwrite")[0] == 0
    assert "| 4 | 7 |  | 2.00 | 3.00 |" in text_of(folder)


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
    assert [point["step"] for point in points] == [10, 120, 230, 340, 450, 560, 670, 780, 890, 1000]
    assert points[-1] == {"step": 1000, "target_tokens": 7000, "loss": 0.0}
    logged = {"eval_loss": 1.0, "eval_perplexity": 2.7, "eval_bleu": 1.5, "eval_chrf": 9.0}
    evaluated = [{"step": n, **logged} for n in (500, 1000)]
    of_the_best = {"step": 1000, "eval_loss": 0.9, "eval_perplexity": 2.5, "eval_bleu": 1.6}  # `evaluate()` at the end
    scores = {"perplexity": 2.7, "bleu": 1.5, "chrF2": 9.0}
    for entries in (evaluated, [*evaluated, of_the_best]):
        assert curve_of([*log, *entries]) == [
            {**points[-1], "step": 500, "target_tokens": 3500, "loss": 5.0, **scores},
            {**points[-1], **scores},
        ]
    assert curve_of([{"train_runtime": 1.0}, {"step": 3, "train_runtime": 1.0}]) == []
