"""Tokenizers of dictionaries with subword-nmt's codes or SentencePiece models, compared with these libraries."""

import io
import json
import pickle
from collections import Counter

import pytest
import sentencepiece
import torch
from opus_mt import TEXTS, spm_model
from subword_nmt import apply_bpe, learn_bpe
from transformers import AutoTokenizer

from hf_vanilla_transformer import DictionaryTokenizer, tokenization_dictionary
from hf_vanilla_transformer.interop.interface import ConversionError
from hf_vanilla_transformer.interop.segmentation import tokenizer_of

SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
KINDS = ["codes 0.1", "codes 0.2", "codes 0.2, restricted", "unigram", "bpe", "bpe with bytes"]
SIDES = ("source", "target")
ODD = [
    "", " ", "\t", " a  b\tc\n", "\u00a0a", "1,000", "▁a ▁", "é e\u0301", "日本語", "👩‍👩‍👧 a", "a\u200bb", "\x00a",
    "</s>", "a</s> <unk> <pad>", "@@ a@@ b", "<unk> 3", ">>deu<< a", "ß" * 300,
]  # fmt: skip


def learn_codes(texts, merges, version, file):
    """Writes subword-nmt's codes; version 0.1 has the end of words as a symbol of its own."""
    output = io.StringIO()
    learn_bpe.learn_bpe(io.StringIO("\n".join(texts)), output, merges)
    lines = output.getvalue().splitlines()
    if version == "0.1":
        lines = [line.replace("</w>", " </w>") if n % 2 else line for n, line in enumerate(lines[1:])]
        lines = [" ".join(line.split()[:2]) for line in lines]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


class Original:
    """subword-nmt or SentencePiece with dictionaries, as the toolkits call them."""

    def __init__(self, folder, kind):
        self.kind, self.folder, self.is_codes = kind, folder, kind.startswith("codes")
        self.models = [self._model(side) for side in SIDES]
        self.dictionaries = []
        for side, model in zip(SIDES, self.models, strict=True):
            counts = Counter(piece for text in TEXTS[side] for piece in self._segment(model, text))
            pieces = [piece for n, (piece, _) in enumerate(counts.most_common()) if n % 9]  # so that some are unknown
            self.dictionaries.append([*SPECIAL.values(), *pieces])
            if "restricted" in kind:
                model.vocab, model.cache = set(pieces), {}
        self.ours = tokenizer_of(folder, tuple(self.dictionaries), SPECIAL, restricted="restricted" in kind)

    def _model(self, side):
        if self.is_codes:
            file = self.folder / f"{side}.codes"
            learn_codes(TEXTS[side], 110, self.kind[6:9], file)
            return apply_bpe.BPE(file.open(encoding="utf-8"))
        size = 400 if "bytes" in self.kind else 110
        content = spm_model(TEXTS[side], size, model_type=self.kind[:7].split()[0], byte_fallback="bytes" in self.kind)
        (self.folder / f"{side}.model").write_bytes(content)
        return sentencepiece.SentencePieceProcessor(model_proto=content)

    def _segment(self, model, text):
        # The toolkits write pieces as a line, which they divide again.
        return (model.process_line(text) if self.is_codes else " ".join(model.encode(text, out_type=str))).split()

    def ids(self, text, side):
        numbers = {token: number for number, token in enumerate(self.dictionaries[side])}
        return [numbers.get(token, 3) for token in [*self._segment(self.models[side], text), "</s>"]]

    def text(self, tokens):
        """As fairseq's --remove-bpe has it, and as SentencePiece has it."""
        if self.is_codes:
            return f"{' '.join(tokens)} ".replace("@@ ", "").rstrip()
        return self.models[1].decode(tokens).strip()


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    made = {}

    def original(kind):
        if kind not in made:
            made[kind] = Original(tmp_path_factory.mktemp("tokenizer"), kind)
        return made[kind]

    return original


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts_are_the_originals(originals, kind):
    made = originals(kind)
    texts = [*ODD, *TEXTS["source"], *TEXTS["target"]]
    for side, name in enumerate(("text", "text_target")):
        wanted = [made.ids(text, side) for text in texts]
        assert made.ours(**{name: texts})["input_ids"] == wanted
    for number in range(4, len(made.dictionaries[1]) - 4):
        tokens = made.dictionaries[1][number : number + 4]
        ids = [0, *range(number, number + 4), 2, 1]
        assert made.ours.decode(ids, skip_special_tokens=True) == made.text(tokens)
        assert made.ours.batch_decode(torch.tensor([ids]), skip_special_tokens=True) == [made.text(tokens)]
    assert made.ours.decode([0, 4, 2]).startswith("<s> ")
    assert made.ours.convert_ids_to_tokens(range(len(made.dictionaries[1]))) == made.dictionaries[1]


def test_a_restricted_sentencepiece_model_gives_pieces_of_the_vocabulary(originals):
    made = originals("unigram")
    ours = tokenizer_of(made.folder, tuple(made.dictionaries), SPECIAL, restricted=True)
    changed = 0
    for text in TEXTS["source"]:
        pieces, free = ours.tokenize(text), made.ours.tokenize(text)
        assert all(piece in made.dictionaries[0] or len(piece) == 1 for piece in pieces)
        assert "".join(pieces) == "".join(free)
        changed += pieces != free
    assert changed
    everything = [[*SPECIAL.values(), *(model.id_to_piece(n) for n in range(len(model)))] for model in made.models]
    ours = tokenizer_of(made.folder, tuple(everything), SPECIAL, restricted=True)
    assert [ours.tokenize(text) for text in ODD] == [made.ours.tokenize(text) for text in ODD]


# Two ids of one word


def test_overwritten_words_of_fairseq(tmp_path):
    """fairseq's Dictionary.add_symbol moves the word; its bos, pad, eos and unk stay the first four ids."""
    write(tmp_path, codes="#version: 0.2\n< u\n<u n\n<un k\n<unk ></w>\n")
    dictionary = [*SPECIAL.values(), "<unk>", "a@@", "b", "c", "</s>"]
    ours = tokenizer_of(tmp_path, (dictionary, dictionary), SPECIAL)
    ours.save_pretrained(tmp_path / "saved")
    for tokenizer in (ours, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert tokenizer("ab c zz")["input_ids"] == [5, 6, 7, 3, 3, 2]  # z@@ and z are unknown
        assert tokenizer("c <unk>")["input_ids"] == [7, 4, 2]
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 3)
        assert tokenizer.convert_ids_to_tokens([3, 4, 2, 8]) == ["<unk>", "<unk> 4", "</s>", "</s> 8"]
        assert tokenizer.convert_tokens_to_ids(["<unk>", "<unk> 4", "</s>", "</s> 8"]) == [3, 4, 2, 8]
        assert tokenizer.decode([5, 6, 4, 8, 2], skip_special_tokens=True) == "ab <unk> </s>"


def test_a_skipped_token_ends_a_word(tmp_path):
    write(tmp_path, codes=CODES)
    tokenizer = tokenizer_of(tmp_path, ([*SPECIAL.values(), "fähr@@", "Fahr@@", "rad", "."],) * 2, SPECIAL)
    for options in ({}, {"use_source_tokenizer": True}):
        assert tokenizer.decode([4, 3, 5, 6, 7, 2], skip_special_tokens=True, **options) == "fähr Fahrrad ."
        assert tokenizer.decode([3, 4, 2], skip_special_tokens=True, **options) == "fähr"
        assert tokenizer.decode([4, 3, 5, 6], **options) == "fähr<unk> Fahrrad"  # as fairseq writes it


def test_a_call_that_fails_changes_nothing(tmp_path):
    write(tmp_path, codes=CODES)
    words = ["a", "b"]
    tokenizer = tokenizer_of(tmp_path, ([*SPECIAL.values(), *words], [*SPECIAL.values(), *words[::-1]]), SPECIAL)
    expected = tokenizer.encode("a b")
    with pytest.raises(ValueError, match="Input must be a string"):
        tokenizer("a b", text_target=["a", None])
    assert tokenizer.encode("a b") == expected == [4, 5, 2]
    special = list(tokenizer.all_special_tokens)
    with pytest.raises(ValueError, match="can't add '<2de>'"):
        tokenizer.add_special_tokens({"extra_special_tokens": ["<2de>"]})
    assert tokenizer.all_special_tokens == special
    tokenizer.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").all_special_tokens == special


# Files


def test_saved_and_opened_again(originals, tmp_path, without_the_package):
    ours = originals("codes 0.2").ours
    ours.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert type(again) is DictionaryTokenizer
    for copy in (again, pickle.loads(pickle.dumps(ours))):
        assert copy(text=ODD, text_target=ODD) == ours(text=ODD, text_target=ODD)
        assert copy.content == ours.content
    program = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
print(json.dumps(tokenizer(json.loads(sys.argv[2]))["input_ids"]))
"""
    found = without_the_package(program, tmp_path, tmp_path, json.dumps(ODD))
    assert json.loads(found.splitlines()[-1]) == ours(ODD)["input_ids"]


def test_a_library_that_is_missing(originals, monkeypatch, tmp_path):
    for kind, module, name in (("codes 0.2", "apply_bpe", "subword-nmt"), ("bpe", "sentencepiece", "sentencepiece")):
        made = originals(kind)
        made.ours.save_pretrained(tmp_path)
        monkeypatch.setattr(tokenization_dictionary, module, None)
        with pytest.raises(ImportError, match=f"needs {name}: pip install {name}"):
            AutoTokenizer.from_pretrained(tmp_path)
        with pytest.raises(ConversionError, match=f"pip install {name}; or convert without a tokenizer"):
            tokenizer_of(made.folder, tuple(made.dictionaries), SPECIAL)


# Options of calls


def test_padding_truncation_and_tensors(originals):
    made, texts = originals("bpe"), TEXTS["source"][:4]
    ours, rows = made.ours, made.ours(texts)["input_ids"]
    longest = max(map(len, rows))
    padded = ours(texts, padding=True, return_tensors="pt")
    assert padded["input_ids"].tolist() == [row + [1] * (longest - len(row)) for row in rows]
    assert padded["attention_mask"].sum(1).tolist() == [len(row) for row in rows]
    left = ours(texts, padding=True, padding_side="left")["input_ids"]
    assert left == [[1] * (longest - len(row)) + row for row in rows]
    assert ours(texts, truncation=True, max_length=4)["input_ids"] == [[*row[:3], 2] for row in rows]
    assert ours(texts, add_special_tokens=False)["input_ids"] == [row[:-1] for row in rows]
    mask = ours(texts, return_special_tokens_mask=True)["special_tokens_mask"]
    assert mask == [[int(number == 2) for number in row] for row in rows]
    both = ours(texts, text_target=texts)
    assert both["labels"] == ours(text_target=texts)["input_ids"] != rows
    endless = tokenizer_of(made.folder, tuple(made.dictionaries), SPECIAL, source_eos=False)
    assert endless(texts)["input_ids"] == [row[:-1] for row in rows]
    assert endless(text_target=texts)["input_ids"] == both["labels"]


# What is in a folder


def write(folder, **files):
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")


DICTIONARY = [*SPECIAL.values(), "a", "b@@", "ab"]
SWAPPED = [*DICTIONARY[:2], *DICTIONARY[3:1:-1], *DICTIONARY[4:]]
CODES = "#version: 0.2\na b</w>\n"


@pytest.mark.parametrize(
    ("files", "dictionary", "message"),
    [
        ({}, DICTIONARY, "has neither codes of subword-nmt .* nor a SentencePiece model .*; add it, .*--no-tokenizer"),
        ({}, [*SPECIAL.values(), "Ġab", "c"], "have pieces of words, and .* has neither codes"),
        ({}, [*SPECIAL.values(), "15496", "995"], "have pieces of words"),
        ({"codes": CODES}, [], "doesn't have the dictionaries of source and target; .*--no-tokenizer"),
        ({"codes": CODES, "a__model": ""}, DICTIONARY, "has SentencePiece models .a.model. and codes .* .codes."),
        ({"codes": "a b 12\n"}, DICTIONARY, "no codes of subword-nmt .fastBPE's have a third column"),
        ({"codes": "#version: 0.2\na b\nabc\n"}, DICTIONARY, "no codes of subword-nmt"),
        ({"codes": CODES}, DICTIONARY[1:], "the source dictionary has no <s>"),
        ({"codes": CODES}, SWAPPED, "</s> has the id 3 in the source and 2 in the target"),
    ],
)
def test_what_cant_be_reproduced_is_refused(files, dictionary, message, tmp_path):
    write(tmp_path, **files)
    with pytest.raises(ConversionError, match=message):
        tokenizer_of(tmp_path, (dictionary, DICTIONARY), SPECIAL)
