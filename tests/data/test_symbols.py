"""Tokenizers of words, characters, graphemes and bytes, for one side or two, and the symbols that they don't know."""

import copy
import pickle
import re
import time
from collections import Counter

import pytest
from datasets import Dataset
from opus_mt import opus_mt_folder
from transformers import AutoTokenizer

from hf_vanilla_transformer.checkpoints.loading import load_tokenizer, tokenizer_fingerprint
from hf_vanilla_transformer.data.corpora import read_corpus, rows_with
from hf_vanilla_transformer.data.formats import Corpus, CorpusError
from hf_vanilla_transformer.data.symbols import (
    KINDS,
    default_measures,
    shown,
    symbol_splitter,
    train_tokenizer,
    unknown_ids,
    unknown_symbols,
)

PAIRS = [
    {"source": "walk", "target": "w ɔː k"},
    {"source": "a  cat ", "target": "ə k æ t"},
    {"source": "e\u0301te\u0301", "target": "e t e"},
    {"source": "</s> <unk>", "target": "</s> <pad>x"},
]
SIZE = 300  # of vocabularies: enough for all


def ids_of(tokenizer, text: str, side: str = "source") -> list[int]:
    return tokenizer(text)["input_ids"] if side == "source" else tokenizer(text_target=text)["input_ids"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kinds", [1, 2])
def test_texts_come_back(kind, kinds, tmp_path):
    train_tokenizer(PAIRS, [kind] * kinds, vocab_size=SIZE).save_pretrained(tmp_path)
    tokenizer = pickle.loads(pickle.dumps(copy.deepcopy(AutoTokenizer.from_pretrained(tmp_path))))
    for pair in PAIRS:
        for side, text in pair.items():
            ids = ids_of(tokenizer, text, side)
            assert ids[-1] == 2  # </s> ends both sides
            assert set(ids[:-1]).isdisjoint((0, 1, 2))  # and is no word of the text
            back = tokenizer.decode(ids, skip_special_tokens=True, use_source_tokenizer=side == "source")
            parted = re.sub("(<pad|</s|<unk)>", r"\1 > ", text)  # a word isn't a special token
            assert back == (" ".join(parted.split()) if kind == "words" else text)


def test_kinds_divide_differently():
    def tokens(kind: str, text: str) -> list[str]:
        tokenizer = train_tokenizer(PAIRS, [kind], vocab_size=SIZE)
        return tokenizer.convert_ids_to_tokens(ids_of(tokenizer, text))[:-1]

    assert tokens("words", "w ɔː  k") == ["w", "ɔː", "k"]
    assert tokens("characters", "e\u0301t") == ["e", "\u0301", "t"]
    assert tokens("graphemes", "e\u0301t") == ["e\u0301", "t"]
    assert len(tokens("bytes", "ɔ")) == 3  # a space and two bytes


def test_two_tokenizers_have_vocabularies_of_their_own(tmp_path):
    made = train_tokenizer(PAIRS, ["characters", "words"], vocab_size=SIZE)
    made.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert type(tokenizer) is type(made)
    assert tokenizer.separate_vocabs
    assert "ɔː" in tokenizer.target_encoder
    assert "ɔː" not in tokenizer.get_vocab()
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(made)
    batch = tokenizer(["walk"], text_target=["w ɔː k"], padding=True)
    assert tokenizer.convert_ids_to_tokens(batch["labels"][0]) == ["w", "ɔː", "k", "</s>"]
    with pytest.raises((TypeError, ValueError)):
        tokenizer(text_target=[3])
    assert tokenizer(["walk"])["input_ids"] == batch["input_ids"]  # it is on the source's side again
    with pytest.raises(ValueError, match="can't add '<2de>'"):
        tokenizer.add_tokens(["<2de>"])
    (tmp_path / "target_tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"target_tokenizer\.json is missing"):
        AutoTokenizer.from_pretrained(tmp_path)


def test_features_are_one_symbol_each_and_take_linear_time():
    pairs = [{"source": "wa;lk\tV;PST", "target": "walked"}, {"source": "go\tPST\tV", "target": "went"}]
    for kind in ("characters", "graphemes", "words"):
        tokenizer = train_tokenizer(pairs, [kind, "characters"], features=True)
        ends = [tokenizer(pair["source"])["input_ids"][-3:-1] for pair in pairs]
        assert ends[0] == ends[1][::-1]
        assert unknown_symbols(tokenizer, ["go\tV;FUT"]) == {"\tFUT": 1}
        begun = time.process_time()
        assert len(tokenizer("a\tV" + ";V" * 19_999)["input_ids"]) == 20_002
        assert time.process_time() - begun < 10  # by looking back from each semicolon, it took 25 s
    back = tokenizer.decode(tokenizer(pairs[0]["source"])["input_ids"], use_source_tokenizer=True)
    assert back == "wa;lk \tV \tPST </s>"


def test_decoding_changes_no_state():
    """Other threads may be encoding, on either side."""
    tokenizer = train_tokenizer(PAIRS, ["characters", "words"], vocab_size=SIZE)
    ids = tokenizer(text_target="w ɔː k")["input_ids"][:-1]
    tokenizer._switch_to_target_mode()
    source = tokenizer("walk")["input_ids"]
    tokenizer._switch_to_target_mode()
    assert tokenizer.decode(source, skip_special_tokens=True, use_source_tokenizer=True) == "walk"
    assert tokenizer.convert_tokens_to_string(tokenizer.convert_ids_to_tokens(ids)) == "w ɔː k"
    assert tokenizer.convert_ids_to_tokens([*ids, 2], skip_special_tokens=True) == ["w", "ɔː", "k"]
    assert tokenizer.convert_ids_to_tokens(2) == "</s>"
    assert tokenizer._tokenizer is tokenizer._target_backend


def test_normal_forms_are_of_sources_alone():
    pairs = [{"source": "가각", "target": "가"}]
    tokenizer = train_tokenizer(pairs, ["characters", "characters"], source_normalization="nfd")
    assert len(ids_of(tokenizer, "가")) == 3
    assert len(ids_of(tokenizer, "가", "target")) == 2
    assert not unknown_symbols(tokenizer, ["각가"])


def test_unknown_symbols_are_counted():
    tokenizer = train_tokenizer(PAIRS, ["characters", "words"], min_frequency=2)
    assert unknown_ids(tokenizer) == (3, 3)
    assert unknown_symbols(tokenizer, ["a<w"]) == {"w": 1}
    found = unknown_symbols(tokenizer, ["k ɔː ɔː <unk>"], is_target=True)
    assert found == Counter({"ɔː": 2, "<unk": 1})  # ">" occurs twice
    assert shown(found) == "3 unknown symbols: 'ɔː' (2), '<unk' (1)"
    data = Dataset.from_list([{"ids": [4, 3, 2]}, {"ids": []}, {"ids": [4, 2]}, {"ids": [2, 3]}])
    assert rows_with(data, "ids", 3).tolist() == [0, 3]
    for kind in ("bpe", "bytes"):
        assert unknown_ids(train_tokenizer(PAIRS, [kind], vocab_size=SIZE)) == (None, None)
    frequent = train_tokenizer([{"source": "a a b", "target": "a c"}], ["words"], vocab_size=6)
    assert unknown_symbols(frequent, ["a b c"]) == {"c": 1}


def test_measures_follow_the_tokenizer():
    symbols = train_tokenizer(PAIRS, ["characters", "words"])
    assert default_measures(symbols) == ["exact_match", "ser"]
    assert symbol_splitter(symbols)("k  t͡ɕ") == ["k", "t͡ɕ"]
    pieces = train_tokenizer(PAIRS, vocab_size=SIZE)
    assert default_measures(pieces) == ["bleu", "chrf"]
    assert symbol_splitter(pieces) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ["letters"]}, "tokenizer is letters; give one or two of: bpe, words, characters"),
        ({"kinds": ["words", "words", "words"]}, "give one or two of"),
        ({"kinds": ["bpe", "words"], "features": True}, "feature_columns needs sources of words, .* not of bpe"),
        ({"kinds": ["words"], "source_normalization": "nfd"}, "give one of nfc, .* and a kind for each side"),
        ({"kinds": ["words", "words"], "source_normalization": "x"}, "source_normalization is 'x'"),
        ({"kinds": ["words"], "vocab_size": 4}, "give more than 4, the number of special tokens"),
        ({"kinds": ["words"], "min_frequency": 9}, "no symbol occurs 9 times"),
        ({"kinds": ["bpe"], "vocab_size": 100}, "at least 259"),
    ],
)
def test_what_cannot_be_made_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        train_tokenizer(PAIRS, **options)


def test_tables_have_features_and_numbered_columns(tmp_path):
    table = tmp_path / "train.tsv"
    table.write_text("walk\twalked\tV;PST\ngo\twent\t\n", encoding="utf-8")
    columns = {"source_column": "1", "target_column": "2", "feature_columns": ("3",)}
    pairs = read_corpus(Corpus(tables=(str(table),), **columns))
    assert list(pairs["source"]) == ["walk\tV;PST", "go"]
    assert list(pairs["target"]) == ["walked", "went"]
    named = tmp_path / "named.jsonl"
    named.write_text('{"lemma": "go", "form": "went", "tag": "PST"}\n', encoding="utf-8")
    corpus = Corpus(tables=(str(named),), source_column="lemma", target_column="form", feature_columns=("tag",))
    assert list(read_corpus(corpus)["source"]) == ["go\tPST"]
    for wrong, message in (
        (columns | {"target_column": "4"}, "column '4' is missing"),
        ({}, "or number them: source_column 1"),
        ({"target_column": "2"}, "its first line names no columns; give all by number, not source, 2"),
        ({"feature_columns": ("tag",)}, "column 'source' is missing; the first line has 'walk', 'walked', 'V;PST'"),
    ):
        with pytest.raises(CorpusError, match=message):
            read_corpus(Corpus(tables=(str(table),), **wrong))


def test_unknown_characters_of_pieces_have_names_on_both_sides(tmp_path):
    tokenizer, text = load_tokenizer(opus_mt_folder(tmp_path / "model")), "A man \u732b\u72ac x\u732b"
    assert unknown_symbols(tokenizer, [text, "A man"], is_target=True) == Counter(["\u732b\u72ac", "\u732b"])
    assert "\u732b\u72ac" in shown(unknown_symbols(tokenizer, [text]))
