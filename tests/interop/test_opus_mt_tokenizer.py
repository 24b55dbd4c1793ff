"""OpusMTTokenizerFast beside transformers' MarianTokenizer: ids, texts, files, options, errors, warnings."""

import copy
import json
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, DataCollatorForSeq2Seq

pytest.importorskip("sentencepiece", reason="sentencepiece isn't installed, which makes and reads the models here")

from odd_texts import NASTY, characters, random_texts
from opus_mt import CODES, TEXTS, marian_tokenizer, opus_mt_tokenizer_files

from hf_vanilla_transformer import VanillaTransformerConfig
from hf_vanilla_transformer.checkpoints.loading import check_tokenizer, tokenizer_fingerprint
from hf_vanilla_transformer.interop.sentencepiece import opus_mt_tokenizer
from hf_vanilla_transformer.tokenization_opus_mt import OpusMTTokenizerFast

MULTI30K = Path(__file__).parents[3] / "shared" / "data" / "multi30k"
ROOT = Path(__file__).parents[2]


class Both:
    """The two tokenizers of a folder, and what differs between them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.marian, self.ours = folder, marian_tokenizer(folder), opus_mt_tokenizer(folder)

    def differences(self, texts, ours=None, **options) -> list:
        ours, found = ours or self.ours, []
        for side in ("text", "text_target"):
            wanted, own = (tokenizer(**{side: texts}, **options) for tokenizer in (self.marian, ours))
            assert wanted.keys() == own.keys()
            for name in wanted:
                pairs = zip(texts, wanted[name], own[name], strict=True)
                found += [(side, name, text, w, o) for text, w, o in pairs if w != o]
        return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("opus_mt")
    return {
        "one": opus_mt_tokenizer_files(path / "one"),
        "multi": opus_mt_tokenizer_files(path / "multi", multi_target=True),
        "separate": opus_mt_tokenizer_files(path / "separate", separate_vocabs=True),
        "lower": opus_mt_tokenizer_files(path / "lower", normalization_rule_name="nfkc_cf"),
        "identity": opus_mt_tokenizer_files(path / "identity", normalization_rule_name="identity"),
        "phrases": opus_mt_tokenizer_files(path / "phrases", split_by_whitespace=False),
        "unlisted": _unlisted(opus_mt_tokenizer_files(path / "unlisted")),
    }


def _unlisted(folder: Path) -> Path:
    """Takes pieces out of the vocabulary, and puts runs of unknown characters into it."""
    tokens = list(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    kept = [token for n, token in enumerate(tokens) if n % 7 or token in ("</s>", "<unk>", "<pad>")]
    kept[-1:-1] = ["☃☃", "日本語", "☃", "ق", "xyz日"]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(kept)}))
    return folder


@pytest.fixture(scope="module")
def pairs(folders) -> dict[str, Both]:
    return {name: Both(folder) for name, folder in folders.items()}


@pytest.fixture(params=["one", "multi", "separate", "lower", "identity", "phrases", "unlisted"])
def both(request, pairs) -> Both:
    return pairs[request.param]


@pytest.fixture
def multi(pairs) -> Both:
    return pairs["multi"]


@pytest.fixture(scope="module")
def multi30k(tmp_path_factory) -> tuple[Both, dict[str, list[str]]]:
    """Tokenizers of thousands of pieces, and the lines that they were made from."""
    if not MULTI30K.is_dir():
        pytest.skip(f"Multi30k isn't in {MULTI30K}: put train.en, train.de and the rest there")
    lines = {language: (MULTI30K / f"train.{language}").read_text("utf-8").splitlines() for language in ("en", "de")}
    texts, pieces = {"source": lines["en"], "target": lines["de"]}, {"source": 8000, "target": 9000}
    folder = opus_mt_tokenizer_files(tmp_path_factory.mktemp("multi30k"), texts=texts, pieces=pieces)
    return Both(folder), lines


# Text -> ids


def test_nasty_texts(both):
    assert both.differences([*NASTY, *TEXTS["source"], *TEXTS["target"]]) == []


def test_nasty_texts_one_by_one_and_as_tokens(both):
    for text in NASTY:
        assert both.ours(text)["input_ids"] == both.marian(text)["input_ids"], text
        assert both.ours.tokenize(text) == both.marian.tokenize(text), text
        assert both.ours.encode(text) == both.marian.encode(text), text


def test_unknown_characters_are_looked_up_as_a_run(pairs):
    both = pairs["unlisted"]
    texts = ["☃☃", "☃", "☃☃☃", "a ☃☃ b", "☃☃日本語", "日本語", "a日本語", "ق", "xyz日", "ققق ق"]
    assert both.differences(texts) == []
    vocabulary = both.ours.get_vocab()
    assert both.ours("☃☃")["input_ids"][-2] == vocabulary["☃☃"]
    assert both.ours("☃☃☃")["input_ids"][-2] == both.ours.unk_token_id


def test_rounding_in_32_bits_decides_between_equal_ways(pairs):
    # In 64 bits, "a|aa|..." and "aa|a|..." are equally good, and the other one would be taken.
    random.seed(0)
    letters = "aehinorst.-,0"
    texts = [" ".join(random.choice(letters) * random.randint(1, 40) for _ in range(3)) for _ in range(300)]
    assert pairs["one"].differences(texts) == []


@given(st.lists(st.text(max_size=60), max_size=4))
def test_any_texts(pairs, texts):
    assert pairs["one"].differences(["", *texts]) == []


@given(st.text(alphabet=st.sampled_from("abe.ä ▁>< \t\u0301ﬁ½한ᄀ\u200d😀é"), max_size=40))
def test_texts_of_difficult_characters(pairs, text):
    for name in ("one", "multi", "identity", "unlisted"):
        assert pairs[name].differences([text, f"</s>{text}", f">>deu<<{text}"]) == []


def test_random_strings(both):
    random.seed(1)
    assert both.differences(random_texts(1000, characters(TEXTS["source"] + TEXTS["target"]))) == []


@pytest.mark.hard
@pytest.mark.parametrize("part", range(5))
def test_100_000_random_strings(multi30k, multi, part):
    random.seed(part)
    both, lines = multi30k
    assert both.differences(random_texts(10_000, characters(lines["en"] + lines["de"]))) == []
    assert multi.differences(random_texts(10_000, characters(TEXTS["source"] + TEXTS["target"]))) == []


@pytest.mark.slow
def test_every_line_of_multi30k(multi30k):
    both, lines = multi30k
    assert both.differences(lines["en"]) == []
    assert both.differences(lines["de"]) == []
    for text in lines["en"][:1000] + lines["de"][:1000]:
        assert both.ours(text)["input_ids"] == both.marian(text)["input_ids"], text


@pytest.mark.slow
def test_long_texts(multi30k):
    both, lines = multi30k
    texts = [separator.join(lines[language][:n]) for n in (30, 200, 800) for language in lines for separator in " \n"]
    assert both.differences(texts, verbose=False) == []


# Ids -> text


@pytest.mark.parametrize("options", [{}, {"skip_special_tokens": True}, {"clean_up_tokenization_spaces": True}])
def test_random_ids_give_the_same_text(both, options):
    random.seed(2)
    size = len(both.marian.decoder)
    ids = [[random.randrange(size) for _ in range(random.randint(0, 30))] for _ in range(500)]
    ids += (
        [[n] for n in range(size)]
        + [[n, 0, n] for n in range(size)]
        + [[1, n, both.ours.pad_token_id, n] for n in range(size)]
    )
    assert both.ours.batch_decode(ids, **options) == both.marian.batch_decode(ids, **options)
    for use in (True, False):
        wanted = both.marian.batch_decode(ids[:200], use_source_tokenizer=use, **options)
        assert both.ours.batch_decode(ids[:200], use_source_tokenizer=use, **options) == wanted


def test_ids_of_all_kinds_are_decoded(multi):
    ids = multi.ours(TEXTS["source"][:3], padding=True)["input_ids"]
    wanted = multi.marian.batch_decode(ids, skip_special_tokens=True)
    for given_ids in (ids, torch.tensor(ids), torch.tensor(ids).numpy(), [torch.tensor(row) for row in ids]):
        assert multi.ours.batch_decode(given_ids, skip_special_tokens=True) == wanted
    assert multi.ours.decode(ids[0], skip_special_tokens=True) == wanted[0]
    assert multi.ours.decode(5) == multi.marian.decode([5])
    assert multi.ours.decode([]) == ""


def test_ids_outside_the_vocabulary_are_refused(both):
    size = len(both.ours._names_of)
    for ids in ([0, size], [-100, 0], [10**9]):
        with pytest.raises(ValueError, match=rf"token id -?\d+ isn't in the vocabulary of {size:,}; put pad_token_id"):
            both.ours.decode(ids)


def test_tokens_and_ids(both):
    ours, marian = both.ours, both.marian
    assert len(ours) == len(marian)
    assert ours.vocab_size == marian.vocab_size
    assert ours.get_vocab() == marian.get_vocab()
    tokens = [*marian.get_vocab(), "nonsense", " ▁a", "</s>"]
    assert ours.convert_tokens_to_ids(tokens) == marian.convert_tokens_to_ids(tokens)
    ids = list(range(len(marian.decoder)))
    assert ours.convert_ids_to_tokens(ids) == marian.convert_ids_to_tokens(ids)
    assert ours.convert_ids_to_tokens(ids, skip_special_tokens=True) == marian.convert_ids_to_tokens(ids, True)
    assert ours.convert_ids_to_tokens(7) == marian.convert_ids_to_tokens(7)
    assert ours.supported_language_codes == marian.supported_language_codes
    assert (ours.all_special_tokens, ours.all_special_ids) == (
        ["</s>", "<unk>", "<pad>"],
        marian.convert_tokens_to_ids(["</s>", "<unk>", "<pad>"]),
    )
    assert ours.model_max_length == 512


# Options


OPTIONS = [
    {"padding": True},
    {"padding": "max_length", "max_length": 60},
    {"padding": "longest", "padding_side": "left"},
    {"padding": True, "pad_to_multiple_of": 8},
    {"padding": "max_length", "max_length": 16, "truncation": True, "pad_to_multiple_of": 8},
    {"truncation": True, "max_length": 5},
    {"truncation": True, "max_length": 1},
    {"truncation": "only_first", "max_length": 4, "padding": True},
    {"truncation": True, "max_length": 3, "add_special_tokens": False},
    {"add_special_tokens": False},
    {"return_attention_mask": False},
    {"return_special_tokens_mask": True, "padding": True},
    {"return_length": True},
    {"split_special_tokens": True},
]
LINES = [*TEXTS["source"][:4], "", "1,000 ooooo", "ä☃ö", ">>deu<< A dog", "a</s>b <pad>"]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(multi, options):
    assert multi.differences(LINES, **options) == []
    for text in LINES:
        assert dict(multi.ours(text, **options)) == dict(multi.marian(text, **options))


@pytest.mark.parametrize("side", ["left", "right"])
def test_sides_of_padding_and_truncation(multi, folders, side):
    ours = opus_mt_tokenizer(folders["multi"])
    marian = marian_tokenizer(folders["multi"])
    for tokenizer in (ours, marian):
        tokenizer.padding_side = tokenizer.truncation_side = side
    options = {"padding": True, "truncation": True, "max_length": 6}
    assert ours(LINES, **options)["input_ids"] == marian(LINES, **options)["input_ids"]


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_tensors(multi, kind):
    wanted, own = (
        tokenizer(LINES, text_target=LINES[::-1], return_tensors=kind, padding=True)
        for tokenizer in (multi.marian, multi.ours)
    )
    assert wanted.keys() == own.keys() == {"input_ids", "attention_mask", "labels"}
    assert all(type(wanted[name]) is type(own[name]) and (wanted[name] == own[name]).all() for name in wanted)
    assert multi.ours("a", return_tensors=kind)["input_ids"].shape == (1, 2 + len(multi.ours.tokenize("a")) - 1)
    if kind == "pt":
        assert own.to("cpu")["labels"].dtype == torch.int64


def test_words_and_pairs(multi):
    words = [["A", "dog"], [">>deu<<", "A"], ["☃☃", "ä"], ["a b", "1,000"]]
    wanted = multi.marian(words, is_split_into_words=True)["input_ids"]
    assert multi.ours(words, is_split_into_words=True, padding=False)["input_ids"] == wanted
    assert multi.ours(words[0], is_split_into_words=True)["input_ids"] == wanted[0]
    for first, second in (("A dog", "ein Hund"), ("☃", "ä 1,000"), ("", "a"), (">>deu<< a", ">>deu<< b")):
        assert multi.ours(first, second)["input_ids"] == multi.marian(first, second)["input_ids"]
        assert multi.ours([(first, second)])["input_ids"] == [multi.marian(first, second)["input_ids"]]
    long = multi.ours(["A dog runs.", "☃ A dog runs."], truncation=True, max_length=4, return_overflowing_tokens=True)
    assert set(long["overflow_to_sample_mapping"]) == {0, 1}
    assert all(len(row) <= 4 and row[-1] == 0 for row in long["input_ids"])


def test_an_empty_batch(multi):
    assert dict(multi.ours([])) == {"input_ids": [], "attention_mask": []}
    assert dict(multi.ours([], text_target=[])) == {"input_ids": [], "attention_mask": [], "labels": []}


def test_offsets_say_where_the_pieces_are(both):
    texts = [*TEXTS["source"], *NASTY]
    for text, encoded in zip(texts, map(dict, (both.ours(t, return_offsets_mapping=True) for t in texts)), strict=True):
        pieces = both.marian.tokenize(text)
        assert len(encoded["offset_mapping"]) == len(pieces) + 1
        assert encoded["offset_mapping"][-1] == (0, 0)
        for piece, (begin, end) in zip(pieces, encoded["offset_mapping"][:-1], strict=True):
            assert 0 <= begin <= end <= len(text)
            if piece.isascii() and piece.isprintable():
                there = unicodedata.normalize("NFKC", text[begin:end]).casefold()
                assert piece.casefold() in there, (text, piece, begin, end)
    batch = both.ours(texts, return_offsets_mapping=True)["offset_mapping"]
    assert batch == [both.ours(text, return_offsets_mapping=True)["offset_mapping"] for text in texts]


def test_offsets_of_the_two_ways_agree(pairs):
    both = pairs["one"]
    side = both.ours._sides[0]
    for text in TEXTS["source"]:
        offsets = both.ours(text, return_offsets_mapping=True)["offset_mapping"][:-1]
        assert [(piece.start, piece.end) for piece in side.read(text, True)] == offsets


def test_offsets_of_words_pairs_and_tensors(multi):
    encoded = multi.ours([["☃", "A dog"]], is_split_into_words=True, return_offsets_mapping=True)
    places = encoded["offset_mapping"][0]
    assert max(end for _, end in places) == len("A dog")
    encoded = multi.ours(
        ["☃ A"], ["dog ☃☃"], return_offsets_mapping=True, return_tensors="pt", padding="max_length", max_length=30
    )
    assert encoded["offset_mapping"].shape == (1, 30, 2)
    assert encoded["offset_mapping"].max() == len("dog ☃☃")


def test_encodings_are_there_when_they_are_wanted(multi, pairs):
    batch = multi.ours(["A man", "A dog"], padding=True)
    assert batch.is_fast
    wanted = [*multi.ours.tokenize("A man"), "</s>"]
    assert batch.tokens(0)[: len(wanted)] == wanted
    assert batch.char_to_token(1, 2) is not None
    assert [encoding.ids for encoding in batch.encodings] == batch["input_ids"]
    target = multi.ours(text_target=["Ein Hund"])
    assert [encoding.ids for encoding in target.encodings] == target["input_ids"]
    assert pickle.loads(pickle.dumps(batch)).data == batch.data == copy.deepcopy(batch).data
    # Where the backend finds other pieces, there are none rather than wrong ones.
    doubtful = pairs["unlisted"].ours(["A man", "☃☃"])
    with pytest.raises(ValueError, match="not available"):
        doubtful.char_to_token(0, 0)


def test_the_sides_dont_stay_switched(multi):
    with pytest.raises(TypeError):
        multi.ours(text_target=[None])
    assert multi.ours.tokenize("Ein Hund") == multi.marian.tokenize("Ein Hund")
    multi.ours._switch_to_target_mode()
    assert multi.ours.tokenize("Ein Hund") == multi.ours._sides[1].backend.encode("Ein Hund").tokens[:-1]
    multi.ours._switch_to_input_mode()


def test_threads_dont_disturb_each_other(multi):
    texts = (TEXTS["source"] + TEXTS["target"] + ["ooooooo ☃☃"]) * 3

    def encode(n: int) -> list:
        options = [{}, {"padding": "max_length", "max_length": 40 + n}, {"truncation": True, "max_length": 4}][n % 3]
        options = {**options, "return_offsets_mapping": n % 2 == 0}
        return [dict(multi.ours(**{side: texts}, **options)) for side in (["text", "text_target"] * 2)[n % 2 :]]

    wanted = [encode(n) for n in range(12)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(encode, range(12))) == wanted


def test_a_collator_of_transformers(multi):
    rows = [multi.ours(text, text_target=text) for text in TEXTS["source"][:3]]
    batch = DataCollatorForSeq2Seq(multi.ours, return_tensors="pt")(rows)
    assert batch["input_ids"].shape == batch["attention_mask"].shape
    assert (batch["labels"] == -100).any()


# Added tokens


def test_added_tokens(folders):
    ours, marian = opus_mt_tokenizer(folders["multi"]), marian_tokenizer(folders["multi"])
    assert ours.add_tokens(["<b>", "man", "two words", "<b>"]) == marian.add_tokens(["<b>", "man", "two words", "<b>"])
    for tokenizer in (ours, marian):
        tokenizer.add_special_tokens({"extra_special_tokens": ["<x>"]})
    texts = [
        "a <b> b",
        "<b>a",
        "man",
        "A woman",
        "two words",
        "a two wordsb",
        "<x>a<x> ☃ <b>",
        "two  words",
        ">>deu<< <b>",
    ]
    for side in ("text", "text_target"):
        assert ours(**{side: texts})["input_ids"] == marian(**{side: texts})["input_ids"]
    assert len(ours) == len(marian)
    ids = list(range(len(ours)))
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == marian.decode(ids, skip_special_tokens=skip)
    with pytest.raises(ValueError, match="' z' begins with a space"):
        ours.add_tokens([" z"])


def test_added_tokens_of_a_fine_tuned_marian_are_kept(folders, tmp_path):
    marian = marian_tokenizer(folders["one"])
    marian.add_tokens(["<b>", "<c>"])
    marian.save_pretrained(tmp_path)
    both = Both(tmp_path)
    assert both.differences(["a <b> c<c>", "<c>"]) == []
    assert len(both.ours) == len(marian)


def test_separate_vocabularies_take_no_tokens(pairs):
    with pytest.raises(ValueError, match="can't add '<b>': source and target have vocabularies of their own"):
        pairs["separate"].ours.add_tokens(["<b>"])


# Files


def test_saved_and_loaded(both, tmp_path, monkeypatch):
    monkeypatch.setattr(OpusMTTokenizerFast, "_auto_class", None)  # without code beside it
    both.ours(TEXTS["source"], padding=True, truncation=True, max_length=4)  # settings that must not be saved
    both.ours(["a"], ["b"], padding=True, truncation=True, max_length=4)
    files = both.ours.save_pretrained(tmp_path)
    names = {"tokenizer.json", "target_tokenizer.json", "tokenizer_config.json"}
    assert {Path(file).name for file in files} == {file.name for file in tmp_path.iterdir()} == names
    loaded = OpusMTTokenizerFast.from_pretrained(tmp_path)
    texts = [*NASTY, *TEXTS["source"]]
    assert both.differences(texts, loaded) == []
    assert loaded.get_vocab() == both.ours.get_vocab()
    loaded.save_pretrained(tmp_path / "again")
    for name in names - {"tokenizer_config.json"}:
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda tokenizer: pickle.loads(pickle.dumps(tokenizer))])
def test_copies(both, copied):
    texts = [*NASTY[::3], *TEXTS["source"]]
    other = copied(both.ours)
    assert both.differences(texts, other) == []
    if not other.separate_vocabs:
        other.add_tokens(["dog☃"])
        assert len(other) == len(both.ours) + 1


def test_a_missing_target_side(multi, tmp_path):
    multi.ours.save_pretrained(tmp_path)
    (tmp_path / "target_tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"target_tokenizer.json is missing"):
        OpusMTTokenizerFast.from_pretrained(tmp_path)


def test_auto_tokenizer_finds_the_class(multi, tmp_path):
    multi.ours.save_pretrained(tmp_path)
    VanillaTransformerConfig(vocab_size=len(multi.ours)).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert type(loaded) is OpusMTTokenizerFast
    assert multi.differences(NASTY, loaded) == []


ALONE = """
import json, sys
for hidden in ("hf_vanilla_transformer", "sentencepiece", "google.protobuf"):
    sys.modules[hidden] = None
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
texts = json.loads(sys.stdin.read())
encoded = tokenizer(texts, text_target=texts)
decoded = tokenizer.batch_decode(encoded["labels"])
tokenizer.save_pretrained(sys.argv[2])
print(json.dumps([type(tokenizer).__module__, encoded["input_ids"], encoded["labels"], decoded]))
"""


def test_without_this_package_and_sentencepiece(multi, tmp_path, monkeypatch):
    monkeypatch.setattr(OpusMTTokenizerFast, "_auto_class", None)
    OpusMTTokenizerFast.register_for_auto_class()
    folder = tmp_path / "checkpoint"
    multi.ours.save_pretrained(folder)
    VanillaTransformerConfig(vocab_size=len(multi.ours)).save_pretrained(folder)
    auto_map = json.loads((folder / "tokenizer_config.json").read_text())["auto_map"]
    assert auto_map == {"AutoTokenizer": [None, "tokenization_opus_mt.OpusMTTokenizerFast"]}
    texts = [*NASTY, *TEXTS["source"]]
    command = [sys.executable, "-c", ALONE, str(folder), str(tmp_path / "again")]
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command, input=json.dumps(texts), capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=250
    )
    assert done.returncode == 0, done.stderr
    module, ids, labels, decoded = json.loads(done.stdout.splitlines()[-1])
    assert module.startswith("transformers_modules.")
    encoded = multi.marian(texts, text_target=texts)
    assert (ids, labels) == (encoded["input_ids"], encoded["labels"])
    assert decoded == multi.marian.batch_decode(labels)
    assert (tmp_path / "again" / "tokenization_opus_mt.py").is_file()
    assert (tmp_path / "again" / "target_tokenizer.json").is_file()


CONVERTED_WITHOUT_SENTENCEPIECE = """
import sys
sys.modules["sentencepiece"] = None
from hf_vanilla_transformer.interop.sentencepiece import opus_mt_tokenizer
opus_mt_tokenizer(sys.argv[1]).save_pretrained(sys.argv[2])
"""


def test_converts_without_sentencepiece(multi, folders, tmp_path):
    code = [sys.executable, "-c", CONVERTED_WITHOUT_SENTENCEPIECE, str(folders["multi"]), str(tmp_path)]
    done = subprocess.run(code, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert multi.differences(NASTY, OpusMTTokenizerFast.from_pretrained(tmp_path)) == []


# What can't be converted


def spoiled(folder: Path, path: Path, change) -> Path:
    """A copy of a folder whose source.spm is changed by a function of its protobuf."""
    from transformers.convert_slow_tokenizer import import_protobuf

    shutil.copytree(folder, path, dirs_exist_ok=True)
    model = import_protobuf().ModelProto()
    model.ParseFromString((path / "source.spm").read_bytes())
    change(model)
    (path / "source.spm").write_bytes(model.SerializeToString())
    return path


def set_types(kind: int):
    def change(model) -> None:
        model.pieces[10].type = kind

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: setattr(model.trainer_spec, "model_type", 2), "it isn't a unigram model"),
        (lambda model: setattr(model.trainer_spec, "byte_fallback", True), "it writes unknown characters as bytes"),
        (
            lambda model: setattr(model.trainer_spec, "treat_whitespace_as_suffix", True),
            "it writes spaces behind words",
        ),
        (lambda model: setattr(model.trainer_spec, "unk_piece", "???"), "its unknown token isn't <unk>"),
        (lambda model: setattr(model.normalizer_spec, "add_dummy_prefix", False), "no space before the first word"),
        (lambda model: setattr(model.normalizer_spec, "remove_extra_whitespaces", False), "it keeps extra spaces"),
        (lambda model: setattr(model.normalizer_spec, "escape_whitespaces", False), "it doesn't write spaces as ▁"),
        (set_types(4), "it has user-defined symbols"),
        (set_types(6), "it writes unknown characters as bytes"),
    ],
)
def test_models_with_other_rules_are_refused(folders, tmp_path, change, reason):
    folder = spoiled(folders["one"], tmp_path / "spoiled", change)
    with pytest.raises(ValueError, match=rf"source.spm can't be converted: .*{reason}"):
        opus_mt_tokenizer(folder)


def test_unused_pieces_are_never_given(folders, tmp_path):
    def change(model) -> None:
        for piece in list(model.pieces)[5::9]:
            piece.type = 5

    both = Both(spoiled(folders["one"], tmp_path / "unused", change))
    assert both.differences([*NASTY, *TEXTS["source"]]) == []
    ids = [[n, 0, n] for n in range(len(both.ours))]
    assert both.ours.batch_decode(ids) == both.marian.batch_decode(ids)


def test_rules_with_spaces_are_refused(tmp_path):
    rules = tmp_path / "rules.tsv"
    rules.write_text("61 20 62\t63\n")  # "a b" -> "c"
    folder = opus_mt_tokenizer_files(tmp_path / "odd", normalization_rule_tsv=str(rules))
    with pytest.raises(ValueError, match="its normalisation has rules with spaces"):
        opus_mt_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("source.spm", None, "source.spm is missing; OPUS-MT models with BPE"),
        ("target.spm", None, "target.spm is missing"),
        ("vocab.json", None, "vocab.json is missing"),
        ("source.spm", b"\xff\xff\xff nonsense", "source.spm (is damaged|can't be converted)"),
        ("source.spm", b"", "it has no pieces"),
        ("vocab.json", b"{", "vocab.json is cut short or not JSON"),
        ("vocab.json", b"[]", "vocab.json is not a JSON object"),
        ("vocab.json", b'{"</s>": 0, "<unk>": 1, "<pad>": 3}', "doesn't number its 3 tokens from 0 on"),
        ("vocab.json", b'{"</s>": 0, "<unk>": 0, "<pad>": 1}', "doesn't number its 3 tokens from 0 on"),
        ("vocab.json", b'{"</s>": "0", "<unk>": 1, "<pad>": 2}', "ids that are no integers"),
        ("vocab.json", b'{"</s>": 0, "a": 1}', "vocab.json has no <unk>, <pad>"),
        ("vocab.json", b'{"</s>": 0, "<unk>": 1, " a": 2, "<pad>": 3}', "has the token ' a'"),
        ("tokenizer_config.json", b'{"sp_model_kwargs": {"enable_sampling": true}}', "samples pieces"),
        ("tokenizer_config.json", b'{"separate_vocabs": true}', "target_vocab.json is missing"),
    ],
)
def test_damaged_folders_are_refused(folders, tmp_path, name, content, message):
    folder = shutil.copytree(folders["one"], tmp_path / "damaged")
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        opus_mt_tokenizer(folder)


# Errors and warnings


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ([None], TypeError, r"text\[0\] is of type NoneType"),
        (["a", 3], TypeError, r"text\[1\] is of type int"),
        (5, TypeError, "text is of type int"),
        (b"a", TypeError, "text is of type bytes"),
        ({"a": "b"}, TypeError, "text is of type dict"),
        (iter(["a"]), TypeError, "text is of type list_iterator"),
        ("a\ud800", ValueError, "text has a lone surrogate at position 1"),
        (["a", "\udfff"], ValueError, r"text\[1\] has a lone surrogate at position 0"),
    ],
)
def test_errors_name_what_is_wrong(multi, text, error, message):
    with pytest.raises(error, match=message):
        multi.ours(text)
    with pytest.raises(error, match=message):
        multi.ours(text_target=text)


def warnings_of(caplog, tokenizer, *args, **kwargs) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        tokenizer(*args, **kwargs)
    return [record.getMessage() for record in caplog.records]


def test_warns_once_of_missing_codes(folders, caplog):
    ours = opus_mt_tokenizer(folders["multi"])
    assert ours.supported_language_codes == CODES
    assert warnings_of(caplog, ours, [">>deu<< A dog", "", ">>fra<<"]) == []
    assert warnings_of(caplog, ours, text_target=["Ein Hund"]) == []
    (warning,) = warnings_of(caplog, ours, [">>deu<< a", "A dog", "A man"])
    assert "begins with no language code" in warning
    assert ">>deu<<, >>fra<<, >>nld<<" in warning
    assert warnings_of(caplog, ours, "A cat") == []


def test_warns_once_of_unknown_codes(folders, caplog):
    ours = opus_mt_tokenizer(folders["multi"])
    (warning,) = warnings_of(caplog, ours, ">>xyz<< A dog")
    assert "no language code '>>xyz<<'; those it knows are >>deu<<, >>fra<<, >>nld<<" in warning
    assert warnings_of(caplog, ours, ">>xyz<< A dog") == []
    one = opus_mt_tokenizer(folders["one"])
    assert one.supported_language_codes == []
    assert warnings_of(caplog, one, "A dog") == []
    (warning,) = warnings_of(caplog, one, [[">>deu<<", "A"]], is_split_into_words=True)
    assert "no language code '>>deu<<'; it has none" in warning


def test_training_anew_is_refused(multi):
    with pytest.raises(NotImplementedError, match="can't be trained anew"):
        multi.ours.train_new_from_iterator(["a"], 300)


# With the rest of this package


def test_fingerprint(both, tmp_path):
    fingerprint = tokenizer_fingerprint(both.ours)
    both.ours.save_pretrained(tmp_path)
    loaded = OpusMTTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer_fingerprint(loaded) == fingerprint
    config = VanillaTransformerConfig(
        vocab_size=len(loaded), pad_token_id=loaded.pad_token_id, eos_token_id=0, bos_token_id=None
    )
    config.tokenizer_fingerprint = fingerprint
    check_tokenizer(loaded, config, "here")


def test_fingerprints_differ(pairs):
    different = ["one", "multi", "separate", "lower", "unlisted"]
    assert len({tokenizer_fingerprint(pairs[name].ours) for name in different}) == len(different)
