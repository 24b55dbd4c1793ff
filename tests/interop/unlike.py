"""Small random models of ours whose sizes all differ, so that no axis can be taken for another."""

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

SIZES = {
    "d_model": 24, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36, "max_position_embeddings": 64,
    "dropout": 0.0,
}  # fmt: skip
PRE = {"norm_position": "pre", "final_layer_norm": True}
UNSHARED = {"share_encoder_decoder_embeddings": False}


def small_model(vocab_size, **fields) -> VanillaTransformerForConditionalGeneration:
    config = VanillaTransformerConfig(**{"vocab_size": vocab_size, **SIZES, **fields})
    return VanillaTransformerForConditionalGeneration(config).eval()
