"""`make docs`: a page for each module, with every public name and its docstring, and no warning."""

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_vanilla_transformer

ROOT = Path(__file__).parents[2]
PAPER = ("configuration", "modeling", "generation", "tokenization")


@pytest.mark.docs
@pytest.mark.timeout(900)  # pdoc imports everything and reads all of transformers' annotations
def test_the_api_reference_has_every_public_name(tmp_path):
    command = [sys.executable, "-m", "scripts.api_reference", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "hf_vanilla_transformer.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    for name in hf_vanilla_transformer.__all__:
        assert f'id="{name}"' in page
        first = (getattr(hf_vanilla_transformer, name).__doc__ or "").strip().partition("\n")[0]
        if name not in ("PRESETS", "__version__"):
            assert re.sub(r"[`*_]", "", first) in re.sub(r"[`*_]", "", text)
    pages = tmp_path / "hf_vanilla_transformer"
    for module in ("engine", *(f"{part}_vanilla_transformer" for part in PAPER), "training/trainer"):
        assert (pages / f"{module}.html").is_file()
    classes = (pages / "modeling_vanilla_transformer.html").read_text(encoding="utf-8")
    assert 'id="VanillaTransformerAttention.forward"' in classes
