"""`vanilla-transformer score` against the models' own log-probabilities; files, pairs left out, and errors."""

import math

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer.cli.score import TITLES

# The longest is neither first nor last: batches are made by length, and the output is in the order of the input.
SOURCES = ["twenty-one", "half past nine on the fourth of May", "", "it costs two hundred"]
TARGETS = ["einundzwanzig", "halb zehn am vierten Mai", "", "es kostet zwei-hundert"]


@pytest.fixture(scope="module")
def other(tiny_checkpoint, tmp_path_factory):
    """Another model with the same tokenizer."""
    folder, model = tmp_path_factory.mktemp("other"), AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch, vanilla_transformer, tmp_path, tiny_checkpoint):
    """Runs `score` on the pairs above, in a folder of its own: exit code, output, errors."""
    for name, lines in (("source.en", SOURCES), ("target.de", TARGETS)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run(*arguments, models=(tiny_checkpoint,), source="source.en", target="target.de"):
        files = ["--source", source, "--target", target, "--device", "cpu"]
        return vanilla_transformer("score", "--model", *models, *files, *arguments)

    return run


def _probabilities(folder, source, target):
    """Of each token of one target, one step at a time: each prefix is a call of its own, in float64."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs, target_ids = tokenizer(source, return_tensors="pt"), tokenizer(text_target=target)["input_ids"]
    prefix, probabilities = [model.config.decoder_start_token_id], []
    for token in target_ids:
        with torch.no_grad():
            logits = model(**inputs, decoder_input_ids=torch.tensor([prefix])).logits[0, -1]
        probabilities.append(logits.softmax(-1)[token].item())
        prefix.append(token)
    return probabilities


def _rows(text):
    titles, *lines = text.splitlines()
    assert titles == TITLES
    return [line.split("\t") for line in lines]


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_scores_are_the_sums_of_log_probabilities_in_the_order_of_the_pairs(run, tiny_checkpoint, batch_size):
    code, out, err = run("--batch-size", batch_size)
    assert (code, err) == (0, "")
    for (score, num_tokens), source, target in zip(_rows(out), SOURCES, TARGETS, strict=True):
        probabilities = _probabilities(tiny_checkpoint, source, target)
        assert int(num_tokens) == len(probabilities)
        # float32 against float64: about 1e-6 per token
        assert float(score) == pytest.approx(math.fsum(map(math.log, probabilities)), abs=1e-5 * len(probabilities))


def test_several_models_are_averaged_in_probability(run, tiny_checkpoint, other):
    code, out, err = run(models=(tiny_checkpoint, other))
    assert (code, err) == (0, "")
    for (score, _), source, target in zip(_rows(out), SOURCES, TARGETS, strict=True):
        both = zip(*(_probabilities(folder, source, target) for folder in (tiny_checkpoint, other)), strict=True)
        expected = math.fsum(math.log(sum(pair) / 2) for pair in both)
        assert float(score) == pytest.approx(expected, abs=1e-4)
    single = [float(score) for score, _ in _rows(run()[1])]
    assert single != pytest.approx([float(score) for score, _ in _rows(out)], abs=1e-3)


def test_too_long_a_pair_has_a_line_without_numbers_and_a_warning(run):
    code, out, err = run("--max-source-tokens", 18)
    rows = _rows(out)
    assert (code, rows[1]) == (0, ["", ""])
    assert all(float(rows[n][0]) < 0 for n in (0, 2, 3))
    assert err.count("\n") == 1
    assert "line 2" in err
    assert "it has no score" in err


def test_output_is_a_file_that_is_not_replaced_unasked(run, tmp_path):
    out = run()[1]
    assert run("--output", "scores.tsv") == (0, "wrote scores.tsv\n", "")
    assert (tmp_path / "scores.tsv").read_text(encoding="utf-8") == out
    code, _, err = run("--output", "scores.tsv")
    assert (code, "--overwrite" in err) == (2, True)
    assert run("--output", "scores.tsv", "--overwrite")[0] == 0
    code, _, err = run("--output", "target.de", "--overwrite")
    assert (code, "the file of another option" in err) == (2, True)
    assert (tmp_path / "target.de").read_text(encoding="utf-8").splitlines() == TARGETS


def test_wrong_files_are_one_line(run, tmp_path):
    (tmp_path / "short.de").write_text("eins\n", encoding="utf-8")
    for options, message in (
        ({"target": "short.de"}, "short.de: ends after line"),
        ({"models": ("nowhere",)}, "nowhere"),
    ):
        code, out, err = run(**options)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert message in err
