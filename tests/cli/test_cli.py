"""The command line: instant help, translations in the order of the input, one-line errors that name the fix."""

import argparse
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import cli, engine
from hf_vanilla_transformer.cli import arguments as types
from hf_vanilla_transformer.cli import export
from hf_vanilla_transformer.cli.output import UsageError

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "hf_vanilla_transformer"]  # what `vanilla-transformer` starts


@pytest.fixture
def run(monkeypatch, vanilla_transformer):
    """Runs the command in this process and returns its exit code, output and errors."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return vanilla_transformer(*arguments)

    return run


# Help


# Runs a console script of the arguments, and says on the last line of standard error what is imported at its end.
CONSOLE_SCRIPT = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from hf_vanilla_transformer.cli import main
sys.exit(main())
"""
NEEDED_BY_NONE = {  # of what is installed and slow to import, what neither help nor a first translation needs
    "datasets", "evaluate", "hf_vanilla_transformer.metrics", "matplotlib", "pandas", "pyarrow",
    "sacrebleu", "scipy", "sklearn",
}  # fmt: skip


def _run_console_script(*arguments):
    """The result of a console script in another process, and the modules imported there."""
    result = subprocess.run(
        [sys.executable, "-c", CONSOLE_SCRIPT, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )
    *lines, modules = result.stderr.splitlines()
    result.stderr = "".join(f"{line}\n" for line in lines)
    return result, set(modules.split())


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        ([], 2),
        (["tranlsate"], 2),
        *(([name, "--help"], 0) for name in cli.COMMANDS),
        (["translate", "--model", "DIR", "--num-baems", "4"], 2),
        (["average", "RUN", "--last", "0"], 2),
        (["train", "--config"], 2),
    ],
)
def test_help_and_wrong_use_import_nothing_heavy(arguments, code):
    result, modules = _run_console_script(*arguments)
    assert result.returncode == code
    assert ("usage:" in result.stdout) is ("--help" in arguments)
    assert result.stderr.startswith("vanilla-transformer: error: " if code else "")
    assert result.stderr.count("\n") == (1 if code else 0)
    assert "hf_vanilla_transformer.cli" in modules
    slow = {"torch", "transformers", "tokenizers", "huggingface_hub", "numpy", "yaml"}
    assert sorted((NEEDED_BY_NONE | slow) & modules) == []


@pytest.mark.slow
def test_a_first_translation_imports_little_beyond_the_model(tiny_checkpoint):
    result, modules = _run_console_script("translate", "--model", tiny_checkpoint, "--max-new-tokens", 8, "twenty-one")
    assert (result.returncode, result.stdout.count("\n"), result.stderr) == (0, 1, "")
    assert "hf_vanilla_transformer.engine.decoding.search" in modules
    assert sorted(NEEDED_BY_NONE & modules) == []


def test_every_option_has_a_help():
    def without_help(parser):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for one in action.choices.values():
                    yield from without_help(one)
            elif not action.help:
                yield parser.prog, action.dest

    assert list(without_help(cli._parser())) == []


# Translations


def _reference(checkpoint, sentence, **options):
    """The sentence alone, through transformers' own calls."""
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    with torch.no_grad():
        output = model.generate(**tokenizer([sentence], return_tensors="pt"), **options)
    return tokenizer.batch_decode(output, skip_special_tokens=True)[0].replace("\n", " ").replace("\r", " ")


SENTENCES = [
    "twenty-one",
    "half past nine on the fourth of May",
    "it",
    "drei Euro und fünf Cent",
    "it costs two hundred",
]


def test_arguments_are_translated_as_the_model_does_in_their_order(run, tiny_checkpoint):
    code, out, err = run(
        "translate", "--model", tiny_checkpoint, "--max-new-tokens", 8, "--batch-size", 2, "--device", "cpu", *SENTENCES
    )
    expected = [_reference(tiny_checkpoint, sentence, max_new_tokens=8) for sentence in SENTENCES]
    assert (code, out.split("\n")[:-1], err) == (0, expected, "")


@pytest.mark.parametrize("option", [["--greedy"], ["--num-beams", 1], ["--beam", 1]])
def test_greedy_is_a_beam_of_one(run, tiny_checkpoint, option):
    code, out, err = run("translate", "--model", tiny_checkpoint, "--max-new-tokens", 8, *option, SENTENCES[1])
    expected = _reference(tiny_checkpoint, SENTENCES[1], max_new_tokens=8, num_beams=1)
    assert (code, out, err) == (0, f"{expected}\n", "")


def test_lines_of_standard_input_give_a_line_each_and_empty_ones_stay_empty(run, tiny_checkpoint):
    lines = [SENTENCES[1], "", SENTENCES[0], "   ", SENTENCES[3]]
    stdin = "\ufeff" + "\r\n".join(lines)  # Windows' line ends and byte-order mark, no line end at the end
    options = ["--model", tiny_checkpoint, "--max-new-tokens", 8, "--batch-size", 2]
    code, out, err = run("translate", *options, stdin=stdin.encode())
    expected = [_reference(tiny_checkpoint, line, max_new_tokens=8) if line.strip() else "" for line in lines]
    assert (code, out.split("\n"), err) == (0, [*expected, ""], "")


@pytest.mark.parametrize("stdin", [b"", b"\n", b"\n\n"])
def test_input_without_a_sentence(run, tiny_checkpoint, stdin):
    assert run("translate", "--model", tiny_checkpoint, stdin=stdin) == (0, stdin.decode(), "")


def test_underscores_in_names_of_options(run, tiny_checkpoint, tmp_path):
    output = tmp_path / "a_b"
    code, out, err = run("translate", "--model", tiny_checkpoint, "--max_new_tokens=2", f"--output={output}", "A_b.")
    assert (code, out, err) == (0, f"wrote {output}\n", "")
    assert run("translate", "--model", tiny_checkpoint, "--max-new-tokens", 2, "A_b.")[1] == output.read_text("utf-8")
    text = run("translate", "--model", tiny_checkpoint, "--max_new_tokens", 2, "--", "--max_new_tokens")[1]
    assert text == run("translate", "--model", tiny_checkpoint, "--max_new_tokens", 2, stdin=b"--max_new_tokens")[1]
    for sentence in ("--half_past nine", "--max_new_tokens is 2", "-- a_b"):  # no options, as they have spaces
        text = run("translate", "--model", tiny_checkpoint, "--max_new_tokens", 8, sentence)[1]
        assert text == run("translate", "--model", tiny_checkpoint, "--max_new_tokens", 8, stdin=sentence.encode())[1]
    code, _, err = run("translate", "--model", tiny_checkpoint, "--max_new_tokns", 2, "A b.")
    assert (code, "did you mean '--max-new-tokens'" in err) == (2, True)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_with_brackets_or_without(host):
    name = types.host_name(host)
    assert (name, types.in_url(name), types.is_this_machine(name)) == ("::1", "[::1]", True)
    assert types.in_url(types.host_name("localhost")) == "localhost"


# What goes wrong


MODEL = "<the checkpoint>"


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
def test_export_names_the_extra_that_it_needs(monkeypatch, system, package):
    for module in (system, "onnx"):  # which transformers_js imports
        monkeypatch.delitem(sys.modules, f"hf_vanilla_transformer.interop.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    option = "--onnx" if system == "transformers_js" else f"--to {system}"
    with pytest.raises(UsageError, match=rf"^{option} needs more packages .*: run pip install '.\[export\]' in a"):
        export.check_packages(system)


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        ([], b"", r"required: COMMAND \(see vanilla-transformer --help\)"),
        (["trian"], b"", r"invalid choice: 'trian' .*; did you mean 'train'\?"),
        (["translate", "--modle", MODEL], b"", r"unrecognized arguments: --modle; did you mean '--model'\?"),
        (["evaluate", "--model", MODEL, "--train-file", "x"], b"", r"unrecognized arguments: --train-file \(see"),
        (["translate", "--model", MODEL, "--source-lang", "en"], b"", r"--source-lang; did you mean '--src-lang'\?"),
        (["translate"], b"", r"required: --model \(see vanilla-transformer translate --help\)"),
        (["translate", "--model", MODEL, "--beam", "0"], b"", "--beam: '0' is not an integer of at least 1"),
        (["translate", "--model", MODEL, "--beam", "1000001", "a"], b"", "num_beams is 1000001; it has to be an int"),
        (["translate", "--model", MODEL, "--threads", "9999", "a"], b"", "--threads 9999 is more than this machine's"),
        (["translate", "--model", MODEL, "--ray", "local", "--", "a"], b"", "--ray is for tables, or several files; g"),
        (["serve", "--model", MODEL, "--replicas", "4"], b"", "--replicas and --models-per-replica are for --ray"),
        (["translate", "--model", MODEL, "--beam", "2", "--greedy"], b"", "--greedy: not allowed with"),
        (["translate", "--model", MODEL, "--dtype", "int8"], b"", "choose from '?float32'?"),
        (["translate", "--model", MODEL, "--device", "toaster", "a"], b"", "device toaster can't be used.*try cpu"),
        (["translate", "--model", "/no/where", "a"], b"", "'/no/where' is neither a folder here nor a name that"),
        (["translate", "--model", "no/where", "a"], b"", "no/where is not a folder here, and the Hub can't be reached"),
        (["translate", "--model", str(ROOT / "tests"), "a"], b"", "not a checkpoint: it has no config.json; give"),
        (["translate", "--model", __file__, "a"], b"", "is neither a folder here nor a name that the Hub could have"),
        (["translate", "--model", MODEL], "gut\nschön\n".encode("latin1"), r"input:2: not UTF-8 .* at 4\).*iconv"),
        (["translate", "--model", MODEL, "a\udcff"], b"", "sentence 1 is not valid UTF-8"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_that_names_the_fix(run, tiny_checkpoint, arguments, stdin, message):
    arguments = [str(tiny_checkpoint) if argument == MODEL else argument for argument in arguments]
    code, out, err = run(*arguments, stdin=stdin)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"vanilla-transformer: error: .*{message}.*\n", err), err


def test_a_folder_with_onnx_graphs_is_named_as_such(run, tiny_checkpoint, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_checkpoint / name).read_bytes())
    (tmp_path / "encoder_model.onnx").touch()
    for command in (["translate", "--model", tmp_path, "nine"], ["info", tmp_path]):
        code, _, err = run(*command)
        assert (code, "is in ONNX's format, for onnxruntime; give the model that it was exported" in err) == (2, True)


def test_programs_keep_freed_memory(run, tiny_checkpoint, monkeypatch):
    calls = []
    monkeypatch.setattr(engine, "keep_freed_memory", lambda: calls.append(1))
    assert run("translate", "--model", tiny_checkpoint, "--greedy", "--max-new-tokens", 2, "nine")[0] == 0
    assert calls == [1]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tiny_checkpoint):
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [*COMMAND, "translate", "--model", tiny_checkpoint, "--max-new-tokens", "2", "nine"],
            cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert result.returncode == 1
    assert re.fullmatch("vanilla-transformer: error: .*No space left on device.*\n", result.stderr)
