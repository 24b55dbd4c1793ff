"""The page over HTTP: what it answers, what it refuses, where it listens and whom it asks."""

import concurrent.futures
import json
import re
import socket
import urllib.error
import urllib.request

import pytest
from gradio_client import Client

from hf_vanilla_transformer import Translator

JSON = {"Content-Type": "application/json"}
pytestmark = pytest.mark.slow  # a process that loads PyTorch and Gradio


@pytest.fixture(scope="module")
def client(page):
    return Client(page.address, verbose=False)


def asked(client, text, beams=4, longest=0):
    """Status, and for each of the two models its translation and its table."""
    status, _, _, *rest = client.predict(
        text=text, num_beams=beams, max_new_tokens=longest, api_name="/translate"
    )  # fmt: skip
    return re.sub("<[^>]*>", "", status), rest[:2], rest[2:]


def status_of(address, *, method="GET", body=None, headers=None):
    """The status of an answer, and its text."""
    request = urllib.request.Request(address, data=body, method=method, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def posted(address, body):
    return status_of(address, method="POST", body=json.dumps(body).encode(), headers=JSON)


def test_both_checkpoints_translate(client, checkpoints):
    lines = ["half past nine", "", "it costs two hundred"]
    status, texts, tables = asked(client, "\n".join(lines), 3)
    assert status == "Translated 2 lines."
    for checkpoint, text, table in zip(checkpoints, texts, tables, strict=True):
        rows = Translator(checkpoint)(lines, num_beams=3, n_best=3)
        assert text == "\n".join(row[0].text for row in rows)
        assert f"{rows[0][0].score:.3f}".replace("-", "−") in table
    assert texts[0] != texts[1]


def test_empty_text_and_options_beyond_their_limits(client):
    assert asked(client, "  \n ")[0].startswith("There is nothing to translate")
    assert asked(client, "a", 4, 513)[0] == "Longest translation: give an integer from 1 to 512."
    assert asked(client, "a" * 20_001)[0].startswith("The text has 20,001 characters")


def test_ten_thousand_characters(client):
    status, texts, tables = asked(client, "half past nine. " * 625, 2, 3)
    assert status == "Translated 1 line."
    assert all(texts)
    assert "too long to be translated as one" in tables[0]


def test_markup_and_control_characters(client):
    text = "<img src=x onerror=alert(1)> \x00\x07\x1b[31m \u202e \U0001f600 \u2028"
    status, texts, tables = asked(client, text)
    assert status == "Translated 1 line."
    assert "<img" not in tables[0]
    assert len(texts) == 2


def test_half_of_a_surrogate_pair_is_refused_and_the_server_goes_on(client, page):
    address = f"{page.address}gradio_api/call/translate"
    code, answer = posted(address, {"data": ["\ud800 half past nine", 4, 0]})
    assert code == 200
    events = status_of(f"{address}/{json.loads(answer)['event_id']}")[1]
    assert "has half of a surrogate pair at position 0" in events
    assert asked(client, "half past nine")[0] == "Translated 1 line."


def test_several_users_at_a_time(page, client):
    texts = [f"half past {word}" for word in ("nine", "one", "two", "three", "five", "four")]
    expected = [asked(client, text)[1] for text in texts]

    def user(text):
        return asked(Client(page.address, verbose=False), text)[1]

    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        assert list(pool.map(user, texts)) == expected


@pytest.mark.parametrize("prefix", ["gradio_api/file=", "file=", "gradio_api/file/", "file/", "static/", "assets/"])
def test_no_file_of_this_machine_is_served(page, checkpoints, prefix):
    config = str(checkpoints[0] / "config.json")
    places = [config, "/etc/passwd", *(f"{'../' * 12}{name}" for name in ("etc/passwd", config.lstrip("/")))]
    places += [f"{'..%2f' * 12}etc%2fpasswd", f"{'%2e%2e/' * 12}etc/passwd", f"{'....//' * 12}etc/passwd", "C:/x"]
    for place in places:
        code, text = status_of(page.address + prefix + place)
        assert code in (400, 403, 404), (place, code)
        assert "root:" not in text
        assert "d_model" not in text


@pytest.mark.parametrize("path", ["gradio_api/call/translate", "gradio_api/queue/join", "gradio_api/run/predict"])
def test_files_and_addresses_in_place_of_text_are_refused(page, client, checkpoints, path):
    file, address = str(checkpoints[0] / "config.json"), "http://example.org/x.txt"
    kind = {"meta": {"_type": "gradio.FileData"}}
    for value in ({"path": file, **kind}, {"path": address, **kind}, {"path": address, "url": address, **kind}, [file]):
        for place in range(3):
            data = [[value if place == 0 else "a", value if place == 1 else 4, value if place == 2 else 0]]
            body = {"data": data[0], "fn_index": 0, "session_hash": "x"}
            code, text = posted(page.address + path, body)
            assert (code, text) == (400, "This page takes text and numbers.")
    assert "example.org" not in page.connections.read_text()
    assert asked(client, "half past nine")[0] == "Translated 1 line."


def test_nobody_jumps_the_queue(page):
    for number in range(1, 4):  # the page's functions; 0 is that of the examples
        body = {"data": ["half past nine", 4, 0], "fn_index": number, "session_hash": "x"}
        code, text = posted(f"{page.address}gradio_api/run/predict", body)
        assert code != 200, text
        assert "translation" not in text


def test_requests_that_are_no_json_or_too_large(page, client):
    address = f"{page.address}gradio_api/call/translate"
    for body in (b"", b"{", b"[1]", b'{"data": "x"}', b"[" * 100_000, b'{"data": ["' + b"a" * 2_000_000 + b'"]}'):
        assert status_of(address, method="POST", body=body, headers=JSON)[0] == 400
    assert asked(client, "half past nine")[0] == "Translated 1 line."


def test_uploads_and_other_pages_of_gradio_are_closed(page):
    body = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.txt"\r\n\r\nhi\r\n--x--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert status_of(f"{page.address}gradio_api/upload", method="POST", body=body, headers=headers)[0] == 404
    for path in ("monitoring", "gradio_api/proxy=https://example.org", "gradio_api/file=https://example.org", "docs"):
        assert status_of(page.address + path)[0] == 404


def test_it_listens_on_this_machine_alone(page):
    port = int(page.address.rstrip("/").rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=10):
        pass
    others = {"127.0.0.2"}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only asks by which address it would
            others.add(probe.getsockname()[0])
        except OSError:
            pass  # a machine without a network has no other
    for other in others - {"127.0.0.1"}:
        with pytest.raises(OSError, match=r"(?i)refused|unreachable|assign|timed out"):
            socket.create_connection((other, port), timeout=10).close()


def test_it_asks_nobody(page, client):
    asked(client, "half past nine")
    lines = page.connections.read_text().splitlines()
    assert lines, "nothing was watched"
    strangers = [
        line for line in lines if not re.search(r"127\.0\.0\.1|localhost|::1|\bNone\b|socket\.connect [b']?/", line)
    ]
    assert strangers == []


def test_the_page_names_no_other_place(page):
    """Scripts, styles and fonts come from the page itself; what is only said of it is in `meta` and `a`."""
    code, text = status_of(page.address)
    assert code == 200
    loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(https?://[^"]*)"', text)
    assert [address for address in loaded if not address.startswith(page.address)] == []
    assert not re.search(r"@import|url\(['\"]?https?:", status_of(f"{page.address}theme.css")[1])


def test_nothing_is_left_in_the_folder_where_it_runs(page):
    assert {path.name for path in page.log.parent.iterdir()} - {"__pycache__"} == {
        "sitecustomize.py",
        "connections",
        "log",
    }
