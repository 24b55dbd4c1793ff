"""Small models with sharp predictions, and what PyTorch computes of them."""

import pytest
import torch

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.plan_vanilla_transformer import Plan

TEXTS = [
    "twenty-one", "einundzwanzig", "half past nine", "halb zehn", "the fourth of May", "der vierte Mai",
    "three euros and five cents", "drei Euro und fünf Cent", "it costs two hundred", "es kostet zweihundert",
]  # fmt: skip
SMALL = {"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 2}


def model_with(tokenizer, **fields):
    """An untrained model with sharp predictions, so that searches differ from one another."""
    torch.manual_seed(3)
    config = VanillaTransformerConfig(**{"vocab_size": len(tokenizer), **SMALL, **HEADS, **fields})
    model = VanillaTransformerForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


def logits_of(model, ids, target):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), decoder_input_ids=torch.tensor([target])).logits[0]


def assert_logits(found, expected, atol=1e-4):
    torch.testing.assert_close(torch.tensor(found), expected, atol=atol, rtol=0)


def assert_computed(compute, model, tokenizer, texts, target, atol=1e-4):
    """Tokens, logits of a target, greedy search and three beams are PyTorch's."""
    cases = [{"text": text, "target": target, "plan": {"beams": [1, 3]}} for text in texts]
    for text, result in zip(texts, compute(model, tokenizer, cases), strict=True):
        batch = tokenizer(text, return_tensors="pt")
        assert batch["input_ids"][0].tolist() == result["ids"]
        assert_logits(result["logits"], logits_of(model, result["ids"], target), atol)
        greedy = model.generate(**batch, num_beams=1, early_stopping=False)[0, 1:].tolist()
        assert result["beams1"][0]["tokens"] == greedy
        assert_same_hypotheses(model, batch, result["beams3"])


def assert_same_hypotheses(model, batch, found):
    options = {"num_beams": len(found), "num_return_sequences": len(found), "return_dict_in_generate": True}
    expected = model.generate(**batch, **options, output_scores=True)
    plan = Plan.of({}, model.generation_config)
    for one, tokens, score in zip(found, expected.sequences[:, 1:].tolist(), expected.sequences_scores, strict=True):
        length = next((n for n, token in enumerate(tokens, 1) if token in plan.ends), len(tokens))
        assert one["tokens"] == tokens[:length]
        assert one["score"] == pytest.approx(score.item(), abs=1e-4)
