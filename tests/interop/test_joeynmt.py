"""JoeyNMT's models as ours."""

import pytest
import torch
import torch.nn.functional as F
import yaml
from plain_reference import Reference, assert_same, random_weights
from transformers import AutoTokenizer

from hf_vanilla_transformer.interop import joeynmt
from hf_vanilla_transformer.interop.convert import recognise
from hf_vanilla_transformer.interop.interface import ConversionOptions

WIDTH, HEADS, LAYERS, INNER = 12, (2, 3), (2, 3), (10, 14)
SPECIAL = ["<unk>", "<pad>", "<s>", "</s>"]
TOKENS = {"src": [*SPECIAL, *(f"s{i}" for i in range(19))], "trg": [*SPECIAL, *(f"t{i}" for i in range(15))]}
ROLES = {
    "source": "src_embed.lut", "target": "trg_embed.lut", "output": "decoder.output_layer",
    "encoder": "encoder.layers.{}", "decoder": "decoder.layers.{}",
    "attention": ("q_layer", "k_layer", "v_layer", "output_layer"),
    "feed_forward": ("feed_forward.pwff_layer.0", "feed_forward.pwff_layer.3"), "own": ("src_src_att", "trg_trg_att"),
    "cross": "src_trg_att", "encoder_norms": ("layer_norm", "feed_forward.layer_norm"),
    "decoder_norms": ("x_layer_norm", "dec_layer_norm", "feed_forward.layer_norm"),
}  # fmt: skip


def settings(layer_norm="post", scale=True, activation="relu", **testing):
    stacks = {
        stack: {
            "type": "transformer", "num_layers": LAYERS[i], "num_heads": HEADS[i], "hidden_size": WIDTH,
            "ff_size": INNER[i], "dropout": 0.1, "layer_norm": layer_norm, "activation": activation,
            "embeddings": {"embedding_dim": WIDTH, "scale": scale},
        }
        for i, stack in enumerate(("encoder", "decoder"))
    }  # fmt: skip
    return {"name": "it", "data": {}, "testing": {"beam_size": 5, "beam_alpha": 1.0, **testing}, "model": stacks}


def weights(pre):
    rows = [len(tokens) for tokens in TOKENS.values()]
    tensors = random_weights(ROLES, rows, WIDTH, INNER, LAYERS, last_norms=pre)
    return tensors | {f"{ROLES['output']}.weight": torch.randn(rows[1], WIDTH) * 0.6}


def write(folder, config, tensors, tokens=TOKENS, **more):
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for side, lines in tokens.items():
        (folder / f"{side}_vocab.txt").write_text("\n".join(lines) + "\n")
    torch.save({"model_state": tensors, "optimizer_state": {}, **more}, folder / "best.ckpt")
    return folder


def load(folder):
    assert recognise(folder) == "joeynmt"
    return joeynmt.load(folder, ConversionOptions(with_tokenizer=False))


def test_words_and_characters_need_no_files(tmp_path):
    """Each side has its own level: letters in and words out, spaces among letters as "▁" (its BasicTokenizer)."""
    config = {**settings(), "data": {"src": {"level": "char"}, "trg": {"level": "word"}}}
    tokens = {"src": [*TOKENS["src"][:5], "▁", "\u2028", *TOKENS["src"][7:]], "trg": TOKENS["trg"]}
    tokenizer = joeynmt.load(write(tmp_path, config, weights(False), tokens), ConversionOptions()).tokenizer
    tokenizer.save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert tokenizer.tokenize("s 1") == ["s", "▁", "1"]
    assert tokenizer("\u2028")["input_ids"] == [6, 3]  # no end of a line of its file
    labels = tokenizer(text_target="t1 t2")["input_ids"]
    assert labels == [TOKENS["trg"].index("t1"), TOKENS["trg"].index("t2"), 3]
    assert tokenizer.decode(labels, skip_special_tokens=True) == "t1 t2"
    assert tokenizer.tokenize("s\xa01\t") == ["s", "\xa0", "1", "\t"]  # only U+0020 is a space to it
    words = tokenizer.target_encoder
    assert tokenizer(text_target="t1\xa0t2")["input_ids"] == [words["<unk>"], 3]


def test_its_tokenizer(tmp_path):
    """Pieces are those of the vocabulary, sources have an end; what the tokenizer doesn't do is refused."""
    side = {"level": "bpe", "tokenizer_type": "subword-nmt", "tokenizer_cfg": {"codes": "/data/codes.3000"}}
    config = {**settings(), "data": {"src": side, "trg": side}}
    merges = [*(f"{s} {n}</w>\n" for s in "st" for n in range(9)), "s 1\n", "s1 5</w>\n", "s1 9</w>\n"]
    (tmp_path / "codes.3000").write_text("#version: 0.2\n" + "".join(merges))
    write(tmp_path, config, weights(False))
    made = joeynmt.load(tmp_path, ConversionOptions())
    assert made.tokenizer.tokenize("s1 s15 s19") == ["s1", "s15", "s@@", "1@@", "9"]  # there is no s19
    assert made.tokenizer("s1 s15")["input_ids"] == [5, 19, 3]
    assert made.tokenizer(text_target="t1 t2")["input_ids"] == [5, 6, 3]


@pytest.mark.parametrize("variant", ["post", "pre", "unscaled", "gelu", "swish", "tied", "one matrix"])
def test_logits_and_decoding(variant, tmp_path):
    pre = variant == "pre"
    config, tensors = settings("pre" if pre else "post", variant != "unscaled"), weights(pre)
    for stack in config["model"].values():
        stack["activation"] = variant if variant in ("gelu", "swish") else "relu"
    tokens = TOKENS
    if variant == "one matrix":
        tokens = {"src": TOKENS["src"], "trg": TOKENS["src"]}
        tensors["trg_embed.lut.weight"] = tensors["src_embed.lut.weight"]
    if variant in ("tied", "one matrix"):
        tensors["decoder.output_layer.weight"] = tensors["trg_embed.lut.weight"]
    ours = load(write(tmp_path, config, tensors, tokens)).model
    assert ours.config.tie_word_embeddings == (variant in ("tied", "one matrix"))
    assert ours.config.share_encoder_decoder_embeddings == (variant == "one matrix")
    activation = {"gelu": F.gelu, "swish": F.silu}.get(variant, F.relu)
    theirs = Reference(tensors, ROLES, HEADS, pre, scaled=variant != "unscaled", activation=activation)
    with torch.no_grad():
        assert_same(ours, theirs.logits, pad=1, start=2, search=variant in ("post", "pre"))


def test_settings_of_decoding(tmp_path):
    config = settings(generate_unk=False, repetition_penalty=2, max_output_length=9, min_output_length=2)
    converted = load(write(tmp_path, config, weights(False)))
    found = converted.model.generation_config
    assert (found.num_beams, found.gnmt_length_penalty, found.min_new_tokens, found.max_new_tokens) == (5, 1.0, 2, 9)
    assert found.suppress_tokens == [2, 1, 0]
    assert any("repetition_penalty" in note for note in converted.notes)
    none = {"no_repeat_ngram_size": None, "max_output_length": None}
    unused = load(write(tmp_path, settings(repetition_penalty=-1, **none), weights(False)))
    (note,) = unused.notes
    assert "testing.max_output_length isn't set: JoeyNMT limits translations to 1.5 times" in note
