"""`/detect` and `source=auto`, with py3langid and without."""

import sys
from typing import Any

import pytest
from fastapi.testclient import TestClient

from hf_vanilla_transformer.documents.links import Linked
from hf_vanilla_transformer.serving import app as service

ENGLISH, GERMAN = "the two dogs run in the garden", "die beiden Hunde laufen im Garten"
LONG = {"en": f"{ENGLISH} and they are playing with a ball", "de": f"{GERMAN} und sie spielen mit einem Ball"}
PAIRS = [("en", "de"), ("de", "en"), ("en", "fr")]


def client(pairs: Any = PAIRS, **settings: Any) -> TestClient:
    """A service whose translations say from which language they are."""

    async def translate(texts: list[str], n_best: int, source: str, **options: Any) -> list[list[Linked]]:
        return [[Linked(f"[{source}] {text}")] * n_best for text in texts]

    models = dict.fromkeys(pairs, translate)
    return TestClient(service.create_app(models, service.ServiceSettings(**settings)))


def detect(q: Any, pairs: Any = PAIRS) -> Any:
    return client(pairs).post("/detect", json={"q": q}).json()


def translate(q: Any, target: str, pairs: Any = PAIRS, **fields: Any) -> Any:
    return client(pairs).post("/translate", json={"q": q, "source": "auto", "target": target, **fields})


@pytest.fixture
def library() -> None:
    pytest.importorskip("py3langid", reason="py3langid is not installed: pip install '.[detect]'")


@pytest.mark.usefixtures("library")
def test_languages_of_the_service_are_ranked() -> None:
    guesses = detect(GERMAN)
    assert guesses[0]["language"] == "de"
    assert {one["language"] for one in guesses} == {"en", "de", "fr"}
    assert sum(one["confidence"] for one in guesses) == pytest.approx(100, abs=0.2)
    assert guesses[0]["confidence"] > 50
    assert detect([ENGLISH, "in London"])[0]["language"] == "en"
    assert detect(GERMAN, [("en", "deu_Latn")])[0]["language"] == "deu_Latn"
    assert {one["language"] for one in detect(GERMAN, [("en", "fr")])} == {"en", "fr"}


@pytest.mark.usefixtures("library")
def test_the_source_is_detected() -> None:
    answer = translate(GERMAN, "en").json()
    assert answer["translatedText"] == f"[de] {GERMAN}"
    assert answer["detectedLanguage"] == detect(GERMAN)[0]
    page = translate(f'<p lang="x">{GERMAN} <b>und</b></p>', "en", format="html", alternatives=1).json()
    assert page["detectedLanguage"]["language"] == "de"
    assert f"[de] {GERMAN}" in page["translatedText"]
    same = translate([LONG["de"], LONG["en"]], "de", alternatives=1).json()
    assert same["translatedText"] == [LONG["de"], f"[en] {LONG['en']}"]
    assert same["alternatives"] == [[], [f"[en] {LONG['en']}"]]


@pytest.mark.usefixtures("library")
def test_texts_of_a_list_each_have_their_language() -> None:
    pairs = [("en", "fr"), ("de", "fr")]
    for texts, languages in (
        ([LONG["en"], LONG["de"]], ["en", "de"]),
        (["How are you today?", "Wie geht es dir heute?"], ["en", "de"]),
        (["Auto", LONG["de"], "123"], ["de"] * 3),  # what may be in either language
    ):
        answer = translate(texts, "fr", pairs).json()
        assert [one["language"] for one in answer["detectedLanguage"]] == languages
        assert [text[:4] for text in answer["translatedText"]] == [f"[{one}]" for one in languages]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("text", "target", "pairs", "problem"),
    [
        (GERMAN, "fr", PAIRS, "de to fr is not supported; there is de-en, en-de, en-fr"),
        ("123 👍", "de", PAIRS, "no language can be detected without letters; give the source's code"),
        ("", "de", PAIRS, "no language can be detected without letters"),
        (ENGLISH, "xx", [("en", "xx")], "languages aren't detected here: py3langid doesn't know xx"),
    ],
)
def test_what_cannot_be_told_is_an_error(text: str, target: str, pairs: Any, problem: str) -> None:
    answer = translate(text, target, pairs)
    assert (answer.status_code, answer.json()["error"].startswith(problem)) == (400, True), answer.json()


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid", None)
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    for answer in (translate(GERMAN, "en"), client().post("/detect", json={"q": GERMAN})):
        assert answer.status_code == 400
        assert "py3langid, which isn't here: run pip install '.[detect]'" in answer.json()["error"]
    assert 'value="auto"' not in client().get("/").text


def test_detection_asks_for_the_same_key_and_size() -> None:
    guarded = client(api_key="k", characters=5)
    for fields, status in (({}, 403), ({"api_key": "k"}, 413), ({"source": "en"}, 400)):
        assert guarded.post("/detect", json={"q": "two dogs", **fields}).status_code == status
    assert guarded.post("/detect", json={"api_key": "k"}).json() == {"error": "Invalid request: missing q parameter"}
    cross = {"sec-fetch-site": "cross-site", "origin": "http://evil"}
    assert client().post("/detect", data={"q": GERMAN}, headers=cross).status_code == 403
    assert "/detect" in client().get("/openapi.json").json()["paths"]
