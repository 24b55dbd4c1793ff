"""Writes the page as a Space: a folder with `app.py`, what it needs of this package, and the model or its name."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from pprint import pformat
from typing import Any

import yaml

from ..checkpoints.files import new_folder
from ..hub.facts import CardError, load_card
from ..hub.model_card import CARD
from ..hub.upload import LICENSE, PublishError, check_model, model_files
from ..translation.converted import converted

# What travels: these files import each other, PyTorch, transformers and Gradio only.
TRAVELLING = ("__init__.py", "models.py", "page.py", "server.py", "tables.py")
PYTHON = "3.11"  # transformers asks for no less, and a Space's default is older
APP = '''"""The page of this Space. `vanilla-transformer demo --space` of hf_vanilla_transformer wrote it."""

from pathlib import Path

from demo.models import load
from demo.page import build_page
from demo.server import serve

HERE = Path(__file__).parent
# What a model is called on the page, and where it is: a folder beside this file, or a name on the Hub.
MODELS = {models}
EXAMPLES = {examples}


def place(source: str) -> str:
    """A folder beside this file by its path, a name on the Hub as it is."""
    return str(HERE / source) if (HERE / source).is_dir() else source


if __name__ == "__main__":
    # The models' own code runs, as the package that it is part of isn't installed here.
    models = [load(name, place(source), trust_remote_code=True) for name, source in MODELS]
    serve(build_page(models, EXAMPLES))
'''
TEXT = """# {title}

A page to translate with {names}: translations with their scores, and the attention weights of every layer and head.

`python app.py` shows it on your own machine, with the packages of `requirements.txt` and Gradio {gradio}.
"""


@dataclass(frozen=True)
class Source:
    """Where a Space's model comes from.

    Attributes:
        name: What the page calls it.
        repo: Its name on the Hub; None: the Space has a copy of `folder`.
        folder: Its folder here; None: it is only known by its name on the Hub.
    """

    name: str
    repo: str | None
    folder: Path | None


def source_of(name: str, repo: str | None = None) -> Source:
    """Returns where a Space loads a model from.

    Args:
        name: The model's folder, or its name on the Hub.
        repo: The name on the Hub that the Space is to load; None: `name`, or a copy if that is a folder or a model
            that is converted on first use.
    """
    folder = Path(name) if Path(name).is_dir() else None
    if repo is None and (made := converted(name)) is not None:
        return Source(name if folder is None else folder.resolve().name, None, made)
    if repo is None and folder is None:
        repo = name
    return Source(repo or Path(name).resolve().name, repo, folder)


def write_space(folder: Path, sources: Sequence[Source], examples: Sequence[str] = ()) -> list[str]:
    """Writes a Space, all of it or nothing.

    Args:
        folder: The Space's folder, which must be empty or not exist.
        sources: Its models.
        examples: Texts that can be chosen on the page.

    Returns:
        The names of its files.

    Raises:
        PublishError: A model that is to be copied can't be loaded without this package, or its card can't be read.
        FileExistsError: There is something in the folder.
        OSError: It can't be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give another folder")
    copies = {source: f"model-{number}" for number, source in enumerate(sources, start=1) if source.repo is None}
    for source in copies:
        assert source.folder is not None, "what has no name on the Hub is a folder"
        check_model(source.folder)
    card = _card(sources)
    with new_folder(folder) as made:
        for source, place in copies.items():
            _copy_model(source, made / place)
        _copy_page(made / "demo")
        named = [(source.name, source.repo or copies[source]) for source in sources]
        (made / "app.py").write_text(_app(named, examples), encoding="utf-8")
        (made / "requirements.txt").write_text(_requirements(sources), encoding="utf-8")
        (made / CARD).write_text(card, encoding="utf-8")
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _copy_model(source: Source, place: Path) -> None:
    assert source.folder is not None
    for name in model_files(source.folder)[0]:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.folder / name, place / name)


def _copy_page(place: Path) -> None:
    place.mkdir()
    for name in TRAVELLING:
        shutil.copyfile(Path(__file__).parent / name, place / name)
    shutil.copyfile(LICENSE, place / "LICENSE")


def _app(named: Sequence[tuple[str, str]], examples: Sequence[str]) -> str:
    return APP.format(models=pformat(list(named), width=100), examples=pformat(list(examples), width=100))


def _requirements(sources: Sequence[Source]) -> str:
    names = ["torch", "transformers", "sentencepiece"]
    has_dictionary = any(one.folder is not None and (one.folder / "segmentation.json").is_file() for one in sources)
    # Without "+cpu" and the like, which only PyTorch's own index has.
    pinned = "".join(f"{name}=={version(name).partition('+')[0]}\n" for name in names)
    return pinned + "subword-nmt\n" * has_dictionary


def _card(sources: Sequence[Source]) -> str:
    names = " and ".join(source.name for source in sources)
    title, gradio = f"Translation by {names}", version("gradio")
    data: dict[str, Any] = {"title": title, "sdk": "gradio", "sdk_version": gradio, "python_version": PYTHON}
    data["app_file"] = "app.py"
    if repos := [source.repo for source in sources if source.repo]:
        data["models"] = repos
    licences = {_licence(source) for source in sources}
    if len(licences) == 1 and (licence := licences.pop()):
        data["license"] = licence
    metadata = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    return f"---\n{metadata}---\n\n{TEXT.format(title=title, names=names, gradio=gradio)}"


def _licence(source: Source) -> str | None:
    """The licence that the model's card names, where there is a card here."""
    if source.folder is None or not (source.folder / CARD).is_file():
        return None
    try:
        licence = load_card(source.folder / CARD).data.get("license")
    except CardError as error:
        raise PublishError(str(error)) from error
    return licence if isinstance(licence, str) else None
