"""One thing that each folder of the package is for: `make check`, and what to run first after moving anything."""

from pathlib import Path

import pytest
import torch
import yaml
from small_runs import recipe_in
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import Translator, cli, engine

TEXTS = ["half past nine", "the fourth of May"]


@pytest.fixture
def loaded(tiny_checkpoint):
    """Tokenizer and model."""
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint).eval()
    return AutoTokenizer.from_pretrained(tiny_checkpoint), model


def test_engine(loaded):
    tokenizer, model = loaded
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    expected = model.generate(**batch, num_beams=4, max_new_tokens=8)
    with engine.attach(model) as attached:
        assert model.generate(**batch, num_beams=4, max_new_tokens=8).tolist() == expected.tolist()
    assert (attached.calls, attached.fallbacks) == (1, 0)


def test_translation_and_plots(tiny_checkpoint, tmp_path):
    translator = Translator(tiny_checkpoint)
    assert translator(TEXTS, max_new_tokens=5) == [translator(text, max_new_tokens=5) for text in TEXTS]
    page = tmp_path / "attention.html"
    options = ["--model", str(tiny_checkpoint), "--source", "nine", "--output", str(page)]
    assert cli.main(["plot", "attention", *options]) == 0
    assert "<html" in page.read_text(encoding="utf-8")


def test_interop(tiny_checkpoint, loaded, tmp_path):
    """To a class of transformers' own and back."""
    out, back = tmp_path / "stock", tmp_path / "back"
    assert cli.main(["export", "--model", str(tiny_checkpoint), "--to", "stock", "--output", str(out)]) == 0
    assert cli.main(["convert", str(out), "--output", str(back)]) == 0
    pair = {"input_ids": torch.tensor([[5, 6, 2]]), "decoder_input_ids": torch.tensor([[2, 7]])}
    with torch.no_grad():
        logits = [model(**pair).logits for model in (loaded[1], AutoModelForSeq2SeqLM.from_pretrained(back).eval())]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)  # epsilons differ


def test_a_run_from_text_to_card(tmp_path, monkeypatch, capsys):
    """Data, training, checkpoints, metrics, hub and the commands."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe_in(tmp_path) | {"use_cpu": True}), encoding="utf-8")
    assert cli.main(["train", "--config", "recipe.yaml"]) == 0, capsys.readouterr().err
    (model,) = Path("run").glob("averaged-*")
    assert "test: BLEU" in capsys.readouterr().out
    assert "# " in (model / "README.md").read_text(encoding="utf-8")
    assert cli.main(["info", str(model)]) == 0
    assert cli.main(["translate", "--model", str(model), "half past nine"]) == 0
