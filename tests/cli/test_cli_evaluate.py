"""`vanilla-transformer evaluate` against the library's functions: figures and files."""

import json
import re
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_corpus import REFERENCES, SOURCES, load, write_texts
from transformers import T5Config, T5ForConditionalGeneration

from hf_vanilla_transformer import __version__, engine
from hf_vanilla_transformer.cli import evaluate
from hf_vanilla_transformer.cli.models import call_options
from hf_vanilla_transformer.cli.output import UsageError
from hf_vanilla_transformer.metrics import measure, paired_bootstrap
from hf_vanilla_transformer.plan_vanilla_transformer import GNMTLengthPenalty, Plan
from hf_vanilla_transformer.translation.engine_backend import EngineBackend
from hf_vanilla_transformer.translation.ensembles import ensemble
from hf_vanilla_transformer.translation.scoring import score_targets
from tests.decoding import decode

DECODING = {"num_beams": 2, "max_new_tokens": 6}
OPTIONS = ["--beam", "2", "--max-new-tokens", "6", "--device", "cpu"]


def translate(model, tokenizer, sentences, **options):
    return [row[0].text for row in decode(model, tokenizer, sentences, **options)]


def saved(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return [folder]


@pytest.fixture
def run(vanilla_transformer, here, checkpoints):
    """Runs `evaluate` on the sentences above, in a folder of its own: exit code, output, errors."""

    def run(*arguments, models=checkpoints[:1], source="source.en", reference="reference.de"):
        files = ["--source", source, "--reference", reference]
        return vanilla_transformer("evaluate", *files, *arguments, "--model", *models)

    return run


@pytest.fixture
def figures(run):
    """Runs it with --json; returns that record, and the output."""

    def figures(*arguments, **options):
        code, out, err = run("--json", "figures.json", "--overwrite", *arguments, **options)
        assert (code, err) == (0, "")
        return json.loads(Path("figures.json").read_text(encoding="utf-8")), out

    return figures


def translations(name="translations.de"):
    return Path(name).read_text(encoding="utf-8").split("\n")[:-1]


# ---- Figures ----
def test_figures_are_those_of_the_librarys_functions(figures, checkpoints):
    found, out = figures(*OPTIONS, "--output", "translations.de", "--batch-size", 3)
    model, tokenizer = load(checkpoints[0])
    hypotheses = [row[0] for row in decode(model, tokenizer, SOURCES, **DECODING)]
    texts = [hypothesis.text for hypothesis in hypotheses]
    assert translations() == texts

    given = {"num_sentences": 4, "source": "source.en", "reference": "reference.de", "ensemble": False}
    assert found == found | given
    (result,) = found["results"]
    bleu, chrf = measure(["bleu", "chrf"], texts, REFERENCES).values()
    likelihood = score_targets(model, tokenizer, SOURCES, REFERENCES)
    assert result["models"] == checkpoints[:1]
    assert (result["bleu"], result["chrf"]) == (asdict(bleu), asdict(chrf))
    assert result["perplexity"] == pytest.approx(likelihood.perplexity, rel=1e-5)
    assert result["num_reference_tokens"] == likelihood.num_tokens
    assert result["num_output_tokens"] == sum(hypothesis.num_tokens for hypothesis in hypotheses)
    seconds = result["seconds"]
    assert min(seconds[name] for name in ("loading", "scoring", "decoding")) > 0
    assert result["sentences_per_second"] == pytest.approx(4 / seconds["decoding"])
    assert result["tokens_per_second"] == pytest.approx(result["num_output_tokens"] / seconds["decoding"])
    assert torch.__version__.startswith(found["versions"]["torch"])  # a package of the index leaves out "+cu132"
    assert found["versions"]["hf_vanilla_transformer"] == __version__
    shown = (f"BLEU: {bleu.details}\n", f"{bleu.value:.2f}", f"{chrf.value:.2f}", f"{likelihood.perplexity:.2f}")
    assert [one for one in (*shown, bleu.signature, f"chrF2: {chrf.signature}") if one not in out] == []


def test_an_empty_line_among_several_references_is_none(figures):
    Path("more.de").write_text("\nhalb zehn\nleer\n\n")
    found, _ = figures(*OPTIONS, "--reference", "reference.de", "more.de", "--output", "translations.de")
    references = [[REFERENCES[0]], [REFERENCES[1], "halb zehn"], ["leer"], [REFERENCES[3]]]
    assert found["results"][0]["chrf"] == asdict(measure(["chrf"], translations(), references)["chrf"])


def test_settings_tell_how_was_decoded(figures):
    settings = figures()[0]["results"][0]["decoding"]
    paper = {"num_beams": 4, "gnmt_length_penalty": 0.6, "max_extra_length": 50, "early_stopping": True}
    assert settings == settings | paper | {"dtype": "torch.float32", "compute_type": "float32"}

    settings = figures(*OPTIONS, "--length-penalty", 1.5, "--dtype", "bfloat16")[0]["results"][0]["decoding"]
    given = {"num_beams": 2, "gnmt_length_penalty": 1.5, "max_new_tokens": 6}
    assert "max_extra_length" not in settings
    assert settings == settings | given | {"device": "cpu", "dtype": "torch.bfloat16", "compute_type": "bfloat16"}


@pytest.mark.parametrize(("option", "value"), [("coverage_penalty", 9.0), ("compute_type", "int8")])
def test_options_of_the_engine_reach_it(figures, checkpoints, option, value):
    flag = f"--{option.replace('_', '-')}"
    found, _ = figures(flag, value, "--num-beams", 4, "--output", "translations.de")
    model, tokenizer = load(checkpoints[0])
    options = {} if option == "compute_type" else {option: value}
    engine.attach(model, "default" if options else value)
    assert translations() == translate(model, tokenizer, SOURCES, num_beams=4, **options)
    assert found["results"][0]["decoding"][option] == value


def test_models_are_compared_by_each_measure(figures, checkpoints):
    sources, references = 3 * SOURCES, 3 * REFERENCES
    write_texts(Path(), 3)
    models, names = checkpoints[:2], ["bleu_compound_split", "bleu_multi30k", "bleu", "chrf"]
    options = ["--significance", "--metrics", *names, "--tokenize", "intl", "--lowercase"]
    found, out = figures(*OPTIONS, *options, models=models)
    how = {"tokenize": "intl", "lowercase": True}
    texts = [translate(*load(name), sources, **DECODING) for name in models]
    p_values = [one.p_value for one in paired_bootstrap(texts, references, names=names, **how)[0]]
    first, second = found["results"]
    assert (first["p_values"], [first["models"], second["models"]]) == ({}, [[name] for name in models])
    titles = ["bleu_compound_split", "bleu_multi30k", "BLEU", "chrF2"]
    assert second["p_values"] == dict(zip(titles, p_values, strict=True))
    assert f"chrF2 of {models[1]}: p = {p_values[3]:.3f} against {models[0]} (nrefs:1|bs:1000" in out
    table = out.splitlines()[1:4]
    assert len({len(line) for line in table}) == 1
    assert table[0].split() == ["model", *titles, "perplexity", "sentences/s", "tokens/s", "loading"]
    for result, own, name in zip((first, second), texts, models, strict=True):
        scores = measure(names, own, references, **how)
        assert {name: result[name] for name in names} == {name: asdict(score) for name, score in scores.items()}
        assert f"bleu_multi30k: {scores['bleu_multi30k'].signature}" in out
        perplexity = score_targets(*load(name), sources, references).perplexity
        assert result["perplexity"] == pytest.approx(perplexity, rel=1e-5)
        assert re.search(rf"^{re.escape(name)} .* {perplexity:.2f} ", out, re.MULTILINE)


def test_the_rule_of_stopping_changes_what_is_found(figures, checkpoints):
    model, tokenizer = load(checkpoints[0])
    bias = torch.zeros(model.config.vocab_size).index_fill(0, torch.tensor([2]), 2.0)  # ends are preferred
    model.lm_head.bias, model.config.output_bias = torch.nn.Parameter(bias), True
    ending = saved("ending", model, tokenizer)
    for name, value in (("true", True), ("false", False), ("never", "never")):
        options = ["--length-penalty", 5.0, "--num-beams", 4, "--early-stopping", name]
        found, _ = figures(*options, "--output", f"{name}.de", models=ending)
        expected = translate(model, tokenizer, SOURCES, num_beams=4, gnmt_length_penalty=5.0, early_stopping=value)
        assert translations(f"{name}.de") == expected
        assert found["results"][0]["decoding"]["early_stopping"] == value
    assert translations("true.de") != translations("never.de")


def test_an_ensemble_is_one_row_of_averaged_probabilities(figures, checkpoints):
    names = checkpoints[:2]
    found, out = figures(*OPTIONS, "--ensemble", "--output", "translations.de", models=names)
    members, tokenizers = zip(*(load(name) for name in names), strict=True)
    both = ensemble(members, tokenizers)
    perplexity = score_targets(both, tokenizers[0], SOURCES, REFERENCES).perplexity
    assert ([result["models"] for result in found["results"]], found["ensemble"]) == ([names], True)
    assert found["results"][0]["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    assert translations() == translate(both, tokenizers[0], SOURCES, **DECODING)
    assert " + ".join(names) in out


# ---- Files ----
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")])
def test_files_are_written_even_if_the_report_is_not(run, monkeypatch, error):
    def fail(results):
        raise error

    monkeypatch.setattr(evaluate, "_report", fail)
    Path("figures").write_text("old")
    code, out, _ = run(*OPTIONS, "--json", "figures", "--output", "best", "--overwrite")
    assert (code, out) == (141 if isinstance(error, BrokenPipeError) else 1, "")
    assert json.loads(Path("figures").read_text())["num_sentences"] == len(translations("best")) == 4


# ---- Options that a model or its search lacks ----
@pytest.mark.parametrize("option", [("--early-stopping", "never"), ("--length-penalty", 0.6)])
def test_options_of_beams_for_a_model_that_is_saved_without(run, checkpoints, option):
    model, tokenizer = load(checkpoints[0])
    model.generation_config.num_beams, model.generation_config.early_stopping = 1, False
    greedy = saved("greedy", model, tokenizer)
    result = run(*option, models=greedy)
    assert (result.code, f"{option[0]} " in result.error) == (2, True)
    assert "leave it out, or give --num-beams 2 or more" in result.error
    assert run(*option, "--num-beams", 2, "--max-new-tokens", 3, models=greedy).code == 0


@pytest.mark.parametrize("option", ["length_penalty", "coverage_penalty"])
def test_options_of_our_search_are_refused_for_models_without_it(option):
    other = EngineBackend(T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_ff=8, num_layers=1)), None)
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} needs a model of this package"):
        call_options(Namespace(num_beams=2, **{option: 0.6}), SimpleNamespace(decodes_with=other))


def test_a_length_penalty_takes_the_place_of_the_models_by_another_formula(checkpoints):
    model, tokenizer = load(checkpoints[0])
    model.generation_config.update(gnmt_length_penalty=None, length_penalty=2.0)
    backend = EngineBackend(model, tokenizer)
    options = call_options(Namespace(length_penalty=0.6), SimpleNamespace(decodes_with=backend))
    assert isinstance(Plan.of(options, backend.generation_config).length_penalty, GNMTLengthPenalty)
