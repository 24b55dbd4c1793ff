"""Pushes that go wrong, and folders and repositories with what mustn't be sent or lost."""

import re
import shutil

import pytest
import torch
from hub_client import OTHERS_TOKEN, REPO, TOKEN, connect, logits_in_a_new_process, logits_of, the_error, trainer_of
from hub_server import LocalHub, running
from huggingface_hub import ModelCard
from huggingface_hub.utils import close_session
from opus_mt import opus_mt_folder
from safetensors.torch import load
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianTokenizer, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_vanilla_transformer import (
    DictionaryTokenizer,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    cli,
)
from hf_vanilla_transformer.hub.upload import PublishError, push_to_hub
from hf_vanilla_transformer.interop.segmentation import tokenizer_of

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNza\n"
SECRETS = {".env": "PASSWORD=x", "prod.env": "PASSWORD=x", ".git/config": "url", "server.pem": KEY, "id_rsa": "x"}


def pair_of(checkpoint):
    return (auto.from_pretrained(checkpoint) for auto in (AutoTokenizer, AutoModelForSeq2SeqLM))


def put(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


# ---- The connection breaks ----
STAGES = [
    r"GET /api/models/me/model",
    r"POST /api/repos/create",
    r"POST /api/models/.*/preupload/",
    r"POST /me/model\.git/info/lfs",
    r"PUT /large/",
    r"POST /api/models/.*/commit/",
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_connection_that_breaks_at_any_stage(push, hub, model_folder, stage, when):
    hub.dies_at = lambda request: when if re.match(stage, request) else None
    code, out, err = push("--debug")
    assert (code, "pushed into" in out) == (1, False)
    assert err.startswith("Traceback")
    problem = the_error(err.splitlines()[-1])
    assert re.fullmatch(r"the Hub can't be reached \(.+\), so me/model isn't complete there; push again, .*", problem)
    arrived = hub.repositories[REPO].files() if REPO in hub.repositories else {}
    assert {*arrived} <= {".gitattributes"} or "commit" in stage  # all of it or nothing

    hub.dies_at = lambda request: None
    code, out, err = push()
    assert (code, err) == (0, "")
    files = hub.repositories[REPO].files()
    names = {path.name for path in model_folder.iterdir()} - {"model_card.json"}
    assert {*files} == names | {".gitattributes"}
    assert all(files[name] == (model_folder / name).read_bytes() for name in names - {"README.md"})


def test_a_trainers_push_that_breaks(hub, tiny_checkpoint, tmp_path):
    trainer = trainer_of(tiny_checkpoint, tmp_path / "run", hub_model_id=REPO)
    hub.dies_at = lambda request: "before" if "/commit/" in request else None
    with pytest.raises(ConnectionError, match=r"^the Hub can't be reached \([^\n]+$") as caught:
        trainer.push_to_hub()
    assert TOKEN not in str(caught.value)
    hub.dies_at = lambda request: None
    trainer.push_to_hub()
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= {*hub.repositories[REPO].files()}


# ---- What mustn't be sent ----
def test_secrets_in_a_folder_are_not_sent(push, hub, model_folder):
    put(model_folder, SECRETS)
    code, out, _ = push()
    assert code == 0
    assert f"not sent: {', '.join(sorted([*SECRETS, 'model_card.json']))}\n" in out
    assert not {*SECRETS} & {*hub.repositories[REPO].files()}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (KEY, "a private key"),
        (f"a={OTHERS_TOKEN}", "a token of the Hub"),
        ("api_org_" + "x" * 34, "a token of the Hub"),
    ],
)
def test_secrets_in_a_file_are_told(push, hub, model_folder, text, what):
    put(model_folder, {"notes.txt": text})
    code, _, err = push()
    assert code == 2
    assert f"notes.txt contains what looks like {what}; remove it" in the_error(err)
    assert hub.requests == []


def test_links_out_of_the_folder_are_refused(push, hub, model_folder, tmp_path):
    put(tmp_path, {"elsewhere/passwords": "secret"})
    (model_folder / "more").symlink_to(tmp_path / "elsewhere")  # a folder, which isn't looked into
    (model_folder / "notes.txt").symlink_to(tmp_path / "elsewhere" / "passwords")
    code, _, err = push("--dry-run")
    assert code == 2
    assert re.search(r"notes\.txt is a link to .*passwords, out of the folder; put a copy in its place", the_error(err))
    (model_folder / "notes.txt").unlink()
    (model_folder / "notes.txt").symlink_to("config.json")
    assert push()[0] == 0
    files = hub.repositories[REPO].files()
    assert files["notes.txt"] == files["config.json"]
    assert not [name for name in files if "passwords" in name]


def test_a_model_in_the_hubs_cache_is_sent_although_it_is_of_links(push, hub, model_folder, tmp_path):
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "my-model"
    shutil.copytree(model_folder, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert push(folder=snapshot)[0] == 0
    assert "model.safetensors" in hub.repositories[REPO].files()


@pytest.mark.parametrize("way", ["end", "during training"])
def test_a_trainer_sends_nothing_but_the_model(hub, tiny_checkpoint, tmp_path, way):
    run = tmp_path / "run"
    put(run, {**SECRETS, "data/corpus.txt": "private", "wandb/x": "x"})
    trainer = trainer_of(tiny_checkpoint, run, hub_model_id=REPO, push_to_hub=True)
    if way == "end":
        shutil.rmtree(run / "data")
        trainer.push_to_hub()
    else:
        trainer.save_model(run / "checkpoint-1", _internal_call=True)
        trainer._push_from_checkpoint(str(run / "checkpoint-1"))
        trainer._finish_current_push()
    files = {*hub.repositories[REPO].files()}
    model = {*("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")}
    code = {name for name in files if name.endswith("_vanilla_transformer.py")} | {"LICENSE-CODE"}
    assert len(code) == 5
    assert files == {".gitattributes"} | model | code | ({"README.md"} if way == "end" else set())


def test_a_trainer_refuses_a_file_with_a_token(hub, tiny_checkpoint, tmp_path):
    trainer = trainer_of(tiny_checkpoint, tmp_path / "run", hub_model_id=REPO)
    put(tmp_path / "run", {"notes.txt": OTHERS_TOKEN})
    with pytest.raises(PublishError, match=r"notes\.txt contains what looks like a token") as caught:
        trainer.push_to_hub()
    assert OTHERS_TOKEN not in str(caught.value)
    assert hub.sent("PUT") == []


# ---- What is there already ----
def test_a_trainers_shards_replace_the_weights_that_are_there(hub, tiny_checkpoint, tmp_path):
    """With the older weights beside them, `from_pretrained` would load those."""
    hub.add(REPO, {"model.safetensors": "old", "recipe.json": "{}", "photo.png": "x", "docs/model.safetensors": "x"})
    trainer = trainer_of(tiny_checkpoint, tmp_path / "run", hub_model_id=REPO)
    trainer.model.save_pretrained(tmp_path / "run", max_shard_size="40KB")
    trainer.save_model = lambda *_, **__: None
    trainer.push_to_hub()
    files = hub.repositories[REPO].files()
    assert {"model.safetensors.index.json", "photo.png", "docs/model.safetensors"} <= {*files}
    assert not {"model.safetensors", "recipe.json"} & {*files}


def test_a_replaced_card_is_told(push, hub, model_folder):
    hub.add(REPO, {"README.md": "# Written by hand\n"})
    code, out, _ = push()
    assert code == 0
    assert "replaced in the repository: README.md, which said something else" in out
    first, *_ = hub.repositories[REPO].commits.values()
    assert first["README.md"].content == b"# Written by hand\n"
    assert "replaced" not in push()[1]


def test_a_configuration_first_brings_no_empty_card(hub, tiny_checkpoint):
    tokenizer, model = pair_of(tiny_checkpoint)
    done = push_to_hub(model.config, REPO)
    assert done.commit_message == "Upload config"
    assert "README.md" not in hub.repositories[REPO].files()
    push_to_hub(model, REPO)
    push_to_hub(tokenizer, REPO)
    assert "| width (d_model) | 32 |" in hub.repositories[REPO].files()["README.md"].decode()


def test_transformers_card_of_empty_headings_is_replaced(hub, tiny_checkpoint):
    _, model = pair_of(tiny_checkpoint)
    model.generation_config.push_to_hub(REPO)
    assert "More Information Needed" in hub.repositories[REPO].files()["README.md"].decode()
    push_to_hub(model, REPO, tags="mine")
    card = ModelCard(hub.repositories[REPO].files()["README.md"].decode())
    assert "needed" not in card.text.lower()
    assert "mine" in card.data.tags


def test_a_card_there_that_can_not_be_read_is_told_and_stays(hub, tiny_checkpoint):
    _, model = pair_of(tiny_checkpoint)
    hub.add(REPO, {"README.md": "---\na: [\n---\nmine\n"})
    with pytest.raises(ValueError, match=r"^me/model's README\.md isn't a model card \([^\n]+$"):
        push_to_hub(model, REPO)
    assert len(hub.repositories[REPO].commits) == 1


def test_a_proposal_changes_nothing(hub, tiny_checkpoint):
    tokenizer, model = pair_of(tiny_checkpoint)
    hub.add("other/model", {"README.md": "# Theirs\n"})
    done = push_to_hub(model, "other/model", create_pr=True)
    assert (done.pr_revision, done.pr_num) == ("refs/pr/1", 1)
    assert {*hub.repositories["other/model"].files()} == {".gitattributes", "README.md"}
    files = hub.repositories["other/model"].files("refs/pr/1")
    assert {"model.safetensors", "modeling_vanilla_transformer.py"} <= {*files}
    assert "# Theirs" in files["README.md"].decode()
    hub.users[TOKEN] = "other"  # who adds to it
    push_to_hub(tokenizer, "other/model", revision="refs/pr/1")
    assert "tokenizer.json" in hub.repositories["other/model"].files("refs/pr/1")


@pytest.mark.parametrize("repo", ["me/" + "a" * 200, "me/-a", "me/a.git"])
def test_names_that_the_hub_can_not_have(push, hub, repo):
    code, _, err = push(repo=repo)
    assert code == 2
    assert "can't be a repository's name; give user/name" in the_error(err)
    assert hub.sent() == []


def test_a_file_with_a_long_name(push, hub, model_folder):
    name = "ä" * 100 + " # %41?.txt"
    put(model_folder, {name: "x"})
    assert push()[0] == 0
    assert hub.repositories[REPO].files()[name] == b"x"


def test_averaged_weights_are_sent_as_they_are(push, hub, tiny_checkpoint, tmp_path):
    run = tmp_path / "a run"
    for step in (1, 2):
        checkpoint = shutil.copytree(tiny_checkpoint, run / f"checkpoint-{step}")
        _, model = pair_of(checkpoint)
        with torch.no_grad():
            model.get_input_embeddings().weight[5] = float(step)
        model.save_pretrained(checkpoint)
        put(checkpoint, {"trainer_state.json": f'{{"global_step": {step}, "log_history": []}}'})
    averaged = tmp_path / "averaged"
    assert cli.main(["average", str(run), "--last", "2", "--output", str(averaged)]) == 0
    assert cli.main(["card", str(averaged), "--license", "mit"]) == 0
    assert push(folder=averaged)[0] == 0
    weights = load(hub.repositories[REPO].files()["model.safetensors"])
    assert [value for value in weights.values() if value.ndim == 2 and (value[5] == 1.5).all()]


def test_a_trainers_second_push_keeps_what_the_first_said(hub, tiny_checkpoint, tmp_path):
    trainer = trainer_of(tiny_checkpoint, tmp_path / "run", hub_model_id=REPO)
    trainer.push_to_hub(language=["en", "de"], license="mit", model_name="Ours")
    trainer.push_to_hub(tags="mine")
    card = ModelCard(hub.repositories[REPO].files()["README.md"].decode())
    assert (card.data.language, card.data.license) == (["en", "de"], "mit")
    assert "mine" in card.data.tags
    assert "\n# Ours\n" in card.content
    trainer.push_to_hub(language="fr")
    assert ModelCard(hub.repositories[REPO].files()["README.md"].decode()).data.language == ["fr"]


# ---- Other tokenizers, other trainers ----
def fairseq_like(folder):
    """A model with the tokenizer of the other toolkits, as a conversion saves it."""
    put(folder / "files", {"codes": "#version: 0.2\nn e\nne n</w>\nh a\n"})
    pieces = [*["<s>", "<pad>", "</s>", "<unk>"], "ha@@", "lf</w>", "t@@", "w@@", "e@@", "n@@", "y", "e", "o@@", "9"]
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = tokenizer_of(folder / "files", (pieces, pieces), special)
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(pieces), **ids)
    VanillaTransformerForConditionalGeneration(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    assert cli.main(["card", str(folder / "model"), "--license", "mit"]) == 0
    return folder / "model"


@pytest.fixture(scope="module")
def others(tiny_checkpoint, tmp_path_factory):
    """A hub with converted models, each pushed by the command and by the function, and one of a stock Trainer."""
    folder = tmp_path_factory.mktemp("others")
    opus_mt_folder(folder / "marian")
    assert cli.main(["convert", str(folder / "marian"), "--output", str(folder / "opus")]) == 0
    kinds = {"opus": (folder / "opus", MarianTokenizer), "fairseq": (fairseq_like(folder), DictionaryTokenizer)}
    wanted = {}
    with pytest.MonkeyPatch.context() as patch, running(LocalHub(me=TOKEN)) as local:
        connect(patch, local.endpoint)
        for name, (saved, kind) in kinds.items():
            assert cli.main(["push", str(saved), f"me/{name}"]) == 0
            tokenizer, model = pair_of(saved)
            assert type(tokenizer) is kind
            push_to_hub(tokenizer, f"me/{name}-by-function")
            push_to_hub(model, f"me/{name}-by-function")
            wanted |= dict.fromkeys((f"me/{name}", f"me/{name}-by-function"), logits_of(saved))
        tokenizer, model = pair_of(tiny_checkpoint)
        options = {"report_to": [], "use_cpu": True, "hub_model_id": "me/stock"}
        arguments = Seq2SeqTrainingArguments(output_dir=str(folder / "stock"), **options)
        Seq2SeqTrainer(model=model, args=arguments, processing_class=tokenizer).push_to_hub()
        yield local, folder, wanted | {"me/stock": logits_of(tiny_checkpoint)}
    close_session()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hidden", "installed"])
def test_other_models_load_in_a_new_process_with_the_same_logits(others, how):
    local, folder, wanted = others
    found = logits_in_a_new_process(local, how, [(repo, "main") for repo in wanted], folder)
    assert {name: torch.equal(one, wanted[name.removesuffix("@main")]) for name, one in found.items()} == {
        f"{repo}@main": True for repo in wanted
    }


def test_an_adapter_names_its_base_model(hub, tiny_checkpoint, tmp_path, push):
    peft = pytest.importorskip("peft", reason="PEFT isn't installed")
    trainer = trainer_of(tiny_checkpoint, tmp_path / "run", hub_model_id=REPO)
    trainer.model.name_or_path = "me/base"
    settings = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q_proj"], base_model_name_or_path="me/base")
    trainer.model = peft.get_peft_model(trainer.model, settings)
    trainer.push_to_hub()
    files = hub.repositories[REPO].files()
    assert "adapter_model.safetensors" in files
    assert ModelCard(files["README.md"].decode()).data.base_model == "me/base"
    code, _, err = push(folder=tmp_path / "run")
    assert code == 2
    assert "has an adapter, not a model; " in the_error(err)
