"""The page's JavaScript computes what PyTorch computes: logits, searches and tokens; and switches do what they say."""

import random
from copy import deepcopy

import pytest
import torch
from small_models import TEXTS, assert_computed, assert_logits, assert_same_hypotheses, logits_of, model_with
from torch import nn

from hf_vanilla_transformer import VanillaTransformerTokenizerFast
from hf_vanilla_transformer.explain.contents import ACTIVATIONS

VARIANTS = {
    "paper": {},
    "pre": {"norm_position": "pre", "final_layer_norm": True, "activation_function": "gelu"},
    "biases": {"attention_bias": True, "output_bias": True, "position_encoding": "fairseq", "layer_norm_eps": 1e-3},
    "widths": {"head_dim": 5, "value_head_dim": 7, "position_encoding": "tensor2tensor"},
    "odd": {"d_model": 21, "encoder_attention_heads": 3, "decoder_attention_heads": 7, "encoder_ffn_dim": 41},
    "odd halves": {"d_model": 21, "encoder_attention_heads": 3, "decoder_attention_heads": 7,
                   "position_encoding": "marian", "activation_function": "silu"},
    "separate": {"tie_word_embeddings": False, "share_encoder_decoder_embeddings": False, "scale_embedding": False,
                 "position_encoding": "learned", "max_position_embeddings": 64, "activation_function": "gelu_new"},
    "tanh": {"decoder_layers": 1, "activation_function": "tanh", "position_encoding": "tensor2tensor", "d_model": 22,
             "encoder_attention_heads": 2},
}  # fmt: skip
ODD_TEXTS = [
    "", " ", "  half  past nine ", "twenty-one, (twenty)  ... two!", "</s><pad> <s>a", "é ñ 漢字 🙂\u200b",
    "a\x85b\ufeffc\x1c",
    "x" * 600, "\t\n new\nline", "«Zwölf» — „acht“ …", "\u2028\u3000a\u00a0b", "e\u0301\U0001f468\u200d\U0001f469",
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_searches_are_those_of_pytorch(compute, tokenizer, variant):
    model = model_with(tokenizer, **VARIANTS[variant])
    model.generation_config.max_extra_length = 6
    assert_computed(compute, model, tokenizer, TEXTS[:4], [1, 9, 30, 77, 200])


@pytest.mark.parametrize(
    ("early_stopping", "penalty", "limit"),
    [
        (True, {"gnmt_length_penalty": 1.4}, {"max_extra_length": 2}),
        (False, {"gnmt_length_penalty": 0.6}, {"max_new_tokens": 5}),
        (False, {"gnmt_length_penalty": None, "length_penalty": -0.5}, {"max_extra_length": 0}),
        ("never", {"gnmt_length_penalty": 1.4}, {"max_length": 7}),
    ],
)
def test_searches_end_as_the_packages_do(compute, tokenizer, early_stopping, penalty, limit):
    model = model_with(tokenizer, decoder_layers=1, encoder_layers=1)
    with torch.no_grad():
        model.lm_head.weight[2] += 0.25 * model.lm_head.weight.norm(dim=1).mean()  # ends are likely
    model.generation_config.update(early_stopping=early_stopping, **penalty, **{"max_extra_length": None, **limit})
    results = compute(model, tokenizer, [{"text": text, "plan": {"beams": [2, 5]}} for text in TEXTS])
    for text, result in zip(TEXTS, results, strict=True):
        batch = tokenizer(text, return_tensors="pt")
        for beams in (2, 5):
            assert_same_hypotheses(model, batch, result[f"beams{beams}"])


@pytest.mark.parametrize("merges", [True, False])
def test_texts_are_read_and_written_as_by_the_tokenizer(compute, merges):
    tokenizer = VanillaTransformerTokenizerFast.train_from_iterator(
        [*TEXTS, *ODD_TEXTS, "x, y. x, y."], vocab_size=420, merge_punctuation=merges
    )
    letters, draw = "ab ,.<s>/pad\u00e9\n\t\u2003-«漢🙂\x1c\u0301", random.Random(0)
    texts = [*ODD_TEXTS, *("".join(draw.choices(letters, k=draw.randint(1, 30))) for _ in range(300))]
    results = compute(model_with(tokenizer), tokenizer, [{"text": text} for text in texts])
    for text, result in zip(texts, results, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert (text, result["ids"]) == (text, ids)
        assert result["decoded"] == tokenizer.decode(ids, skip_special_tokens=True) == text
        assert result["readable"] == tokenizer.readable_pieces(ids)


def test_weights_of_8_bits_are_those_rounded_to_a_scale_for_each_row(compute, tokenizer):
    model = model_with(tokenizer, attention_bias=True)
    case = {"text": "half past nine", "target": [1, 9, 30]}
    (result,) = compute(model, tokenizer, [case], quantization="int8")
    rounded = deepcopy(model)
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.ndim == 2:
                scale = parameter.abs().amax(dim=1, keepdim=True) / 127
                parameter.copy_((parameter / scale).round() * scale)
    expected = logits_of(rounded, result["ids"], case["target"])
    assert_logits(result["logits"], expected)
    assert not torch.allclose(expected, logits_of(model, result["ids"], case["target"]), atol=1e-3)


# ---- Switches: each against a change of the model in PyTorch ----
def without_positions(model):
    for stack in (model.model.encoder, model.model.decoder):
        stack.embed_positions.table.zero_()


def undivided(model):
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 1.0


def without_head(model):
    attention = model.model.decoder.layers[1].encoder_attn
    attention.v_proj.weight[attention.value_head_dim :].zero_()  # head 2 of 2


def without_residual(model):
    for layer in (*model.model.encoder.layers, *model.model.decoder.layers):
        for norm in (one for one in layer.children() if isinstance(one, nn.LayerNorm)):
            norm.forward = lambda x, sublayer, norm=norm: nn.LayerNorm.forward(norm, sublayer(x))


SWITCHES = {
    "no positions": ({"positions": False}, without_positions),
    "no division": ({"scaled": False}, undivided),
    "no residual": ({"residual": False}, without_residual),
    "a head off": ({"off": {"part": "cross", "layer": 1, "head": 1}}, without_head),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_switches_change_the_computation_as_they_say(compute, tokenizer, switch):
    options, change = SWITCHES[switch]
    model = model_with(tokenizer)
    case = {"text": "half past nine", "target": [1, 9, 30, 77], "options": options}
    (result,) = compute(model, tokenizer, [case])
    untouched = logits_of(model, result["ids"], case["target"])
    with torch.no_grad():
        change(model)
    expected = logits_of(model, result["ids"], case["target"])
    assert_logits(result["logits"], expected)
    assert not torch.allclose(expected, untouched, atol=1e-2)


def test_the_other_order_of_norms_is_that_of_the_other_configuration(compute, tokenizer):
    model = model_with(tokenizer)
    other = model_with(tokenizer, norm_position="pre")
    other.load_state_dict(model.state_dict())
    case = {"text": "half past nine", "target": [1, 9, 30, 77], "options": {"norm": "pre"}}
    (result,) = compute(model, tokenizer, [case])
    assert_logits(result["logits"], logits_of(other, result["ids"], case["target"]))


def test_without_the_causal_mask_a_position_sees_later_ones(compute, tokenizer):
    model = model_with(tokenizer)
    case = {"text": "half past nine", "target": [1, 9, 30, 77], "options": {"causal": False}, "plan": {"beams": [1]}}
    (result,) = compute(model, tokenizer, [case])
    seen = torch.ones(1, 1, 4, 4, dtype=torch.bool)
    with torch.no_grad():  # such a mask numbers positions by what each sees: they are the same without it
        for layer in model.model.decoder.layers:
            layer.self_attn.is_causal = False
        model.set_attn_implementation("eager")
        stack = model.model.decoder
        stack.embed_positions.forward = lambda ids, length, table=stack.embed_positions.table: table[None, :length]
        outputs = model(
            input_ids=torch.tensor([result["ids"]]), decoder_input_ids=torch.tensor([case["target"]]),
            decoder_attention_mask=seen,
        )  # fmt: skip
    assert_logits(result["logits"], outputs.logits[0])


def test_every_activation_is_pytorchs(compute, tokenizer):
    for name in ACTIVATIONS:
        model = model_with(tokenizer, encoder_layers=1, decoder_layers=1, activation_function=name)
        (result,) = compute(model, tokenizer, [{"text": "nine", "target": [1, 9, 30]}])
        assert_logits(result["logits"], logits_of(model, result["ids"], [1, 9, 30]))
