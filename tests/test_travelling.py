"""What the files that travel with a checkpoint may say, by their syntax trees; test_imports.py has their imports.

That a training step needs no value of a tensor is shown on the meta device, in paper/test_plain.py.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parents[1] / "hf_vanilla_transformer"
PARTS = ("configuration", "modeling", "generation", "integration", "plan", "tokenization")
TRAVELLING = tuple(f"{part}_vanilla_transformer.py" for part in PARTS)
MODELING = "modeling_vanilla_transformer.py"
LICENCE = "# SPDX-License-Identifier: Apache-2.0"
MOST_LINES, MOST_LINES_IN_ALL = {MODELING: 510}, 2080

FORBIDDEN = ("torch.backends", "torch.ops", "torch.autograd.Function", "torch.autograd.function", "torch.library")
ASKS_FOR_THE_DEVICE = {"is_cuda", "is_cpu", "is_mps", "is_xpu", "is_available", "is_compiling", "is_dynamo_compiling"}
# Names with one underscore that tensors and modules have; transformers' own are its interface to models.
PRIVATE = {
    name
    for owner in (torch.Tensor, torch.nn.Module())
    for name in dir(owner)
    if name.startswith("_") and not name.startswith("__")
}


def violations(name: str, source: str) -> list[str]:
    """What breaks a rule in a file, a line each."""
    lines, found = source.splitlines(), []
    if lines[:1] != [LICENCE]:
        found.append(f"{name}:1: has to begin with {LICENCE!r}")
    if len(lines) > MOST_LINES.get(name, MOST_LINES_IN_ALL):
        found.append(f"{name}: {len(lines)} lines are more than {MOST_LINES.get(name, MOST_LINES_IN_ALL)}")
    tree = ast.parse(source)
    aliases = dict(_aliases(tree))
    for node in ast.walk(tree):
        found += [f"{name}:{getattr(node, 'lineno', 0)}: {problem}" for problem in _names(node, aliases)]
    return found


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names that imports bind, with what they stand for: "F" for torch.nn.functional."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                yield (item.asname, item.name) if item.asname else (item.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for item in node.names:
                yield item.asname or item.name, f"{node.module}.{item.name}"


def _full_name(node: ast.AST, aliases: dict[str, str]) -> str:
    """`F.linear` as "torch.nn.functional.linear"; empty for what doesn't begin with a name."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = _full_name(node.value, aliases)
        return owner and f"{owner}.{node.attr}"
    return ""


def _names(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    """Names that may not be used, whatever for."""
    full_names = [_full_name(node, aliases)]
    if isinstance(node, ast.Import):
        full_names = [item.name for item in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        full_names = [f"{node.module}.{item.name}" for item in node.names]
    for full in full_names:
        parts = full.split(".")
        if full.startswith(FORBIDDEN):
            yield f"uses {full}"
        elif parts[0] == "torch" and any(re.match(r"_(?!_)", part) for part in parts):
            yield f"uses {full}, which is private to torch"
        elif parts[0] == "torch" and ASKS_FOR_THE_DEVICE & set(parts):
            yield f"asks for the device: {full}"
    if isinstance(node, ast.Attribute):
        yield from _attributes(node)


def _attributes(node: ast.Attribute) -> Iterator[str]:
    if node.attr in PRIVATE:
        yield f"uses .{node.attr}, which is private to torch"
    if node.attr in ASKS_FOR_THE_DEVICE:
        yield f"asks for the device: .{node.attr}"
    if node.attr == "type" and re.search(r"\bdevice\b", ast.unparse(node.value)):
        yield "asks for the device: .device.type"


@pytest.mark.parametrize("name", TRAVELLING)
def test_travelling_files_keep_the_rules(name):
    assert violations(name, (PACKAGE / name).read_text(encoding="utf-8")) == []


def test_all_travelling_files_together_are_short():
    assert _lines_in_all([PACKAGE / name for name in TRAVELLING]) <= MOST_LINES_IN_ALL


def _lines_in_all(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


SOUND = f"{LICENCE}\nimport torch\n"


def _in_function(line: str) -> str:
    return f"{SOUND}\n\ndef f(x, mask, layer):\n    {line}\n"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (SOUND.removeprefix(LICENCE), "has to begin with"),
        (SOUND + "x = 1\n" * 510, "lines are more than 510"),
        (_in_function("return torch.backends.mkldnn.is_available()"), "uses torch.backends"),
        (SOUND + "class A(torch.autograd.Function):\n    pass\n", "uses torch.autograd.Function"),
        (_in_function("return x.device.type == 'cuda'"), ".device.type"),
        (_in_function("return 1 if x.is_cuda else 2"), "asks for the device: .is_cuda"),
        (_in_function("return torch._C._nn.linear(x)"), "torch._C._nn.linear, which is private"),
        (_in_function("return layer._parameters"), "._parameters, which is private"),
    ],
)  # fmt: skip
def test_the_checker_finds(source, complaint):
    assert violations(MODELING, SOUND) == []
    found = violations(MODELING, source)
    assert any(complaint in line for line in found), found


def test_a_licence_beside_the_code_is_the_projects():
    assert (PACKAGE / "LICENSE").read_bytes() == (PACKAGE.parent / "LICENSE").read_bytes()
