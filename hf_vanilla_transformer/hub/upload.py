"""Publishing on the Hub: the files of a folder that are sent, checks before that, and errors that name the fix."""

import fnmatch
import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the client's HTTP library

from ..checkpoints.code import other_code
from ..checkpoints.completeness import RECIPE, TRAINER_STATE
from ..checkpoints.files import check_links
from ..checkpoints.headers import is_own_model, read_json, tensors_in
from ..checkpoints.kinds import ADAPTER_CONFIG, CARD, CONFIG, REPORT_FILES, SETTINGS_FILES, TOKENIZER_CONFIG
from ..checkpoints.loading import load_checkpoint
from ..data.hub_names import HubError
from ..errors import CheckpointError, first_line
from .facts import CardError, is_repository, load_card, read_facts
from .model_card import fill_model_card, literal

# Files that `from_pretrained` loads. Those of an older model would be mixed with the new ones, so they are removed.
MODEL_FILES = (
    *(*SETTINGS_FILES, "*.safetensors", "*.safetensors.index.json"),
    *("*_vanilla_transformer.py", "tokenization_*.py", "onnx/*.onnx"),
)
SENT = (*MODEL_FILES, CARD, "LICENSE*")
# Also removed: what an older version of this package, or a Trainer, may have left in a repository.
STALE = (*MODEL_FILES, *REPORT_FILES, ADAPTER_CONFIG, "pytorch_model*", RECIPE, TRAINER_STATE, "training_args.bin")
LICENSE, LICENSE_OF_CODE = Path(__file__).parents[1] / "LICENSE", "LICENSE-CODE"
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN, with a token that may write"


class PublishError(HubError):
    """Something can't be published; the message says why and names the fix."""


@dataclass(frozen=True)
class Upload:
    """The files of a push."""

    files: Mapping[str, Path | bytes]  # name in the repository -> the file, or what it says otherwise there
    left_out: Sequence[str]  # files of the folder that aren't sent
    notes: Sequence[str]  # what the user should know

    @property
    def sizes(self) -> dict[str, int]:
        """Name in the repository -> bytes."""
        return {name: one.stat().st_size if isinstance(one, Path) else len(one) for name, one in self.files.items()}


@dataclass(frozen=True)
class Published:
    """Where a model is on the Hub."""

    url: str  # of the commit
    removed: Sequence[str]  # files of an older model that the commit removed
    private: bool  # whether only the repository's owner sees it


def check_token() -> None:
    """Raises `PublishError` if there is no token to log in with."""
    if not get_token():
        raise PublishError(f"there is no token for the Hub; {LOG_IN}")


def prepare(folder: Path, repo: str) -> Upload:
    """Checks a model's folder, its code and its card, and returns the files to send. It makes no network requests.

    The code in the card that is sent loads the model by the repository's name, "user/name".

    Raises:
        PublishError: The name, the model, its code or its card can't be published.
        LinkError: A file is a link that leads out of the folder.
    """
    if not is_repository(repo):
        raise PublishError(f"{repo!r} is not a repository's name; give user/name")
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files: dict[str, Path | bytes] = {name: folder / name for name in names if _matches(name, SENT)}
    check_links(folder, [folder / name for name in files], in_cache=True)
    if ADAPTER_CONFIG in names:
        raise PublishError(
            f"{folder} has an adapter, not a model; publish it with PEFT's push_to_hub, or merge it into the model "
            "(merge_and_unload) and save that"
        )
    _check_model(folder, files)
    code = other_code(folder)
    if code.old:
        raise PublishError(str(code.note(folder)))
    card, notes = _checked_card(folder, repo)
    files[CARD] = card.encode()
    if any(name.endswith("_vanilla_transformer.py") for name in files):  # saved without this package, it has no licence
        files.setdefault(LICENSE_OF_CODE, LICENSE.read_bytes())
    left_out = [name for name in names if name not in files]
    return Upload(dict(sorted(files.items())), left_out, [*notes, *filter(None, [code.note(folder)])])


def publish(
    upload: Upload,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token: str | None = None,
    message: str = "Upload model",
) -> Published:
    """Sends the files that `prepare` returned in one commit, and creates the repository if there is none.

    The commit removes weights, graphs, tokenizer files and code of an older model that the new one doesn't have, and
    what only training needs; other files in folders stay as they are. Large files that arrived before an interruption
    aren't sent again. `revision` is a branch, created if there is none. With `private`, a public repository is refused.

    Raises:
        PublishError: There is no token, the user may not write there, or it is public already.
        ConnectionError: The Hub can't be reached, or fails.
    """
    api = create_repository(repo, private=private, token=token)
    with hub_errors(repo):
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        info = api.model_info(repo, revision=revision)
        there = [one.rfilename for one in info.siblings or ()]
        removed = [name for name in there if name not in upload.files and _matches(name, STALE)]
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationAdd(name, content) for name, content in upload.files.items()),
            *(CommitOperationDelete(name) for name in removed),
        ]
        done = api.create_commit(repo, operations, commit_message=message, revision=revision)
    return Published(str(done.commit_url), removed, bool(info.private))


def create_repository(repo: str, *, private: bool = False, token: str | None = None) -> HfApi:
    """Creates a repository if there is none, and returns the Hub's client; errors are those of `publish`."""
    if token is None:
        check_token()
    api = HfApi(token=token)
    with hub_errors(repo):
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise PublishError(
                f"{repo} exists and is public; make it private in its settings on the Hub, or give another name"
            )
    return api


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turns errors of the Hub's client into PublishError, which the user can fix, or ConnectionError, of one line."""
    fixes = {
        401: f"the Hub doesn't accept the token (401) for {repo}; {LOG_IN}",
        403: f"you may not write to {repo} (403); give a repository of your own, or {LOG_IN} there",
        404: f"the Hub has no {repo} that you may see (404); check the name, or {LOG_IN}",
    }
    try:
        yield
    except PublishError:
        raise
    except (HTTPError, RuntimeError, ConnectionError, TimeoutError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in fixes:
            raise PublishError(fixes[status]) from error
        raise ConnectionError(
            f"the Hub can't be reached, or fails ({first_line(error)}), and {repo} isn't complete; push again: what "
            "has arrived isn't sent twice"
        ) from error
    except ValueError as error:  # a name that the Hub can't have, or metadata of the card that it refuses
        raise PublishError(f"{' '.join(str(error).split()).rstrip('.')}; correct it") from error


def _check_model(folder: Path, sent: Container[str]) -> None:
    """Checks that a folder's model can be loaded from the files that are sent, with this package and without it."""
    try:
        tensors_in(folder)
        if is_own := is_own_model(folder):
            load_checkpoint(folder, local_files_only=True)
    except (CheckpointError, ValueError) as error:
        raise PublishError(f"{first_line(error)}; only a model that can be loaded is published") from error
    settings = [folder / name for name in (CONFIG, TOKENIZER_CONFIG) if (folder / name).is_file()]
    classes = json.dumps([read_json(one).get("auto_map") for one in settings])  # "modeling_x.Class"; others: elsewhere
    modules = {*re.findall(r'"(\w+)\.\w+"', classes), *(["modeling_vanilla_transformer"] if is_own else [])}
    if missing := sorted(file for file in (f"{one}.py" for one in modules) if file not in sent):
        file = missing[0]
        if (folder / file).is_file():
            raise PublishError(
                f"the model can't be loaded without {folder / file}, and of code, only this package's is sent; publish "
                "it with push_to_hub of its model and its tokenizer"
            )
        raise PublishError(
            f"{folder} has no {file}, without which the model can't be loaded where this package isn't installed; load "
            "model and tokenizer here, and save both again with save_pretrained"
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file isn't hidden and matches a pattern, folders included."""
    fitting = [one for one in patterns if one.count("/") == name.count("/")]
    return not name.startswith(".") and any(fnmatch.fnmatchcase(name, one) for one in fitting)


def _checked_card(folder: Path, repo: str) -> tuple[str, list[str]]:
    """Returns the card to send, whose code loads the model from the repository, and notes."""
    file = folder / CARD
    make = f"vanilla-transformer card {folder}"
    if not file.is_file():
        raise PublishError(f"{folder} has no {CARD}; write it with `{make}`")
    try:
        card = load_card(folder)
        facts, changed = read_facts(folder)
    except CardError as error:
        raise PublishError(str(error)) from error
    if changed:
        raise PublishError(
            f"the weights in {folder} have changed since {CARD} was written; write it again with `{make} --overwrite`"
        )
    notes = [] if card.data.get("license") else [f"{CARD} names no licence; `{make} --license ID --overwrite` adds one"]
    if facts.samples:
        notes.append(f"{CARD} shows {len(facts.samples)} sentences of the data that the model was scored on")
    there, how = file.read_text(encoding="utf-8"), f"the code loads {repo}; all else is as in {file}"
    sent = there.replace(literal(facts.name), literal(repo))
    if facts.name != repo and card.text == fill_model_card(facts).text:  # it isn't edited
        sent, how = str(fill_model_card(replace(facts, name=repo))), f"the model's name is {repo}"
    return sent, notes if sent == there else [*notes, f"in the {CARD} that is sent, {how}"]
