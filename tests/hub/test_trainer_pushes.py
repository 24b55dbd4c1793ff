"""`push_to_hub` of VanillaTransformerTrainer, of `train` and of configurations, to a Hub on localhost."""

import json

import pytest
import torch
import yaml
from hub_client import PACKAGE, REPO, TOKEN, trainer_of
from small_runs import recipe_in

from hf_vanilla_transformer import VanillaTransformerConfig
from hf_vanilla_transformer.training.options import RecipeError


@pytest.fixture
def recipe_file(tmp_path):
    """A recipe whose model is pushed."""
    recipe = {**recipe_in(tmp_path), "eval_strategy": "no", "num_beams": 1, "push_to_hub": True, "hub_model_id": REPO}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path / "recipe.yaml"


@pytest.mark.slow
def test_the_command_pushes_what_was_scored(hub, tmp_path, recipe_file, vanilla_transformer):
    """The only commit is the averaged model with its card and its code."""
    result = vanilla_transformer("train", "--config", recipe_file)
    assert f"Pushed to the Hub: {hub.endpoint}/{REPO}/commit/" in result.out, result.err
    assert len(hub.repositories[REPO].commits) == 2  # the first makes the repository
    last, averaged = hub.repositories[REPO].files(), tmp_path / "run" / "averaged-2"
    assert last["modeling_vanilla_transformer.py"] == (PACKAGE / "modeling_vanilla_transformer.py").read_bytes()
    assert last["model.safetensors"] == (averaged / "model.safetensors").read_bytes()
    assert last["README.md"] == (averaged / "README.md").read_bytes()
    scores = json.loads((averaged / "scores.json").read_text())
    assert f"{scores[-1]['scores'][0]['value']:.2f}" in last["README.md"].decode()
    assert not {name for name in last if name.startswith("test.") or name.endswith(".txt") or "/" in name}


def test_a_run_that_could_not_push_stops_before_it_trains(hub, recipe_file, vanilla_transformer, monkeypatch):
    hub.add(REPO)
    for options, message in (
        (["--hub-model-id", "model"], "hub_model_id is 'model'; give the repository to push to, user/name"),
        (["--hub-private-repo", "true"], "exists and is public; make it private"),
        ([], "there is no token for the Hub; log in with `hf auth login`"),
    ):
        if not options:
            monkeypatch.delenv("HF_TOKEN")
            hub.requests.clear()
        result = vanilla_transformer("train", "--config", recipe_file, *options)
        assert (result.code, result.err.count("\n"), message in result.error) == (2, 1, True), result.err
    assert not (recipe_file.parent / "run").exists()
    assert hub.requests == []


def test_the_trainer_names_the_commands_that_push(hub, tiny_checkpoint, tmp_path):
    """It would send recipe.json, the Trainer's state and its own card, too."""
    commands = f"`vanilla-transformer card {tmp_path}` and `vanilla-transformer push {tmp_path} "
    trainer = trainer_of(tiny_checkpoint, tmp_path, hub_model_id=REPO, hub_token=TOKEN)
    with pytest.raises(RecipeError, match=f"and run {commands}{REPO}`"):
        trainer.push_to_hub()
    with pytest.raises(RecipeError, match=f"and run {commands}USER/NAME`"):
        trainer_of(tiny_checkpoint, tmp_path, push_to_hub=True)
    assert hub.requests == []
    trainer.save_model()
    saved = torch.load(tmp_path / "training_args.bin", weights_only=False)
    assert (saved.hub_model_id, saved.hub_token, trainer.args.hub_token) == (REPO, None, TOKEN)


def test_a_configuration_is_pushed_with_its_code_and_the_licence_of_that(hub, tmp_path):
    VanillaTransformerConfig(d_model=32).save_pretrained(str(tmp_path / "it"), push_to_hub=True, repo_id=REPO)
    files = hub.repositories[REPO].files()
    assert files["config.json"] == (tmp_path / "it" / "config.json").read_bytes()
    code = "configuration_vanilla_transformer.py"
    assert (files[code], files["LICENSE-CODE"]) == ((PACKAGE / code).read_bytes(), (PACKAGE / "LICENSE").read_bytes())
