"""Pushing a model: the real client of the Hub over HTTP, to a Hub on localhost, and back without the package."""

import json
import os
import re
import shutil

import huggingface_hub.constants as constants
import pytest
import torch
from hub_client import (
    PACKAGE,
    REPO,
    TOKEN,
    change_weights,
    connect,
    logits_of,
    logits_without_the_package,
)
from hub_server import LocalHub, running
from huggingface_hub import ModelCard
from huggingface_hub.utils import close_session
from opus_mt import opus_mt_folder
from trainer_runs import change_json
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.checkpoints import code as checkpoint_code
from hf_vanilla_transformer.interop import stock

PARTS = ("configuration", "modeling", "generation", "integration", "plan", "tokenization")
CODE = {f"{part}_vanilla_transformer.py" for part in PARTS}
MODEL = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def put(folder, *names, text="x"):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def change_card(folder, old, new):
    file = folder / "README.md"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


# ---- What arrives ----
@pytest.fixture(scope="module")
def pushed(tiny_checkpoint, carded, tmp_path_factory):
    """A hub with a model from the command, with other weights on a branch, and a converted one."""
    folder = tmp_path_factory.mktemp("pushed")
    with pytest.MonkeyPatch.context() as patch, running(LocalHub(me=TOKEN)) as local:
        connect(patch, local.endpoint, folder / "cache")
        assert cli.main(["push", str(carded), "me/by-command"]) == 0

        second = shutil.copytree(tiny_checkpoint, folder / "second")
        change_weights(second)
        assert cli.main(["card", str(second), "--license", "mit"]) == 0
        assert cli.main(["push", str(second), "me/by-command", "--revision", "next"]) == 0

        opus_mt_folder(folder / "marian")
        assert cli.main(["convert", str(folder / "marian"), "--output", str(folder / "opus")]) == 0
        assert cli.main(["push", str(folder / "opus"), "me/opus"]) == 0
        wanted = {"me/by-command@main": logits_of(tiny_checkpoint), "me/by-command@next": logits_of(second)}
        yield local, folder, wanted | {"me/opus@main": logits_of(folder / "opus")}
    close_session()


@pytest.mark.slow
def test_models_load_with_the_same_logits_with_and_without_the_package(pushed, without_the_package):
    local, folder, wanted = pushed
    assert not torch.equal(wanted["me/by-command@main"], wanted["me/by-command@next"])
    without = logits_without_the_package(without_the_package, local, [*wanted], folder)
    for name, logits in wanted.items():
        repo, revision = name.split("@")
        assert torch.equal(without[name], logits)
        assert torch.equal(logits_of(repo, revision=revision), logits)


def test_a_repository_has_card_licence_and_code_and_nothing_of_the_training(pushed):
    repo = "me/by-command"
    files = pushed[0].repositories[repo].files()
    assert {*files} == {".gitattributes", "README.md", "LICENSE-CODE", *MODEL, *CODE}
    assert files["LICENSE-CODE"] == (PACKAGE / "LICENSE").read_bytes()
    assert all(files[name] == (PACKAGE / name).read_bytes() for name in CODE)
    card = ModelCard(files["README.md"].decode())
    assert (card.data.library_name, card.data.license, card.data.language) == ("transformers", "mit", ["en", "de"])
    assert "| width (d_model) | 32 |" in card.text
    assert {*re.findall(r'from_pretrained\("([^"]*)"', card.text)} == {repo}
    branch = pushed[0].repositories[repo].files("next")  # which left main as it was
    assert {name for name in files if files[name] != branch[name]} == {"model.safetensors", "README.md"}


def test_a_stock_model_has_no_code_and_graphs_of_an_earlier_one_are_removed(pushed, carded, monkeypatch, capsys):
    transformers_js = pytest.importorskip("hf_vanilla_transformer.interop.transformers_js")

    def write(model, tokenizer, folder):
        notes = stock.write_stock(model, tokenizer, folder)
        put(folder, "onnx/encoder_model.onnx", "onnx/other/encoder_model.onnx", "onnx/notes.txt")
        return [*notes, "transformers.js opens the graphs"]

    monkeypatch.setattr(transformers_js, "write_transformers_js", write)
    repositories = pushed[0].repositories
    command = ["push", str(carded), "me/stock", "--as", "stock"]
    assert cli.main([*command, "--onnx"]) == 0
    files = repositories["me/stock"].files()
    assert {*files} == {".gitattributes", "README.md", *MODEL, "onnx/encoder_model.onnx"}
    assert "Transformers.js opens the graphs." in files["README.md"].decode()
    assert ", onnx/notes.txt, onnx/other/encoder_model.onnx" in capsys.readouterr().out
    assert cli.main(command) == 0
    files = repositories["me/stock"].files()
    assert {*files} == {".gitattributes", "README.md", *MODEL}
    assert "removed from the repository: onnx/encoder_model.onnx" in capsys.readouterr().out
    assert json.loads(files["config.json"])["architectures"] == ["MarianMTModel"]
    card = files["README.md"].decode()
    assert not re.search("trust_remote_code|import hf_vanilla_transformer", card)
    for line in ("# me/stock\n", 'from_pretrained("me/stock")', "It is a MarianMTModel and needs no code of its own."):
        assert line in card
    assert "Length_penalty 0.48 in place of gnmt_length_penalty 0.6" in card


def test_a_model_on_the_hub_is_described_without_its_weights(push, vanilla_transformer, tmp_path, monkeypatch):
    assert push().code == 0
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    found = json.loads(vanilla_transformer("info", REPO, "--json").out)
    assert (found["config"]["d_model"], found["tokenizer"]["kind"]) == (32, "VanillaTransformerTokenizerFast")
    assert found["total"] == sum(found["parameters"].values())
    assert ".safetensors" not in {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert found["code"] is None
    note = checkpoint_code.OtherCode(["plan_vanilla_transformer.py"], []).note(REPO)
    assert note.endswith("`vanilla-transformer info DIR --renew-code` for a download of it, and push that")
    result = vanilla_transformer("info", "me/nothing")
    assert (result.code, "me/nothing is neither a folder here nor a model on the Hub" in result.error) == (2, True)


# ---- Which files ----
def test_a_dry_run_lists_files_and_sizes_and_asks_nobody(push, hub, model_folder, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    code, out, err = push("--dry-run")
    assert (code, err) == (0, "")
    listed = {name: size for size, name in re.findall(r"^ *([\d,]+)  (\S+)$", out, re.MULTILINE)}
    expected = {path.name: f"{path.stat().st_size:,}" for path in model_folder.iterdir()}
    del expected["model_card.json"], expected["README.md"], listed["README.md"]
    assert listed == expected
    assert f"bytes in {len(expected) + 1} files" in out
    assert out.endswith("\ndry run: nothing was sent\n")
    assert hub.requests == []


def test_only_files_of_the_model_are_sent_and_those_of_an_older_one_removed(push, hub, model_folder):
    secrets = (".env", ".git/config", "server.pem", "id_rsa", "notes.txt", "tokens.json")
    training = ("checkpoint-2/model.safetensors", "runs/log", "optimizer.pt", "training_args.bin", "recipe.json")
    put(model_folder, *secrets, *training, "run.lock", "vocab-customers.csv", "eval.model", "test.translations.txt")
    old = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "recipe.json", "source.spm"]
    old += ["test.translations.txt"]
    others = ["photo.png", "handler.py", "vocabulary.md", "docs/vocab.json", "last-checkpoint/model.safetensors"]
    hub.add(REPO, dict.fromkeys([*old, *others], "old"))
    code, out, _ = push()
    assert code == 0
    assert "\nnot sent: .env, .git/config, checkpoint-2/model.safetensors, eval.model, id_rsa" in out
    assert f"removed from the repository: {', '.join(old)}\n" in out
    files = hub.repositories[REPO].files()
    assert {*files} == {".gitattributes", "README.md", "LICENSE-CODE", *others} | MODEL | CODE
    assert [files[name] for name in others] == [b"old"] * len(others)


def test_links_out_of_the_folder_are_refused(push, hub, model_folder, tmp_path):
    put(tmp_path, "elsewhere/passwords", text="secret")
    (model_folder / "more").symlink_to(tmp_path / "elsewhere")  # a folder, which isn't looked into
    (model_folder / "vocab.json").symlink_to(tmp_path / "elsewhere" / "passwords")
    result = push("--dry-run")
    assert result.code == 2
    assert re.search(r"vocab\.json is a link to .*passwords, out of the folder; put a copy there", result.error)
    (model_folder / "vocab.json").unlink()
    (model_folder / "vocab.json").symlink_to("config.json")
    assert push().code == 0
    files = hub.repositories[REPO].files()
    assert files["vocab.json"] == files["config.json"]
    assert not [name for name in files if "passwords" in name]


def test_a_model_in_the_hubs_cache_is_sent_although_it_is_of_links(push, hub, model_folder, tmp_path):
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "my-model"
    shutil.copytree(model_folder, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert push(folder=snapshot).code == 0
    assert hub.repositories[REPO].files()["model.safetensors"] == (blobs / "model.safetensors").read_bytes()


# ---- The card ----
def test_the_card_that_is_sent_names_the_repository_and_the_folders_stays(push, hub, model_folder):
    before = (model_folder / "README.md").read_text()
    assert "trust_remote_code" not in before
    code, out, _ = push()
    assert code == 0
    assert f"note: in the README.md that is sent, the model's name is {REPO}" in out
    assert (model_folder / "README.md").read_text() == before
    sent = hub.repositories[REPO].files()["README.md"].decode()
    assert "my-model" not in sent
    assert sent.count(f'from_pretrained("{REPO}", trust_remote_code=True)') == 2
    # as if it had been written for the repository
    assert cli.main(["card", str(model_folder), "--name", REPO, "--overwrite"]) == 0
    assert (model_folder / "README.md").read_text() == sent


def test_a_card_with_text_of_the_users_own_loads_the_repository_too(push, hub, model_folder):
    change_card(model_folder, "## Limits\n", "## Limits\n\nIt isn't in ./my-model.\n")
    before = (model_folder / "README.md").read_text()
    code, out, _ = push()
    assert code == 0
    assert f"note: in the README.md that is sent, the code loads {REPO}; all else is as in {model_folder}" in out
    sent = hub.repositories[REPO].files()["README.md"].decode()
    assert sent == before.replace('"./my-model"', f'"{REPO}"')
    assert sent.count(REPO) == 2
    (model_folder / "README.md").write_text("---\nlicense: mit\n---\n\n# Ours\n")
    assert "note" not in push().out
    assert hub.repositories[REPO].files()["README.md"] == (model_folder / "README.md").read_bytes()


def test_a_missing_licence_is_told_and_that_of_the_code_is_added(push, hub, model_folder):
    change_card(model_folder, "license: mit\n", "")
    (model_folder / "LICENSE-CODE").unlink()
    code, out, _ = push()
    assert (code, "README.md names no licence; `vanilla-transformer card " in out) == (0, True)
    assert hub.repositories[REPO].files()["LICENSE-CODE"] == (PACKAGE / "LICENSE").read_bytes()
    assert not (model_folder / "LICENSE-CODE").exists()


# ---- The repository ----
def test_a_new_repository_is_public_unless_asked_otherwise(push, hub):
    for repo, options, kind in ((REPO, [], "public"), ("me/other", ["--private"], "private")):
        code, out, _ = push(*options, repo=repo)
        assert (code, hub.repositories[repo].private) == (0, kind == "private")
        assert f"pushed into the {kind} repository {repo}: " in out
    result = push("--private")
    assert result.code == 2
    assert f"{REPO} exists and is public; make it private in its settings on the Hub, or" in result.error


@pytest.mark.parametrize("there", [True, False])
def test_a_repository_of_somebody_else(push, hub, there):
    if there:
        hub.add("other/model")
    result = push(repo="other/model")
    assert result.code == 2
    assert "you may not write to other/model (403); give a repository of your own, or log in" in result.error
    assert "other/model" not in hub.repositories or len(hub.repositories["other/model"].commits) == 1


def test_without_a_token_that_the_hub_knows(push, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    log_in = "log in with `hf auth login`, or set HF_TOKEN, with a token that may write"
    assert push().error.endswith(f"error: there is no token for the Hub; {log_in}")
    monkeypatch.setenv("HF_TOKEN", "hf_" + "Wrong" * 8)
    result = push()
    assert result.code == 2
    assert result.error.endswith(f"error: the Hub doesn't accept the token (401) for {REPO}; {log_in}")
    assert hub.repositories == {}


def test_when_the_hub_can_not_be_reached(push, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    result = push()
    assert result.code == 1
    assert re.search(r"the Hub can't be reached, or fails \(.+\), and me/model isn't complete.*", result.error)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    result = push()
    assert (result.code, "unset the `HF_HUB_OFFLINE` environment variable" in result.error) == (1, True)


def without(name):
    return lambda folder: (folder / name).unlink()


def with_card(new):
    return lambda folder: change_card(folder, "license: mit", new)


def with_code_of_its_own(folder):
    put(folder, "mine.py")
    change_json(folder / "config.json", auto_map={"AutoModelForSeq2SeqLM": "mine.Model"})


@pytest.mark.parametrize(
    ("spoil", "repo", "message"),
    [
        (lambda folder: put(folder, "adapter_config.json"), REPO, "has an adapter, not a model; publish it with PEFT"),
        (without("README.md"), REPO, "has no README.md; write it with `vanilla-transformer card "),
        (with_card("license: [mit"), REPO, "README.md isn't a model card"),
        (with_code_of_its_own, REPO, "can't be loaded without .*mine.py, and of code, only this package's is sent"),
        (change_weights, REPO, "the weights in .* have changed since README.md was written; write it again"),
        (lambda folder: os.truncate(folder / "model.safetensors", 1000), REPO, "model.safetensors is cut short"),
        (without("modeling_vanilla_transformer.py"), REPO, "has no modeling_vanilla_transformer.py, without which"),
        (without("tokenization_vanilla_transformer.py"), REPO, "has no tokenization_vanilla_transformer.py, without"),
        (without("tokenizer.json"), REPO, "can't load .*; only a model that can be loaded is published"),
        (without("config.json"), REPO, "config.json is missing; only a model that can be loaded"),
        (lambda folder: None, "model", "'model' is not a repository's name; give user/name"),
        # The Hub's client, and the Hub, refuse these.
        (lambda folder: None, "me/a..b", "or .. in repo_id"),
        (with_card("license: apache-1.9"), REPO, r'Invalid metadata in README.md. .*"license" must be one of'),
    ],
)
def test_what_must_not_be_published(push, hub, model_folder, spoil, repo, message):
    spoil(model_folder)
    result = push(repo=repo)
    assert (result.code, bool(re.search(message, result.error))) == (2, True), result.error
    assert hub.requests == [] or "must be one of" in message
    assert all(len(repository.commits) == 1 for repository in hub.repositories.values())


def test_code_of_version_0_3_0_is_told_refused_and_renewed(push, vanilla_transformer, model_folder, monkeypatch):
    file = model_folder / "modeling_vanilla_transformer.py"
    new = file.read_bytes()
    edited = new + b"OLD = True\n"
    file.write_bytes(edited)
    info, card = ("info", model_folder), ("card", model_folder, "--overwrite")
    for told in (push("--dry-run"), *(vanilla_transformer(*command) for command in (info, card))):
        assert told.code == 0
        assert f"carries code that was edited, or is another version's: {file.name}" in told.out
    result = vanilla_transformer(*info, "--renew-code")
    assert (result.code, f"{file} was edited" in result.error, file.read_bytes()) == (2, True, edited)

    monkeypatch.setattr(checkpoint_code, "OLD_DIGESTS", {checkpoint_code._digest(file)})
    renew = f"carries code of version 0.3.0, .* renew it with `vanilla-transformer info {model_folder} --renew-code`"
    for command in (info, card):
        assert re.search(renew, vanilla_transformer(*command).out)
    result = push()
    assert (result.code, bool(re.search(renew, result.error))) == (2, True)
    (model_folder / "plan_vanilla_transformer.py").unlink()  # of the new version alone, say
    assert vanilla_transformer(*info, "--renew-code").code == 0
    assert file.read_bytes() == new
    assert push().code == 0

    file.write_bytes(edited)
    AutoModelForSeq2SeqLM.from_pretrained(model_folder).save_pretrained(model_folder)
    assert file.read_bytes() == new
