"""The tokenizer of section 5.1: what goes in comes out, whatever it is, and however it was stored in between."""

import copy
import json
import pickle
from itertools import pairwise

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerTokenizer,
    VanillaTransformerTokenizerFast,
    tokenization_vanilla_transformer,
)
from hf_vanilla_transformer.checkpoints.loading import tokenizer_fingerprint

SENTENCES = [
    "A little girl climbs into a wooden playhouse.",
    "Ein kleines Mädchen klettert in ein Spielhaus aus Holz.",
    "Two young men, and a woman, are outside near many bushes.",
    "Zwei junge Männer und eine Frau, die lacht, sind im Freien.",
    "The wooden house is near the bushes , and the girl laughs .",
    "Das kleine Haus aus Holz ist in der Nähe vieler Büsche .",
    "a</s>b</s>c</s> <s>d</s> </s> x<pad>y<pad>z<s>",
]
CORPUS = SENTENCES * 8
NASTY = [
    "", " ", "  ", "\n", "\t", "\r\n", "\0", "\x7f", "a", " a", "a ", "  a  b  ", "a\tb\n\nc\r", "\n a", "a \n",
    "\u00a0a\u00a0b", "\u3000", "\u2028x\u2029", "\ufeff", "▁", "▁a ▁", "Ġ", "ĠaĠ", "Ċ", "\u200b", "a\u200db\u200c",
    "e\u0301 é", "\u0301", "שלום עולם", "\u202eabc", "\ue000\uf8ff", "\U0010ffff\ufffd", "漢字かな",
    "👩‍👩‍👧‍👦", "🇩🇪🏳️‍🌈",
    "</s>", "<pad>", "<s>", "a</s>b", " <s> ", "</s></s>", "<</s>>", "</ s>", "<pad", "<unk>", "<0x41>", "##a",
    "a , b . c", "...", " .", ". ", "a  .", "1,000.50 €", "don 't", "@-@", "&quot;", "a,b ,c , d", " , ", "a" * 300,
]  # fmt: skip


def train(texts=CORPUS, vocab_size=420, **options):
    return VanillaTransformerTokenizerFast.train_from_iterator(texts, vocab_size, show_progress=False, **options)


@pytest.fixture(scope="module")
def trained():
    return train()


@pytest.fixture(scope="module", params=[True, False], ids=["merged", "apart"])
def either(request, trained):
    """With pieces that may join words and punctuation, and without."""
    return trained if request.param else train(merge_punctuation=False)


@pytest.fixture
def tokenizer(trained):
    return copy.deepcopy(trained)


@pytest.fixture
def with_added_tokens(tokenizer):
    tokenizer.add_tokens(["<ü>", "neues Wort", "Ġx"])
    tokenizer.add_special_tokens({"extra_special_tokens": ["<2de>"]})
    return tokenizer


def returns(tokenizer, text):
    return tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


# ---- Training ----
def test_vocabulary(trained):
    assert len(trained) == trained.vocab_size == 420
    assert trained.convert_ids_to_tokens([0, 1, 2]) == ["<pad>", "<s>", "</s>"]
    assert (trained.pad_token_id, trained.bos_token_id, trained.eos_token_id) == (0, 1, 2)
    assert trained.unk_token is None
    assert trained.model_input_names == ["input_ids", "attention_mask"]
    assert set(tokenization_vanilla_transformer.BYTE_OF_LETTER) < set(trained.get_vocab())
    assert len(train(vocab_size=259)) == 259
    assert len(train(vocab_size=100_000)) < 1000  # as many as the text has pairs for
    assert len(train(vocab_size=1000, min_frequency=20)) < len(train(vocab_size=1000, min_frequency=2))


@pytest.mark.parametrize(
    "texts",
    [
        (text for text in CORPUS),
        [SENTENCES] * 8,
        datasets.Dataset.from_dict({"text": CORPUS}).to_iterable_dataset()["text"],
        ["", *CORPUS, ""],
    ],
    ids=["generator", "lists", "streaming column", "empty strings"],
)
def test_texts_from_any_iterable(texts, trained):
    assert train(texts).backend_tokenizer.to_str() == trained.backend_tokenizer.to_str()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"texts": []}, ValueError, "nothing to learn"),
        ({"texts": "one text"}, TypeError, r"texts is one str.*\[text\]"),
        ({"texts": {"text": CORPUS}}, TypeError, r"texts is one dict.*dataset\['text'\]"),
        ({"texts": ["a", ["b", None]]}, TypeError, r"texts\[1\]\[1\] is of type NoneType.*'' for a missing text"),
        ({"texts": datasets.Dataset.from_dict({"text": CORPUS})}, TypeError, r"texts\[0\] is of type dict"),
        ({"texts": ["a", "b\ud800"]}, ValueError, r"texts\[1\] has a lone surrogate at position 1"),
        ({"vocab_size": 258}, ValueError, "at least 259"),
        ({"vocab_size": 1e4}, ValueError, "vocab_size=10000.0: give an integer"),
        ({"vocab_size": 260, "extra_special_tokens": ["<a>", "<b>"]}, ValueError, "at least 261"),
        ({"min_frequency": 0}, ValueError, "min_frequency=0"),
        ({"vocabsize": 300}, TypeError, "unknown option 'vocabsize'.*padding_side"),
    ],
)
def test_bad_training_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        train(**arguments)


# ---- Text -> ids -> text ----
@pytest.mark.parametrize("text", NASTY)
def test_reversible_on_odd_texts(text, trained):
    ids = trained.encode(text)
    assert trained.decode(ids, skip_special_tokens=True) == text
    assert trained.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=True) == text
    assert trained.decode(ids) == text + "</s>"
    assert ids[-1] == 2
    assert not {0, 1, 2}.intersection(ids[:-1])  # text is never a control token


@settings(max_examples=50)
@given(st.text())
def test_reversible_on_any_text(either, text):
    assert returns(either, text)


def test_reversible_in_batches_and_in_every_container(either):
    batch = either(NASTY)["input_ids"]
    assert either.decode(batch, skip_special_tokens=True) == NASTY
    assert either.batch_decode(batch, skip_special_tokens=True) == NASTY
    padded = either(NASTY, padding=True, return_tensors="pt")["input_ids"]
    assert either.decode(padded, skip_special_tokens=True) == NASTY
    assert either.batch_decode(padded.numpy(), skip_special_tokens=True) == NASTY
    ids = either.encode("Zwei junge Männer")
    for form in (ids, tuple(ids), np.array(ids), torch.tensor(ids)):
        assert either.decode(form, skip_special_tokens=True) == "Zwei junge Männer"
    assert either.decode(2) == either.decode(torch.tensor(2)) == "</s>"
    assert either.decode([]) == ""
    assert either.decode([len(either), 10**6]) == ""  # as in transformers: models may have rows to spare
    with pytest.raises(ValueError, match=r"token id -100 .*pad_token_id"):
        either.decode([5, -100, -100])


@pytest.mark.parametrize("text", ["a" * 100_000, " " * 100_000])
def test_huge_words_are_no_trouble(text, trained):
    assert returns(trained, text)
    tokenizer = train([text], 300)
    assert returns(tokenizer, text)
    assert len(tokenizer.encode(text)) < 10_000


# ---- Control tokens and added tokens ----
@pytest.mark.parametrize("merge_punctuation", [True, False])
def test_control_tokens_in_texts_only_on_demand(trained, merge_punctuation):
    """No learned piece spells one either."""
    assert trained.encode("a</s>", split_special_tokens=False)[-2:] == [2, 2]
    assert trained.encode("a</s>").count(2) == 1
    assert trained("a</s>", text_target="<s>")["labels"].count(1) == 0
    assert "</s>" not in trained.tokenize("a</s>")
    tokenizer = train(["x</s>y</s>z<s>x<s>y<pad>x<pad>"] * 100, 2000, merge_punctuation=merge_punctuation)
    assert not any(id_ in tokenizer.encode("x</s>y<s>z<pad>", add_special_tokens=False) for id_ in (0, 1, 2))


def test_added_tokens_match_whole(tokenizer):
    assert tokenizer.add_tokens(["<2de>", "neues Wort"]) == 2
    assert tokenizer.tokenize("<2de> Holz neues Wort</s>") == ["<2de>", "ĠHolz", "Ġ", "neues Wort", "</s", ">"]


@pytest.mark.parametrize("text", [" Wort x", "  Wort", "   Wort", "Wort", "a Wort", " Wort Wort", " ", "  "])
def test_added_tokens_keep_the_space_that_they_begin_with(tokenizer, text):
    tokenizer.add_tokens([" Wort", "  Wort", " "])
    assert returns(tokenizer, text)


@pytest.mark.parametrize("key", ["extra_special_tokens", "additional_special_tokens"])
def test_special_tokens_of_the_user_match_whole_and_are_skipped(key, tokenizer, tmp_path):
    """Those of several calls, too."""
    closing = str(tokenizer.backend_tokenizer.post_processor)
    assert [tokenizer.add_special_tokens({key: tags}) for tags in (["<2de>"], ["<2ü>"])] == [1, 1]
    assert str(tokenizer.backend_tokenizer.post_processor) == closing
    assert tokenizer.decode(tokenizer("<2de><2ü>Holz").input_ids, skip_special_tokens=True) == "Holz"
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        assert one.extra_special_tokens == ["<2de>", "<2ü>"]
        ids = one("<2ü> Holz</s>")["input_ids"]
        assert ids[0] == one.convert_tokens_to_ids("<2ü>") == 421
        assert one.decode(ids) == "<2ü> Holz</s></s>"
        assert one.decode(ids, skip_special_tokens=True) == "Holz</s>"
        assert one.get_special_tokens_mask(ids, already_has_special_tokens=True) == [1] + [0] * (len(ids) - 2) + [1]


# ---- Sequences for the model ----
def test_sequences_and_pairs_end_once(trained):
    a, b = (trained.encode(text, add_special_tokens=False) for text in ("Holz", "wooden"))
    assert trained.encode("Holz") == [*a, 2]
    assert trained.encode("Holz", "wooden") == [*a, *b, 2]
    assert trained("") == {"input_ids": [2], "attention_mask": [1]}
    assert trained([]) == {"input_ids": [], "attention_mask": []}
    assert trained.num_special_tokens_to_add() == trained.num_special_tokens_to_add(pair=True) == 1
    assert trained.get_special_tokens_mask(a) == [0] * len(a) + [1]
    assert trained.get_special_tokens_mask(a, b) == [0] * (len(a) + len(b)) + [1]
    assert trained("Holz", return_special_tokens_mask=True)["special_tokens_mask"] == [0] * len(a) + [1]
    assert trained("Holz", "wooden", return_token_type_ids=True)["token_type_ids"] == [0] * len(a) + [1] * len(b) + [0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_keeps_the_end(side, tokenizer):
    tokenizer.truncation_side = side
    whole = tokenizer.encode(SENTENCES[0], add_special_tokens=False)
    kept = whole[:4] if side == "right" else whole[-4:]
    assert tokenizer.encode(SENTENCES[0], truncation=True, max_length=5) == [*kept, 2]
    assert len(tokenizer.encode(SENTENCES[0], SENTENCES[1], truncation=True, max_length=9)) == 9
    overflowing = tokenizer(SENTENCES[0], truncation=True, max_length=5, return_overflowing_tokens=True)["input_ids"]
    assert all(ids[-1] == 2 and len(ids) <= 5 for ids in overflowing)


def test_offsets_leave_out_the_space_before_a_word(trained):
    text = "Zwei  junge Männer , and </s> a girl"
    encoding = trained(text, return_offsets_mapping=True)
    spans = {text[start:end] for start, end in encoding["offset_mapping"][:-1]}
    assert not any(span.startswith(" ") and span.strip().isalpha() for span in spans)
    assert {"girl", "a"} <= spans
    assert encoding["offset_mapping"][-1] == (0, 0)
    assert encoding.char_to_token(text.index("girl")) == len(encoding["input_ids"]) - 2


@given(st.text(st.sampled_from("aé漢 \n,.</s>👩")))
def test_offsets_of_any_text(either, text):
    encoding = either(text, return_offsets_mapping=True)
    offsets = encoding["offset_mapping"][:-1]
    pieces = either.convert_ids_to_tokens(encoding["input_ids"][:-1])
    assert all(0 <= start <= end <= len(text) for start, end in offsets)
    assert all(first <= second for first, second in pairwise(start for start, _ in offsets))
    covered = {i for start, end in offsets for i in range(start, end)}
    assert covered >= {i for i, character in enumerate(text) if character != " "}
    for piece, (start, end) in zip(pieces, offsets, strict=True):
        if piece.isascii():
            assert text[start:end] == piece


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((None,), ValueError, "specify either `text` or `text_target`"),
        ((3,), TypeError, "text is of type int: give strings"),
        ((b"a",), TypeError, "text is of type bytes"),
        ((["a", None],), TypeError, r"text\[1\] is of type NoneType.*'' for a missing text"),
        ((np.array(["a"]),), TypeError, r"text is of type ndarray.*list\(column\)"),
        ((datasets.Dataset.from_dict({"t": ["a"]})["t"],), TypeError, r"text is of type Column.*list\(column\)"),
        (("a\ud83d",), ValueError, "text has a lone surrogate at position 1"),
        ((["a", ["b"]],), TypeError, "give a string, a list of strings or a list of pairs"),
        (([("a", "b", "c")],), TypeError, "a list of pairs of strings"),
        ((["a"], [None]), TypeError, r"text_pair\[0\] is of type NoneType"),
        (("a", ["b"]), TypeError, "text_pair likewise"),
        ((["a", "b"], ["c"]), ValueError, "batch length of `text`: 2 does not match.*1"),
    ],
)
def test_inputs_that_are_no_texts(arguments, error, message, trained):
    with pytest.raises(error, match=message):
        trained(*arguments)


# ---- Stored and loaded ----
def test_save_and_load(with_added_tokens, tmp_path):
    with_added_tokens.save_pretrained(tmp_path / "one")
    loaded = VanillaTransformerTokenizerFast.from_pretrained(tmp_path / "one")
    loaded.save_pretrained(tmp_path / "two")
    assert (tmp_path / "one" / "tokenizer.json").read_bytes() == (tmp_path / "two" / "tokenizer.json").read_bytes()
    texts = [*NASTY, "<2de> neues Wort<ü>"]
    expected = with_added_tokens(texts, return_offsets_mapping=True)
    for other in (
        loaded,
        AutoTokenizer.from_pretrained(tmp_path / "two"),
        copy.deepcopy(with_added_tokens),
        pickle.loads(pickle.dumps(with_added_tokens)),
    ):
        assert isinstance(other, VanillaTransformerTokenizerFast)
        assert other(texts, return_offsets_mapping=True) == expected
        assert other.decode(expected["input_ids"], skip_special_tokens=True)[:-1] == NASTY
        assert other.tokenize("</s>") == with_added_tokens.tokenize("</s>")
        assert len(other) == len(with_added_tokens)


@pytest.mark.parametrize("name", ["VanillaTransformerTokenizer", "VanillaTransformerTokenizerFast"])
def test_auto_class_by_either_name(name, trained, tmp_path):
    assert VanillaTransformerTokenizer is VanillaTransformerTokenizerFast
    trained.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] in ("VanillaTransformerTokenizer", "VanillaTransformerTokenizerFast")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": name}))
    for _ in range(2):  # without and with a model's configuration beside it
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert type(loaded) is VanillaTransformerTokenizerFast
        assert loaded.encode(SENTENCES[3]) == trained.encode(SENTENCES[3])
        VanillaTransformerConfig().save_pretrained(tmp_path)


def test_train_new_from_iterator(with_added_tokens):
    new = with_added_tokens.train_new_from_iterator(SENTENCES[:4] * 9, 400, new_special_tokens=["<2en>"])
    assert isinstance(new, VanillaTransformerTokenizerFast)
    assert len(new) == 400
    assert new.tokenize("<2en>x<2de>") == ["<2en>", "x", "<2de>"]
    assert all(returns(new, text) for text in NASTY)
    renamed = new.train_new_from_iterator(SENTENCES, 300, special_tokens_map={"</s>": "<end>"})
    assert renamed("Holz").tokens()[-1] == renamed.eos_token == "<end>"


def test_other_beginnings_and_ends_of_sequences_are_saved(trained, tmp_path):
    opening, tokenizer = copy.deepcopy(trained), copy.deepcopy(trained)
    opening.add_bos_token = True
    opening.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("Holz").tokens() == ["<s>", *trained("Holz").tokens()]
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("Holz").tokens()[-1] == loaded("Holz").tokens()[-1] == "<end>"
    assert AutoTokenizer.from_pretrained(tmp_path, eos_token="</s>")("Holz").tokens()[-1] == "</s>"
    loaded.eos_token = "<stop>"
    loaded.add_tokens("<stop>", special_tokens=True)
    assert loaded("Holz").tokens()[-1] == "<stop>"
    loaded.eos_token = None
    assert loaded("Holz").input_ids == loaded("Holz", add_special_tokens=False).input_ids
    assert loaded.get_special_tokens_mask([5]) == [0]


def test_the_fingerprint_is_that_of_what_was_trained(trained):
    tokenizer = copy.deepcopy(trained)
    tokenizer.add_tokens(["Holz", "ein", "<2de>"])
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(trained)
    assert tokenizer_fingerprint(train(vocab_size=400)) != tokenizer_fingerprint(trained)


# ---- Punctuation ----
def test_punctuation_stays_apart_where_it_shall():
    """On running text and on tokenised text alike, and however often a word stands before the same mark."""
    texts = [
        "in the street, in the street.",
        "in the street , in the street .",
        "it's (in the) street - 't-shirt'",
    ] * 20
    joined, apart = (train(texts, merge_punctuation=merge) for merge in (True, False))
    marks = set(",.'()-")

    def mixed(tokenizer):
        pieces = [piece for text in texts for piece in tokenizer.readable_pieces(tokenizer(text)["input_ids"][:-1])]
        return [piece for piece in pieces if set(piece) & marks and set(piece) - marks - {"▁"}]

    assert mixed(joined)
    assert not mixed(apart)
    assert joined.readable_pieces(joined("in the street .")["input_ids"]) == ["▁in", "▁the", "▁street▁.", "</s>"]
    assert apart.readable_pieces(apart("in the street .")["input_ids"]) == ["▁in", "▁the", "▁street", "▁.", "</s>"]
    assert apart.readable_pieces(apart("the street.")["input_ids"]) == ["▁the", "▁street", ".", "</s>"]
