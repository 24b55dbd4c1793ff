"""`vanilla-transformer demo`: its options, the page's functions, and what its server answers and refuses."""

import html
import json
import re
import shutil
import socket
import sys
import urllib.error
import urllib.request
from functools import partial

import pytest

gr = pytest.importorskip("gradio")
from gradio_client import Client  # noqa: E402
from opus_mt import opus_mt_folder  # noqa: E402

from hf_vanilla_transformer import Translator, cli  # noqa: E402
from hf_vanilla_transformer.demo import MOST_CHARACTERS, build_page, known_names  # noqa: E402
from tests.translation.families import family  # noqa: E402

NASTY = "<img src=x onerror=alert(1)> &amp; ${1 + 1} {{v}}"


@pytest.fixture
def demo(vanilla_transformer, monkeypatch):
    """Runs the command without a server; returns code, output and errors."""
    monkeypatch.setattr("hf_vanilla_transformer.demo.start", lambda *_: "URL")
    monkeypatch.setattr(gr.Blocks, "block_thread", lambda _: None)
    return partial(vanilla_transformer, "demo")


# ---- The command ----
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--port", "70000"], "'70000' is not a port; give an integer from 1 to 65535"),
        (["--model", "/nowhere"], "'/nowhere' is neither a folder here"),
    ],
)
def test_wrong_use_is_one_line_before_a_model_is_loaded(demo, model, monkeypatch, arguments, complaint):
    monkeypatch.delattr("hf_vanilla_transformer.cli.demo.load_translator")
    code, out, errors = demo("--model", model, *arguments)
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert complaint in errors


def test_a_port_that_is_taken(model, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert cli.main(["demo", "--model", str(model), "--port", str(port)]) == 2
    assert f"127.0.0.1, port {port}, isn't available; give another --port or" in capsys.readouterr().err


def test_without_gradio(demo, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "hf_vanilla_transformer.demo")
    code, _, errors = demo("--model", model)
    assert code == 2
    fix = "run pip install '.[demo]' in a checkout of hf_vanilla_transformer"
    assert errors.endswith(f"the demo needs Gradio: {fix}\n")


@pytest.mark.parametrize(("host", "warned"), [("localhost", False), ("0.0.0.0", True)])
def test_opening_the_page_to_others_is_warned_of(demo, model, host, warned):
    code, out, errors = demo("--model", model, "--host", host)
    assert (code, out) == (0, "URL shows the page; Ctrl+C ends it\n")
    assert ("every computer that reaches this machine can use the page" in errors) == warned


def test_paragraphs_are_split_by_the_language_of_the_model(demo, model, tmp_path, monkeypatch):
    pytest.importorskip("sentencex")
    folder, pages = shutil.copytree(model, tmp_path / "model"), []
    monkeypatch.setattr("hf_vanilla_transformer.demo.start", lambda page, *_: pages.append(page) or "URL")
    (folder / "model_card.json").write_text('{"source_language": "en", "tgt_language": "de"}')
    for name in (folder, model):
        demo("--model", name)
    translate, as_one = (functions_of(page)[0] for page in pages)
    text, translator = "It is half past nine. It is late.", Translator(model)
    expected = [translator(text, split_sentences=language, num_beams=4) for language in ("en", None)]
    assert [one(text, 4, 0.6)[0] for one in (translate, as_one)] == expected
    assert expected[0] != expected[1]


# ---- The page's functions ----
def functions_of(page):
    """`translate` and `attend`."""
    translate, attend = (
        next(one.fn for one in page.fns.values() if getattr(one.fn, "__name__", "") == name)
        for name in ("translate", "attend")
    )
    return translate, attend


@pytest.fixture(scope="module")
def functions(model):
    return functions_of(build_page(Translator(model)))


def test_translations_with_their_scores(functions, model):
    translate, _ = functions
    best, rows, pairs, _ = translate("half past nine\n\nit costs two hundred\n", 3, 1.0)
    expected = Translator(model)(
        ["half past nine", "it costs two hundred"], n_best=3, num_beams=3, gnmt_length_penalty=1.0
    )
    assert best == f"{expected[0][0].text}\n\n{expected[1][0].text}"
    wanted = [
        [line, rank, f"{one.score:.3f}", one.num_tokens, one.text]
        for line, found in zip((1, 3), expected, strict=True)
        for rank, one in enumerate(found, start=1)
    ]
    assert rows == wanted
    assert pairs[-1] == ("it costs two hundred", rows[-1][-1], {})
    best, rows, _, _ = translate("half past nine", 1, 1.0)
    assert [row[:3] for row in rows] == [[1, 1, ""]]
    assert best == Translator(model)("half past nine", num_beams=1)


def attention_in(frame):
    """What the script in the frame's page reads."""
    (inner,) = re.findall(r'<iframe title="Attention" sandbox="allow-scripts" srcdoc="([^"]*)"', frame)
    return json.loads(re.search(r'id="data">(.*?)</script>', html.unescape(inner))[1])["attention"]


def test_attention_is_a_page_in_a_frame_that_reaches_nothing(functions):
    _, attend = functions
    frame = attend([(NASTY, NASTY, {})], 0)
    assert "".join(attention_in(frame)["source"]).startswith("▁<img▁src")
    assert "<img" not in frame
    assert "attention is shown for up to 100 tokens" in attend([("half past nine " * 40, "halb", {})], 0)
    assert "shown here after" in attend([], None)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (" \n", "There is nothing to translate"),
        ("a" * (MOST_CHARACTERS + 1), "The text has 5,001 characters; at most 5,000"),
        ("\ud800 half", "has a lone surrogate at position 0"),
    ],
)
def test_what_can_not_be_translated(functions, text, complaint):
    with pytest.raises(gr.Error, match=complaint):
        functions[0](text, 4, 0.6)


def test_a_target_language_where_the_model_has_several(tmp_path):
    opus_mt_folder(tmp_path / "opus", multi_target=True)
    translator = Translator(tmp_path / "opus")
    page = build_page(translator)
    (language,) = [one for one in page.blocks.values() if getattr(one, "label", "") == "Target language"]
    assert (language.visible, language.value) == (True, ">>deu<<")
    translate, attend = functions_of(page)
    best, _, pairs, _ = translate("it", 4, 1.0, ">>nld<<")
    assert best == translator("it", tgt_lang="nld", num_beams=4)
    assert pairs[0][0::2] == ("it", {"tgt_lang": ">>nld<<"})
    assert build_page(Translator(family("nllb", tmp_path)))
    # Whatever language is chosen by now.
    assert attention_in(attend([("it", "het", pairs[0][2])], 0))["source"][0] == ">>nld<<"
    with pytest.raises(gr.Error, match="several target languages"):
        translate("it", 4, 1.0)


def test_names_that_the_page_may_be_asked_by():
    assert {"localhost", "127.0.0.1", "[::1]", "here"} <= {*known_names("here")}
    assert known_names("0.0.0.0") == known_names("::") == ["*"]


# ---- The server ----
def answer_to(address, *, body=None, headers=None):
    """Status and text of an answer."""
    request = urllib.request.Request(address, data=body, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


@pytest.mark.slow
def test_a_client_of_gradio(page):
    best, table, _ = Client(page.address, verbose=False).predict("half past nine", 4, 0.6, None, api_name="/translate")
    assert best == Translator(page.model)("half past nine")
    assert [row[1] for row in table["data"]] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_hostile_client(page):
    """It comes by another name, asks for files, fills the disk and jumps the queue."""
    port = page.address.rstrip("/").rpartition(":")[2]
    for host, status in (("evil.example", 400), (f"evil.example:{port}", 400), (f"localhost:{port}", 200)):
        for path in ("", "gradio_api/info", "config"):
            assert answer_to(page.address + path, headers={"Host": host})[0] == status, (host, path)
    secret = str(page.model / "config.json")
    for prefix in ("gradio_api/file=", "file=", "gradio_api/file/", "static/", "assets/"):
        for place in (secret, "/etc/passwd", "../" * 12 + "etc/passwd", "..%2f" * 12 + "etc%2fpasswd"):
            code, text = answer_to(page.address + prefix + place)
            assert code in (400, 403, 404), (prefix, place, code)
            assert "root:" not in text
            assert "d_model" not in text
    form = (
        b'--x\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n' + b"a" * 5_000 + b"\r\n--x--\r\n"
    )
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    assert answer_to(f"{page.address}gradio_api/upload", body=form, headers=kind)[0] == 413
    call = {"data": ["half past nine", 4, 0.6, None], "fn_index": 1, "session_hash": "x"}
    kind = {"Content-Type": "application/json"}
    assert answer_to(f"{page.address}gradio_api/run/predict", body=json.dumps(call).encode(), headers=kind)[0] != 200
    client = Client(page.address, verbose=False)
    for data in (("half", 11, 0.6), ("half", 4, 99), ("half", "x", 0.6), ("a" * 9_999, 4, 0.6)):
        with pytest.raises(Exception, match=r"(?i)maximum|characters|error|number"):
            client.predict(*data, None, api_name="/translate")
    assert client.predict("half", 4, 0.6, None, api_name="/translate")[0]


@pytest.mark.slow
def test_it_listens_on_this_machine_alone_and_asks_nobody(page):
    port = int(page.address.rstrip("/").rpartition(":")[2])
    with pytest.raises(OSError, match=r"(?i)refused|unreachable|assign|timed out"):
        socket.create_connection(("127.0.0.2", port), timeout=10).close()
    code, text = answer_to(page.address)
    assert code == 200
    loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(https?://[^"]*)"', text)
    assert [address for address in loaded if not address.startswith(page.address)] == []
    assert not re.search(r"@import|url\(['\"]?https?:", answer_to(f"{page.address}theme.css")[1])
    lines = page.connections.read_text().splitlines()
    assert lines, "nothing was watched"
    known = r"127\.0\.0\.1|localhost|::1|\bNone\b|socket\.connect [b']?/"
    assert [line for line in lines if not re.search(known, line)] == []
