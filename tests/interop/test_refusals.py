"""What the converters refuse: one table of models that are almost those of a system, and what is said of each."""

import argparse
import math
import shutil
import sys
import types

import numpy as np
import pytest
import test_fairseq
import test_joeynmt
import test_marian_npz
import test_opennmt
import test_state_dict
import torch

from hf_vanilla_transformer.interop.convert import convert
from hf_vanilla_transformer.interop.interface import ConversionError


# ---- Models of each system, with changes: functions of a folder that return the source and options ----
def fairseq(**settings):
    def write(folder):
        test_fairseq.checkpoint(folder, {})
        value = torch.load(folder / "checkpoint_best.pt", weights_only=False)
        value["args"] = argparse.Namespace(**{**vars(value["args"]), **settings})
        torch.save(value, folder / "checkpoint_best.pt")
        return folder, {"with_tokenizer": False}

    return write


def opennmt(edit=lambda value: None, with_tokenizer=False, **options):
    def write(folder):
        value = test_opennmt.checkpoint()
        value["opt"] = test_opennmt.options(**options)
        edit(value)
        torch.save(value, folder / "model.pt")
        return folder / "model.pt", {"with_tokenizer": with_tokenizer}

    return write


class Field:
    """Pickled as an object of torchtext, as OpenNMT-py 2 has it."""


def version_2(folder):
    module, names = types.ModuleType("torchtext.data.field"), ("torchtext", "torchtext.data", "torchtext.data.field")
    module.Field = Field
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Field, "__module__", "torchtext.data.field")
        for name in names:
            patch.setitem(sys.modules, name, module)
        return opennmt(lambda value: value.update(vocab={"src": Field(), "tgt": Field()}))(folder)


def other_source(tokens):
    return lambda value: value["vocab"].update(src=tokens)


def eole(**changes):
    return lambda folder: (test_opennmt.write_eole(folder, test_opennmt.weights_of_eole(), **changes), {})


def without_weights(folder):
    eole()(folder)[0].joinpath("model.00.safetensors").unlink()
    return folder, {}


def joeynmt(stack="encoder", change=(), weights=None, tokens=test_joeynmt.TOKENS, data=None, **testing):
    def write(folder):
        config = test_joeynmt.settings(**testing)
        config["model"][stack] |= dict(change)
        config["data"] = data or {}
        test_joeynmt.write(folder, config, weights() if weights else test_joeynmt.weights(False), tokens)
        return folder, {"with_tokenizer": bool(data and "src" in data)}

    return write


def side_of_joeynmt(**changes):
    side = {"level": "bpe", "tokenizer_type": "subword-nmt", "tokenizer_cfg": {"codes": "/data/codes.3000"}}
    return joeynmt(data={"src": {**side, **changes}, "trg": side})


def no_section(folder):
    joeynmt()(folder)[0].joinpath("config.yaml").write_text("model: {encoder: 3}")
    return folder, {}


def npz(changes=(), vocabulary=None, cut=False, **options):
    def write(folder):
        weights = test_marian_npz.arrays(**options) | dict(changes)
        given = test_marian_npz.write(folder, {name: one for name, one in weights.items() if one is not None})
        if vocabulary:
            (folder / "vocab.yml").write_text(vocabulary)
        if cut:
            content = (folder / "model.npz").read_bytes()
            (folder / "model.npz").write_bytes(content[: len(content) // 2])
        return folder / "model.npz", {"vocab": given.vocab}

    return write


def mapping(more=None, damage=dict, layout="bentrevett", remove=(), **fields):
    def write(folder):
        entries = {**test_state_dict.entries_of(layout, **fields), **(more or {})}
        for name in remove:
            del entries["config"][name]
        torch.save(damage(test_state_dict.made("bentrevett")[0]), folder / "model.pt")
        return folder / "model.pt", {"mapping": test_state_dict.written(folder, entries)}

    return write


def without(beginning):
    return lambda state: {name: one for name, one in state.items() if not name.startswith(beginning)}


def changed(name, change):
    return lambda state: {**state, name: change(state.get(name))}


BIAS = "encoder.transformer.1.feed_forward.w_2.bias"
FIRST = "encoder.layers.0.self_attention.fc_q.weight"
RENAMED = {
    "lm_head": "decoder.head", "lm_head.weight": "decoder.fc_out.weight", "decoder.head.bias": "decoder.fc_out.bias",
}  # fmt: skip
TOKENS = ("pad_token_id", "decoder_start_token_id")
OWN = test_state_dict.OWN_TORCH["names"]
NORMED = ("encoder.layer_norm.weight", "encoder.layer_stack.0.slf_attn.w_qs.weight")
ZEROS = np.zeros((1, 4), np.float32)
REFUSALS = [
    (fairseq(cross_self_attention=True), "cross_self_attention is True, not off"),
    (fairseq(task="translation_lev"), "its task is 'translation_lev', not 'translation'"),
    (fairseq(quant_noise_scalar=0.5), "quant_noise_scalar is 0.5, not off"),
    (fairseq(activation_fn="sine"), "its activation_fn is 'sine', not relu or relu_squared"),
    (fairseq(decoder_normalize_before=True), "normalize_before is False in the encoder and True in the decoder; here"),
    (fairseq(encoder_attention_heads=None), "encoder_attention_heads is None, not a number"),
    (opennmt(self_attn_type="average"), "self_attn_type is 'average', not scaled-dot or scaled-dot-flash"),
    (opennmt(pos_ffn_activation_fn="silu"), "pos_ffn_activation_fn is 'silu', not relu or gelu"),
    (opennmt(position_encoding=False), "position_encoding is False, not True"),
    (opennmt(max_relative_positions=20), "max_relative_positions is 20, not off"),
    (opennmt(heads=5), "doesn't divide"),
    (opennmt(lambda value: value["model"].pop(BIAS)), rf"missing: .*{BIAS}"),
    (opennmt(other_source(["<blank>", "<unk>", *test_opennmt.VOCABULARY["src"][2:]])), "another id in the source"),
    (opennmt(other_source(test_opennmt.VOCABULARY["src"][:-1])), r"source dictionary has \d+ entries and the embedd"),
    (version_2, r"OpenNMT-py 2.*convertv2_v3.py"),
    (
        opennmt(with_tokenizer=True, transforms=["onnt_tokenize"], data={"a": {"transforms": ["bpe"]}}),
        "go through onnt_tokenize, and no tokenizer",
    ),
    (opennmt(with_tokenizer=True, data={"a": {"transforms": ["docify"]}}), "go through docify, and no tokenizer"),
    (opennmt(with_tokenizer=True, src_vocab_threshold=5, src_subword_vocab="v"), "go through src_vocab_threshold, and"),
    (opennmt(with_tokenizer=True, src_subword_model="other"), "needs .*other, and there is no such file"),
    (eole(model={"embeddings": {"position_encoding_type": "Rotary"}}), "position_encoding_type is 'Rotary'"),
    (eole(model={"mlp_activation_fn": "gated-silu"}), "mlp_activation_fn is 'gated-silu', not relu or gelu or"),
    (eole(model={"decoder": {"mlp_activation_fn": "silu"}}), "mlp_activation_fn is 'relu' in the encoder and 'silu'"),
    (eole(model={"encoder": {"norm_eps": 0.1}}), "norm_eps is 0.1 in the encoder and 1e-05 in the decoder"),
    (eole(model={"layer_norm": "rms"}), "layer_norm is 'rms', not 'standard'"),
    (eole(model={"heads_kv": 1}), "heads_kv is 1, not None"),
    (eole(model={"num_experts": 4}), "num_experts is 4, not off"),
    (eole(model={"decoder": {"attn_scaling": 2.0}}), "attn_scaling is 2.0, not off"),
    (eole(model={"encoder": {"encoder_layer_style": "postnorm"}}), "encoder_layer_style is 'postnorm'"),
    (eole(transforms=["onmt_tokenize"]), "go through onmt_tokenize, and no tokenizer here does that"),
    (eole(transforms=["prefix"], transforms_configs={"prefix": {"src_prefix": "<2de>"}}), "go through prefix, and no"),
    (eole(data={"a": {"transforms": ["suffix"], "tgt_suffix": "<2de>"}}), "go through suffix, and no tokenizer"),
    (eole(vocabulary={**test_opennmt.VOCABULARY, "tgt": test_opennmt.SPECIAL[:3]}), "target vocabulary has no '</s>'"),
    (without_weights, r"has no model\.00\.safetensors; give the folder that `eole train`"),
    (joeynmt("encoder", {"alpha": 0.5}), "the encoder's alpha is 0.5, not 1"),
    (joeynmt("decoder", {"activation": "tanh"}), "the decoder's activation is 'tanh', not relu or gelu or swish"),
    (joeynmt("decoder", {"layer_norm": "pre"}), "here, both are alike"),
    (joeynmt("decoder", {"embeddings": {"scale": False}}), "scale is True in the encoder and False in the decoder"),
    (joeynmt("encoder", {"num_heads": 5}), "doesn't divide"),
    (joeynmt("encoder", {"layer_norm": None}), "has no model.encoder.layer_norm"),
    (joeynmt(layer_norm="pre"), r"missing: .*encoder.layer_norm"),
    (joeynmt(weights=lambda: test_joeynmt.weights(True)), r"unknown: .*layer_norm"),
    (
        joeynmt(weights=lambda: {n: w for n, w in test_joeynmt.weights(False).items() if "k_layer.bias" not in n}),
        r"missing: .*k_layer.bias",
    ),
    (
        joeynmt(tokens={**test_joeynmt.TOKENS, "trg": test_joeynmt.TOKENS["trg"][:-1]}),
        "the target dictionary has 18 entries and the embeddings 19 rows",
    ),
    (no_section, "no section model.encoder.embeddings"),
    # 2.3 adds embeddings of a prompt's mask to every position; no tensor shows it.
    (joeynmt(data={"special_symbols": {"sep_token": "<sep>", "sep_id": 4}}), "has sep_token: <sep>: the model reads"),
    (joeynmt(data={"special_symbols": {"lang_tags": ["<de>"]}}), "has lang.*: the model reads prompts"),
    (side_of_joeynmt(lowercase=True), "data.src of config.yaml has lowercase: True; no tokenizer here does that"),
    (side_of_joeynmt(level="sentence"), "has level: sentence"),
    (side_of_joeynmt(tokenizer_cfg={"codes": "codes.3000", "pretokenizer": "moses"}), "has pretokenizer: moses"),
    (side_of_joeynmt(tokenizer_cfg={"model_file": "no.model"}), "needs .*no.model, and there is no such file"),
    (npz(type="s2s"), "its type is 's2s', not 'transformer'"),
    (npz(**{"transformer-decoder-autoreg": "rnn"}), "its transformer-decoder-autoreg is 'rnn'"),
    (npz(**{"transformer-postprocess-emb": "nd"}), "transformer-postprocess-emb is 'nd'"),
    (npz(**{"transformer-postprocess": "dahn"}), "-postprocess-top are .*'dahn'"),
    (npz(**{"transformer-tied-layers": [1, 1]}), r"transformer-tied-layers is \[1, 1\], not off"),
    (npz(**{"right-left": True}), "right-left is True"),
    (npz({"special:model.yml": None}), "isn't Marian's: it has no special:model.yml"),
    (npz({"Wpos": ZEROS}), "trained positions"),
    (npz({"encoder_l1_self_bq": None}), "missing: encoder_l1_self_bq"),
    (npz({"encoder_l1_other": ZEROS}), "encoder_l1_other"),
    (npz(vocabulary="a: 0\nb: 1\n"), r"vocab\.yml isn't the vocabulary of this model: it has 2 tokens"),
    (npz(vocabulary="a: 0\nb: 3\n"), "its ids aren't 0 to 1"),
    (npz(cut=True), r"model\.npz can't be read as \.npz"),
    (mapping({"nams": {}}), "unknown entry nams"),
    (mapping({"names": {"enc.layers.*.fc1": "encoder.x"}}), r"enc.layers.\*.fc1 is no parameter; they begin"),
    (mapping({"attention_scale": 0}), "attention_scale is 0; give a positive number"),
    (mapping({"attention_scale": "1e-1"}), "YAML takes numbers such as 1e-1 for text; write 1.0e-1"),
    (mapping({"names": {"lm_head": 1}}), "the name of lm_head is 1; give a text"),
    (mapping({"extends": "nanogpt"}), "there is no mapping nanogpt; give one of annotated_a2"),
    (mapping({"first_position": -1}), "first_position is -1; give 0 or more"),
    (mapping({"names": {"lm_head": "decoder.head"}}), "unknown: decoder.fc_out.bias, decoder.fc_out.weight"),
    (mapping({"names": RENAMED}), r"without a place in this model: decoder.fc_out.bias \(decoder.head.bias\)"),
    (mapping(encoder_attention_heads=5), "encoder_attention_heads is 5 and doesn't divide"),
    (mapping(eos_token_id=19), "eos_token_id is 19, and the target vocabulary has 19 tokens, from 0 up"),
    (mapping(layer_norm_eps="1e-6"), "not a number: YAML takes numbers such as 1e-6 for text"),
    (mapping(encoder_layers=3), "have 2 encoder layers, and the model's options say 3"),
    (mapping(activation_function="step"), "the fields make no valid model"),
    (mapping(layers=3), "VanillaTransformerConfig has no field layers"),
    (mapping(max_position_embeddings=512), "25 learned positions, fewer than the model's 512"),
    (mapping(tie_word_embeddings=True), "tie_word_embeddings is true, and the matrices differ"),
    (mapping(d_model=24), r"encoder.pos_embedding.weight \(25, 12\) is no table of positions of width 24"),
    (mapping(position_encoding="paper"), "not those of position_encoding='paper'"),
    (mapping(remove=TOKENS), "config lacks pad_token_id, decoder_start_token_id, which no tensor tells: give it"),
    (mapping({"names": OWN}, layout="torch", scale_embedding=False), "lacks norm_position, activation_function, posit"),
    (mapping(damage=lambda state: state | dict.fromkeys(NORMED, torch.ones(12))), "come before its layers, behind the"),
    (mapping(damage=without(FIRST)), f"missing: {FIRST}"),
    (mapping(damage=without("decoder.layers.1.")), "decoder.layers.1.enc_attn_layer_norm.weight"),
    (mapping(damage=without("encoder.layers.")), r"the encoder has no layers: no tensor is called encoder.layers.\*."),
    (mapping(damage=changed("a.b", lambda _: torch.zeros(2))), "unknown: a.b"),
    (
        mapping(damage=changed(FIRST, lambda _: torch.zeros(12, 13))),
        rf"of another shape: {FIRST} \(12, 13\) instead of \(12, 12\)",
    ),
    (mapping(damage=changed(FIRST, lambda one: one * math.nan)), f"not finite: {FIRST}"),
    (mapping(damage=changed(FIRST, lambda one: one.long())), f"not of floating-point numbers: {FIRST}"),
    (
        mapping(damage=changed("decoder.tok_embedding.weight", lambda one: torch.cat([one, one[:1]]))),
        "embeddings have 20 rows and the output 19.*insert the missing rows",
    ),
]


@pytest.mark.parametrize(("write", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_it_is_named_and_nothing_is_written(write, message, tmp_path):
    (tmp_path / "theirs").mkdir()
    source, options = write(tmp_path / "theirs")
    with pytest.raises(ConversionError, match=message):
        convert(source, tmp_path / "ours", **options)
    shutil.rmtree(tmp_path / "theirs")
    assert not list(tmp_path.iterdir())
