"""scripts/readme_picture.py: README's picture, of a page in Chromium."""

import shutil

import pytest
from PIL import Image
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer.explain.page import model_page
from scripts import readme_picture


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromedriver") is None, reason="needs chromedriver and Chromium")
def test_the_picture_moves(tmp_path, tiny_checkpoint):
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    model.generation_config.max_extra_length = 1
    page = tmp_path / "page.html"
    page.write_text(model_page(model, AutoTokenizer.from_pretrained(tiny_checkpoint), "page"), encoding="utf-8")
    output = tmp_path / "F.gif"
    readme_picture.main(["--page", str(page), "--sentence", "nine", "--output", str(output)])
    with Image.open(output) as picture:
        assert picture.size == (readme_picture.WIDTH, readme_picture.HEIGHT)
        assert picture.n_frames > 5
    assert output.stat().st_size <= readme_picture.MOST_BYTES
