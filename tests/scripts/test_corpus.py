"""The embedded corpus: German and English checked by hand, and what a split must keep apart."""

import random
import re
import sys

import pytest
from rapidfuzz.distance import Levenshtein

from scripts.quickstart import corpus
from scripts.quickstart.corpus import FRAMES, MAX_PAIRS, PHRASES, TABLES, UNSEEN, generate_pairs, split_pairs

WORDS = {
    "cardinal": {
        0: ("zero", "null"),
        21: ("twenty-one", "einundzwanzig"),
        101: ("one hundred and one", "einhunderteins"),
        312: ("three hundred and twelve", "dreihundertzwölf"),
        4_217: ("four thousand two hundred and seventeen", "viertausendzweihundertsiebzehn"),
    },
    "year": {
        1850: ("eighteen fifty", "achtzehnhundertfünfzig"),
        1905: ("nineteen oh five", "neunzehnhundertfünf"),
        2007: ("two thousand and seven", "zweitausendsieben"),
        2024: ("twenty twenty-four", "zweitausendvierundzwanzig"),
    },
    "ordinal": {1: ("first", "erste"), 3: ("third", "dritte"), 21: ("twenty-first", "einundzwanzigste")},
}


@pytest.fixture(scope="module")
def pairs():
    return generate_pairs(3_000, seed=3)


@pytest.fixture(scope="module")
def drawn():
    """Pairs as they come, with repeats, so that a second translation of a sentence would show."""
    rng = random.Random(11)
    return {category: [corpus.draw_pair(category, rng) for _ in range(500)] for category in FRAMES}


def phrases(kind, number=3_000):
    """What a slot is filled with, as a mapping."""
    rng = random.Random(5)
    return dict(PHRASES[kind](rng) for _ in range(number))


@pytest.mark.parametrize("kind", WORDS)
def test_numbers_in_words(kind):
    assert {number: corpus._words(number, kind) for number in WORDS[kind]} == WORDS[kind]


def test_money_and_counts_in_words():
    amounts = phrases("money", 6_000)
    assert amounts["twenty-three euros"] == "dreiundzwanzig Euro"
    assert (amounts["€30"], amounts["€30.00"]) == ("30 €", "30,00 €")
    assert any(german.endswith(" Pfund und zwölf Pence") for german in amounts.values())
    assert not any(re.search(r"eins (Euro|Dollar|Pfund|Cent|Pence)", german) for german in amounts.values())
    assert set(phrases("count").values()) == {corpus._words(number)[1] for number in range(2, 100)}


def test_ordinals_are_declined():
    nominative, genitive = phrases("nominative"), phrases("genitive")
    assert nominative["the twenty-first letter"] == "der einundzwanzigste Brief"
    assert nominative["the twenty-first page"] == "die einundzwanzigste Seite"
    assert genitive["the twenty-first letter"] == "des einundzwanzigsten Briefes"
    assert genitive["the twenty-first page"] == "der einundzwanzigsten Seite"


MONDAY = ("on Monday", "am Montag")
HALF_SIX = ("half past six", "halb sieben")
SENTENCES = [  # category, beginning of its frame, what fills it (a table is picked from by the English word), sentences
    ("numbers", "{label}", {"label": "room", "low_number": ("twelve", "zwölf")}, "room twelve", "Zimmer zwölf"),
    ("dates", "from", {"day": ("May 3rd", "3. Mai")}, "from May 3rd to May 3rd", "vom 3. Mai bis zum 3. Mai"),
    ("money", "{who} owe", {"who": "Anna", "money": ("$5.10", "5,10 $")},
     "Anna owes $5.10.", "Anna schuldet 5,10 $."),
    ("percentages", "{market} {rise[1]}",
     {"market": "rents", "rise": "fall", "percent": ("9.5%", "9,5 %"), "year": ("2007", "2007")},
     "Rents fell by 9.5% in 2007.", "Die Mieten sind im Jahr 2007 um 9,5 % gefallen."),
    ("durations", "{who} have", {"who": "she", "city": "Vienna", "count": ("two", "zwei"), "unit": "years"},
     "She has lived in Vienna for two years.", "Sie wohnt seit zwei Jahren in Wien."),
    ("modals", "{who} {modal[0]} {pay[0]} {money} {when}",
     {"who": "I", "modal": "have", "pay": "pay", "when": MONDAY,
      "money": ("twenty-three euros", "dreiundzwanzig Euro")},
     "I have to pay twenty-three euros on Monday.", "Am Montag muss ich dreiundzwanzig Euro bezahlen."),
    ("schedules", "{who}", {"who": "Peter", "get_up": "get up", "time": HALF_SIX, "maybe_when": MONDAY},
     "Peter gets up at half past six on Monday.", "Peter steht am Montag um halb sieben auf."),
    ("subordinates", "because", {"who": "we", "get_up": "get up", "time": HALF_SIX},
     "because we get up at half past six", "weil wir um halb sieben aufstehen"),
    ("perfects", "{who} {buy[1]}",
     {"who": "my sister", "buy": "buy", "count": ("two", "zwei"), "thing": "eggs", "maybe_when_past": MONDAY},
     "My sister bought two eggs on Monday.", "Meine Schwester hat am Montag zwei Eier gekauft."),
    ("questions", "{modal[1]} {who} {modal[2]} {buy[0]}",
     {"modal": "have", "who": "my brother", "buy": "bring", "count": ("two", "zwei"), "thing": "cups",
      "maybe_when": MONDAY},
     "Does my brother have to bring two cups on Monday?", "Muss mein Bruder am Montag zwei Tassen mitbringen?"),
    ("negations", "{who} {modal[3]} {buy[0]} any {thing}.",
     {"who": "Anna", "modal": "can", "buy": "bring", "thing": "eggs"},
     "Anna can't bring any eggs.", "Anna kann keine Eier mitbringen."),
    ("greetings", "{hello}{name}{mark}", {"hello": "thank you very", "name": ", Mr. Becker", "mark": "."},
     "Thank you very much, Mr. Becker.", "Vielen Dank, Herr Becker."),
]  # fmt: skip


def pick(kind, english):
    """The entry of a table that begins with the English words."""
    for words, entry in TABLES[kind].items():
        if (words if isinstance(words, str) else words[0]).startswith(english):
            return words, entry


@pytest.mark.parametrize(("category", "beginning", "slots", "english", "german"), SENTENCES)
def test_sentences(category, beginning, slots, english, german, monkeypatch):
    (frame,) = [item for item in FRAMES[category].items() if item[0].startswith(beginning)]
    chosen = {kind: pick(kind, words) if isinstance(words, str) else words for kind, words in slots.items()}
    monkeypatch.setitem(FRAMES, category, dict([frame]))
    monkeypatch.setattr(corpus, "_phrase", lambda kind, rng: chosen[kind])
    assert corpus.draw_pair(category, random.Random(0)) == (english, german)


def test_sentences_are_well_formed_and_have_one_translation_in_both_directions(drawn):
    german_of, english_of = {}, {}
    for english, german in (pair for pairs in drawn.values() for pair in pairs):
        assert german_of.setdefault(english, german) == german
        assert english_of.setdefault(german, english) == english
        assert not re.search(r"[{}/\[\]|]|\s\s|^\s|\s$|\s[.,?!]", german)
        assert not re.search(r"[{}\[\]|]|[a-z]/|\s\s|^\s|\s$|\s[.,?!]", english)
        assert "\u00a0" not in german
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
    assert sorted(pair for part in parts.values() for pair in part) == sorted(pairs)
    for side in (0, 1):
        train, validation, test = ({pair[side] for pair in part} for part in parts.values())
        assert not train & validation
        assert not train & test
        assert not validation & test


REPEATED = [("a", "x"), ("a", "y"), ("b", "z")]


@pytest.mark.parametrize(
    ("pairs", "numbers", "message"),
    [
        (REPEATED, (-1, 1), "negative"),
        (REPEATED[1:], (1, 1), "leave none of 2"),
        (REPEATED, (1, 1), "occurs twice"),
        *((None, (number,), f"num_pairs is {number}, .* between 1 and {MAX_PAIRS}") for number in (0, MAX_PAIRS + 1)),
    ],
)
def test_impossible_numbers_and_splits(pairs, numbers, message):
    with pytest.raises(ValueError, match=message):
        split_pairs(pairs, *numbers) if pairs else generate_pairs(*numbers)
