"""The embedded corpus: German and English checked by hand, and what a split must keep apart."""

import os
import random
import re
import subprocess
import sys
import time

import pytest

from scripts.quickstart import corpus
from scripts.quickstart.corpus import (
    FRAMES,
    MAX_PAIRS,
    PERSONS,
    PHRASES,
    TABLES,
    UNSEEN,
    WEIGHTS,
    generate_pairs,
    near_unseen,
    split_pairs,
)

CARDINALS = {
    0: ("zero", "null"),
    1: ("one", "eins"),
    2: ("two", "zwei"),
    6: ("six", "sechs"),
    7: ("seven", "sieben"),
    10: ("ten", "zehn"),
    11: ("eleven", "elf"),
    12: ("twelve", "zwölf"),
    13: ("thirteen", "dreizehn"),
    16: ("sixteen", "sechzehn"),
    17: ("seventeen", "siebzehn"),
    20: ("twenty", "zwanzig"),
    21: ("twenty-one", "einundzwanzig"),
    30: ("thirty", "dreißig"),
    33: ("thirty-three", "dreiunddreißig"),
    40: ("forty", "vierzig"),
    66: ("sixty-six", "sechsundsechzig"),
    70: ("seventy", "siebzig"),
    77: ("seventy-seven", "siebenundsiebzig"),
    99: ("ninety-nine", "neunundneunzig"),
    100: ("one hundred", "einhundert"),
    101: ("one hundred and one", "einhunderteins"),
    110: ("one hundred and ten", "einhundertzehn"),
    116: ("one hundred and sixteen", "einhundertsechzehn"),
    121: ("one hundred and twenty-one", "einhunderteinundzwanzig"),
    200: ("two hundred", "zweihundert"),
    312: ("three hundred and twelve", "dreihundertzwölf"),
    1_000: ("one thousand", "eintausend"),
    1_001: ("one thousand and one", "eintausendeins"),
    1_100: ("one thousand one hundred", "eintausendeinhundert"),
    1_999: ("one thousand nine hundred and ninety-nine", "eintausendneunhundertneunundneunzig"),
    2_000: ("two thousand", "zweitausend"),
    4_217: ("four thousand two hundred and seventeen", "viertausendzweihundertsiebzehn"),
    10_000: ("ten thousand", "zehntausend"),
    21_000: ("twenty-one thousand", "einundzwanzigtausend"),
    100_000: ("one hundred thousand", "einhunderttausend"),
    101_000: ("one hundred and one thousand", "einhunderteintausend"),
    201_001: ("two hundred and one thousand and one", "zweihunderteintausendeins"),
    365_016: ("three hundred and sixty-five thousand and sixteen", "dreihundertfünfundsechzigtausendsechzehn"),
    999_999: (
        "nine hundred and ninety-nine thousand nine hundred and ninety-nine",
        "neunhundertneunundneunzigtausendneunhundertneunundneunzig",
    ),
}
YEARS = {
    1850: ("eighteen fifty", "achtzehnhundertfünfzig"),
    1900: ("nineteen hundred", "neunzehnhundert"),
    1901: ("nineteen oh one", "neunzehnhunderteins"),
    1905: ("nineteen oh five", "neunzehnhundertfünf"),
    1917: ("nineteen seventeen", "neunzehnhundertsiebzehn"),
    1999: ("nineteen ninety-nine", "neunzehnhundertneunundneunzig"),
    2000: ("two thousand", "zweitausend"),
    2007: ("two thousand and seven", "zweitausendsieben"),
    2010: ("twenty ten", "zweitausendzehn"),
    2024: ("twenty twenty-four", "zweitausendvierundzwanzig"),
}
ORDINALS = {
    1: ("first", "erste"),
    2: ("second", "zweite"),
    3: ("third", "dritte"),
    5: ("fifth", "fünfte"),
    7: ("seventh", "siebte"),
    8: ("eighth", "achte"),
    9: ("ninth", "neunte"),
    12: ("twelfth", "zwölfte"),
    16: ("sixteenth", "sechzehnte"),
    17: ("seventeenth", "siebzehnte"),
    20: ("twentieth", "zwanzigste"),
    21: ("twenty-first", "einundzwanzigste"),
    30: ("thirtieth", "dreißigste"),
    99: ("ninety-ninth", "neunundneunzigste"),
}
HALF_PAST = {
    "one": "zwei",
    "two": "drei",
    "three": "vier",
    "four": "fünf",
    "five": "sechs",
    "six": "sieben",
    "seven": "acht",
    "eight": "neun",
    "nine": "zehn",
    "ten": "elf",
    "eleven": "zwölf",
    "twelve": "eins",
}
TIMES = {
    "one o'clock": "ein Uhr",
    "six o'clock": "sechs Uhr",
    "twelve o'clock": "zwölf Uhr",
    "a quarter past one": "Viertel nach eins",
    "a quarter to nine": "Viertel vor neun",
    "ten past twelve": "zehn nach zwölf",
    "twenty to seven": "zwanzig vor sieben",
    "12:00 AM": "00:00 Uhr",
    "12:05 AM": "00:05 Uhr",
    "12:40 PM": "12:40 Uhr",
    "9:24 AM": "09:24 Uhr",
    "2:35 PM": "14:35 Uhr",
    "11:59 PM": "23:59 Uhr",
}
# Telltales on both sides, one a category; what a category alone can say.
TELLTALES = {
    "numbers": (r"plus|^(room|page|seat|platform) ", r"plus|^(Zimmer|Seite|Platz|Gleis) "),
    "years": (r"was built in", r"wurde im Jahr \S+ gebaut\.$"),
    "dates": (r"^\d\d/\d\d/\d{4}$|^from \w+ \d", r"^\d\d\.\d\d\.\d{4}$|^vom \d+\. "),
    "times": (r"opens at", r"öffnet um .* und schließt um"),
    "money": (r" (cost|costs|owe|owes) ", r" (kosten|kostet|schulde|schulden|schuldet) "),
    "ordinals": (r"describe|the end of", r"beschreib|das Ende (des|der)"),
    "percentages": (r"percent|%", r"Prozent| %"),
    "durations": (r"ago\.$|lived in", r" vor \S+ \S+ nach .* gekommen\.$| seit "),
    "modals": (r" (has|have|wants?|can|should|would) .*\.$", r"^(Heute|Morgen|Am \S+|Am \d+\. \S+) .*en\.$"),
    "schedules": (r"(leaves|arrives) at", r"^(Der|Das) \w+ (fährt|kommt) .*(ab|an)\.$"),
    "subordinates": (r"(because|that) ", r"(, (weil|dass)|^weil) .*\w+(t|e|en)\.?$"),
    "perfects": (r" (bought|sold|ordered|paid) ", r" (habe|haben|hat) .*(gekauft|verkauft|bestellt|bezahlt)\.$"),
    "travels": (r"travels? to .* by ", r"reis(e|en|t) .* mit dem \w+ nach \w+\.$"),
    "questions": (r"\?$", r"\?$"),
    "negations": (r"n't| not ", r" (nicht|keine) "),
    "greetings": (r"^(Good|Happy|See you|Welcome|Thank you)", r"^(Gute|Alles Gute|Bis|Willkommen|Vielen Dank)"),
}


@pytest.fixture(scope="module")
def pairs():
    return generate_pairs(8_000, seed=3)


@pytest.fixture(scope="module")
def drawn():
    """Pairs as they come, with repeats, so that a second translation of a sentence would show."""
    rng = random.Random(11)
    return {category: [corpus.draw_pair(category, rng) for _ in range(1_500)] for category in FRAMES}


def phrases(kind, number=3_000):
    """What a slot is filled with, as a mapping."""
    rng = random.Random(5)
    return dict(PHRASES[kind](rng) for _ in range(number))


@pytest.mark.parametrize(("number", "words"), CARDINALS.items())
def test_cardinals(number, words):
    assert corpus._words(number) == words


@pytest.mark.parametrize(("year", "words"), YEARS.items())
def test_years(year, words):
    assert corpus._words(year, "year") == words


@pytest.mark.parametrize(("number", "words"), ORDINALS.items())
def test_ordinals(number, words):
    assert corpus._words(number, "ordinal") == words


def test_every_number_in_words_is_unique_and_clean():
    words = [corpus._words(number) for number in range(0, 1_000_000, 499)]
    for side in zip(*words, strict=True):
        assert len(set(side)) == len(words)
    assert all(re.fullmatch(r"[a-z]+([ -][a-z]+)*", english) for english, _ in words)
    assert all(re.fullmatch(r"[a-zäöüß]+", german) and "einstausend" not in german for _, german in words)


@pytest.mark.parametrize(("english", "german"), HALF_PAST.items())
def test_german_names_the_coming_hour_after_half(english, german):
    assert phrases("time")[f"half past {english}"] == f"halb {german}"


@pytest.mark.parametrize(("english", "german"), TIMES.items())
def test_times(english, german):
    assert phrases("time", 30_000)[english] == german


@pytest.mark.parametrize(
    ("amount", "currency", "unit", "english", "german"),
    [
        (123_450, "USD", 100, "$1,234.50", "1.234,50 $"),
        (480, "EUR", 100, "€4.80", "4,80 €"),
        (100, "GBP", 100, "£1.00", "1,00 £"),
        (999_999, "EUR", 100, "€9,999.99", "9.999,99 €"),
        (1_005, "USD", 100, "$10.05", "10,05 $"),
        (20, "EUR", 1, "€20", "20 €"),
        (1_234, "GBP", 1, "£1,234", "1.234 £"),
    ],
)
def test_prices(amount, currency, unit, english, german):
    assert corpus._price(amount, currency, unit) == (english, german)


def test_money_and_counts_in_words():
    amounts = phrases("money", 20_000)
    assert amounts["twenty-three euros"] == "dreiundzwanzig Euro"
    assert (amounts["€30"], amounts["€30.00"]) == ("30 €", "30,00 €")
    assert any(german.endswith(" Pfund und zwölf Pence") for german in amounts.values())
    assert not any(re.search(r"eins (Euro|Dollar|Pfund|Cent|Pence)", german) for german in amounts.values())
    assert set(phrases("count").values()) == {corpus._words(number)[1] for number in range(2, 100)}


def test_percentages():
    percentages = phrases("percent", 20_000)
    assert percentages["12.5%"] == "12,5 %"
    assert percentages["40%"] == "40 %"
    assert percentages["twelve point five percent"] == "zwölf Komma fünf Prozent"
    assert percentages["ninety-nine percent"] == "neunundneunzig Prozent"


def test_dates():
    day = corpus.date(2021, 3, 2)
    assert corpus._format(day, "EEEE, MMMM dth, y", "EEEE, 'dem' d. MMMM y") == (
        "Tuesday, March 2nd, 2021",
        "Dienstag, dem 2. März 2021",
    )
    assert corpus._format(day, "MM/dd/yyyy", "dd.MM.yyyy") == ("03/02/2021", "02.03.2021")
    assert corpus._format(day, "EEEE, MMMM d, y", "EEEE, d. MMMM y") == (
        "Tuesday, March 2, 2021",
        "Dienstag, 2. März 2021",
    )
    days = phrases("day", 10_000)
    assert (days["May 1st"], days["May 3rd"], days["June 11th"]) == ("1. Mai", "3. Mai", "11. Juni")
    assert (days["July 12th"], days["July 22nd"], days["August 23rd"]) == ("12. Juli", "22. Juli", "23. August")


def test_spelt_dates_are_declined(monkeypatch):
    monkeypatch.setattr(corpus, "_day", lambda rng: corpus.date(1999, 5, 3))
    english = "the third of May nineteen ninety-nine"
    assert phrases("spelt_date", 1) == {english: "dritte Mai neunzehnhundertneunundneunzig"}
    assert phrases("spelt_date_dative", 1) == {english: "dritten Mai neunzehnhundertneunundneunzig"}


def test_days_on_which_something_happens():
    days, past = phrases("when"), phrases("when_past")
    assert (days["today"], days["on Monday"], days["on March 2nd"]) == ("heute", "am Montag", "am 2. März")
    assert (past["yesterday"], past["on Saturday"], past["on May 31st"]) == ("gestern", "am Samstag", "am 31. Mai")
    assert "tomorrow" not in past
    assert "yesterday" not in days
    until = phrases("until")
    assert (until["soon"], until["on Monday"], until["on March 2nd"]) == ("bald", "Montag", "zum 2. März")
    for kind in ("when", "when_past"):
        optional = phrases(f"maybe_{kind}", 1_000)
        assert optional.pop("") == ""
        assert optional.items() <= phrases(kind, 20_000).items()


@pytest.mark.parametrize(
    ("case", "letter", "page", "chapter"),
    [
        ("nominative", "der einundzwanzigste Brief", "die einundzwanzigste Seite", "das einundzwanzigste Kapitel"),
        ("accusative", "den einundzwanzigsten Brief", "die einundzwanzigste Seite", "das einundzwanzigste Kapitel"),
        ("dative", "dem einundzwanzigsten Brief", "der einundzwanzigsten Seite", "dem einundzwanzigsten Kapitel"),
        ("genitive", "des einundzwanzigsten Briefes", "der einundzwanzigsten Seite", "des einundzwanzigsten Kapitels"),
    ],
)
def test_ordinals_are_declined(case, letter, page, chapter):
    declined = phrases(case, 20_000)
    assert declined["the twenty-first letter"] == letter
    assert declined["the twenty-first page"] == page
    assert declined["the twenty-first chapter"] == chapter


MONDAY, NOTHING = ("on Monday", "am Montag"), ("", "")
HALF_SIX = ("half past six", "halb sieben")
SENTENCES = [  # category, beginning of its frame, what fills it (a table is picked from by the English word), sentences
    ("numbers", "{label}", {"label": "room", "low_number": ("twelve", "zwölf")}, "room twelve", "Zimmer zwölf"),
    ("years", "{who} was", {"who": "my parents", "year": ("1905", "1905")},
     "My parents were born in 1905.", "Meine Eltern wurden im Jahr 1905 geboren."),
    ("years", "{who} moved", {"who": "we", "city": "Munich", "year": ("1999", "1999")},
     "We moved to Munich in 1999.", "Wir sind im Jahr 1999 nach München gezogen."),
    ("dates", "from", {"day": ("May 3rd", "3. Mai")}, "from May 3rd to May 3rd", "vom 3. Mai bis zum 3. Mai"),
    ("times", "it is", {"time": HALF_SIX}, "It is half past six.", "Es ist halb sieben."),
    ("money", "{who} owe", {"who": "Anna", "money": ("$5.10", "5,10 $")},
     "Anna owes $5.10.", "Anna schuldet 5,10 $."),
    ("ordinals", "{who} begin", {"who": "I", "dative": ("the first page", "der ersten Seite")},
     "I begin with the first page.", "Ich beginne mit der ersten Seite."),
    ("percentages", "{market} {rise[1]}",
     {"market": "rents", "rise": "fall", "percent": ("9.5%", "9,5 %"), "year": ("2007", "2007")},
     "Rents fell by 9.5% in 2007.", "Die Mieten sind im Jahr 2007 um 9,5 % gefallen."),
    ("durations", "{who} have", {"who": "she", "city": "Vienna", "count": ("two", "zwei"), "unit": "years"},
     "She has lived in Vienna for two years.", "Sie wohnt seit zwei Jahren in Wien."),
    ("modals", "{who} {modal[0]} {pay[0]} {money} {when}",
     {"who": "I", "modal": "have", "pay": "pay", "when": MONDAY,
      "money": ("twenty-three euros", "dreiundzwanzig Euro")},
     "I have to pay twenty-three euros on Monday.", "Am Montag muss ich dreiundzwanzig Euro bezahlen."),
    ("modals", "{who} {modal[0]} {pay[0]} {money}.",
     {"who": "she", "modal": "would", "pay": "save", "money": ("€20", "20 €")},
     "She would like to save €20.", "Sie möchte 20 € sparen."),
    ("modals", "{who} {modal[0]} {get_up[0]} at {time} {when}",
     {"who": "my parents", "modal": "want", "get_up": "leave", "time": HALF_SIX, "when": MONDAY},
     "My parents want to leave at half past six on Monday.", "Am Montag wollen meine Eltern um halb sieben abfahren."),
    ("schedules", "{who}", {"who": "Peter", "get_up": "get up", "time": HALF_SIX, "maybe_when": MONDAY},
     "Peter gets up at half past six on Monday.", "Peter steht am Montag um halb sieben auf."),
    ("schedules", "{who}", {"who": "I", "get_up": "leave", "time": HALF_SIX, "maybe_when": NOTHING},
     "I leave at half past six.", "Ich fahre um halb sieben ab."),
    ("subordinates", "because", {"who": "we", "get_up": "get up", "time": HALF_SIX},
     "because we get up at half past six", "weil wir um halb sieben aufstehen"),
    ("subordinates", "{who} {hope} {vehicle}",
     {"who": "I", "hope": "am/are/is in", "vehicle": "the train", "leave": "leave", "time": HALF_SIX},
     "I am in a hurry because the train leaves at half past six.",
     "Ich habe es eilig, weil der Zug um halb sieben abfährt."),
    ("perfects", "{who} {buy[1]}",
     {"who": "my sister", "buy": "buy", "count": ("two", "zwei"), "thing": "eggs", "maybe_when_past": MONDAY},
     "My sister bought two eggs on Monday.", "Meine Schwester hat am Montag zwei Eier gekauft."),
    ("travels", "{who} travel", {"who": "we", "city": "Rome", "by_train": "by bus", "maybe_when": MONDAY},
     "We travel to Rome by bus on Monday.", "Wir reisen am Montag mit dem Bus nach Rom."),
    ("questions", "{modal[1]} {who} {modal[2]} {buy[0]}",
     {"modal": "have", "who": "my brother", "buy": "bring", "count": ("two", "zwei"), "thing": "cups",
      "maybe_when": MONDAY},
     "Does my brother have to bring two cups on Monday?", "Muss mein Bruder am Montag zwei Tassen mitbringen?"),
    ("questions", "{modal[1]} {who} {modal[2]} {buy[0]}",
     {"modal": "can", "who": "I", "buy": "sell", "count": ("two", "zwei"), "thing": "books", "maybe_when": MONDAY},
     "Can I sell two books on Monday?", "Kann ich am Montag zwei Bücher verkaufen?"),
    ("questions", "{modal[1]} {who} {modal[2]} {pay[0]}",
     {"modal": "should", "who": "he", "pay": "spend", "money": ("€20", "20 €"), "maybe_when": NOTHING},
     "Should he spend €20?", "Sollte er 20 € ausgeben?"),
    ("questions", "does {vehicle}",
     {"vehicle": "the ship", "leave": "arrive", "time": HALF_SIX, "maybe_when": MONDAY},
     "Does the ship arrive at half past six on Monday?", "Kommt das Schiff am Montag um halb sieben an?"),
    ("questions", "do/do/does", {"who": "we", "get_up": "go out", "time": HALF_SIX, "maybe_when": NOTHING},
     "Do we go out at half past six?", "Gehen wir um halb sieben aus?"),
    ("questions", "when", {"event": "the exam", "start": "take place", "maybe_when": MONDAY},
     "When does the exam take place on Monday?", "Wann findet die Prüfung am Montag statt?"),
    ("questions", "does {good}", {"good": ("it", "es"), "money": ("€20", "20 €")},
     "Does it cost €20?", "Kostet es 20 €?"),
    ("questions", "how much does", {"good": ("it", "es"), "maybe_in": NOTHING},
     "How much does it cost?", "Wie viel kostet es?"),
    ("questions", "how much does", {"good": ("the bed", "das Bett"), "maybe_in": ("in Rome", "in Rom")},
     "How much does the bed cost in Rome?", "Wie viel kostet das Bett in Rom?"),
    ("questions", "how are you", {"friend": ", Anna"}, "How are you, Anna?", "Wie geht es dir, Anna?"),
    ("negations", "it is not", {"time": HALF_SIX}, "It is not half past six yet.", "Es ist noch nicht halb sieben."),
    ("negations", "{good}", {"good": ("it", "es"), "money": ("€20", "20 €")},
     "It doesn't cost €20.", "Es kostet nicht 20 €."),
    ("negations", "{shop}", {"shop": "the bank", "when": MONDAY},
     "The bank is not open on Monday.", "Die Bank ist am Montag nicht geöffnet."),
    ("negations", "{who} {modal[3]} {pay[0]} {money} {when}",
     {"who": "we", "modal": "have", "pay": "pay", "money": ("€20", "20 €"), "when": MONDAY},
     "We don't have to pay €20 on Monday.", "Am Montag müssen wir nicht 20 € bezahlen."),
    ("negations", "{who} {modal[3]} {pay[0]} {money}.",
     {"who": "he", "modal": "have", "pay": "pay", "money": ("€20", "20 €")},
     "He doesn't have to pay €20.", "Er muss nicht 20 € bezahlen."),
    ("negations", "{who} {modal[3]} {buy[0]} any {thing}.",
     {"who": "Anna", "modal": "can", "buy": "bring", "thing": "eggs"},
     "Anna can't bring any eggs.", "Anna kann keine Eier mitbringen."),
    ("negations", "{who} didn't", {"who": "my parents", "buy": "sell", "thing": "cups", "maybe_when_past": NOTHING},
     "My parents didn't sell any cups.", "Meine Eltern haben keine Tassen verkauft."),
    ("negations", "{who} don't", {"who": "she", "get_up": "leave", "time": HALF_SIX, "maybe_when": MONDAY},
     "She doesn't leave at half past six on Monday.", "Sie fährt am Montag nicht um halb sieben ab."),
    ("negations", "{event}", {"event": "the game", "start": "start", "time": HALF_SIX, "maybe_when": NOTHING},
     "The game doesn't start at half past six.", "Das Spiel fängt nicht um halb sieben an."),
    ("greetings", "{hello}{name}{mark}", {"hello": "thank you very", "name": ", Mr. Becker", "mark": "."},
     "Thank you very much, Mr. Becker.", "Vielen Dank, Herr Becker."),
    ("greetings", "{hello}{name}!", {"hello": "good evening", "name": ", Anna", "time": HALF_SIX},
     "Good evening, Anna! It is half past six.", "Guten Abend, Anna! Es ist halb sieben."),
    ("greetings", "happy", {"birthday": ("thirtieth", "dreißigsten"), "name": NOTHING},
     "Happy thirtieth birthday!", "Alles Gute zum dreißigsten Geburtstag!"),
    ("greetings", "see you", {"until": ("on May 1st", "zum 1. Mai"), "name": ", Paul"},
     "See you on May 1st, Paul!", "Bis zum 1. Mai, Paul!"),
    ("greetings", "thank you", {"count": ("two", "zwei"), "thing": "books", "name": NOTHING},
     "Thank you very much for the two books.", "Vielen Dank für die zwei Bücher."),
    ("greetings", "welcome", {"city": "Vienna", "name": ", Mrs. Wagner"},
     "Welcome to Vienna, Mrs. Wagner!", "Willkommen in Wien, Frau Wagner!"),
]  # fmt: skip


def pick(kind, english):
    """The entry of a table that begins with the English words."""
    entries = TABLES[kind].items()
    return next(
        entry for entry in entries if (entry[0] if isinstance(entry[0], str) else entry[0][0]).startswith(english)
    )


@pytest.mark.parametrize(("category", "beginning", "slots", "english", "german"), SENTENCES)
def test_sentences(category, beginning, slots, english, german, monkeypatch):
    (frame,) = [item for item in FRAMES[category].items() if item[0].startswith(beginning)]
    chosen = {kind: pick(kind, words) if isinstance(words, str) else words for kind, words in slots.items()}
    monkeypatch.setitem(FRAMES, category, dict([frame]))
    monkeypatch.setattr(corpus, "_phrase", lambda kind, rng: chosen[kind])
    assert corpus.draw_pair(category, random.Random(0)) == (english, german)


def test_frames_have_the_same_slots_in_both_languages_and_all_can_be_filled():
    assert set(WEIGHTS) == set(FRAMES)
    assert set(PERSONS) < set(TABLES["who"])
    assert not set(TABLES) & set(PHRASES)
    for frames in FRAMES.values():
        for english, german in frames.items():
            assert set(corpus._slots(english)) == set(corpus._slots(german))
            assert {slot.rstrip("12") for slot in corpus._slots(english)} <= set(TABLES) | set(PHRASES)


def test_one_sentence_has_one_translation_in_both_directions(drawn):
    german_of, english_of = {}, {}
    for pairs in drawn.values():
        for english, german in pairs:
            assert german_of.setdefault(english, german) == german
            assert english_of.setdefault(german, english) == english


def test_sentences_are_well_formed(drawn):
    for pairs in drawn.values():
        for english, german in pairs:
            assert not re.search(r"[{}/\[\]|]|\s\s|^\s|\s$|\s[.,?!]", german)
            assert not re.search(r"[{}\[\]|]|[a-z]/|\s\s|^\s|\s$|\s[.,?!]", english)
            assert "\u00a0" not in german
            for side in (english, german):
                assert side[-1] not in ".?!" or side[0].isupper()
            assert (english[-1] in ".?!") == (german[-1] in ".?!")
            assert len(english.split()) <= 18


@pytest.mark.parametrize("category", FRAMES)
def test_every_category_appears(category, pairs, drawn):
    english, german = TELLTALES[category]
    assert any(re.search(english, a) and re.search(german, b) for a, b in drawn[category])
    share = sum(bool(re.search(english, a) and re.search(german, b)) for a, b in pairs) / len(pairs)
    assert share > 0.01


def test_sentences_are_distinct_in_both_languages(pairs):
    assert len(pairs) == 8_000
    for side in zip(*pairs, strict=True):
        assert len(set(side)) == len(pairs)


def test_the_shares_follow_the_weights(pairs):
    questions = sum(english.endswith("?") for english, _ in pairs) / len(pairs)
    assert questions == pytest.approx(WEIGHTS["questions"] / sum(WEIGHTS.values()), abs=0.01)


def test_fewer_pairs_are_the_beginning_of_more_and_seeds_differ(pairs):
    assert generate_pairs(100, seed=3) == pairs[:100]
    assert generate_pairs(100, seed=4) != pairs[:100]


def edits(first, second):
    """Levenshtein's distance of two lists of words, by the textbook's table."""
    row = list(range(len(second) + 1))
    for i, word in enumerate(first, 1):
        before, row = row, [i]
        for j, other in enumerate(second, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (word != other)))
    return row[-1]


def words_of(text):
    return re.findall(r"[^\s.,?!]+(?:[.,][^\s.,?!]+)*", text.lower())


def test_the_corpus_has_no_copy_of_the_unseen_sentences_with_less_than_two_words_changed():
    for unseen, texts in zip(zip(*UNSEEN.items(), strict=True), zip(*generate_pairs(), strict=True), strict=True):
        lines = [words_of(text) for text in texts]
        for words in map(words_of, unseen):
            assert min(edits(words, line) for line in lines if abs(len(words) - len(line)) <= 1) >= 2


@pytest.mark.parametrize(
    ("english", "german", "near"),
    [
        ("It costs twenty euros.", "Es kostet zwanzig Euro.", True),
        ("it costs twenty euros", "?", True),  # the same words
        ("It costs thirty euros.", "?", True),  # another word
        ("It costs twenty euros today.", "?", True),  # a word more
        ("Costs twenty euros.", "?", True),  # a word less
        ("?", "Sie muss zwanzig Euro nicht bezahlen.", True),  # in German alone
        ("It costs thirty dollars.", "Es kostet dreißig Dollar.", False),
        ("How much does it cost?", "Wie viel kostet es?", False),
    ],
)
def test_what_is_near_an_unseen_sentence(english, german, near):
    assert near_unseen(english, german) is near


LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("corpus", sys.argv[1])
corpus = sys.modules["corpus"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(corpus)
"""


def run_alone(code, **environment):
    """What code prints in a fresh process that loads the module without the package."""
    return subprocess.run(
        [sys.executable, "-c", LOAD + code, corpus.__file__],
        env={**os.environ, **environment}, check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


def test_pairs_do_not_depend_on_hash_seed_or_locale(pairs):
    code = "print(ascii(corpus.generate_pairs(300, seed=3)))"
    for hash_seed, locale in [("1", "C"), ("2", "de_DE.UTF-8")]:
        assert run_alone(code, PYTHONHASHSEED=hash_seed, LC_ALL=locale) == ascii(pairs[:300])


def test_import_is_light():
    code = "print([name for name in ('num2words', 'babel', 'torch', 'hf_vanilla_transformer') if name in sys.modules])"
    assert run_alone(code) == "[]"


@pytest.mark.parametrize("module", ["num2words", "babel.dates", "babel.numbers"])
def test_missing_dependency_names_the_command(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"run pip install '\.\[train\]' in a checkout"):
        generate_pairs(1)


@pytest.mark.parametrize("num_pairs", [-1, 0, MAX_PAIRS + 1])
def test_impossible_numbers_of_pairs_name_the_limit(num_pairs):
    with pytest.raises(ValueError, match=f"num_pairs is {num_pairs}, .* between 1 and {MAX_PAIRS}"):
        generate_pairs(num_pairs)


def test_the_default_corpus_takes_seconds():
    start = time.process_time()
    assert len(generate_pairs()) == 40_000
    assert time.process_time() - start < 10


@pytest.mark.slow
def test_the_limit_can_be_reached():
    pairs = generate_pairs(MAX_PAIRS)
    assert len({english for english, _ in pairs}) == len({german for _, german in pairs}) == MAX_PAIRS


def test_split_keeps_sentences_apart(pairs):
    parts = split_pairs(pairs, 500, 700, seed=1)
    assert list(parts) == ["train", "validation", "test"]
    assert [len(part) for part in parts.values()] == [6_800, 500, 700]
    assert sorted(pair for part in parts.values() for pair in part) == sorted(pairs)
    for side in (0, 1):
        train, validation, test = ({pair[side] for pair in part} for part in parts.values())
        assert not train & validation
        assert not train & test
        assert not validation & test


def test_split_depends_on_the_seed_alone(pairs):
    before = list(pairs)
    assert split_pairs(pairs, 10, 10, seed=1) == split_pairs(pairs, 10, 10, seed=1)
    assert split_pairs(pairs, 10, 10, seed=1) != split_pairs(pairs, 10, 10, seed=2)
    assert pairs == before


def test_split_may_leave_parts_empty(pairs):
    parts = split_pairs(pairs[:2], 0, 1)
    assert [len(part) for part in parts.values()] == [1, 0, 1]


@pytest.mark.parametrize(
    ("num_validation", "num_test", "message"),
    [(-1, 1, "negative"), (1, -1, "negative"), (5, 5, "leave none of 10"), (11, 0, "leave none of 10")],
)
def test_impossible_splits(pairs, num_validation, num_test, message):
    with pytest.raises(ValueError, match=message):
        split_pairs(pairs[:10], num_validation, num_test)


def test_split_refuses_nothing_and_repeats():
    with pytest.raises(ValueError, match="leave none of 0"):
        split_pairs([], 0, 0)
    for repeated in ([("a", "x"), ("a", "y"), ("b", "z")], [("a", "x"), ("b", "x"), ("c", "z")]):
        with pytest.raises(ValueError, match="occurs twice"):
            split_pairs(repeated, 1, 1)
