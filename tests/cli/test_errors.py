"""What every command says of a mistake: one line that names the fix, before a model is loaded where that isn't needed.

What is wrong with folders, repositories and other systems' models is in tests/hub and tests/interop.
"""

import gzip
import io
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from small_corpus import write_texts
from small_runs import recipe_in

from hf_vanilla_transformer.translation.translator import Translator

EVALUATE = "evaluate --source source.en --reference reference.de --model MODEL"
SEVERAL = f"{EVALUATE} OTHER"
CHOOSE = "translate --model MODEL --choose-by"
EXPLAIN = "explain --model MODEL --output"
DRAW = "plot attention --source nine --model MODEL --output a.png"
TRAIN = "train --config recipe.yaml"
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
    "translate --model ./text a": "'./text' is neither a folder here nor a name that the Hub could have",
    "translate --model taken a": "not a checkpoint: it has no config.json; give",
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
    "translate --model MODEL --input text --output out.gz": "--output out.gz would be text that isn't compressed",
    "translate --model MODEL --json --input table.tsv --output out.tsv": "--json is for lines; leave it out",
    f"{CHOOSE} short --input source.en": "source.en has 4 lines, and short 1 lines; give a reference for each",
    f"{CHOOSE} short nine a": "the input has 2 sentences, and short 1 lines",
    f"{CHOOSE} nowhere --input source.en": "nowhere: no such file",
    f"{CHOOSE} reference.de --input source.en reference.de --output .": "--choose-by is for the lines of one text file",
    f"{CHOOSE} reference.de --input source.en --output reference.de --overwrite": "is the file of another option",
    f"{CHOOSE} reference.de --input source.en --split-sentences und": "a split line has one; leave one out",
    f"{CHOOSE} pairs.tsv --input text": "--choose-by pairs.tsv is no text by its name; give a file with a line",
    f"{CHOOSE} text --input pairs.tsv": "--choose-by is for the lines of one text file; give one by --input",
    "translate --model MODEL --choose-by-measure chrf a": "--choose-by-measure is for --choose-by; leave it out",
    "translate --model MODEL --ensemble --input source.en": "--ensemble needs two models or more; give --model A B",
    "translate --model MODEL --ensemble nine": "nine is not a folder here",
    f"{EVALUATE} --errors errors.txt": "--errors errors.txt is no table; give a name that ends in .tsv or .jsonl",
    f"{EVALUATE} --errors no/errors.tsv": "there is no folder no",
    f"{EVALUATE} --errors x.tsv --output x.tsv": "is the file of another option",
    f"{EVALUATE} --errors table.tsv": "exists; give another file, or --overwrite",
    f"{SEVERAL} --errors errors.tsv": "--errors is for one model's translations",
    f"{EVALUATE} --source nowhere.en": "nowhere.en: no such file; name an existing file",
    f"{EVALUATE} --source latin1": "latin1:2: not UTF-8 (byte 0xf6 at 4); convert it to UTF-8, with iconv",
    f"{EVALUATE} --reference short": "short: ends after line 1, but source.en is longer",
    f"{EVALUATE} --json text": "--json text exists; give another file, or --overwrite to replace it",
    f"{EVALUATE} --json source.en --overwrite": "--json source.en is the file of another option; give another",
    f"{EVALUATE} --json new --output ./new": "--output ./new is the file of another option; give another",
    f"{EVALUATE} --output no/new": "--output no/new can't be written: there is no folder no; give",
    f"{EVALUATE} --significance": "--significance compares models; give --model A B",
    f"{EVALUATE} --ensemble": "--ensemble needs two models or more; give --model A B",
    f"{EVALUATE} --tokenize moses": "unknown tokenize='moses'; sacreBLEU has 'none'",
    f"{EVALUATE} --metrics bleu_compound_split --tokenize char": "tokenize='char' can't be combined with split",
    f"{EVALUATE} --metrics blue": "there is no measure 'blue'; give some of bleu, ",
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
    "average RUN --checkpoints RUN/checkpoint-1": "--checkpoints: not allowed with argument RUN",
    "average --checkpoints RUN/checkpoint-1 --last 1": "--last is for RUN's checkpoints, and",
    "average --checkpoints RUN/checkpoint-9": "checkpoint-9: there is no such folder",
    "average --checkpoints RUN/checkpoint-1 /no/where": "different folders; give the folder of",
    "average RUN --output taken": "taken exists; choose another output, or ask to overwrite it",
    "average RUN --output RUN --overwrite": "is not just a saved model (it contains checkpoint-1)",
    "average RUN --output RUN/checkpoint-6 --overwrite": "is not just a saved model",
    "convert taken --output new": "isn't the model of a known system; give --from with one of marian, marian-npz",
    "convert nothing.pt --output new --mapping hkproj": "there is no file or folder nothing.pt",
    "convert MODEL --output new --from marian --mapping hkproj": "a mapping describes a state dict, and marian models",
    "convert MODEL --output new --revision x": "is of a name on the Hub, and",
    "convert MODEL --output taken": "taken exists; choose another output",
    "export --model MODEL --output taken --to ctranslate2": "taken exists; choose another output",
    "export --model MODEL --output new --to ctranslate2 --onnx": "--onnx is for --to stock, not ctranslate2; leave it",
    "export --model MODEL --output new --to stock --quantization int8": "--quantization is for --to ctranslate2, not",
    "push MODEL me/model --onnx": "--onnx is for --as stock; add that, or leave --onnx out",
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
    f"{DRAW} --layer 1 --output a.html": "leave out --part, --layer and --heads",
    f"{DRAW} --model ./nowhere": "'./nowhere' is neither a folder here nor a name",
    "serve --model MODEL --replicas 4": "--replicas and --models-per-replica are for --ray",
    "serve --model MODEL --port 70000": "'70000' is not a port; give an integer from 1 to 65535",
    "serve --model MODEL": "doesn't say what it translates; give --languages, such as en-de",
    "serve --model en-de=MODEL en-de=MODEL": "two models translate en-de; give each pair once",
    "serve --model MODEL MODEL --languages en-de": "--languages is for one model without a pair",
    f"{TRAIN} no_output.yaml": "--output-dir",
    f"{TRAIN} no_data.yaml": "no training data",
    f"{TRAIN} no_target.yaml": "1 source files but 0 target files",
    f"{TRAIN} no_validation.yaml": "eval_strategy needs",
    f"{TRAIN} --test-source nowhere.en": "nowhere.en: no such file",
    f"{TRAIN} --average-last 5 --save-total-limit 3": "keep at least 5",
    f"{TRAIN} --early-stopping soon": "early_stopping is 'soon'; give true, false or never",
    f"{TRAIN} --num-beams 0": "num_beams is 0; give 1 or more",
    f"{TRAIN} --gnmt-length-penalty=-1": "gnmt_length_penalty is -1.0; give 0 or more",
    f"{TRAIN} --preset huge": "preset",
    f"{TRAIN} --d-model 130": "d_model",
    f"{TRAIN} --dropout 2": "dropout",
    f"{TRAIN} --resum": "unrecognized arguments: --resum; did you mean '--resume'?",
    f"{TRAIN} --bf16-eval": "did you mean '--bf16'?",  # which `train` supports
    f"{TRAIN} --fsdp full_shard": "fsdp isn't supported by `train`",
    f"{TRAIN} --config multi30k_tni": "did you mean 'multi30k_tiny'?",
    # Options that come later override earlier ones, alone too, and a value behind "=" may have spaces.
    f"{TRAIN} '--train-source=no where.en'": "no where.en: no such file",
    f"{TRAIN} no_data.yaml --config more.yaml": "nowhere.en: no such file",
    "card CARDED --license mit": "README.md exists; give --overwrite to replace it",
    "card CARDED --overwrite --name my-run": "--name my-run is not a repository's name; give user/name",
    "card CARDED --lang en": "unrecognized arguments: --lang",
    "card nowhere": "is not a folder; DIR must be that of a saved model",
}
AFTER_LOADING = {
    "translate --model graphs a": "is in ONNX's format, for onnxruntime; give the model that it was exported from",
    "translate --model MODEL --beam 1000001 a": "num_beams is 1000001; it has to be an int",
    "translate --model MODEL --device toaster a": "device toaster can't be used",
    f"{EVALUATE} STRANGER --ensemble": "averaged: model 2 has another tokenizer than model 1; ",
    f"{CHOOSE} reference.de --greedy --input source.en --output new": "--choose-by chooses of several translations",
    f"{DRAW} --layer 3": "layer 3 doesn't exist: there are layers 1 to 2",
    f"{DRAW} --heads 5": "head 5 doesn't exist: there are heads 1 to 4",
}
# These have begun to write the run's folder.
WHEN_THE_DATA_IS_READ = {
    f"{TRAIN} --vocab-size 50": "vocab_size=50: give an integer of at least 259",
    f"{TRAIN} --max-length 1": "no sentence pair is left",
    f"{TRAIN} --gradient-accumulation-steps 1000": "50 sentence pairs are too few for 1 processes",
    f"{TRAIN} --streaming true --max-length 129": "129 may not fit into per_device_train_batch_tokens 128",
}
MISSING_PACKAGES = {
    "export --model MODEL --output new --to onnx": ("onnxruntime", "onnx needs more packages", "export"),
    "export --model MODEL --output new --to onnx ": ("onnxscript", "onnx needs more packages", "export"),
    "export --model MODEL --output new --to stock --onnx": ("onnxruntime", "js needs more packages", "export"),
    "export --model MODEL --output new --to stock --onnx ": ("onnxscript", "js needs more packages", "export"),
    "export --model MODEL --output new --to ctranslate2": ("ctranslate2", "ctranslate2 needs more packages", "export"),
    "serve --model en-de=MODEL --ray": ("ray", "Ray isn't installed", "ray"),
    DRAW: ("matplotlib", "", "plot"),
}


@pytest.fixture(scope="module")
def place(checkpoints, trained, tmp_path_factory):
    """A folder with parallel texts, recipes, and files and folders that commands refuse."""
    folder = tmp_path_factory.mktemp("place")
    write_texts(folder)
    contents = {
        "empty": b"", "short": b"eins\n", "latin1": "gut\nschön\ngut\ngut\n".encode("latin1"), "text": b"nine\n",
        "damaged.gz": gzip.compress(b"text\n" * 4)[:-9], "empty.json": b'{"log_history": []}',
        "table.tsv": b"text\nit\n",
    }  # fmt: skip
    recipe = recipe_in(folder) | {"eval_strategy": "steps", "eval_steps": 2, "output_dir": "run"}
    no_target, no_source = {"train_target": []}, {"train_source": []}
    recipes = {
        "recipe": recipe, "no_output": {"output_dir": None}, "no_target": no_target, "no_data": no_source | no_target,
        "no_validation": {"validation_source": [], "validation_target": []},
        "more": {"train_source": ["nowhere.en"], "train_target": ["nowhere.de"]},
    }  # fmt: skip
    contents |= {f"{name}.yaml": yaml.safe_dump(settings).encode() for name, settings in recipes.items()}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / "link").symlink_to("text")
    (folder / "taken").mkdir()
    (folder / "taken" / "thesis.txt").touch()
    shutil.copytree(checkpoints[0], folder / "graphs", ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "graphs" / "encoder_model.onnx").touch()
    shutil.copytree(checkpoints[0], folder / "carded")
    (folder / "carded" / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


@pytest.fixture
def error(vanilla_transformer, monkeypatch, place, checkpoints, trained):
    """Runs a line of a shell in that folder, and returns the one line that it prints; nothing is written."""
    monkeypatch.chdir(place)
    names = dict(zip(("MODEL", "OTHER", "STRANGER"), checkpoints, strict=True)) | {"RUN": str(trained)}
    names["CARDED"] = str(place / "carded")

    def times():
        return {path: path.stat().st_mtime_ns for folder in (place, trained) for path in folder.rglob("*")}

    def error(line):
        command, _, file = line.partition(" < ")
        for name, folder in names.items():
            command = command.replace(name, folder)
        stdin = Path(file).read_bytes() if file else b""
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        before = times()
        result = vanilla_transformer(*shlex.split(command))
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1), result
        assert times() == before
        return result.error

    return error


@pytest.mark.parametrize("command", BEFORE_LOADING)
def test_a_mistake_is_one_line_that_names_the_fix(error, monkeypatch, command):
    monkeypatch.setattr(Translator, "__init__", lambda *_, **__: pytest.fail("a model is loaded"))
    assert BEFORE_LOADING[command] in error(command)


@pytest.mark.parametrize("command", AFTER_LOADING)
def test_what_a_model_lacks_is_one_line(error, command):
    assert AFTER_LOADING[command] in error(command)


@pytest.mark.parametrize("command", WHEN_THE_DATA_IS_READ)
def test_what_the_data_lacks_is_one_line(vanilla_transformer, monkeypatch, place, tmp_path, command):
    monkeypatch.chdir(place)
    result = vanilla_transformer(*command.split(), "--output-dir", tmp_path / "run")
    assert (result.code, WHEN_THE_DATA_IS_READ[command] in result.error, result.err.count("\n")) == (2, True, 1)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("command", MISSING_PACKAGES)
def test_a_missing_package_is_named_with_its_extra(error, monkeypatch, command):
    package, message, extra = MISSING_PACKAGES[command]
    ours = re.compile(r"hf_vanilla_transformer\.(interop\.(onnx|transformers_js|ctranslate2)$|serving\.ray)|ray(\.|$)")
    for name in [name for name in sys.modules if ours.match(name)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    found = error(command)
    assert message in found
    assert f"run pip install '.[{extra}]'" in found
