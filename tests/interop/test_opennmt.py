"""OpenNMT-py's models as ours, and those of Eole, its heir."""

import argparse
import json

import pytest
import torch
import torch.nn.functional as F
from plain_reference import Reference, assert_same, random_weights
from safetensors.torch import save_file

from hf_vanilla_transformer import Translator, cli
from hf_vanilla_transformer.interop import eole, opennmt
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

ROLES_OF_EOLE = {
    **ROLES, "source": "src_emb.embeddings", "target": "tgt_emb.embeddings",
    "encoder": "encoder.transformer_layers.{}", "feed_forward": ("mlp.gate_up_proj", "mlp.down_proj"),
    "encoder_norms": ("input_layernorm", "post_attention_layernorm"),
    "decoder_norms": ("input_layernorm", "precontext_layernorm", "post_attention_layernorm"),
}  # fmt: skip
MODEL_OF_EOLE = {
    "architecture": "transformer", "hidden_size": WIDTH, "heads": 3, "transformer_ff": INNER,
    "embeddings": {"position_encoding": True, "position_encoding_type": "SinusoidalInterleaved"},
    "encoder": {"encoder_type": "transformer", "layers": 2}, "decoder": {"decoder_type": "transformer", "layers": 3},
}  # fmt: skip
WITHOUT = ConversionOptions(with_tokenizer=False)


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


def weights_of_eole(biased=False, tied="none", vocabulary=VOCABULARY):
    """Random weights in Eole's layout."""
    rows = [len(vocabulary[side]) for side in ("src", "tgt")]
    sizes = (rows, WIDTH, (INNER, INNER), (ENCODER, DECODER))
    tensors = random_weights(ROLES_OF_EOLE, *sizes, attention_bias=biased, ffn_bias=biased)
    if tied == "all":
        del tensors[f"{ROLES_OF_EOLE['target']}.weight"]
    tensors |= {f"decoder.transformer_layers.{number}.layer_scalar": torch.ones(1) for number in range(DECODER)}
    output = {"generator.weight": torch.randn(rows[1], WIDTH)} if tied == "none" else {}
    return tensors | output | {"generator.bias": torch.randn(rows[1])}


def write_eole(folder, tensors, vocabulary=VOCABULARY, model=None, **config):
    (folder / "vocab.json").write_text(json.dumps({**vocabulary, "decoder_start_token": "<s>", "specials": {}}))
    (folder / "config.json").write_text(json.dumps({"model": {**MODEL_OF_EOLE, **(model or {})}, **config}))
    save_file({name: value.clone() for name, value in tensors.items()}, folder / "model.00.safetensors")
    return folder


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


def of_opennmt(variant, folder, vocabulary):
    """Writes a variant; returns the converted model and the tensors that it has."""
    changes = {
        "gelu": {"pos_ffn_activation_fn": "gelu"},
        "concatenated": {"position_encoding_type": "SinusoidalConcat"},
        "eps": {"norm_eps": 0.1},
        "biased": {"biased": True},
    }.get(variant, {})
    value, file = checkpoint(vocabulary=vocabulary, **changes), folder / "model_step_7.pt"
    if variant == "shared":
        value["model"][f"decoder.{LUT}.weight"] = value["model"][f"encoder.{LUT}.weight"]
    if variant in ("tied", "shared"):
        value["generator"]["weight"] = value["model"][f"decoder.{LUT}.weight"]
    tensors = {**value["model"], **{f"generator.{name}": one for name, one in value["generator"].items()}}
    if variant == "safetensors":
        save_file(tensors, folder / "model_step_7.safetensors")
        del value["model"], value["generator"]
    torch.save(value, file)
    assert recognise(file) == "opennmt"
    return opennmt.load(file, WITHOUT).model, tensors


def of_eole(variant, folder, vocabulary):
    model = {
        "gelu": {"mlp_activation_fn": "gelu"},
        "concatenated": {"embeddings": {"position_encoding_type": "SinusoidalConcat"}},
        "eps": {"norm_eps": 0.1},
        "biased": {"add_qkvbias": True, "add_ffnbias": True},
        "tied": {"share_decoder_embeddings": True},
        "shared": {"share_embeddings": True, "share_decoder_embeddings": True},
    }.get(variant)
    tensors = weights_of_eole(
        variant == "biased", {"tied": "decoder", "shared": "all"}.get(variant, "none"), vocabulary
    )
    assert recognise(write_eole(folder, tensors, vocabulary, model)) == "eole"
    ours = eole.load(folder, WITHOUT).model
    tensors.setdefault("tgt_emb.embeddings.weight", tensors["src_emb.embeddings.weight"])
    tensors.setdefault("generator.weight", tensors["tgt_emb.embeddings.weight"])
    return ours, tensors


VARIANTS = ["plain", "biased", "gelu", "concatenated", "eps", "tied", "shared"]
ALL = [*((of_opennmt, one) for one in (*VARIANTS, "safetensors")), *((of_eole, one) for one in VARIANTS)]


@pytest.mark.parametrize(("system", "variant"), ALL)
def test_logits_and_decoding(system, variant, tmp_path):
    source = VOCABULARY["src"]
    ours, tensors = system(variant, tmp_path, {"src": source, "tgt": source} if variant == "shared" else VOCABULARY)
    assert ours.config.tie_word_embeddings == (variant in ("tied", "shared"))
    assert ours.config.share_encoder_decoder_embeddings == (variant == "shared")
    theirs = Reference(
        *(tensors, ROLES_OF_EOLE if system is of_eole else ROLES, (3, 3), True),
        activation=F.gelu if variant == "gelu" else F.relu,
        eps=0.1 if variant == "eps" else 1e-5 if system is of_eole else 1e-6,
        concatenated=variant == "concatenated",
    )
    assert_same(ours, theirs.logits, pad=1, start=2, search=variant == "plain")


# ---- Eole alone ----
def test_learned_positions_are_not_scaled(tmp_path):
    tensors = weights_of_eole() | {f"{side}_emb.pe.weight": torch.randn(30, WIDTH) for side in ("src", "tgt")}
    model = {"embeddings": {"position_encoding_type": "Learned", "n_positions": 30}}
    ours = eole.load(write_eole(tmp_path, tensors, model=model), WITHOUT).model
    assert (ours.config.position_encoding, ours.config.scale_embedding) == ("learned", False)
    assert torch.equal(ours.model.encoder.embed_positions.weight, tensors["src_emb.pe.weight"])


def test_the_command_and_the_tokenizer_of_eole(tmp_path, capsys):
    """A transform that adds an empty text changes nothing."""
    write_eole(tmp_path, weights_of_eole(), transforms=["prefix"], transforms_configs={"prefix": {"src_prefix": ""}})
    assert cli.main(["convert", str(tmp_path), "--output", str(tmp_path / "ours")]) == 0
    assert "note: it comes without generation settings" in capsys.readouterr().out
    made = eole.load(tmp_path, ConversionOptions())
    assert made.tokenizer("s1 s2 x")["input_ids"] == [5, 6, 0]  # sources have no end
    assert made.tokenizer(text_target="t1 t2")["input_ids"] == [5, 6, 3]
