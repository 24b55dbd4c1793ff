"""Translations by a model or an ensemble at hand, without a `Translator`."""

from hf_vanilla_transformer.translation.backend import Call
from hf_vanilla_transformer.translation.decoding import backend_of, translate


def decode(model, tokenizer, sentences, **options):
    """The n-best list of each sentence; options are those of a `Call`."""
    return translate(Call.of(backend_of(model, tokenizer), tokenizer, options), list(sentences))
