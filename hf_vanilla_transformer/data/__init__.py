"""Corpora, file formats, batches by tokens, BPE-dropout."""
