"""Eole's folders as ours."""

import json

import pytest
import torch
from plain_reference import assert_variant, random_weights
from safetensors.torch import save_file

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.interop import eole
from hf_vanilla_transformer.interop.convert import recognise
from hf_vanilla_transformer.interop.interface import ConversionOptions

WIDTH, INNER, LAYERS = 12, 10, {"encoder": 2, "decoder": 3}
SPECIAL = ["<unk>", "<blank>", "<s>", "</s>"]
WORDS = {"src": [*SPECIAL, *(f"s{i}" for i in range(20))], "tgt": [*SPECIAL, *(f"t{i}" for i in range(12))]}
ROLES = {
    "source": "src_emb.embeddings", "target": "tgt_emb.embeddings", "output": "generator",
    "encoder": "encoder.transformer_layers.{}", "decoder": "decoder.transformer_layers.{}",
    "attention": ("linear_query", "linear_keys", "linear_values", "final_linear"),
    "feed_forward": ("mlp.gate_up_proj", "mlp.down_proj"), "own": ("self_attn", "self_attn"), "cross": "context_attn",
    "encoder_norms": ("input_layernorm", "post_attention_layernorm"),
    "decoder_norms": ("input_layernorm", "precontext_layernorm", "post_attention_layernorm"),
}  # fmt: skip
MODEL = {
    "architecture": "transformer", "hidden_size": WIDTH, "heads": 3, "transformer_ff": INNER,
    "embeddings": {"position_encoding": True, "position_encoding_type": "SinusoidalInterleaved"},
    "encoder": {"encoder_type": "transformer", "layers": 2}, "decoder": {"decoder_type": "transformer", "layers": 3},
}  # fmt: skip


def weights(biased: bool = False, tied: str = "none") -> dict[str, torch.Tensor]:
    """Random weights in Eole's layout."""
    sides = [len(words) for words in WORDS.values()]
    tensors = random_weights(
        ROLES, sides, WIDTH, (INNER, INNER), (*LAYERS.values(),), attention_bias=biased, ffn_bias=biased
    )
    if tied == "all":
        del tensors[f"{ROLES['target']}.weight"]
    for number in range(LAYERS["decoder"]):
        tensors[f"{ROLES['decoder'].format(number)}.layer_scalar"] = torch.ones(1)
    rows = len(WORDS["src" if tied == "all" else "tgt"])
    tensors["generator.bias"] = torch.randn(rows)
    if tied == "none":
        tensors["generator.weight"] = torch.randn(rows, WIDTH)
    return tensors


def write(folder, tensors, vocabulary=None, model=None, **config):
    words = vocabulary or WORDS
    (folder / "vocab.json").write_text(json.dumps({**words, "decoder_start_token": "<s>", "specials": {}}))
    (folder / "config.json").write_text(json.dumps({"model": {**MODEL, **(model or {})}, **config}))
    save_file({name: value.clone() for name, value in tensors.items()}, folder / "model.00.safetensors")
    return folder


@pytest.mark.parametrize("variant", ["plain", "biased", "gelu", "concatenated", "eps", "tied", "shared"])
def test_logits_and_decoding(variant, tmp_path):
    model = {
        "gelu": {"mlp_activation_fn": "gelu"},
        "concatenated": {"embeddings": {"position_encoding_type": "SinusoidalConcat"}},
        "eps": {"norm_eps": 0.1},
        "biased": {"add_qkvbias": True, "add_ffnbias": True},
        "tied": {"share_decoder_embeddings": True},
        "shared": {"share_embeddings": True, "share_decoder_embeddings": True},
    }.get(variant)
    tying = {"tied": "decoder", "shared": "all"}.get(variant, "none")
    tensors = weights(variant == "biased", tying)
    words = {"src": WORDS["src"], "tgt": WORDS["src"]} if variant == "shared" else None
    assert recognise(write(tmp_path, tensors, words, model)) == "eole"
    ours = eole.load(tmp_path, ConversionOptions(with_tokenizer=False)).model
    if variant == "shared":
        tensors["tgt_emb.embeddings.weight"] = tensors["src_emb.embeddings.weight"]
    tensors.setdefault("generator.weight", tensors["tgt_emb.embeddings.weight"])
    assert_variant(ours, tensors, ROLES, variant, eps=1e-5)


def test_learned_positions_are_not_scaled(tmp_path):
    tensors = weights() | {f"{side}_emb.pe.weight": torch.randn(30, WIDTH) for side in ("src", "tgt")}
    model = {"embeddings": {"position_encoding_type": "Learned", "n_positions": 30}}
    ours = eole.load(write(tmp_path, tensors, model=model), ConversionOptions(with_tokenizer=False)).model
    assert (ours.config.position_encoding, ours.config.scale_embedding) == ("learned", False)
    assert torch.equal(ours.model.encoder.embed_positions.weight, tensors["src_emb.pe.weight"])


def test_the_command_and_its_tokenizer(tmp_path, capsys):
    write(tmp_path, weights())
    assert cli.main(["convert", str(tmp_path), "--output", str(tmp_path / "ours")]) == 0
    assert "note: it comes without generation settings" in capsys.readouterr().out
    made = eole.load(tmp_path, ConversionOptions())
    assert made.tokenizer("s1 s2 x")["input_ids"] == [5, 6, 0]  # sources have no end
    assert made.tokenizer(text_target="t1 t2")["input_ids"] == [5, 6, 3]
