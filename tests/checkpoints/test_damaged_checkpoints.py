"""`translate`, `evaluate` and `average` refuse a checkpoint whose weights, configuration or tokenizer are wrong."""

import json
import math
import shutil
from contextlib import nullcontext

import pytest
import torch
from trainer_runs import change_json, change_weights
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import VanillaTransformerTokenizerFast
from hf_vanilla_transformer.checkpoints.loading import load_checkpoint
from hf_vanilla_transformer.errors import CheckpointError

WEIGHTS, CONFIG, DECODING = "model.safetensors", "config.json", "generation_config.json"
WEIGHT = "model.encoder.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (WEIGHTS, {WEIGHT: None}, f"the weights have no {WEIGHT}"),
        (WEIGHTS, {"extra": torch.ones(2)}, "the model has no extra"),
        (WEIGHTS, {WEIGHT: torch.ones(8, 16)}, f"{WEIGHT} is (8, 16), not (16,"),
        (WEIGHTS, {WEIGHT: torch.full((16, 16), math.nan)}, f"{WEIGHT} contains NaN"),
        (CONFIG, {"model_type": "marian"}, "the weights have no model.decoder.layers.0.encoder_attn.k_proj.bias"),
        (CONFIG, {"model_type": "bert"}, "can't load"),
        (CONFIG, {"encoder_layers": 1_000_000}, "at most 1,000 layers"),
        (CONFIG, {"encoder_layers": 3}, "the weights have no model.encoder.layers.2"),
        (CONFIG, {"encoder_layers": 1}, "the model has no model.encoder.layers.1"),
        (CONFIG, {"d_model": 32}, "config.json and the weights don't match"),
        (CONFIG, {"encoder_attention_heads": 3}, "q_proj.weight is (16, 16), not (12, 16)"),
        (CONFIG, {"vocab_size": 10**9}, "can't load"),
        (CONFIG, {"dropout": "much"}, "can't load"),
        (CONFIG, {"eos_token_id": 7}, "eos_token_id is 2 in generation_config.json and 7 in config.json"),
        (CONFIG, {"pad_token_id": 5}, "pad_token_id is 0 in generation_config.json and 5 in config.json"),
        (CONFIG, {"tokenizer_fingerprint": "0123456789abcdef"}, "trained with another tokenizer"),
        (CONFIG, {"is_encoder_decoder": False}, "is_encoder_decoder is false"),
        (CONFIG, {"attn_implementation": "someone/kernel"}, "names code on the Hub"),
        (DECODING, {"eos_token_id": 7}, "eos_token_id is 7 in generation_config.json and 2 in"),
        (DECODING, {"pad_token_id": 17}, "pad_token_id is 17"),
        (DECODING, {"decoder_start_token_id": 9}, "decoder_start_token_id is 9"),
        ("tokenizer_config.json", {"model_max_length": "x"}, "can't load"),
        (
            "tokenizer.json",
            {"normalizer": {"type": "Replace", "pattern": {"String": "n"}, "content": "m"}},
            "trained with another tokenizer",
        ),
    ],
)
def test_what_does_not_fit_is_named(checkpoint, file, changes, message):
    if file == WEIGHTS:
        change_weights(checkpoint, **changes)
    else:
        change_json(checkpoint / file, **changes)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(checkpoint)
    assert message in str(error.value)


def test_commands_refuse_them(vanilla_transformer, checkpoint, tmp_path):
    change_weights(checkpoint, **{WEIGHT: None})
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


def test_a_checkpoint_without_tokenizer_is_refused(vanilla_transformer, checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    error = vanilla_transformer("translate", "--model", checkpoint, "9").error
    assert "there is no tokenizer; save it to the same folder" in error


@pytest.mark.parametrize("file", [CONFIG, "tokenizer.json", "tokenizer_config.json", DECODING])
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
    change_json(checkpoint / CONFIG, tokenizer_fingerprint=None)
    with pytest.raises(CheckpointError, match="the tokenizer has 400 ids, and the model embeddings for 3"):
        load_checkpoint(checkpoint)


def test_many_unused_embeddings_need_a_fingerprint(checkpoint):
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    for rows, error in ((300, nullcontext()), (1000, pytest.raises(CheckpointError, match="1,000, and nothing says"))):
        model.resize_token_embeddings(rows)
        model.save_pretrained(checkpoint)
        load_checkpoint(checkpoint)  # whose fingerprint says that the two belong together
        change_json(checkpoint / CONFIG, tokenizer_fingerprint=None)
        with error:
            load_checkpoint(checkpoint)


def test_training_refuses_a_tokenizer_that_does_not_fit(train, recipe, checkpoint):
    tokenizer_of(len(AutoTokenizer.from_pretrained(checkpoint))).save_pretrained(checkpoint)
    result = train({**recipe, "average_last": 0}, "--model-name-or-path", checkpoint)
    assert result.code == 2
    assert "trained with another tokenizer" in result.error


@pytest.mark.parametrize("changes", [{"merges": []}, {"dropout": 0.9}], ids=str)
def test_a_tokenizer_that_segments_in_another_way(checkpoint, changes):
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    change_json(checkpoint / "tokenizer.json", model=model | changes)
    with pytest.raises(CheckpointError, match="trained with another tokenizer"):
        load_checkpoint(checkpoint)
