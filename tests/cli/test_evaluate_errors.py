"""`evaluate --errors`: the wrong lines, and which symbols or words are confused."""

import json
from pathlib import Path

import pytest

from hf_vanilla_transformer.cli import evaluate
from hf_vanilla_transformer.metrics import edits, measure
from hf_vanilla_transformer.translation.evaluation import EvaluationResult, Measures


@pytest.mark.parametrize(
    ("prediction", "references", "symbols", "expected"),
    [
        ("a b c", ["a b c"], None, ("a b c", [])),
        ("θ o t", ["θ ɔ t"], None, ("θ ɔ t", [("ɔ", "o")])),
        ("θ t t", ["θ ɔ t t"], None, ("θ ɔ t t", [("ɔ", None)])),
        ("a b c", ["a c"], None, ("a c", [(None, "b")])),
        ("", ["a b"], None, ("a b", [("a", None), ("b", None)])),
        ("ab", ["a b"], list, ("a b", [(" ", None)])),
        ("a b c", ["x y z", "a b", "a b c d"], None, ("a b c d", [("d", None)])),  # of the nearest, the longest
    ],
)
def test_edits_are_those_that_ser_counts(prediction, references, symbols, expected):
    assert edits(prediction, references, symbols) == expected
    reference, pairs = expected
    units = len((symbols or str.split)(reference))
    ser = measure(["ser"], [prediction], [references], symbols=symbols)["ser"].value
    assert ser == pytest.approx(100 * len(pairs) / units)


def result_of(translations, symbols=None):
    return EvaluationResult({}, translations, 4, 0, None, {}, Measures(("ser",), symbols=symbols), None)


SOURCES = ["walk\tV;PST", "talk", "talk", "go"]
PREDICTIONS = ["w o k t", "t o k", "unread", "g ￼"]
REFERENCES = [["w ɔ k t"], ["t ɔ l k"], ["t ɔ k"], ["g oʊ"]]


def test_lines_that_are_measured_have_errors_and_the_most_frequent_come_first():
    errors = evaluate._errors(result_of(PREDICTIONS, str.split), SOURCES, REFERENCES)
    assert [line for line, _ in errors] == [
        {"source": "walk\tV;PST", "prediction": "w o k t", "reference": "w ɔ k t", "edits": 1},
        {"source": "talk", "prediction": "t o k", "reference": "t ɔ k", "edits": 1},  # nearest of both references
        {"source": "go", "prediction": "g ￼", "reference": "g oʊ", "edits": 1},
    ]
    report = evaluate._confusions(errors).splitlines()
    assert report[:3] == [
        "wrong: 3 lines, by 3 edits of 2 kinds",
        "expected -> predicted  times",
        "'ɔ' -> 'o'                 2",
    ]
    assert report[3].startswith("'oʊ' -> <unk>")
    assert evaluate._confusions([]).startswith("wrong: 0 lines, by 0 edits of 0 kinds\n")


OPTIONS = ["--source", "source.en", "--reference", "reference.de", "--num-beams", "1", "--max-new-tokens", "6"]


@pytest.mark.parametrize("name", ["errors.tsv", "errors.jsonl"])
def test_a_file_has_the_wrong_lines(vanilla_transformer, here, checkpoints, name):
    given = ["--model", checkpoints[0], *OPTIONS]
    result = vanilla_transformer("evaluate", *given, "--errors", name, "--output", "found.de")
    assert result.code == 0, result.err
    predictions = Path("found.de").read_text(encoding="utf-8").split("\n")[:-1]
    sources, references = (Path(file).read_text(encoding="utf-8").split("\n") for file in ("source.en", "reference.de"))
    text = Path(name).read_text(encoding="utf-8")
    if name.endswith(".tsv"):
        header, *rows = [line.split("\t") for line in text.splitlines()]
        assert header == ["source", "prediction", "reference", "edits"]
    else:
        rows = [[str(cell) for cell in json.loads(line).values()] for line in text.splitlines()]
    wrong = [place for place, own in enumerate(predictions) if own.split() != references[place].split()]
    assert [row[:3] for row in rows] == [[sources[place], predictions[place], references[place]] for place in wrong]
    assert wrong
    total = sum(int(row[3]) for row in rows)
    assert f"wrong: {len(wrong)} lines, by {total} edits" in result.out
    assert f"wrote {name}" in result.out
