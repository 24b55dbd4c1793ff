"""`vanilla-transformer evaluate`."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Measure BLEU, chrF and perplexity of one or several checkpoints."""
