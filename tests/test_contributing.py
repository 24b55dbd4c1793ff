"""The files for contributors and of a release: they are valid YAML, and agree with what is pinned and released."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from hf_vanilla_transformer import __version__

ROOT = Path(__file__).parents[1]
FILES = [ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff", *sorted((ROOT / ".github").rglob("*.yml"))]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_yaml(file):
    assert isinstance(yaml.safe_load(file.read_text(encoding="utf-8")), dict)


def test_workflows_run_what_the_makefile_has():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values():
            for step in job["steps"]:
                for target in re.findall(r"^\s*make ([a-z-]+)", step.get("run", ""), re.MULTILINE):
                    assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_weekly_workflow_has_every_set_of_versions():
    weekly = (ROOT / ".github" / "workflows" / "newest.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"run: make ([a-z]+)", weekly)) == {"test", "newest", "oldest"}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_oldest_takes_every_lower_bound(tmp_path):
    file = tmp_path / "oldest.txt"
    subprocess.run(["make", f"OLDEST={file}", str(file)], cwd=ROOT, check=True, capture_output=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(text) for one in lists for text in one]
    bounds = {
        f"{one.name}=={bound.version}" for one in requirements for bound in one.specifier if bound.operator == ">="
    }
    unbounded = {one.name for one in requirements if ">=" not in str(one.specifier)}
    assert set(file.read_text(encoding="utf-8").split()) == bounds
    assert unbounded == {project["name"]}


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
    listed = re.findall(
        r"^\| \[`?([\w.]+)`?\]\(\1\) \|", (ROOT / "findings/README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    scripts = sorted((ROOT / "findings").glob("*.sh"))
    assert sorted(listed) == [file.name for file in scripts]
    for file in scripts:
        text = file.read_text(encoding="utf-8")
        assert text.startswith("#!/usr/bin/env bash\n# ")
        assert re.search(r"^# It .*takes .*\. Exit code 1: the behaviour has changed\.$", text, re.MULTILINE), file.name
