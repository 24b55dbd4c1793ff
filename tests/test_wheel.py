"""What the wheel has in it: the package with its licence and recipes, the command's launcher, and nothing else."""

import email
import importlib
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from hatch_build import absolute_links

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_vanilla_transformer"


def files_of_the_package() -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_build_takes_the_package_as_it_is():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    build = settings["tool"]["hatch"]["build"]
    assert (build["targets"]["wheel"], "exclude" in build) == ({"only-include": ["hf_vanilla_transformer"]}, False)
    module, function = settings["project"]["scripts"]["vanilla-transformer"].split(":")
    assert callable(getattr(importlib.import_module(module), function))
    command = ["git", "check-ignore", *sorted(files_of_the_package())]  # which the build leaves out
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (1, ""), run.stderr


def test_a_build_has_the_packages_files_and_a_readme_with_links_to_the_repository(tmp_path):
    """Which pyproject.toml names."""
    source, place = "https://example.org/us/it", tmp_path / "source"
    shutil.copytree(PACKAGE, place / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    with (place / "pyproject.toml").open("a", encoding="utf-8") as settings:
        settings.write(f'\n[project.urls]\nSource = "{source}/"\n')
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=place, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        own = {name for name in names if ".dist-info/" not in name}
        (metadata,) = (archive.read(name) for name in names if name.endswith(".dist-info/METADATA"))
    assert own == files_of_the_package()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    text = email.message_from_bytes(metadata).get_payload(decode=True).decode()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](docs/usage.md)" not in text
    assert f"]({source}/blob/HEAD/docs/usage.md)" in text
    assert text == absolute_links(readme, source)
