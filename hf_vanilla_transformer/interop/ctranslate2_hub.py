"""Repositories on the Hub in CTranslate2's format, downloaded by patterns."""

from functools import partial
from pathlib import Path

from huggingface_hub import snapshot_download

from ..checkpoints.headers import read_json
from ..checkpoints.kinds import CONFIG, CT2_WEIGHTS, Kind, kind_of
from .ctranslate2_files import TOKENIZERS

FILES = ("*.json", "*.txt", CT2_WEIGHTS, *{name for names in TOKENIZERS for name in names})


def from_hub(
    name: str, revision: str | None = None, token: str | bool | None = None, local_files_only: bool = False
) -> Path | None:
    """Downloads a repository in CTranslate2's format; None for one of another format."""
    download = partial(snapshot_download, name, revision=revision, token=token, local_files_only=local_files_only)
    try:
        folder = Path(download(allow_patterns=CONFIG))
        if (folder / CONFIG).is_file() and "model_type" in read_json(folder / CONFIG):
            return None
        folder = Path(download(allow_patterns=FILES))
    except Exception:  # each library under it has its own; loading the model says what is wrong
        return None
    return folder if kind_of(folder) is Kind.CTRANSLATE2 else None
