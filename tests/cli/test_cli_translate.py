"""`translate` of arguments, files, pipes and slow producers: order, windows, bounds, what is on disk afterwards."""

import gzip
import io
import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_corpus import NEEDED_BY_NONE, load

from hf_vanilla_transformer.cli import lines, output, translate
from hf_vanilla_transformer.data import formats
from hf_vanilla_transformer.data.formats import CorpusError, decode_lines
from hf_vanilla_transformer.translation import decoding

ROOT = Path(__file__).parents[2]
# Of the processes, whose output is to be buffered as usual.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
PATIENCE = 120  # seconds, for a process that imports torch on a busy machine


class Chunks(io.RawIOBase):
    """A file without a buffer that gives one of its chunks a read."""

    def __init__(self, chunks):
        self.chunks = iter(chunks)

    def read(self, size=-1):
        return next(self.chunks, b"")


def _windows(chunks):
    return lines._of_stream(Chunks(chunks), "the pipe")


# ---- Windows of a stream ----
def test_what_a_slow_producer_has_sent_comes_at_once_without_the_line_that_it_has_begun():
    reader, writer = os.pipe()
    windows = lines._of_stream(os.fdopen(reader, "rb", buffering=0), "the pipe")
    os.write(writer, b"one\n")
    assert next(windows) == ["one"]
    os.write(writer, b"two\nthree\nfo")
    assert next(windows) == ["two", "three"]
    os.write(writer, "ur ü".encode()[:-1])  # half of a character
    threading.Timer(0.2, os.write, [writer, "ü".encode()[1:] + b"\n"]).start()
    assert next(windows) == ["four ü"]
    os.write(writer, b"the end")
    os.close(writer)
    assert list(windows) == [["the end"]]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (itertools.chain([b"one\ntwo\n"], itertools.repeat(b"x" * 60_000)),
         "the pipe:3: the line has no end within 200,000 bytes; give a sentence per"),
        ([b"one\n", b"two\n\xff\nfive\n"], r"the pipe:3: not UTF-8 \(byte 0xff at 1\); convert it"),
    ],
    ids=["a line without an end", "not UTF-8"],
)  # fmt: skip
def test_what_cannot_be_read_ends_a_pipe_after_what_came_before_it(monkeypatch, chunks, message):
    monkeypatch.setattr(formats, "LONGEST_LINE", 200_000)
    found = []
    with pytest.raises(CorpusError, match=message):
        found.extend(itertools.chain.from_iterable(_windows(chunks)))
    assert found == ["one", "two"]


TEXTS = st.text(st.sampled_from("a ü\n\r\ufeff。\U0001f600\u2028\x85\x0b"), max_size=40).map(str.encode)


@settings(max_examples=60)
@given(TEXTS, st.lists(st.integers(0, 200), max_size=6))
def test_chunks_of_any_size_make_the_lines_that_a_file_has(text, cuts):
    assume(text.partition(b"\n")[0].count(b"\r") < 3)  # CR as the end of lines is refused
    ends = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    chunks = [text[start:end] for start, end in itertools.pairwise(ends)]
    expected = list(decode_lines(io.BytesIO(text), "a file"))
    assert [line for window in _windows(chunks) for line in window] == expected


# ---- Translations ----
@pytest.fixture
def run(vanilla_transformer, tiny_checkpoint, monkeypatch, tmp_path):
    """Runs `translate` in a folder of its own, with bytes or a file as standard input."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, stdin=b""):
        file = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(file))
        return vanilla_transformer("translate", "--model", tiny_checkpoint, "--max-new-tokens", 3, *arguments)

    return run


@pytest.fixture
def before_each_window(monkeypatch):
    """Has a function called with each window before it is translated."""

    def call(function):
        translate = decoding.translate

        def translate_after_it(call, window, *rest):
            function(window)
            return translate(call, window, *rest)

        monkeypatch.setattr(decoding, "translate", translate_after_it)

    return call


SENTENCES = ["twenty-one", "half past nine on the fourth of May", "", "  ", "it", "drei Euro und fünf Cent"]
TEXT = "".join(f"{sentence}\n" for sentence in SENTENCES)


@pytest.mark.parametrize("options", [["--batch-size", 2], ["--greedy"], ["--num-beams", 1], ["--beam", 1]])
def test_arguments_are_translated_as_the_model_does_in_their_order(run, tiny_checkpoint, options):
    model, tokenizer = load(tiny_checkpoint)
    search = {"max_new_tokens": 3} if "--batch-size" in options else {"max_new_tokens": 3, "num_beams": 1}
    expected = []
    for sentence in SENTENCES:
        with torch.no_grad():
            output = model.generate(**tokenizer([sentence], return_tensors="pt"), **search)
        text = tokenizer.batch_decode(output, skip_special_tokens=True)[0]
        expected.append(text.replace("\n", " ").replace("\r", " ") if sentence.strip() else "")
    code, out, err = run(*options, "--device", "cpu", "--", *SENTENCES)
    assert (code, out.split("\n"), err) == (0, [*expected, ""], "")


def test_json_has_an_object_for_each_line(run):
    expected = run("--", *SENTENCES).out.split("\n")[:-1]
    found = [json.loads(line) for line in run("--json", "--", *SENTENCES).out.split("\n")[:-1]]
    assert [(one["source"], one["translation"]) for one in found] == list(zip(SENTENCES, expected, strict=True))
    assert all(one["score"] <= 0 and one["tokens"] <= 3 for one in found)
    assert json.loads(run("--json", "--num-beams", 1, "it").out).keys() == {"source", "translation", "tokens"}


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(run, monkeypatch):
    monkeypatch.setattr(output, "SECONDS_PER_LINE", 0)
    err = run("--batch-size", 2, "--", *SENTENCES).err
    assert err.splitlines()[-1] == "6 of 6 sentences after 0 min"


@pytest.mark.parametrize("stdin", [b"", b"\n", b"\n\n"])
def test_input_without_a_sentence(run, stdin):
    assert run(stdin=stdin) == (0, stdin.decode(), "")


def test_underscores_in_names_of_options(run):
    sentences = ["A_b.", "--half_past nine", "--max_new_tokens is 2", "-- a_b"]  # no options, as they have spaces
    expected = run("--batch-size", 2, stdin="\n".join([*sentences, "--max_new_tokens"]).encode()).out
    found = [run("--batch_size=2", sentence).out for sentence in sentences]
    assert "".join([*found, run("--batch_size=2", "--", "--max_new_tokens").out]) == expected
    assert run("--batch_size=2", "--output=a_b", "A_b.") == (0, "wrote a_b\n", "")
    assert Path("a_b").read_text("utf-8") == expected.splitlines(keepends=True)[0]


@pytest.mark.parametrize("name", ["text.gz", "windows", "pipe", "standard input"])
def test_input_gives_what_the_arguments_give(run, name):
    expected = run("--", *SENTENCES).out
    windows = ("\ufeff" + TEXT.removesuffix("\n").replace("\n", "\r\n")).encode()  # no line end at the end
    if name == "pipe":
        os.mkfifo(name)
        threading.Thread(target=Path(name).write_bytes, args=[TEXT.encode()], daemon=True).start()
    elif name != "standard input":
        Path(name).write_bytes(gzip.compress(TEXT.encode()) if name == "text.gz" else windows)
    result = run(stdin=windows) if name == "standard input" else run("--input", name)
    assert (result.code, result.out, result.err) == (0, expected, "")
    assert expected.count("\n") == len(SENTENCES)


def test_a_file_is_translated_in_windows_of_lines_or_of_characters(run, before_each_window, monkeypatch):
    expected = run("--", *SENTENCES).out
    windows = []
    before_each_window(lambda window: windows.append(len(window)))
    monkeypatch.setattr(lines, "LINES_PER_WINDOW", 2)
    assert run(stdin=TEXT.encode()).out == expected
    monkeypatch.setattr(lines, "CHARACTERS_PER_WINDOW", 10)
    assert run("--", *SENTENCES).out == expected
    assert windows == [2, 2, 2, 1, 1, 2, 2]


@pytest.mark.parametrize("kind", ["input", "standard input", "gz"])
def test_a_file_is_checked_to_its_end_before_any_work(run, monkeypatch, kind):
    monkeypatch.setattr(translate, "load_translator", lambda *_: pytest.fail("a model is loaded"))
    monkeypatch.setattr(lines, "LINES_PER_WINDOW", 2)
    bad = b"nine\n" * 9 + "schön".encode("latin1")
    Path("bad").write_bytes(bad)
    Path("bad.gz").write_bytes(gzip.compress(bad))
    Path("old").write_text("precious")
    options = {"input": ["--input", "bad"], "gz": ["--input", "bad.gz"]}.get(kind, [])
    for more in ([], ["--output", "new"], ["--output", "old", "--overwrite"]):
        with open("bad", "rb") as file:
            result = run(*options, *more, stdin=file)
        assert (result.code, result.out) == (2, "")
        assert ":10: not UTF-8 (byte 0xf6 at 4); convert it to UTF-8, with iconv" in result.error
    assert sorted(path.name for path in Path().iterdir()) == ["bad", "bad.gz", "old"]
    assert Path("old").read_text() == "precious"


def test_output_appears_when_it_is_complete_and_is_written_window_by_window(run, before_each_window, monkeypatch):
    expected = run("--", *SENTENCES).out
    seen = []

    def look(window):
        seen.append([path.read_text(encoding="utf-8") for path in Path().glob(".new.*.partial")])
        assert not Path("new").exists()

    before_each_window(look)
    monkeypatch.setattr(lines, "LINES_PER_WINDOW", 2)
    result = run("--output", "new", "--", *SENTENCES)
    assert (result.code, result.out, result.err) == (0, "wrote new\n", "")
    rows = [f"{row}\n" for row in expected.split("\n")[:-1]]
    assert seen == [[""], ["".join(rows[:2])], ["".join(rows[:4])]]
    assert sorted(path.name for path in Path().iterdir()) == ["new"]
    assert Path("new").read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("bad")])
def test_a_run_that_fails_leaves_the_old_output(run, before_each_window, monkeypatch, failure):
    def fail(window):
        if window == SENTENCES[2:4]:
            raise failure

    before_each_window(fail)
    monkeypatch.setattr(lines, "LINES_PER_WINDOW", 2)
    Path("old").write_text("precious")
    result = run("--output", "old", "--overwrite", "--", *SENTENCES)
    assert result.code == {OSError: 1, KeyboardInterrupt: 130, ValueError: 2}[type(failure)]
    assert [path.name for path in Path().iterdir()] == ["old"]
    assert Path("old").read_text() == "precious"


# ---- A process of its own ----
# Runs the command, and says on standard error what is imported at its end.
CONSOLE_SCRIPT = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from hf_vanilla_transformer.cli import main
sys.exit(main())
"""


@pytest.mark.slow
def test_a_slow_pipe_is_answered_line_by_line_by_little_beyond_the_model(tiny_checkpoint):
    command = [sys.executable, "-c", CONSOLE_SCRIPT, "translate", "--greedy", "--max-new-tokens", "2"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([*command, "--model", tiny_checkpoint], cwd=ROOT, env=ENVIRONMENT, **pipes) as process:
        answers = []
        for sentence in (b"twenty-one\n", b"half past nine\n", b"\n"):
            process.stdin.write(sentence)
            process.stdin.flush()
            answers.append(process.stdout.readline())  # hangs if the answer waits for more
        process.stdin.write(b"twenty-one\nhalf past nine")
        rest, errors = process.communicate(timeout=PATIENCE)
    assert (rest, answers[2], process.returncode) == (answers[0] + answers[1], b"\n", 0)
    (modules,) = errors.decode().splitlines()
    assert "hf_vanilla_transformer.engine.decoding.search" in modules.split()
    assert sorted(NEEDED_BY_NONE.intersection(modules.split())) == []
