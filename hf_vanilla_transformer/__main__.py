"""`python -m hf_vanilla_transformer COMMAND` is `vanilla-transformer COMMAND`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
