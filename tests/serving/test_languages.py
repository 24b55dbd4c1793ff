"""The languages that models of the service translate: given, or told by the facts beside a model."""

import json
from pathlib import Path

import pytest

from hf_vanilla_transformer.serving.models import LanguagesError, languages_of, pair
from hf_vanilla_transformer.translation.division import sentence_rules


def test_pairs() -> None:
    assert [pair(text) for text in ("en-de", "pt_BR-en")] == [("en", "de"), ("pt_BR", "en")]
    assert [pair(text) for text in ("en:pt-BR", "zh-Hans:en")] == [("en", "pt-BR"), ("zh-Hans", "en")]
    for text in ("", "en", "en-", "-de", "en-pt-BR", "en:", "a:b:c", "en de", "en/de-fr"):
        with pytest.raises(LanguagesError, match="is no pair of languages; give source and target: en-de, or en:pt-BR"):
            pair(text)


def test_sentences_are_split_by_the_rules_of_a_language_by_any_name() -> None:
    codes = ("en", "pt-BR", "de_DE", "deu_Latn", "zho_Hans", "arb_Arab")
    assert [sentence_rules(code) for code in codes] == ["en", "pt", "de", "de", "zh", "ar"]
    assert sentence_rules("ceb_Latn") == sentence_rules(None) == "und"  # rules for all


def test_languages_beside_a_model(tmp_path: Path) -> None:
    with pytest.raises(LanguagesError, match="doesn't say what it translates; give --languages, such as en-de"):
        languages_of(str(tmp_path))
    facts = {"name": "./model", "source_language": "en", "target_language": "de"}
    (tmp_path / "model_card.json").write_text(json.dumps(facts))
    assert languages_of(str(tmp_path)) == ("en", "de")
