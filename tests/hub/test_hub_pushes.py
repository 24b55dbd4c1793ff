"""Pushing a model: the real client of the Hub over HTTP, to a Hub on localhost, and back into a fresh process."""

import json
import re
import shutil
import subprocess
import sys

import huggingface_hub.constants as constants
import pytest
import torch
from hub_client import (
    OTHERS_TOKEN,
    PACKAGE,
    REPO,
    TOKEN,
    connect,
    environment,
    logits_in_a_new_process,
    logits_of,
    the_error,
    trainer_of,
)
from hub_server import LocalHub, running
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import close_session
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.hub.upload import PublishError, push_to_hub

CODE = {f"{part}_vanilla_transformer.py" for part in ("configuration", "modeling", "generation", "tokenization")}


def test_a_model_on_the_hub_is_described_without_its_weights(push, hub, tmp_path, monkeypatch, capsys):
    assert push()[0] == 0
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    capsys.readouterr()
    assert cli.main(["info", REPO, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "folder" / "my-model")
    assert found["parameters"]["total"] == model.num_parameters()
    assert (found["config"]["d_model"], found["tokenizer"]["kind"]) == (32, "VanillaTransformerTokenizerFast")
    assert found["problems"] == []
    cached = {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert not cached & {".safetensors", ".py"}
    assert cli.main(["info", "me/nothing"]) == 2
    assert "me/nothing is neither a folder here nor a model on the Hub" in the_error(capsys.readouterr().err)


# ---- What arrives ----
WAYS = {"command": "me/by-command", "trainer": "me/by-trainer", "function": "me/by-function"}


@pytest.fixture(scope="module")
def pushed(tiny_checkpoint, tmp_path_factory):
    """A hub with the same model three times, each pushed in another way, and one of them a second time, changed."""
    folder = tmp_path_factory.mktemp("pushed")
    changed = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    with torch.no_grad():
        changed.get_input_embeddings().weight[5] += 1.0
    with pytest.MonkeyPatch.context() as patch, running(LocalHub(me=TOKEN)) as local:
        connect(patch, local.endpoint)
        first = shutil.copytree(tiny_checkpoint, folder / "first")
        assert cli.main(["card", str(first), "--source-lang", "en", "--target-lang", "de", "--license", "mit"]) == 0
        # What only training needs is left in the folder, as is what an editor leaves.
        left = ("checkpoint-2/model.safetensors", "runs/log", "translations/update-2.txt", "optimizer.pt")
        for name in (*left, "training_args.bin", ".cache/x", "recipe.json", "trainer_state.json"):
            (first / name).parent.mkdir(exist_ok=True)
            (first / name).write_text("of training")
        assert cli.main(["push", str(first), WAYS["command"]]) == 0
        second = shutil.copytree(tiny_checkpoint, folder / "second")
        changed.save_pretrained(second)
        assert cli.main(["card", str(second), "--license", "mit"]) == 0
        assert cli.main(["push", str(second), WAYS["command"], "--revision", "next"]) == 0

        trainer = trainer_of(tiny_checkpoint, folder / "run", hub_model_id=WAYS["trainer"])
        (folder / "run").mkdir(exist_ok=True)
        (folder / "run" / "recipe.json").write_text("{}")
        trainer.push_to_hub(language=["en", "de"], license="mit")

        tokenizer, model = (auto.from_pretrained(tiny_checkpoint) for auto in (AutoTokenizer, AutoModelForSeq2SeqLM))
        push_to_hub(model, WAYS["function"])
        push_to_hub(tokenizer, WAYS["function"])
        yield local, folder, logits_of(second)
    close_session()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hidden", "installed"])
def test_models_load_in_a_new_process_with_the_same_logits(pushed, tiny_checkpoint, how):
    local, folder, changed = pushed
    models = [*((repo, "main") for repo in WAYS.values()), (WAYS["command"], "next")]
    found = logits_in_a_new_process(local, how, models, folder)
    mine = logits_of(tiny_checkpoint)
    assert not torch.equal(mine, changed)
    assert {name: torch.equal(one, changed if name.endswith("next") else mine) for name, one in found.items()} == {
        f"{repo}@{revision}": True for repo, revision in models
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_repository_has_card_licence_and_code_and_nothing_of_the_training(pushed, way):
    files = pushed[0].repositories[WAYS[way]].files()
    model = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {*files} == {".gitattributes", "README.md", "LICENSE-CODE", *model, *CODE}
    assert files["LICENSE-CODE"] == (PACKAGE / "LICENSE").read_bytes()
    assert all(files[name] == (PACKAGE / name).read_bytes() for name in CODE)
    card = ModelCard(files["README.md"].decode())
    assert {"vanilla_transformer", "attention-is-all-you-need"} <= {*card.data.tags}
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "translation")
    assert "| width (d_model) | 32 |" in card.text
    assert "needed" not in card.text.lower()
    assert {*re.findall(r'from_pretrained\("([^"]*)"', card.text)} == {WAYS[way]}
    if way != "function":  # nobody has said what these languages are
        assert (card.data.license, card.data.language) == ("mit", ["en", "de"])


def test_a_branch_leaves_main_as_it_is(pushed):
    repository = pushed[0].repositories[WAYS["command"]]
    main, branch = repository.files(), repository.files("next")
    assert main["model.safetensors"] != branch["model.safetensors"]
    assert {name for name in main if main[name] != branch[name]} == {"model.safetensors", "README.md"}


def test_no_token_is_in_what_was_sent_or_written(pushed):
    local, folder, _ = pushed
    sent = [content for repository in local.repositories.values() for content in repository.files().values()]
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert [content for content in (*sent, *written) if TOKEN.encode() in content] == []


@pytest.mark.slow
def test_the_command_itself_reads_the_variables_and_writes_no_token(model_folder, tmp_path):
    with running(LocalHub(me=TOKEN)) as local:
        variables = environment(local, tmp_path / "home")
        command = [sys.executable, "-m", "hf_vanilla_transformer", "push", str(model_folder), REPO, "--private"]
        run = subprocess.run(
            command, cwd=PACKAGE.parent, env=variables, capture_output=True, text=True, timeout=280, check=False
        )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert run.stdout.splitlines()[-1].startswith(f"pushed into the private repository {REPO}: {local.endpoint}")
    assert local.repositories[REPO].private
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
    assert TOKEN not in run.stdout


# ---- The command ----
def test_a_dry_run_lists_files_and_sizes_and_asks_nobody(push, hub, model_folder, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    (model_folder / "checkpoint-3").mkdir()
    (model_folder / "checkpoint-3" / "config.json").write_text("{}")
    code, out, err = push("--dry-run")
    assert (code, err) == (0, "")
    sizes = {name: int(size.replace(",", "")) for size, name in re.findall(r"^ *([\d,]+)  (\S+)$", out, re.MULTILINE)}
    expected = {path.name: path.stat().st_size for path in model_folder.iterdir() if path.is_file()}
    del expected["model_card.json"]
    expected["README.md"] += (len(REPO) - len("my-model")) * 5  # the name, in the title and in the code
    assert sizes == expected
    assert f"{sum(expected.values()):,}  bytes in {len(expected)} files" in out
    assert "not sent: checkpoint-3/config.json, model_card.json" in out
    assert out.splitlines()[-1] == "dry run: nothing was sent"
    assert hub.requests == []


def test_the_card_that_is_sent_names_the_repository_and_the_folders_stays(push, hub, model_folder):
    before = (model_folder / "README.md").read_text()
    assert before.count("my-model") == 5
    code, out, _ = push()
    assert code == 0
    assert f"note: in the README.md that is sent, the model's name is {REPO}, not my-model" in out
    assert (model_folder / "README.md").read_text() == before
    assert hub.repositories[REPO].files()["README.md"].decode() == before.replace("my-model", REPO)


def test_the_same_again_is_no_new_commit(push, hub):
    assert push()[0] == 0
    commits, puts = len(hub.repositories[REPO].commits), len(hub.sent("PUT"))
    code, out, _ = push()
    assert code == 0
    assert out.splitlines()[-1].startswith(f"{REPO} has all of this already: {hub.endpoint}/{REPO}/commit/")
    assert (len(hub.repositories[REPO].commits), len(hub.sent("PUT"))) == (commits, puts)


@pytest.mark.parametrize(("options", "private"), [((), False), (("--private",), True)])
def test_a_new_repository_is_public_unless_asked_otherwise(push, hub, options, private):
    code, out, _ = push(*options)
    assert code == 0
    assert hub.repositories[REPO].private is private
    assert f"pushed into the {'private' if private else 'public'} repository {REPO}: " in out


def test_a_public_repository_is_not_taken_for_a_private_one(push, hub):
    hub.add(REPO)
    code, _, err = push("--private")
    assert code == 2
    assert the_error(err) == (
        f"{REPO} exists and is public; make it private in its settings on the Hub, or give another name"
    )
    assert hub.sent() == []


def test_a_private_repository_stays_private(push, hub):
    hub.add(REPO, private=True)
    code, out, _ = push()
    assert code == 0
    assert f"pushed into the private repository {REPO}" in out
    assert hub.repositories[REPO].private


def test_files_of_an_older_model_are_removed_and_others_stay(push, hub):
    old = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "recipe.json", "source.spm"]
    others = ["photo.png", "handler.py", "docs/vocab.json", "last-checkpoint/model-00001-of-00002.safetensors"]
    hub.add(REPO, dict.fromkeys([*old, *others], "old"))
    code, out, _ = push()
    assert code == 0
    assert f"removed from the repository: {', '.join(old)}\n" in out
    files = hub.repositories[REPO].files()
    assert [name for name in old if name in files] == []
    assert [files[name] for name in others] == [b"old"] * len(others)


def test_results_on_benchmarks_are_sent_and_other_hidden_files_are_not(push, hub, model_folder):
    for name in (".eval_results/some--bench.yaml", ".git/config", ".env"):
        (model_folder / name).parent.mkdir(exist_ok=True)
        (model_folder / name).write_text("x")
    code, out, _ = push()
    assert code == 0
    assert "not sent: .env, .git/config, model_card.json\n" in out
    assert [name for name in hub.repositories[REPO].files() if name.startswith(".")] == [
        ".gitattributes",
        ".eval_results/some--bench.yaml",
    ]


def test_a_licence_of_the_code_is_added_where_it_lacks(push, hub, model_folder):
    (model_folder / "LICENSE-CODE").unlink()
    assert push()[0] == 0
    assert hub.repositories[REPO].files()["LICENSE-CODE"] == (PACKAGE / "LICENSE").read_bytes()
    assert not (model_folder / "LICENSE-CODE").exists()


def test_a_push_that_fails_half_way_and_is_repeated(push, hub, model_folder):
    model = AutoModelForSeq2SeqLM.from_pretrained(model_folder)
    (model_folder / "model.safetensors").unlink()
    model.save_pretrained(model_folder, max_shard_size="40KB")
    shards = {path.name: path.read_bytes() for path in model_folder.glob("*.safetensors")}
    assert len(shards) > 2
    assert cli.main(["card", str(model_folder), "--overwrite"]) == 0
    lost = shards[max(shards)]
    hub.refuses_upload = lambda content: content == lost
    code, _, err = push()
    assert code == 1
    assert the_error(err.splitlines()[-1]) == (
        f"the Hub answers with 507, so {REPO} isn't complete there; push again, what has arrived isn't sent twice"
    )
    assert {*hub.repositories[REPO].files()} == {".gitattributes"}  # nobody sees half of a model

    hub.refuses_upload = lambda content: False
    arrived, before = len(hub.large), len(hub.sent("PUT"))
    assert arrived >= 1
    assert push()[0] == 0
    assert len(hub.sent("PUT")) - before == len(shards) - arrived
    files = hub.repositories[REPO].files()
    assert {name: files[name] for name in shards} == shards


@pytest.mark.parametrize("there", [True, False])
def test_a_repository_of_somebody_else(push, hub, there):
    if there:
        hub.add("other/model")
    code, _, err = push(repo="other/model")
    assert code == 2
    assert the_error(err).startswith("you may not write to other/model (403); give a repository of your own, or log in")
    assert hub.sent("PUT") == []
    assert "other/model" not in hub.repositories or len(hub.repositories["other/model"].commits) == 1


def test_without_a_token(push, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    code, _, err = push()
    assert code == 2
    assert the_error(err) == (
        "there is no token for the Hub; log in with `hf auth login`, or set HF_TOKEN, with a token that may write"
    )
    assert hub.requests == []


def test_with_a_token_that_the_hub_does_not_know(push, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "Wrong" * 8)
    code, _, err = push()
    assert code == 2
    assert the_error(err).startswith(f"the Hub doesn't accept the token (401) for {REPO}; log in with `hf auth login`")
    assert "WrongWrong" not in err
    assert hub.repositories == {}


def test_when_nobody_listens(push, hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    code, _, err = push()
    assert code == 1
    assert re.fullmatch(
        r"the Hub can't be reached \(.+\), so me/model isn't complete there; push again.*", the_error(err)
    )


def test_when_the_network_is_forbidden(push, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, _, err = push()
    assert code == 2
    assert the_error(err) == "HF_HUB_OFFLINE forbids to ask the Hub; unset it to publish"


@pytest.mark.parametrize("repo", ["model", "me/model/x", "me/", "https://localhost/me/model", ""])
def test_what_is_no_name(push, hub, repo):
    code, _, err = push(repo=repo)
    assert code == 2
    assert "is not a repository's name; give user/name" in err
    assert hub.requests == []


def test_a_name_that_only_the_hub_can_not_have(push, hub):
    code, _, err = push(repo="me/a..b")
    assert code == 2
    assert the_error(err) == "'me/a..b' can't be a repository's name; give user/name"
    assert hub.sent() == []


# ---- What is checked first ----
def change_card(folder, old, new):
    file = folder / "README.md"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def no_card(folder):
    (folder / "README.md").unlink()


def a_card_of_empty_headings(folder):
    change_card(folder, "## Limits\n", "## Limits\n\n[More Information Needed]\n")


def a_card_of_another_model(folder):
    change_card(folder, '"my-model"', '"somebody/another-model"')


def no_metadata(folder):
    change_card(folder, "license: mit", "license: [mit")


def other_weights(folder):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = 0.5
    model.save_pretrained(folder)


def not_a_number(folder):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[3] = float("nan")
    model.save_pretrained(folder)


def half_of_the_weights(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def no_code(folder):
    (folder / "modeling_vanilla_transformer.py").unlink()


def no_code_of_the_tokenizer(folder):
    (folder / "tokenization_vanilla_transformer.py").unlink()


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def a_token(folder):
    (folder / "notes.txt").write_text(f"login {OTHERS_TOKEN}\n")


def no_model(folder):
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (no_card, "has no README.md; write it with `vanilla-transformer card "),
        (a_card_of_empty_headings, 'README.md says "More Information Needed"; fill that in'),
        (a_card_of_another_model, "README.md loads somebody/another-model, not me/model; correct it"),
        (no_metadata, "README.md isn't a model card"),
        (other_weights, "the weights in .* have changed since README.md was written; write it again"),
        (not_a_number, "contains NaN or infinity"),
        (half_of_the_weights, "model.safetensors is cut short"),
        (no_code, "has no modeling_vanilla_transformer.py, without which the model can't be loaded"),
        (no_code_of_the_tokenizer, "has no tokenization_vanilla_transformer.py, without which"),
        (no_tokenizer, "can't load .*; only a model that can be loaded is published"),
        (a_token, "notes.txt contains what looks like a token of the Hub; remove it"),
        (no_model, "has no config.json; DIR must be the folder of a saved model"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_what_must_not_be_published(push, hub, model_folder, spoil, message, options):
    spoil(model_folder)
    code, _, err = push(*options)
    assert code == 2
    assert re.search(message, the_error(err)), err
    assert OTHERS_TOKEN not in err
    assert hub.requests == []


def test_a_licence_that_the_hub_does_not_know(push, hub, model_folder):
    change_card(model_folder, "license: mit", "license: apache-1.9")
    code, _, err = push()
    assert code == 2
    assert re.search(r'the Hub refuses the metadata of README.md: .*"license" must be one of', the_error(err))
    assert len(hub.repositories[REPO].commits) == 1


def test_a_card_of_the_users_own_is_sent_as_it_is(push, hub, model_folder):
    card = f'---\nlicense: mit\n---\n\n# Ours\n\n```python\nfrom_pretrained("{REPO}", revision="a")\n```\n'
    card += '```python\nfrom_pretrained("\\x41")\n```\n'
    (model_folder / "README.md").write_text(card)
    code, out, _ = push()
    assert code == 0
    assert "note" not in out
    assert hub.repositories[REPO].files()["README.md"].decode() == card


def test_a_card_without_a_licence_is_told(push, model_folder):
    change_card(model_folder, "license: mit\n", "")
    code, out, _ = push("--dry-run")
    assert code == 0
    assert "README.md names no licence; `vanilla-transformer card " in out


# ---- push_to_hub ----
def pair_of(tiny_checkpoint):
    return (auto.from_pretrained(tiny_checkpoint) for auto in (AutoTokenizer, AutoModelForSeq2SeqLM))


def test_a_card_that_is_there_stays(hub, tiny_checkpoint):
    card = "---\nlicense: mit\ntags:\n- mine\n---\n\n# Written by hand\n"
    hub.add(REPO, {"README.md": card})
    tokenizer, model = pair_of(tiny_checkpoint)
    push_to_hub(model, REPO)
    push_to_hub(tokenizer, REPO)
    assert hub.repositories[REPO].files()["README.md"].decode() == card
    push_to_hub(model, REPO, tags=["translation", "mine"])
    tags = ModelCard(hub.repositories[REPO].files()["README.md"].decode()).data.tags
    assert tags == ["mine", "translation"]


def test_the_tokenizer_may_come_first_and_the_branch_be_another(hub, tiny_checkpoint):
    tokenizer, model = pair_of(tiny_checkpoint)
    push_to_hub(tokenizer, REPO, revision="next", private=True)
    assert "README.md" not in hub.repositories[REPO].files("next")
    done = push_to_hub(model, REPO, revision="next", commit_message="of mine")
    assert (done.commit_message, done.oid) == ("of mine", hub.repositories[REPO].branches["next"])
    files = hub.repositories[REPO].files("next")
    assert f'from_pretrained("{REPO}")' in files["README.md"].decode()
    assert {*CODE, "model.safetensors", "tokenizer.json", "LICENSE-CODE"} <= {*files}
    assert {*hub.repositories[REPO].files()} == {".gitattributes"}
    assert hub.repositories[REPO].private


def test_the_function_tells_what_is_wrong_in_one_line(hub, tiny_checkpoint, monkeypatch):
    tokenizer, model = pair_of(tiny_checkpoint)
    hub.add("other/model")
    with pytest.raises(PublishError, match=r"^you may not write to other/model \(403\); [^\n]+$"):
        push_to_hub(model, "other/model")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PublishError, match=r"^there is no token for the Hub; log in with [^\n]+$"):
        push_to_hub(tokenizer, REPO)
    assert push_to_hub(tokenizer, REPO, token=TOKEN).oid == hub.repositories[REPO].branches["main"]


def test_a_trainer_without_a_token_stops_before_it_trains(hub, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PublishError, match="there is no token for the Hub"):
        trainer_of(tiny_checkpoint, tmp_path / "run", push_to_hub=True, hub_model_id=REPO)
    assert hub.requests == []


def test_the_trainers_token_is_in_no_file(hub, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    trainer = trainer_of(tiny_checkpoint, tmp_path / "run", push_to_hub=True, hub_model_id=REPO, hub_token=TOKEN)
    trainer.push_to_hub()
    saved = torch.load(tmp_path / "run" / "training_args.bin", weights_only=False)
    assert (saved.hub_model_id, saved.hub_token, trainer.args.hub_token) == (REPO, None, TOKEN)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if TOKEN.encode() in path.read_bytes()] == []
    sent = hub.repositories[REPO].files()
    assert "training_args.bin" not in sent
    name = tmp_path / "weights.safetensors"
    name.write_bytes(sent["model.safetensors"])
    mine = trainer.model.state_dict()
    assert all(torch.equal(value, mine[key]) for key, value in load_file(name).items())


def test_the_client_is_the_real_one():
    assert HfApi.create_commit.__module__ == HfApi.create_repo.__module__ == "huggingface_hub.hf_api"


def test_training_with_a_push_needs_a_token_before_anything_is_read(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "a").write_text("nine\n")
    files = ["--train-source", tmp_path / "a", "--train-target", tmp_path / "a", "--output-dir", tmp_path / "run"]
    options = [*map(str, files), "--push-to-hub", "true", "--hub-model-id", REPO]
    assert cli.main(["train", *options]) == 2
    assert the_error(capsys.readouterr().err).startswith("there is no token for the Hub; log in with `hf auth login`")
    assert not (tmp_path / "run").exists()
    assert hub.requests == []
