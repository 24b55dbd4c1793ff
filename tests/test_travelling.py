"""What the files that travel with a checkpoint may say, by their syntax trees; test_imports.py has their imports."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parents[1] / "hf_vanilla_transformer"
CONFIGURATION, MODELING, GENERATION, TOKENIZATION = (
    f"{part}_vanilla_transformer.py" for part in ("configuration", "modeling", "generation", "tokenization")
)
TRAVELLING = (CONFIGURATION, MODELING, GENERATION, TOKENIZATION)
LICENCE = "# SPDX-License-Identifier: Apache-2.0"
MOST_LINES, MOST_LINES_IN_ALL = {MODELING: 540}, 1500

# Where a value has to be known on the CPU, with the reason. None of them runs in a training step by itself.
MAY_READ_VALUES = {
    (MODELING, "loss_of_targets"): "`skip_logits`, which a caller asks for, projects nothing but labels",
    (GENERATION, "_limit_lengths"): "`max_new_tokens` is a number, needed once per call",
    (GENERATION, "compute_transition_scores"): "the length of the result, after generation",
}
# Each makes the CPU wait for the device.
READS = {"item", "tolist", "nonzero", "masked_select", "numpy", "cpu", "equal", "allclose", "is_nonzero", "unique"}
REDUCTIONS = {"all", "any", "max", "min", "amax", "amin", "sum", "mean", "prod", "argmax", "argmin", "count_nonzero"}
BOOLEAN = {"bool", "logical_not", "logical_and", "logical_or", "eq", "ne", "lt", "le", "gt", "ge", "isnan", "isfinite"}
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
    for function, node in _nodes(tree):
        problems = list(_names(node, aliases))
        if (name, function) not in MAY_READ_VALUES:
            problems += _values(node, aliases)
        found += [f"{name}:{getattr(node, 'lineno', 0)}: {problem}" for problem in problems]
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and (name, function.name) not in MAY_READ_VALUES:
            found += [f"{name}:{line}: indexes by booleans" for line in _boolean_indexing(function)]
    return found


def _nodes(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
    """All nodes below, each with the name of the innermost function that it stands in."""
    for child in ast.iter_child_nodes(node):
        inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        yield inner, child
        yield from _nodes(child, inner)


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


def _values(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    """Places that need a tensor's value on the CPU."""
    if isinstance(node, ast.Call):
        full = _full_name(node.func, aliases)
        called = node.func.attr if isinstance(node.func, ast.Attribute) else full.split(".")[-1]
        if called in READS:
            yield f"reads values: .{called}()"
        if full in ("int", "float", "bool") and any(_reduces(argument) for argument in node.args):
            yield f"reads values: {full}(...)"
        if full == "torch.where" and len(node.args) == 1:
            yield "reads values: torch.where(condition)"
    if any(_reduces(condition) for condition in _conditions(node)):
        yield "branches on a tensor's value"


def _conditions(node: ast.AST) -> list[ast.expr]:
    """The parts of a node whose truth Python asks for."""
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return node.ifs
    if isinstance(node, ast.BoolOp):
        return node.values
    return [node.operand] if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else []


def _reduces(node: ast.AST) -> bool:
    """Whether an expression has a call such as x.all(); all(...) of Python is none."""
    return any(
        isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in REDUCTIONS
        for inner in ast.walk(node)
    )


def _boolean_indexing(function: ast.AST) -> Iterator[int]:
    """Lines with x[mask] in a function, where the mask is written there or is a variable that was made so."""
    masks: set[str] = set()
    for node in ast.walk(function):  # to a fixed point isn't needed: a mask of a mask is one by its operator
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                masks |= {each.id for each, value in pairs if isinstance(each, ast.Name) and _is_mask(value, masks)}
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript):
            indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if any(_is_mask(index, masks) for index in indices):
                yield node.lineno


def _is_mask(node: ast.AST, masks: set[str]) -> bool:
    if isinstance(node, ast.Name):
        return node.id in masks
    if isinstance(node, ast.Compare):  # `is` and `in` give Python's own booleans
        return not any(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in node.ops)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Invert)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr | ast.BitXor):
        return _is_mask(node.left, masks) or _is_mask(node.right, masks)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BOOLEAN


@pytest.mark.parametrize("name", TRAVELLING)
def test_travelling_files_keep_the_rules(name):
    assert violations(name, (PACKAGE / name).read_text(encoding="utf-8")) == []


def test_all_travelling_files_together_are_short():
    assert _lines_in_all([PACKAGE / name for name in TRAVELLING]) <= MOST_LINES_IN_ALL


def _lines_in_all(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


@pytest.mark.parametrize(("name", "function"), MAY_READ_VALUES)
def test_every_exception_is_needed(name, function, monkeypatch):
    monkeypatch.delitem(MAY_READ_VALUES, (name, function))
    assert violations(name, (PACKAGE / name).read_text(encoding="utf-8"))


SOUND = f"""{LICENCE}
import math
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from .configuration_vanilla_transformer import Config


class Layer(nn.Linear):
    def forward(self, x, mask=None, index=0, names=()):
        real = x != 0
        x = x.masked_fill(~real, torch.finfo(x.dtype).min)
        first = real & (real.cumsum(-1) == 1)
        first[:, 0] |= ~real.any(dim=-1)
        if mask is None or mask.ndim == 4 or self.config._attn_implementation == "sdpa":
            x = super().__init__()
        while all(name for name in names) and len(x) > max(1, 2):
            x = x[:, index, None][..., ~index + 1 :] if type(x) is Tensor else x[{{1: 2}}[3]]
        return F.linear(x.to(mask.device), self.weight), int(math.sqrt(2)), x.device
"""


def test_the_checker_passes_a_sound_file():
    assert violations(MODELING, SOUND) == []


def _in_function(line: str) -> str:
    return f"{SOUND}\n\ndef f(x, mask, layer):\n    {line}\n"


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (SOUND.removeprefix(LICENCE), "has to begin with"),
        (SOUND + "x = 1\n" * 540, "lines are more than 540"),
        (_in_function("return torch.backends.mkldnn.is_available()"), "uses torch.backends"),
        (SOUND + "class A(torch.autograd.Function):\n    pass\n", "uses torch.autograd.Function"),
        (_in_function("return x.device.type == 'cuda'"), ".device.type"),
        (_in_function("return 1 if x.is_cuda else 2"), "asks for the device: .is_cuda"),
        (_in_function("return torch._C._nn.linear(x)"), "torch._C._nn.linear, which is private"),
        (_in_function("return layer._parameters"), "._parameters, which is private"),
        (_in_function("if mask.all():\n        return x"), "branches on a tensor's value"),
        (_in_function("return not mask.any()"), "branches on a tensor's value"),
        (_in_function("return x.sum().item()"), "reads values: "),
        (_in_function("return int(mask.sum())"), "reads values: int"),
        (_in_function("return torch.where(mask)"), "reads values: torch.where"),
        (_in_function("return x[x != 0]"), "indexes by booleans"),
        (_in_function("real = x > 0\n    return x[real]"), "indexes by booleans"),
    ],
)  # fmt: skip
def test_the_checker_finds(source, complaint):
    found = violations(MODELING, source)
    assert any(complaint in line for line in found), found


def test_a_licence_beside_the_code_is_the_projects():
    assert (PACKAGE / "LICENSE").read_bytes() == (PACKAGE.parent / "LICENSE").read_bytes()
