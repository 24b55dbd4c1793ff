"""The Dockerfile, which no test builds: its files and its extras exist, and what it starts is a command."""

import re
import tomllib
from pathlib import Path

from hf_vanilla_transformer import cli

ROOT = Path(__file__).parents[1]


def test_the_dockerfile_names_what_exists() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]
    assert len(copied) >= 6
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = re.search(r"'\.\[([\w,]+)\]'", text)[1].split(",")
    assert {"serve", "export"} <= set(extras) <= set(project["project"]["optional-dependencies"])  # both backends
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv*", "outputs"} <= set(ignored)
    assert not set(ignored) & set(copied)
    assert project["build-system"]["build-backend"] == "hatchling.build"
    assert {"hatch_build.py"} <= set(copied)  # the build needs them
    started = re.search(r'ENTRYPOINT \["vanilla-transformer", (.+)\]', text)
    assert started is not None
    arguments = [word.strip().strip('"') for word in started[1].split(",")]
    assert cli._parser().parse_args([*arguments, "--model", "en-de=/model"]).host == "0.0.0.0"
