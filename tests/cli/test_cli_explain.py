"""`vanilla-transformer explain`: what it writes, and one line for each mistake."""

import json

import pytest
import yaml


@pytest.fixture
def run(monkeypatch, vanilla_transformer, tmp_path):
    """Runs a command in a folder of its own: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    return vanilla_transformer


def data_of(page):
    text = page.read_text(encoding="utf-8")
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def test_a_page_has_the_model_and_the_examples(run, tiny_checkpoint, tmp_path):
    options = ["--example", "half past nine", "it costs two", "--title", "A < B", "--language", "zh"]
    assert run("explain", "--model", tiny_checkpoint, "--output", "p.html", *options) == (0, "wrote p.html\n", "")
    data = data_of(tmp_path / "p.html")
    assert (data["examples"], data["title"]) == (["half past nine", "it costs two"], "A < B")
    assert (data["language"], data["quantization"], data["config"]["d_model"]) == ("zh", "float32", 32)
    code, _, err = run("explain", "--model", tiny_checkpoint, "--output", "p.html")
    assert (code, "give another file, or --overwrite" in err) == (2, True)
    more = ["--quantization", "int8", "--overwrite"]
    assert run("explain", "--model", tiny_checkpoint, "--output", "p.html", *more)[0] == 0
    small = data_of(tmp_path / "p.html")
    assert small["quantization"] == "int8"
    assert len(small["weights"]) < len(data["weights"]) / 2
    assert (small["examples"], small["title"]) == ([], tiny_checkpoint.name)


def test_a_folder_is_a_static_space_with_its_card(run, tiny_checkpoint, tmp_path):
    code, out, err = run("explain", "--model", tiny_checkpoint, "--output", "space", "--example", "nine")
    assert (code, err) == (0, "")
    assert "wrote the static Space space; open space/index.html" in out
    assert {file.name for file in (tmp_path / "space").iterdir()} == {"index.html", "README.md"}
    assert data_of(tmp_path / "space" / "index.html")["examples"] == ["nine"]
    card = (tmp_path / "space" / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(card.split("---\n")[1])
    assert (front["sdk"], front["app_file"], front["title"]) == ("static", "index.html", tiny_checkpoint.name)
