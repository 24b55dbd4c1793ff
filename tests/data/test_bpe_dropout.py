"""BPE-dropout: the paper's algorithm and its probabilities, and a corpus with a new segmentation each time."""

import copy
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_vanilla_transformer import VanillaTransformerTokenizerFast
from hf_vanilla_transformer.data.bpe_dropout import BPEDropout
from hf_vanilla_transformer.data.corpora import Cleaning, Corpus, lengths_of, read_corpus, resegment, tokenize

TEXTS = [
    "the wooden house is near the bushes , and the girl laughs .",
    "das Haus aus Holz ist in der Nähe vieler Büsche .",
    "a</s>b <s>c</s> <2de> d<2de>e",
    "",
    " ",
    "  two  spaces ",
    "漢字 👩‍👩‍👧‍👦\n\0",
    "a" * 300,
]


@pytest.fixture(scope="module")
def tokenizer():
    texts = TEXTS[:2] * 9
    return VanillaTransformerTokenizerFast.train_from_iterator(
        texts, 350, show_progress=False, extra_special_tokens=["<2de>"]
    )


@given(st.text(max_size=30))
def test_at_0_the_pieces_are_the_tokenizers_own(tokenizer, text):
    assert BPEDropout(tokenizer, 0).encode([text], [0]) == tokenizer([text])["input_ids"]


def test_at_1_the_pieces_of_odd_texts_are_bytes_and_added_tokens(tokenizer):
    assert BPEDropout(tokenizer, 0).encode(TEXTS, range(len(TEXTS))) == tokenizer(TEXTS)["input_ids"]
    added = tokenizer.added_tokens_encoder
    for text, ids in zip(TEXTS, BPEDropout(tokenizer, 1).encode(TEXTS, range(len(TEXTS))), strict=True):
        pieces = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
        letters = [letter for piece in pieces for letter in ([piece] if piece in added else piece)]
        assert tokenizer.convert_ids_to_tokens(ids) == letters


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_every_text_comes_back(tokenizer, probability):
    encoded = BPEDropout(tokenizer, probability).encode(TEXTS * 20, range(20 * len(TEXTS)))
    expected = tokenizer(TEXTS)["input_ids"]
    plain = [tokenizer.decode(ids, skip_special_tokens=False) for ids in expected]
    assert [tokenizer.decode(ids, skip_special_tokens=False) for ids in encoded] == plain * 20
    assert len({tuple(ids) for ids in encoded[:: len(TEXTS)]}) > 1


def test_the_seed_alone_decides(tokenizer):
    dropout, other = BPEDropout(tokenizer, 0.3), BPEDropout(copy.deepcopy(tokenizer), 0.3)
    texts = [TEXTS[0]] * 40
    seeds = [f"{number} source" for number in range(40)]
    encoded = dropout.encode(texts, seeds)
    assert other.encode(texts[::-1], seeds[::-1]) == encoded[::-1]
    assert other.encode(texts[7:8], seeds[7:8]) == encoded[7:8]
    assert len({tuple(ids) for ids in encoded}) > 30


def test_pieces_have_the_probabilities_of_algorithm_1():
    """Against the exact probabilities, by going through every set of dropped merges at every step."""
    tokenizer = VanillaTransformerTokenizerFast.train_from_iterator(["banana bandana"] * 5, 275, show_progress=False)
    dropout, p = BPEDropout(tokenizer, 0.35), 0.35
    merges = {pair: rank for pair, (rank, _) in dropout._merges.items()}
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))

    def outcomes(pieces):
        possible = sorted((merges[pair], place) for place, pair in enumerate(pairwise(pieces)) if pair in merges)
        found = Counter({pieces: p ** len(possible)})  # all are dropped
        for number, (_, place) in enumerate(possible):
            merged = dropout._ids[names[pieces[place]] + names[pieces[place + 1]]]
            for result, share in outcomes((*pieces[:place], merged, *pieces[place + 2 :])).items():
                found[result] += p**number * (1 - p) * share  # those before it are dropped, and it isn't
        return found

    expected = outcomes(tuple(tokenizer.convert_tokens_to_ids(["Ġ", *"bandana"])))
    assert len(expected) > 10
    assert sum(expected.values()) == pytest.approx(1)
    draws = 20_000
    seen = Counter(tuple(ids[:-1]) for ids in dropout.encode(["bandana"] * draws, range(draws)))
    assert seen.keys() <= expected.keys()
    for pieces, share in expected.items():
        # Five standard deviations of the count over this number of draws.
        assert abs(seen[pieces] - draws * share) <= 5 * (draws * share * (1 - share)) ** 0.5 + 1


# A corpus


def corpus_of(folder, sources, targets):
    for name, texts in (("s", sources), ("t", targets)):
        (folder / name).write_text("".join(text + "\n" for text in texts))
    return read_corpus(Corpus((str(folder / "s"),), (str(folder / "t"),)))


@pytest.fixture
def pairs(tmp_path, tokenizer):
    sources = [f"the house {number} near the bushes" for number in range(30)]
    targets = [f"das Haus {number} ist in der Nähe" for number in range(30)]
    return tokenize(corpus_of(tmp_path, sources, targets), tokenizer, Cleaning(max_length=100))


def test_a_tokenizers_own_dropout_segments_anew_at_each_call(pairs, tokenizer, tmp_path):
    dropping = copy.deepcopy(tokenizer)
    dropping.backend_tokenizer.model.dropout = 0.3
    texts = [list(pairs["source"]), list(pairs["target"])]
    first, second = (rows_of(tokenize(corpus_of(tmp_path, *texts), dropping, Cleaning(100))) for _ in range(2))
    assert first != second


def rows_of(dataset):
    return [(row["input_ids"], row["labels"]) for row in dataset]


def test_a_resegmented_corpus(pairs, tokenizer):
    varied = resegment(pairs, BPEDropout(tokenizer, 0.2), copies=3)
    assert (len(varied), set(varied.column_names)) == (90, {"input_ids", "labels"})
    for column, side in (("input_ids", "source"), ("labels", "target")):
        texts = [tokenizer.decode(row[column], skip_special_tokens=True) for row in varied]
        assert texts == [row[side] for row in pairs] * 3
        assert lengths_of(varied, column).sum() > 3 * lengths_of(pairs, column).sum()
    rows = rows_of(varied)
    assert rows[:30] != rows[30:60] != rows[60:]
    assert rows[:60] == rows_of(resegment(pairs, BPEDropout(tokenizer, 0.2), copies=2))
    assert rows != rows_of(resegment(pairs, BPEDropout(tokenizer, 0.2), copies=3, seed=1))
    assert rows != rows_of(resegment(pairs, BPEDropout(tokenizer, 0.1), copies=3))


def test_a_text_that_would_get_too_long_keeps_its_usual_pieces(pairs, tokenizer):
    usual = {column: lengths_of(pairs, column) for column in ("input_ids", "labels")}
    longest = int(max(lengths.max() for lengths in usual.values())) + 2
    dropout = BPEDropout(tokenizer, 0.1)
    free, varied = resegment(pairs, dropout, 4), resegment(pairs, dropout, 4, max_length=longest)
    for column, lengths in usual.items():
        found = lengths_of(varied, column)
        assert found.max() <= longest < lengths_of(free, column).max()
        assert found.sum() > 4 * lengths.sum()
    texts = [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in varied]
    assert texts == list(pairs["source"]) * 4


def test_pairs_that_were_left_out_stay_out(tmp_path, tokenizer):
    corpus = corpus_of(tmp_path, ["the house", "", "the bushes"], ["das Haus", "leer", "die Büsche"])
    varied = resegment(tokenize(corpus, tokenizer, Cleaning(100)), BPEDropout(tokenizer, 0.5), copies=2)
    texts = [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in varied]
    assert texts == ["the house", "the bushes"] * 2
