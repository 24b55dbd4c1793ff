"""Texts that tokenizers treat in different ways, and random ones."""

import random
import unicodedata

NASTY = [
    "", " ", "   ", "\t", "\n \n", "\u00a0", "a", " a ", "a  b   c",
    "a\tb\nc\r\nd", "0", "1,000", "95,000, 1.000.000",
    "3.50 €", "½ of ﬁve…", '"quoted" „so“ ‚so‘ «so»', "....................",
    "-----------", "aaaaaaaaaaaaaaaaaaa",
    "hahahahahahaha", "oooo ooooo oooooooo", "▁", "▁a", "a▁", "a▁b ▁ c▁▁ ", "́",
    "a ́ b", " ́a", "é", "é", "ą́̂̃", "o͡͏̈o",
    unicodedata.normalize("NFD", "Äpfel fährt Straße ệ Ǘ"), "مرحبا بالعالم",
    "नमस्ते दुनिया क्षि", "สวัสดีชาวโลก น้ำ", "ກຳ",
    "한국어", unicodedata.normalize("NFD", "한국어 각"), "ᄀᄀᄀ각ᆨᆨ", "日本語のテキスト、中国",
    "ｶﾞ ﾊﾟ Ｆｕｌｌ", "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 a👩‍", "؀a", "a\u200bb", "a\u200db",
    "\u200b", "\ufeffa", "a\ufffdb", "\x00", "a\x00b \x00", "\x01a \x02 b", "\x7f",
    "\U0010ffff", "\ufdd0\ufffe",
    "</s>", "a</s>b", "a </s> b", "<unk>", "<pad>", "a<pad><pad>b", "<s>", "</S>",
    "x</s", "<</s>>", ">>", "<<",
    ">> <<", ">><<", ">>deu<<", ">>deu<< A man", ">>deu<<A man", " >>deu<< A man",
    "A >>deu<< man", ">>fra<<>>deu<< a",
    ">>xxx<< A man", ">>deu << a", ">>deu< a", ">> a b << c", "</s>>>deu<< a",
    "a</s>>>nld<<b", "</s>>> a << b", ">>deu<<</s>",
    "x>>deu<<", ">>deu<<\t a", ">>DEU<< a", ">>deu<<\u0301a", "> >deu<<",
    "＞＞deu＜＜ a", "㍿", "ﷺ", "ﷺ ﷺﷺ ﷺ", "´a x´ y", "x ´", "¨",
    "\u0344", "ǆ", "ß", "İi̇ ı",
    "a" * 700, "ab " * 300, "ä" * 150, "a" + "\u0301" * 80 + "b", "\U0001f600" * 120,
]  # fmt: skip


def random_texts(number: int, own: list[str]) -> list[str]:
    """Random strings of several mixtures: all of Unicode, the model's own characters, marks, spaces, controls."""
    any_character = [lambda: chr(random.choice([random.randrange(0xD800), random.randrange(0xE000, 0x110000)]))]
    marks = [lambda: chr(random.randrange(0x300, 0x370)), lambda: random.choice("\u200d\ufe0f\u0e33\u093f\u1160\u11a8")]
    basic = [lambda: chr(random.randrange(0x250)), lambda: chr(random.randrange(0x250, 0x3000))]
    of_the_model, spaces = [lambda: random.choice(own)], [lambda: random.choice(" \t\u3000\u200b\n  ")]
    syntax = [lambda: random.choice([">>", "<<", ">>deu<<", "</s>", "<pad>", "<unk>", "▁", "deu"])]
    mixtures = [
        any_character, of_the_model, of_the_model + spaces, any_character + of_the_model + spaces, basic + marks,
        of_the_model * 3 + marks + spaces, syntax + of_the_model + spaces, basic + spaces,
        any_character + of_the_model + marks + spaces + syntax + basic,
    ]  # fmt: skip
    return [
        "".join(random.choice(mixture)() for _ in range(random.randint(1, 40)))
        for mixture in random.choices(mixtures, k=number)
    ]


def characters(lines: list[str]) -> list[str]:
    return list("".join(lines))[:20_000]  # as frequent as they are
