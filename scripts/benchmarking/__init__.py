"""What `scripts/benchmark.py` is made of."""
