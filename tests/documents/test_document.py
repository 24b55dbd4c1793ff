"""Any document by a translator: every sentence of a paragraph, by the rules of the right language."""

from pathlib import Path
from typing import Any

import pytest

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.documents.document import languages, open_document, translate_document
from hf_vanilla_transformer.translation.division import split_sentences

CUE = "1\n00:00:01,000 --> 00:00:02,000\n"
PAGE = '<html lang="de"><p>Am 3. Mai kam er. Er ging.</p>'


@pytest.fixture
def translator(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes capitals, and `asked` has what it was asked for."""
    opened: Any = Translator(tiny_checkpoint, "cpu")
    opened.asked = []

    def call(self: Any, texts: list[str], **options: object) -> list[str]:
        if "No." in texts:
            raise ValueError("it is refused")
        if rules := options.get("split_sentences"):
            parts = ([sentence for _, sentence in split_sentences(text, str(rules))] for text in texts)
            return [" ".join(self(part)) for part in parts]
        self.asked += texts
        return [text.upper() for text in texts]

    monkeypatch.setattr(Translator, "__call__", call)
    return opened


@pytest.mark.parametrize(
    ("form", "source", "options", "sentences"),
    [
        (".html", PAGE, {}, ["Am 3. Mai kam er.", "Er ging."]),
        (".html", PAGE.replace("de", ""), {}, ["Am 3.", "Mai kam er.", "Er ging."]),
        (".html", PAGE.replace("de", ""), {"src_lang": "deu_Latn"}, ["Am 3. Mai kam er.", "Er ging."]),
        (".html", PAGE, {"split_sentences": "und"}, ["Am 3.", "Mai kam er.", "Er ging."]),
        (".srt", f"{CUE}He came. J. Smith\nleft!\n", {}, ["He came.", "J. Smith left!"]),
        (".vtt", f"WEBVTT\n\n{CUE.replace(',', '.')}你好。我很好。\n", {}, ["你好。", "我很好。"]),
        ("", "  He came. He left.\r\n\r\nYes.", {}, ["He came. He left.", "Yes."]),  # lines are sentences
    ],
)
def test_every_sentence_of_a_paragraph_is_translated(translator, form, source, options, sentences) -> None:
    part = translate_document(translator, open_document(source, form), **options)
    assert translator.asked == sentences
    assert [one.upper() for one in sentences if one.upper() not in " ".join(part.data.split())] == []
    assert part.errors == []


def test_a_text_that_is_refused_is_reported_and_stays(translator) -> None:
    source = "<p>Yes.</p>\n<p>No.</p>\n<p>Yes.</p><p>No.</p>"
    part = translate_document(translator, open_document(source, ".html"))
    assert part.data == source.replace("Yes", "YES")
    assert part.errors == [(2, "it is refused"), (3, "it is refused")]


def test_the_languages_of_a_model_are_those_of_its_card(translator, tmp_path: Path, monkeypatch) -> None:
    assert languages(translator, {}) == (None, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_card.json").write_text('{"source_language": "de", "target_language": "en"}')
    for name in ("", "user/model", str(tmp_path / "gone")):  # not those of the working directory
        translator.model.name_or_path = name
        assert languages(translator, {}) == (None, None)
    translator.model.name_or_path = str(tmp_path)
    assert languages(translator, {}) == ("de", "en")
    assert languages(translator, {"src_lang": "fra", "tgt_lang": "eng_Latn"}) == ("fr", "en")
    translate_document(translator, open_document("<p>Am 3. Mai kam er.</p>", ".html"))
    assert translator.asked == ["Am 3. Mai kam er."]
