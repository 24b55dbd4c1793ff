"""Who imports whom, read from the source: the arrows of CONTRIBUTING.md's house, with no circle among them."""

import ast
import fnmatch
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "hf_vanilla_transformer"
ROOT = Path(__file__).parents[1]

CONFIG, MODEL = "configuration_vanilla_transformer", "modeling_vanilla_transformer"
GENERATION, SEARCH, INCREMENTAL, COMPILED, OPS, TOKENIZATION = (
    f"{name}_vanilla_transformer" for name in ("generation", "search", "incremental", "compiled", "ops", "tokenization")
)
# Copied to the Hub with every checkpoint, where neither this package nor a library beyond these can be counted on.
TRAVELLING = {CONFIG, MODEL, GENERATION, SEARCH, INCREMENTAL, COMPILED, OPS, TOKENIZATION}
TRAVELLING_LIBRARIES = {"torch", "transformers", "tokenizers"}

# Module (a pattern) -> the modules of ours that it may import (patterns). A new module needs a line here.
MAY_IMPORT = {
    CONFIG: [],
    TOKENIZATION: [],
    OPS: [],
    INCREMENTAL: [OPS],
    SEARCH: [],
    COMPILED: [INCREMENTAL],
    GENERATION: [INCREMENTAL, COMPILED, SEARCH],
    MODEL: [CONFIG, OPS, GENERATION],
    "corpus": [],
    "memory": [],
    "metrics": [],
    "plotting": [],
    "checkpoints": [],
    "averaging": ["checkpoints"],
    "translation": [INCREMENTAL, SEARCH],
    "formats": [],
    "bpe_dropout": [TOKENIZATION],
    "data": [TOKENIZATION, "bpe_dropout", "formats"],
    "batching": [],
    "model_card": ["metrics"],
    "recipe": [CONFIG, "data"],
    "sharding": ["recipe"],
    "training": ["batching", "data", "memory", "metrics", "model_card", "recipe", "sharding"],
    "interop": ["interop.*"],
    "interop.*": [CONFIG, MODEL],
    "demo": ["plotting"],
    "cli": ["*"],
    "cli.*": ["*"],
    "__main__": ["cli"],
    "__init__": sorted(TRAVELLING),
    "scripts.*": ["*"],
}
# Commands import what they need inside of the function, so that `--help` is instant.
MAY_IMPORT_LATE = ["cli", "cli.*", "scripts.*"]


@dataclass(frozen=True)
class Import:
    """One imported module: `target` is a module of ours without the package's name, or a library's top name."""

    target: str
    ours: bool
    level: int  # dots of a relative import
    names: tuple[str, ...]  # what is imported from it; empty for `import module`
    top_level: bool  # a statement of the module itself, not inside of `if`, `try`, a class or a function
    in_function: bool
    line: int


def modules_of(root: Path) -> dict[str, Path]:
    """Files by module: "cli", "interop.fairseq", "scripts.quickstart"; a package's __init__ has the package's name."""
    files = {}
    for folder in (root / PACKAGE, root / "scripts"):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder if folder.name == PACKAGE else root).with_suffix("").parts
            inner_package = parts[-1] == "__init__" and len(parts) > 1
            files[".".join(parts[:-1] if inner_package else parts)] = path
    return files


def imports_of(module: str, path: Path, modules: set[str]) -> Iterator[Import]:
    """All imports of a file, `import_module("...")` of ours among them."""

    def visit(node: ast.AST, top_level: bool, in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            yield from _imported_by(child, package, modules, top_level, in_function)
            inside = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, False, inside)

    # The package that one dot stands for: a file's folder.
    package = [PACKAGE, *module.split(".")] if path.name == "__init__.py" else [PACKAGE, *module.split(".")[:-1]]
    if module == "__init__":
        package = [PACKAGE]
    yield from visit(ast.parse(path.read_text(encoding="utf-8")), True, False)


def _imported_by(
    node: ast.AST, package: list[str], modules: set[str], top_level: bool, in_function: bool
) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            target, ours = _ours(alias.name)
            yield Import(target, ours, 0, (), top_level, in_function, node.lineno)
    elif isinstance(node, ast.ImportFrom):
        base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
        full = ".".join(part for part in (base, node.module) if part)
        target, ours = _ours(full)
        for alias in node.names:
            # `from . import metrics` imports a module, `from . import register` a name of the package's __init__.
            inner = alias.name if target == "__init__" else f"{target}.{alias.name}"
            found = inner if ours and inner in modules else target
            yield Import(found, ours, node.level, (alias.name,), top_level, in_function, node.lineno)
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name, argument = ast.unparse(node.func).split(".")[-1], node.args[0].value
        if name in ("import_module", "__import__") and isinstance(argument, str):
            target, ours = _ours(f"{PACKAGE}{argument}" if argument.startswith(".") else argument)
            yield Import(target, ours, 0, (), False, in_function, node.lineno)


def _ours(full_name: str) -> tuple[str, bool]:
    first, _, rest = full_name.partition(".")
    return (rest or "__init__", True) if first == PACKAGE else (first, False)


def violations(root: Path) -> list[str]:
    """What breaks the house's rules, a line each."""
    modules = modules_of(root)
    found, arrows = [], {}
    for module, path in modules.items():
        imports = list(imports_of(module, path, set(modules)))
        arrows[module] = {item.target for item in imports if item.ours}
        rules = next((MAY_IMPORT[pattern] for pattern in MAY_IMPORT if fnmatch.fnmatchcase(module, pattern)), None)
        if rules is None:
            found.append(f"{module}: not in the table MAY_IMPORT; add what it may import")
            continue
        for item in imports:
            found += [f"{module}:{item.line}: {problem}" for problem in _problems(module, item, rules)]
    return found + _circles(arrows)


def _matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _problems(module: str, item: Import, rules: list[str]) -> Iterator[str]:
    if "*" in item.names:
        yield f"star import of {item.target}"
    if item.ours and not _matches(item.target, rules):
        yield f"may not import {item.target}"
    if item.ours and item.in_function and not _matches(module, MAY_IMPORT_LATE):
        yield f"imports {item.target} inside of a function"
    if item.target == "argparse" and not _matches(module, MAY_IMPORT_LATE):
        yield "argparse is for the command line"
    if module in TRAVELLING:
        yield from _problems_on_the_way(module, item)


def _problems_on_the_way(module: str, item: Import) -> Iterator[str]:
    """What remote code on the Hub can't do: transformers copies flat siblings that it finds by `from .x import y`."""
    libraries = (
        TRAVELLING_LIBRARIES | set(sys.stdlib_module_names) | ({"huggingface_hub"} if module == CONFIG else set())
    )
    if item.ours:
        if item.target not in TRAVELLING:
            yield f"travels without {item.target}"
        elif item.level != 1 or item.names == (item.target,) or not item.top_level:
            yield f"write it at the top of the file as `from .{item.target} import name`"
    elif item.target not in libraries:
        yield f"travels, so it may not need {item.target}"


def _circles(arrows: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return [f"circle: {' -> '.join(error.args[1])}"]
    return []


def test_the_house_keeps_its_arrows():
    assert violations(ROOT) == []


def test_travelling_files_are_flat_and_few():
    names = {path.stem for path in (ROOT / PACKAGE).glob("*_vanilla_transformer.py")}
    assert names <= TRAVELLING


def _house(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return root


SOUND_HOUSE = {
    f"{PACKAGE}/__init__.py": f"from .{CONFIG} import Config\nfrom .{MODEL} import Model\n",
    f"{PACKAGE}/__main__.py": "import sys\nfrom .cli import main\n",
    f"{PACKAGE}/{CONFIG}.py": "import transformers\nfrom huggingface_hub.dataclasses import strict\n",
    f"{PACKAGE}/{MODEL}.py": f"import math\nimport torch.nn.functional as F\nfrom .{CONFIG} import Config\n",
    f"{PACKAGE}/metrics.py": "import sacrebleu\n",
    f"{PACKAGE}/model_card.py": "from . import metrics\nfrom .metrics import Score\n",
    f"{PACKAGE}/interop/__init__.py": "from . import fairseq\nfrom .fairseq import convert\n",
    f"{PACKAGE}/interop/fairseq.py": f"from ..{MODEL} import Model\nfrom ..{CONFIG} import Config\n",
    f"{PACKAGE}/cli.py": "import argparse\ndef run():\n    from . import register\n    from .metrics import Score\n",
    "scripts/quickstart.py": f"import argparse\nfrom {PACKAGE} import Model\nfrom {PACKAGE}.metrics import Score\n",
}


def test_the_checker_passes_a_sound_house(tmp_path):
    assert violations(_house(tmp_path, SOUND_HOUSE)) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("metrics.py", f"from .{MODEL} import Model", f"metrics:1: may not import {MODEL}"),
        ("metrics.py", f"from {PACKAGE}.model_card import Card", "metrics:1: may not import model_card"),
        ("metrics.py", f"import {PACKAGE}.cli", "metrics:1: may not import cli"),
        ("metrics.py", f"import {PACKAGE}", "metrics:1: may not import __init__"),
        ("metrics.py", "from . import Model", "metrics:1: may not import __init__"),
        ("metrics.py", "from . import plotting\nfrom . import model_card", "metrics:2: may not import model_card"),
        ("metrics.py", "if True:\n    from .model_card import Card", "metrics:2: may not import model_card"),
        ("metrics.py", "import importlib\nimportlib.import_module('.cli')", "metrics:2: may not import cli"),
        ("metrics.py", "import argparse", "metrics:1: argparse is for the command line"),
        ("metrics.py", "from sacrebleu import *", "metrics:1: star import of sacrebleu"),
        ("model_card.py", "def f():\n    from .metrics import Score", "model_card:2: imports metrics inside"),
        ("model_card.py", "class A:\n    async def f(self):\n        from . import metrics", "imports metrics inside"),
        ("interop/fairseq.py", "from .. import metrics", "interop.fairseq:1: may not import metrics"),
        ("interop/marian.py", "from .fairseq import convert", "interop.marian:1: may not import interop.fairseq"),
        ("news.py", "import math", "news: not in the table MAY_IMPORT"),
        (f"{MODEL}.py", "import numpy", f"{MODEL}:1: travels, so it may not need numpy"),
        (f"{MODEL}.py", "import huggingface_hub", f"{MODEL}:1: travels, so it may not need huggingface_hub"),
        (f"{MODEL}.py", "def f():\n    import numpy.linalg", f"{MODEL}:2: travels, so it may not need numpy"),
        (f"{MODEL}.py", "from .metrics import Score", f"{MODEL}:1: travels without metrics"),
        (f"{MODEL}.py", f"from {PACKAGE}.{CONFIG} import Config", f"as `from .{CONFIG} import name`"),
        (f"{MODEL}.py", f"from . import {CONFIG}", f"as `from .{CONFIG} import name`"),
        (f"{MODEL}.py", f"try:\n    from .{CONFIG} import C\nexcept ImportError:\n    pass", "at the top of the file"),
        (f"{MODEL}.py", f"def f():\n    from .{CONFIG} import Config", "inside of a function"),
        (f"{CONFIG}.py", f"from .{MODEL} import Model", f"may not import {MODEL}"),
        (f"{CONFIG}.py", f"from .{MODEL} import Model", "circle: "),
    ],
)  # fmt: skip
def test_the_checker_finds(tmp_path, file, source, complaint):
    found = violations(_house(tmp_path, SOUND_HOUSE | {f"{PACKAGE}/{file}": source}))
    assert any(complaint in line for line in found), found
