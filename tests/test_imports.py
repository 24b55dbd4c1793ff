"""Who imports whom, read from the source: the arrows of CONTRIBUTING.md's house, with no circle among them."""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "hf_vanilla_transformer"
ROOT = Path(__file__).parents[1]

CONFIG, MODEL, GENERATION, INTEGRATION, TOKENIZATION = (
    f"{name}_vanilla_transformer" for name in ("configuration", "modeling", "generation", "integration", "tokenization")
)
PLAN = "plan_vanilla_transformer"
PAPER = {CONFIG, MODEL, GENERATION, INTEGRATION, PLAN, TOKENIZATION}
# They travel with the checkpoints that they belong to.
DICTIONARY, SOURCE_TARGET = "tokenization_dictionary", "tokenization_source_target"
# What a travelling file may import: on the Hub, neither this package nor other libraries can be counted on.
SIBLINGS = {MODEL: {CONFIG, GENERATION, INTEGRATION}, INTEGRATION: {CONFIG}, GENERATION: {INTEGRATION, PLAN}}
LIBRARIES = {"torch", "transformers", "tokenizers", *sys.stdlib_module_names}
OWN_LIBRARIES = {CONFIG: {"huggingface_hub"}, DICTIONARY: {"sentencepiece", "subword_nmt"}}

# Room -> the rooms that it may import from, beside itself. A room is a folder, or a module beside the folders.
MAY_IMPORT = {
    "errors": set(),
    "registration": set(),
    "paper": set(),
    "engine": {"paper", "checkpoints", "errors"},
    "data": {"paper", "errors"},
    "metrics": set(),
    "checkpoints": {"paper", "errors"},
    "hub": {"checkpoints", "metrics", "data", "errors"},
    "interop": {"paper", "engine", "checkpoints", "hub", "data", "errors"},
    "translation": {"paper", "engine", "interop", "checkpoints", "metrics", "data", "errors"},
    "documents": {"translation", "hub", "checkpoints", "data", "errors"},
    "plots": set(),
    "explain": {"paper", "engine", "translation", "checkpoints"},
    "serving": {"documents", "translation", "errors"},
    "training": {"paper", "engine", "translation", "hub", "checkpoints", "metrics", "data", "errors"},
}
EVERYWHERE = {"cli", "__init__", "__main__", "scripts", "benchmarks"}  # imported by none of the rooms
# Commands import what they need inside of the function, and __init__ when it registers, so that `--help` is instant;
# the backend of an extra imports it when it is used; what translates with that imports neither torch nor transformers.
IMPORT_LATE = {
    *EVERYWHERE,
    *("translation.ctranslate2", "translation.ctranslate2_folder", "translation.decoding", "translation.spelling"),
    *("translation.tokenizer_file", "translation.translator"),
    "training",  # a wrong option is an error before what trains is imported
    "documents",  # each form needs a library of its own
    "hub.facts",  # a translation doesn't wait for sacrebleu
}


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Import(NamedTuple):
    """One imported module: `target` is a module of ours without the package's name, or a library's top name."""

    target: str
    ours: bool
    in_function: bool
    line: int


def modules_of(root: Path) -> dict[str, Path]:
    """Files by module: "cli", "interop.fairseq", "scripts.quickstart"; a package's __init__ has the package's name."""
    files: dict[str, Path] = {}
    for folder in (root / PACKAGE, root / "scripts", root / "benchmarks"):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder if folder.name == PACKAGE else root).with_suffix("").parts
            inner_package = parts[-1] == "__init__" and len(parts) > 1
            files[".".join(parts[:-1] if inner_package else parts)] = path
    return files


def room_of(module: str) -> str:
    first = module.split(".")[0]
    return "paper" if first in {*PAPER, DICTIONARY, SOURCE_TARGET} else first


def imports_of(module: str, path: Path, modules: set[str]) -> Iterator[Import]:
    """All imports of a file, `import_module("...")` of ours among them."""
    inner = [] if module == "__init__" else module.split(".")
    package = [PACKAGE, *(inner if path.name == "__init__.py" else inner[:-1])]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes: list[tuple[ast.AST, bool]] = [(tree, False)]
    while nodes:
        node, in_function = nodes.pop()
        in_function = in_function or isinstance(node, FUNCTIONS)
        nodes += [(child, in_function) for child in ast.iter_child_nodes(node)]
        for target, ours in _imported_by(node, package, modules):
            yield Import(target, ours, in_function, getattr(node, "lineno", 0))


def _imported_by(node: ast.AST, package: list[str], modules: set[str]) -> Iterator[tuple[str, bool]]:
    if isinstance(node, ast.Import):
        yield from (_ours(alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
        target, ours = _ours(".".join(part for part in (base, node.module) if part))
        for alias in node.names:
            # `from . import metrics` imports a module, `from . import register` a name of the package's __init__.
            inner = alias.name if target == "__init__" else f"{target}.{alias.name}"
            yield inner if ours and inner in modules else target, ours
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name, argument = ast.unparse(node.func).split(".")[-1], node.args[0].value
        if name in ("import_module", "__import__") and isinstance(argument, str):
            yield _ours(f"{PACKAGE}{argument}" if argument.startswith(".") else argument)


def all_imports(root: Path) -> dict[str, list[Import]]:
    """The imports of each module."""
    modules = modules_of(root)
    return {module: list(imports_of(module, path, set(modules))) for module, path in modules.items()}


def _ours(full_name: str) -> tuple[str, bool]:
    first, _, rest = full_name.partition(".")
    return (rest or "__init__", True) if first == PACKAGE else (first, False)


def violations(everything: dict[str, list[Import]]) -> list[str]:
    """What breaks the house's rules, a line each."""
    found, arrows = [], {}
    for module, imports in everything.items():
        arrows[module] = {item.target for item in imports if item.ours}
        if room_of(module) not in {*MAY_IMPORT, *EVERYWHERE}:
            found.append(f"{module}: not in the table MAY_IMPORT; add what it may import")
            continue
        for item in imports:
            found += [f"{module}:{item.line}: {problem}" for problem in _problems(module, item)]
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        found.append(f"circle: {' -> '.join(error.args[1])}")
    return found


def _problems(module: str, item: Import) -> Iterator[str]:
    room = room_of(module)
    late = room in IMPORT_LATE or module in IMPORT_LATE
    if item.ours and room not in EVERYWHERE and room_of(item.target) not in {room, *MAY_IMPORT[room]}:
        yield f"may not import {item.target}"
    if item.ours and item.in_function and not late:
        yield f"imports {item.target} inside of a function"
    if item.target == "argparse" and not late and module != "interop.pickles":  # it reads Namespaces
        yield "argparse is for the command line"
    if room == "paper" and item.ours and item.target not in SIBLINGS.get(module, set()):
        yield f"travels without {item.target}"
    if room == "paper" and not item.ours and item.target not in LIBRARIES | OWN_LIBRARIES.get(module, set()):
        yield f"travels, so it may not need {item.target}"


@pytest.fixture(scope="module")
def everything() -> dict[str, list[Import]]:
    return all_imports(ROOT)


def test_the_house_keeps_its_arrows(everything):
    assert violations(everything) == []


def test_every_right_is_used(everything):
    used: dict[str, set[str]] = {room: set() for room in MAY_IMPORT}
    for module, imports in everything.items():
        used.setdefault(room_of(module), set()).update(room_of(item.target) for item in imports if item.ours)
    assert {room: rights - used[room] for room, rights in MAY_IMPORT.items() if rights - used[room]} == {}


def test_travelling_files_are_flat_and_few():
    assert {path.stem for path in (ROOT / PACKAGE).glob("*_vanilla_transformer.py")} == PAPER


SOUND_HOUSE = {
    "__init__.py": f"from .{CONFIG} import Config\nfrom .{MODEL} import Model\n",
    f"{CONFIG}.py": "import transformers\n",
    f"{MODEL}.py": f"import math\nimport torch.nn.functional as F\nfrom .{CONFIG} import Config\n",
    "metrics.py": "import sacrebleu\n",
    "hub/model_card.py": "from .. import metrics\nfrom ..metrics import Score\n",
}


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("hub/facts.py", "from .model_card import Card", None),
        ("metrics.py", "from .hub.model_card import Card", "metrics:1: may not import hub.model_card"),
        ("hub/upload.py", "def f():\n    from ..metrics import Score", "hub.upload:2: imports metrics inside"),
        ("data/formats.py", "from .formats import read", "circle: "),
        ("news.py", "import math", "news: not in the table MAY_IMPORT"),
        (f"{MODEL}.py", "import numpy", f"{MODEL}:1: travels, so it may not need numpy"),
        (f"{MODEL}.py", "from .data.formats import read", f"{MODEL}:1: travels without data.formats"),
    ],
)
def test_the_checker_finds(tmp_path, file, source, complaint):
    for name, text in (SOUND_HOUSE | {file: source}).items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = violations(all_imports(tmp_path))
    assert any(complaint in line for line in found) if complaint else found == [], found
