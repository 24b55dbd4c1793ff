"""Fixtures of the tests of pushing."""

import shutil

import pytest
from hub_client import OTHERS_TOKEN, REPO, TOKEN, connect
from hub_server import LocalHub, running
from huggingface_hub.utils import close_session

from hf_vanilla_transformer import cli


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with running(LocalHub(me=TOKEN, other=OTHERS_TOKEN)) as local:
        connect(monkeypatch, local.endpoint, tmp_path / "hub-cache")
        yield local
    close_session()


@pytest.fixture(scope="session")
def carded(tiny_checkpoint, tmp_path_factory):
    """A model with its card."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path_factory.mktemp("carded") / "my-model")
    assert cli.main(["card", str(folder), "--source-lang", "en", "--target-lang", "de", "--license", "mit"]) == 0
    return folder


@pytest.fixture
def model_folder(carded, tmp_path):
    """That model, to be changed."""
    return shutil.copytree(carded, tmp_path / "folder" / "my-model")


@pytest.fixture
def push(vanilla_transformer, hub, model_folder):
    """Runs the command on that model."""

    def pushed(*options, repo=REPO, folder=model_folder):
        run = vanilla_transformer("push", folder, repo, *options)
        assert TOKEN not in run.out + run.err
        assert run.code == 0 or run.err.count("\n") == 1
        return run

    return pushed
