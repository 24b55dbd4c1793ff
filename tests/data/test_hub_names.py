"""Names on the Hub, asked of a server on localhost that answers as the Hub does, or not at all."""

import socket

import huggingface_hub.constants
import pytest
from hub_server import LocalHub, running

from hf_vanilla_transformer.data import hub_names
from hf_vanilla_transformer.data.hub_names import HubError, check_model_on_hub, revision_of


@pytest.fixture
def endpoint(monkeypatch):
    """Lets the client ask another address, although the tests are offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    check_model_on_hub.cache_clear()
    return lambda address: monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)


@pytest.fixture
def server(endpoint):
    with running(LocalHub()) as hub:
        hub.add("some/thing")
        endpoint(hub.endpoint)
        yield hub


@pytest.mark.parametrize("repo_type", ["model", "dataset"])
def test_a_repository_has_a_revision_if_it_is_there(server, repo_type):
    assert revision_of("some/thing", repo_type) == server.repositories["some/thing"].branches["main"]
    with pytest.raises(HubError, match=f"some/nothing is neither a folder here nor a {repo_type} on the Hub"):
        revision_of("some/nothing", repo_type)
    assert check_model_on_hub("some/thing")


@pytest.mark.parametrize("name", ["-1", "[]", " ", "a/b/c", "a b", "", "x" * 200, ".."])
def test_what_is_no_name(name):
    with pytest.raises(HubError, match="neither a folder here nor a name that the Hub could have"):
        revision_of(name)


def test_a_server_that_never_answers(endpoint, monkeypatch):
    monkeypatch.setattr(hub_names, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert revision_of("some/thing") is None


def test_a_cached_model_needs_no_network(endpoint, monkeypatch, tmp_path):
    endpoint("http://127.0.0.1:1")
    monkeypatch.setattr(hub_names, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert check_model_on_hub("some/thing") is False
