"""`vanilla-transformer translate` for a teacher's corpus: an ensemble, and the translation nearest to a reference."""

import json
import pickle
from pathlib import Path

import pytest
import sacrebleu
from small_corpus import SOURCES, load

from hf_vanilla_transformer.cli import lines
from hf_vanilla_transformer.metrics import nearest
from hf_vanilla_transformer.translation.ensembles import ensemble
from hf_vanilla_transformer.translation.translator import Translator
from tests.decoding import decode

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
    refused = vanilla_transformer(*command, "--tokenizer", "x", "--input", "source.en", "--output", "many")
    assert "was made with another tokenizer (None, not x)" in refused.error


def test_a_translator_of_several_names(checkpoints, both):
    expected = [row[0].text for row in decode(*both, SOURCES, **BEAM)]
    translator = Translator(checkpoints[:2], "cpu")
    assert translator(SOURCES, **BEAM) == expected
    assert pickle.loads(pickle.dumps(translator))(SOURCES, **BEAM) == expected  # as on a cluster
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
def test_the_nearest_translations_are_written_line_by_line_across_windows(
    vanilla_transformer, here, monkeypatch, both, checkpoints, measure
):
    rows = [[one.text for one in row] for row in decode(*both, SOURCES, n_best=4, **BEAM)]
    references = [row[-1] for row in rows]
    Path("reference.de").write_text("".join(f"{one}\n" for one in references))
    command = ["translate", "--ensemble", "--model", *checkpoints[:2], "--num-beams", 4, *OPTIONS, "--overwrite"]
    command += ["--input", "source.en", "--choose-by", "reference.de", "--choose-by-measure", measure, "--output", "o"]
    for limit, value in (("LINES_PER_WINDOW", 5_000), ("LINES_PER_WINDOW", 3), ("CHARACTERS_PER_WINDOW", 20)):
        monkeypatch.setattr(lines, limit, value)
        result = vanilla_transformer(*command)
        assert (result.code, result.err) == (0, "")
        assert written("o") == nearest(rows, references, measure)
    assert written("o") != [row[0] for row in rows]
    result = vanilla_transformer(*command, "--max-source-tokens", 9)
    assert "is translated in 2 pieces, so --choose-by has a single translation to choose from" in result.err
