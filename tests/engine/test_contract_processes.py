"""Patches that are older than the package's import, edited copies of the code, and what is logged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import contract_processes
import pytest
from contract import generated, new_model

import hf_vanilla_transformer

pytestmark = pytest.mark.slow

CASES = [name for name, _ in contract_processes.cases()]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each case says, from one process that forks a child for each."""
    folder = tmp_path_factory.mktemp("contract")
    model = new_model()
    model.save_pretrained(folder / "checkpoint")
    (folder / "plain.json").write_text(json.dumps(generated(model)))
    tests = Path(__file__).parents[1]
    roots = [Path(hf_vanilla_transformer.__file__).parents[1], tests / "paper", tests / "engine"]
    process = subprocess.run(
        [sys.executable, contract_processes.__file__],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(map(str, roots)),
            "HF_MODULES_CACHE": str(folder / "modules"),
            "CONTRACT_CHECKPOINT": str(folder / "checkpoint"),
            "CONTRACT_PLAIN": str(folder / "plain.json"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_in_a_process_of_its_own(results, name):
    if results[name] == "skipped":
        pytest.skip("hf_vanilla_transformer.engine has no unsupported_reason")
    assert results[name] is None, results[name]
