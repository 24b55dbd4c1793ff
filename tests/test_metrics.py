"""BLEU, chrF and exact match against sacreBLEU's own command line, plain formulas and numbers computed by hand."""

import json
import math
import re
import subprocess
import sys
from collections import Counter

import pytest
import sacrebleu

from hf_vanilla_transformer.metrics import (
    by_source,
    corpus_bleu,
    measure,
    paired_bootstrap,
    split_compounds,
    top_accuracy,
)

HYPOTHESES = ["The cat sat on a mat.", "Es kostet 3,50 Euro, oder?", "", "a b c d", "Zwei Hunde spielen im Schnee ."]
REFERENCES = ["The cat sat on the mat.", "Es kostet 3,50 Euro!", "not empty", "A b c d", "Zwei Hunde laufen im Schnee."]


def sacrebleu_prints(folder, files, *arguments):
    """What the command `sacrebleu` prints of files of lines."""
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "sacrebleu", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def measured(name, hypotheses, references, **options):
    return measure([name], hypotheses, references, **options)[name]


MULTI30K = ["--tokenize", "none", "--smooth-method", "none", "--force"]
CHRF = ["--metrics", "chrf", "--chrf-word-order", "0", "--chrf-lowercase"]


@pytest.mark.parametrize(
    ("name", "options", "given"),
    [
        ("bleu", {"tokenize": "13a"}, ["--tokenize", "13a"]),
        ("bleu", {"tokenize": "intl", "lowercase": True}, ["--tokenize", "intl", "--lowercase"]),
        ("bleu", {"tokenize": "none"}, ["--tokenize", "none"]),
        ("bleu", {"tokenize": "zh", "lowercase": True}, ["--tokenize", "zh", "--lowercase"]),
        ("chrf", {"lowercase": True}, CHRF),
        ("bleu", {}, ["more"]),
    ],
)
def test_scores_agree_with_sacrebleus_command_line(tmp_path, name, options, given):
    more = ["not empty either"] * len(REFERENCES)
    references = list(zip(REFERENCES, more, strict=True)) if "more" in given else REFERENCES
    score = measured(name, HYPOTHESES, references, **options)
    files = {"hypotheses": HYPOTHESES, "references": REFERENCES, "more": more}
    printed = json.loads(sacrebleu_prints(tmp_path, files, "-i", "hypotheses", "-w", "6", "references", *given))
    assert (score.name, score.signature) == (printed["name"], printed["signature"])
    assert score.details == printed.get("verbose_score", "")
    assert score.value == pytest.approx(printed["score"], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bleu", ["--tokenize", "intl", "--lowercase", "--chrf-lowercase"]),
        ("bleu_multi30k", [*MULTI30K, "--lowercase", "--chrf-lowercase"]),
    ],
)
def test_comparisons_agree_with_sacrebleus_command_line(tmp_path, name, options):
    references = [f"{'the big dog sees ' * (1 + n % 3)}cat number {n} ." for n in range(12)]
    systems = [
        [text.replace("dog", "cat") if n % every == 0 else text for n, text in enumerate(references)]
        for every in (4, 3)
    ]
    systems.append([text.replace("number", "no") for text in references])
    files = dict(zip(("references", "a", "b", "c"), (references, *systems), strict=True))
    compared = ("-m", "bleu", "chrf", "--paired-bs", "--format", "text")
    printed = sacrebleu_prints(tmp_path, files, "references", "-i", "a", "b", "c", *compared, *options)
    names = ["bleu_compound_split", "bleu", "bleu_multi30k", "chrf"]  # each as if it were alone
    compared = paired_bootstrap(systems, references, names=names, tokenize="intl", lowercase=True)
    found = [[dict(zip(names, row, strict=True))[one] for one in (name, "chrf")] for row in compared]
    p_values = [f"{one.p_value:.4f}" for system in found for one in system]
    assert p_values == re.findall(r"p = ([0-9.]+)", printed)
    assert len(set(p_values)) > 1
    assert [one.name for one in compared[0]] == ["bleu_compound_split", "BLEU", "bleu_multi30k", "chrF2"]
    for scored, one in zip(("BLEU", "chrF2"), found[0], strict=True):
        assert re.search(rf"- {scored} +{re.escape(one.signature)}$", printed, re.MULTILINE)


def test_equal_systems_do_not_differ():
    references = [f"the big dog sees cat number {n} ." for n in range(12)]
    spaced = [f"{references[0]} ", *references[1:]]  # which neither score sees
    equal, same, worse = paired_bootstrap([references, references, spaced, [*references[1:], "a b c d e"]], references)
    assert [one.p_value for one in equal] == [one.p_value for one in same] == [1.0, 1.0]
    assert max(one.p_value for one in worse) < 0.05


# ---- BLEU of older papers ----
def _multi_bleu(hypotheses, references):
    """What Moses' multi-bleu.perl computes, in plain Python: words are what white space parts, nothing is smoothed."""
    correct, total, lengths = [0] * 4, [0] * 4, [0, 0]
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        sides = hypothesis.split(), reference.split()
        lengths = [length + len(words) for length, words in zip(lengths, sides, strict=True)]
        for order in range(4):
            ours, theirs = (Counter(zip(*(words[i:] for i in range(order + 1)), strict=False)) for words in sides)
            correct[order] += sum((ours & theirs).values())
            total[order] += sum(ours.values())
    if 0 in correct:
        return 0.0
    brevity = min(0.0, 1 - lengths[1] / lengths[0])
    return 100 * math.exp(brevity + sum(math.log(c / t) for c, t in zip(correct, total, strict=True)) / 4)


AT = " ##AT##-##AT## "
# "=" where the paper's rule splits a hyphen.
MARKED = [
    ("Ein Mann mit blau=weißer Mütze steht auf der Straße .", "ein Mann in blau=weißer Mütze steht auf der Straße ."),
    ("Zwei T=Shirt=Träger laufen 100=mal um den See .", "Zwei T=Shirt=Träger liefen 100=mal um einen See ."),
    ("Das ist ein Test - nichts weiter .", "Das ist ein Test - und nichts weiter ."),
    ("", "Er lacht ."),
]
SIDES = [[pair[side].replace("=", "-") for pair in MARKED] for side in (0, 1)]
SPLIT_SIDES = [[pair[side].replace("=", AT) for pair in MARKED] for side in (0, 1)]


def test_multi30k_bleu_is_multi_bleu_of_lower_cased_words():
    score = measured("bleu_multi30k", *SIDES)
    assert score.value == pytest.approx(_multi_bleu(*([text.lower() for text in side] for side in SIDES)), abs=1e-6)
    assert score.value > _multi_bleu(*SIDES) > 10
    assert score.name == "BLEU"
    assert re.fullmatch(r"nrefs:1\|case:lc\|eff:no\|tok:none\|smooth:none\|version:[\d.]+", score.signature)


def test_compound_split_bleu_is_multi_bleu_of_split_words():
    score = measured("bleu_compound_split", *SIDES, tokenize="none")
    assert score.value == pytest.approx(_multi_bleu(*SPLIT_SIDES), abs=1e-6)
    assert score.value > _multi_bleu(*SIDES) + 1
    signature = r"nrefs:1\|case:mixed\|eff:no\|tok:none\+compound-split\|smooth:none\|version:[\d.]+"
    assert re.fullmatch(signature, score.signature)


@pytest.mark.parametrize("tokenize", ["13a", "intl"])
def test_compound_split_bleu_parts_the_words_of_plain_text_first(tokenize):
    hypotheses, references = ["A rich-text format, not 3-4 others."], ["A rich-text format; not 3-4 others."]
    score = measured("bleu_compound_split", hypotheses, references, tokenize=tokenize)
    tokenised = [[f"A rich{AT}text format {mark} not 3{AT}4 others ."] for mark in ",;"]
    assert score.value == pytest.approx(_multi_bleu(*tokenised), abs=1e-6)
    assert f"|tok:{tokenize}+compound-split|" in score.signature


@pytest.mark.parametrize("name", ["bleu_multi30k", "bleu_compound_split"])
def test_bleu_of_older_papers_is_not_smoothed(name):
    # No 4-gram in common: multi-bleu.perl says 0, where sacreBLEU's smoothing counts half of one.
    assert measured(name, ["a b c x e f"], ["a b c d e f"]).value == 0
    assert measured(name, ["a b c"], ["a b c"]).value == 0


COMPOUNDS = {
    "rich-text format": f"rich{AT}text format",
    "ab-cd-ef": f"ab{AT}cd{AT}ef",
    "a-b-c": f"a{AT}b-c",  # the match took b, and nothing is left before the second hyphen
    "a-b-c-d": f"a{AT}b-c{AT}d",
    "T-Shirt-Träger": f"T{AT}Shirt{AT}Träger",
    "ü-ö-ä": f"ü{AT}ö{AT}ä",  # two bytes a letter, each hyphen has its own
    "a--b": f"a{AT}-b",
    "---": f"-{AT}-",
    "----": f"-{AT}--",
    "-a b- - c": "-a b- - c",
    "3-4 , x-": f"3{AT}4 , x-",
    "a\u00a0-b": f"a\u00a0{AT}b",  # no white space to perl's bytes
    "a\t-b": "a\t-b",
    "": "",
}


@pytest.mark.parametrize("text", COMPOUNDS)
def test_compounds_by_hand(text):
    assert split_compounds(text) == COMPOUNDS[text]


# ---- Errors of symbols ----
def test_errors_are_edits_per_symbol_of_the_corpus():
    # Edits of symbols: one replaced, two left out, one too many, none. Of characters: "97" for "k" are two.
    hypotheses, references = ["a k", "t͡ɕ", "k k k", "97"], ["a 97", "k a t͡ɕ", "k k", "97"]
    scores = measure(["wer", "exact_match", "ser", "cer"], hypotheses, references, symbols=str.split)
    assert (scores["wer"].value, scores["exact_match"].value) == (75, 25)
    assert scores["ser"].value == pytest.approx(100 * (1 + 2 + 1 + 0) / (2 + 3 + 2 + 1))
    assert scores["cer"].value == pytest.approx(100 * (2 + 4 + 2 + 0) / (4 + 7 + 3 + 2))
    signature = f"nrefs:1|unit:symbol|version:{sacrebleu.__version__}"
    assert (scores["ser"].name, scores["ser"].signature) == ("SER", signature)


def test_the_reference_with_the_fewest_errors_counts():
    hypotheses, references = ["a b", "x", ""], [["a c d", "b a b c"], ["x", "y"], ["q r"]]
    scores = measure(["ser", "wer", "cer"], hypotheses, references)
    assert scores["ser"].value == pytest.approx(100 * (2 + 0 + 2) / (4 + 1 + 2))  # two edits each: the longer one
    assert scores["wer"].value == pytest.approx(200 / 3)
    assert measured("exact_match", hypotheses, references).value == pytest.approx(100 / 3)
    assert scores["wer"].signature.startswith("nrefs:var|")
    with_white_space = measure(["exact_match"], ["a  b "], ["a b"], symbols=str.split)
    assert with_white_space["exact_match"].value == 100
    assert measured("exact_match", ["a  b "], ["a b"]).value == 0
    assert measure(["ser"], [""], [""])["ser"].value == 0
    assert measured("bleu", REFERENCES, REFERENCES).value == 100  # sacreBLEU's is 100.00000000000004
    alone, beside_nothing = (
        measured("bleu", ["a b c d"], [own]) for own in (["a b c d e f g h"], ["a b c d e f g h", ""])
    )
    assert (alone.value, beside_nothing) == (pytest.approx(100 * math.exp(1 - 8 / 4)), alone)


def test_an_unknown_token_is_one_character_and_text_to_bleu_and_chrf():
    """So that the command `sacrebleu` prints the same of the written translations."""
    names, hypotheses, references = ["bleu", "chrf", "cer"], ["a<unk>c"] * 10, ["abc"] * 10
    plain, found = (measure(names, hypotheses, references, unknown=one) for one in (None, "<unk>"))
    assert (plain["cer"].value, found["cer"].value) == pytest.approx((500 / 3, 100 / 3))
    assert (found["bleu"], found["chrf"]) == (plain["bleu"], plain["chrf"])
    ((compared,),) = paired_bootstrap([["axc"] * 10, hypotheses], references, names=["cer"], unknown="<unk>")
    assert compared.p_value == 1


def test_several_references_of_a_source_and_the_first_ones_of_a_list():
    found = by_source(["read", "lead", "read", "read"], ["r iː d", "l ɛ d", "r ɛ d", "r iː d"])
    assert found == ([0, 1], [["r iː d", "r ɛ d"], ["l ɛ d"]])
    lists, references = [["a", "b", "c"], ["d"], ["x", "y  z"]], [["c"], ["d", "e"], ["y z"]]
    shares = {count: top_accuracy(lists, references, count, symbols=str.split).value for count in (1, 2, 3)}
    assert shares == pytest.approx({1: 100 / 3, 2: 200 / 3, 3: 100})
    assert top_accuracy(lists, references, 3).name == "top 3"


def test_errors_are_compared_by_resampling():
    references = [f"{n} a" for n in range(60)]
    better = [*references[:50], *["x"] * 10]
    worse = [*references[:20], *["x"] * 40]
    (rows,) = paired_bootstrap([worse, better], references, names=["wer", "ser"])
    assert [one.name for one in rows] == ["WER", "SER"]
    assert all(one.p_value < 0.01 for one in rows)
    assert "unit:text" in rows[0].signature


# ---- What goes wrong ----
def test_unknown_names_and_sources_of_another_number():
    with pytest.raises(ValueError, match="no measure 'wre'; give some of bleu, bleu_multi30k"):
        measure(["wre"], ["a"], ["a"])
    with pytest.raises(ValueError, match="1 sources for 2 hypotheses; give one for each"):
        measure(["wer"], ["a", "b"], ["a", "b"], sources=["s"])
    with pytest.raises(ValueError, match=r"unknown tokenize='moses'; sacreBLEU has 'none', .*'13a'"):
        corpus_bleu(["a"], ["a"], tokenize="moses")


@pytest.mark.parametrize(
    ("hypotheses", "references", "error", "message"),
    [
        (["a", "b"], ["a"], ValueError, "2 hypotheses but 1 references; give one"),
        ([], [], ValueError, "empty; a score needs at least one sentence"),
        ("a b", ["a b"], TypeError, r"hypotheses is a str; give a list of strings, \[text\]"),
        (["a b"], "a b", TypeError, "references is a str"),
        (["a"], [[]], ValueError, "1 hypotheses but 0 references"),
    ],
)
def test_wrong_input_names_what_is_wrong(hypotheses, references, error, message):
    with pytest.raises(error, match=message):
        measure(["bleu"], hypotheses, references)
