"""Ensembles: several models that decode as one."""

from collections.abc import Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.loading import tokenizer_fingerprint
from .engine_backend import EnsembleBackend

# Fields that the members of an ensemble have in common, beside the tokenizer.
SHARED_FIELDS = ("vocab_size", "decoder_vocab_size", "decoder_start_token_id", "eos_token_id", "pad_token_id")


def ensemble(models: Sequence[PreTrainedModel], tokenizers: Sequence[PreTrainedTokenizerBase]) -> EnsembleBackend:
    """Makes one of several models: at each step, its probabilities are the mean of theirs.

    It decodes as the first model does, by that one's generation config, greedily or with beams.

    Args:
        models: The members, on one device, with the engine attached or not. Their sizes may differ, their vocabulary
            may not.
        tokenizers: Their tokenizers, in the same order.

    Returns:
        What `translate`, `decode` and `score_targets` take in a model's place.

    Raises:
        ValueError: There is no member, or they have different vocabularies or special tokens.
    """
    if not models or len(models) != len(tokenizers):
        raise ValueError(f"{len(models)} models and {len(tokenizers)} tokenizers; give each of at least one its own")
    fix = "an ensemble averages the probabilities of one vocabulary, so train its members with one tokenizer"
    vocabulary, fingerprint = tokenizers[0].get_vocab(), tokenizer_fingerprint(tokenizers[0])
    for number, (model, tokenizer) in enumerate(zip(models[1:], tokenizers[1:], strict=True), start=2):
        if tokenizer.get_vocab() != vocabulary or tokenizer_fingerprint(tokenizer) != fingerprint:
            raise ValueError(f"model {number} has another tokenizer than model 1; {fix}")
        for name in SHARED_FIELDS:
            own, wanted = getattr(model.config, name, None), getattr(models[0].config, name, None)
            if own != wanted:
                raise ValueError(f"model {number} has {name}={own} and model 1 {name}={wanted}; {fix}")
    return EnsembleBackend(models, tokenizers[0])
