"""Random options, files and configurations: success, or one line that says what is wrong; never a traceback."""

import json
import shutil
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

FEW = hypothesis.settings(max_examples=25, suppress_health_check=list(HealthCheck))
MANY = hypothesis.settings(max_examples=600, suppress_health_check=list(HealthCheck))
LONG = [pytest.mark.hard, pytest.mark.timeout(3000)]

ODD_TEXTS = ["", " ", "-1", "0", "1", "2", "3", "1.5", "1e3", "1e999", "nan", "inf", "true", "None", "x", "٣", "--",
             "a\0b", "9" * 30, "/dev/null", "/nowhere/x", ".", "..", "~", "a b", "[]", "{}", "\udcff",
             "ü" * 50]  # fmt: skip
ODD_VALUES = [None, True, False, -1, 0, 1, 2, 7, 10**6, 10**9, 10**30, 1.5, -0.5, 1e308, "", "x", "1", [], [1], [None],
              {}, {"a": 1}, "x" * 1000, [[1, 2]], "float32", "post"]  # fmt: skip
OPTIONS = {
    "translate": [
        "--num-beams", "--greedy", "--length-penalty", "--early-stopping", "--coverage-penalty", "--max-new-tokens",
        "--batch-tokens", "--batch-size", "--device", "--dtype", "--input", "--output", "--overwrite", "--threads",
        "--max-source-tokens", "--debug", "--help", "--verbose", "--model",
    ],
    "evaluate": [
        "--num-beams", "--greedy", "--length-penalty", "--early-stopping", "--max-new-tokens", "--batch-size",
        "--dtype", "--bleu", "--tokenize", "--lowercase", "--json", "--output",
        "--overwrite", "--ensemble", "--source", "--reference", "--threads",
    ],
    "average": ["--checkpoints", "--last", "--output", "--overwrite", "--nonsense"],
}  # fmt: skip


def assert_plain(result, arguments) -> None:
    """Success, or one line of error."""
    said = f"{arguments}\n{result.out}\n{result.err}"
    assert result.code in (0, 1, 2), said
    if "--debug" not in arguments:
        assert "Traceback" not in result.err, said
        errors = [line for line in result.err.splitlines() if line.startswith("vanilla-transformer: error: ")]
        assert len(errors) == (result.code != 0), said


def check_options(command, checkpoint, folder, name, options) -> None:
    (folder / "lines").write_text("nine 3\nhalf past nine 2\n")
    arguments = {
        "translate": ["translate", "--model", checkpoint],
        "evaluate": ["evaluate", "--model", checkpoint, "--source", folder / "lines", "--reference", folder / "lines"],
        "average": ["average"],
    }[name]
    options = [part for option, value in options for part in (option, *value)]
    # Not words that could be names of files: the fuzzer would write them into the current folder.
    arguments = [*arguments, *options, *(["--", "nine 3"] if name == "translate" and "--input" not in options else [])]
    assert_plain(command(*arguments), arguments)


def options_of(name):
    value = st.lists(
        st.sampled_from([text for text in ODD_TEXTS if text not in ("x", "1", "2", "3", "a b")]), max_size=2
    )
    return st.lists(st.tuples(st.sampled_from(OPTIONS[name]), value), max_size=4)


def change_json(file: Path, changes) -> None:
    content = json.loads(file.read_text())
    for place, value in changes:
        keys = sorted(content)
        content[keys[place % len(keys)]] = value
    file.write_text(json.dumps(content))


def change_bytes(file: Path, changes, end: int | None) -> None:
    content = bytearray(file.read_bytes())
    for place, value in changes:
        if content:
            content[place % min(len(content), 4000)] = value  # in safetensors, most of that is its header
    file.write_bytes(bytes(content[: None if end is None else end % (len(content) + 1)]))


JSON_FILES = ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
FILES = [*JSON_FILES, "model.safetensors"]
json_changes = st.lists(st.tuples(st.integers(0, 200), st.sampled_from(ODD_VALUES)), min_size=1, max_size=2)
byte_changes = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4)


def check_files(command, checkpoint, folder, file, change) -> None:
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(checkpoint, copy)
    change(copy / file)
    (folder / "lines").write_text("nine 3\n")
    lines = folder / "lines"
    shutil.rmtree(folder / "mean", ignore_errors=True)
    for arguments in (
        ["translate", "--model", copy, "--max-new-tokens", "5", "nine 3"],
        ["evaluate", "--model", copy, "--source", lines, "--reference", lines, "--max-new-tokens", "5"],
        ["average", "--checkpoints", checkpoint, copy, "--output", folder / "mean"],
    ):
        assert_plain(command(*arguments), arguments)


@pytest.fixture
def model(trained_once):
    return trained_once / "run" / "averaged-2"


@pytest.mark.parametrize("settings", [FEW, pytest.param(MANY, marks=LONG)], ids=["few", "many"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(command, model, tmp_path, monkeypatch, name, settings):
    monkeypatch.chdir(tmp_path)

    @settings
    @given(options_of(name))
    def check(options):
        check_options(command, model, tmp_path, name, options)

    check()


@pytest.mark.hard
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("file", JSON_FILES)
def test_values_in_a_file(command, model, tmp_path, file):
    @hypothesis.settings(MANY, max_examples=300)
    @given(json_changes)
    def check(changes):
        check_files(command, model, tmp_path, file, lambda path: change_json(path, changes))

    check()


@pytest.mark.hard
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("file", FILES)
def test_bytes_in_a_file(command, model, tmp_path, file):
    @hypothesis.settings(MANY, max_examples=200)
    @given(byte_changes, st.none() | st.integers(0, 10**6))
    def check(changes, end):
        check_files(command, model, tmp_path, file, lambda path: change_bytes(path, changes, end))

    check()
