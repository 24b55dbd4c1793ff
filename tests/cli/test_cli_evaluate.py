"""`vanilla-transformer evaluate` against the library's functions: figures, files, and errors before any model loads."""

import argparse
import gzip
import json
import re
import resource
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from hf_vanilla_transformer import VanillaTransformerTokenizerFast, __version__, engine
from hf_vanilla_transformer.cli import evaluate
from hf_vanilla_transformer.cli.models import decoding_options
from hf_vanilla_transformer.cli.output import UsageError
from hf_vanilla_transformer.metrics import measure, paired_bootstrap
from hf_vanilla_transformer.translation.decoding import decode
from hf_vanilla_transformer.translation.engine_backend import EngineBackend
from hf_vanilla_transformer.translation.ensembles import ensemble
from hf_vanilla_transformer.translation.scoring import score_targets

SOURCES = ["twenty-one", "half past nine on the fourth of May", "", "it costs two hundred"]
REFERENCES = ["einundzwanzig", "halb zehn am vierten Mai", "", "es kostet zwei-hundert"]
DECODING = {"num_beams": 2, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint, tmp_path_factory):
    """Three: two of one tokenizer, the third of another."""
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_checkpoint), None
    folders = [tiny_checkpoint]
    others = {
        "other": tokenizer,
        "stranger": VanillaTransformerTokenizerFast.train_from_iterator(["nine"], 283, show_progress=False),
    }
    for name, own_tokenizer in others.items():
        model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        folders.append(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[-1])
        own_tokenizer.save_pretrained(folders[-1])
    return [str(folder) for folder in folders]


def translate(model, tokenizer, sentences, **options):
    return [row[0].text for row in decode(model, tokenizer, sentences, **options)]


@pytest.fixture
def run(monkeypatch, vanilla_transformer, tmp_path, checkpoints):
    """Runs `evaluate` on the sentences above, in a folder of its own: exit code, output, errors."""
    for name, lines in (("source.en", SOURCES), ("reference.de", REFERENCES)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    def run(*arguments, models=checkpoints[:1], source="source.en", reference="reference.de"):
        files = ["--source", source, "--reference", reference]
        return vanilla_transformer("evaluate", *files, *arguments, "--model", *models)

    return run


OPTIONS = ["--beam", "2", "--max-new-tokens", "6", "--device", "cpu"]


def _loaded(checkpoint):
    return AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval(), AutoTokenizer.from_pretrained(checkpoint)


# Figures


def test_figures_are_those_of_the_librarys_functions(run, checkpoints):
    code, out, err = run(*OPTIONS, "--json", "figures.json", "--output", "translations.de", "--batch-size", 3)
    assert (code, err) == (0, "")
    model, tokenizer = _loaded(checkpoints[0])
    hypotheses = [row[0] for row in decode(model, tokenizer, SOURCES, **DECODING)]
    texts = [hypothesis.text for hypothesis in hypotheses]
    assert Path("translations.de").read_text(encoding="utf-8").split("\n") == [*texts, ""]

    record = json.loads(Path("figures.json").read_text(encoding="utf-8"))
    assert record["num_sentences"] == 4
    assert (record["source"], record["reference"], record["ensemble"]) == ("source.en", "reference.de", False)
    (result,) = record["results"]
    bleu, chrf = measure(["bleu", "chrf"], texts, REFERENCES).values()
    likelihood = score_targets(model, tokenizer, SOURCES, REFERENCES)
    assert result["models"] == checkpoints[:1]
    assert result["bleu"] == asdict(bleu)
    assert result["chrf"] == asdict(chrf)
    assert f"BLEU: {bleu.details}\n" in out
    assert result["perplexity"] == pytest.approx(likelihood.perplexity, rel=1e-5)
    assert result["num_reference_tokens"] == likelihood.num_tokens
    assert result["num_output_tokens"] == sum(hypothesis.num_tokens for hypothesis in hypotheses)
    seconds = result["seconds"]
    assert min(seconds[name] for name in ("loading", "scoring", "decoding")) > 0
    assert result["sentences_per_second"] == pytest.approx(4 / seconds["decoding"])
    assert result["tokens_per_second"] == pytest.approx(result["num_output_tokens"] / seconds["decoding"])
    assert torch.__version__.startswith(record["versions"]["torch"])  # a package of the index leaves out "+cu132"
    assert record["versions"]["hf_vanilla_transformer"] == __version__
    for shown in (f"{bleu.value:.2f}", f"{chrf.value:.2f}", f"{likelihood.perplexity:.2f}", bleu.signature):
        assert shown in out
    assert f"chrF2: {chrf.signature}" in out


def test_settings_tell_how_was_decoded(run):
    run("--json", "defaults.json")
    settings = json.loads(Path("defaults.json").read_text())["results"][0]["decoding"]
    paper = {"num_beams": 4, "gnmt_length_penalty": 0.6, "max_extra_length": 50, "early_stopping": True}
    assert settings == settings | paper | {"dtype": "torch.float32", "compute_type": "float32"}

    run(*OPTIONS, "--length-penalty", 1.5, "--dtype", "bfloat16", "--json", "given.json")
    settings = json.loads(Path("given.json").read_text())["results"][0]["decoding"]
    given = {"num_beams": 2, "gnmt_length_penalty": 1.5, "max_new_tokens": 6}
    assert "max_extra_length" not in settings
    assert settings == settings | given | {"device": "cpu", "dtype": "torch.bfloat16", "compute_type": "bfloat16"}


@pytest.mark.parametrize(("option", "value"), [("coverage_penalty", 9.0), ("compute_type", "int8")])
def test_options_of_the_engine_reach_it(run, checkpoints, option, value):
    model, tokenizer = _loaded(checkpoints[0])
    flag = f"--{option.replace('_', '-')}"
    code, _, err = run(flag, value, "--num-beams", 4, "--output", "found.de", "--json", "found.json")
    assert (code, err) == (0, "")
    if option == "compute_type":
        engine.attach(model, value)
        expected = translate(model, tokenizer, SOURCES, num_beams=4)
    else:
        engine.attach(model)
        expected = translate(model, tokenizer, SOURCES, num_beams=4, coverage_penalty=value)
    assert Path("found.de").read_text(encoding="utf-8").splitlines() == expected
    assert json.loads(Path("found.json").read_text())["results"][0]["decoding"][option] == value


def _prefer_ends(model):
    size = model.config.vocab_size
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(size).index_fill(0, torch.tensor([2]), 2.0))
    model.config.output_bias = True


def test_models_are_compared_by_each_measure(run, checkpoints):
    sources, references = 3 * SOURCES, 3 * REFERENCES
    for name, lines in (("source.en", sources), ("reference.de", references)):
        Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    models, names = checkpoints[:2], ["bleu", "bleu_multi30k", "chrf"]
    code, out, err = run(*OPTIONS, "--significance", "--json", "rows.json", "--metrics", *names, models=models)
    assert (code, err) == (0, "")
    results = json.loads(Path("rows.json").read_text(encoding="utf-8"))["results"]
    texts = [translate(*_loaded(name), sources, **DECODING) for name in models]
    for result, own in zip(results, texts, strict=True):
        assert result["chrf"] == asdict(measure(["chrf"], own, references)["chrf"])
    p_values = [one.p_value for one in paired_bootstrap(texts, references, names=names)[0]]
    assert results[1]["p_values"] == dict(zip(("BLEU", "bleu_multi30k", "chrF2"), p_values, strict=True))
    assert results[0]["p_values"] == {}
    assert f"chrF2 of {models[1]}: p = {p_values[2]:.3f} against {models[0]} (nrefs:1|bs:1000" in out


def test_the_rule_of_stopping_changes_what_is_found(run, checkpoints):
    model, tokenizer = _loaded(checkpoints[0])
    _prefer_ends(model)
    model.save_pretrained("ending")
    tokenizer.save_pretrained("ending")
    options = ["--length-penalty", 5.0, "--num-beams", 4]
    for name, value in (("true", True), ("false", False), ("never", "never")):
        run(*options, "--early-stopping", name, "--output", f"{name}.de", "--json", f"{name}.json", models=["ending"])
        expected = translate(model, tokenizer, SOURCES, num_beams=4, gnmt_length_penalty=5.0, early_stopping=value)
        assert Path(f"{name}.de").read_text(encoding="utf-8").split("\n") == [*expected, ""]
        assert json.loads(Path(f"{name}.json").read_text())["results"][0]["decoding"]["early_stopping"] == value
    assert Path("true.de").read_bytes() != Path("never.de").read_bytes()


def test_a_row_a_model(run, checkpoints):
    code, out, err = run(*OPTIONS, "--json", "figures.json", models=checkpoints)
    assert (code, err) == (0, "")
    results = json.loads(Path("figures.json").read_text(encoding="utf-8"))["results"]
    assert [result["models"] for result in results] == [[name] for name in checkpoints]
    for result, name in zip(results, checkpoints, strict=True):
        model, tokenizer = _loaded(name)
        perplexity = score_targets(model, tokenizer, SOURCES, REFERENCES).perplexity
        assert result["perplexity"] == pytest.approx(perplexity, rel=1e-5)
        assert re.search(rf"^{re.escape(name)} .* {perplexity:.2f} ", out, re.MULTILINE)
    table = out.splitlines()[1:5]
    assert table[0].split() == ["model", "BLEU", "chrF2", "perplexity", "sentences/s", "tokens/s", "loading"]
    assert len({len(line) for line in table}) == 1


def test_an_ensemble_is_one_row_of_averaged_probabilities(run, checkpoints):
    names = checkpoints[:2]
    code, out, err = run(*OPTIONS, "--ensemble", "--json", "figures.json", "--output", "both.de", models=names)
    assert (code, err) == (0, "")
    record = json.loads(Path("figures.json").read_text(encoding="utf-8"))
    members, tokenizers = zip(*(_loaded(name) for name in names), strict=True)
    both = ensemble(members, tokenizers)
    perplexity = score_targets(both, tokenizers[0], SOURCES, REFERENCES).perplexity
    assert [result["models"] for result in record["results"]] == [names]
    assert record["ensemble"] is True
    assert record["results"][0]["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    expected = translate(both, tokenizers[0], SOURCES, **DECODING)
    assert Path("both.de").read_text(encoding="utf-8").split("\n") == [*expected, ""]
    assert " + ".join(names) in out


def test_every_bleu(run, checkpoints):
    names = ["bleu_compound_split", "bleu_multi30k", "bleu", "chrf"]
    given = ["--metrics", *names, "--tokenize", "intl", "--lowercase"]
    code, out, _ = run(*OPTIONS, *given, "--json", "figures.json", "--output", "translations.de")
    texts = Path("translations.de").read_text(encoding="utf-8").split("\n")[:-1]
    scores = measure(names, texts, REFERENCES, tokenize="intl", lowercase=True)
    (result,) = json.loads(Path("figures.json").read_text(encoding="utf-8"))["results"]
    assert code == 0
    assert {name: result[name] for name in names} == {name: asdict(score) for name, score in scores.items()}
    assert f"bleu_multi30k: {scores['bleu_multi30k'].signature}" in out
    assert out.splitlines()[1].split()[1:5] == ["bleu_compound_split", "bleu_multi30k", "BLEU", "chrF2"]


# Files


def test_bleu_that_can_only_be_0_is_told_once(run, tmp_path):
    (tmp_path / "words.de").write_text("neun\n" * 4)
    assert run(reference="words.de")[2].count("warning: BLEU stays 0: ") == 1
    assert "BLEU stays 0" not in run("--tokenize", "char", reference="words.de")[2]


def test_packed_files_windows_line_ends_and_byte_order_marks(run):
    run(*OPTIONS, "--json", "plain.json")
    Path("source.en.gz").write_bytes(gzip.compress(Path("source.en").read_bytes()))
    Path("windows.de").write_text("\ufeff" + "\r\n".join(REFERENCES), encoding="utf-8", newline="")
    code, _, err = run(*OPTIONS, "--json", "other.json", source="source.en.gz", reference="windows.de")
    assert (code, err) == (0, "")
    plain, other = (json.loads(Path(name).read_text())["results"][0] for name in ("plain.json", "other.json"))
    assert [plain[name] for name in ("bleu", "chrf", "perplexity")] == [
        other[name] for name in ("bleu", "chrf", "perplexity")
    ]


def test_files_that_exist_are_replaced_only_when_told_to(run):
    Path("figures.json").write_text("precious")
    code, out, err = run(*OPTIONS, "--json", "figures.json")
    assert (code, out, Path("figures.json").read_text()) == (2, "", "precious")
    assert "--json figures.json exists; give another file, or --overwrite to replace it" in err
    assert run(*OPTIONS, "--json", "figures.json", "--overwrite")[0] == 0
    assert json.loads(Path("figures.json").read_text())["num_sentences"] == 4


FILES = {"--json": "figures", "--output": "best"}


@pytest.mark.parametrize(("option", "is_old"), [("--json", True), ("--output", False)])
def test_a_full_disk_leaves_the_old_file_or_none(run, monkeypatch, option, is_old):
    write = evaluate._write

    def on_a_full_disk(*arguments):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        try:
            write(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(evaluate, "_write", on_a_full_disk)
    file = Path(FILES[option])
    if is_old:
        file.write_text("precious")
    code, out, err = run(*OPTIONS, option, file, "--overwrite")
    assert (code, err.count("\n")) == (1, 1)
    assert "BLEU" in out
    assert f"File too large: '{file}'" in err
    others = {"source.en", "reference.de"}
    assert {path.name for path in Path().iterdir()} == others | ({file.name} if is_old else set())
    if is_old:
        assert file.read_text() == "precious"


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")])
def test_files_are_written_even_if_the_report_is_not(run, monkeypatch, error):
    def fail(results):
        raise error

    monkeypatch.setattr(evaluate, "_report", fail)
    code, out, _ = run(*OPTIONS, "--json", "figures", "--output", "best")
    assert (code, out) == (141 if isinstance(error, BrokenPipeError) else 1, "")
    assert json.loads(Path("figures").read_text())["num_sentences"] == 4
    assert Path("best").read_text(encoding="utf-8").count("\n") == 4


def test_translations_are_written_before_the_figures(run, monkeypatch):
    monkeypatch.setattr(evaluate, "_record", lambda *arguments: 1 / 0)
    run(*OPTIONS, "--json", "figures", "--output", "best")
    assert Path("best").read_text(encoding="utf-8").count("\n") == 4
    assert not Path("figures").exists()


# What goes wrong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--source", "nowhere.en"], "nowhere.en: no such file; name an existing file"),
        (["--source", "empty"], "empty: the file is empty; is it"),
        (["--source", "latin1"], r"latin1:2: not UTF-8 \(byte 0xf6 at 4\); convert it to UTF-8, with iconv"),
        (["--source", "damaged.gz"], r"damaged\.gz:\d+: the compressed file is damaged"),
        (["--reference", "short"], "short: ends after line 1, but source.en is longer"),
        (["--json", "source.en", "--overwrite"], "--json source.en is the file of another option; give another"),
        (["--json", "new", "--output", "./new"], "--output ./new is the file of another option; give another"),
        (["--output", "nowhere/new"], "--output nowhere/new can't be written: there is no folder nowhere; give"),
        (["--significance"], "--significance compares models; give --model A B"),
        (["--ensemble"], "--ensemble needs two models or more; give --model A B"),
        (["--tokenize", "moses"], "unknown tokenize='moses'; sacreBLEU has 'none'"),
        (["--metrics", "bleu_compound_split", "--tokenize", "char"], "tokenize='char' can't be combined with split"),
        (["--length-penalty", "-1"], "--length-penalty: '-1' is not a number of at least 0"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_before_a_model_is_loaded(run, monkeypatch, options, message):
    latin1 = "gut\nschön\ngut\ngut\n".encode("latin1")
    files = {"empty": b"", "short": b"eins\n", "latin1": latin1, "latin1.gz": gzip.compress(latin1)}
    files |= {"damaged.gz": gzip.compress(b"text\n" * 4)[:-9]}
    for name, content in files.items():
        Path(name).write_bytes(content)
    monkeypatch.setattr(evaluate, "load_ensemble", None)
    code, out, err = run(*options)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"vanilla-transformer: error: .*{message}.*\n", err), err
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--significance"], "4 sentences are too few to be resampled; give 10 or more"),
        (["--output", "new"], "--output is for one model's translations; give a single --model"),
    ],
)
def test_wrong_use_of_several_models(run, checkpoints, monkeypatch, options, message):
    monkeypatch.setattr(evaluate, "load_ensemble", None)
    result = run(*options, models=checkpoints[:2])
    assert (result.code, message in result.err) == (2, True)


def test_members_with_different_tokenizers_are_refused(run, checkpoints):
    code, _, err = run("--ensemble", models=[checkpoints[0], checkpoints[2]])
    assert code == 2
    assert re.fullmatch(
        "vanilla-transformer: error: .*averaged: model 2 has another tokenizer than model 1; .*\n",
        err,
    )


@pytest.mark.parametrize("option", [("--early-stopping", "never"), ("--length-penalty", 0.6)])
def test_options_of_beams_for_a_model_that_is_saved_without(run, checkpoints, option):
    model, tokenizer = _loaded(checkpoints[0])
    model.generation_config.num_beams, model.generation_config.early_stopping = 1, False
    model.save_pretrained("greedy")
    tokenizer.save_pretrained("greedy")
    code, _, err = run(*option, models=["greedy"])
    assert (code, err.count("\n")) == (2, 1)
    assert f"{option[0]} " in err
    assert "leave it out, or give --num-beams 2 or more" in err
    assert run(*option, "--num-beams", 2, "--max-new-tokens", 3, models=["greedy"])[0] == 0


@pytest.mark.parametrize("option", ["length_penalty", "coverage_penalty"])
def test_options_of_our_search_are_refused_for_models_without_it(option):
    names = ("max_new_tokens", "length_penalty", "early_stopping", "coverage_penalty")
    given = dict.fromkeys(names) | {option: 0.6}
    arguments = argparse.Namespace(num_beams=2, **given)
    other = EngineBackend(T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_ff=8, num_layers=1)), None)
    with pytest.raises(UsageError, match=f"--{option.replace('_', '-')} needs a model of this package"):
        decoding_options(arguments, other)
