"""Tokenizers of stock models for the browser; test_onnx has their graphs."""

import json

import pytest
from transformers import AutoTokenizer

from hf_vanilla_transformer import VanillaTransformerTokenizerFast
from hf_vanilla_transformer.data.symbols import train_tokenizer

pytest.importorskip("onnxruntime", reason="onnxruntime isn't installed")
pytest.importorskip("onnxscript", reason="onnxscript isn't installed")
from graphs import PAIRS

from hf_vanilla_transformer.interop import transformers_js

ODD = [
    "", " ", "  ", "a", " a", "  a ", "a\n\n b", "\ta", ", a,b , .", "“Hi”, he  said …", "e\u0301 é", "日本 語。", "<s",
    "👩\u200d👩\u200d👧 x", "a\u00a0b\u3000c", "a\u0085b", "\ufeffa \ufeff", "x" * 300, "😀" * 300, "a b, " * 99,
    "\x00a\rb", "$5 + ^~`|", "İ ß ﬁ",
]  # fmt: skip
CONTROL = ["</s>", "x </s>y", "<pad>abc <s>"]  # tokens in JavaScript


def tokenizers():
    texts = [one["source"] for one in PAIRS] + ["a street . , and (x) </s"]
    for merge_punctuation in (True, False):
        yield VanillaTransformerTokenizerFast.train_from_iterator(
            texts, vocab_size=500, merge_punctuation=merge_punctuation, show_progress=False
        )
    for kind in ("words", "characters", "bytes"):
        yield train_tokenizer(PAIRS, [kind], vocab_size=500)


def test_ids_stay_in_python(tmp_path):
    for number, tokenizer in enumerate(tokenizers()):
        own = transformers_js._for_javascript(tokenizer)
        own.save_pretrained(tmp_path / str(number))
        texts = [*ODD, *CONTROL, *(text for one in PAIRS[::5] for text in one.values())]
        expected = tokenizer(texts)["input_ids"]
        assert own(texts)["input_ids"] == expected
        assert AutoTokenizer.from_pretrained(tmp_path / str(number))(texts)["input_ids"] == expected
        assert own.batch_decode(expected) == tokenizer.batch_decode(expected)
        parts = json.loads(own.backend_tokenizer.to_str())["pre_tokenizer"]
        assert not any(name in str(parts) for name in ("Metaspace", "FixedLength", "Merged"))  # JavaScript has others
        assert isinstance(own, VanillaTransformerTokenizerFast) is isinstance(
            tokenizer, VanillaTransformerTokenizerFast
        )
