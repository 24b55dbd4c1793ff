"""A run's folder is data: no command executes anything in it, or reads or writes anything outside."""

import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_runs import change_json


class Planted:
    """Is pickled as a call that creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return open, (str(self.marker), "w")


def saved_by_torch(file: Path, marker: Path) -> None:
    torch.save({"state": Planted(marker), "param_groups": []}, file)


def pickled(file: Path, marker: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(pickle.dumps(Planted(marker)))


def code(file: Path, marker: Path) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"open({str(marker)!r}, 'w').close()\nclass Evil: pass\ndef generate(*args, **kwargs): pass\n")


# Each plants something in a folder with a model or with a tokenizer.
def beside_the_model(folder: Path, marker: Path) -> None:
    """What nothing has to read."""
    for name in ("pytorch_model.bin", "adapter_model.bin", "training_args.bin"):
        saved_by_torch(folder / name, marker)
    pickled(folder / "pytorch_model_fsdp_0" / ".metadata", marker)
    for name in ("custom_generate/generate.py", "modeling_vanilla_transformer.py", "__init__.py"):
        code(folder / name, marker)
    auto_map(folder, marker, "vanilla_transformer")


def auto_map(folder: Path, marker: Path, model_type: str = "evil") -> None:
    code(folder / "evil.py", marker)
    classes = {name: "evil.Evil" for name in ("AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM")}
    change_json(folder / "config.json", auto_map=classes, model_type=model_type)


def auto_map_of_the_tokenizer(folder: Path, marker: Path) -> None:
    code(folder / "evil.py", marker)
    tokenizer = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    change_json(folder / "tokenizer_config.json", auto_map=tokenizer, tokenizer_class="Evil")


def custom_generate_and_states(folder: Path, marker: Path) -> None:
    """A state in each checkpoint, so that both are looked at."""
    code(folder / "custom_generate" / "generate.py", marker)
    change_json(folder / "generation_config.json", custom_generate=".")
    if folder.name == "checkpoint-4":
        saved_by_torch(folder / "optimizer.pt", marker)
    else:
        pickled(folder / "rng_state.pth", marker)


PLANTS = {
    "beside the model": beside_the_model,
    "custom_generate and states": custom_generate_and_states,
    "auto_map of another type": auto_map,
    "auto_map of the tokenizer": auto_map_of_the_tokenizer,
}


def plant(kind: Callable[[Path, Path], None], run: Path, marker: Path) -> None:
    """Plants it wherever a run has a model or a tokenizer."""
    for folder in (run, *run.glob("checkpoint-*"), run / "tokenizer"):
        kind(folder, marker)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the command asked a question"))
    return tmp_path / "it-ran"


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANTS)
def test_nothing_is_executed(vanilla_transformer, train, finished, marker, tmp_path, kind):
    run = tmp_path / "run"
    plant(PLANTS[kind], run, marker)
    loading = [
        vanilla_transformer("translate", "--model", run / "checkpoint-4", "nine 3", "--max-new-tokens", 2),
        train(finished, "--model-name-or-path", run / "checkpoint-4", "--dry-run"),
    ]
    averaged = vanilla_transformer("average", run, "--last", 2, "--output", tmp_path / "mean")
    resumed = train(finished, "--resume", "--max-steps", 6)
    assert not marker.exists()
    for result in (*loading, averaged, resumed):
        assert not result.code or result.error
    if kind == "auto_map of another type":
        assert [(one.code, "--trust-remote-code" in one.error) for one in loading] == [(2, True)] * 2
    if kind == "beside the model":  # the installed classes are used, as for any checkpoint of this type
        assert [one.code for one in (*loading, averaged, resumed)] == [0] * 4


def test_code_runs_where_it_is_trusted(vanilla_transformer, checkpoint, marker):
    auto_map(checkpoint, marker)
    result = vanilla_transformer("translate", "--model", checkpoint, "--trust-remote-code", "nine 3")
    assert result.code == 2  # its class is no model
    assert marker.exists()


def test_checkpoints_without_safetensors_are_not_loaded_in_another_way(
    vanilla_transformer, train, finished, marker, tmp_path
):
    """Nothing is left to resume from, so resuming starts again."""
    run = tmp_path / "run"
    for checkpoint in run.glob("checkpoint-*"):
        (checkpoint / "model.safetensors").unlink()
    plant(beside_the_model, run, marker)
    result = vanilla_transformer("average", run, "--last", 2, "--output", tmp_path / "mean")
    assert result.code == 2
    assert "no complete checkpoint" in result.error
    result = train(finished, "--resume", "--max-steps", 1, "--average-last", 0)
    assert "Resuming from" not in result.out or result.error
    assert not marker.exists()


# ---- Links ----
def linked(link: Path, target: Path | str) -> None:
    link.unlink(missing_ok=True)
    link.symlink_to(target)


@pytest.mark.parametrize("name", ["vocab.txt", "evil.py", "tokenizer.json", "model.safetensors"])
def test_a_link_to_a_file_elsewhere_is_not_followed(vanilla_transformer, finished, tmp_path, name):
    secret, file = tmp_path / "ssh" / "id_rsa", tmp_path / "run" / "checkpoint-2" / name
    secret.parent.mkdir()
    secret.write_text("-----BEGIN OPENSSH PRIVATE KEY-----")
    checkpoints = sorted((tmp_path / "run").glob("checkpoint-*"))
    for target in (secret, Path("..", "..", "ssh", "id_rsa")):
        linked(file, target)
        result = vanilla_transformer("average", "--checkpoints", *checkpoints, "--output", tmp_path / "mean")
        assert (result.code, (tmp_path / "mean").exists()) == (2, False)
        assert f"{file} is a link to {secret}" in result.error


def in_cache_of_hub(checkpoint: Path, cache: Path, revision: str) -> Path:
    """Lays out a checkpoint as the Hub's cache does: snapshots/REVISION/NAME -> ../../blobs/HASH."""
    (cache / "blobs").mkdir(parents=True, exist_ok=True)
    (cache / "snapshots" / revision).mkdir(parents=True)
    for number, file in enumerate(sorted(file for file in checkpoint.iterdir() if file.is_file())):
        shutil.copy(file, cache / "blobs" / f"{revision}{number}")
        (cache / "snapshots" / revision / file.name).symlink_to(Path("..", "..", "blobs", f"{revision}{number}"))
    return cache / "snapshots" / revision


def test_links_of_the_hubs_cache_within_a_checkpoint_and_to_one_are_followed(vanilla_transformer, finished, tmp_path):
    run, cache = tmp_path / "run", tmp_path / "models--user--model"
    two, four = (in_cache_of_hub(run / f"checkpoint-{step}", cache, f"rev{step}") for step in (2, 4))
    (run / "checkpoint-4" / "config.json").rename(run / "checkpoint-4" / "settings")
    linked(run / "checkpoint-4" / "config.json", "settings")
    linked(tmp_path / "best", run / "checkpoint-4")
    expected = load_file(run / "averaged-2" / "model.safetensors")
    for number, last in enumerate((four, tmp_path / "best")):
        mean = tmp_path / f"mean-{number}"
        assert vanilla_transformer("average", "--checkpoints", two, last, "--output", mean).code == 0
        found = load_file(mean / "model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert not any(file.is_symlink() for file in mean.iterdir())


def test_links_are_not_written_through(train, finished, tmp_path):
    (tmp_path / "precious").mkdir()
    (target := tmp_path / "precious" / "config.json").write_text("mine")
    for name in ("recipe.json", "scores.json", "README.md", "model.safetensors", "checkpoint-6", "tokenizer"):
        link = Path(finished["output_dir"], name)
        before = link.rename(tmp_path / name) if link.exists() else None
        link.symlink_to(target if "." in name else target.parent)
        result = train(finished, "--resume", "--max-steps", "6")
        assert result.code == 2
        assert f"{name} is a link to" in result.error
        link.unlink()
        if before is not None:
            before.rename(link)
    assert target.read_text() == "mine"
    assert [*target.parent.iterdir()] == [target]


# ---- A full disk ----
@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Writing beyond it fails as on a full disk, with another number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_what_was_there(vanilla_transformer, finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(run / "averaged-2", run / "averaged-1")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with no_file_larger_than(5_000):
        result = vanilla_transformer("average", run, "--last", 1, "--overwrite")
    assert (result.code, result.out) == (1, "")
    assert "File too large" in result.error
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
