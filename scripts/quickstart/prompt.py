"""Sentences that the quickstart's model can and can't translate, and a prompt to try it on a terminal."""

import io
import re
import sys
from collections.abc import Callable, Iterable, Set

from scripts.quickstart.corpus import UNSEEN

Translate = Callable[[str], str]  # a `Translator`, for one sentence

OUTSIDE = ("My dog sleeps under the table.", "Anna is older than Peter.", "It will rain in Berlin tomorrow.")
INTRODUCTION = """
Type an English sentence, or an empty line to end. The corpus has numbers below a million, years, dates, times,
durations, percentages, prices in euros, dollars and pounds, journeys, timetables, shopping, greetings, questions and
negations. It writes "doesn't" and "can't", and begins a sentence with a capital."""
WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*|[^\w\s]")  # a word or a sign; there are too many numbers in digits


def show_examples(translate: Translate, known: Set[str]) -> None:
    """Prints translations of sentences that the model should have learned how to translate, and of others.

    Args:
        translate: A `Translator` with the trained model.
        known: The words of the corpus, of `words_of`.
    """
    print("\nWhat it can translate; the corpus has none of these sentences, nor a copy of one with a word changed:")
    translations = {english: translate(english) for english in UNSEEN}
    for english, german in UNSEEN.items():
        note = "" if translations[english] == german else f"   (wrong; right: {german})"
        print(f"  {english}\n    {translations[english]}{note}")
    print(f"{sum(translations[english] == german for english, german in UNSEEN.items())} of {len(UNSEEN)} are right.")
    print("\nWhat it can't translate; the corpus has no sentences of these kinds:")
    for english in OUTSIDE:
        print("\n".join([f"  {english}", *answer(english, translate, known)]))


def answer_questions(translate: Translate, known: Set[str]) -> None:
    """Translates typed sentences until an empty line, Ctrl-D or Ctrl-C; without a terminal, it asks nothing.

    Args:
        translate: A `Translator` with the trained model.
        known: The words of the corpus, of `words_of`.
    """
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()):
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # what is typed need not be UTF-8
    print(INTRODUCTION)
    try:
        while sentence := input("> ").strip():
            print("\n".join(answer(sentence, translate, known)))
    except (EOFError, KeyboardInterrupt):
        print()


def answer(sentence: str, translate: Translate, known: Set[str]) -> list[str]:
    """Returns the lines that answer a sentence: its translation, and which of its words the corpus lacks.

    Args:
        sentence: In English.
        translate: A `Translator` with the trained model.
        known: The words of the corpus, of `words_of`.
    """
    unknown = [word for word in dict.fromkeys(_words(sentence)) if word not in known]
    warning = f"    (the corpus has no {', '.join(map(repr, unknown))}: don't rely on this)"
    return [f"    {translate(sentence)}", *([warning] if unknown else [])]


def words_of(sentences: Iterable[str]) -> set[str]:
    """Returns the words and signs of sentences in lower case: of "€20, Anna!" they are "€", ",", "anna" and "!"."""
    return {word for sentence in sentences for word in _words(sentence)}


def _words(sentence: str) -> list[str]:
    return WORD.findall(sentence.lower())
