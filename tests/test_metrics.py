"""BLEU, chrF and exact match against sacreBLEU's own command line and against numbers computed by hand."""

import json
import math
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest

from hf_vanilla_transformer.metrics import Score, corpus_bleu, corpus_chrf, exact_match

HYPOTHESES = ["The cat sat on a mat.", "Es kostet 3,50 Euro, oder?", "", "a b c d", "Zwei Hunde spielen im Schnee ."]
REFERENCES = [
    "The cat sat on the mat.",
    "Es kostet 3,50 Euro!",
    "not empty",
    "A b c d",
    "Zwei Hunde laufen im Schnee.",
]


def _command_line(tmp_path, *options):
    """What `sacrebleu` prints for the corpus: (name, score, signature)."""
    for name, lines in (("hypotheses", HYPOTHESES), ("references", REFERENCES)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", "references", "-i", "hypotheses", "-w", "6", *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    printed = json.loads(result.stdout)
    return printed["name"], printed["score"], printed["signature"]


@pytest.mark.parametrize("tokenize", ["13a", "intl", "char", "none", "zh"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_bleu_agrees_with_sacrebleus_command_line(tmp_path, tokenize, lowercase):
    score = corpus_bleu(HYPOTHESES, REFERENCES, tokenize=tokenize, lowercase=lowercase)
    name, value, signature = _command_line(tmp_path, "--tokenize", tokenize, *(["--lowercase"] if lowercase else []))
    assert (score.name, score.signature) == (name, signature)
    assert score.value == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("word_order", [0, 2])
@pytest.mark.parametrize("lowercase", [False, True])
def test_chrf_agrees_with_sacrebleus_command_line(tmp_path, word_order, lowercase):
    score = corpus_chrf(HYPOTHESES, REFERENCES, word_order=word_order, lowercase=lowercase)
    options = ["--metrics", "chrf", "--chrf-word-order", str(word_order), *(["--chrf-lowercase"] if lowercase else [])]
    name, value, signature = _command_line(tmp_path, *options)
    assert (score.name, score.signature) == (name, signature)
    assert score.value == pytest.approx(value, abs=1e-6)


def test_bleu_by_hand():
    # 5 words of the reference's 6: n-gram precisions 5/5, 4/4, 3/3, 2/2, brevity penalty exp(1 - 6/5).
    assert corpus_bleu(["a b c d e"], ["a b c d e f"]).value == pytest.approx(100 * math.exp(1 - 6 / 5))
    # The first of 6 words differs: precisions 5/6, 4/5, 3/4, 2/3, no brevity penalty.
    by_hand = (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** (1 / 4)
    assert corpus_bleu(["x b c d e f"], ["a b c d e f"]).value == pytest.approx(100 * by_hand)
    # The fourth differs: 5/6, 3/5, 1/4 and no 4-gram of 3, which exponential smoothing counts as 1/2.
    by_hand = (5 / 6 * 3 / 5 * 1 / 4 * (1 / 2) / 3) ** (1 / 4)
    assert corpus_bleu(["a b c x e f"], ["a b c d e f"]).value == pytest.approx(100 * by_hand)


def test_bleu_is_of_the_corpus_and_not_the_mean_over_sentences():
    hypotheses, references = ["a b c d e", "x y z w"], ["a b c d e", "a b c d"]
    # Matches over both sentences: 5/9, 4/7, 3/5, 2/3.
    assert corpus_bleu(hypotheses, references).value == pytest.approx(100 * (5 / 9 * 4 / 7 * 3 / 5 * 2 / 3) ** 0.25)


def test_chrf_by_hand():
    # Characters a, b of a, c: precision and recall 1/2 for unigrams, 0 for bigrams. sacreBLEU averages over the orders
    # that both sides have, two here, then takes F2.
    assert corpus_chrf(["ab"], ["ac"]).value == pytest.approx(100 * 0.5 / 2)


@pytest.mark.parametrize("metric", [corpus_bleu, corpus_chrf])
def test_a_perfect_corpus_scores_100_and_an_empty_translation_0(metric):
    assert metric(REFERENCES, REFERENCES).value == pytest.approx(100)
    assert metric([""], ["a b c d e"]).value == 0


def test_score_prints_value_and_signature_and_cannot_be_changed():
    score = corpus_bleu(REFERENCES, REFERENCES)
    assert str(score) == f"BLEU 100.00 ({score.signature})"
    assert score.signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert str(Score("chrF2", 12.3456, "nrefs:1")) == "chrF2 12.35 (nrefs:1)"
    with pytest.raises(FrozenInstanceError):
        score.value = 0.0


def test_exact_match_is_a_percentage_of_identical_strings():
    assert exact_match(["a", "b", "c "], ["a", "B", "c"]) == pytest.approx(100 / 3)
    assert exact_match(("a",), ("a",)) == 100.0
    assert exact_match(["a"], ["b"]) == 0.0


METRICS = [corpus_bleu, corpus_chrf, exact_match]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(
    ("hypotheses", "references", "error", "message"),
    [
        (["a", "b"], ["a"], ValueError, "2 hypotheses but 1 references; give each"),
        ([], [], ValueError, "empty; a score needs at least one sentence"),
        ("a b", ["a b"], TypeError, r"hypotheses is a str; give a list of strings, \[text\]"),
        (["a b"], "a b", TypeError, "references is a str"),
        (["a b"], b"a b", TypeError, "references is a bytes"),
        ({"a"}, ["a"], TypeError, "hypotheses is a set"),
        (["a"], {"a": 1}, TypeError, "references is a dict"),
        (["a"], None, TypeError, "references is a NoneType"),
        (["a", None], ["a", "b"], TypeError, r"hypotheses\[1\] is a NoneType; every entry must be a string"),
        (["a"], [["a"]], TypeError, r"references\[0\] is a list; every entry"),
    ],
)
def test_wrong_input_names_what_is_wrong(metric, hypotheses, references, error, message):
    with pytest.raises(error, match=message):
        metric(hypotheses, references)


def test_unknown_tokenizer_names_those_that_exist():
    with pytest.raises(ValueError, match=r"unknown tokenize='moses'; sacreBLEU has 'none', .*'13a'"):
        corpus_bleu(["a"], ["a"], tokenize="moses")


def test_negative_word_order_is_refused():
    with pytest.raises(ValueError, match="word_order is -1; it must be 0"):
        corpus_chrf(["a"], ["a"], word_order=-1)
