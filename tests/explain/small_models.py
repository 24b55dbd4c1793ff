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


def assert_same_hypotheses(model, batch, found):
    options = {"num_beams": len(found), "num_return_sequences": len(found), "return_dict_in_generate": True}
    expected = model.generate(**batch, **options, output_scores=True)
    plan = Plan.of({}, model.generation_config)
    for one, tokens, score in zip(found, expected.sequences[:, 1:].tolist(), expected.sequences_scores, strict=True):
        length = next((n for n, token in enumerate(tokens, 1) if token in plan.ends), len(tokens))
        assert one["tokens"] == tokens[:length]
        assert one["score"] == pytest.approx(score.item(), abs=1e-4)
