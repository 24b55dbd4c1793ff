"""Who imports whom, read from the source: the arrows of CONTRIBUTING.md's house, with no circle among them."""

import ast
import fnmatch
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE, LAUNCHER = "hf_vanilla_transformer", "hf_vanilla_transformer_cli"
ROOT = Path(__file__).parents[1]

CONFIG, MODEL = "configuration_vanilla_transformer", "modeling_vanilla_transformer"
GENERATION, TOKENIZATION = (f"{name}_vanilla_transformer" for name in ("generation", "tokenization"))
OPUS_MT, DICTIONARY = "tokenization_opus_mt", "tokenization_dictionary"  # travel with converted checkpoints alone
# Copied to the Hub with every checkpoint, where neither this package nor a library beyond these can be counted on.
TRAVELLING = {CONFIG, MODEL, GENERATION, TOKENIZATION}
TRAVELLING_LIBRARIES = {"torch", "transformers", "tokenizers"}

# Module (a pattern) -> the modules of ours that it may import (patterns). A new module needs a line or a folder's rule.
PAPER = sorted(TRAVELLING)
MAY_IMPORT = {
    CONFIG: [],
    TOKENIZATION: [],
    GENERATION: [],
    MODEL: [CONFIG, GENERATION],
    OPUS_MT: [],
    DICTIONARY: [OPUS_MT],
    "engine": ["engine.*", *PAPER],
    "engine.*": ["engine.*", *PAPER],
    "data": [],
    "data.*": ["data.*", *PAPER],
    "evaluation": [],
    "evaluation.*": ["evaluation.*", "engine", "engine.*", "data.*", *PAPER],
    "publish": [],
    "publish.paper_plots": ["publish.drawing", CONFIG, MODEL],
    "publish.*": ["publish.*", "evaluation.*", "data.*"],
    "training": [],
    "training.*": ["training.*", "publish.*", "evaluation.*", "engine", "engine.*", "data.*", *PAPER],
    "interop": [],
    "interop.base": PAPER,
    "interop.layout": ["interop.base", "evaluation.loading", "data.messages", *PAPER],
    "interop.pickles": ["interop.base", "data.messages"],
    "interop.sentencepiece": ["evaluation.loading", OPUS_MT],
    "interop.convert": ["interop", "interop.*", "publish.*", "evaluation.*", "data.*"],
    "interop.torch_nn": ["interop.base", "interop.layout", "interop.mapping", *PAPER],
    "interop.*": [
        *(f"interop.{name}" for name in ("base", "layout", "pickles", "segmentation", "sentencepiece")),
        *("evaluation.*", "data.*", OPUS_MT, DICTIONARY, *PAPER),
    ],
    "inference": [],
    "inference.*": ["inference.*", "interop.*", "evaluation", "evaluation.*", "engine", "engine.*", "data.*", *PAPER],
    "demo": [],
    "demo.local": ["demo.models", "inference.*", "evaluation.*"],
    "demo.space": ["demo", "inference.*", "publish.*", "evaluation.*", "data.*"],
    "demo.*": ["demo.models", "demo.tables"],  # travel with a Space, without the rest of the package
    "cli": ["*"],
    "cli.*": ["*"],
    "__main__": ["cli"],
    LAUNCHER: ["cli"],
    "__init__": [
        *("inference", "inference.translator", "interop.marian"),
        *("training.recipe", "training.trainer"),
        *(OPUS_MT, DICTIONARY, *PAPER),
    ],
    "scripts.*": ["*"],
    "benchmarks": ["*"],
    "benchmarks.*": ["*"],
}
# Commands import what they need inside of the function, and __init__ when it registers, so that `--help` is instant;
# the backend of an extra imports it when it is used.
MAY_IMPORT_LATE = [
    *("__init__", LAUNCHER, "cli", "cli.*", "inference.ctranslate2", "scripts.*", "benchmarks", "benchmarks.*"),
]


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
    files = {path.stem: path for path in [root / f"{LAUNCHER}.py"] if path.exists()}
    for folder in (root / PACKAGE, root / "scripts", root / "benchmarks"):
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
    if item.target == "argparse" and not _matches(module, [*MAY_IMPORT_LATE, "interop.pickles"]):  # it reads Namespaces
        yield "argparse is for the command line"
    if module in {*TRAVELLING, OPUS_MT, DICTIONARY}:
        yield from _problems_on_the_way(module, item)


def _problems_on_the_way(module: str, item: Import) -> Iterator[str]:
    """What remote code on the Hub can't do: transformers copies flat siblings that it finds by `from .x import y`."""
    libraries = (
        TRAVELLING_LIBRARIES | set(sys.stdlib_module_names) | ({"huggingface_hub"} if module == CONFIG else set())
    )
    if item.ours:
        if item.target not in {*TRAVELLING, OPUS_MT}:
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
    assert names == TRAVELLING


def _house(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return root


SOUND_HOUSE = {
    f"{PACKAGE}/__init__.py": f"from .{CONFIG} import Config\nfrom .{MODEL} import Model\n",
    f"{PACKAGE}/__main__.py": "import sys\nfrom .cli import main\n",
    f"{LAUNCHER}.py": f"def main():\n    from {PACKAGE}.cli import main\n",
    f"{PACKAGE}/{CONFIG}.py": "import transformers\nfrom huggingface_hub.dataclasses import strict\n",
    f"{PACKAGE}/{MODEL}.py": f"import math\nimport torch.nn.functional as F\nfrom .{CONFIG} import Config\n",
    f"{PACKAGE}/engine/__init__.py": f"from ..{MODEL} import Model\nfrom .support import reason\n",
    f"{PACKAGE}/engine/support.py": f"from ..{CONFIG} import Config\n",
    f"{PACKAGE}/engine/decoding/search.py": "from ..support import reason\n",
    f"{PACKAGE}/data/corpora.py": "import datasets\nfrom .formats import read\n",
    f"{PACKAGE}/data/formats.py": "import csv\n",
    f"{PACKAGE}/evaluation/__init__.py": "",
    f"{PACKAGE}/evaluation/metrics.py": "import sacrebleu\n",
    f"{PACKAGE}/evaluation/translation.py": "from ..engine.decoding.search import search\nfrom . import metrics\n",
    f"{PACKAGE}/publish/model_card.py": "from ..evaluation import metrics\nfrom ..evaluation.metrics import Score\n",
    f"{PACKAGE}/training/trainer.py": "from ..publish.model_card import Card\nfrom ..data.corpora import read\n",
    f"{PACKAGE}/interop/marian.py": f"from ..{MODEL} import Model\nfrom ..{CONFIG} import Config\n",
    f"{PACKAGE}/cli/__init__.py": "import argparse\ndef run():\n    from ..evaluation.metrics import Score\n",
    "scripts/tune.py": f"import argparse\nfrom {PACKAGE} import Model\nfrom {PACKAGE}.data.formats import read\n",
}


def test_the_checker_passes_a_sound_house(tmp_path):
    assert violations(_house(tmp_path, SOUND_HOUSE)) == []


METRICS, CARD = "evaluation/metrics.py", "publish/model_card.py"


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        (METRICS, "from ..publish.model_card import Card", "evaluation.metrics:1: may not import publish.model_card"),
        (METRICS, f"from {PACKAGE}.training.trainer import T", "may not import training.trainer"),
        (METRICS, f"import {PACKAGE}.cli", "evaluation.metrics:1: may not import cli"),
        (METRICS, f"import {PACKAGE}", "evaluation.metrics:1: may not import __init__"),
        (METRICS, "from .. import Model", "evaluation.metrics:1: may not import __init__"),
        (METRICS, "from ..evaluation import translation", "circle: "),
        (METRICS, "if True:\n    from ..publish.model_card import Card", "may not import publish.model_card"),
        (METRICS, "import importlib\nimportlib.import_module('.cli')", "metrics:2: may not import cli"),
        (METRICS, "import argparse", "metrics:1: argparse is for the command line"),
        (METRICS, "from sacrebleu import *", "metrics:1: star import of sacrebleu"),
        (CARD, "def f():\n    from ..evaluation.metrics import Score", "imports evaluation.metrics inside"),
        (CARD, "class A:\n    async def f(self):\n        from ..evaluation import metrics", "metrics inside"),
        (CARD, "from ..engine.support import reason", "model_card:1: may not import engine.support"),
        ("data/formats.py", "from ..engine.support import reason", "data.formats:1: may not import engine.support"),
        ("data/formats.py", "from .corpora import read", "circle: "),
        ("engine/support.py", "from ..evaluation.metrics import Score", "may not import evaluation.metrics"),
        ("engine/support.py", "from .decoding.search import search", "circle: "),
        ("interop/marian.py", "from ..engine.support import reason", "may not import engine.support"),
        ("tokenization_opus_mt.py", f"from .{CONFIG} import Config", f"may not import {CONFIG}"),
        ("tokenization_opus_mt.py", "import sentencepiece", "travels, so it may not need sentencepiece"),
        ("evaluation/translation.py", "from ..interop.marian import M", "may not import interop.marian"),
        ("interop/marian.py", "from .fairseq import convert", "interop.marian:1: may not import interop.fairseq"),
        ("news.py", "import math", "news: not in the table MAY_IMPORT"),
        (f"{MODEL}.py", "from .engine import Engine", f"{MODEL}:1: may not import engine"),
        (f"{MODEL}.py", "import numpy", f"{MODEL}:1: travels, so it may not need numpy"),
        (f"{MODEL}.py", "import huggingface_hub", f"{MODEL}:1: travels, so it may not need huggingface_hub"),
        (f"{MODEL}.py", "def f():\n    import numpy.linalg", f"{MODEL}:2: travels, so it may not need numpy"),
        (f"{MODEL}.py", "from .data.formats import read", f"{MODEL}:1: travels without data.formats"),
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
