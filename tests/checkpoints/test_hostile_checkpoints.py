"""A run's folder is data: `average` and `train` execute nothing in it, read and write nothing outside, keep notes."""

import json
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


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


def with_fields(file: Path, **fields: object) -> None:
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**values, **fields}))


def auto_map(folder: Path, marker: Path, model_type: str = "vanilla_transformer") -> None:
    code(folder / "evil.py", marker)
    classes = {name: "evil.Evil" for name in ("AutoConfig", "AutoModel", "AutoModelForSeq2SeqLM")}
    with_fields(folder / "config.json", auto_map=classes, model_type=model_type)


def auto_tokenizer(folder: Path, marker: Path) -> None:
    code(folder / "evil.py", marker)
    tokenizer = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    with_fields(folder / "tokenizer_config.json", auto_map=tokenizer, tokenizer_class="Evil")


WEIGHTS = ("pytorch_model.bin", "adapter_model.bin", "pytorch_model_fsdp_0/.metadata")
CODE = ("custom_generate/generate.py", "modeling_vanilla_transformer.py", "__init__.py")


def of_file(write: Callable[[Path, Path], None], name: str) -> Callable[[Path, Path], None]:
    return lambda folder, marker: write(folder / name, marker)


PLANTS: dict[str, Callable[[Path, Path], None]] = {
    **{name: of_file(saved_by_torch, name) for name in ("optimizer.pt", "rng_state.pth", "training_args.bin")},
    **{name: of_file(saved_by_torch, name) for name in WEIGHTS[:2]},
    **{f"pickled {name}": of_file(pickled, name) for name in ("optimizer.pt", "rng_state.pth")},
    **{WEIGHTS[2]: of_file(pickled, WEIGHTS[2])},
    **{name: of_file(code, name) for name in CODE},
    "auto_map": auto_map,
    "auto_map of another type": lambda folder, marker: auto_map(folder, marker, "evil"),
    "auto_map of the tokenizer": auto_tokenizer,
    "custom_generate": lambda folder, marker: with_fields(folder / "generation_config.json", custom_generate="."),
}


def plant(name: str, run: Path, marker: Path) -> None:
    """Plants it wherever a run has a model or a tokenizer."""
    for folder in (run, *run.glob("checkpoint-*"), run / "tokenizer", run / "averaged-2"):
        if folder.is_dir():
            PLANTS[name](folder, marker)


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the command asked a question"))
    return tmp_path / "it-ran"


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_nothing_is_executed(vanilla_transformer, train, finished, marker, tmp_path, name):
    plant(name, tmp_path / "run", marker)
    averaged = vanilla_transformer("average", tmp_path / "run", "--last", 2, "--output", tmp_path / "mean")
    resumed = train(finished, "--resume", "--max-steps", 6)
    assert not marker.exists()
    assert (averaged.code, bool(averaged.out)) in ((0, True), (2, False))
    for result in (averaged, resumed):
        assert not result.code or result.error


@pytest.mark.parametrize("name", [*WEIGHTS, "auto_map"])
def test_checkpoints_without_safetensors_are_not_loaded_in_another_way(
    vanilla_transformer, train, finished, marker, tmp_path, name
):
    """Nothing is left to resume from, so resuming starts again."""
    run = tmp_path / "run"
    for checkpoint in run.glob("checkpoint-*"):
        (checkpoint / "model.safetensors").unlink()
    plant(name, run, marker)
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


def test_links_within_a_checkpoint_and_to_a_checkpoint_are_followed(vanilla_transformer, finished, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint-4"
    (checkpoint / "config.json").rename(checkpoint / "settings")
    linked(checkpoint / "config.json", "settings")
    linked(tmp_path / "best", checkpoint)
    assert vanilla_transformer("average", "--checkpoints", tmp_path / "best", "--output", tmp_path / "mean").code == 0
    assert not (tmp_path / "mean" / "config.json").is_symlink()


def in_cache_of_hub(checkpoint: Path, cache: Path, revision: str) -> Path:
    """Lays out a checkpoint as the Hub's cache does: snapshots/REVISION/NAME -> ../../blobs/HASH."""
    (cache / "blobs").mkdir(parents=True, exist_ok=True)
    (cache / "snapshots" / revision).mkdir(parents=True)
    for number, file in enumerate(sorted(file for file in checkpoint.iterdir() if file.is_file())):
        shutil.copy(file, cache / "blobs" / f"{revision}{number}")
        (cache / "snapshots" / revision / file.name).symlink_to(Path("..", "..", "blobs", f"{revision}{number}"))
    return cache / "snapshots" / revision


def test_models_in_the_hubs_cache_are_averaged(vanilla_transformer, finished, tmp_path):
    run, cache = tmp_path / "run", tmp_path / "models--user--model"
    snapshots = [in_cache_of_hub(run / f"checkpoint-{step}", cache, f"rev{step}") for step in (2, 4)]
    assert vanilla_transformer("average", "--checkpoints", *snapshots, "--output", tmp_path / "mean").code == 0
    mean, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "mean", run / "averaged-2"))
    assert all(torch.equal(mean[name], value) for name, value in expected.items())
    assert not any(file.is_symlink() for file in (tmp_path / "mean").iterdir())


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


def test_notes_beside_an_average_are_kept(vanilla_transformer, train, finished):
    folder = Path(finished["output_dir"], "averaged-2")
    (folder / "notes.md").write_text("mine")
    options = ["--last", 2, "--output", folder, "--overwrite"]
    for result in (train(finished, "--resume"), vanilla_transformer("average", folder.parent, *options)):
        assert result.code in (1, 2)
        assert "notes.md), so it stays" in result.error
    assert (folder / "notes.md").read_text() == "mine"


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


@pytest.mark.parametrize(("written", "overwrite"), [("model.safetensors", True), ("tokenizer.json", False)])
def test_a_full_disk_leaves_what_was_there(vanilla_transformer, finished, tmp_path, written, overwrite):
    run = tmp_path / "run"
    size = 5_000
    if written != "model.safetensors":  # what is too large is a file that is written after the weights
        size = 2 * max(file.stat().st_size for file in (run / "checkpoint-4").glob("[!o]*") if file.is_file())
        with (run / "checkpoint-4" / written).open("a") as file:
            file.write("\n" * size)
    if overwrite:
        shutil.copytree(run / "averaged-2", run / "averaged-1")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    with no_file_larger_than(size):
        result = vanilla_transformer("average", run, "--last", 1, *(["--overwrite"] if overwrite else []))
    assert (result.code, result.out) == (1, "")
    assert "File too large" in result.error
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    assert (run / "averaged-1").exists() == overwrite
