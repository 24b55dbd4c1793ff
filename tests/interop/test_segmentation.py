"""Tokenizers of dictionaries with subword-nmt's codes or SentencePiece models give the originals' tokens and texts."""

import io
import json
import pickle
import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from odd_texts import NASTY, characters, random_texts
from opus_mt import TEXTS, spm_model
from transformers import AutoTokenizer

from hf_vanilla_transformer import DictionaryTokenizerFast
from hf_vanilla_transformer.interop.base import ConversionError
from hf_vanilla_transformer.interop.segmentation import codes_in, tokenizer_of

MULTI30K = Path(__file__).parents[3] / "shared" / "data" / "multi30k"
SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
KINDS = [f"{kind}{how}" for kind in ("codes 0.1", "codes 0.2", "unigram", "bpe") for how in ("", ", restricted")]
SIDES = ("source", "target")


def learn_codes(texts, merges, version, file):
    """Writes subword-nmt's codes; version 0.1 has the end of words as a symbol of its own."""
    learn_bpe = pytest.importorskip("subword_nmt.learn_bpe", reason="subword-nmt, the original, isn't installed")
    output = io.StringIO()
    learn_bpe.learn_bpe(io.StringIO("\n".join(texts)), output, merges)
    lines = output.getvalue().splitlines()
    if version == "0.1":
        lines = [
            f"{line[: -len('</w>')]} </w>" if line.endswith("</w>") and n % 2 else line
            for n, line in enumerate(lines[1:])
        ]
        lines = [" ".join(line.split()[:2]) for line in lines]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


class Original:
    """subword-nmt or SentencePiece with dictionaries, as the toolkits call them."""

    def __init__(self, folder, kind, texts, sizes, drop=0):
        self.kind, self.folder = kind, folder
        self.is_codes = kind.startswith("codes")
        self.restricted = "restricted" in kind
        self.models, self.dictionaries = [], []
        for side in SIDES:
            self.models.append(self._model(side, texts[side], sizes[side]))
        for n, side in enumerate(SIDES):
            counts = Counter(piece for text in texts[side] for piece in self._segment(self.models[n], text))
            pieces = [piece for piece, _ in counts.most_common()]
            pieces = [piece for m, piece in enumerate(pieces) if not drop or m % drop]  # so that some are unknown
            self.dictionaries.append([*SPECIAL.values(), *pieces])
            if self.restricted:
                self._restrict(self.models[n], pieces)
        self.ours = tokenizer_of(folder, tuple(self.dictionaries), SPECIAL, restricted=self.restricted)

    def _model(self, side, texts, size):
        if self.is_codes:
            file = self.folder / f"{side}.codes"
            learn_codes(texts, size, self.kind[6:9], file)
            from subword_nmt.apply_bpe import BPE

            return BPE(file.open(encoding="utf-8"))
        spm = pytest.importorskip("sentencepiece", reason="sentencepiece, the original, isn't installed")
        content = spm_model(texts, size, model_type=self.kind.partition(",")[0])
        (self.folder / f"{side}.model").write_bytes(content)
        return spm.SentencePieceProcessor(model_proto=content)

    def _restrict(self, model, pieces):
        if self.is_codes:
            model.vocab, model.cache = set(pieces), {}
        elif not hasattr(model, "SetVocabulary"):
            pytest.skip("sentencepiece after 0.2.0 has no SetVocabulary, which JoeyNMT calls")
        else:
            model.SetVocabulary(pieces)

    def _segment(self, model, text):
        # The toolkits write pieces as a line, which they divide again.
        return (model.process_line(text) if self.is_codes else " ".join(model.encode(text, out_type=str))).split()

    def tokens(self, text, side):
        return self._segment(self.models[side], text)

    def ids(self, text, side):
        numbers = {token: number for number, token in enumerate(self.dictionaries[side])}
        return [numbers.get(token, 3) for token in [*self.tokens(text, side), "</s>"]]

    def text(self, tokens):
        """As fairseq's --remove-bpe has it."""
        line = " ".join(tokens)
        if self.is_codes:
            return f"{line} ".replace("@@ ", "").rstrip()
        return line.replace(" ", "").replace("\u2581", " ").strip()

    def check(self, texts):
        for side, name in enumerate(("text", "text_target")):
            found = self.ours(**{name: texts})["input_ids"]
            wanted = [self.ids(text, side) for text in texts]
            assert [row for row in zip(texts, wanted, found, strict=True) if row[1] != row[2]] == []


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    made = {}

    def original(kind):
        if kind not in made:
            sizes = {"source": 90, "target": 130}
            made[kind] = Original(tmp_path_factory.mktemp("tokenizer"), kind, TEXTS, sizes, drop=9)
        return made[kind]

    return original


@pytest.fixture(params=KINDS)
def original(request, originals):
    return originals(request.param)


def test_odd_texts(original):
    original.check([*NASTY, *TEXTS["source"], *TEXTS["target"]])
    for text in NASTY:
        assert original.ours.tokenize(text) == original.tokens(text, 0)
        assert original.ours(text)["input_ids"] == original.ids(text, 0)


def test_random_texts(original):
    random.seed(1)
    original.check(random_texts(500, characters(TEXTS["source"] + TEXTS["target"])))


def test_texts_of_ids(original):
    random.seed(2)
    tokens = original.dictionaries[1]
    for _ in range(300):
        ids = [random.randrange(4, len(tokens)) for _ in range(random.randint(0, 12))]
        assert original.ours.decode([0, *ids, 2, 1], skip_special_tokens=True) == original.text(
            [tokens[n] for n in ids]
        )
    assert original.ours.convert_ids_to_tokens(range(len(tokens))) == tokens


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("codes 0.1")])
@pytest.mark.parametrize("step", [pytest.param(5, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.hard)])
def test_every_line_of_multi30k(step, kind, tmp_path):
    if not MULTI30K.is_dir():
        pytest.skip(f"Multi30k isn't in {MULTI30K}: put train.en, train.de and the rest there")
    names = zip(SIDES, ("en", "de"), strict=True)
    texts = {side: (MULTI30K / f"train.{language}").read_text("utf-8").splitlines() for side, language in names}
    both = Original(tmp_path, kind, texts, {"source": 3000, "target": 4000}, drop=50)
    both.check(texts["source"][::step])
    both.check(texts["target"][::step])
    for text in texts["target"][::step]:
        ids = both.ids(text, 1)
        wanted = both.text([both.dictionaries[1][n] for n in ids[:-1]])
        assert both.ours.decode(ids, skip_special_tokens=True) == wanted.replace("<unk>", "").strip() or 3 in ids


# Files


@pytest.mark.parametrize("kind", ["codes 0.2", "unigram", "bpe"])
def test_saved_and_opened_again(originals, kind, tmp_path):
    ours = originals(kind).ours
    ours.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is DictionaryTokenizerFast
    copies = [again, pickle.loads(pickle.dumps(ours))]
    for copy in copies:
        assert copy(text=NASTY, text_target=NASTY) == ours(text=NASTY, text_target=NASTY)
        assert copy.content == ours.content


def test_without_the_package(originals, tmp_path):
    """A fresh process that can't import the package opens the tokenizer by its own code."""
    ours = originals("unigram").ours
    ours.save_pretrained(tmp_path)
    program = """
import json, sys
sys.modules["hf_vanilla_transformer"] = None
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
print(json.dumps(tokenizer(json.load(sys.stdin))["input_ids"]))
"""
    result = subprocess.run(
        [sys.executable, "-c", program, tmp_path], input=json.dumps(NASTY), capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == ours(NASTY)["input_ids"]


# Options of calls


def test_padding_truncation_and_tensors(originals):
    ours = originals("bpe").ours
    texts = TEXTS["source"][:4]
    rows = ours(texts)["input_ids"]
    longest = max(map(len, rows))
    padded = ours(texts, padding=True, return_tensors="pt")
    assert padded["input_ids"].tolist() == [row + [1] * (longest - len(row)) for row in rows]
    assert padded["attention_mask"].sum(1).tolist() == [len(row) for row in rows]
    left = ours(texts, padding=True, padding_side="left")["input_ids"]
    assert left == [[1] * (longest - len(row)) + row for row in rows]
    cut = ours(texts, truncation=True, max_length=4)["input_ids"]
    assert cut == [[*row[:3], 2] for row in rows]
    assert ours(texts, add_special_tokens=False)["input_ids"] == [row[:-1] for row in rows]
    assert ours(texts)["input_ids"] == rows  # the options before were those of their calls
    both = ours(texts, text_target=texts)
    assert both["labels"] == ours(text_target=texts)["input_ids"] != rows


def test_sources_without_an_end(originals):
    made = originals("codes 0.2")
    ours = tokenizer_of(made.folder, tuple(made.dictionaries), SPECIAL, source_eos=False)
    texts = TEXTS["source"]
    assert ours(texts)["input_ids"] == [made.ids(text, 0)[:-1] for text in texts]
    assert ours(text_target=texts)["input_ids"] == [made.ids(text, 1) for text in texts]


def test_threads_dont_disturb_each_other(originals):
    made, wrong = originals("unigram"), []

    def work(side, name):
        for text in TEXTS["source"] * 20:
            if made.ours(**{name: text}, padding="max_length", max_length=200 + side)["input_ids"][-1] != 1:
                wrong.append(text)
            if made.ours(**{name: text})["input_ids"] != made.ids(text, side):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=one) for one in enumerate(("text", "text_target"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_there_isnt_is_said(originals):
    ours = originals("bpe").ours
    with pytest.raises(NotImplementedError, match="has no offsets"):
        ours("a", return_offsets_mapping=True)
    with pytest.raises(NotImplementedError, match="can't be trained anew"):
        ours.train_new_from_iterator(["a"], 10)
    with pytest.raises(ValueError, match="dictionary can't grow"):
        ours.add_tokens(["<new>"])
    with pytest.raises(ValueError, match="token id -100 isn't in the dictionary"):
        ours.decode(torch.tensor([4, -100]))
    for wrong in (None, 3, ["a", None], b"a"):
        with pytest.raises((TypeError, ValueError)):
            ours(wrong)
    assert ours(text_target="A man.")["input_ids"] != ours("A man.")["input_ids"]  # an error has changed no mode


# What is in a folder


def write(folder, **files):
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")


DICTIONARY = [*SPECIAL.values(), "a", "b@@", "ab"]
CODES = "#version: 0.2\na b</w>\n"


def test_names_of_files(tmp_path):
    write(tmp_path, codes=CODES)
    (tmp_path / "train.bpe.en").write_text("a b c d\n")  # a corpus
    (tmp_path / "model.pt").write_bytes(b"#version: 0.2\n")
    ours = tokenizer_of(tmp_path, (DICTIONARY, DICTIONARY), SPECIAL)
    assert ours.tokenize("ab abb") == ["ab", "a@@", "b@@", "b"]
    (tmp_path / "codes").rename(tmp_path / "bpe.de")
    write(tmp_path, bpe__en="#version: 0.2\nb b</w>\n")
    with pytest.raises(ConversionError, match=r"has bpe.de, bpe.en, and nothing says which is whose"):
        tokenizer_of(tmp_path, (DICTIONARY, DICTIONARY), SPECIAL)
    ours = tokenizer_of(tmp_path, (DICTIONARY, DICTIONARY), SPECIAL, languages=("en", "de"))
    assert (ours.tokenize("ab"), ours.tokenize("bb")) == (["a@@", "b"], ["bb"])
    ours = tokenizer_of(tmp_path, (DICTIONARY, DICTIONARY), SPECIAL, files=("data/bpe.de", r"C:\data\bpe.de"))
    assert ours.tokenize("ab") == ["ab"]
    with pytest.raises(ConversionError, match=r"no.codes, which the tokenizer needs, doesn't exist; .*--no-tokenizer"):
        tokenizer_of(tmp_path, (DICTIONARY, DICTIONARY), SPECIAL, files=("no.codes", "bpe.de"))


@pytest.mark.parametrize(
    ("files", "dictionary", "message"),
    [
        ({}, DICTIONARY, "has neither codes of subword-nmt .* nor a SentencePiece model .*; add it, .*--no-tokenizer"),
        ({"codes": CODES}, [], "doesn't have the dictionaries of source and target; .*--no-tokenizer"),
        ({"codes": CODES, "a__model": ""}, DICTIONARY, "has SentencePiece models .a.model. and codes .* .codes."),
        ({"codes": "#version: 0.3\na b"}, DICTIONARY, "has the version 0.3; only 0.1 and 0.2 are known"),
        ({"codes": "a b 12\n"}, DICTIONARY, "has the codes of fastBPE"),
        ({"codes": "#version: 0.2\na b\nabc\n"}, DICTIONARY, "codes, line 3: 'abc' isn't two symbols"),
        ({"spm__model": "nothing"}, DICTIONARY, "spm.model"),
        ({"codes": CODES}, DICTIONARY[1:], "the source dictionary has no <s>"),
    ],
)
def test_what_cant_be_reproduced_is_refused(files, dictionary, message, tmp_path):
    write(tmp_path, **files)
    with pytest.raises(ConversionError, match=message):
        tokenizer_of(tmp_path, (dictionary, DICTIONARY), SPECIAL)


def test_special_tokens_with_different_ids_are_refused(tmp_path):
    write(tmp_path, codes=CODES)
    swapped = [*DICTIONARY[:2], *DICTIONARY[3:1:-1], *DICTIONARY[4:]]
    with pytest.raises(ConversionError, match="</s> has the id 2 in the source and 3 in the target"):
        tokenizer_of(tmp_path, (DICTIONARY, swapped), SPECIAL)


def test_codes_in(tmp_path):
    file = tmp_path / "codes"
    for text, wanted in (("a b\nc d\n", (1, ["a b", "c d"])), ("#version: 0.2\na b</w>\n", (2, ["a b</w>"]))):
        file.write_text(text, encoding="utf-8")
        assert codes_in(file) == wanted
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConversionError, match="is no text of subword-nmt's codes"):
        codes_in(file)


@pytest.mark.parametrize("option", ["byte_fallback", "user_defined_symbols", "treat_whitespace_as_suffix"])
def test_options_of_sentencepiece_that_are_refused(option, tmp_path):
    value = ["<x>"] if option == "user_defined_symbols" else True
    size = 400 if option == "byte_fallback" else 90
    (tmp_path / "spm.model").write_bytes(spm_model(TEXTS["source"], size, model_type="bpe", **{option: value}))
    with pytest.raises(ConversionError, match=r"spm\.model"):
        tokenizer_of(tmp_path, (DICTIONARY, DICTIONARY), SPECIAL)
