"""The languages that models of the service translate: given, or told by the facts beside a model."""

import json
from pathlib import Path

import pytest

from hf_vanilla_transformer.serving.models import LanguagesError, languages_of, pair
from hf_vanilla_transformer.translation.division import sentence_rules


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("en-de", ("en", "de")),
        ("pt_BR-en", ("pt_BR", "en")),
        ("en:pt-BR", ("en", "pt-BR")),
        ("zh-Hans:en", ("zh-Hans", "en")),
    ],
)
def test_pairs(text: str, expected: tuple[str, str]) -> None:
    assert pair(text) == expected


@pytest.mark.parametrize("text", ["", "en", "en-", "-de", "en-pt-BR", "en:", "a:b:c", "en de", "en/de-fr"])
def test_what_is_no_pair(text: str) -> None:
    with pytest.raises(LanguagesError, match="is no pair of languages; give source and target: en-de, or en:pt-BR"):
        pair(text)


@pytest.mark.parametrize(
    ("code", "expected"),
    [("en", "en"), ("pt-BR", "pt"), ("de_DE", "de"), ("deu_Latn", "de"), ("zho_Hans", "zh"), ("arb_Arab", "ar")],
)
def test_sentences_are_split_by_the_rules_of_a_language_by_any_name(code: str, expected: str) -> None:
    assert sentence_rules(code) == expected


def test_sentences_of_a_language_without_a_code_in_two_letters_are_split_by_rules_for_all() -> None:
    assert sentence_rules("ceb_Latn") == sentence_rules(None) == "und"


def test_languages_beside_a_model(tmp_path: Path) -> None:
    with pytest.raises(LanguagesError, match="doesn't say what it translates; give --languages, such as en-de"):
        languages_of(str(tmp_path))
    facts = {"name": "./model", "source_language": "en", "target_language": "de"}
    (tmp_path / "model_card.json").write_text(json.dumps(facts))
    assert languages_of(str(tmp_path)) == ("en", "de")
