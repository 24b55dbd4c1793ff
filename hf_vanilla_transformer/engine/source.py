"""The paper's files as formulas: digests that comments, layout and docstrings don't change, and any edit of code does.

`MIRRORED` says which formulas the engine was written and tested for. Whoever changes a formula in the paper and in the
engine renews it: tests/engine/test_source.py prints the new digests.
"""

import ast
import hashlib
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from transformers.utils import cached_file, logging

logger = logging.get_logger(__name__)

FILES = ("configuration_vanilla_transformer", "generation_vanilla_transformer", "modeling_vanilla_transformer")
MIRRORED = {
    "configuration_vanilla_transformer": "e3dd6e0cdbaa8373",
    "generation_vanilla_transformer": "119486ffb31d9db0",
    "modeling_vanilla_transformer": "ad47ba197e6d75fc",
}


def digest(text: str) -> str:
    """Returns the digest of a file's syntax tree, the same for all versions of Python."""
    return hashlib.sha256(repr(_plain(ast.parse(text))).encode()).hexdigest()[:16]


def _plain(node: Any) -> Any:
    """Makes nested tuples of a tree, without docstrings, and without empty fields, which differ between versions."""
    if isinstance(node, list):
        return tuple(map(_plain, node))
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
        fields["body"] = node.body[1:]
    kept = tuple((name, _plain(value)) for name, value in fields.items() if value not in (None, []))
    return type(node).__name__, kept


def difference(modules: Iterable[types.ModuleType], functions: Iterable[Any]) -> str | None:
    """Says which of the paper's modules isn't what the engine mirrors, or None.

    Args:
        modules: The modules.
        functions: The live functions; those of the modules have to be what their files say.
    """
    codes: dict[tuple[str, str], list[types.CodeType]] = {}
    for module in modules:
        path, name = Path(str(module.__file__)), module.__name__.rpartition(".")[2]
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return f"the source of {name} can't be read"
        if digest(text) != MIRRORED[name]:
            return f"{name}.py was edited"
        for code in _codes(compile(text, str(module.__file__), "exec", dont_inherit=True)):
            codes.setdefault((str(module.__file__), code.co_qualname), []).append(code)
    files = {file for file, _ in codes}
    for function in functions:
        code = function.__code__
        if code.co_filename in files and code not in codes.get((code.co_filename, code.co_qualname), []):
            return f"{code.co_qualname} is not what its file says"
    return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


# Where a checkpoint's files are looked for, as in `from_pretrained`.
PLACES = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
_warned: set[str] = set()


def warn_of_other_code(name: Any, model: Any, **kwargs: Any) -> None:
    """Warns, once for each checkpoint, if its own code differs from the installed code, which is what runs.

    Args:
        name: A folder or a name on the Hub.
        model: What was loaded from it; its configuration says whether there is any code.
        **kwargs: Those of `from_pretrained`: `revision`, `token`, `cache_dir` ...
    """
    if name is None or not getattr(model.config, "auto_map", None) or str(name) in _warned:
        return
    options = {key: kwargs[key] for key in PLACES if kwargs.get(key) is not None}
    differing = [f"{file}.py" for file in FILES if _differs(str(name), f"{file}.py", options)]
    if differing:
        _warned.add(str(name))
        logger.warning(
            f"{name} has code of its own that differs from hf_vanilla_transformer's: {', '.join(differing)}. The "
            "package is imported, so its code runs. To run the checkpoint's own, load it with `trust_remote_code=True` "
            "in a process that doesn't import the package, or by `transformers.dynamic_module_utils."
            'get_class_from_dynamic_module("modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration", '
            f'"{name}").from_pretrained("{name}")`.'
        )


def _differs(name: str, file: str, options: dict[str, Any]) -> bool:
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        own = cached_file(name, file, **options, **quiet)
    except OSError:  # no such repository, as with weights that the caller has given
        return False
    if own is None:
        return False
    try:
        texts = [path.read_text(encoding="utf-8") for path in (Path(own), Path(__file__).parents[1] / file)]
        return texts[0] != texts[1] and digest(texts[0]) != digest(texts[1])
    except (OSError, SyntaxError, ValueError):
        return True
