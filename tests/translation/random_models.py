"""Random models that translate: what the tests of `translation` share."""

import copy

import pytest
import torch
from transformers import MarianConfig, MarianMTModel

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration, engine
from hf_vanilla_transformer.translation.ensembles import ensemble
from hf_vanilla_transformer.translation.translator import Translator

TEXTS = [
    "twenty-one",
    "half past nine on the fourth of May",
    "it",
    "",
    "drei Euro und fünf Cent",
    "it costs two hundred",
]


def new_model(vocab_size, seed=3, end=3.0, **fields):
    """A random model whose translations depend on the source and, the more so for a larger `end`, end."""
    torch.manual_seed(seed)
    sizes = {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "output_bias": True,
        "tie_word_embeddings": False,  # tied, it would repeat itself
    }  # fmt: skip
    config = VanillaTransformerConfig(vocab_size=vocab_size, **sizes | fields)
    model = VanillaTransformerForConditionalGeneration(config).eval()
    model.lm_head.weight.data *= 2
    model.lm_head.bias.data[config.eos_token_id] = end
    return model


def new_marian(vocab_size, **fields):
    """A random model of another architecture."""
    torch.manual_seed(0)
    sizes = {f"{stack}_{what}": 2 for stack in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    tokens = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    config = MarianConfig(
        vocab_size=vocab_size, d_model=8, encoder_ffn_dim=8, decoder_ffn_dim=8, **sizes, **tokens, **fields
    )
    return MarianMTModel(config).eval()


KINDS = ["module", "packed", "ensemble", "ctranslate2"]


def translator_of(kind, model, tokenizer):
    """A translator by one of the backends."""
    if kind == "ctranslate2":
        pytest.importorskip("ctranslate2")
        return Translator(model, tokenizer=tokenizer, backend=kind)
    if kind == "ensemble":
        return Translator(ensemble([model, copy.deepcopy(model)], [tokenizer] * 2), tokenizer=tokenizer)
    if kind == "packed":
        model = copy.deepcopy(model)
        engine.attach(model)
    return Translator(model, tokenizer=tokenizer)


def generated(model, tokenizer, text, **options):
    """New tokens by transformers' own loop."""
    return model.generate_by_transformers({**tokenizer([text], return_tensors="pt"), **options})[0, 1:].tolist()
