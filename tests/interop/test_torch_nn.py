"""Our models as torch.nn.Transformer's, loaded as the export says, and back again, bit by bit."""

import json

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizerFast,
    export,
)
from hf_vanilla_transformer.interop.interface import ConversionError

PAD, START = 0, 1
SIZES = {
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "dropout": 0.2,
    "max_position_embeddings": 11,
}
ONE = {"decoder_vocab_size": None, "share_encoder_decoder_embeddings": True}
VARIANTS = {
    "post-norm": {},
    "post-norm with final norms": {"final_layer_norm": True, "attention_bias": True},
    "pre-norm": {"norm_position": "pre", "final_layer_norm": True},
    "pre-norm without final norms": {"norm_position": "pre", "final_layer_norm": False, "attention_bias": True},
    "untied": {"tie_word_embeddings": False},
    "one vocabulary": ONE,
    "one vocabulary, untied": {**ONE, "tie_word_embeddings": False},
    "output bias": {"output_bias": True, "scale_embedding": False},
    "learned": {"position_encoding": "learned"},
    "fairseq": {"position_encoding": "fairseq", "layer_norm_eps": 1e-3},
    "marian": {"position_encoding": "marian", "activation_function": "swish", "attention_bias": True},
    "tensor2tensor": {"position_encoding": "tensor2tensor", "activation_function": "gelu"},
    "bfloat16": {"dtype": torch.bfloat16, "output_bias": True},
    "float16": {"dtype": torch.float16},
}


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["a man rides", "ein Mann fährt", "two dogs", "zwei Hunde"]
    return VanillaTransformerTokenizerFast.train_from_iterator(texts, vocab_size=270, show_progress=False)


def make_model(tokenizer, dtype=torch.float32, **fields):
    rows = {"vocab_size": len(tokenizer) + 5, "decoder_vocab_size": len(tokenizer) + 3}
    usual = {**SIZES, **rows, "share_encoder_decoder_embeddings": False}
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**{**usual, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (0.3 if parameter.ndim == 1 else 0.1) * torch.randn_like(parameter)
    return model.to(dtype)


def note_of(notes, beginning):
    (note,) = [note.removeprefix(beginning) for note in notes if note.startswith(beginning)]
    return note


def loaded(notes, folder, monkeypatch):
    """Does what the note says."""
    names = {"json": json, "torch": torch, "transformers": transformers, "safetensors": safetensors}
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        exec(note_of(notes, "load it, in its folder: "), names)
    return names["transformer"].eval(), names["weights"]


@torch.no_grad()
def logits_of(transformer, weights, scale, source, target):
    """The whole model, by what the notes say of embeddings, positions, mask and output."""
    sides = zip(("src", "tgt"), (source, target), strict=True)
    embedded = [
        F.embedding(ids, weights[f"{side}_embed.weight"]) * scale + weights[f"{side}_positions.weight"][: ids.shape[1]]
        for side, ids in sides
    ]
    hidden = transformer(
        *embedded,
        tgt_mask=torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1),
        src_key_padding_mask=source == PAD,
        tgt_key_padding_mask=target == PAD,
        memory_key_padding_mask=source == PAD,
    )
    return F.linear(hidden, weights["generator.weight"], weights.get("generator.bias"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_there_and_back(vanilla_transformer, tokenizer, tmp_path, monkeypatch, variant):
    model = make_model(tokenizer, **VARIANTS[variant])
    if variant == "learned":
        model.get_encoder().embed_positions.weight.data[8] = 0  # as fairseq's padding has it
    model.save_pretrained(tmp_path / "ours")
    notes = export(model, tmp_path / "out", to="torch", tokenizer=tokenizer)

    transformer, weights = loaded(notes, tmp_path / "out", monkeypatch)
    if model.dtype == torch.float32:
        source, target = torch.randint(4, len(tokenizer), (2, 3, 9))
        target = target[:, :7]
        target[:, 0] = START
        source[0, 5:], source[1, 3:], target[1, 4:] = PAD, PAD, PAD
        scale = float(note_of(notes, "embeddings are multiplied by ").split(",")[0])
        found = logits_of(transformer, weights, scale, source, target)
        expected = model(source, (source != PAD).long(), target, decoder_attention_mask=(target != PAD).long()).logits
        real = target != PAD
        assert expected[real].std() > 0.3
        torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=3e-5)

    back = note_of(notes, "back: ").partition(";")[0].replace("DIR", str(tmp_path / "out"))
    program, *arguments = back.replace("NEW", str(tmp_path / "back")).split()
    assert program == "vanilla-transformer"
    code, _, err = vanilla_transformer(*arguments)
    assert (code, err) == (0, "")
    states = [load_file(tmp_path / name / "model.safetensors") for name in ("ours", "back")]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert {value.dtype for value in states[1].values()} == {model.dtype}
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "back")]
    assert [config.pop("tokenizer_fingerprint", None) for config in configs] == [None, None]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"decoder_attention_heads": 2}, "encoder_attention_heads is 4 and decoder_attention_heads 2"),
        ({"head_dim": 5}, "head_dim is 5"),
    ],
)
def test_what_it_has_no_place_for_is_refused(tokenizer, tmp_path, fields, reason):
    with pytest.raises(ConversionError, match=f"torch.nn.Transformer.*{reason}"):
        export(make_model(tokenizer, **fields), tmp_path / "out", to="torch", tokenizer=tokenizer)
    assert not any(tmp_path.iterdir())


def test_a_format_that_isnt_there(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="there is no format 'tflite'; give one of ctranslate2, onnx, stock, torch"):
        export(make_model(tokenizer), tmp_path / "out", to="tflite", tokenizer=tokenizer)
    with pytest.raises(TypeError, match="unexpected keyword argument 'quantization'"):
        export(make_model(tokenizer), tmp_path / "out", to="torch", tokenizer=tokenizer, quantization="int8")
    assert not any(tmp_path.iterdir())
