"""`vanilla-transformer average`."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Average the last checkpoints of a run."""
