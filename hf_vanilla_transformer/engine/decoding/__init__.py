"""Decoding: linear maps, prepared weights, the incremental decoder, searches, and calls of `generate()`."""
