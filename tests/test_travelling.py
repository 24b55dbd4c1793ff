"""What the files that travel with a checkpoint may say; test_imports.py has their imports.

That a training step needs no value of a tensor is shown on the meta device, in paper/test_plain.py.
"""

import re
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parents[1] / "hf_vanilla_transformer"
MODELING = "modeling_vanilla_transformer.py"
LICENCE = "# SPDX-License-Identifier: Apache-2.0\n"
MOST_LINES, MOST_LINES_IN_ALL = {MODELING: 510}, 2080
# Names with one underscore that tensors and modules have; transformers' own are its interface to models.
OWNED = {name for owner in (torch.Tensor, torch.nn.Module()) for name in dir(owner) if re.match("_[^_]", name)}
RULES = {
    r"\btorch\.(backends|ops|library|autograd\.[Ff]unction)|import (backends|ops|library)\b": "a forbidden part",
    r"\b(torch[\w.]*|nn|F)\._[a-z]|\btorch\._C|from torch[\w.]* import .*\b_": "private to torch",
    rf"\.({'|'.join(sorted(OWNED))})\b": "private to torch",
    r"\bis_(cuda|cpu|mps|xpu|available|compiling|dynamo_compiling)\b|\bdevice\.type\b": "asks for the device",
}


def violations(name: str, source: str) -> list[str]:
    """What breaks a rule in a file, a line each."""
    found = [] if source.startswith(LICENCE) else [f"{name}:1: has to begin with {LICENCE!r}"]
    lines, most = source.splitlines(), MOST_LINES.get(name, MOST_LINES_IN_ALL)
    if len(lines) > most:
        found.append(f"{name}: {len(lines)} lines are more than {most}")
    for number, line in enumerate(lines, start=1):
        found += [f"{name}:{number}: {rule}: {line}" for pattern, rule in RULES.items() if re.search(pattern, line)]
    return found


def test_travelling_files_keep_the_rules_and_are_short():
    texts = {file.name: file.read_text(encoding="utf-8") for file in PACKAGE.glob("*_vanilla_transformer.py")}
    assert [problem for name, text in texts.items() for problem in violations(name, text)] == []
    assert sum(len(text.splitlines()) for text in texts.values()) <= MOST_LINES_IN_ALL
    assert (PACKAGE / "LICENSE").read_bytes() == (PACKAGE.parent / "LICENSE").read_bytes()


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("y = 1\n" * 510, "lines are more than 510"),
        ("class A(torch.autograd.Function):", "a forbidden part"),
        ("return x.device.type == 'cuda'", "asks for the device"),
        ("return 1 if x.is_cuda else 2", "asks for the device"),
        ("from torch.nn.modules.module import _global_hooks", "private to torch"),
        ("return layer._parameters", "private to torch"),
    ],
)
def test_the_checker_finds(line, complaint):
    assert violations(MODELING, f"{LICENCE}import torch\n") == []
    assert "has to begin with" in violations(MODELING, "import torch\n")[0]
    assert any(complaint in found for found in violations(MODELING, f"{LICENCE}{line}\n"))
