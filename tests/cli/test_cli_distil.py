"""`vanilla-transformer translate` for a teacher's corpus: an ensemble, and the translation nearest to a reference."""

import json
from pathlib import Path

import pytest
import sacrebleu
from small_corpus import REFERENCES, SOURCES, load

from hf_vanilla_transformer.metrics import nearest
from hf_vanilla_transformer.translation.decoding import decode
from hf_vanilla_transformer.translation.ensembles import ensemble
from hf_vanilla_transformer.translation.translator import Translator

OPTIONS = ["--max-new-tokens", "6", "--device", "cpu"]
BEAM = {"num_beams": 4, "max_new_tokens": 6}


@pytest.fixture
def both(checkpoints):
    """Two checkpoints as one model, and its tokenizer."""
    members, tokenizers = zip(*(load(name) for name in checkpoints[:2]), strict=True)
    return ensemble(members, tokenizers), tokenizers[0]


def written(name):
    return Path(name).read_text(encoding="utf-8").split("\n")[:-1]


# ---- Ensembles ----
def test_an_ensemble_translates_lines_and_many_files(vanilla_transformer, here, checkpoints, both):
    expected = [row[0].text for row in decode(*both, SOURCES, **BEAM)]
    alone = [row[0].text for row in decode(*load(checkpoints[0]), SOURCES, **BEAM)]
    assert expected != alone
    command = ["translate", "--ensemble", "--model", *checkpoints[:2], "--num-beams", "4", *OPTIONS]
    result = vanilla_transformer(*command, "--input", "source.en", "--output", "out.de")
    assert (result.code, result.err) == (0, "")
    assert written("out.de") == expected
    Path("many").mkdir()
    result = vanilla_transformer(*command, "--input", "source.en", "reference.de", "--output", "many")
    assert result.code == 0, result.err
    assert written("many/source.en") == expected
    assert len(json.loads(Path("many/.source.en.json").read_text())["model"]) == 2
    one = ["translate", "--model", checkpoints[0], "--num-beams", "4", *OPTIONS, "--input", "source.en", "reference.de"]
    refused = vanilla_transformer(*one, "--output", "many")  # files of the ensemble aren't those of one model
    assert "was made with another model" in refused.error


def test_a_translator_of_several_names(checkpoints, both):
    expected = [row[0].text for row in decode(*both, SOURCES, **BEAM)]
    translator = Translator(checkpoints[:2], "cpu")
    assert translator(SOURCES, **BEAM) == expected
    constructor, arguments = translator.__reduce__()  # as on a cluster
    assert constructor(*arguments)(SOURCES, **BEAM) == expected
    with pytest.raises(ValueError, match="can't be averaged: model 2 has another tokenizer than model 1"):
        Translator([checkpoints[0], checkpoints[2]], "cpu")
    with pytest.raises(ValueError, match="can't be averaged: 0 models"):
        Translator([], "cpu")
    with pytest.raises(ValueError, match="folders and names have their own"):
        Translator(checkpoints[:2], "cpu", tokenizer=both[1])


# ---- The nearest of an n-best list ----
LISTS = [["a cat sat on a mat", "the cat sat on the mat", "the cat"], ["ein Haus", "Häuser"], ["x", "y"]]
SENTENCES = ["the cat sat on the mats", "das Häuschen", "z"]


def test_the_nearest_is_sacrebleus():
    for name, measure in (("bleu", sacrebleu.sentence_bleu), ("chrf", sacrebleu.sentence_chrf)):
        best = [max(row, key=lambda one: measure(one, [own]).score) for row, own in zip(LISTS, SENTENCES, strict=True)]
        assert nearest(LISTS, SENTENCES, name) == best
    assert nearest(LISTS, SENTENCES)[::2] == ["the cat sat on the mat", "x"]  # of equal ones, the model's best
    assert nearest(LISTS, SENTENCES, "chrf")[1] == "Häuser"


@pytest.mark.parametrize("measure", ["bleu", "chrf"])
def test_the_nearest_translations_are_written(vanilla_transformer, here, both, checkpoints, measure):
    rows = [[one.text for one in row] for row in decode(*both, SOURCES, n_best=4, **BEAM)]
    references = [row[-1] for row in rows]
    Path("reference.de").write_text("".join(f"{one}\n" for one in references))
    command = [
        "translate",
        "--ensemble",
        "--model",
        *checkpoints[:2],
        "--num-beams",
        "4",
        *OPTIONS,
        "--input",
        "source.en",
    ]
    result = vanilla_transformer(
        *command, "--choose-by", "reference.de", "--choose-by-measure", measure, "--output", "o"
    )
    assert (result.code, result.err) == (0, "")
    assert written("o") == nearest(rows, references, measure)
    assert written("o") != [row[0] for row in rows]


def test_references_keep_to_their_lines_across_windows(vanilla_transformer, here, monkeypatch, checkpoints):
    from hf_vanilla_transformer.cli import lines

    command = ["translate", "--model", checkpoints[0], "--num-beams", "3", *OPTIONS, "--input", "source.en"]
    command += ["--choose-by", "reference.de", "--choose-by-measure", "chrf"]
    at_once = vanilla_transformer(*command).out
    monkeypatch.setattr(lines, "LINES_PER_WINDOW", 3)
    assert vanilla_transformer(*command).out == at_once
    monkeypatch.setattr(lines, "CHARACTERS_PER_WINDOW", 20)
    assert vanilla_transformer(*command).out == at_once
    assert len(at_once.splitlines()) == len(REFERENCES)


WRONG = {
    "--choose-by short --input source.en": "source.en has 4 lines, and short 1 lines; give a reference for each",
    "--choose-by short nine a": "the input has 2 sentences, and short 1 lines",
    "--choose-by nowhere --input source.en": "nowhere: no such file",
    "--choose-by reference.de --input source.en reference.de --output .": "--choose-by is for the lines of one text",
    "--choose-by-measure chrf --input source.en": "--choose-by-measure is for --choose-by; leave it out",
    "--choose-by reference.de --input source.en --output reference.de --overwrite": "is the file of another option",
    "--ensemble --input source.en": "--ensemble needs two models or more; give --model A B",
    "--ensemble nine": "nine is not a folder here",
}


@pytest.mark.parametrize("options", WRONG)
def test_a_mistake_is_told_before_a_model_is_loaded(vanilla_transformer, here, monkeypatch, checkpoints, options):
    monkeypatch.setattr(Translator, "__init__", lambda *_, **__: pytest.fail("a model is loaded"))
    Path("short").write_text("eins\n")
    result = vanilla_transformer("translate", "--model", checkpoints[0], *options.split())
    assert (result.code, result.out) == (2, "")
    assert WRONG[options] in result.error


def test_greedy_search_has_nothing_to_choose_of(vanilla_transformer, here, checkpoints):
    command = ["translate", "--model", checkpoints[0], "--greedy", *OPTIONS, "--input", "source.en"]
    result = vanilla_transformer(*command, "--choose-by", "reference.de", "--output", "out.de")
    assert result.error.endswith("--choose-by chooses of several translations; give --num-beams 2 or more")
    assert not Path("out.de").exists()
