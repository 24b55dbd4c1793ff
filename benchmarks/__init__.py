"""Benchmarks against other implementations: `python -m benchmarks`."""
