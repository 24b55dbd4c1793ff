"""JoeyNMT's models as ours."""

import pytest
import torch
import torch.nn.functional as F
import yaml
from plain_reference import Reference, assert_same, random_weights
from transformers import AutoTokenizer

from hf_vanilla_transformer.interop import joeynmt
from hf_vanilla_transformer.interop.convert import recognise
from hf_vanilla_transformer.interop.interface import ConversionError, ConversionOptions

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
    for change, message in (
        ({"lowercase": True}, "data.src of config.yaml has lowercase: True; no tokenizer here does that"),
        ({"level": "sentence"}, "has level: sentence"),
        ({"tokenizer_cfg": {"codes": "codes.3000", "pretokenizer": "moses"}}, "has pretokenizer: moses"),
        ({"tokenizer_cfg": {"model_file": "no.model"}}, "needs .*no.model, and there is no such file"),
    ):
        write(tmp_path, {**config, "data": {"src": {**side, **change}, "trg": side}}, weights(False))
        with pytest.raises(ConversionError, match=message):
            joeynmt.load(tmp_path, ConversionOptions())


def test_models_that_read_prompts_are_refused(tmp_path):
    """2.3 adds embeddings of the prompt's mask to every position; no tensor shows it."""
    for symbols, found in (
        ({"sep_token": "<sep>", "sep_id": 4}, "sep_token: <sep>"),
        ({"lang_tags": ["<de>"]}, "lang"),
    ):
        write(tmp_path, {**settings(), "data": {"special_symbols": symbols}}, weights(False))
        with pytest.raises(ConversionError, match=f"has {found}.*: the model reads prompts"):
            load(tmp_path)


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
        assert_same(ours, theirs.logits, pad=1, start=2)


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
    for name, value, kind in (("max_output_length", "9", "an integer"), ("beam_size", 5.0, "an integer"),
                              ("alpha", "1", "a number")):  # fmt: skip
        with pytest.raises(ConversionError, match=f"testing.{name} of config.yaml is {value!r}; give {kind}"):
            load(write(tmp_path, settings(**{name: value}), weights(False)))
    config["data"]["special_symbols"] = {"pad_id": "1"}
    with pytest.raises(ConversionError, match="has pad_id: '1'; give an integer"):
        load(write(tmp_path, config, weights(False)))


@pytest.mark.parametrize(
    ("stack", "change", "message"),
    [
        ("encoder", {"alpha": 0.5}, "alpha is 0.5"),
        ("decoder", {"activation": "tanh"}, "known are relu, gelu, swish"),
        ("decoder", {"activation": "gelu"}, "here, both are alike"),
        ("decoder", {"layer_norm": "pre"}, "here, both are alike"),
        ("decoder", {"embeddings": {"scale": False}}, "scale is True in the encoder and False in the decoder"),
        ("encoder", {"num_heads": 5}, "doesn't divide"),
        ("encoder", {"layer_norm": None}, "has no model.encoder.layer_norm"),
    ],
)
def test_settings_that_are_refused(stack, change, message, tmp_path):
    config = settings()
    config["model"][stack] |= change
    with pytest.raises(ConversionError, match=message):
        load(write(tmp_path, config, weights(False)))


def test_keys_that_are_missing_or_unknown(tmp_path):
    tensors = weights(False)
    with pytest.raises(ConversionError, match=r"missing: .*encoder.layer_norm"):
        load(write(tmp_path, settings("pre"), tensors))
    with pytest.raises(ConversionError, match=r"unknown: .*layer_norm"):
        load(write(tmp_path, settings("post"), weights(True)))
    without = {name: value for name, value in tensors.items() if not name.endswith("k_layer.bias")}
    with pytest.raises(ConversionError, match=r"missing: .*k_layer.bias"):
        load(write(tmp_path, settings(), without))


def test_files_that_are_refused(tmp_path):
    write(tmp_path, settings(), weights(False))
    (tmp_path / "config.yaml").write_text("model: {encoder: 3}")
    with pytest.raises(ConversionError, match=r"no section model.encoder.embeddings"):
        load(tmp_path)
    with pytest.raises(ConversionError, match="the target dictionary has 18 entries and the embeddings 19 rows"):
        load(write(tmp_path, settings(), weights(False), {**TOKENS, "trg": TOKENS["trg"][:-1]}))
