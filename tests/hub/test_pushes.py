"""Pushing a model: the real client of the Hub over HTTP, to a Hub on localhost, and back into a fresh process."""

import json
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
    logits_in_a_new_process,
    logits_of,
    the_error,
    trainer_of,
)
from hub_server import LocalHub, running
from huggingface_hub import ModelCard
from huggingface_hub.utils import close_session
from opus_mt import opus_mt_folder
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.checkpoints import code as checkpoint_code
from hf_vanilla_transformer.interop import stock

CODE = {
    f"{part}_vanilla_transformer.py"
    for part in ("configuration", "modeling", "generation", "integration", "plan", "tokenization")
}
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
def pushed(tiny_checkpoint, tmp_path_factory):
    """A hub with a model from the command, with other weights on a branch, from a trainer, and a converted one."""
    folder = tmp_path_factory.mktemp("pushed")
    with pytest.MonkeyPatch.context() as patch, running(LocalHub(me=TOKEN)) as local:
        connect(patch, local.endpoint)
        first = shutil.copytree(tiny_checkpoint, folder / "first")
        assert cli.main(["card", str(first), "--source-lang", "en", "--target-lang", "de", "--license", "mit"]) == 0
        assert cli.main(["push", str(first), "me/by-command"]) == 0

        second = shutil.copytree(tiny_checkpoint, folder / "second")
        change_weights(second)
        assert cli.main(["card", str(second), "--license", "mit"]) == 0
        assert cli.main(["push", str(second), "me/by-command", "--revision", "next"]) == 0

        trainer = trainer_of(tiny_checkpoint, folder / "run", hub_model_id="me/by-trainer")
        trainer.push_to_hub(language=["en", "de"], license="mit")

        opus_mt_folder(folder / "marian")
        assert cli.main(["convert", str(folder / "marian"), "--output", str(folder / "opus")]) == 0
        assert cli.main(["push", str(folder / "opus"), "me/opus"]) == 0
        mine = logits_of(tiny_checkpoint)
        wanted = {"me/by-command@main": mine, "me/by-command@next": logits_of(second), "me/by-trainer@main": mine}
        yield local, folder, wanted | {"me/opus@main": logits_of(folder / "opus")}
    close_session()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hidden", pytest.param("installed", marks=pytest.mark.hard)])
def test_models_load_in_a_new_process_with_the_same_logits(pushed, how):
    local, folder, wanted = pushed
    assert not torch.equal(wanted["me/by-command@main"], wanted["me/by-command@next"])
    found = logits_in_a_new_process(local, how, [name.split("@") for name in wanted], folder)
    assert {name: torch.equal(one, wanted[name]) for name, one in found.items()} == dict.fromkeys(wanted, True)


@pytest.mark.parametrize("repo", ["me/by-command", "me/by-trainer"])
def test_a_repository_has_card_licence_and_code_and_nothing_of_the_training(pushed, repo):
    files = pushed[0].repositories[repo].files()
    assert {*files} == {".gitattributes", "README.md", "LICENSE-CODE", *MODEL, *CODE}
    assert files["LICENSE-CODE"] == (PACKAGE / "LICENSE").read_bytes()
    assert all(files[name] == (PACKAGE / name).read_bytes() for name in CODE)
    card = ModelCard(files["README.md"].decode())
    assert (card.data.library_name, card.data.license, card.data.language) == ("transformers", "mit", ["en", "de"])
    assert "| width (d_model) | 32 |" in card.text
    assert {*re.findall(r'from_pretrained\("([^"]*)"', card.text)} == {repo}


def test_a_branch_leaves_main_as_it_is(pushed):
    main, branch = (pushed[0].repositories["me/by-command"].files(name) for name in ("main", "next"))
    assert {name for name in main if main[name] != branch[name]} == {"model.safetensors", "README.md"}


def test_a_stock_model_has_no_code(pushed, capsys):
    local, folder, _ = pushed
    assert cli.main(["push", str(folder / "first"), "me/stock", "--as", "stock"]) == 0
    files = local.repositories["me/stock"].files()
    assert {*files} == {".gitattributes", "README.md", *MODEL}
    assert json.loads(files["config.json"])["architectures"] == ["MarianMTModel"]
    card = files["README.md"].decode()
    assert not re.search("trust_remote_code|import hf_vanilla_transformer", card)
    for line in ("# me/stock\n", 'from_pretrained("me/stock")', "It is a MarianMTModel and needs no code of its own."):
        assert line in card
    assert "Length_penalty 0.48 in place of gnmt_length_penalty 0.6" in card


def test_graphs_are_sent_and_those_of_an_earlier_model_removed(pushed, monkeypatch, capsys):
    transformers_js = pytest.importorskip("hf_vanilla_transformer.interop.transformers_js")

    def write(model, tokenizer, folder):
        notes = stock.write_stock(model, tokenizer, folder)
        for name in ("onnx/encoder_model.onnx", "onnx/other/encoder_model.onnx", "onnx/notes.txt"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("a graph")
        return [*notes, "transformers.js opens the graphs"]

    monkeypatch.setattr(transformers_js, "write_transformers_js", write)
    local, folder, _ = pushed
    command = ["push", str(folder / "first"), "me/graphs", "--as", "stock"]
    assert cli.main([*command, "--onnx"]) == 0
    files = local.repositories["me/graphs"].files()
    assert {*files} == {".gitattributes", "README.md", *MODEL, "onnx/encoder_model.onnx"}
    assert "Transformers.js opens the graphs." in files["README.md"].decode()
    assert ", onnx/notes.txt, onnx/other/encoder_model.onnx" in capsys.readouterr().out
    assert cli.main(command) == 0
    assert {*local.repositories["me/graphs"].files()} == {".gitattributes", "README.md", *MODEL}
    assert "removed from the repository: onnx/encoder_model.onnx" in capsys.readouterr().out


def test_no_token_is_in_what_was_sent_or_written(pushed):
    sent = [one for repository in pushed[0].repositories.values() for one in repository.files().values()]
    written = [path.read_bytes() for path in pushed[1].rglob("*") if path.is_file()]
    assert not [content for content in (*sent, *written) if TOKEN.encode() in content]


def test_a_model_on_the_hub_is_described_without_its_weights(push, hub, tmp_path, monkeypatch, capsys):
    assert push()[0] == 0
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    capsys.readouterr()
    assert cli.main(["info", REPO, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["config"]["d_model"], found["tokenizer"]["kind"]) == (32, "VanillaTransformerTokenizerFast")
    assert found["total"] == sum(found["parameters"].values())
    cached = {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert ".safetensors" not in cached
    assert found["code"] is None
    note = checkpoint_code.OtherCode(["plan_vanilla_transformer.py"], []).note(REPO)
    assert note.endswith("`vanilla-transformer info DIR --renew-code` for a download of it, and push that")
    assert cli.main(["info", "me/nothing"]) == 2
    assert "me/nothing is neither a folder here nor a model on the Hub" in the_error(capsys.readouterr().err)


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


def test_only_files_of_the_model_are_sent(push, hub, model_folder):
    secrets = (".env", ".git/config", "server.pem", "id_rsa", "notes.txt", "tokens.json")
    training = ("checkpoint-2/model.safetensors", "runs/log", "optimizer.pt", "training_args.bin", "recipe.json")
    put(model_folder, *secrets, *training, "run.lock", "vocab-customers.csv", "eval.model", "test.translations.txt")
    code, out, _ = push()
    assert code == 0
    assert "\nnot sent: .env, .git/config, checkpoint-2/model.safetensors, eval.model, id_rsa" in out
    assert {*hub.repositories[REPO].files()} == {".gitattributes", "README.md", "LICENSE-CODE"} | MODEL | CODE


def test_links_out_of_the_folder_are_refused(push, hub, model_folder, tmp_path):
    put(tmp_path, "elsewhere/passwords", text="secret")
    (model_folder / "more").symlink_to(tmp_path / "elsewhere")  # a folder, which isn't looked into
    (model_folder / "vocab.json").symlink_to(tmp_path / "elsewhere" / "passwords")
    code, _, err = push("--dry-run")
    assert code == 2
    assert re.search(r"vocab\.json is a link to .*passwords, out of the folder; put a copy there", the_error(err))
    (model_folder / "vocab.json").unlink()
    (model_folder / "vocab.json").symlink_to("config.json")
    assert push()[0] == 0
    files = hub.repositories[REPO].files()
    assert files["vocab.json"] == files["config.json"]
    assert not [name for name in files if "passwords" in name]


def test_a_model_in_the_hubs_cache_is_sent_although_it_is_of_links(push, hub, model_folder, tmp_path):
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "my-model"
    shutil.copytree(model_folder, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert push(folder=snapshot)[0] == 0
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
    assert code == 0
    assert "README.md names no licence; `vanilla-transformer card " in out
    assert hub.repositories[REPO].files()["LICENSE-CODE"] == (PACKAGE / "LICENSE").read_bytes()
    assert not (model_folder / "LICENSE-CODE").exists()


# ---- The repository ----
def test_a_new_repository_is_public_unless_asked_otherwise(push, hub):
    for repo, options, kind in ((REPO, [], "public"), ("me/other", ["--private"], "private")):
        code, out, _ = push(*options, repo=repo)
        assert (code, hub.repositories[repo].private) == (0, kind == "private")
        assert f"pushed into the {kind} repository {repo}: " in out
    code, _, err = push("--private")
    assert code == 2
    assert the_error(err).startswith(f"{REPO} exists and is public; make it private in its settings on the Hub, or")


def test_files_of_an_older_model_are_removed_and_others_stay(push, hub):
    old = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "recipe.json", "source.spm"]
    old += ["test.translations.txt"]
    others = ["photo.png", "handler.py", "vocabulary.md", "docs/vocab.json", "last-checkpoint/model.safetensors"]
    hub.add(REPO, dict.fromkeys([*old, *others], "old"))
    code, out, _ = push()
    assert code == 0
    assert f"removed from the repository: {', '.join(old)}\n" in out
    files = hub.repositories[REPO].files()
    assert [name for name in old if name in files] == []
    assert [files[name] for name in others] == [b"old"] * len(others)


# ---- What is wrong ----
@pytest.mark.parametrize("there", [True, False])
def test_a_repository_of_somebody_else(push, hub, there):
    if there:
        hub.add("other/model")
    code, _, err = push(repo="other/model")
    assert code == 2
    assert the_error(err).startswith("you may not write to other/model (403); give a repository of your own, or log in")
    assert "other/model" not in hub.repositories or len(hub.repositories["other/model"].commits) == 1


def test_without_a_token_that_the_hub_knows(push, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    log_in = "log in with `hf auth login`, or set HF_TOKEN, with a token that may write"
    assert the_error(push().err) == f"there is no token for the Hub; {log_in}"
    monkeypatch.setenv("HF_TOKEN", "hf_" + "Wrong" * 8)
    code, _, err = push()
    assert (code, the_error(err)) == (2, f"the Hub doesn't accept the token (401) for {REPO}; {log_in}")
    assert hub.repositories == {}


def test_when_the_hub_can_not_be_reached(push, hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    code, _, err = push()
    assert code == 1
    assert re.fullmatch(r"the Hub can't be reached, or fails \(.+\), and me/model isn't complete.*", the_error(err))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, _, err = push()
    assert code == 1
    assert "unset the `HF_HUB_OFFLINE` environment variable" in the_error(err)


def half_of_the_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without(name):
    return lambda folder: (folder / name).unlink()


def with_card(old, new):
    return lambda folder: change_card(folder, old, new)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: put(folder, "adapter_config.json"), "has an adapter, not a model; publish it with PEFT's"),
        (without("README.md"), "has no README.md; write it with `vanilla-transformer card "),
        (with_card("license: mit", "license: [mit"), "README.md isn't a model card"),
        (change_weights, "the weights in .* have changed since README.md was written; write it again"),
        (half_of_the_weights, "model.safetensors is cut short"),
        (without("modeling_vanilla_transformer.py"), "has no modeling_vanilla_transformer.py, without which"),
        (without("tokenization_vanilla_transformer.py"), "has no tokenization_vanilla_transformer.py, without which"),
        (without("tokenizer.json"), "can't load .*; only a model that can be loaded is published"),
        (without("config.json"), "config.json is missing; only a model that can be loaded"),
    ],
)
def test_what_must_not_be_published(push, hub, model_folder, spoil, message):
    spoil(model_folder)
    code, _, err = push()
    assert code == 2
    assert re.search(message, the_error(err)), err
    assert hub.requests == []


@pytest.mark.parametrize(
    ("repo", "license", "message"),
    [
        ("model", "mit", "'model' is not a repository's name; give user/name"),
        ("me/a..b", "mit", "or .. in repo_id"),
        (REPO, "apache-1.9", r'Invalid metadata in README.md. .*"license" must be one of'),
    ],
)
def test_what_the_hub_does_not_take(push, hub, model_folder, repo, license, message):
    change_card(model_folder, "license: mit", f"license: {license}")
    code, _, err = push(repo=repo)
    assert code == 2
    assert re.search(message, the_error(err))
    assert all(len(repository.commits) == 1 for repository in hub.repositories.values())


def test_code_of_version_0_3_0_is_told_refused_and_renewed(push, vanilla_transformer, model_folder, monkeypatch):
    file = model_folder / "modeling_vanilla_transformer.py"
    new = file.read_bytes()
    edited = new + b"OLD = True\n"
    file.write_bytes(edited)
    info, card = ("info", model_folder), ("card", model_folder, "--overwrite")
    for told in (push("--dry-run"), *(vanilla_transformer(*command) for command in (info, card))):
        assert told[0] == 0
        assert f"carries code that was edited, or is another version's: {file.name}" in told[1]
    code, _, err = vanilla_transformer(*info, "--renew-code")
    assert (code, f"{file} was edited" in err, file.read_bytes()) == (2, True, edited)

    monkeypatch.setattr(checkpoint_code, "OLD_DIGESTS", {checkpoint_code._digest(file)})
    renew = f"carries code of version 0.3.0, .* renew it with `vanilla-transformer info {model_folder} --renew-code`"
    for command in (info, card):
        assert re.search(renew, vanilla_transformer(*command).out)
    code, _, err = push()
    assert (code, bool(re.search(renew, the_error(err)))) == (2, True)
    (model_folder / "plan_vanilla_transformer.py").unlink()  # of the new version alone, say
    assert vanilla_transformer(*info, "--renew-code").code == 0
    assert file.read_bytes() == new
    assert push()[0] == 0

    file.write_bytes(edited)
    AutoModelForSeq2SeqLM.from_pretrained(model_folder).save_pretrained(model_folder)
    assert file.read_bytes() == new
