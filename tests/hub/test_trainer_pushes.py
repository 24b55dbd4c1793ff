"""`push_to_hub` of VanillaTransformerTrainer, of `train` and of configurations, to a Hub on localhost."""

import json

import peft
import pytest
import torch
import yaml
from hub_client import PACKAGE, REPO, TOKEN, trainer_of
from huggingface_hub import ModelCard
from small_runs import recipe_in

from hf_vanilla_transformer import VanillaTransformerConfig, cli
from hf_vanilla_transformer.hub.upload import PublishError


@pytest.mark.slow
def test_the_command_pushes_what_was_scored(hub, tmp_path, capsys):
    """The only commit is the averaged model with its card and its code."""
    recipe = {**recipe_in(tmp_path), "eval_strategy": "no", "num_beams": 1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "push_to_hub": True, "hub_model_id": REPO}))
    assert cli.main(["train", "--config", str(tmp_path / "recipe.yaml")]) == 0
    assert f"Pushed to the Hub: {hub.endpoint}/{REPO}/commit/" in capsys.readouterr().out
    assert len(hub.repositories[REPO].commits) == 2  # the first makes the repository
    last, averaged = hub.repositories[REPO].files(), tmp_path / "run" / "averaged-2"
    assert last["modeling_vanilla_transformer.py"] == (PACKAGE / "modeling_vanilla_transformer.py").read_bytes()
    assert last["model.safetensors"] == (averaged / "model.safetensors").read_bytes()
    assert last["README.md"] == (averaged / "README.md").read_bytes()
    scores = json.loads((averaged / "scores.json").read_text())
    assert f"{scores[-1]['scores'][0]['value']:.2f}" in last["README.md"].decode()
    assert not {name for name in last if name.startswith("test.") or name.endswith(".txt") or "/" in name}


def test_a_second_push_keeps_what_the_first_said(hub, tiny_checkpoint, tmp_path):
    trainer = trainer_of(tiny_checkpoint, tmp_path / "run", hub_model_id=REPO)
    trainer.push_to_hub(language=("en", "de"), license="mit", model_name="Ours")
    trainer.push_to_hub(tags="mine")
    card = ModelCard(hub.repositories[REPO].files()["README.md"].decode())
    assert (card.data.language, card.data.license) == (["en", "de"], "mit")
    assert "mine" in card.data.tags
    assert "\n# Ours\n" in card.content


def test_a_fine_tuned_model_names_its_origin(model_folder, tmp_path):
    """In the card of the model that it was trained from is the licence, too."""
    assert cli.main(["card", str(model_folder), "--base-model", "some/body", "--overwrite"]) == 0
    trainer = trainer_of(model_folder, tmp_path)
    trainer.create_model_card(tags="mine")
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.base_model, data.license, data.language) == ("some/body", "mit", None)
    trainer.create_model_card(license="other", finetuned_from="any/body")
    data = ModelCard.load(tmp_path / "README.md").data
    assert (data.base_model, data.license, data.tags[-1]) == ("any/body", "other", "mine")


def test_a_push_that_breaks_is_told_and_can_be_repeated(hub, tiny_checkpoint, tmp_path):
    trainer = trainer_of(tiny_checkpoint, tmp_path / "run", hub_model_id=REPO)
    hub.is_full = True
    message = r"^the Hub can't be reached, or fails \([^\n]+ isn't complete; push again[^\n]+$"
    with pytest.raises(ConnectionError, match=message):
        trainer.push_to_hub()
    hub.is_full = False
    trainer.push_to_hub()
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= {*hub.repositories[REPO].files()}


def test_without_a_token_a_run_stops_before_it_trains(hub, tmp_path, monkeypatch, vanilla_transformer):
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "a").write_text("nine\n")
    files = ["--train-source", tmp_path / "a", "--train-target", tmp_path / "a", "--output-dir", tmp_path / "trained"]
    result = vanilla_transformer("train", *files, "--push-to-hub", "true", "--hub-model-id", REPO)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "error: there is no token for the Hub; log in with `hf auth login`" in result.error
    assert not (tmp_path / "trained").exists()
    assert hub.requests == []


def test_the_trainers_token_is_in_no_file(hub, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    trainer = trainer_of(tiny_checkpoint, tmp_path / "run", push_to_hub=True, hub_model_id=REPO, hub_token=TOKEN)
    trainer.push_to_hub()
    saved = torch.load(tmp_path / "run" / "training_args.bin", weights_only=False)
    assert (saved.hub_model_id, saved.hub_token, trainer.args.hub_token) == (REPO, None, TOKEN)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
    assert "training_args.bin" not in hub.repositories[REPO].files()


def test_what_a_trainer_can_not_push(hub, tiny_checkpoint, tmp_path):
    trainer = trainer_of(tiny_checkpoint, tmp_path / "run", push_to_hub=True, hub_model_id=REPO)
    with pytest.raises(PublishError, match="exists and is public; make it private"):
        trainer.push_to_hub(private=True)
    with pytest.raises(PublishError, match="exists and is public; make it private"):
        trainer_of(tiny_checkpoint, tmp_path, hub_model_id=REPO, push_to_hub=True, hub_private_repo=True)
    with pytest.raises(TypeError, match="leave blocking out"):
        trainer.push_to_hub(blocking=False)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"]), trainer.model)
    with pytest.raises(PublishError, match="publish them with PEFT"):
        trainer.init_hf_repo()


def test_a_configuration_is_pushed_with_its_code_and_the_licence_of_that(hub, tmp_path):
    VanillaTransformerConfig(d_model=32).save_pretrained(str(tmp_path / "it"), push_to_hub=True, repo_id=REPO)
    files = hub.repositories[REPO].files()
    assert files["config.json"] == (tmp_path / "it" / "config.json").read_bytes()
    code = "configuration_vanilla_transformer.py"
    assert (files[code], files["LICENSE-CODE"]) == ((PACKAGE / code).read_bytes(), (PACKAGE / "LICENSE").read_bytes())
