"""`train --push-to-hub`: every commit can be loaded without the package, and the last one is what was scored."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import CommitOperationDelete, HfApi
from safetensors.torch import load_file

REPOSITORY = "somebody/somemodel"
WITHOUT_THE_PACKAGE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("hf_vanilla_transformer"):
            raise ImportError(name + " is hidden")

sys.meta_path.insert(0, Hidden())
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

for commit in sys.argv[1:]:
    model, report = AutoModelForSeq2SeqLM.from_pretrained(commit, trust_remote_code=True, output_loading_info=True)
    assert not report["missing_keys"], report
    tokenizer = AutoTokenizer.from_pretrained(commit, trust_remote_code=True)
    model.generate(**tokenizer("nine 3", return_tensors="pt"), max_new_tokens=3)
"""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Keeps what is uploaded as a list of folders, one per commit, each with the files of the one before."""
    commits: list[Path] = []

    def create_commit(self, repo_id, operations, *, run_as_future=False, **others):
        assert repo_id == REPOSITORY
        commit = tmp_path / "hub" / str(len(commits))
        shutil.copytree(commits[-1], commit) if commits else commit.mkdir(parents=True)
        for one in operations:
            file = commit / one.path_in_repo
            if isinstance(one, CommitOperationDelete):
                file.unlink()
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(one.path_or_fileobj if isinstance(one.path_or_fileobj, bytes)
                             else Path(one.path_or_fileobj).read_bytes())  # fmt: skip
        commits.append(commit)
        done = SimpleNamespace(is_done=lambda: True, done=lambda: True, result=lambda: None)
        return done if run_as_future else f"https://localhost/{repo_id}/commit/{len(commits)}"

    def list_repo_files(self, repo_id, *, revision=None):
        return [str(path.relative_to(commits[-1])) for path in commits[-1].rglob("*")] if commits else []

    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(HfApi, "list_repo_files", list_repo_files)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    monkeypatch.setattr(HfApi, "create_repo", lambda *_, **__: SimpleNamespace(repo_id=REPOSITORY))
    return commits


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["every_save", "end"])
def test_commits(train, recipe, hub, strategy):
    options = ("--push-to-hub", "true", "--hub-model-id", REPOSITORY, "--hub-strategy", strategy)
    result = train({**recipe, "max_steps": 6}, *options)
    assert result.code == 0, result.err
    assert "Pushed to the Hub: https://localhost/" in result.out
    assert len(hub) == (4 if strategy == "every_save" else 1)
    arguments = [sys.executable, "-I", "-c", WITHOUT_THE_PACKAGE, *map(str, hub)]
    run = subprocess.run(arguments, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr

    last, averaged = hub[-1], Path(recipe["output_dir"], "averaged-2")
    assert (last / "model.safetensors").read_bytes() == (averaged / "model.safetensors").read_bytes()
    assert (last / "README.md").read_text() == (averaged / "README.md").read_text()
    assert f'"{REPOSITORY}"' in (last / "README.md").read_text()
    scores = json.loads((last / "scores.json").read_text())
    assert f"{scores[-1]['scores'][0]['value']:.2f}" in (last / "README.md").read_text()
    for name in ("run.lock", "recipe.json", "trainer_state.json", "training_args.bin", "tokenizer", "averaged-2"):
        assert not [path for path in last.rglob("*") if path.is_file() and name in path.relative_to(last).parts]


def test_the_averaged_models_card_names_its_own_folder(finished):
    run = Path(finished["output_dir"])
    card = (run / "averaged-2" / "README.md").read_text()
    assert '"run/averaged-2"' in card
    assert '"run"' not in card
    averaged, last = (load_file(folder / "model.safetensors") for folder in (run / "averaged-2", run))
    assert any((averaged[name] != last[name]).any() for name in averaged)
    scores = json.loads((run / "averaged-2" / "scores.json").read_text())
    assert all(f"{score['value']:.2f}" in card for entry in scores for score in entry["scores"])


def test_a_run_without_averaging_has_its_card_beside_its_weights(train, recipe):
    assert train({**recipe, "average_last": 0}).code == 0
    assert '"run"' in Path(recipe["output_dir"], "README.md").read_text()


def test_a_run_that_stopped_early_averages_what_it_has(train, recipe):
    options = ("--eval-strategy", "steps", "--eval-steps", "1", "--early-stopping-patience", "1")
    constant = ("--metric-for-best-model", "bleu", "--load-best-model-at-end", "false")
    result = train({**recipe, "max_steps": 60, "save_steps": 1, "average_last": 40}, *options, *constant)
    assert result.code == 0, result.err
    assert "complete checkpoints, not 40: all of them are averaged" in result.out
