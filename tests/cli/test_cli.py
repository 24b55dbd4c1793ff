"""The command line: instant help, translations in the order of the input."""

import argparse
import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_corpus import NEEDED_BY_NONE, load

from hf_vanilla_transformer import cli, engine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(monkeypatch, vanilla_transformer):
    """Runs the command in this process and returns its exit code, output and errors."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return vanilla_transformer(*arguments)

    return run


# Help


SLOW = {"torch", "transformers", "tokenizers", "huggingface_hub", "numpy", "yaml"}
HELPS = ["--help", "--version", *(f"{name} --help" for name in cli.COMMANDS)]
MISTAKES = ["", "tranlsate", "translate --model DIR --num-baems 4", "average RUN --last 0", "train --config"]
# Runs the command once for each line of standard input; the last line of the output has what is imported at the end.
CONSOLE_SCRIPT = """
import sys
from hf_vanilla_transformer.cli import main
for line in sys.stdin:
    try:
        print(main(line.split()))
    except SystemExit as end:
        print(end.code)
print(*sys.modules)
"""


def test_help_and_wrong_use_import_nothing_heavy():
    lines = "\n".join(HELPS + MISTAKES)
    command = [sys.executable, "-c", CONSOLE_SCRIPT]
    result = subprocess.run(command, cwd=ROOT, input=f"{lines}\n", capture_output=True, text=True)
    *out, modules = result.stdout.splitlines()
    assert [line for line in out if line in ("0", "1", "2")] == [*("0" for _ in HELPS), *("2" for _ in MISTAKES)]
    assert result.stdout.count("usage:") == len(HELPS) - 1
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["vanilla-transformer"] * len(MISTAKES)
    assert "hf_vanilla_transformer.cli" in modules.split()
    assert sorted((NEEDED_BY_NONE | SLOW).intersection(modules.split())) == []


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


@pytest.fixture(scope="module")
def reference(tiny_checkpoint):
    """Translates a sentence alone, through transformers' own calls."""
    model, tokenizer = load(tiny_checkpoint)

    def reference(sentence, **options):
        with torch.no_grad():
            output = model.generate(**tokenizer([sentence], return_tensors="pt"), **options)
        return tokenizer.batch_decode(output, skip_special_tokens=True)[0].replace("\n", " ").replace("\r", " ")

    return reference


SENTENCES = [
    "twenty-one",
    "half past nine on the fourth of May",
    "it",
    "drei Euro und fünf Cent",
    "it costs two hundred",
]


def test_arguments_are_translated_as_the_model_does_in_their_order(run, tiny_checkpoint, reference):
    code, out, err = run(
        "translate", "--model", tiny_checkpoint, "--max-new-tokens", 8, "--batch-size", 2, "--device", "cpu", *SENTENCES
    )
    expected = [reference(sentence, max_new_tokens=8) for sentence in SENTENCES]
    assert (code, out.split("\n")[:-1], err) == (0, expected, "")


@pytest.mark.parametrize("option", [["--greedy"], ["--num-beams", 1], ["--beam", 1]])
def test_greedy_is_a_beam_of_one(run, tiny_checkpoint, reference, option):
    code, out, err = run("translate", "--model", tiny_checkpoint, "--max-new-tokens", 8, *option, SENTENCES[1])
    assert (code, out, err) == (0, f"{reference(SENTENCES[1], max_new_tokens=8, num_beams=1)}\n", "")


def test_lines_of_standard_input_give_a_line_each_and_empty_ones_stay_empty(run, tiny_checkpoint, reference):
    lines = [SENTENCES[1], "", SENTENCES[0], "   ", SENTENCES[3]]
    stdin = "\ufeff" + "\r\n".join(lines)  # Windows' line ends and byte-order mark, no line end at the end
    options = ["--model", tiny_checkpoint, "--max-new-tokens", 8, "--batch-size", 2]
    code, out, err = run("translate", *options, stdin=stdin.encode())
    expected = [reference(line, max_new_tokens=8) if line.strip() else "" for line in lines]
    assert (code, out.split("\n"), err) == (0, [*expected, ""], "")


@pytest.mark.parametrize("stdin", [b"", b"\n", b"\n\n"])
def test_input_without_a_sentence(run, tiny_checkpoint, stdin):
    assert run("translate", "--model", tiny_checkpoint, stdin=stdin) == (0, stdin.decode(), "")


def test_underscores_in_names_of_options(run, tiny_checkpoint, tmp_path):
    output, dashes = tmp_path / "a_b", ["translate", "--model", tiny_checkpoint, "--max-new-tokens", 8]
    underscores = ["translate", f"--model={tiny_checkpoint}", "--max_new_tokens=8"]
    assert run(*underscores, f"--output={output}", "A_b.") == (0, f"wrote {output}\n", "")
    sentences = ["--half_past nine", "--max_new_tokens is 2", "-- a_b"]  # no options, as they have spaces
    expected = run(*dashes, stdin="\n".join(["A_b.", *sentences, "--max_new_tokens"]).encode()).out
    assert output.read_text("utf-8") == expected.splitlines(keepends=True)[0]
    found = [run(*underscores, sentence).out for sentence in ("A_b.", *sentences)]
    assert "".join([*found, run(*underscores, "--", "--max_new_tokens").out]) == expected


def test_programs_keep_freed_memory(run, tiny_checkpoint, monkeypatch):
    calls = []
    monkeypatch.setattr(engine, "keep_freed_memory", lambda: calls.append(1))
    assert run("translate", "--model", tiny_checkpoint, "--greedy", "--max-new-tokens", 2, "nine")[0] == 0
    assert calls == [1]
