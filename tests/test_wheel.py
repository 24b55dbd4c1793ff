"""What the wheel has in it: the package with its licence and recipes, the command's launcher, and nothing else."""

import importlib.util
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_vanilla_transformer"
WANTED = {"hf_vanilla_transformer", "hf_vanilla_transformer_cli.py"}
needs_hatchling = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None,
    reason="WHEEL NOT BUILT: hatchling isn't installed; `pip install hatchling` to run this",
)


def files_of_the_package() -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in (*PACKAGE.rglob("*"), ROOT / "hf_vanilla_transformer_cli.py")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_build_takes_the_package_as_it_is():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["hatch"]["build"]["targets"]["wheel"] == {"only-include": sorted(WANTED)}
    assert settings["project"]["license-files"] == ["LICENSE"]
    assert "exclude" not in settings["tool"]["hatch"]["build"]
    module, function = settings["project"]["scripts"]["vanilla-transformer"].split(":")
    assert f"def {function}(" in (ROOT / f"{module}.py").read_text(encoding="utf-8")


def test_no_file_of_the_package_is_ignored_by_git():
    """The build leaves out what git ignores."""
    command = ["git", "check-ignore", *sorted(files_of_the_package())]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (1, ""), run.stderr


@needs_hatchling
def test_files_of_the_wheel(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    environment = os.environ | {"PIP_NO_INDEX": "1", "SOURCE_DATE_EPOCH": "1600000000"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        own = {name for name in names if ".dist-info/" not in name}
        assert archive.read("hf_vanilla_transformer/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert own == files_of_the_package()
    assert any(name.startswith("hf_vanilla_transformer/training/recipes/") for name in own)
    assert {name.split("/")[0] for name in own} == WANTED
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
