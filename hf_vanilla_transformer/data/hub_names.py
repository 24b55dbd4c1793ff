"""Names on the Hub: whether there is such a repository, and its present revision."""

import functools
from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from ..errors import first_line

SMALL_FILES = ["*.json", "*.md", "*.txt", "*.spm", "*.model", "*.py"]  # all but weights
SECONDS = 5.0  # transformers itself asks six times, with pauses that add up to 45 seconds


class HubError(ValueError):
    """A name is not on the Hub, or the Hub can't be reached; the message says so."""


def revision_of(name: str, repo_type: str = "model") -> str | None:
    """Returns the commit of a repository's main branch; None: the Hub can't be reached, or `HF_HUB_OFFLINE`.

    A `HubError` says that the Hub can't have a repository of this name, or has none that this user may read.
    """
    try:
        return HfApi().repo_info(name, repo_type=repo_type, timeout=SECONDS).sha
    except HFValidationError as error:
        raise HubError(f"{name!r} is neither a folder here nor a name that the Hub could have; check it") from error
    except RepositoryNotFoundError as error:  # gated ones, too
        raise HubError(
            f"{name} is neither a folder here nor a {repo_type} on the Hub that you may read; check the spelling, and "
            "log in with `hf auth login` if it is private"
        ) from error
    except Exception:  # no network, a server's fault, offline mode: each library under it has its own errors
        return None


def cached_folder(name: str) -> Path | None:
    """Returns the folder of a model that was downloaded before; None: there is none."""
    found = None
    with suppress(HFValidationError):  # the name of a folder that is gone
        found = try_to_load_from_cache(name, "config.json")
    return Path(found).parent if isinstance(found, str) else None


@functools.cache  # a command asks before it imports anything slow, and when it loads
def check_model_on_hub(name: str) -> bool:
    """Checks, within seconds, that a model can be loaded from the Hub or from the cache of an earlier download.

    Returns whether the Hub can be reached; if not, only the cached files can be loaded. Raises a `HubError` otherwise.
    """
    if revision_of(name) is not None:
        return True
    if cached_folder(name) is None:
        raise HubError(
            f"{name} is not a folder here, and the Hub can't be reached to look for a model of that name; give a "
            "folder that save_pretrained wrote, or connect to the network"
        )
    return False


def without_weights(name: str) -> tuple[Path, dict[str, tuple[str, list[int]]]]:
    """Downloads a model's files except for weights, and the headers of these, or raises a `HubError`.

    Returns:
        The folder of its files, and tensor's name -> its dtype ("F32", "BF16" ...) and shape. Without a network, the
        folder of an earlier download, and no tensors.
    """
    online = check_model_on_hub(name)
    try:
        folder = Path(snapshot_download(name, allow_patterns=SMALL_FILES, local_files_only=not online))
        if not online:
            return folder, {}
        headers = HfApi().get_safetensors_metadata(name).files_metadata.values()
    except Exception as error:  # each library under it has its own
        raise HubError(f"can't read {name} on the Hub ({first_line(error)})") from error
    return folder, {key: (one.dtype, list(one.shape)) for file in headers for key, one in file.tensors.items()}
