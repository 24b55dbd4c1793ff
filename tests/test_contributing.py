"""The files for contributors, of a release and of the image: valid, and in step with what is pinned and released."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from hf_vanilla_transformer import __version__, cli

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FILES = [ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff", *sorted((ROOT / ".github").rglob("*.yml"))]


def test_files_are_yaml_and_workflows_run_what_the_makefile_has():
    assert all(isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict) for file in FILES)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    steps = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / ".github" / "workflows").glob("*.yml"))
    targets = re.findall(r"(?:^\s*|run: )make ([a-z-]+)", steps, re.MULTILINE)
    assert {"test", "newest", "oldest"} <= set(targets) <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_oldest_takes_every_lower_bound(tmp_path):
    file = tmp_path / "oldest.txt"
    subprocess.run(["make", f"OLDEST={file}", str(file)], cwd=ROOT, check=True, capture_output=True)
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    requirements = [Requirement(text) for one in lists for text in one]
    bounds = {f"{one.name}=={two.version}" for one in requirements for two in one.specifier if two.operator == ">="}
    assert set(file.read_text(encoding="utf-8").split()) == bounds
    assert {one.name for one in requirements if ">=" not in str(one.specifier)} == {PROJECT["name"]}


def test_pre_commit_has_the_pinned_ruff():
    pinned = re.search(r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    (ruff,) = (one for one in hooks if one["repo"].endswith("ruff-pre-commit"))
    assert pinned is not None
    assert ruff["rev"] == f"v{pinned[1]}"


def test_the_papers_of_a_release_name_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes, security = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "SECURITY.md"))
    released = re.search(r"^## \[(\d[\d.]*)\] - (\d{4}-\d\d-\d\d)$", changes, re.MULTILINE)
    assert released is not None
    assert released.groups() == (__version__, str(citation["date-released"]))
    assert citation["version"] == __version__
    assert f"| {__version__.rpartition('.')[0]} | yes |" in security


def test_findings_are_listed():
    """Each script has a line in the folder's README and says how long it takes."""
    text = (ROOT / "findings/README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`?([\w.]+)`?\]\(\1\) \|", text, re.MULTILINE)
    scripts = sorted((ROOT / "findings").glob("*.sh"))
    assert sorted(listed) == [file.name for file in scripts]
    for file in scripts:
        text = file.read_text(encoding="utf-8")
        assert text.startswith("#!/usr/bin/env bash\n# ")
        assert re.search(r"^# It .*takes .*\. Exit code 1: the behaviour has changed\.$", text, re.MULTILINE), file.name


def test_the_dockerfile_names_what_exists():
    """No test builds it: its files and its extras exist, and what it starts is a command."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]
    assert len(copied) >= 6
    assert all((ROOT / name).exists() for name in copied)
    extras = re.search(r"'\.\[([\w,]+)\]'", text)[1].split(",")
    assert {"serve", "export"} <= set(extras) <= set(PROJECT["optional-dependencies"])  # both backends
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv*", "outputs"} <= set(ignored)
    assert not set(ignored) & set(copied)
    assert {"hatch_build.py"} <= set(copied)  # the build needs it
    started = re.search(r'ENTRYPOINT \["vanilla-transformer", (.+)\]', text)
    arguments = [word.strip().strip('"') for word in started[1].split(",")]
    assert cli._parser().parse_args([*arguments, "--model", "en-de=/model"]).host == "0.0.0.0"
