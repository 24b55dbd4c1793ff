"""Decoding: a search, the decoders that it asks (packed, module, graph), and `generate()` of an attached model."""
