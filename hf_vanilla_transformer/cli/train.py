"""`vanilla-transformer train`."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Train a model by a recipe."""
