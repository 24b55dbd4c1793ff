"""`vanilla-transformer score` against the models' own log-probabilities; files, pairs left out, and errors."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch
from small_corpus import REFERENCES, SOURCES, load

from hf_vanilla_transformer.cli.score import TITLES


@pytest.fixture
def run(vanilla_transformer, here, checkpoints):
    """Runs `score` on the parallel texts, in a folder of its own: exit code, output, errors."""

    def run(*arguments, models=checkpoints[:1]):
        files = ["--source", "source.en", "--target", "reference.de", "--device", "cpu"]
        return vanilla_transformer("score", "--model", *models, *files, *arguments)

    return run


@cache
def _probabilities(folder, source, target):
    """Of each token of one target, one step at a time: each prefix is a call of its own, in float64."""
    model, tokenizer = load(folder)
    model.double()
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


@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_the_sums_of_log_probabilities_in_the_order_of_the_pairs(run, checkpoints, batch_size):
    code, out, err = run("--batch-size", batch_size)
    assert (code, err) == (0, "")
    for (score, num_tokens), source, target in zip(_rows(out), SOURCES, REFERENCES, strict=True):
        probabilities = _probabilities(checkpoints[0], source, target)
        assert int(num_tokens) == len(probabilities)
        # float32 against float64: about 1e-6 per token
        assert float(score) == pytest.approx(math.fsum(map(math.log, probabilities)), abs=1e-5 * len(probabilities))
    for more in ([], ["--overwrite"]):
        assert run("--batch-size", batch_size, "--output", "scores.tsv", *more) == (0, "wrote scores.tsv\n", "")
    assert Path("scores.tsv").read_text(encoding="utf-8") == out


def test_several_models_are_averaged_in_probability(run, checkpoints):
    code, out, err = run(models=checkpoints[:2])
    assert (code, err) == (0, "")
    for (score, _), source, target in zip(_rows(out), SOURCES, REFERENCES, strict=True):
        both = zip(*(_probabilities(folder, source, target) for folder in checkpoints[:2]), strict=True)
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
