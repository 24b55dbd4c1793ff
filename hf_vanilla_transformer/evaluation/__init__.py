"""Translation of many sentences, and metrics."""
