"""The embedded corpus: German and English checked by hand, and what a split must keep apart."""

import random
import re
import sys

import pytest
from rapidfuzz.distance import Levenshtein

from scripts.quickstart import corpus
from scripts.quickstart.corpus import FRAMES, MAX_PAIRS, UNSEEN, generate_pairs, split_pairs

CHECKED = {  # by hand, of each category
    "Twenty-seven plus zero is twenty-seven.": "Siebenundzwanzig plus null ist siebenundzwanzig.",
    "Twenty-two plus eighty-seven is one hundred and nine.": "Zweiundzwanzig plus siebenundachtzig ist einhundertneun.",
    "in eighteen fifty": "im Jahr achtzehnhundertfünfzig",
    "The station was built in nineteen oh five.": "Der Bahnhof wurde im Jahr neunzehnhundertfünf gebaut.",
    "I was born in two thousand and nine.": "Ich wurde im Jahr zweitausendneun geboren.",
    "from February 18th to May 17th": "vom 18. Februar bis zum 17. Mai",
    "from ten past five to a quarter past three": "von zehn nach fünf bis Viertel nach drei",
    "It is 2:57 PM.": "Es ist 14:57 Uhr.",
    "We have to pay €66.25.": "Wir müssen 66,25 € bezahlen.",
    "She owes £8,350.": "Sie schuldet 8.350 £.",
    "Paul owes fifty-one euros and sixty-nine cents.": "Paul schuldet einundfünfzig Euro und neunundsechzig Cent.",
    "the ninety-third day": "der dreiundneunzigste Tag",
    "the end of the first song": "das Ende des ersten Liedes",
    "after the thirty-third week": "nach der dreiunddreißigsten Woche",
    "Peter describes the seventy-first part.": "Peter beschreibt den einundsiebzigsten Teil.",
    "Prices fell by 11% in twenty seventeen.": "Die Preise sind im Jahr zweitausendsiebzehn um 11 % gefallen.",
    "Paul has lived in Berlin for thirty-eight months.": "Paul wohnt seit achtunddreißig Monaten in Berlin.",
    "Paul has to pay seventy euros on Tuesday.": "Am Dienstag muss Paul siebzig Euro bezahlen.",
    "He gets up at three o'clock on July 8th.": "Er steht am 8. Juli um drei Uhr auf.",
    "because Maria gets up at ten past seven": "weil Maria um zehn nach sieben aufsteht",
    "My brother bought eighty lemons on Tuesday.": "Mein Bruder hat am Dienstag achtzig Zitronen gekauft.",
    "Paul travels to Prague by train on Thursday.": "Paul reist am Donnerstag mit dem Zug nach Prag.",
    "Does she have to bring sixty-eight apples on Sunday?": "Muss sie am Sonntag achtundsechzig Äpfel mitbringen?",
    "I didn't order any lemons on Tuesday.": "Ich habe am Dienstag keine Zitronen bestellt.",
    "Thank you very much, Mr. Wagner! It is six o'clock.": "Vielen Dank, Herr Wagner! Es ist sechs Uhr.",
}


@pytest.fixture(scope="module")
def pairs():
    return generate_pairs(3_000, seed=3)


@pytest.fixture(scope="module")
def drawn():
    """Pairs as they come, with repeats, so that a second translation of a sentence would show."""
    rng = random.Random(11)
    return {category: [corpus.draw_pair(category, rng) for _ in range(500)] for category in FRAMES}


def test_sentences(drawn):
    found = dict(pair for pairs in drawn.values() for pair in pairs)
    assert {english: found.get(english) for english in CHECKED} == CHECKED


def test_sentences_are_well_formed_and_have_one_translation_in_both_directions(drawn):
    german_of, english_of = {}, {}
    for english, german in (pair for pairs in drawn.values() for pair in pairs):
        assert german_of.setdefault(english, german) == german
        assert english_of.setdefault(german, english) == english
        assert not re.search(r"[{}/\[\]|]|\s\s|^\s|\s$|\s[.,?!]", german)
        assert not re.search(r"[{}\[\]|]|[a-z]/|\s\s|^\s|\s$|\s[.,?!]", english)
        assert not re.search(r"\u00a0|eins (Euro|Dollar|Pfund|Cent|Pence)", german)
        for side in (english, german):
            assert side[-1] not in ".?!" or side[0].isupper()
        assert (english[-1] in ".?!") == (german[-1] in ".?!")
        assert len(english.split()) <= 18


def test_pairs_are_distinct_in_both_languages_and_fewer_are_the_beginning_of_more(pairs):
    assert [len(set(side)) for side in zip(*pairs, strict=True)] == [3_000, 3_000]
    assert generate_pairs(100, seed=3) == pairs[:100]
    assert generate_pairs(100, seed=4) != pairs[:100]


def words_of(text):
    return re.findall(r"[^\s.,?!]+(?:[.,][^\s.,?!]+)*", text.lower())


@pytest.mark.hard
def test_the_corpus_has_no_copy_of_the_unseen_sentences_with_less_than_two_words_changed():
    for unseen, texts in zip(zip(*UNSEEN.items(), strict=True), zip(*generate_pairs(), strict=True), strict=True):
        lines = [words_of(text) for text in texts]
        for words in map(words_of, unseen):
            assert min(Levenshtein.distance(words, line) for line in lines if abs(len(words) - len(line)) <= 1) >= 2


@pytest.mark.parametrize("module", ["num2words", "babel.dates", "babel.numbers"])
def test_missing_dependency_names_the_command(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"run pip install '\.\[train\]' in a checkout"):
        generate_pairs(1)


def test_split_keeps_sentences_apart(pairs):
    parts = split_pairs(pairs, 500, 700, seed=1)
    assert list(parts) == ["train", "validation", "test"]
    assert [len(part) for part in parts.values()] == [1_800, 500, 700]
    assert sorted(pair for part in parts.values() for pair in part) == sorted(pairs)  # whose sentences are distinct


def test_impossible_numbers_and_splits(pairs):
    for number in (0, MAX_PAIRS + 1):
        with pytest.raises(ValueError, match=f"num_pairs is {number}, .* between 1 and {MAX_PAIRS}"):
            generate_pairs(number)
    for sizes in ((-1, 1), (1, -1), (1_000, 2_000)):
        with pytest.raises(ValueError, match="can't be taken from 3000 pairs"):
            split_pairs(pairs, *sizes)
