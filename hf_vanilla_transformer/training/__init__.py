"""The trainer, recipes, and the run from corpora to scores."""
