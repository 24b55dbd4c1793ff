"""Corpora of every form give the same pairs, what is wrong with one is said with file and line, nothing is lost."""

import bz2
import copy
import csv
import gzip
import io
import json
import lzma
import os
from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast

from hf_vanilla_transformer import VanillaTransformerTokenizerFast
from hf_vanilla_transformer.data import corpora as data
from hf_vanilla_transformer.data.corpora import Cleaning, Corpus, CorpusError, read_corpus, tokenize
from hf_vanilla_transformer.data.formats import read_lines
from hf_vanilla_transformer.tokenization_dictionary import DictionaryTokenizer

PAIRS = [
    ('A cat, a "dog".', "Eine Katze, ein „Hund“."),
    ("", "leer"),
    (" two  spaces ", "zwei\u00a0Leerzeichen"),
    # None of these ends a line, although str.splitlines() would say so.
    ("a\u2028b\u2029c\x0bd\x0ce\x85f\x1cg", "a\rb"),
    ("漢字 👩‍👩‍👧", "'einfach'"),
]
SOURCES, TARGETS = zip(*PAIRS, strict=True)


def packed(content):
    return gzip.compress(content, mtime=0)  # the same bytes at any time, as tests are named by them


@pytest.fixture(params=[False, True], ids=["cached", "streaming"])
def streaming(request):
    return request.param


@pytest.fixture
def write(tmp_path):
    """Writes text, bytes or a table into a file and returns its name."""

    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, pyarrow.Table):
            pyarrow.parquet.write_table(content, path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def pairs_of(corpus, streaming=False):
    return [(pair["source"], pair["target"]) for pair in read_corpus(corpus, streaming)]


def lines(texts):
    return "".join(f"{text}\n" for text in texts)


def as_csv(rows):
    file = io.StringIO()
    csv.writer(file).writerows(rows)
    return file.getvalue()


def as_json(pairs, source="source", target="target"):
    return lines(json.dumps({source: s, "n": n, target: t}) for n, (s, t) in enumerate(pairs))


def as_translations(pairs):
    return lines(json.dumps({"id": 1, "translation": {"en": s, "de": t}}, ensure_ascii=False) for s, t in pairs)


# What is read


TABLES = {
    "plain.tsv": lines("\t".join(pair) for pair in PAIRS),
    "header.tsv": lines(["n\ttarget\tsource", *(f"1\t{t}\t{s}" for s, t in PAIRS)]),
    "table.csv": as_csv([("n", "target", "source"), *((1, t, s) for s, t in PAIRS)]),
    "table.jsonl": as_json(PAIRS),
    "blank_lines.json": as_json(PAIRS).replace("\n", "\n\n  \n"),
    "table.parquet": pyarrow.table({"n": range(len(PAIRS)), "target": TARGETS, "source": SOURCES}),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables(write, streaming, name):
    """As Windows writes them and compressed too, one kind for each."""
    table = write(name, TABLES[name])
    assert pairs_of(Corpus(tables=(table,)), streaming) == PAIRS
    if not name.endswith(".parquet"):
        suffix, compress = list(COMPRESSIONS.items())[list(TABLES).index(name) % len(COMPRESSIONS)]
        windows = b"\xef\xbb\xbf" + TABLES[name].replace("\r\n", "\n").replace("\n", "\r\n").encode()
        for file, content in ((f"windows_{name}", windows), (f"{name}{suffix}", compress(windows))):
            assert pairs_of(Corpus(tables=(write(file, content),)), streaming) == PAIRS


@pytest.mark.parametrize("name", ["long.csv", "long.tsv", "long.jsonl"])
def test_a_row_that_is_far_too_long_is_read_in_every_table(write, name):
    """It is left out later, as too long."""
    pairs = [("a" * 200_000, "b"), ("c", "d")]
    contents = {"long.csv": as_csv([("source", "target"), *pairs]), "long.tsv": lines(map("\t".join, pairs))}
    assert pairs_of(Corpus(tables=(write(name, contents.get(name, as_json(pairs))),))) == pairs


TRANSLATIONS = {
    "a.jsonl": as_translations(PAIRS),
    "a.parquet": pyarrow.table({"translation": [{"en": s, "de": t} for s, t in PAIRS]}),
    "a.tsv": lines(["en\tde", *("\t".join(pair) for pair in PAIRS)]),
    "a.csv": as_csv([("en", "de"), *PAIRS]),
}


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_columns_are_named_by_language_in_either_direction(write, name):
    table = write(name, TRANSLATIONS[name])
    assert pairs_of(Corpus(tables=(table,), source_column="en", target_column="de"), streaming=True) == PAIRS
    swapped = Corpus(tables=(table,), source_column="de", target_column="en")
    assert pairs_of(swapped, streaming=True) == [(target, source) for source, target in PAIRS]


def zstd(content):
    buffer = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(content)
    return buffer.getvalue().to_pybytes()


COMPRESSIONS = {".gz": packed, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", ["", ".txt", ".csv", *COMPRESSIONS])
@pytest.mark.parametrize("named", [True, False])  # a file's first bytes say how it is read, whatever its name
def test_text(write, suffix, named):
    source, target = (COMPRESSIONS.get(suffix, bytes)(lines(texts).encode()) for texts in (SOURCES, TARGETS))
    suffix = suffix if named else ".gz"
    if suffix == ".zst":
        source = b"\x50\x2a\x4d\x18\x04\0\0\0size" + source  # a frame without text, such as pzstd writes
    corpus = Corpus((write(f"s{suffix}", source),), (write(f"t{suffix}", target),))
    assert pairs_of(corpus, streaming=True) == PAIRS


@pytest.mark.parametrize("end", [b"\n", b""])
def test_windows_text(write, end):
    source = write("s", b"\xef\xbb\xbfa \r\n\xef\xbb\xbfb\r\n\r\nc\rd\r" + end)
    target = write("t", "1\n2\n\n3\n")
    # The mark of byte order goes from the beginning of the file, nothing else goes; a lone \r ends no line.
    last = "c\rd" if end else "c\rd\r"
    assert pairs_of(Corpus((source,), (target,))) == [("a ", "1"), ("\ufeffb", "2"), ("", ""), (last, "3")]


def test_cells_of_csv_hold_quotes_commas_and_lines(write, streaming):
    content = 'source,target\n"a\n\nb, ""c""","d\r\ne"\n\n"",f\n'
    pairs = [('a\n\nb, "c"', "d\ne"), ("", "f")]
    assert pairs_of(Corpus(tables=(write("a.csv", content),)), streaming) == pairs


def test_trailing_empty_lines_are_pairs_in_text_and_nothing_in_tables(write):
    source, target = write("s", "a\n\n\n"), write("t", "b\n\n\n")
    rows = {"a.tsv": "a\tb\n", "a.csv": "source,target\na,b\n", "a.jsonl": as_json([("a", "b")])}
    corpus = Corpus((source,), (target,), tuple(write(name, f"{text}\n\n") for name, text in rows.items()))
    assert pairs_of(corpus) == [("a", "b"), ("", ""), ("", ""), *[("a", "b")] * 3]


@pytest.fixture
def on_hub(write, tmp_path):
    """A folder laid out as a data set on the Hub is, with two configurations."""
    splits = {"train": "a.jsonl", "dev": "b.jsonl"}
    files = [{"split": split, "path": path} for split, path in splits.items()]
    configurations = {"en-de": files, "flat": "c.jsonl"}
    card = {"configs": [{"config_name": name, "data_files": files} for name, files in configurations.items()]}
    write("hub/README.md", f"---\n{json.dumps(card)}\n---\n")
    write("hub/a.jsonl", as_translations([("v", "w"), ("", "x")]))
    write("hub/b.jsonl", as_translations([("x", "y")]))
    write("hub/c.jsonl", as_json([("h", "i")]))
    return str(tmp_path / "hub")


def test_a_data_set_of_the_hub(on_hub, streaming):
    columns = {"source_column": "en", "target_column": "de", "configuration": "en-de"}
    assert pairs_of(Corpus(tables=(on_hub,), **columns), streaming) == [("v", "w"), ("", "x")]
    assert pairs_of(Corpus(tables=(on_hub,), **columns, split="dev"), streaming) == [("x", "y")]
    assert pairs_of(Corpus(tables=(on_hub,), configuration="flat"), streaming) == [("h", "i")]


def test_sources_of_all_kinds_come_in_their_order(write, on_hub, streaming):
    corpus = Corpus(
        source=(write("s1", "s1\ns2\n"), write("s2.gz", packed(b"s3\n"))),
        target=(write("t1", "t1\nt2\n"), write("t2", "t3\n")),
        tables=(
            write("a.parquet", pyarrow.table({"source": ["p"], "target": ["q"]})),
            on_hub,
            write("a.tsv", "a\tb\n"),
            write("a.jsonl", as_json([("j", "k")])),
        ),
        configuration="flat",
    )
    pairs = [("s1", "t1"), ("s2", "t2"), ("s3", "t3"), ("p", "q"), ("h", "i"), ("a", "b"), ("j", "k")]
    assert pairs_of(corpus, streaming) == pairs
    assert isinstance(read_corpus(corpus, streaming), IterableDataset if streaming else Dataset)


def test_files_are_checked_before_any_is_read(write, tmp_path):
    (tmp_path / "folder.tsv").mkdir()
    write("empty.tsv", "")
    for name, problem in (("none", "no such file"), ("folder", "is a folder"), ("empty", "the file is empty; is it")):
        for kind in ("source", "target", "tables"):
            files = {"source": (write("s", "a\n"),), "target": (write("t", "b\n"),)}
            with pytest.raises(CorpusError, match=rf"/{name}\.tsv: {problem}"):
                Corpus(**{**files, kind: (str(tmp_path / f"{name}.tsv"),)})
    with pytest.raises(CorpusError, match="2 source files but 1 target files; give each its translation"):
        Corpus((write("a", "a\n"), write("b", "a\n")), (write("c", "a\n"),))
    with pytest.raises(CorpusError, match=r"a\.tmx: XML; give a table \(\.tsv, "):  # a table is known by its name
        Corpus(tables=(write("a.tmx", "<tmx>"),))
    with pytest.raises(CorpusError, match=r"a\.txt: no table by its name; give a table"):
        Corpus(tables=(write("a.txt", "a\tb\n"),))
    assert not Corpus()
    with pytest.raises(CorpusError, match="no corpus is given; name files"):
        read_corpus(Corpus())


# The cache


def test_a_file_is_read_anew_if_it_has_changed(write, monkeypatch):
    def read(content, time):
        table = write("a.tsv", content)
        os.utime(table, ns=(time, time))
        return pairs_of(Corpus(tables=(table,)))

    assert read("a\tb\n", 1_000) == [("a", "b")]
    assert read("c\td\n", 2_000) == [("c", "d")]  # as long as before
    assert read("c\tde\n", 2_000) == [("c", "de")]  # as old as before
    corpus = Corpus((write("s", lines(SOURCES)),), (write("t", lines(TARGETS)),))
    first = read_corpus(corpus)
    monkeypatch.setattr("hf_vanilla_transformer.data.corpora.read_text", None)
    second = read_corpus(corpus)
    assert (second.cache_files, list(second)) == (first.cache_files, list(first))


def test_the_state_of_a_corpus_changes_with_its_files(write, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "revision_of", lambda name, kind: f"{kind} {name}")

    def state(corpus, streaming=False):
        return data.state_of(corpus, read_corpus(corpus, streaming))

    corpus = Corpus(tables=(write("a.tsv", "a\tb\n"),))
    before, streamed = state(corpus), state(corpus, streaming=True)
    assert state(Corpus(tables=(write("c.tsv", "a\tb\n"),))) == before
    both = state(Corpus(tables=(*corpus.tables, *corpus.tables)))
    write("a.tsv", "a\tc\n")
    assert len({before, both, state(corpus), streamed, state(corpus, streaming=True)}) == 5
    stream = IterableDataset.from_generator(lambda: iter(()))
    hub, other = (data.state_of(Corpus(tables=(name,)), stream) for name in ("some/thing", "some/other"))
    assert hub != other


# What is wrong


def refused(corpus, message, streaming=True):
    """Reading says `message`, a regular expression, in one line."""
    with pytest.raises(CorpusError, match=message) as caught:
        pairs_of(corpus, streaming)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "target", "short"),
    [("a\nb\n", "a\n", "t"), ("a\n", "a\nb\n", "s"), ("a\nb\n\n", "a\nb\n", "t"), ("a\nb", "a\nb\n\n", "s")],
)
def test_texts_of_unequal_lengths(write, streaming, source, target, short):
    end = min(len(source.splitlines()), len(target.splitlines()))
    corpus = Corpus((write("s", source),), (write("t", target),))
    refused(corpus, rf"/{short}: ends after line {end}, but .*/{'st'.replace(short, '')} is longer; the two", streaming)


GZ = packed(np.random.default_rng(0).bytes(3000).hex().encode() + b"\n" + b"b\n" * 1000)
CORRUPT = bytearray(GZ)
CORRUPT[1500] ^= 0xFF


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("s", b"a\nsch\xf6n\n", r"/s:2: not UTF-8 \(byte 0xf6 at 4\); convert it to UTF-8, with iconv"),
        ("s", "a\nb\n".encode("utf-16"), r"/s: the file is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8"),
        ("s", "a\nb\n".encode("utf-16-le"), r"/s: the file has NUL bytes: it is binary, or UTF-16 without a mark"),
        ("s", b"a\rb\rc\r", r"/s: its lines end with CR alone; convert them: tr '"),
        ("s.tmx", b"<?xml version='1.0'?>\n<tmx>\n", r"/s.tmx: the file is XML, not a sentence per line"),
        ("s.txt", b"PK\x03\x04abc\n", r"/s.txt: the file is a zip archive; extract it"),
        ("s.xz", lzma.compress(b"a\n" * 999)[:-30], r"/s.xz:\d+: the compressed file is damaged"),
        ("s.bz2", bz2.compress(b"a\n" * 999)[:-9], r"/s.bz2:\d+: the compressed file is damaged"),
        ("s.gz", GZ[:-500], r"/s.gz:\d+: the compressed file is damaged \(.*ended before.*\); copy or download"),
        ("s.gz", bytes(CORRUPT), r"/s.gz:\d+: the compressed file is damaged"),
        ("s.gz", packed(b""), r"/s.gz: ends after line 0, but .*/t is longer"),
    ],
)
def test_texts_that_cannot_be_read(write, name, content, message):
    refused(Corpus((write(name, content),), (write("t", "1\n" * 2000),)), message)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        # Columns
        ("a.tsv", "a\tb\nc\n", r"/a.tsv:2: 1 columns separated by tabs, not 2"),
        ("a.tsv", "id\ten\tde\n1\ta\tb\n", r"/a.tsv:1: 3 columns .*, not 2; .* must name them, 'source'"),
        ("a.tsv", "source\tid\ttarget\na\t1\tb\nc\td\n", r"/a.tsv:3: 2 columns separated by tabs, not 3"),
        ("a.csv", "source,target\na,b\n\nHello, you,Hallo\n", r"/a.csv:4: 3 columns, not 2; put a text that"),
        ("a.csv", "a,b\nc,d\n", r"/a.csv:2: column 'source' is missing; the columns are 'a', 'b' \(`source_column`"),
        ("a.jsonl", '{"source": "a", "targett": "b"}\n', r"/a.jsonl:1: column 'target' is missing; .*'targett' "),
        ("a.parquet", pyarrow.table({"en": ["a"], "de": ["b"]}), r"/a.parquet:1: column 'source' is missing"),
        # Types
        ("a.jsonl", as_json([("a", "b"), ("c", 1)]), r"/a.jsonl:2: column 'target' is not text but of type int"),
        ("a.jsonl", as_json([("a", "b"), (None, "c")]), r"/a.jsonl:2: column 'source' is empty \(null\)"),
        ("a.jsonl", as_json([("a\ud83d", "b")]), r"/a.jsonl:1: column 'source' contains half of a surrogate pair"),
        ("a.parquet", pyarrow.table({"source": ["a", None], "target": ["b", "c"]}), r"/a.parquet:2: .*'source' is emp"),
        # Form
        ("a.jsonl", '{"source": "a", "target": "b"}\n\n{"source": "c"\n', r"/a.jsonl:3: not JSON \(.*\); write one"),
        ("a.jsonl", '{"source": ' + "9" * 5000 + "}\n", r"/a.jsonl:1: not JSON \(.*\); write one"),
        ("a.json", '[{"source": "a", "target": "b"}]\n', r"/a.json:1: a list; write one JSON object per line"),
        ("a.csv", 'source,target\na,b\n"c,d\ne,f\n', r"/a.csv:3: not CSV \(unexpected end of data\); is a quote not"),
        ("a.parquet", b"PAR1 and no more", r"/a.parquet: can't be read \(.*\); is it a complete Parquet file\?"),
        ("A.TSV.GZ", packed(b"a\tb\nc\t\xf6\n"), r"/A.TSV.GZ:2: not UTF-8"),
        ("a.jsonl.gz", packed(as_json(PAIRS).encode())[:-9], r"/a.jsonl.gz:\d: the compressed file is damaged"),
        # Nothing in it
        ("a.tsv", "source\ttarget\n", r"/a.tsv: contains no sentence pair"),
        ("a.parquet", pyarrow.table({"source": [], "target": []}), r"/a.parquet: contains no sentence pair"),
    ],
)
def test_tables_that_cannot_be_read(write, name, content, message):
    refused(Corpus(tables=(write(name, content),)), message)


def test_a_file_that_vanishes_or_is_locked(write, monkeypatch):
    with pytest.raises(CorpusError, match="no/file: can't be read"):
        list(read_lines("no/file"))

    def locked(*arguments):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", locked)
    with pytest.raises(CorpusError, match=r"a\.txt: can't be read \(Permission denied\)"):
        list(read_lines("a.txt"))


def test_what_is_wrong_with_a_data_set_of_the_hub(write, on_hub, streaming):
    def refuse(message, name=on_hub, **options):
        refused(Corpus(tables=(name,), **options), message, streaming)

    refuse(r"^no/where: can't be loaded \(.*\); name a data set on the Hub", name="no/where")
    refuse(r"/hub: can't be loaded \(.*'xx'.*en-de", configuration="xx")
    refuse(r"/hub: can't be loaded \(.*test.*train.*\)", configuration="en-de", split="test")
    refuse(r"/hub, row 1: column 'source' is missing; the columns are 'en', 'de' ", configuration="en-de")
    write("broken/a.parquet", b"PAR1")
    refuse(r"/broken: can't be loaded \(Parquet.*\)", name=on_hub.replace("hub", "broken"))
    write("cut/a.jsonl", '{"source": "a", "target": "b"}\n{"source": "c')
    refuse(r"/cut: can't be loaded \(JSON parse error.*\)", name=on_hub.replace("hub", "cut"))
    write("null/a.jsonl", as_json([("a", "b"), ("c", None)]))
    refuse(r"/null, row 2: column 'target' is empty \(null\)", name=on_hub.replace("hub", "null"))


@pytest.mark.parametrize("pairs", [[("2", "1"), ("a", "b")], [("1", "2"), ("3", "4")]])
def test_numbers_of_columns_are_places_whatever_the_first_row_has(write, pairs):
    table = write("a.tsv", lines("\t".join(pair) for pair in pairs))
    assert pairs_of(Corpus(tables=(table,), source_column="1", target_column="2"), streaming=True) == pairs
    swapped = Corpus(tables=(table,), source_column="2", target_column="1")
    assert pairs_of(swapped, streaming=True) == [pair[::-1] for pair in pairs]


def test_quotes_of_csv_in_a_tsv_are_told(write, caplog):
    """As pandas writes them; they stay, as a text may have quotes."""
    pairs = [('"Hi," he said, "bye"', '""a""'), ('"""Hi"" he said"', "b"), ('"""c"""', "d")]
    assert pairs_of(Corpus(tables=(write("a.tsv", lines(map("\t".join, pairs))),)), streaming=True) == pairs
    assert len(caplog.records) == 1
    assert "a.tsv:2: a cell is quoted as in CSV" in caplog.text


@pytest.mark.parametrize("first", ["English\tGerman\n", ""], ids=["header", "none"])
def test_columns_of_other_names_are_not_taken_by_position(write, first):
    """They could be the other way round."""
    table = write("a.tsv", f"{first}I sleep\tich schlafe\n")
    columns = {"source_column": "German", "target_column": "Englisch"}
    message = r"/a.tsv: column '(German|Englisch)' is missing; the first line has '.*', '.*'; .* source_column 1"
    refused(Corpus(tables=(table,), **columns), message)


# Cleaning


def test_pairs_are_left_out_and_counted_by_reason():
    cleaning = Cleaning(max_length=10, max_length_ratio=2.0)
    source, target = np.array([[1, 5], [5, 1], [1, 1], [11, 10], [10, 11], [3, 7], [7, 3], [3, 6], [10, 10], [2, 2]]).T
    assert cleaning.keeps(source, target).tolist() == [False] * 7 + [True] * 3
    counts = {"an empty side": 3, "more than 10 tokens": 2, "a length ratio above 2.0": 2}
    assert (cleaning.left_out, cleaning.kept) == (Counter(counts), 3)
    assert str(cleaning) == (
        "3 pairs kept, 7 left out: 3 with an empty side, 2 with more than 10 tokens, 2 with a length ratio above 2.0"
    )
    cleaning.keeps(np.array([1, 4]), np.array([100, 4]))  # counts go on; what has two reasons counts once
    assert (cleaning.left_out["an empty side"], cleaning.left_out.total(), cleaning.kept) == (4, 8, 4)
    assert str(Cleaning(10)) == "0 pairs kept, 0 left out"


# Token ids


@pytest.fixture(scope="module")
def tokenizer():
    return VanillaTransformerTokenizerFast.train_from_iterator([*SOURCES, *TARGETS] * 3, 330, show_progress=False)


def ids_of(dataset):
    return [(row["input_ids"], row["labels"]) for row in dataset]


def test_token_ids_are_those_of_each_line_alone(write, tokenizer, streaming):
    corpus = Corpus((write("s", lines(SOURCES)),), (write("t", lines(TARGETS)),))
    cleaning = Cleaning(max_length=1000)
    tokenized = tokenize(read_corpus(corpus, streaming), tokenizer, cleaning)
    assert ids_of(tokenized) == [(tokenizer(s)["input_ids"], tokenizer(t)["input_ids"]) for s, t in PAIRS if s]
    assert (cleaning.kept, dict(cleaning.left_out)) == (len(PAIRS) - 1, {"an empty side": 1})
    if streaming:
        assert set(next(iter(tokenized))) == {"input_ids", "labels"}


def test_cleaning_by_tokens(write, tokenizer, streaming):
    pairs = [("", "a"), ("a", ""), (" ", "a"), ("a", " \t\u3000")]  # white space is nothing
    pairs += [("ab" * 30, "ab" * 30), ("ab", "abababab" * 2), ("a b", "a b")]
    corpus = Corpus(tables=(write("a.jsonl", as_json(pairs)),))
    cleaning = Cleaning(max_length=40, max_length_ratio=3)
    tokenized = tokenize(read_corpus(corpus, streaming), tokenizer, cleaning)
    assert ids_of(tokenized) == [(tokenizer("a b")["input_ids"],) * 2]
    expected = {"an empty side": 4, "more than 40 tokens": 1, "a length ratio above 3": 1}
    assert (dict(cleaning.left_out), cleaning.kept) == (expected, 1)
    if not streaming:
        with pytest.raises(
            CorpusError, match=r"no sentence pair is left of 7: 0 pairs kept, 7 left out: 4 with an empt"
        ):
            tokenize(read_corpus(corpus), tokenizer, Cleaning(max_length=1))


WORDS = {"tokens": ["<unk>", "<pad>", "<s>", "</s>", "hello", "dog", "hallo", "Hund", "a"], "level": "words"}


@pytest.mark.parametrize("control_tokens", ["none in sources", "both"])
def test_empty_sides_of_any_tokenizer(write, tokenizer, streaming, control_tokens):
    pairs = read_corpus(
        Corpus((write("s", "hello\na dog\n\ndog\n"),), (write("t", "hallo\na Hund\nHund\n\n"),)), streaming
    )
    if control_tokens == "both":
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_bos_token = True
    else:  # as OpenNMT-py's
        names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
        tokenizer = DictionaryTokenizer(segmentation={"source": WORDS, "target": WORDS}, source_eos=False, **names)
    cleaning = Cleaning(max_length=1000)
    assert len(list(tokenize(pairs, tokenizer, cleaning))) == 2
    assert (cleaning.kept, dict(cleaning.left_out)) == (2, {"an empty side": 2})


def test_bpe_dropout_segments_anew_at_each_reading_of_a_stream(write, tokenizer):
    """As docs/training.md has it; a corpus that isn't a stream is segmented once in a run, and never from a cache."""
    corpus = Corpus((write("s", "Leerzeichen\n" * 9),), (write("t", "Katze\n" * 9),))
    dropping = copy.deepcopy(tokenizer)
    dropping.backend_tokenizer.model.dropout = 0.5
    stream = tokenize(read_corpus(corpus, streaming=True), dropping, Cleaning(99))
    readings = [ids_of(stream), ids_of(stream)]
    readings += [ids_of(tokenize(read_corpus(corpus), dropping, Cleaning(99))) for _ in range(2)]
    assert all(first != second for first, second in combinations(readings, 2))
    spelled = {tokenizer.decode(source, skip_special_tokens=True) for reading in readings for source, _ in reading}
    assert spelled == {"Leerzeichen"}
    assert tokenizer.backend_tokenizer.model.dropout is None


def test_several_processes_make_the_same_of_it(write, tokenizer, monkeypatch):
    pairs = read_corpus(Corpus(tables=(write("a.jsonl", as_json(PAIRS * 20)),)))
    one, two = Cleaning(15), Cleaning(15)
    alone = ids_of(tokenize(pairs, tokenizer, one))
    monkeypatch.setattr(data, "PAIRS_PER_PROCESS", 50)
    monkeypatch.setattr(data.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(data, "_fingerprint", lambda *args: None)  # so that datasets' cache doesn't have it
    assert alone == ids_of(tokenize(pairs, tokenizer, two))
    assert one == two
    assert one.left_out.total() > 0


# The cache of token ids


def test_what_was_tokenized_is_not_tokenized_again(write, tmp_path, tokenizer, monkeypatch):
    calls, call = [], PreTrainedTokenizerFast.__call__
    monkeypatch.setattr(
        PreTrainedTokenizerFast,
        "__call__",
        lambda self, *texts, **named: calls.append(texts) or call(self, *texts, **named),
    )

    def is_tokenized(pairs, tokenizer):
        calls.clear()
        tokenize(pairs, tokenizer, Cleaning(1000))
        return any(texts != ([""],) for texts in calls)

    corpus = Corpus(tables=(write("a.jsonl", as_json([*PAIRS, ("only", "here")])),))
    pairs = read_corpus(corpus)
    assert is_tokenized(pairs, tokenizer)
    tokenizer(["a", "bc"], padding=True, truncation=True, max_length=2)  # which its backend remembers
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for same in (tokenizer, VanillaTransformerTokenizerFast.from_pretrained(tmp_path / "tokenizer")):
        assert not is_tokenized(read_corpus(corpus), same)
    other = VanillaTransformerTokenizerFast.train_from_iterator(["abc"], 270, show_progress=False)
    for change in (list, lambda: vars(other).update(split_special_tokens=False), lambda: other.add_tokens("Katze")):
        change()
        assert is_tokenized(pairs, other)
    others = read_corpus(Corpus(tables=(write("b.jsonl", as_json(PAIRS[::-1])),)))
    assert is_tokenized(others, tokenizer)


def test_a_stream_tells_now_and_then_what_it_leaves_out(tokenizer, monkeypatch, caplog):
    monkeypatch.setattr(data, "PAIRS_PER_REPORT", 5)
    monkeypatch.setattr(data.logger, "propagate", True)
    pairs = IterableDataset.from_generator(lambda: ({"source": "a" * (n % 2), "target": "b"} for n in range(12)))
    assert len(list(tokenize(pairs, tokenizer, Cleaning(99)))) == 6
    assert "6 pairs kept, 6 left out: 6 with an empty side" in caplog.text
