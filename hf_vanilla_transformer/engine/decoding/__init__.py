"""Decoding: linear maps, prepared weights, the incremental and the compiled decoder, searches, and `generate()`."""
