"""The code that is saved beside a model's weights: whether it is this version's, and what makes it so."""

import ast
import hashlib
from pathlib import Path
from typing import NamedTuple

from ..errors import CheckpointError, named
from .files import check_links, write_text

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PACKAGE = Path(__file__).parents[1]
OF_TOKENIZERS = sorted(file.name for file in PACKAGE.glob("tokenization_*.py"))
OF_MODELS = sorted({file.name for file in PACKAGE.glob("*_vanilla_transformer.py")}.difference(OF_TOKENIZERS))
OLD = "0.3.0"
OLD_DIGESTS = {  # the first digits of the SHA-256 of its files
    *("51cd7726f0f04cb6", "6a9d5e07b618c469", "9c94d7aeee434f9b", "d733dbcdc337bbd6"),
    *("778caee89073ead0", "0fef24b537972068", "859320b09066b8ed", "487016413f5e3c46"),
}


class OtherCode(NamedTuple):
    """Files of code beside a model's weights that differ from this version's."""

    old: list[str]  # those of version 0.3.0
    edited: list[str]  # the others: they were edited, or are another version's

    def note(self, name: str | Path) -> str | None:
        """Says what there is and what renews it, of a folder or of a name on the Hub; None: there is nothing."""
        if self.old:
            place, then = (name, "") if Path(name).is_dir() else ("DIR", " for a download of it, and push that")
            return (
                f"{name} carries code of version {OLD}, which translates wrongly under transformers 5.24; renew it "
                f"with `vanilla-transformer info {place} --renew-code`{then}"
            )
        if self.edited:
            return f"{name} carries code that was edited, or is another version's: {named(self.edited)}"
        return None


def other_code(folder: Path) -> OtherCode:
    """Compares the code in a model's folder with this version's; comments and layout make no difference."""
    own = ((folder / name, name) for name in (*OF_MODELS, *OF_TOKENIZERS))
    names = [name for file, name in own if file.is_file() and differs(file, name)]
    old = [name for name in names if _digest(folder / name) in OLD_DIGESTS]
    return OtherCode(old, [name for name in names if name not in old])


def renew_code(folder: Path) -> list[str]:
    """Replaces version 0.3.0's code in a model's folder by this version's; returns the names of the files."""
    old, edited = other_code(folder)
    if edited:
        raise CheckpointError(
            f"{folder / edited[0]} was edited, or is another version's, so nothing is replaced; to lose it, load model "
            "and tokenizer here, and save both to the folder with save_pretrained"
        )
    names = {*old, *(OF_MODELS if set(old).intersection(OF_MODELS) else ())}  # they import each other
    check_links(folder, [folder / name for name in names])
    for name in names:
        write_text(folder / name, (PACKAGE / name).read_text(encoding="utf-8"))
    return sorted(names)


def differs(own: Path, name: str) -> bool:
    """Tells whether a file has other code than the package's file of this name."""
    try:
        texts = [path.read_text(encoding="utf-8") for path in (own, PACKAGE / name)]
        return texts[0] != texts[1] and _code(texts[0]) != _code(texts[1])
    except (SyntaxError, ValueError):  # UnicodeDecodeError among them
        return True


def _code(text: str) -> str:
    """Returns what runs of a file: without comments, layout and docstrings."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).hexdigest()[:16]
