"""`python -m hf_vanilla_transformer COMMAND` is `vanilla-transformer COMMAND`, with an import of torch before it."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
