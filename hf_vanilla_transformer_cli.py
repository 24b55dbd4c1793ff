"""Starts the command `vanilla-transformer`, whose `--help` takes a tenth of a second."""

import sys


def main() -> int:
    """Runs the command line with the arguments of this process and returns its exit code."""
    from hf_vanilla_transformer.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
