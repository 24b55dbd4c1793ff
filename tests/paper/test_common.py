"""transformers' own common tests over this package.

TRANSFORMERS_SOURCE names the source of the installed version: a checkout of its tag, or the sdist. The sdist lacks the
tests of generation and of export:

    pip download --no-deps --no-binary :all: --no-build-isolation transformers==5.23.0
    tar xf transformers-5.23.0.tar.gz
    TRANSFORMERS_SOURCE=transformers-5.23.0 python -m pytest -m peers tests/paper/test_common.py
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = os.environ.get("TRANSFORMERS_SOURCE", "")
ROOT = Path(__file__).parents[2]
# What the sdist lacks, as far as the tests that it has import or read it.
WITHOUT_A_CHECKOUT = {
    "__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin: pass",
    "exporters/test_export.py": "class ExportTesterMixin: pass",
    "utils/test_configuration_utils.py": "config_common_kwargs = {'return_dict': False, 'chunk_size_feed_forward': 5}",
    "distributed_testing_utils.py": "run_distributed = init_distributed = backend_device_count = None",
    "fixtures/sample_text.txt": "A boat lay on the shore.\n\nThe children counted 100 waves, and went home.\n" * 8,
}


@pytest.fixture
def common_tests(tmp_path: Path) -> Path:
    """A folder with transformers' package `tests`, and the module that applies it to this package."""
    tests = tmp_path / "tests"
    shutil.copytree(Path(SOURCE) / "tests", tests, ignore=shutil.ignore_patterns("models", "pipelines", "quantization"))
    for name, text in WITHOUT_A_CHECKOUT.items():
        if not (tests / name).exists():
            (tests / name).parent.mkdir(exist_ok=True)
            (tests / name).write_text(text, encoding="utf-8")
    shutil.copy(Path(__file__).with_name("common_tests.py"), tmp_path / "test_this_package.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


@pytest.mark.peers
@pytest.mark.timeout(3600)  # a minute and a half on two idle cores, most of it torch.compile and torch.export
@pytest.mark.skipif(not SOURCE, reason="TRANSFORMERS_SOURCE isn't the folder of transformers' source")
def test_common_tests_of_transformers(common_tests: Path) -> None:
    path = [str(common_tests), str(ROOT), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "test_this_package.py", "-q", "--disable-warnings", "-p", "no:cacheprovider"],
        cwd=common_tests,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2_000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 160, run.stdout[-2_000:]
