"""A new model has its tokenizer's ids, and pretrained vectors where they are given."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, EvalPrediction

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.data.formats import CorpusError
from hf_vanilla_transformer.data.vectors import read_vectors, use_vectors
from hf_vanilla_transformer.tokenization_dictionary import DictionaryTokenizer
from hf_vanilla_transformer.training.arguments import ModelArguments
from hf_vanilla_transformer.training.evaluation import TranslationMetrics
from hf_vanilla_transformer.training.options import RecipeError

SPECIAL = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # fairseq's ids
SMALL = {"preset": "tiny", "d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


def dictionary(target: str = "0123456789", **options) -> DictionaryTokenizer:
    """Splits words into letters, as subword-nmt does without merges."""
    content = {
        side: {
            "tokens": [*SPECIAL.values(), *(f"{letter}{end}" for letter in letters for end in ("@@", ""))],
            "codes": "#version: 0.2\nx x</w>\n",
        }
        for side, letters in (("source", "0123456789eint"), ("target", target))
    }
    return DictionaryTokenizer(segmentation=content, **(SPECIAL | options))


def test_the_ids_are_the_tokenizers():
    tokenizer = dictionary("0123456789eint")
    config = ModelArguments(**SMALL).config_for(tokenizer)
    ids = (config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id)
    assert ids == (1, 0, 2, 0)
    assert (config.vocab_size, config.decoder_vocab_size) == (len(tokenizer), None)
    model = VanillaTransformerForConditionalGeneration(config)
    assert (model.generation_config.pad_token_id, model.generation_config.eos_token_id) == (1, 2)
    tokenizer = dictionary()  # whose sides are two
    config = ModelArguments(**SMALL).config_for(tokenizer)
    assert (config.vocab_size, config.decoder_vocab_size) == (len(tokenizer), len(tokenizer.target_encoder))
    assert not config.share_encoder_decoder_embeddings


def test_a_tokenizer_without_padding_is_refused(tiny_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    tokenizer.pad_token = None
    with pytest.raises(RecipeError, match="no padding or no end-of-sentence token"):
        ModelArguments(**SMALL).config_for(tokenizer)


def test_a_run_with_a_converted_models_tokenizer(train, recipe, tmp_path):
    dictionary("0123456789eunz").save_pretrained(tmp_path / "dictionary")
    del recipe["vocab_size"]
    assert train(recipe | {"tokenizer_name_or_path": str(tmp_path / "dictionary")}).code == 0
    config = json.loads((tmp_path / "run" / "averaged-2" / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("pad", "bos", "eos", "decoder_start")] == [1, 0, 2, 0]
    assert (tmp_path / "run" / "averaged-2" / "test.translations.txt").is_file()


def test_samples_have_the_words_of_both_vocabularies():
    tokenizer = dictionary(target="0123")
    source, target = (
        np.array([tokenizer(**text)["input_ids"]]) for text in ({"text": "nine 9"}, {"text_target": "3 1"})
    )
    metrics = TranslationMetrics(tokenizer)
    metrics(EvalPrediction(predictions=target, label_ids=target, inputs=source))
    assert metrics.samples == [("nine 9", "3 1", "3 1")]


# ---- Pretrained vectors ----
@pytest.mark.parametrize("header", [[], ["3 2"]], ids=["GloVe", "Word2Vec"])
def test_vectors_of_both_formats(tmp_path, header):
    """Each token of a word has the first vector that it has there."""
    lines = [*header, "nine 1 2", "9 -1 1e-3", ". . 3 4", "9 5 6"]  # a word with a space, and one that is there twice
    (tmp_path / "vectors").write_text("".join(f"{line}\n" for line in lines))
    found = [(word, vector.tolist()) for word, vector in read_vectors(str(tmp_path / "vectors"), 2)]
    expected = [("nine", [1, 2]), ("9", [-1, 1e-3]), (". .", [3, 4]), ("9", [5, 6])]
    assert [word for word, _ in found] == [word for word, _ in expected]
    np.testing.assert_allclose([vector for _, vector in found], [vector for _, vector in expected], rtol=1e-6)
    tokenizer = dictionary()
    weight = torch.zeros(len(tokenizer), 2)
    assert use_vectors(str(tmp_path / "vectors"), tokenizer, weight, scale=2.0) == 2
    for token in ("9", "9@@"):
        assert weight[tokenizer.encoder[token]].tolist() == pytest.approx([-0.5, 5e-4])
    assert weight.count_nonzero() == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nine 1 2 3\n", r"vectors:1: a word and 3 numbers, but d_model is 2"),
        ("nine 1 2\nten 1\n", r"vectors:2: a word and 1 numbers, but d_model is 2"),
        ("nine 1 x\n", r"vectors:1: not a word and 2 numbers"),
        ("nine 1 nan\n", r"vectors:1: a number isn't finite, or too large"),
        ("", "the file is empty"),
    ],
)
def test_wrong_vectors(tmp_path, text, message):
    (tmp_path / "vectors").write_text(text)
    with pytest.raises(CorpusError, match=message):
        list(read_vectors(str(tmp_path / "vectors"), 2))


@pytest.mark.parametrize("shared", [True, False])
def test_a_run_with_vectors(train, recipe, tmp_path, shared):
    recipe |= {"embeddings": str(tmp_path / "vectors"), "max_steps": 0, "average_last": 0}
    recipe["tied"] = "all" if shared else "decoder"
    (tmp_path / "vectors").write_text("nine 1 2\n")  # is told before anything is read
    assert "a word and 2 numbers, but d_model is 16" in train(recipe).error
    assert not (tmp_path / "run").exists()
    (tmp_path / "vectors").write_text(f"nine {' '.join(['0.5'] * 16)}\n")
    assert "tokens have a vector of" in train(recipe).out
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    (id_,) = tokenizer("nine")["input_ids"][:-1]
    for stack in (model.get_encoder(), model.get_decoder()):
        vector = stack.embed_tokens.weight[id_] * model.config.embedding_scale
        assert vector.tolist() == pytest.approx([0.5] * 16)
