"""The page's JavaScript without a browser: what it computes of the package's models."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_models import TEXTS

from hf_vanilla_transformer import VanillaTransformerTokenizerFast
from hf_vanilla_transformer.explain.contents import contents_of

NODE = shutil.which("node")
SCRIPT = Path(__file__).with_name("compute.mjs")

Compute = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def compute(tmp_path: Path) -> Compute:
    """Runs cases of compute.mjs with a model and its tokenizer: results in their order."""
    if NODE is None:
        pytest.skip("NODE IS NOT INSTALLED: the page's JavaScript is not tested")

    def run(model: Any, tokenizer: Any, cases: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
        file = tmp_path / "contents.json"
        file.write_text(json.dumps(contents_of(model, tokenizer, **options)))
        command = [str(NODE), str(SCRIPT), str(file)]
        done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=1_200)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return run


@pytest.fixture(scope="session")
def tokenizer() -> VanillaTransformerTokenizerFast:
    """Byte-level BPE with a few merges."""
    return VanillaTransformerTokenizerFast.train_from_iterator(TEXTS * 2, vocab_size=320)
