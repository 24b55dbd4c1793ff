"""What every command says of a mistake: one line that names the fix, before a model is loaded where that isn't needed.

`card` and `push` have theirs in tests/hub, `convert` and `export` in tests/interop, recipes in tests/training.
"""

import io
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from hf_vanilla_transformer.translation.translator import Translator

EVALUATE = "evaluate --source source.en --reference reference.de --model MODEL"
SEVERAL = f"{EVALUATE} OTHER"
EXPLAIN = "explain --model MODEL --output"
DRAW = "plot attention --source nine --model MODEL --output a.png"
HELP = "(see vanilla-transformer --help)"

# A command -> what the line of its error contains.
BEFORE_LOADING = {
    "": f"required: COMMAND {HELP}",
    "trian": "; did you mean 'train'?",
    "translate": "required: --model (see vanilla-transformer translate --help)",
    "translate --modle MODEL": "unrecognized arguments: --modle; did you mean '--model'?",
    "translate --model MODEL --max_new_tokns 2 a": "did you mean '--max-new-tokens'",
    "translate --model MODEL --source-lang en": "unrecognized arguments: --source-lang; did you mean '--src-lang'?",
    "evaluate --model MODEL --train-file x": "unrecognized arguments: --train-file (see",
    "translate --model MODEL --beam 0": "--beam: '0' is not an integer of at least 1",
    "translate --model MODEL --beam 2 --greedy": "--greedy: not allowed with",
    "translate --model MODEL --length-penalty -1": "--length-penalty: '-1' is not a number of at least 0",
    "translate --model MODEL --dtype int8": "float32",
    "translate --model MODEL --threads 9999 a": "--threads 9999 is more than this machine's",
    "translate --model MODEL --ray local -- a": "--ray is for tables, or several files; give them by --input, or leave",
    "translate --model /no/where a": "'/no/where' is neither a folder here nor a name that the Hub could have",
    "translate --model no/where a": "no/where is not a folder here, and the Hub can't be reached",
    "translate --model text a": "is not a folder here, and the Hub can't be reached",
    "translate --model ./text a": "'./text' is neither a folder here nor a name that the Hub could have",
    "translate --model taken a": "not a checkpoint: it has no config.json; give",
    "info graphs": "is in ONNX's format, for onnxruntime; give the model that it was exported from",
    "translate --model MODEL < latin1": "input:2: not UTF-8 (byte 0xf6 at 4); convert it to UTF-8, with iconv",
    "translate --model MODEL a\udcff": "sentence 1 is not valid UTF-8",
    "translate --model MODEL --input nowhere": "nowhere: no such file; name an existing file",
    "translate --model MODEL --input .": "several files need a place for the translations; give --output",
    "translate --model MODEL --input empty": "empty: the file is empty; is it",
    "translate --model MODEL --input damaged.gz": "the compressed file is damaged",
    "translate --model MODEL nine --input text": "sentences and --input FILE are two things to translate; give one",
    "translate --model MODEL --input text --output ./text --overwrite": "--output ./text is the file of another option",
    "translate --model MODEL --input text --output link --overwrite": "--output link is the file of another option",
    "translate --model MODEL --output text nine": "--output text exists; give another file, or --overwrite to replace",
    "translate --model MODEL --output . nine": "--output . is a folder; give a file in a folder that exists",
    "translate --model MODEL --output no/new nine": "--output no/new can't be written: there is no folder no",
    f"{EVALUATE} --source nowhere.en": "nowhere.en: no such file; name an existing file",
    f"{EVALUATE} --source empty": "empty: the file is empty; is it",
    f"{EVALUATE} --source latin1": "latin1:2: not UTF-8 (byte 0xf6 at 4); convert it to UTF-8, with iconv",
    f"{EVALUATE} --source damaged.gz": "the compressed file is damaged",
    f"{EVALUATE} --reference short": "short: ends after line 1, but source.en is longer",
    f"{EVALUATE} --json text": "--json text exists; give another file, or --overwrite to replace it",
    f"{EVALUATE} --json source.en --overwrite": "--json source.en is the file of another option; give another",
    f"{EVALUATE} --json new --output ./new": "--output ./new is the file of another option; give another",
    f"{EVALUATE} --output no/new": "--output no/new can't be written: there is no folder no; give",
    f"{EVALUATE} --significance": "--significance compares models; give --model A B",
    f"{EVALUATE} --ensemble": "--ensemble needs two models or more; give --model A B",
    f"{EVALUATE} --tokenize moses": "unknown tokenize='moses'; sacreBLEU has 'none'",
    f"{EVALUATE} --metrics bleu_compound_split --tokenize char": "tokenize='char' can't be combined with split",
    f"{EVALUATE} --metrics blue": "invalid choice: 'blue' (choose from 'bleu', ",
    f"{SEVERAL} --significance": "4 sentences are too few to be resampled; give 10 or more",
    f"{SEVERAL} --output new": "--output is for one model's translations; give a single --model",
    "score --source source.en --target short --model MODEL": "short: ends after line 1",
    "score --source source.en --target reference.de --model nowhere": "nowhere",
    "score --source source.en --target reference.de --output source.en --overwrite --model MODEL": "of another option",
    "score --source source.en --target reference.de --output text --model MODEL": "--overwrite",
    "average": "one of the arguments RUN --checkpoints is required (see vanilla-transformer average --help)",
    "average /no/where": "/no/where is not a folder; RUN must be",
    "average taken": "has no complete checkpoint; give a training's folder",
    "average RUN --last 7": "has 6 complete checkpoints, not 7 (checkpoint-1, ",
    "average RUN --last 0": "--last: '0' is not an integer of at least 1",
    "average RUN --checkpoints RUN/checkpoint-1": "--checkpoints: not allowed with argument RUN",
    "average --checkpoints RUN/checkpoint-1 --last 1": "--last is for RUN's checkpoints, and",
    "average --checkpoints RUN/checkpoint-9": "checkpoint-9: there is no such folder",
    "average --checkpoints RUN/checkpoint-1 /no/where": "different folders; give the folder of",
    "average RUN --output taken": "taken exists; choose another output, or ask to overwrite it",
    "average RUN --output RUN --overwrite": "is not just a saved model (it contains checkpoint-1)",
    "average RUN --output RUN/checkpoint-6 --overwrite": "is not just a saved model",
    "explain --output p.html": "required: --model",
    "explain --model ./nowhere --output p.html": "'./nowhere' is neither a folder here nor a name",
    f"{EXPLAIN} no/p.html": "there is no folder no",
    f"{EXPLAIN} taken": "taken exists; choose another output; a page's name",
    f"{EXPLAIN} p.html --quantization int4": "invalid choice: 'int4'",
    "plot": "required: KIND (see vanilla-transformer plot --help)",
    "plot atention": "did you mean 'attention'?",
    "plot curves taken --output a.html": "--output a.html has to end with .png or .svg",
    "plot curves taken --output no/a.png": "there is no folder no",
    "plot curves nowhere --output a.png": "nowhere/trainer_state.json is missing; give the",
    "plot curves empty.json --output a.png": "no log has a loss, a perplexity or a BLEU score",
    f"{DRAW} --target ' '": "the text is empty; give a sentence",
    f"{DRAW} --layer 0": "'0' is not an integer of at least 1",
    f"{DRAW} --layer 1 --output a.html": "leave out --part, --layer and --heads",
    f"{DRAW} --model ./nowhere": "'./nowhere' is neither a folder here nor a name",
    "serve --model MODEL --replicas 4": "--replicas and --models-per-replica are for --ray",
    "serve --model MODEL --port 70000": "'70000' is not a port; give an integer from 1 to 65535",
    "serve --model MODEL": "doesn't say what it translates; give --languages, such as en-de",
    "serve --model en-de=MODEL en-de=MODEL": "two models translate en-de; give each pair once",
    "serve --model MODEL MODEL --languages en-de": "--languages is for one model without a pair",
}
AFTER_LOADING = {
    "translate --model graphs a": "is in ONNX's format, for onnxruntime; give the model that it was exported from",
    "translate --model MODEL --beam 1000001 a": "num_beams is 1000001; it has to be an int",
    "translate --model MODEL --device toaster a": "device toaster can't be used",
    f"{EVALUATE} STRANGER --ensemble": "averaged: model 2 has another tokenizer than model 1; ",
    f"{DRAW} --layer 3": "layer 3 doesn't exist: there are layers 1 to 2",
    f"{DRAW} --heads 5": "head 5 doesn't exist: there are heads 1 to 4",
}


@pytest.fixture
def error(vanilla_transformer, monkeypatch, bad_files, checkpoints, trained):
    """Runs a line of a shell, and returns the one line that it prints; nothing is written."""
    graphs = Path(shutil.copytree(checkpoints[0], "graphs", ignore=shutil.ignore_patterns("*.safetensors")))
    (graphs / "encoder_model.onnx").touch()
    names = dict(zip(("MODEL", "OTHER", "STRANGER"), checkpoints, strict=True)) | {"RUN": str(trained)}

    def error(line):
        command, _, file = line.partition(" < ")
        for name, folder in names.items():
            command = command.replace(name, folder)
        stdin = Path(file).read_bytes() if file else b""
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        before = {path: path.stat().st_mtime_ns for path in (*bad_files.rglob("*"), *trained.rglob("*"))}
        result = vanilla_transformer(*shlex.split(command))
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1), result
        assert {path: path.stat().st_mtime_ns for path in (*bad_files.rglob("*"), *trained.rglob("*"))} == before
        return result.error

    return error


@pytest.mark.parametrize("command", BEFORE_LOADING)
def test_a_mistake_is_one_line_that_names_the_fix(error, monkeypatch, command):
    monkeypatch.setattr(Translator, "__init__", lambda *_, **__: pytest.fail("a model is loaded"))
    assert BEFORE_LOADING[command] in error(command)


@pytest.mark.parametrize("command", AFTER_LOADING)
def test_what_a_model_lacks_is_one_line(error, command):
    assert AFTER_LOADING[command] in error(command)


@pytest.mark.parametrize(
    ("system", "package"),
    [
        ("onnx", "onnxruntime"),
        ("onnx", "onnxscript"),
        ("transformers_js", "onnxruntime"),
        ("transformers_js", "onnxscript"),
        ("ctranslate2", "ctranslate2"),
    ],
)
def test_export_names_the_extra(vanilla_transformer, tiny_checkpoint, tmp_path, monkeypatch, system, package):
    for module in (system, "onnx"):  # which transformers_js imports
        monkeypatch.delitem(sys.modules, f"hf_vanilla_transformer.interop.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    to = ("stock", "--onnx") if system == "transformers_js" else (system,)
    result = vanilla_transformer("export", "--model", tiny_checkpoint, "--output", tmp_path / "new", "--to", *to)
    assert (result.code, f"{system} needs more packages" in result.error) == (2, True)
    assert "run pip install '.[export]' in a checkout" in result.error
