"""`translate`, `evaluate` and `average` refuse a checkpoint whose weights, configuration or tokenizer are wrong."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import VanillaTransformerTokenizerFast
from hf_vanilla_transformer.checkpoints.loading import load_checkpoint
from hf_vanilla_transformer.errors import CheckpointError

DECODING = "generation_config.json"
WEIGHT = "model.encoder.layers.0.self_attn.q_proj.weight"


def change_weights(checkpoint: Path, change) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})


def change_config(checkpoint: Path, name: str = "config.json", **fields) -> None:
    config = json.loads((checkpoint / name).read_text())
    (checkpoint / name).write_text(json.dumps({**config, **fields}))


DAMAGES = {
    "missing": (lambda weights: weights.pop(WEIGHT), f"the weights have no {WEIGHT}"),
    "unknown": (lambda weights: weights.update(extra=torch.ones(2)), "the model has no extra"),
    "shape": (lambda weights: weights.update({WEIGHT: weights[WEIGHT][:8].clone()}), f"{WEIGHT} is (8, 16), not (16,"),
    "NaN": (lambda weights: weights[WEIGHT].fill_(float("nan")), f"{WEIGHT} contains NaN"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_wrong_weights_are_named(checkpoint, damage):
    change, message = DAMAGES[damage]
    change_weights(checkpoint, change)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(checkpoint)
    assert message in str(error.value)


def test_commands_refuse_them(vanilla_transformer, checkpoint, tmp_path):
    change_weights(checkpoint, DAMAGES["missing"][0])
    (lines := tmp_path / "lines").write_text("nine 3\n")
    shutil.copytree(checkpoint, tmp_path / "other")
    average = ("average", "--output", tmp_path / "mean", "--checkpoints", checkpoint)
    for command in (
        ("translate", "--model", checkpoint, "nine 3"),
        ("evaluate", "--model", checkpoint, "--source", lines, "--reference", lines),
        average,
        (*average, tmp_path / "other"),
    ):
        result = vanilla_transformer(*command)
        assert (result.code, result.out) == (2, "")
        assert WEIGHT in result.error
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "marian"}, "the weights have no model.decoder.layers.0.encoder_attn.k_proj.bias"),
        ({"model_type": "bert"}, "can't load"),
        ({"model_type": None}, "can't load"),
        ({"encoder_layers": 1_000_000}, "at most 1,000 layers"),
        ({"encoder_layers": 3}, "the weights have no model.encoder.layers.2"),
        ({"encoder_layers": 1}, "the model has no model.encoder.layers.1"),
        ({"d_model": 32}, "config.json and the weights don't match"),
        ({"encoder_attention_heads": 3}, "q_proj.weight is (16, 16), not (12, 16)"),
        ({"vocab_size": 10**9}, "can't load"),
        ({"dropout": "much"}, "can't load"),
        ({"eos_token_id": 7}, "eos_token_id is 2 in generation_config.json and 7 in config.json"),
        ({"pad_token_id": 5}, "pad_token_id is 0 in generation_config.json and 5 in config.json"),
        ({"tokenizer_fingerprint": "0123456789abcdef"}, "trained with another tokenizer"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder is false"),
        ({"attn_implementation": "someone/kernel"}, "names code on the Hub"),
        ({"name": DECODING, "eos_token_id": 7}, "eos_token_id is 7 in generation_config.json and 2 in"),
        ({"name": DECODING, "pad_token_id": 17}, "pad_token_id is 17"),
        ({"name": DECODING, "decoder_start_token_id": 9}, "decoder_start_token_id is 9"),
        ({"name": "tokenizer_config.json", "model_max_length": "x"}, "can't load"),
    ],
)
def test_another_configuration_is_refused(checkpoint, fields, message):
    change_config(checkpoint, **fields)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(checkpoint)
    assert message in str(error.value)


def test_a_checkpoint_without_tokenizer_is_refused(vanilla_transformer, checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    error = vanilla_transformer("translate", "--model", checkpoint, "9").error
    assert "there is no tokenizer; save it to the same folder" in error


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_damaged_json_is_one_line(vanilla_transformer, checkpoint, file):
    for content in (b"", b"[]", b"\xff\xfe", b'{"model_type": "vanilla'):
        (checkpoint / file).write_bytes(content)
        result = vanilla_transformer("translate", "--model", checkpoint, "nine 3")
        assert (result.code, result.out) == (2, ""), result.err
        assert str(checkpoint) in result.error


# ---- Tokenizers ----
def tokenizer_of(size: int) -> VanillaTransformerTokenizerFast:
    texts = [f"wort {number} {chr(97 + number % 26) * 3}" for number in range(3000)]
    return VanillaTransformerTokenizerFast.train_from_iterator(texts, vocab_size=size, show_progress=False)


def test_a_tokenizer_with_more_ids_is_refused(checkpoint):
    tokenizer_of(400).save_pretrained(checkpoint)
    change_config(checkpoint, tokenizer_fingerprint=None)
    with pytest.raises(CheckpointError, match="the tokenizer has 400 ids, and the model embeddings for 3"):
        load_checkpoint(checkpoint)


def test_many_unused_embeddings_need_a_fingerprint(checkpoint):
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    for rows, error in ((300, nullcontext()), (1000, pytest.raises(CheckpointError, match="1,000, and nothing says"))):
        model.resize_token_embeddings(rows)
        model.save_pretrained(checkpoint)
        load_checkpoint(checkpoint)  # whose fingerprint says that the two belong together
        change_config(checkpoint, tokenizer_fingerprint=None)
        with error:
            load_checkpoint(checkpoint)


def test_training_refuses_a_tokenizer_that_does_not_fit(train, recipe, checkpoint, tmp_path):
    size = len(AutoTokenizer.from_pretrained(checkpoint))
    tokenizer_of(size).save_pretrained(checkpoint)
    result = train({**recipe, "average_last": 0}, "--model-name-or-path", checkpoint)
    assert result.code == 2
    assert "trained with another tokenizer" in result.error


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("normalizer", {"type": "Replace", "pattern": {"String": "n"}, "content": "m"}),
        ("model", {"merges": []}),
        ("model", {"dropout": 0.9}),
    ],
)
def test_a_tokenizer_that_segments_in_another_way(checkpoint, part, changes):
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokenizer[part] = {**tokenizer[part], **changes} if part == "model" else changes
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="trained with another tokenizer"):
        load_checkpoint(checkpoint)


# ---- Code that comes with a checkpoint ----
@pytest.fixture
def planted(checkpoint, tmp_path):
    """A checkpoint whose own code would leave a file behind, in every place where transformers looks for code."""
    marker = tmp_path / "it-ran"
    code = f"open({str(marker)!r}, 'w').close()\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py"):
        (checkpoint / name).write_text(code + "class Evil: pass\n")
    (checkpoint / "custom_generate").mkdir()
    (checkpoint / "custom_generate" / "generate.py").write_text(code + "def generate(*args, **kwargs): pass\n")
    auto_map = {"AutoConfig": "configuration_evil.Evil", "AutoModelForSeq2SeqLM": "modeling_evil.Evil"}
    change_config(checkpoint, auto_map=auto_map)
    tokenizer = json.loads((checkpoint / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "tokenization_evil.Evil"]}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return checkpoint, marker


@pytest.mark.parametrize("model_type", ["vanilla_transformer", "evil"])
@pytest.mark.parametrize("name", ["translate", "train"])
def test_code_never_runs(vanilla_transformer, train, recipe, planted, monkeypatch, model_type, name):
    """Nor is anybody asked whether it may."""
    checkpoint, marker = planted
    change_config(checkpoint, model_type=model_type)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the command asked a question"))
    if name == "translate":
        result = vanilla_transformer("translate", "--model", checkpoint, "nine 3")
    else:
        result = train({**recipe, "average_last": 0}, "--model-name-or-path", checkpoint)
    assert not marker.exists()
    if model_type == "evil":
        assert result.code == 2
        assert "--trust-remote-code" in result.error
    else:
        assert result.code == 0, result.err  # the installed classes are used, as for any checkpoint of this type


def test_code_runs_where_it_is_trusted(vanilla_transformer, planted):
    checkpoint, marker = planted
    change_config(checkpoint, model_type="evil")
    result = vanilla_transformer("translate", "--model", checkpoint, "--trust-remote-code", "nine 3")
    assert result.code == 2  # its class is no model
    assert marker.exists()
