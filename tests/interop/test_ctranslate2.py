"""Our models in CTranslate2: greedy search, beam search and log-probabilities beside ours."""

import copy
import json

import pytest
import torch
from opus_mt import TEXTS, opus_mt_folder
from unlike import PRE, UNSHARED, small_model

from hf_vanilla_transformer import VanillaTransformerTokenizerFast
from hf_vanilla_transformer.checkpoints.loading import load_checkpoint
from hf_vanilla_transformer.engine.decoding.linear import HAS_VNNI
from hf_vanilla_transformer.interop.convert import convert
from hf_vanilla_transformer.interop.ctranslate2_settings import never_chosen
from hf_vanilla_transformer.plan_vanilla_transformer import Plan

ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 isn't installed")
from hf_vanilla_transformer.interop import ctranslate2 as exporter  # noqa: E402

ONE = {"decoder_vocab_size": None, "share_encoder_decoder_embeddings": True}
VARIANTS = {
    "post-norm": {},
    "post-norm with final norms": {"final_layer_norm": True},
    "pre-norm": {"norm_position": "pre"},
    "pre-norm with final norms": PRE,
    "epsilon": {"layer_norm_eps": 0.1},
    "tensor2tensor": {"position_encoding": "tensor2tensor"},
    "fairseq": {"position_encoding": "fairseq"},
    "marian": {"position_encoding": "marian"},
    "learned": {"position_encoding": "learned"},
    "biases": {"attention_bias": True, "output_bias": True},
    "unscaled": {"scale_embedding": False},
    "untied": {"tie_word_embeddings": False},
    "one vocabulary": ONE,
    "one vocabulary, untied": {**ONE, "tie_word_embeddings": False, "output_bias": True},
    "wide heads": {"head_dim": 11, "value_head_dim": 11, "attention_bias": True},
    **{name: {"activation_function": name} for name in ("gelu", "gelu_new", "quick_gelu", "silu", "sigmoid", "tanh")},
}


@pytest.fixture(scope="module")
def tokenizer():
    texts = TEXTS["source"] + TEXTS["target"]
    return VanillaTransformerTokenizerFast.train_from_iterator(texts, vocab_size=320, show_progress=False)


def make_model(tokenizer, **fields):
    """Random weights; more rows than tokens, and not as many on both sides."""
    rows = {"vocab_size": len(tokenizer) + 5, "decoder_vocab_size": len(tokenizer) + 3}
    return sharpened(small_model(**{**rows, **UNSHARED, **fields}))


@torch.no_grad()
def sharpened(model):
    """Makes the output depend on each weight and on the source, with clear winners: rounding may decide a tie."""
    decoder = model.model.decoder
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter += 0.3 * torch.randn_like(parameter)
    for layer in decoder.layers:
        layer.encoder_attn.v_proj.weight *= 3
    last = decoder.layer_norm if model.config.final_layer_norm else decoder.layers[-1].final_layer_norm
    if model.config.final_layer_norm or model.config.norm_position == "post":
        last.weight *= 4
    return model


def compare(model, tokenizer, folder):
    """Compares greedy search, beam search with length^alpha, and the log-probabilities of what was found."""
    texts = TEXTS["source"][:4]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    source, target = (_vocabulary(folder, side) for side in ("source", "target"))
    tokens = [
        [source[n] for n in ids[mask.bool()].tolist()]
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    theirs = ctranslate2.Translator(str(folder), intra_threads=1)
    barred = never_chosen(Plan.of({}, model.generation_config), target) or None
    limits = {"max_decoding_length": 14, "min_decoding_length": 0, "suppress_sequences": barred}
    searches = [
        ({"num_beams": 1}, {"beam_size": 1}),
        ({"num_beams": 3, "length_penalty": 0.7, "early_stopping": True}, {"beam_size": 3, "length_penalty": 0.7}),
    ]
    for ours, settings in searches:
        ids = model.generate(**inputs, **ours, max_new_tokens=14, forced_eos_token_id=None)
        ids = [_ended(row, model.generation_config.eos_token_id) for row in ids.tolist()]
        found = [one.hypotheses[0] for one in theirs.translate_batch(tokens, **settings, **limits)]
        assert found == [[target[n] for n in row] for row in ids]
    scores = theirs.score_batch(tokens, found)
    end = model.generation_config.eos_token_id
    labels = torch.nn.utils.rnn.pad_sequence([torch.tensor([*row, end]) for row in ids], True, -100)
    logs, of_other_sources = (
        _log_probabilities(model, {name: value.roll(shift, 0) for name, value in inputs.items()}, labels)
        for shift in (0, 1)
    )
    assert ((of_other_sources - logs).abs() * (labels >= 0)).max() > 0.1
    for row, (own, score) in enumerate(zip(logs, scores, strict=True)):
        torch.testing.assert_close(own[: len(ids[row]) + 1], torch.tensor(score.log_probs), rtol=1e-6, atol=1e-4)


@torch.no_grad()
def _log_probabilities(model, inputs, labels):
    logits = model(**inputs, labels=labels).logits
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]


def _vocabulary(folder, side):
    files = [folder / f"{name}_vocabulary.json" for name in (side, "shared")]
    return json.loads(next(file for file in files if file.is_file()).read_text(encoding="utf-8"))


def _ended(row, end):
    return row[1 : row.index(end, 1)] if end in row[1:] else row[1:]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_translations_and_log_probabilities(tokenizer, tmp_path, variant):
    model = make_model(tokenizer, **VARIANTS[variant])
    exporter.write_ctranslate2(model, tokenizer, tmp_path)
    compare(model, tokenizer, tmp_path)


@pytest.mark.parametrize("separate", [False, True], ids=["one vocabulary", "two vocabularies"])
def test_opus_mt(tmp_path, separate):
    convert(opus_mt_folder(tmp_path / "marian", separate_vocabs=separate), tmp_path / "ours")
    tokenizer, model = load_checkpoint(tmp_path / "ours")
    (tmp_path / "out").mkdir()
    pad = model.config.pad_token_id
    sharpened(model)
    with torch.no_grad():
        model.lm_head.bias[pad] = 30.0  # it would be chosen everywhere
    notes = exporter.write_ctranslate2(model, tokenizer, tmp_path / "out")
    compare(model, tokenizer, tmp_path / "out")
    assert any("source_vocabulary.json" in note for note in notes) is separate
    if not separate:
        names = _vocabulary(tmp_path / "out", "source")
        assert tokenizer.convert_ids_to_tokens(range(len(names))) == names
        assert tokenizer.convert_tokens_to_ids(names) == list(range(len(names)))


@pytest.mark.parametrize("quantization", ["int8", "float16", None], ids=["int8", "float16", "a model in float16"])
def test_quantizations(tokenizer, tmp_path, quantization):
    """8 and 16 bits translate; how well they do is measured on real models."""
    model, sizes = make_model(tokenizer, encoder_layers=2, decoder_layers=3), []
    for number, kind in enumerate((None, quantization)):
        (folder := tmp_path / str(number)).mkdir()
        given = copy.deepcopy(model).half() if number and quantization is None else model
        before = copy.deepcopy(given.state_dict())
        exporter.write_ctranslate2(given, tokenizer, folder, quantization=kind)
        sizes.append((folder / "model.bin").stat().st_size)
        assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    assert sizes[1] < 0.9 * sizes[0]
    computed = "int8" if quantization == "int8" else "float32"
    theirs = ctranslate2.Translator(str(folder), compute_type=computed, intra_threads=1)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("A man is riding a bicycle.")["input_ids"])
    (score,) = theirs.score_batch([tokens], [tokens[:5]])
    labels = torch.tensor([tokenizer.convert_tokens_to_ids([*tokens[:5], "</s>"])])
    own = model(torch.tensor([tokenizer.convert_tokens_to_ids(tokens)]), labels=labels).logits.log_softmax(-1)
    expected = own.gather(-1, labels[..., None])[0, :, 0]
    of_int8 = 3.0 if not HAS_VNNI else 0.5  # without VNNI, sums of two large products are cut off
    tolerance = of_int8 if computed == "int8" else 0.02
    torch.testing.assert_close(torch.tensor(score.log_probs), expected, rtol=0, atol=tolerance)


def test_notes_say_what_the_files_dont_hold(tokenizer, tmp_path):
    model = make_model(tokenizer)
    settings = {"bad_words_ids": [[7], [5, 6]], "suppress_tokens": [9], "eos_token_id": [2, 4], "max_new_tokens": 30}
    model.generation_config.update(**settings, forced_bos_token_id=0, repetition_penalty=1.5)
    model.generation_config.update(do_sample=True, sequence_bias=[[[3], 2.0]], use_cache=False)
    notes = "\n".join(exporter.write_ctranslate2(model, tokenizer, tmp_path))
    assert "translate_batch: beam_size=4, " in notes
    assert "max_decoding_length=30" in notes
    barred = [[tokenizer.convert_ids_to_tokens(token)] for token in (7, 9)]
    assert f"suppress_sequences={barred!r}" in notes
    for words in (
        "bad_words_ids=[[7], [5, 6]]", "do_sample=True", "eos_token_id=[2, 4]", "forced_bos_token_id=0",
        "gnmt_length_penalty=0.6", "repetition_penalty=1.5", "sequence_bias=[[[3], 2.0]]",
    ):  # fmt: skip
        assert words in notes
    assert "early_stopping" not in notes
    assert "patience" not in notes
    model.generation_config.update(max_new_tokens=None, max_length=40, early_stopping=False)
    assert "max_decoding_length=39" in exporter.notes(model, [])[1]
    assert "patience=2" in exporter.notes(model, [])[1]


# ---- the command ----
def test_the_command(vanilla_transformer, tiny_checkpoint, tmp_path):
    output = tmp_path / "out"
    arguments = ["export", "--model", tiny_checkpoint, "--to", "ctranslate2", "--output", output]
    code, out, err = vanilla_transformer(*arguments, "--quantization", "int8")
    assert (code, err) == (0, "")
    assert out.startswith(f"exported {tiny_checkpoint} into {output}\nnote: ")
    assert "gnmt_length_penalty=0.6" in out
    assert ctranslate2.Translator(str(output)).compute_type.startswith("int8")
    code, _, err = vanilla_transformer("export", "--model", output, "--to", "stock", "--output", tmp_path / "again")
    assert (code, "is in CTranslate2's format; give the model that it was exported from" in err) == (2, True)
