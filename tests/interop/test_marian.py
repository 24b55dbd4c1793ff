"""OPUS-MT's models as ours: the yardstick is transformers' MarianMTModel, run beside."""

import json
import os
import re
import shutil

import pytest
import torch
from huggingface_hub import constants
from opus_mt import marian_tokenizer, opus_mt_folder, opus_mt_tokenizer_files
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
)

from hf_vanilla_transformer import Translator, engine
from hf_vanilla_transformer.checkpoints.loading import load_checkpoint, load_model
from hf_vanilla_transformer.interop.convert import convert, recognise
from hf_vanilla_transformer.interop.marian import from_marian, opus_mt_tokenizer

PAD = 30
# Where all sizes differ from one another, no axis can be taken for another.
SIZES = {
    "vocab_size": 41, "d_model": 8, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 5, "decoder_ffn_dim": 6, "max_position_embeddings": 50,
}  # fmt: skip
SEPARATE = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 37}
VARIANTS = {
    "shared": {},
    "two vocabularies": SEPARATE,
    "two vocabularies, untied output": {**SEPARATE, "tie_word_embeddings": False},
    "unscaled embeddings": {"scale_embedding": False},
    "gelu": {"activation_function": "gelu"},
    "wider": {"d_model": 24, "encoder_attention_heads": 3},
}


def marian_model(**fields):
    """A random model whose translations depend on the source, with OPUS-MT's settings of decoding."""
    tokens = {"pad_token_id": PAD, "decoder_start_token_id": PAD, "eos_token_id": 0, "forced_eos_token_id": 0}
    usual = {**SIZES, **tokens, "activation_function": "swish", "scale_embedding": True, "init_std": 0.7}
    model = MarianMTModel(MarianConfig(**{**usual, "dropout": 0.0, **fields})).eval()
    with torch.no_grad():
        model.final_logits_bias.normal_()
        for embeddings in {model.model.encoder.embed_tokens, model.model.decoder.embed_tokens}:
            embeddings.weight[PAD] = 0
    settings = {"bad_words_ids": [[PAD]], "num_beams": 4, "max_length": 30, "renormalize_logits": True}
    model.generation_config = GenerationConfig(**tokens, **settings)
    return model


def batch():
    """Sources and targets that are padded on the right."""
    torch.manual_seed(1)
    ids, labels = torch.randint(1, PAD, (4, 9)), torch.randint(1, PAD, (4, 7))
    for row, (source, target) in enumerate([(9, 5), (4, 7), (7, 1), (1, 3)]):
        ids[row, source - 1], labels[row, target - 1] = 0, 0
        ids[row, source:], labels[row, target:] = PAD, -100
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": labels}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An OPUS-MT repository's files."""
    torch.manual_seed(0)
    path = opus_mt_folder(tmp_path_factory.mktemp("opus") / "opus-mt-en-de")
    metadata = "language:\n- en\n- de\nlicense: cc-by-4.0\ntags:\n- translation"
    (path / "README.md").write_text(f"---\n{metadata}\n---\n# opus-mt-en-de\n")
    return path


@pytest.fixture(scope="module")
def converted(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("converted") / "model"
    convert(folder, output)
    return output


@pytest.fixture
def copy_of(folder, tmp_path):
    """Files of their own, to be edited."""
    return shutil.copytree(folder, tmp_path / "copy")


# ---- the model ----
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_loss_and_gradients(variant):
    """The same operations in the same order: no rounding differs, and 1e-5 leaves room for another processor's."""
    theirs = marian_model(**VARIANTS[variant])
    ours, tokenizer = from_marian(theirs)
    assert tokenizer is None
    assert not ours.training
    expected, found = theirs(**batch()), ours(**batch())
    assert torch.allclose(found.logits, expected.logits, rtol=0, atol=1e-5)
    assert found.loss.item() == pytest.approx(expected.loss.item(), abs=1e-5)
    expected.loss.backward()
    found.loss.backward()
    compared = 0
    for name, parameter in ours.named_parameters():
        if name == "lm_head.bias":  # Marian's is no parameter
            continue
        twin = name.replace(".feed_forward.", ".")  # parameters that are tied have the first one's name
        if twin == "model.encoder.embed_tokens.weight" and ours.config.share_encoder_decoder_embeddings:
            twin = "model.shared.weight"
        gradient = dict(theirs.named_parameters())[twin].grad
        assert torch.allclose(parameter.grad, gradient, rtol=0, atol=1e-5), name
        compared += 1
    assert compared == len(list(ours.parameters())) - 1


@pytest.mark.parametrize("variant", ["shared", "two vocabularies"])
def test_decoding_is_marians(variant):
    theirs = marian_model(**VARIANTS[variant])
    ours, _ = from_marian(theirs)
    assert engine.unsupported_reason(ours) is None
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    for options in ({"num_beams": 1}, {}, {"length_penalty": 0.4}):
        expected = theirs.generate(**inputs, **options)
        assert torch.equal(ours.generate(**inputs, **options), expected)
        assert len({tuple(row) for row in expected.tolist()}) > 1  # translations depend on the source


def test_the_papers_decoding_is_not_taken_over(converted):
    for model in (from_marian(marian_model())[0], AutoModelForSeq2SeqLM.from_pretrained(converted)):
        settings = model.generation_config.to_dict()
        ours = ("gnmt_length_penalty", "max_extra_length", "early_stopping")
        assert not any(settings.get(name) for name in ours)
        assert (settings["num_beams"], settings["forced_eos_token_id"]) == (4, 0)
        assert settings["bad_words_ids"] == [[model.config.pad_token_id]]


def test_the_type_of_the_weights_is_kept():
    theirs = marian_model().to(torch.bfloat16)
    ours, _ = from_marian(theirs)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert torch.equal(ours.model.encoder.embed_tokens.weight, theirs.model.shared.weight)
    exact = marian_model()  # its positional table isn't rounded
    exact.load_state_dict({n: v.float() for n, v in theirs.state_dict().items() if "positions" not in n}, strict=False)
    expected = exact(**batch()).logits
    assert torch.allclose(ours.float()(**batch()).logits, expected, rtol=0, atol=1e-5)


# ---- files ----
def _as_bin(path, **options):
    """Saves the weights in PyTorch's format, as many repositories have them."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    tensors = {**tensors, "lm_head.weight": tensors["model.shared.weight"]}
    table = MarianMTModel(MarianConfig.from_pretrained(path)).model.encoder.embed_positions.weight
    tensors |= {f"model.{stack}.embed_positions.weight": table.detach() for stack in ("encoder", "decoder")}
    torch.save(tensors, path / "pytorch_model.bin", **options)


def _old_configuration(path):
    """Before there was generation_config.json, config.json had its fields."""
    config = json.loads((path / "config.json").read_text())
    config |= {"num_beams": 6, "bad_words_ids": [[config["pad_token_id"]]], "max_length": 512, "length_penalty": 0.7}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").unlink()


FILES = {
    "safetensors": lambda path: None,
    "PyTorch before 1.6": lambda path: _as_bin(path, _use_new_zipfile_serialization=False),
    "old configuration": _old_configuration,
}


@pytest.mark.parametrize("kind", FILES)
def test_folders(kind, copy_of):
    FILES[kind](copy_of)
    assert recognise(copy_of) == "marian"
    theirs = MarianMTModel.from_pretrained(copy_of)
    ours, tokenizer = from_marian(copy_of)
    inputs = tokenizer(["A man is riding a bicycle.", "Two girls"], padding=True, return_tensors="pt")
    decoder_input_ids = torch.tensor([[theirs.config.pad_token_id, 5, 7]] * 2)
    expected = theirs(**inputs, decoder_input_ids=decoder_input_ids).logits
    assert torch.equal(ours(**inputs, decoder_input_ids=decoder_input_ids).logits, expected)
    settings = ("num_beams", "bad_words_ids", "max_length", "length_penalty", "forced_eos_token_id")
    for name in settings:
        assert getattr(ours.generation_config, name) == getattr(theirs.generation_config, name), name
    short = {"max_length": 9}  # untrained, they go on to the longest length there is
    assert torch.equal(ours.generate(**inputs, **short), theirs.generate(**inputs, **short))


def _edit(path, **changes):
    """Changes tensors: a value of None removes one."""
    tensors = {**load_file(path / "model.safetensors"), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, path / "model.safetensors")


def _config(path, **fields):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def _other_ids(path):
    vocabulary = json.loads((path / "vocab.json").read_text())
    (path / "vocab.json").write_text(json.dumps({token: 2 * number for token, number in vocabulary.items()}))


NORM = "model.encoder.layers.1.final_layer_norm.weight"
TABLE, OUTPUT = "model.encoder.embed_positions.weight", "lm_head.weight"
DAMAGE = {
    "missing tensors": (lambda path: _edit(path, **{NORM: None}), f"the weights have no {NORM}"),
    "another table": (
        lambda path: _edit(path, **{TABLE: torch.rand(512, 16)}),
        "the positional tables are not those of position_encoding='marian'",
    ),
    "untied": (
        lambda path: _edit(path, **{OUTPUT: 2 * load_file(path / "model.safetensors")["model.shared.weight"]}),
        "config.json says that model.shared.weight and lm_head.weight are one matrix, and they differ",
    ),
    "FSMT": (
        lambda path: _config(path, model_type="fsmt"),
        "a tokenizer of the class None, which needs code of its own; convert without it",
    ),
    "ONNX": (
        lambda path: (path / "model.safetensors").rename(path / "encoder_model.onnx"),
        "is in ONNX's format, for onnxruntime; give the model that it was exported from",
    ),
    "ours": (lambda path: _config(path, model_type="vanilla_transformer"), "already"),
    "another tokenizer": (_other_ids, r"the tokenizer's pad_token_id is \d+ and the model's \d+"),
    "a wrong field": (lambda path: _config(path, d_model="many"), "Field 'd_model' expected int"),
    "half of config.json": (lambda path: (path / "config.json").write_text('{"model_type": "mar'), "cut short"),
    "half of the weights": (
        lambda path: os.truncate(path / "model.safetensors", 5000),
        "Error while deserializing header",
    ),
    "settings that only warned in transformers 4": (
        lambda path: (path / "generation_config.json").write_text('{"num_beams": 1, "early_stopping": true}'),
        "correct generation_config.json: .* unset `early_stopping`",
    ),
    "half of source.spm": (lambda path: os.truncate(path / "source.spm", 500), "the tokenizer can't be opened"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_nothing_is_written(kind, copy_of, tmp_path, vanilla_transformer):
    damage, message = DAMAGE[kind]
    damage(copy_of)
    result = vanilla_transformer("convert", copy_of, "--output", tmp_path / "model")
    assert result.code == 2
    assert re.search(message, result.error)
    assert [*tmp_path.iterdir()] == [copy_of]


# ---- converted checkpoints ----
def test_a_converted_checkpoint(folder, converted):
    tokenizer, _ = load_checkpoint(converted)
    theirs, their_tokenizer = MarianMTModel.from_pretrained(folder), marian_tokenizer(folder)
    texts = ["A man is riding a bicycle.", "Two young girls are playing football.", "Who?"]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    assert torch.equal(inputs["input_ids"], their_tokenizer(texts, padding=True, return_tensors="pt")["input_ids"])
    ours, own = AutoModelForSeq2SeqLM.from_pretrained(converted), AutoTokenizer.from_pretrained(converted)
    expected = theirs.generate(**inputs, max_length=30)
    assert torch.equal(ours.generate(**inputs, max_length=30), expected)
    found, wanted = (one.batch_decode(expected, skip_special_tokens=True) for one in (own, their_tokenizer))
    assert found == wanted
    assert ours.config.tokenizer_fingerprint
    card = (converted / "README.md").read_text()
    lines = ("license: cc-by-4.0", "language:\n- en\n- de", "library_name: transformers", "pipeline_tag: translation")
    assert all(line in card for line in (*lines, "converted by hf_vanilla_transformer"))
    assert re.search(r'AutoModelForSeq2SeqLM\.from_pretrained\("(\./|/).*model"\)', card)  # no name on the Hub
    assert (converted / "modeling_vanilla_transformer.py").is_file()


def test_a_special_token_with_two_ids(tmp_path, caplog):
    folder = opus_mt_tokenizer_files(tmp_path / "two", separate_vocabs=True)
    opus_mt_tokenizer(folder)
    assert "MarianTokenizer leaves" in caplog.text
    target = json.loads((folder / "target_vocab.json").read_text(encoding="utf-8"))
    target["</s>"], target["<unk>"] = target["<unk>"], target["</s>"]
    (folder / "target_vocab.json").write_text(json.dumps(target))
    with pytest.raises(ValueError, match=r"</s> has different ids in vocab.json and target_vocab.json"):
        opus_mt_tokenizer(folder)


def test_half_precision_becomes_single_precision_on_a_cpu(copy_of):
    MarianMTModel.from_pretrained(copy_of).half().save_pretrained(copy_of)
    assert from_marian(copy_of)[0].dtype == torch.float16
    translator, exact = Translator(copy_of), MarianMTModel.from_pretrained(copy_of, dtype=torch.float32)
    assert translator.model.dtype == torch.float32
    inputs = translator.tokenizer(["A man is riding a bicycle."], return_tensors="pt")
    found, expected = (one.generate(**inputs, max_length=9) for one in (translator.model, exact))
    assert torch.equal(found, expected)
    assert Translator(copy_of, dtype=torch.float16).model.dtype == torch.float16


def test_without_a_tokenizer(copy_of, tmp_path):
    (copy_of / "source.spm").unlink()
    notes = convert(copy_of, tmp_path / "model", with_tokenizer=False)
    assert notes == ("no tokenizer is written: save yours beside the model",)
    assert load_model(tmp_path / "model").config.tokenizer_fingerprint is None


# ---- where it is written ----
def test_a_name_on_the_hub(folder, tmp_path, monkeypatch):
    """Without a network, the files of an earlier download count; the layout is the Hub client's."""
    name, commit = "Helsinki-NLP/opus-mt-en-de", "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--Helsinki-NLP--opus-mt-en-de"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model, tokenizer = from_marian(name)
    assert model.config.vocab_size == len(tokenizer)
    convert(name, tmp_path / "model")
    assert f"base_model: {name}\n" in (tmp_path / "model" / "README.md").read_text()
