"""Publishing on the Hub: which files of a folder are sent, what is checked before, and errors that name the fix."""

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    get_token,
    hf_hub_download,
)
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # the client's library has another name than before
    EntryNotFoundError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoints.loading import CONFIG, CheckpointError, json_object, load_checkpoint, tensors_in
from ..data.hub_names import HubError
from ..errors import first_line
from .facts import EVAL_RESULTS, CardError, load_card, read_facts
from .model_card import CARD, FACTS, RunFacts, fill_model_card

MODEL_TYPE = "vanilla_transformer"
# What a run's folder has and nobody needs who only loads the model.
RUN_FILES = (
    *("tokenizer/*", "translations/*", "run.lock", "recipe.json", "trainer_state.json", "checksums.json", "*.bin"),
    FACTS,
)
NOT_SENT = (
    *("checkpoint-*", "averaged-*", "runs/*", "wandb/*", "*.pt", "*.pth", "*.log", "*.partial", "*__pycache__/*"),
    *("*.env", "*.pem", "*.key", "*id_rsa", "*id_ed25519"),  # where people keep secrets
    *RUN_FILES,
)
# What `from_pretrained` would mix with a new model's files, or take in their place, if an older one had left it there.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")
MODEL_FILES = (
    *(*WEIGHTS, "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "*.spm", "vocab*.json"),
    *("target_vocab.json", "segmentation.json", "merges.txt", "*_vanilla_transformer.py", "tokenization_*.py"),
)
LICENSE, LICENSE_OF_CODE = Path(__file__).parents[1] / "LICENSE", "LICENSE-CODE"
SECRETS = {
    "a token of the Hub; remove it, and revoke it": re.compile(rb"\b(hf_|api_org_)[A-Za-z0-9]{30,}\b"),
    "a private key; remove it": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
}
LARGEST_TEXT = 50_000_000  # bytes of a file that is searched for secrets
LOADS = re.compile(r"from_pretrained\(\s*(\"(?:[^\"\\]|\\.)*\")")
EMPTY = re.compile(r"more\s+information\s+needed", re.IGNORECASE)  # what transformers' own cards mostly consist of
OF_NOBODY = "This model card has been automatically generated."  # what they say of themselves
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN, with a token that may write"


class PublishError(HubError):
    """Something can't be published; the message says why and names the fix."""


@dataclass(frozen=True)
class Upload:
    """What would be sent.

    Attributes:
        folder: Where the files are.
        files: Name in the repository -> its file, or its content where that differs from the folder's.
        left_out: Files of the folder that aren't sent.
        notes: What the user should know.
    """

    folder: Path
    files: Mapping[str, Path | bytes]
    left_out: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Name in the repository -> bytes."""
        contents = self.files.items()
        return {name: len(one) if isinstance(one, bytes) else one.stat().st_size for name, one in contents}


@dataclass(frozen=True)
class Published:
    """What has become of an upload.

    Attributes:
        url: The commit's address.
        removed: Files of an older model that the commit has removed.
        private: Whether the repository is private.
        changed: Whether there was anything new.
        replaced_card: Whether the repository had a card that said something else.
    """

    url: str
    removed: Sequence[str]
    private: bool
    changed: bool
    replaced_card: bool = False


def check_token() -> None:
    """Checks that there is a token to log in with.

    Raises:
        PublishError: There is none.
    """
    if not get_token():
        raise PublishError(f"there is no token for the Hub; {LOG_IN}")


def prepare(folder: Path, repo: str) -> Upload:
    """Checks a model's folder, its code and its card, and returns what is to be sent. It asks nobody and sends nothing.

    Args:
        folder: The model's folder: a finished run's, one of averaged weights, or what `save_pretrained` wrote.
        repo: The repository's name, "user/name". In what is sent, the card's code loads the model by this name.

    Raises:
        PublishError: The model can't be loaded, its own code is missing, a file contains a secret or is a link that
            leads out of the folder, or the card is missing, isn't the model's, or isn't complete.
    """
    check_model(folder)
    sent, left_out = model_files(folder)
    card, notes = _checked_card(folder, repo)
    files: dict[str, Path | bytes] = {name: folder / name for name in sent}
    files[CARD] = card.encode()
    if any(name.endswith("_vanilla_transformer.py") for name in sent):
        files.setdefault(LICENSE_OF_CODE, LICENSE)  # code that was saved without this package lacks it
    _check_contents(folder, files)
    return Upload(folder, files, left_out, notes)


def publish(upload: Upload, repo: str, *, private: bool = False, revision: str | None = None) -> Published:
    """Sends files in one commit: readers see all of it or nothing.

    Weights, tokenizer files and code of an older model in the repository that the new one doesn't have are removed
    by the same commit; folders stay as they are. Large files that arrived before an interruption aren't sent again.

    Args:
        upload: What `prepare` returned.
        repo: The repository's name, "user/name"; it is created if there is none.
        private: Whether only its owner may see it. An existing public repository is refused then.
        revision: A branch, which is created if there is none; None: main.

    Returns:
        Where it is.

    Raises:
        PublishError: There is no token, the user may not write there, or it is public already.
        ConnectionError: The Hub can't be reached, or fails; the message says what to do.
    """
    check_token()
    api = HfApi()
    with hub_errors(repo):
        if not _exists(api, repo, private):
            api.create_repo(repo, private=private, exist_ok=True)
        _create_branch(api, repo, revision)
        before = api.repo_info(repo, revision=revision)
        card = _text_of_card_there(repo, revision, None)
        removed = _stale(api, repo, revision, upload.files, (*MODEL_FILES, *RUN_FILES))
        done = _commit(api, repo, upload.files, removed, message="Upload model", revision=revision)
    replaced = card is not None and card.encode() != upload.files[CARD]
    return Published(str(done.commit_url), removed, bool(before.private), done.oid != before.sha, replaced)


def send_model(
    folder: Path,
    repo: str,
    *,
    message: str | None,
    names: Sequence[str] | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    run_as_future: bool = False,
) -> Any:
    """Sends a model's folder in one commit, as `publish` does, but a repository that exists, and without its checks.

    Args:
        folder: The model's folder.
        repo: The repository's name, "user/name".
        message: The commit's first line.
        names: Files of the folder to send; None: all but what only training needs, and hidden ones.
        token: For the Hub; None: the saved one.
        revision: A branch, which is created if there is none; None: main.
        run_as_future: Whether to return at once.

    Returns:
        The commit, or a future of it.

    Raises:
        PublishError: A file contains a secret or is a link that leads out of the folder, there is no token, or the user
            may not write there.
        ConnectionError: The Hub can't be reached, or fails.
    """
    files: dict[str, Path | bytes] = {name: folder / name for name in names or model_files(folder)[0]}
    _check_contents(folder, files)
    api = HfApi(token=token)
    with hub_errors(repo):
        _create_branch(api, repo, revision)
        removed = _stale(api, repo, revision, files, (*MODEL_FILES, *RUN_FILES))
        return _commit(
            api, repo, files, removed, message=message or "Upload model", revision=revision, run_as_future=run_as_future
        )


def push_to_hub(
    model: Any,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    max_shard_size: int | str | None = "50GB",
    tags: str | list[str] | None = None,
) -> CommitInfo:
    """Uploads a model or a tokenizer, as transformers' method of this name does, with a card that says what is known.

    transformers would write a card of empty headings. Here, a model without a card in its repository gets one with its
    architecture and how it is used; a card that is there stays. A tokenizer or configuration is uploaded without one.

    Args:
        model: The model, tokenizer or configuration.
        repo_id: The repository's name, "user/name"; it is created if there is none.
        commit_message: The commit's first line.
        commit_description: The rest of it.
        private: Whether a new repository is private; None: as the account's settings say.
        token: For the Hub; None: the one that was saved by `hf auth login`, or that of HF_TOKEN.
        revision: A branch, which is created if there is none; None: main.
        create_pr: Whether to propose the upload as a pull request.
        max_shard_size: The largest size of a file with weights.
        tags: Are added to the card's.

    Returns:
        The commit.

    Raises:
        PublishError: There is no token, or the user may not write there.
        ConnectionError: The Hub can't be reached, or fails.
    """
    if token is None:
        check_token()
    api, is_model = HfApi(token=token), isinstance(model, PreTrainedModel)
    new_tags = [tags] if isinstance(tags, str) else list(tags or ())
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        files: dict[str, Path | bytes] = {
            path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()
        }
        with hub_errors(repo_id):
            repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if is_model:
                card = _card_there(repo, revision, token) or _card_of(model, repo)
                _add_tags(card, (*(model.model_tags or ()), *new_tags))
                files[CARD] = str(card).encode()
            if not create_pr:
                _create_branch(api, repo, revision)
            return _commit(
                api,
                repo,
                files,
                _stale(api, repo, None if create_pr else revision, files, WEIGHTS) if is_model else (),
                message=commit_message or (f"Upload {_kind(model)}"),
                description=commit_description,
                revision=revision,
                create_pr=create_pr,
            )


def _kind(thing: Any) -> str:
    if isinstance(thing, PreTrainedModel):
        return "model"
    return "config" if isinstance(thing, PreTrainedConfig) else "tokenizer"


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turns errors of the Hub's client into ones of a single line that name the fix.

    Args:
        repo: The repository's name, for the messages.

    Raises:
        PublishError: The user can fix it: the name, the rights, the card.
        ConnectionError: The Hub can't be reached, or fails.
    """
    try:
        yield
    except PublishError:
        raise
    except OfflineModeIsEnabled as error:
        raise PublishError("HF_HUB_OFFLINE forbids to ask the Hub; unset it to publish") from error
    except HFValidationError as error:
        raise PublishError(f"{repo!r} can't be a repository's name; give user/name") from error
    except (HTTPError, RuntimeError, ConnectionError, TimeoutError) as error:
        status = _status(error)
        if status == 401:
            raise PublishError(f"the Hub doesn't accept the token (401) for {repo}; {LOG_IN}") from error
        if status == 403:
            raise PublishError(
                f"you may not write to {repo} (403); give a repository of your own, or {LOG_IN} there"
            ) from error
        if status == 404:
            raise PublishError(f"the Hub has no {repo} that you may see (404); check the name, or {LOG_IN}") from error
        problem = f"answers with {status}" if status else f"can't be reached ({first_line(_innermost(error))})"
        raise ConnectionError(
            f"the Hub {problem}, so {repo} isn't complete there; push again, what has arrived isn't sent twice"
        ) from error
    except ValueError as error:
        if not str(error).startswith("Invalid metadata"):
            raise
        problems = " ".join(str(error).split()[4:])
        raise PublishError(f"the Hub refuses the metadata of {CARD}: {problems}; correct it") from error


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _status(error: BaseException | None) -> int | None:
    """The HTTP status of an error, or of what has caused it."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return int(response.status_code)
        error = error.__cause__
    return None


def _exists(api: HfApi, repo: str, private: bool) -> bool:
    """Whether there is such a repository; it must not be public if it is to be private."""
    try:
        there = api.repo_info(repo)
    except RepositoryNotFoundError:
        return False
    if private and not there.private:
        raise PublishError(
            f"{repo} exists and is public; make it private in its settings on the Hub, or give another name"
        )
    return True


def _create_branch(api: HfApi, repo: str, revision: str | None) -> None:
    if revision is not None and not revision.startswith("refs/"):
        api.create_branch(repo, branch=revision, exist_ok=True)


def _stale(
    api: HfApi, repo: str, revision: str | None, files: Mapping[str, Path | bytes], patterns: Sequence[str]
) -> list[str]:
    """Files of the repository, outside of folders, that match patterns and that new files don't replace."""
    there = api.list_repo_files(repo, revision=revision)
    return [name for name in there if name not in files and "/" not in name and _matches(name, patterns)]


def _commit(
    api: HfApi,
    repo: str,
    files: Mapping[str, Path | bytes],
    removed: Sequence[str],
    *,
    message: str,
    description: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    run_as_future: bool = False,
) -> Any:
    """Sends files and removes others in one commit."""
    operations: list[CommitOperationAdd | CommitOperationCopy | CommitOperationDelete] = [
        *(CommitOperationDelete(name) for name in removed)
    ]
    operations += [CommitOperationAdd(name, content) for name, content in files.items()]
    what: dict[str, Any] = {"commit_message": message, "commit_description": description, "revision": revision}
    what |= {"create_pr": create_pr, "run_as_future": run_as_future}
    return api.create_commit(repo, operations, **what)


def _card_there(repo: str, revision: str | None, token: bool | str | None) -> ModelCard | None:
    """The repository's card, if it has one that isn't transformers' own of empty headings."""
    text = _text_of_card_there(repo, revision, token)
    return None if text is None or (OF_NOBODY in text and EMPTY.search(text)) else load_card(text, f"{repo}'s {CARD}")


def _text_of_card_there(repo: str, revision: str | None, token: bool | str | None) -> str | None:
    try:
        return Path(hf_hub_download(repo, CARD, revision=revision, token=token)).read_bytes().decode(errors="replace")
    except (EntryNotFoundError, RevisionNotFoundError):
        return None


def _card_of(model: PreTrainedModel, repo: str) -> ModelCard:
    """A card of what a model says of itself."""
    facts = RunFacts(name=repo, config=model.config.to_dict(), parameters=model.num_parameters())
    return fill_model_card(facts)


def _add_tags(card: ModelCard, tags: Sequence[str]) -> None:
    old = card.data.get("tags") or []
    if added := [tag for tag in dict.fromkeys(tags) if tag not in old]:
        card.data["tags"] = [*old, *added]


def check_model(folder: Path) -> None:
    """Checks that a folder's model can be loaded, with this package and without it.

    Raises:
        PublishError: It can't.
    """
    if not folder.is_dir():
        raise PublishError(f"{folder} is not a folder; give that of a model which save_pretrained wrote")
    try:
        config = json_object(folder / CONFIG)
        tensors_in(folder)
        if config.get("model_type") == MODEL_TYPE:
            load_checkpoint(folder, local_only=True)
    except (CheckpointError, ValueError) as error:
        raise PublishError(f"{first_line(error)}; only a model that can be loaded is published") from error
    settings = [config]
    if (folder / "tokenizer_config.json").is_file():
        settings.append(json_object(folder / "tokenizer_config.json"))
    modules = {name for values in settings for name in _modules(values.get("auto_map"))}
    if config.get("model_type") == MODEL_TYPE and not config.get("auto_map"):
        modules.add("modeling_vanilla_transformer.py")
    if missing := sorted(name for name in modules if not (folder / name).is_file()):
        raise PublishError(
            f"{folder} has no {missing[0]}, without which the model can't be loaded where this package isn't "
            "installed; load model and tokenizer here, and save both again with save_pretrained"
        )


def _modules(auto_map: Any) -> Iterator[str]:
    """The files with the classes that an `auto_map` names."""
    for value in (auto_map or {}).values():
        for name in value if isinstance(value, list) else [value]:
            if name and "--" not in name:  # otherwise it is in another repository
                yield f"{name.partition('.')[0]}.py"


def model_files(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the names of a model's files that are published, and of those that aren't."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    shown = [name for name in names if name.startswith(f"{EVAL_RESULTS}/") or not re.search(r"(^|/)\.", name)]
    sent = [name for name in shown if not _matches(name, NOT_SENT)]
    return sent, sorted(set(names) - set(sent))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _check_contents(folder: Path, files: Mapping[str, Path | bytes]) -> None:
    """Checks that no file contains a secret, or is a link that could lead to one.

    Raises:
        PublishError: One does, or is.
    """
    for name, content in files.items():
        if isinstance(content, Path) and content.is_symlink():
            _check_link(folder, content)
        for what, pattern in SECRETS.items():
            if pattern.search(_searched(content)):
                raise PublishError(f"{folder / name} contains what looks like {what}")


def _check_link(folder: Path, file: Path) -> None:
    target, real = file.resolve(), folder.resolve()
    cached = real.parents[1] / "blobs" if len(real.parents) > 1 else real  # a snapshot in the cache has only links
    if not (target.is_relative_to(real) or target.is_relative_to(cached)):
        raise PublishError(f"{file} is a link to {target}, out of the folder; put a copy in its place, or remove it")


def _searched(content: Path | bytes) -> bytes:
    if isinstance(content, bytes):
        return content
    is_data = content.suffix == ".safetensors" or content.stat().st_size > LARGEST_TEXT
    return b"" if is_data else content.read_bytes()


def _checked_card(folder: Path, repo: str) -> tuple[str, list[str]]:
    """The card's text, whose code loads the model from the repository, and notes."""
    file = folder / CARD
    make = f"vanilla-transformer card {folder}"
    if not file.is_file():
        raise PublishError(f"{folder} has no {CARD}; write it with `{make}`")
    try:
        card = load_card(file)
        facts, changed = read_facts(folder)
    except CardError as error:
        raise PublishError(str(error)) from error
    text = file.read_text(encoding="utf-8-sig")
    if empty := EMPTY.search(text):
        raise PublishError(f'{file} says "{empty[0]}"; fill that in, or write it with `{make} --overwrite`')
    if changed:
        raise PublishError(
            f"the weights in {folder} have changed since {CARD} was written; write it again with `{make} --overwrite`"
        )
    notes = [] if card.data.get("license") else [f"{CARD} names no licence; `{make} --license ID --overwrite` adds one"]
    loaded = {_plain(literal) for literal in LOADS.findall(text)}
    if loaded and repo not in loaded:
        own = [name for name in loaded if name == facts.name or Path(name).name == folder.resolve().name]
        if not own:
            raise PublishError(
                f"the code in {file} loads {min(loaded)}, not {repo}; correct it, or write the card again with `{make} "
                f"--name {repo} --overwrite`"
            )
        text = _renamed(text, own[0], repo)
        notes.append(f"in the {CARD} that is sent, the model's name is {repo}, not {own[0]}")
    return text, notes


def _plain(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:  # an escape that only Python knows
        return literal[1:-1]


def _renamed(text: str, old: str, new: str) -> str:
    """A card's text with the model's name replaced: in code that loads it, as title, and in `model-index`."""
    old_literal, new_literal = (json.dumps(name, ensure_ascii=False) for name in (old, new))
    text = LOADS.sub(lambda call: call[0].replace(call[1], new_literal) if call[1] == old_literal else call[0], text)
    old_end, new_end = (name.rpartition("/")[2] for name in (old, new))
    text = re.sub(rf"^(model-index:\n- name: ){re.escape(old_end)}$", lambda line: line[1] + new_end, text, flags=re.M)
    return re.sub(rf"^# {re.escape(old)}$", lambda _: f"# {new}", text, flags=re.M)
