"""Many files: what each format becomes, what is recorded, and what a second start does."""

import bz2
import gzip
import json
import lzma
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_vanilla_transformer.data.formats import CorpusError
from hf_vanilla_transformer.documents.files import ERRORS, FileJob, file_jobs, translate_files


def capitals(texts: list[str]) -> list[str]:
    assert [text for text in texts if text != text.strip("\ufeff \t\r\n") or "\n" in text] == []
    if "two" in texts:
        raise ValueError("two is refused")
    return [text.upper() for text in texts]


def translated(job: FileJob, call: Callable[[list[str]], list[str]] = capitals) -> int:
    """Writes a file of rows; returns the number of bytes that were read."""
    places = []
    translator = MagicMock(side_effect=call, model=None, languages={"src_lang": None, "tgt_lang": None})
    ((_, problem),) = translate_files([job], translator, {}, places.append)
    if problem:
        raise CorpusError(problem)
    return sum(places)


def errors_of(job: FileJob) -> list[tuple[int, str]]:
    lines = job.output.with_name(job.output.name + ERRORS).read_text(encoding="utf-8").splitlines()
    return [(error["row"], error["error"]) for error in map(json.loads, lines)]


@pytest.fixture
def job(tmp_path: Path) -> Callable[[str], FileJob]:
    """A file of each name that a test writes."""
    return lambda name: FileJob(tmp_path / name, tmp_path / "out" / name)


def test_text(job) -> None:
    one = job("a.txt")
    one.source.write_bytes(b"\xef\xbb\xbf one \r\ntwo\n \nbad \xff\n\xef\xbb\xbf\tlast")
    assert translated(one) == one.source.stat().st_size
    assert one.output.read_bytes() == b"\xef\xbb\xbf ONE \r\n\n \n\n\xef\xbb\xbf\tLAST"
    assert errors_of(one) == [(2, "two is refused"), (4, "not UTF-8 (byte 0xff at 5)")]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_text(job, compress: Callable[[bytes], bytes]) -> None:
    """A file's first bytes say how it is read; its name says how the output is written, the same bytes each time."""
    plain, packed, again = job("a.txt"), job("a.gz"), job("b.gz")
    for each in (plain, packed, again):
        each.source.write_bytes(compress(b"one\nthree\n"))
        translated(each)
    assert plain.output.read_bytes() == gzip.decompress(packed.output.read_bytes()) == b"ONE\nTHREE\n"
    assert packed.output.read_bytes() == again.output.read_bytes()


def test_tables_get_a_column(job) -> None:
    tsv, table = job("a.TSV"), job("a.parquet")
    tsv.source.write_bytes(b"\xef\xbb\xbfid\ttext\r\n1\tone\r\n2\r\n\xff\tone\n")
    times = pa.array([1, 86_399_000_000_001], pa.time64("ns"))  # beyond Python's microseconds
    pq.write_table(pa.table({"n": times, "text": ["one", None]}), table.source)
    for each in (tsv, table):
        translated(each)
    expected = b"\xef\xbb\xbfid\ttext\ttranslation\r\n1\tone\tONE\r\n2\t\r\n\xff\tone\t\n"
    assert tsv.output.read_bytes() == expected
    assert errors_of(tsv) == [(3, "1 columns, not 2"), (4, "not UTF-8 (byte 0xff at 1)")]
    written = {"n": times, "text": ["one", None], "translation": ["ONE", ""]}
    assert pq.read_table(table.output).equals(pa.table(written))
    assert errors_of(table) == [(2, "'text' is no text")]


def test_rows_of_json_keep_all_that_they_have(job) -> None:
    one = job("a.jsonl")
    rows = [
        ('{"text": "one", "n": "\\ud83d", "x": 1.0e5, "x": 12345678901234567890}', "ONE"),
        ('{ "n": NaN, "text":"a\\n\\n b" }', "A\\n\\n B"),
        ('{"text": "one\\ntwo", "n": 1}', ""),
        ('{"n": 1, "text": 5}', None),
        ('{"text": "one", "translation": "uno"}', None),
        ("{bad", None),
        ("", None),
        ('["text"]', None),
    ]
    one.source.write_text("".join(f"{row}\r\n" for row, _ in rows), newline="")
    translated(one)
    expected = [row if new is None else f'{row[:-1].rstrip()}, "translation": "{new}"}}' for row, new in rows]
    assert one.output.read_bytes().decode().split("\r\n")[:-1] == expected
    assert [row for row, _ in errors_of(one)] == [3, 4, 5, 6, 8]  # a blank line is no row


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.gz", gzip.compress(b"one\n" * 9_999, mtime=0)[:-9], "can't be read"),
        ("c.parquet", b"PAR1", "can't be read"),
        ("e.tsv", b"text\ttranslation\n", "has a column 'translation' already"),
        ("j.html", b"<p>\xff", r"j\.html: not UTF-8 \(byte 0xff at 4\); convert it"),
        ("d.tsv", b"source\ttarget\n", "has no column 'text'; there are 'source', 'target'"),
        ("h.tsv", b"text\ttext\n", "has several columns 'text'"),
        ("i.txt", "one\n".encode("utf-16"), "the file is UTF-16, not UTF-8"),
    ],
)
def test_a_damaged_file_leaves_no_output(job, name: str, content: bytes, problem: str) -> None:
    one = job(name)
    one.source.write_bytes(content)
    with pytest.raises(CorpusError, match=problem):
        translated(one)
    assert list(one.output.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["f.csv", "g.txt.xz", "README.md", "a.XLIFF.gz", "a.ipynb", "a.sub"])
def test_other_formats_are_refused_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"text\none\n")
    with pytest.raises(CorpusError, match="--format text"):
        file_jobs([tmp_path], tmp_path / "out")


def test_an_output_that_is_a_link(job, tmp_path: Path) -> None:
    one, real = job("a.txt"), tmp_path / "real.txt"
    one.source.write_text("one\n")
    one.output.parent.mkdir()
    one.output.symlink_to(real)
    for old in (None, "old"):
        if old:
            real.write_text(old)
        translated(one)
        assert (one.output.is_symlink(), real.read_text(), one.problem()) == (True, "ONE\n", None)


def test_a_file_that_changes_while_it_is_read_has_no_output(job) -> None:
    one = job("a.txt")
    one.source.write_text("one\n" * 2_500)

    def truncating(texts: list[str]) -> list[str]:
        os.truncate(one.source, 4_116)
        return texts

    with pytest.raises(CorpusError, match="has changed while it was read; start again"):
        translated(one, truncating)
    assert list(one.output.parent.iterdir()) == []


def test_files_of_folders_in_shards(tmp_path: Path) -> None:
    for name in ("b", "a", "sub/c", ".hidden", ".git/d", f"b{ERRORS}"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text("one\n")
    names = [str(one.output.relative_to(tmp_path / "out")) for one in file_jobs([tmp_path / "in"], tmp_path / "out")]
    assert names == ["a", "b", "sub/c"]
    shards = [file_jobs([tmp_path / "in"], tmp_path / "out", (index, 2)) for index in (1, 2)]
    assert [[one.source.name for one in shard] for shard in shards] == [["a", "c"], ["b"]]
    with pytest.raises(CorpusError, match="have the same name"):
        file_jobs([tmp_path / "in", tmp_path / "in" / "a"], tmp_path / "out")
    for given in (tmp_path / "in", tmp_path / "in" / "a"):
        with pytest.raises(CorpusError, match="is the input and the output"):
            file_jobs([given], tmp_path / "in")
    hidden = file_jobs([tmp_path / "in" / ".hidden"], tmp_path / "out")  # it is asked for
    assert [one.output for one in hidden] == [tmp_path / "out" / ".hidden"]
    assert [one.output for one in file_jobs([tmp_path / "in" / "sub"], tmp_path / "in")] == [tmp_path / "in" / "c"]
    assert [one.source.name for one in file_jobs([tmp_path / "in"], tmp_path / "in" / "sub")] == ["a", "b"]


@pytest.fixture
def translate(tiny_checkpoint: Path, vanilla_transformer) -> Callable[..., tuple[int, str]]:
    """Runs the command on an input; returns the exit code and what it said."""
    command = ["translate", "--model", tiny_checkpoint, "--max-new-tokens", 5, "--num-beams", 1, "--input"]
    return lambda *arguments: vanilla_transformer(*command, *arguments)[::2]


def test_the_command_skips_complete_files(tmp_path: Path, translate) -> None:
    given, out = tmp_path / "in", tmp_path / "out"
    given.mkdir()
    for number in range(3):
        (given / f"{number}.txt").write_text("half past nine\n\nhalf past nine\n")
    assert translate(given, "--output", out, "--shard", "2/3")[0] == 0
    code, error = translate(given, "--output", out)
    assert (code, "1 of 3 files are translated already" in error) == (0, True)
    assert error.endswith("2 files are translated now, 1 were before\n")
    assert (out / "0.txt").read_text().count("\n") == 3

    (given / "3.gz").write_bytes(gzip.compress(b"nine\n")[:-9])
    (given / "4.txt").write_bytes(b"half past nine\n\xff\n")
    code, error = translate(given, "--output", out)
    assert (code, "3.gz: can't be read" in error) == (1, True)
    assert "4.txt: 1 lines aren't translated, see" in error
    assert "2 of 5 files have problems, see above; the others are translated" in error
    (given / "3.gz").unlink()
    code, error = translate(given, "--output", out)
    assert (code, "4 of 4 files are translated already" in error) == (1, True)
    assert "4.txt: 1 lines aren't translated, see" in error
    assert (out / "4.txt").read_text().endswith("\n\n")
    code, error = translate(given, "--output", tmp_path / "new", "--tgt-lang", "deu")
    assert (code, "tgt_lang is 'deu'" in error, (tmp_path / "new").exists()) == (2, True, False)  # one error


def test_names_of_outputs(tmp_path: Path, translate) -> None:
    table, page = tmp_path / "3.tsv", tmp_path / "a.html"
    table.write_text("id\ttext\n1\tnine\n")
    code, error = translate(table, "--output", tmp_path / "out.jsonl")
    assert (code, "give a folder, or for a single table or document a file whose name ends" in error) == (2, True)
    for place in ("tables", "out.tsv"):
        assert translate(table, "--output", tmp_path / place)[0] == 0
    assert (tmp_path / "out.tsv").read_text().startswith("id\ttext\ttranslation\n1\tnine\t")
    assert (tmp_path / "tables" / "3.tsv").read_bytes() == (tmp_path / "out.tsv").read_bytes()

    page.write_text("<ul>\n<li id=a>half <b>past</b> {nine}\n</ul>")
    assert translate(page, "--output", tmp_path / "b.html")[0] == 0
    kept = re.compile(r"<[^<>]*>|\{.*?\}")
    before, after = page.read_text(), (tmp_path / "b.html").read_text()
    assert kept.sub("", before) != kept.sub("", after)
    assert sorted(kept.findall(before)) == sorted(kept.findall(after))

    (tmp_path / "a.md").write_text("nine\n\n* ten\n")
    assert translate(tmp_path / "a.md", "--output", tmp_path / "b.md")[0] == 2
    assert translate(tmp_path / "a.md", "--output", tmp_path / "b.md", "--format", "text")[0] == 0
    assert (tmp_path / "b.md").read_text().count("\n") == 3


def test_outputs_of_another_origin_are_refused(tiny_checkpoint: Path, tmp_path: Path, vanilla_transformer) -> None:
    model, given, out = tmp_path / "model", tmp_path / "a.tsv", tmp_path / "out"
    shutil.copytree(tiny_checkpoint, model)
    given.write_text("id\ttext\n1\tnine\n")
    command = ["translate", "--model", model, "--max-new-tokens", 5, "--input", given, "--output", out, "--num-beams"]
    assert vanilla_transformer(*command, 1)[0] == 0
    first = (out / "a.tsv").read_bytes()
    os.utime(model / "config.json")  # a copy of the model is the same model
    (model / "README.md").touch()
    assert vanilla_transformer(*command, 1)[::2] == (
        0, "1 of 1 files are translated already\n0 files are translated now, 1 were before\n"
    )  # fmt: skip
    with (model / "generation_config.json").open("a") as file:
        file.write(" ")
    given.write_text("id\ttext\n1\thalf past nine\n")
    code, _, error = vanilla_transformer(*command, 2)
    assert (code, (out / "a.tsv").read_bytes()) == (2, first)
    assert f"{out / 'a.tsv'} was made with another input, num_beams (1, not 2), model; give --overwrite" in error
    (out / ".a.tsv.json").unlink()
    code, _, error = vanilla_transformer(*command, 2)
    assert (code, "a.tsv has no record of what it was made from; it is older, or your own; give" in error) == (2, True)
    assert vanilla_transformer(*command, 2, "--overwrite")[0] == 0
    assert (out / "a.tsv").read_bytes() != first
    assert vanilla_transformer(*command, 2)[0] == 0
