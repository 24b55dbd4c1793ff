"""CTranslate2 as the backend of a Translator, beside the same model with the engine: same translations and scores."""

import json
import re
import shutil
import sys
from collections import Counter
from itertools import chain
from unittest.mock import Mock

import pytest
import random_models
import torch
from opus_mt import opus_mt_folder
from random_models import new_model
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.engine.decoding.linear import HAS_VNNI
from hf_vanilla_transformer.errors import CheckpointError
from hf_vanilla_transformer.translation.scoring import score_pairs
from hf_vanilla_transformer.translation.translator import Translator

ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 isn't installed (the extra export has it)")
from hf_vanilla_transformer.interop.ctranslate2 import write_ctranslate2  # noqa: E402

TEXTS = [*random_models.TEXTS[:5], " ", "it costs two hundred euros and five cents", "nine"]
# Sums of log-probabilities in float32, which both compute in other orders.
CLOSE = 1e-4


@pytest.fixture(scope="module")
def ours(checkpoint):
    return Translator(checkpoint, "cpu")


@pytest.fixture(scope="module")
def theirs(checkpoint):
    return Translator(checkpoint, "cpu", threads=1, backend="ctranslate2")


@pytest.fixture(scope="module")
def exported(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert cli.main(["export", "--model", str(checkpoint), "--to", "ctranslate2", "--output", str(folder)]) == 0
    return folder


def assert_same(found, expected):
    """Compares n-best lists."""
    for one, other in zip(found, expected, strict=True):
        assert [row.text for row in one] == [row.text for row in other]
        assert [row.num_tokens for row in one] == [row.num_tokens for row in other]
        assert [row.score is None for row in one] == [row.score is None for row in other]
        scores = [[row.score or 0.0 for row in rows] for rows in (one, other)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-6, abs=CLOSE)


# ---- Searches ----
def test_alignments_are_the_mean_of_the_last_layers_heads(ours, theirs):
    for options in ({"num_beams": 1}, {"batch_tokens": 4_096}, {"prefix": "das", "n_best": 3, "batch_tokens": 4_096}):
        rows = [translator(TEXTS, alignments=True, **options) for translator in (theirs, ours)]
        found, expected = ([*chain(*some)] if "n_best" in options else some for some in rows)
        assert [one.text for one in found] == [one.text for one in expected]
        assert found[3].alignment is None or "n_best" in options
        for one, other in zip(found, expected, strict=True):
            if other.alignment is not None:
                assert (one.alignment.source, one.alignment.target) == (other.alignment.source, other.alignment.target)
                torch.testing.assert_close(one.alignment.weights, other.alignment.weights, rtol=0, atol=1e-5)


def test_a_table_of_positions_ends_translations(tokenizer):
    model = new_model(len(tokenizer), position_encoding="learned", max_position_embeddings=16)
    own, other = (Translator(model, tokenizer=tokenizer, backend=name) for name in ("engine", "ctranslate2"))
    assert_same(other(TEXTS, n_best=4), own(TEXTS, n_best=4))


@pytest.mark.parametrize("setting", ["suppress_tokens", "bad_words_ids"])
def test_barred_tokens(checkpoint, tokenizer, ours, setting, caplog):
    """Of probable tokens: a translation lacks them, and one that is given is as probable as without the setting."""
    used = tokenizer(ours(TEXTS), add_special_tokens=False)["input_ids"]
    frequent = [token for token, _ in Counter(chain(*used)).most_common(2)]
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
    values = {"suppress_tokens": frequent, "bad_words_ids": [[token] for token in frequent]}
    setattr(model.generation_config, setting, values[setting])
    own = Translator(model, tokenizer=tokenizer)
    other = Translator(model, tokenizer=tokenizer, backend="ctranslate2", threads=1)
    assert "scores and translations may differ" in caplog.text
    assert other(TEXTS, num_beams=1) == own(TEXTS, num_beams=1) != ours(TEXTS, num_beams=1)
    targets = [*ours(TEXTS[:-1]), ""]
    expected, found = (score_pairs(one.model, tokenizer, TEXTS, targets) for one in (ours, other))
    assert [one.num_tokens for one in found] == [one.num_tokens for one in expected]
    assert [one.log_probability for one in found] == pytest.approx([one.log_probability for one in expected], abs=CLOSE)
    caplog.clear()
    model.generation_config.renormalize_logits = True
    other = Translator(model, tokenizer=tokenizer, backend="ctranslate2", threads=1)
    assert caplog.text == ""
    assert_same(other(TEXTS, n_best=4), own(TEXTS, n_best=4))


def test_a_beginning_that_is_forced_counts_as_written(tokenizer):
    """By a model that ends as soon as it may."""
    model = new_model(len(tokenizer), output_bias=True).eval()
    with torch.no_grad():
        model.lm_head.bias[tokenizer.eos_token_id] = 50
    model.generation_config.forced_bos_token_id = tokenizer("das")["input_ids"][0]
    own, other = (Translator(model, tokenizer=tokenizer, backend=name) for name in ("engine", "ctranslate2"))
    for least in (0, 1, 2, 5):
        assert other(TEXTS, num_beams=1, min_new_tokens=least) == own(TEXTS, num_beams=1, min_new_tokens=least)


def test_long_lines_are_not_cut(ours, theirs):
    """CTranslate2 itself would cut this one to 1,024 tokens; the last words count, and the positions end at 2,048."""
    long = "half past nine on the fourth of May " * 60
    for text in (long, f"{long} it costs"):
        assert 1_024 < len(ours.tokenizer(text)["input_ids"]) < 2_048
        rows = [one([text], n_best=2, max_source_tokens=4_000, max_new_tokens=4) for one in (theirs, ours)]
        assert_same(*rows)
    divided = []
    options = {"num_beams": 1, "max_new_tokens": 3, "on_division": lambda *which: divided.append(which)}
    theirs(["it", long * 3], max_source_tokens=9_000, **options)
    assert [place for place, _ in divided] == [1], "the table of positions has 2,048 rows"


# ---- What is refused ----
def test_options_that_it_lacks_are_refused_by_name(theirs):
    for options, message in (
        ({"repetition_penalty": 1.2}, "the backend ctranslate2 has no option repetition_penalty; it has num_beams, "),
        ({"eos_token_id": None}, "the backend ctranslate2 has no option eos_token_id"),
        ({"decoder_start_token_id": None}, "the backend ctranslate2 has no option decoder_start_token_id"),
        ({"min_new_tokens": 2}, "min_new_tokens for greedy search only"),
        ({"do_sample": True}, "the backend ctranslate2 has no do_sample: it searches; leave it out"),
        ({"max_new_tokens": 3_000}, "max_new_tokens is 3,000, .* has 2,048 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            theirs(TEXTS, **options)
    with pytest.raises(TypeError, match="there is no option 'gnmt_lenght_penalty'; did you mean 'gnmt_length_penalty'"):
        theirs(TEXTS, gnmt_lenght_penalty=None)


def test_arguments_and_settings_that_make_no_sense(checkpoint, tokenizer):
    for arguments, message in (
        ({"compute_type": "bfloat16"}, r"on cpu with compute_type='bfloat16' \(Requested bfloat16.*; try \"default"),
        ({"dtype": "float16"}, "give compute_type"),
        ({"device": "mps"}, "can't open the model on mps .*unsupported device mps"),
        ({"backend": "ctranslate"}, "backend is 'ctranslate'; choose one of 'engine', 'ctranslate2'"),
    ):
        with pytest.raises(ValueError, match=message):
            Translator(checkpoint, **{"backend": "ctranslate2", "device": "cpu", **arguments})
    for name, value in (("no_repeat_ngram_size", 2), ("bad_words_ids", [[7, 8]])):
        model = new_model(len(tokenizer))
        model.generation_config.update(**{name: value})
        message = f"the model's generation config has {name}={value}; the backend ctranslate2 lacks that"
        with pytest.raises(ValueError, match=re.escape(message)):
            Translator(model, tokenizer=tokenizer, backend="ctranslate2")


def test_a_type_that_the_processor_lacks_is_named(checkpoint, tokenizer, tmp_path):
    lacking = {"int16", "bfloat16", "float16"} - ctranslate2.get_supported_compute_types("cpu")
    for name in sorted(lacking)[:1]:
        model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).eval()
        found = write_ctranslate2(model, tokenizer, tmp_path, quantization=name)[-1]
        assert re.search(f"has no {name}: CTranslate2 computes in (int8_)?float32 here", found)


def test_without_the_package_it_says_how_to_install_it(checkpoint, monkeypatch, vanilla_transformer):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[export\]' in a checkout"):
        Translator(checkpoint, "cpu", backend="ctranslate2")
    code, _, error = vanilla_transformer("translate", "--model", checkpoint, "--backend", "ctranslate2", "it")
    assert (code, error.count("\n")) == (2, 1)


# ---- The processor ----
def test_8_bits(checkpoint, theirs):
    small = Translator(checkpoint, "cpu", "int8", threads=2, backend="ctranslate2")
    assert small.model.dtype.startswith("int8")
    pairs = ["it", "half past nine"], ["es kostet", "halb zehn"]
    found, expected = (score_pairs(one.model, one.tokenizer, *pairs) for one in (small, theirs))
    tolerance = 0.15 if not HAS_VNNI else 0.05  # without VNNI, sums of two large products are cut off
    for one, wanted in zip(found, expected, strict=True):  # weights are rounded to 1/127 of the largest of their row
        assert one.log_probability == pytest.approx(wanted.log_probability, rel=tolerance)
        assert one.log_probability != pytest.approx(wanted.log_probability, rel=1e-4)
    assert small(TEXTS[1]) == small([TEXTS[1]])[0]


# ---- Folders and names ----
def test_an_exported_folder(exported, ours, vanilla_transformer, tmp_path):
    translator = Translator(exported, "cpu", threads=1)
    assert translator.backend == "ctranslate2"
    assert_same(translator(TEXTS, n_best=4), ours(TEXTS, n_best=4))
    with pytest.raises(ValueError, match='is in CTranslate2\'s format; give backend="ctranslate2"'):
        Translator(exported, backend="engine")
    code, output, _ = vanilla_transformer("translate", "--model", exported, "--device", "cpu", *TEXTS[:3])
    assert (code, output.split("\n")[:-1]) == (0, ours(TEXTS[:3]))
    command = ("plot", "attention", "--model", exported, "--source", "it", "--output", tmp_path / "it.png")
    assert "shows no attention weights; give the model itself" in vanilla_transformer(*command).error


def test_an_incomplete_or_mixed_folder_is_refused(exported, tmp_path):
    config = json.loads((exported / "config.json").read_text())
    config.pop("max_position_embeddings")
    tokens = json.loads((exported / "shared_vocabulary.json").read_text())
    tokens[7], tokens[8] = tokens[8], tokens[7]
    files = {"config.json": [config], "generation_config.json": [None], "shared_vocabulary.json": [None, tokens]}
    for file, content in ((file, content) for file, contents in files.items() for content in contents):
        folder = shutil.copytree(exported, tmp_path / "model", dirs_exist_ok=True)
        (folder / file).write_text("[" if content is None else json.dumps(content))
        with pytest.raises(CheckpointError, match="export the model again"):
            Translator(folder, "cpu")


def test_an_exports_searches_end_as_its_generation_config_says(exported, ours, tmp_path, monkeypatch, caplog):
    """With a patience of 1, the quickstart's model lost the ends of 15 of 500 lines."""
    folder = shutil.copytree(exported, tmp_path / "model")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "early_stopping": False}))
    translator = Translator(folder, "cpu")
    assert translator.plan().early_stopping is False
    backend = translator.decodes_with
    pool = Mock(wraps=backend._pool())
    monkeypatch.setattr(backend, "_pool", lambda **_: pool)
    assert_same(translator(TEXTS, n_best=1), ours(TEXTS, n_best=1, early_stopping=False))
    assert pool.translate_batch.call_args.kwargs["patience"] == 2
    for options in ({"early_stopping": True}, {"num_beams": 1}):
        translator(TEXTS, **options)
        assert pool.translate_batch.call_args.kwargs["patience"] == 1
    assert caplog.text == ""


OPUS_MT = {
    "one vocabulary": ({}, {}),
    "two vocabularies": ({"separate_vocabs": True}, {}),
    "several languages": ({"multi_target": True}, {"tgt_lang": ">>fra<<"}),
}


@pytest.mark.parametrize("kind", OPUS_MT)
def test_opus_mt_folders(tmp_path, kind):
    fields, language = OPUS_MT[kind]
    folder = opus_mt_folder(tmp_path / "opus-mt", **fields)
    texts = ["A man is riding a bicycle.", "It costs 3.50 euros, or 1,000 in total!", "The children"]
    own, other = Translator(folder, "cpu", **language), Translator(folder, "cpu", backend="ctranslate2", **language)
    # The last token that fits is the end.
    for options in ({"max_new_tokens": 12}, {"max_new_tokens": 4}, {"max_new_tokens": 12, "prefix": "Ein"}):
        assert other(texts, num_beams=1, **options) == own(texts, num_beams=1, **options)
    few = {"n_best": 1, "max_new_tokens": 12, "early_stopping": True}
    assert_same(other(texts, **few), own(texts, **few))
    if language:
        few = {"num_beams": 1, "max_new_tokens": 12, "tgt_lang": "deu"}
        assert other(texts, **few) == own(texts, **few)
    with pytest.raises(ValueError, match="max_new_tokens=1 leaves no token before the end that is forced; give more"):
        other("A man", max_new_tokens=1, num_beams=1)


# ---- Commands ----
def test_evaluate(checkpoint, tmp_path, vanilla_transformer):
    (tmp_path / "source").write_text("it\nhalf past nine\n\n")
    (tmp_path / "reference").write_text("es\nhalb zehn\n\n")
    records = []
    for name, options in {"engine": (), "ctranslate2": ("--backend", "ctranslate2")}.items():
        files = ("--source", tmp_path / "source", "--reference", tmp_path / "reference", "--json", tmp_path / name)
        assert vanilla_transformer("evaluate", "--model", checkpoint, "--device", "cpu", *files, *options)[0] == 0
        records.append(json.loads((tmp_path / name).read_text()))
    own, other = (record["results"][0] for record in records)
    assert [one["decoding"]["backend"] for one in (own, other)] == ["engine", "ctranslate2"]
    assert other["perplexity"] == pytest.approx(own["perplexity"], rel=1e-4)
    assert other["bleu"] == own["bleu"]
    ensemble = ("--model", checkpoint, checkpoint, "--ensemble", "--backend", "ctranslate2")
    code, _, error = vanilla_transformer("evaluate", *ensemble, "--device", "cpu", *files[:4])
    assert (code, "averaged by the backend ctranslate2" in error) == (2, True)
