"""Attention weights of one sentence: those of the model itself, for every kind of tokenizer, and odd texts."""

import pytest
import torch
from opus_mt import opus_mt_folder
from random_models import new_marian
from transformers import AutoModelForSeq2SeqLM

from hf_vanilla_transformer.interop.marian import from_marian
from hf_vanilla_transformer.translation.attention import MAX_TOKENS, attention_of

NAMES = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}


@pytest.fixture
def model(tiny_checkpoint):
    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_checkpoint).eval()
    model.generation_config.max_extra_length = 3  # untrained, it finds no end
    return model


def _check(attention, outputs):
    """The weights are what the model gives, and each row is a distribution over its keys."""
    for name, theirs in NAMES.items():
        weights = getattr(attention, name)
        assert torch.equal(weights, torch.stack(outputs[theirs])[:, 0])
        assert torch.allclose(weights.sum(dim=-1), torch.ones(weights.shape[:-1]), atol=1e-5)
    source, target = len(attention.source_pieces), len(attention.target_pieces)
    assert len(attention.input_pieces) == target
    assert attention.encoder.shape[2:] == (source, source)
    assert attention.decoder.shape[2:] == (target, target)
    assert attention.cross.shape[2:] == (target, source)


def test_the_weights_are_those_of_the_model_for_a_forced_target_and_its_own(model, tokenizer):
    batch = tokenizer("half past nine", text_target="halb zehn", return_tensors="pt")
    labels, inputs = batch.pop("labels"), batch
    own = model.generate(**inputs)
    for target, sequence in (("halb zehn", torch.cat([torch.tensor([[1]]), labels], dim=1)), (None, own)):
        attention = attention_of(model, tokenizer, "half past nine", target)
        with torch.no_grad():
            _check(attention, model(**inputs, decoder_input_ids=sequence[:, :-1], output_attentions=True))
        assert attention.source_pieces == tokenizer.readable_pieces(inputs["input_ids"][0])
        assert attention.input_pieces == tokenizer.readable_pieces(sequence[0, :-1])
        assert attention.target_pieces == tokenizer.readable_pieces(sequence[0, 1:])
        assert not attention.cross.requires_grad


@pytest.mark.parametrize("text", ["שלום עולם", "半分 九時", "\u200b", "🙂 </script>", "a " * 250])
def test_odd_texts_have_weights(model, tokenizer, text):
    attention = attention_of(model, tokenizer, text, text)
    assert len(attention.source_pieces) == len(tokenizer(text)["input_ids"])
    assert all(isinstance(piece, str) and piece for piece in attention.source_pieces)


@pytest.mark.parametrize(
    ("source", "target", "error", "message"),
    [
        ("", None, ValueError, "source is empty; give a sentence$"),
        ("it", " ", ValueError, "target is empty; give a sentence, or leave it out"),
        (None, None, TypeError, "source is of type NoneType; give one sentence, a string"),
        ("\ud800", None, ValueError, "has a lone surrogate at position 0"),
        ("it " * 600, None, ValueError, f"source has more than {MAX_TOKENS} tokens; give one sentence of it"),
        ("it", "es", ValueError, r"in training mode, .* call model.eval\(\) first"),
    ],
)
def test_what_has_no_attention(model, tokenizer, source, target, error, message):
    model.train("in training" in message)
    with pytest.raises(error, match=message):
        attention_of(model, tokenizer, source, target)


def test_weights_that_are_no_numbers_are_refused(model, tokenizer):
    with torch.no_grad():
        model.model.decoder.layers[1].encoder_attn.k_proj.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="cross_attentions contains NaN or infinity; compute in float32, or check the"):
        attention_of(model, tokenizer, "it", "es")


def test_a_model_of_transformers_has_them_too(tokenizer):
    marian = new_marian(len(tokenizer), attn_implementation="eager")
    attention = attention_of(marian, tokenizer, "half past nine", "halb zehn")
    assert attention.cross.shape == (2, 2, len(attention.target_pieces), len(attention.source_pieces))
    assert attention.input_pieces == ["<s>", *attention.target_pieces[:-1]]
    assert attention_of(marian, tokenizer, "half past nine").cross.shape[:2] == (2, 2)


def test_opus_mt_tokenizers_name_each_side_by_its_own(tmp_path):
    model, tokenizer = from_marian(opus_mt_folder(tmp_path / "opus", separate_vocabs=True))
    attention = attention_of(model, tokenizer, "A man is riding a bicycle.", "Ein Mann fährt.")
    assert "".join(attention.source_pieces) == "▁A▁man▁is▁riding▁a▁bicycle.</s>"
    assert attention.target_pieces[-1] == "</s>"
    assert attention.input_pieces[1:] == attention.target_pieces[:-1]
