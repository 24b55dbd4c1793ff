"""`vanilla-transformer demo`: what it checks first, and the Space that it writes."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
import yaml
from gradio_client import Client

from hf_vanilla_transformer import Translator, cli
from hf_vanilla_transformer.demo import space
from hf_vanilla_transformer.translation.attention import attention_of

TEXT = "half past nine"


@pytest.fixture
def demo(capsys):
    """Runs the command; returns code, output and errors."""

    def run(*arguments):
        capsys.readouterr()
        try:
            code = cli.main(["demo", *map(str, arguments)])
        except SystemExit as error:
            code = error.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    def never(*_, **__):
        raise AssertionError("a model was loaded before the options were checked")

    monkeypatch.setattr("hf_vanilla_transformer.cli.demo.load_translator", never)


def metadata(folder):
    _, data, text = (folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(data), text


# ---- What is checked first ----
@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--repo", "me/it"], "--repo is for --space DIR"),
        (["--space", "s", "--port", "7860"], "--port is for a page that is shown here; leave it out with --space"),
        (["--space", "s", "--compute-type", "int8"], "--compute-type is for a page"),
        (["--space", "s", "--repo", "a/b", "c/d"], "--model names 1 and --repo 2"),
        (["--space", "no/such/s"], "there is no folder no/such"),
        (["--repo", "it"], "'it' is not a repository's name; give user/name"),
        (["--port", "0"], "'0' is not a port"),
        (["--port", "70000"], "'70000' is not a port"),
        (["--host", "192.0.2.1"], "192.0.2.1 can't be listened on"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid can't be listened on"),
        (["--prot", "1"], "did you mean '--port'?"),
    ],
)
def test_wrong_use_is_one_line(demo, tiny_checkpoint, tmp_path, monkeypatch, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    code, out, errors = demo("--model", tiny_checkpoint, *arguments)
    assert (code, out) == (2, "")
    assert complaint in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_port_that_is_taken(demo, tiny_checkpoint):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, _, errors = demo("--model", tiny_checkpoint, "--port", port)
    assert code == 2
    assert f"127.0.0.1, port {port}, can't be listened on" in errors
    assert errors.endswith("give another --port\n")


def test_without_gradio(demo, tiny_checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "hf_vanilla_transformer.demo.page", raising=False)
    code, _, errors = demo("--model", tiny_checkpoint)
    assert code == 2
    assert errors.endswith("the demo needs Gradio: pip install 'hf-vanilla-transformer[demo]'\n")


def test_no_checkpoint(demo, tmp_path):
    code, _, errors = demo("--model", tmp_path)
    assert (code, "config.json" in errors) == (2, True)


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_whoever_opens_the_page_to_others_is_warned(demo, tiny_checkpoint, monkeypatch, host, warned):
    monkeypatch.setattr("hf_vanilla_transformer.demo.server.serve", lambda page, host, port, started: started("URL"))
    code, out, errors = demo("--model", tiny_checkpoint, "--host", host)
    assert (code, out) == (0, "URL shows the page; Ctrl+C ends it\n")
    assert ("whoever can reach this machine" in errors) == warned


def test_a_model_given_twice_or_in_two_options(demo, checkpoints, monkeypatch):
    titles = []
    monkeypatch.setattr("hf_vanilla_transformer.demo.server.serve", lambda page, *_: titles.append(page.title))
    assert demo("--model", checkpoints[0], "--model", checkpoints[1])[0] == 0
    assert titles == [f"Translation by {checkpoints[0]} and {checkpoints[1]}"]


# ---- A Space ----
def test_files_of_a_space(demo, tiny_checkpoint, tmp_path):
    code, out, errors = demo("--model", tiny_checkpoint, "--space", tmp_path / "space", "--example", 'say "hi"', "x{y}")
    assert (code, errors) == (0, "")
    assert f"try it with: python {tmp_path / 'space' / 'app.py'}" in out
    folder = tmp_path / "space"
    assert {path.name for path in folder.iterdir()} == {"README.md", "app.py", "demo", "model-1", "requirements.txt"}
    data, text = metadata(folder)
    name = tiny_checkpoint.name
    assert data == {
        "title": f"Translation by {name}",
        "sdk": "gradio",
        "sdk_version": version("gradio"),
        "python_version": "3.11",
        "app_file": "app.py",
    }
    assert name in text
    app = (folder / "app.py").read_text(encoding="utf-8")
    assert "EXAMPLES = ['say \"hi\"', 'x{y}']" in app
    assert f"MODELS = [('{name}', 'model-1')]" in app
    compile(app, "app.py", "exec")
    lines = (folder / "requirements.txt").read_text().splitlines()
    names = ["torch", "transformers", "sentencepiece"]
    assert [re.fullmatch(r"(\w+)==\d+\.\d+\.\d+", line)[1] for line in lines] == names
    copied = (folder / "model-1" / "model.safetensors").read_bytes()
    assert copied == (tiny_checkpoint / "model.safetensors").read_bytes()
    assert [path for path in tmp_path.iterdir() if path.name != "space"] == []


def test_a_space_that_loads_its_models_from_the_hub(demo, checkpoints, tmp_path):
    arguments = ["--space", tmp_path / "s", "--repo", "me/one", "me/two"]
    assert demo("--model", *checkpoints, *arguments)[0] == 0
    data, _ = metadata(tmp_path / "s")
    assert data["models"] == ["me/one", "me/two"]
    assert not list((tmp_path / "s").glob("model-*"))
    assert "[('me/one', 'me/one'), ('me/two', 'me/two')]" in (tmp_path / "s" / "app.py").read_text()


@pytest.mark.parametrize(
    ("licences", "said"), [(["mit"], "mit"), (["mit", "mit"], "mit"), (["mit", "gpl-3.0"], None), (["mit", None], None)]
)
def test_the_licence_is_what_the_cards_say(tiny_checkpoint, tmp_path, licences, said):
    sources = []
    for number, licence in enumerate(licences):
        folder = shutil.copytree(tiny_checkpoint, tmp_path / f"m{number}")
        head = f"---\nlicense: {licence}\n---\n" if licence else ""
        (folder / "README.md").write_text(f"{head}# It\n", encoding="utf-8")
        sources.append(space.source_of(str(folder)))
    space.write_space(tmp_path / "space", sources)
    assert metadata(tmp_path / "space")[0].get("license") == said


@pytest.mark.usefixtures("nothing_is_loaded")
def test_a_folder_with_something_in_it_stays_as_it_is(demo, tiny_checkpoint, tmp_path):
    (tmp_path / "mine").write_text("mine")
    code, _, errors = demo("--model", tiny_checkpoint, "--space", tmp_path)
    assert (code, "exists; give another folder" in errors) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(FileExistsError):
        space.write_space(tmp_path, [space.source_of(str(tiny_checkpoint))])
    assert (tmp_path / "mine").read_text() == "mine"


def test_an_empty_folder_may_be_there(demo, tiny_checkpoint, tmp_path):
    (tmp_path / "space").mkdir()
    assert demo("--model", tiny_checkpoint, "--space", tmp_path / "space")[0] == 0
    assert (tmp_path / "space" / "app.py").is_file()


def test_a_model_without_its_code_makes_no_space(demo, tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "m")
    (folder / "modeling_vanilla_transformer.py").unlink()
    code, _, errors = demo("--model", folder, "--space", tmp_path / "space")
    assert (code, "has no modeling_vanilla_transformer.py" in errors) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_write_that_fails_leaves_nothing(tiny_checkpoint, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(space, "_copy_page", full)
    with pytest.raises(OSError, match="No space left"):
        space.write_space(tmp_path / "space", [space.source_of(str(tiny_checkpoint))])
    assert list(tmp_path.iterdir()) == []


def test_every_file_that_the_page_imports_travels(tiny_checkpoint, tmp_path):
    space.write_space(tmp_path / "space", [space.source_of(str(tiny_checkpoint))])
    for path in (tmp_path / "space" / "demo").glob("*.py"):
        for name in re.findall(r"^from \.(\w+) import", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert (path.parent / f"{name}.py").is_file()
        assert "from .." not in path.read_text(encoding="utf-8")


READ = """
import json, sys, pathlib
sys.path.insert(0, sys.argv[1])
from demo.models import load
model = load("m", str(pathlib.Path(sys.argv[1]) / "model-1"), trust_remote_code=True)
weights = {kind: matrix.weights.tolist() for kind, matrix in model.attend(sys.argv[2], "halb zehn").items()}
try:
    import hf_vanilla_transformer
except ModuleNotFoundError:
    pathlib.Path(sys.argv[3]).write_text(json.dumps(weights))
"""


@pytest.mark.slow
def test_a_space_runs_where_this_package_is_not_installed(tiny_checkpoint, tmp_path, show_page):
    folder, place = tmp_path / "space", tmp_path / "run"
    space.write_space(folder, [space.source_of(str(tiny_checkpoint))], [TEXT])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with show_page(place, [str(folder / "app.py")], hidden=True, GRADIO_SERVER_PORT=port) as page:
        lines = [TEXT, "three euros and five cents"]
        client = Client(page.address, verbose=False)
        answer = client.predict(text="\n".join(lines), num_beams=4, max_new_tokens=0, api_name="/translate")
        assert answer[3] == "\n".join(Translator(tiny_checkpoint)(lines))
    command = [sys.executable, "-c", READ, str(folder), TEXT, str(tmp_path / "weights.json")]
    environment = os.environ | {"PYTHONPATH": str(place), "CONNECTIONS": str(tmp_path / "connections")}
    subprocess.run(command, env=environment, check=True, cwd=tmp_path)  # in which this package is hidden, too
    found = json.loads((tmp_path / "weights.json").read_text())
    translator = Translator(tiny_checkpoint)
    expected = attention_of(translator.model, translator.tokenizer, TEXT, "halb zehn")
    for kind in ("encoder", "decoder", "cross"):
        torch.testing.assert_close(torch.tensor(found[kind]), getattr(expected, kind))
