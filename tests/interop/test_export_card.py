"""Exported models have the card and the licence of the folder that they come from."""

import shutil

import pytest
from huggingface_hub import ModelCard

from hf_vanilla_transformer.checkpoints.loading import load_checkpoint
from hf_vanilla_transformer.hub.facts import RunFacts, read_facts
from hf_vanilla_transformer.hub.model_card import save_card
from hf_vanilla_transformer.interop.export import export, facts_about


@pytest.fixture
def source(tiny_checkpoint, tmp_path):
    """A model with a card, a licence and the licence of code."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    save_card(folder, RunFacts("./model", license="mit", source_language="en", target_language="de", training_pairs=7))
    for name in ("LICENSE.txt", "LICENSE-CODE"):
        (folder / name).write_text(name, encoding="utf-8")
    return folder


def exported(source, to, output):
    tokenizer, model = load_checkpoint(source)
    return export(model, output, to=to, tokenizer=tokenizer, source=source)


def test_a_stock_model_has_card_and_licence(source, tmp_path):
    notes = exported(source, "stock", tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.language) == ("mit", ["en", "de"])
    assert 'AutoModelForSeq2SeqLM.from_pretrained("./out")' in card.text
    assert "It is a MarianMTModel and needs no code of its own." in card.text
    assert "- 7 sentence pairs" in card.text
    assert all(note[1:] in card.text for note in notes)
    assert read_facts(tmp_path / "out")[1] is None  # they are those of the weights
    assert [file.name for file in (tmp_path / "out").glob("LICENSE*")] == ["LICENSE.txt"]


def test_a_card_of_other_weights_is_not_believed(source, tmp_path):
    _, model = load_checkpoint(source)
    model.get_input_embeddings().weight.data[5] += 1
    model.save_pretrained(source)
    notes = exported(source, "stock", tmp_path / "out")
    assert "the weights have changed since model_card.json was written" in notes[-1]
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "license: mit" in text
    assert "sentence pairs" not in text


def test_other_formats_have_the_licence(source, tmp_path):
    exported(source, "ctranslate2", tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE.txt").read_text(encoding="utf-8") == "LICENSE.txt"
    assert not (tmp_path / "out" / "README.md").exists()


def test_what_a_name_on_the_hub_tells(tiny_checkpoint):
    _, model = load_checkpoint(tiny_checkpoint)
    facts, note = facts_about(model, "some/model")
    assert (facts.base_model, facts.converted, note) == ("some/model", True, None)
    assert facts.parameters == model.num_parameters()
