"""What `-m benchmarks` is made of."""
