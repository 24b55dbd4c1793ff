"""Unknown tokens that a model writes, and options that are None, through every way to translate."""

import copy
import re

import numpy as np
import pytest
import torch
from random_models import KINDS, TEXTS, generated, new_model, translator_of
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, EvalPrediction, pipeline

from hf_vanilla_transformer.data.symbols import train_tokenizer
from hf_vanilla_transformer.integration_vanilla_transformer import VanillaTransformerPipeline
from hf_vanilla_transformer.training.evaluation import TranslationMetrics
from hf_vanilla_transformer.translation.translator import Translator

MOLECULES = ["O . N Cl N", "C C O", "N N O", "Cl"]


@pytest.fixture(scope="module")
def symbols():
    """A tokenizer of symbols that white space divides."""
    return train_tokenizer([{"source": one, "target": one} for one in MOLECULES], ["words"])


@pytest.fixture(scope="module")
def model(symbols):
    """A model that writes unknown tokens among others."""
    model = new_model(len(symbols), seed=4, end=0.0)
    with torch.no_grad():
        model.lm_head.bias[[symbols.pad_token_id, symbols.bos_token_id]] = -9
    model.generation_config.update(num_beams=1, early_stopping=False, max_new_tokens=9, gnmt_length_penalty=None)
    model.generation_config.max_extra_length = 4  # where `max_new_tokens` is off
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_tokens_are_marked_dropped_or_avoided(model, symbols, kind, caplog):
    """As the tokenizer spells them without its other special tokens; avoided, as transformers suppresses tokens."""
    translator, unknown = translator_of(kind, model, symbols), symbols.unk_token_id
    others = {*symbols.all_special_ids} - {unknown}
    rows = [generated(model, symbols, text) for text in MOLECULES]
    counts = [row.count(unknown) for row in rows]
    assert sum(counts) > 3
    marked = [symbols.decode([one for one in row if one not in others]) for row in rows]
    caplog.clear()
    assert translator(MOLECULES) == translator(MOLECULES, unknown_target="mark") == marked
    number = f"{sum(counts)} times, in {sum(map(bool, counts))} of {len(rows)} translations"
    assert len(re.findall(f"unknown token {number}: the translations show each as <unk>", caplog.text)) == 2
    assert translator(MOLECULES, unknown_target="drop") == symbols.batch_decode(rows, skip_special_tokens=True)
    assert "they are left out" in caplog.text
    caplog.clear()
    suppressed = [generated(model, symbols, text, suppress_tokens=[unknown]) for text in MOLECULES]
    expected = symbols.batch_decode(suppressed, skip_special_tokens=True)
    options = {"unknown_target": "avoid"}
    assert translator(MOLECULES, **options) == [*translator(iter(MOLECULES), **options)] == expected
    lists = translator(MOLECULES, prefix="N", num_beams=3, early_stopping=True, n_best=3, **options)
    assert all(one.text.startswith("N") and "<unk>" not in one.text for row in lists for one in row)
    assert "unknown token" not in caplog.text
    assert translator.plan(**options).barred == (unknown,)


def test_what_generate_samples_avoids_them_too(model, symbols):
    translator = Translator(model, tokenizer=symbols)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 40}
    assert any("<unk>" in one for one in translator(MOLECULES * 5, **options))
    assert not any("<unk>" in one for one in translator(MOLECULES * 5, unknown_target="avoid", **options))


def test_an_unknown_token_that_is_the_end_as_well_is_none(checkpoint, caplog):
    """As in GPT-2's tokenizer: sentences still end."""
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    plain = Translator(model, tokenizer=tokenizer)(TEXTS)
    tokenizer.unk_token = tokenizer.eos_token
    translator = Translator(model, tokenizer=tokenizer)
    assert translator(TEXTS) == translator(TEXTS, unknown_target="avoid") == plain
    assert "unknown token" not in caplog.text
    ids = np.array(tokenizer(TEXTS[:1])["input_ids"])
    metrics = TranslationMetrics(tokenizer)
    metrics(EvalPrediction(ids, ids))
    assert metrics.samples == [("", TEXTS[0], TEXTS[0])]


def test_the_pipelines_and_a_wrong_value(model, symbols):
    translate = pipeline("vanilla-translation", model=copy.deepcopy(model), tokenizer=symbols)
    assert "<unk>" in "".join(row["translation_text"] for row in translate(MOLECULES))
    assert "<unk>" not in str(translate(MOLECULES, unknown_target="avoid"))
    with pytest.raises(ValueError, match="unknown_target is 'mrak'; give one of mark, drop, avoid"):
        translate("C", unknown_target="mrak")
    travelling = VanillaTransformerPipeline(model=copy.deepcopy(model), tokenizer=symbols, device="cpu")
    assert travelling(MOLECULES) == travelling(MOLECULES, batch_size=3) == translate(MOLECULES)
    assert travelling([]) == translate([]) == []
    assert travelling(f" {MOLECULES[0]}\n") == translate(MOLECULES[0])


SETTINGS = {
    "max_new_tokens": 2, "forced_bos_token_id": 6, "suppress_tokens": [7], "bad_words_ids": [[7]],
    "repetition_penalty": 30.0, "no_repeat_ngram_size": 1, "exponential_decay_length_penalty": (1, 9.0),
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SETTINGS.items())
def test_an_option_that_is_none_switches_the_models_off(model, symbols, name, value):
    """As in `generate()`, with every backend that opens a model with the setting, and in the pipeline."""
    model = copy.deepcopy(model)
    model.generation_config.update(**{name: value})
    text, options = MOLECULES[0], {"unknown_target": "drop", name: None}
    rows = [generated(model, symbols, text, **given) for given in ({}, {name: None})]
    usual, expected = symbols.batch_decode(rows, skip_special_tokens=True)
    assert usual != expected
    has_all = name in ("max_new_tokens", "forced_bos_token_id", "suppress_tokens", "bad_words_ids")
    for kind in KINDS if has_all else KINDS[:2]:
        assert translator_of(kind, model, symbols)(text, **options) == expected
    translate = pipeline("vanilla-translation", model=model, tokenizer=symbols)
    assert translate(text, **options) == [{"translation_text": expected}]
