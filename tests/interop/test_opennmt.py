"""OpenNMT-py's models as ours."""

import argparse

import pytest
import torch
from plain_reference import assert_variant, random_weights
from safetensors.torch import save_file

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.interop import opennmt
from hf_vanilla_transformer.interop.convert import recognise
from hf_vanilla_transformer.interop.interface import ConversionOptions

WIDTH, INNER, ENCODER, DECODER = 12, 10, 2, 3
SPECIAL = ["<unk>", "<blank>", "<s>", "</s>"]
VOCABULARY = {"src": [*SPECIAL, *(f"s{i}" for i in range(19))], "tgt": [*SPECIAL, *(f"t{i}" for i in range(15))]}
LUT = "embeddings.make_embedding.emb_luts.0"
ROLES = {
    "source": f"encoder.{LUT}", "target": f"decoder.{LUT}", "output": "generator",
    "encoder": "encoder.transformer.{}", "decoder": "decoder.transformer_layers.{}",
    "attention": ("linear_query", "linear_keys", "linear_values", "final_linear"),
    "feed_forward": ("feed_forward.w_1", "feed_forward.w_2"), "own": ("self_attn", "self_attn"),
    "cross": "context_attn", "encoder_norms": ("layer_norm", "feed_forward.layer_norm"),
    "decoder_norms": ("layer_norm_1", "layer_norm_2", "feed_forward.layer_norm"),
}  # fmt: skip


def options(**changes):
    usual = {
        "encoder_type": "transformer", "decoder_type": "transformer", "heads": 3, "enc_layers": ENCODER,
        "dec_layers": DECODER, "hidden_size": WIDTH, "enc_hid_size": WIDTH, "dec_hid_size": WIDTH,
        "transformer_ff": INNER, "position_encoding": True, "position_encoding_type": "SinusoidalInterleaved",
        "max_relative_positions": 0, "self_attn_type": "scaled-dot", "layer_norm": "standard", "norm_eps": 1e-6,
        "pos_ffn_activation_fn": "relu", "add_qkvbias": False, "add_ffnbias": True, "dropout": [0.1],
        "attention_dropout": [0.2], "copy_attn": False, "lora_layers": [], "quant_layers": [], "layers": -1,
    }  # fmt: skip
    return argparse.Namespace(**{**usual, **changes})


def checkpoint(*, biased=False, vocabulary=VOCABULARY, **changes):
    """Random weights in OpenNMT-py's layout."""
    rows = [len(vocabulary[side]) for side in ("src", "tgt")]
    tensors = random_weights(ROLES, rows, WIDTH, (INNER, INNER), (ENCODER, DECODER), attention_bias=biased)
    output = {"weight": torch.randn(rows[1], WIDTH), "bias": torch.randn(rows[1])}
    return {
        "model": tensors,
        "generator": output,
        "vocab": {**vocabulary, "data_task": "seq2seq", "decoder_start_token": "<s>"},
        "opt": options(add_qkvbias=biased, **changes),
        "optim": {"training_step": 7, "optimizer": {"state": {}}},
    }


def load(value, tmp_path):
    torch.save(value, tmp_path / "model_step_7.pt")
    assert recognise(tmp_path / "model_step_7.pt") == "opennmt"
    return opennmt.load(tmp_path / "model_step_7.pt", ConversionOptions(with_tokenizer=False)).model


def test_its_tokenizer(tmp_path):
    """Sources have no end; files are those of the options."""
    value = checkpoint(transforms=["bpe", "filtertoolong"], src_subword_model="data/s.codes", tgt_subword_model=None)
    (tmp_path / "s.codes").write_text("#version: 0.2\n" + "".join(f"{s} {n}</w>\n" for s in "st" for n in range(9)))
    torch.save(value, tmp_path / "model_step_7.pt")
    made = opennmt.load(tmp_path / "model_step_7.pt", ConversionOptions())
    assert made.tokenizer("s1 s2 s3")["input_ids"] == [5, 6, 7]
    assert made.tokenizer(text_target="t1 t2 x")["input_ids"] == [5, 6, 0, 3]
    assert (made.tokenizer.pad_token_id, made.tokenizer.eos_token_id) == (1, 3)
    translator, greedy = Translator(made.model, tokenizer=made.tokenizer), {"num_beams": 1, "max_new_tokens": 5}
    found = translator(["s1 s2", "", "s3 s4 s5 s6"], **greedy)
    assert [found[1], found[0]] == ["", translator("s1 s2", **greedy)]
    ids = made.model.generate(torch.tensor([[5, 6]]), **greedy)[0].tolist()
    assert found[0] == " ".join(VOCABULARY["tgt"][n] for n in ids if n > 3)


def all_tensors(value):
    return {**value["model"], **{f"generator.{name}": one for name, one in value["generator"].items()}}


@pytest.mark.parametrize("variant", ["plain", "biased", "gelu", "concatenated", "eps", "tied", "shared", "safetensors"])
def test_logits_and_decoding(variant, tmp_path):
    changes = {
        "gelu": {"pos_ffn_activation_fn": "gelu"},
        "concatenated": {"position_encoding_type": "SinusoidalConcat"},
        "eps": {"norm_eps": 0.1},
        "biased": {"biased": True},
        "shared": {"vocabulary": {"src": VOCABULARY["src"], "tgt": VOCABULARY["src"]}},
    }.get(variant, {})
    value = checkpoint(**changes)
    if variant == "shared":
        value["model"][f"decoder.{LUT}.weight"] = value["model"][f"encoder.{LUT}.weight"]
    if variant in ("tied", "shared"):
        value["generator"]["weight"] = value["model"][f"decoder.{LUT}.weight"]
    tensors = all_tensors(value)
    if variant == "safetensors":
        save_file(tensors, tmp_path / "model_step_7.safetensors")
        del value["model"], value["generator"]
    ours = load(value, tmp_path)
    assert_variant(ours, tensors, ROLES, variant, eps=1e-6)
