"""The files for contributors: they are valid YAML, and agree with what is pinned."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = [ROOT / ".pre-commit-config.yaml", *sorted((ROOT / ".github").rglob("*.yml"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_yaml(file):
    assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict)


def test_workflows_run_what_the_makefile_has():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values():
            for step in job["steps"]:
                if target := re.match(r"make ([a-z-]+)", step.get("run", "")):
                    assert re.search(rf"^{target[1]}:", makefile, re.MULTILINE), target[0]


def test_pre_commit_has_the_pinned_ruff():
    pinned = re.search(r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    (ruff,) = (one for one in hooks if one["repo"].endswith("ruff-pre-commit"))
    assert pinned is not None
    assert ruff["rev"] == f"v{pinned[1]}"
