"""Long lines: divided within limits of tokens, memory and time, with nothing lost and a warning that names the line."""

import io
import json
import math
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import new_model

from hf_vanilla_transformer.cli import lines
from hf_vanilla_transformer.translation import reading
from hf_vanilla_transformer.translation.backend import MAX_SOURCE_TOKENS, Translation
from hf_vanilla_transformer.translation.division import join
from hf_vanilla_transformer.translation.ensembles import ensemble
from hf_vanilla_transformer.translation.reading import divide, encode_within
from hf_vanilla_transformer.translation.scoring import score_pairs, score_targets
from hf_vanilla_transformer.translation.translator import Translator
from tests.decoding import decode

SENTENCE = "half past nine on the fourth of May. "


@pytest.fixture(scope="module")
def encode(tokenizer):
    return lambda texts: tokenizer(texts)["input_ids"]


def divided(encode, text, limit):
    """The token ids of a text's pieces."""
    return [ids for _, ids in divide(encode, text, limit)]


@pytest.fixture(scope="module")
def model(tokenizer):
    return new_model(len(tokenizer))


def _texts(tokenizer, rows):
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]


# Where a line is divided


@pytest.mark.parametrize("text", [SENTENCE * 50, "3.14,is.not.an!end?" * 40, "\U0001f600" * 90])
def test_pieces_end_with_sentences_or_without_white_space_anywhere(tokenizer, encode, text):
    rows = divided(encode, text, 60)
    texts, separator = _texts(tokenizer, rows), " " if text.startswith(SENTENCE) else ""
    assert separator.join(texts) == text.strip()
    assert all(one.endswith("May.") for one in texts) or not separator
    assert all(15 < len(row) <= 60 for row in rows), "pieces are cut near the middle"


def test_a_limit_below_a_single_character_is_said(encode):
    with pytest.raises(ValueError, match=r"alone has more than the \d tokens of a piece"):
        divided(encode, "\U0001f600" * 9, 4)


TEXTS = st.text(
    st.sampled_from("ab .!?…。！\"'”」)\n\t\u2003ü今は\U0001f600e\u0301-") | st.characters(codec="utf-8"), max_size=300
)


@settings(max_examples=30)
@given(text=TEXTS, limit=st.integers(10, 60))
def test_nothing_is_lost_and_no_piece_is_too_long(tokenizer, encode, text, limit):
    rows = divided(encode, text, limit)
    assert all(0 < len(row) <= limit for row in rows)
    assert "".join("".join(_texts(tokenizer, rows)).split()) == "".join(text.split())


@pytest.mark.parametrize("part", [SENTENCE, "x"])
def test_work_is_nearly_linear_and_in_portions(encode, part, monkeypatch):
    """The tokenizer gets each character some times, and never all of them at once."""
    monkeypatch.setattr(reading, "CHARACTERS_AT_ONCE", 25_000)
    text = part * (75_000 // len(part))
    portions = []

    def counting(texts):
        portions.append(sum(map(len, texts)))
        return encode(texts)

    assert encode_within(counting, [text], 1_024) == [None]
    rows = divided(counting, text, 1_024)
    assert sum(portions) <= 20 * len(text)
    assert max(portions) <= reading.CHARACTERS_AT_ONCE
    assert all(len(row) <= reading.PIECE_TOKENS for row in rows)


# Translations


@pytest.mark.parametrize("options", [{"num_beams": 1, "early_stopping": False}, {"num_beams": 2}])
def test_a_long_line_is_what_its_pieces_are(model, tokenizer, encode, options):
    long = SENTENCE * 120
    assert len(encode([long])[0]) > 1_024
    texts = _texts(tokenizer, divided(encode, long, 1_024))
    divisions, done = [], []
    found = decode(
        model, tokenizer, ["it", long, "", "nine", long], on_division=lambda *pair: divisions.append(pair),
        progress=done.append, max_new_tokens=9, **options,
    )  # fmt: skip
    alone = [decode(model, tokenizer, [text], max_new_tokens=9, **options)[0][0] for text in ["it", *texts, "nine"]]
    joined = Translation(join(one.text for one in alone[1:-1]), sum(one.num_tokens for one in alone[1:-1]))
    assert [row[0] for row in found] == [alone[0], joined, Translation("", 0), alone[-1], joined]
    assert divisions == [(1, len(texts)), (4, len(texts))]
    assert sum(done) == 5
    assert min(done) >= 0


def test_a_line_within_the_limit_is_left_whole(model, tokenizer, encode, monkeypatch):
    line, shapes, generate = (SENTENCE * 30).strip(), [], model.generate
    count = len(encode([line])[0])
    assert reading.PIECE_TOKENS < count < MAX_SOURCE_TOKENS
    monkeypatch.setattr(model, "generate", lambda **own: shapes.append((*own["input_ids"].shape,)) or generate(**own))
    for limit in (None, count, count - 1, 40):
        shapes.clear()
        decode(model, tokenizer, [line], max_new_tokens=2, **({"max_source_tokens": limit} if limit else {}))
        if limit in (None, count):
            assert shapes == [(1, count)]
        else:
            assert sum(rows for rows, _ in shapes) > 1
            assert max(length for _, length in shapes) <= min(limit, reading.PIECE_TOKENS)


def test_learned_positions_end_and_sinusoids_do_not(tokenizer, encode):
    learned = new_model(len(tokenizer), position_encoding="learned", max_position_embeddings=30)
    divisions = []
    line = SENTENCE * 5
    decode(learned, tokenizer, [line], on_division=lambda *pair: divisions.append(pair))
    assert divisions == [(0, len(divided(encode, line, 30)))]
    endless = new_model(len(tokenizer), max_position_embeddings=30)
    decode(endless, tokenizer, [line], on_division=lambda *pair: divisions.append(pair), max_new_tokens=2)
    assert len(divisions) == 1
    models = learned, endless, ensemble([endless, learned], [tokenizer, tokenizer])
    translators = [Translator(one, tokenizer=tokenizer) for one in models]
    assert [one.source_limit() for one in translators] == [30, MAX_SOURCE_TOKENS, 30]
    assert [translators[0].source_limit(given) for given in (20, 40)] == [20, 30]


def test_perplexity_leaves_out_what_is_too_long_on_either_side(model, tokenizer):
    long, left_out, done = SENTENCE * 3, [], []
    likelihood = score_targets(
        model, tokenizer, ["it", long, "it", ""], ["es", "es", long, "es"], max_tokens=30,
        on_omission=left_out.append, progress=done.append,
    )  # fmt: skip
    rest = score_targets(model, tokenizer, ["it", ""], ["es", "es"])
    assert left_out == [1, 2]
    assert (likelihood.num_left_out, rest.num_left_out, sum(done)) == (2, 0, 4)
    assert likelihood.perplexity == pytest.approx(rest.perplexity, rel=1e-6)
    assert likelihood.num_tokens == rest.num_tokens
    pairs = score_pairs(model, tokenizer, ["it", ""], ["es", "es"])
    assert rest.num_tokens == sum(one.num_tokens for one in pairs)
    assert math.log(rest.perplexity) * rest.num_tokens == pytest.approx(-sum(one.log_probability for one in pairs))
    with pytest.raises(ValueError, match=r"every pair has a side of more than 30 tokens.*raise the limit"):
        score_targets(model, tokenizer, [long], ["es"], max_tokens=30)


# The command line


@pytest.fixture
def run(vanilla_transformer, tiny_checkpoint, monkeypatch, tmp_path):
    """Runs a command on the tiny model in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        return vanilla_transformer(name, "--model", tiny_checkpoint, "--max-new-tokens", 2, *arguments)

    return run


WARNING = r"vanilla-transformer: warning: {} has more than {} tokens \(--max-source-tokens\): {}\n"


@pytest.mark.parametrize("limit", [None, 30])
def test_warnings_name_the_line_in_the_complete_input(run, monkeypatch, limit):
    monkeypatch.setattr(lines, "LINES_PER_WINDOW", 2)
    long = SENTENCE * (120 if limit is None else 3)
    options, shown = ([], "1,024") if limit is None else (["--max-source-tokens", limit], "30")
    result = run("translate", *options, stdin=f"it\n\n{long}\nit\n{long}\n".encode())
    consequence = r"it is translated in \d+ pieces"
    expected = "".join(WARNING.format(f"line {number}", shown, consequence) for number in (3, 5))
    assert (result.code, result.out.count("\n")) == (0, 5)
    assert re.fullmatch(expected, result.err), result.err
    rows = result.out.split("\n")
    assert rows[2] == rows[4]
    assert rows[0] == rows[3] != ""

    result = run("translate", *options, "--", "it", long)
    assert re.fullmatch(WARNING.format("sentence 2", shown, consequence), result.err), result.err


def test_evaluate_says_what_it_divides_and_leaves_out(run, tmp_path):
    (tmp_path / "source").write_text(f"it\n{SENTENCE * 3}\nit\n")
    (tmp_path / "reference").write_text(f"es\nes\n{SENTENCE * 3}\n")
    result = run(
        "evaluate", "--source", "source", "--reference", "reference", "--max-source-tokens", 30, "--num-beams", 2,
        "--json", "figures", "--output", "best",
    )  # fmt: skip
    left_out = "it is left out of the perplexity"
    warnings = [("line 2", left_out), ("line 3", left_out), ("line 2", r"it is translated in 3 pieces")]
    assert result.code == 0
    assert re.fullmatch("".join(WARNING.format(line, 30, what) for line, what in warnings), result.err), result.err
    assert ": without 2 pairs that are too long\n" in result.out
    (record,) = json.loads((tmp_path / "figures").read_text())["results"]
    assert (record["num_pairs_without_perplexity"], record["decoding"]["max_source_tokens"]) == (2, 30)
    assert (tmp_path / "best").read_text(encoding="utf-8").count("\n") == 3
