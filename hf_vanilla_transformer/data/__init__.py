"""Corpora, file formats, batches by tokens, tokenizers of symbols."""
