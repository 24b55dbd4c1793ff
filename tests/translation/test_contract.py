"""The contract of decoding: each setting means what it means to transformers' own loop, by every way to translate."""

import functools

import pytest
from random_models import KINDS, generated, new_model, translator_of
from transformers import AutoTokenizer

from hf_vanilla_transformer import engine
from hf_vanilla_transformer.translation.backend import Translation
from hf_vanilla_transformer.translation.decoding import translate

GREEDY = {"num_beams": 1, "early_stopping": False}
FORCED = {"forced_eos_token_id": 2, "max_new_tokens": 4}
SETTINGS = {
    "greedy": GREEDY,
    "greedy, no extra tokens": GREEDY | {"max_extra_length": 0},
    "greedy, minimal new tokens": GREEDY | {"min_new_tokens": 9},
    "greedy, forced end": GREEDY | FORCED,
    "greedy, unwanted at first": GREEDY | {"begin_suppress_tokens": [59, 147]},
    "greedy, padding that is text elsewhere": GREEDY | {"max_extra_length": 2, "pad_token_id": 5},
    "beams": {},
    "6 beams": {"num_beams": 6, "max_extra_length": 3},
    "a limit": {"max_length": 6},
    "one new token": {"max_new_tokens": 1},
    "GNMT's penalty": {"gnmt_length_penalty": 3.0, "max_extra_length": 5},
    "transformers' penalty": {"gnmt_length_penalty": None, "length_penalty": -1.5, "max_extra_length": 5},
    "greedy, forced first token": GREEDY | {"forced_bos_token_id": 9},
    "no repetition": {"no_repeat_ngram_size": 1},
    "unwanted words": {"bad_words_ids": [[4], [86, 116]]},
    "OPUS-MT's": FORCED | {"bad_words_ids": [[116]], "renormalize_logits": True, "gnmt_length_penalty": None},
    "several ends": {"eos_token_id": [2, 116]},
    "unwanted": {"suppress_tokens": [4, 116], "renormalize_logits": True},
    "an end is no unwanted word": {"bad_words_ids": [[59], [86], [2]], "renormalize_logits": True},
    "pre-norm": {},
    "two vocabularies": {},
}
FIELDS = {  # of the configuration
    "pre-norm": {"norm_position": "pre"},
    "two vocabularies": {"decoder_vocab_size": 303, "share_encoder_decoder_embeddings": False},
}
LACKING = {  # by CTranslate2
    "greedy, unwanted at first",
    "no repetition",
    "unwanted words",
    "several ends",
}
SOURCES = ["twenty-one", "it", "drei Euro"]


@functools.cache
def by_transformers(folder, setting):
    """The model with a setting in its generation config, its tokenizer, and what it writes for one source at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = new_model(len(tokenizer), **FIELDS.get(setting, {}))
    model.generation_config.update(**{"max_extra_length": 6} | SETTINGS[setting])
    return model, tokenizer, [generated(model, tokenizer, text) for text in SOURCES]


@pytest.mark.parametrize("kind", ["generate", *KINDS])
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_way_to_translate_follows_the_settings(checkpoint, setting, kind):
    model, tokenizer, expected = by_transformers(checkpoint, setting)
    if kind == "generate":
        with engine.attach(model) as attached:
            found = model.generate(**tokenizer(SOURCES, padding=True, return_tensors="pt")).tolist()
        assert (attached.calls, attached.fallbacks) == (1, 0)
        assert [row[1 : 1 + len(own)] for row, own in zip(found, expected, strict=True)] == expected
    elif kind == "ctranslate2" and setting in LACKING:
        with pytest.raises(ValueError, match=r"(?i)ctranslate2"):
            translator_of(kind, model, tokenizer)(SOURCES)
    else:
        rows = translate(translator_of(kind, model, tokenizer).call({"batch_size": 2}), SOURCES)
        texts = [text.replace("\n", " ") for text in tokenizer.batch_decode(expected, skip_special_tokens=True)]
        wanted = [Translation(text, len(own)) for text, own in zip(texts, expected, strict=True)]
        assert [row[0] for row in rows] == wanted


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_setting_of_the_table_changes_something(checkpoint, setting):
    usual = "greedy" if "greedy" in setting else "beams"
    assert setting == usual or by_transformers(checkpoint, setting)[2] != by_transformers(checkpoint, usual)[2]
