"""Starts the command `vanilla-transformer`, whose `--help` takes a tenth of a second.

Importing the package registers its classes with transformers, which takes seconds. Where this module has been imported
before, the package leaves that to the commands: those that load a model register first.
"""

import sys


def main() -> int:
    """Runs the command line with the arguments of this process and returns its exit code."""
    from hf_vanilla_transformer.cli import main

    return main()


if __name__ == "__main__":
    import hf_vanilla_transformer_cli  # under its name, by which the package knows it

    sys.exit(hf_vanilla_transformer_cli.main())
