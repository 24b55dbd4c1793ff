"""The trainer, its arguments and recipes, checkpoints, averaging, sharding."""
