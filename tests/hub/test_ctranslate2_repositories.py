"""Repositories in CTranslate2's format, without a configuration of transformers, on a Hub on localhost."""

import pytest

from hf_vanilla_transformer import Translator
from tests.interop.ctranslate2_origins import ALL, quickmt, sharpened


def test_a_repository_is_downloaded_by_patterns_translated_and_converted(hub, tmp_path, vanilla_transformer):
    folder = sharpened(quickmt(tmp_path))
    hub.add("me/quickmt-de-en")
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    hub.repositories["me/quickmt-de-en"].commit("main", {**files, "eole-model.safetensors": b"large"})
    translator = Translator("me/quickmt-de-en", "cpu")
    assert translator.backend == "ctranslate2"
    assert translator(ALL[:3], max_new_tokens=9) == Translator(folder, "cpu")(ALL[:3], max_new_tokens=9)
    asked = " ".join(hub.requests)
    assert "model.bin" in asked
    assert "eole-model.safetensors" not in asked
    with pytest.raises(ValueError, match='dtype is for the backend "engine"'):
        Translator("me/quickmt-de-en", "cpu", dtype="float16")
    code, _, error = vanilla_transformer("convert", "me/quickmt-de-en", "--output", tmp_path / "converted")
    assert code == 0, error
    assert "base_model: me/quickmt-de-en" in (tmp_path / "converted" / "README.md").read_text()
    options = {"max_new_tokens": 9, "num_beams": 1}
    assert Translator(tmp_path / "converted", "cpu")(ALL[:3], **options) == translator(ALL[:3], **options)
