"""Builds the API reference from the docstrings with pdoc, as HTML; `make docs` runs it. A warning is an error.

python -m scripts.api_reference --output build/docs
"""

import argparse
import warnings
from pathlib import Path
from typing import Literal

import pdoc

import hf_vanilla_transformer
from hf_vanilla_transformer import configuration_vanilla_transformer, engine, translation

# The modules that users import; the others are documented in their files.
MODULES = (
    "hf_vanilla_transformer",
    "hf_vanilla_transformer.configuration_vanilla_transformer",
    "hf_vanilla_transformer.modeling_vanilla_transformer",
    "hf_vanilla_transformer.generation_vanilla_transformer",
    "hf_vanilla_transformer.tokenization_vanilla_transformer",
    "hf_vanilla_transformer.tokenization_dictionary",
    "hf_vanilla_transformer.tokenization_source_target",
    "hf_vanilla_transformer.engine",
    "hf_vanilla_transformer.data",
    "hf_vanilla_transformer.metrics",
    "hf_vanilla_transformer.checkpoints",
    "hf_vanilla_transformer.translation",
    "hf_vanilla_transformer.translation.attention",
    "hf_vanilla_transformer.interop",
    "hf_vanilla_transformer.hub",
    "hf_vanilla_transformer.plots",
    "hf_vanilla_transformer.training",
)


def main() -> None:
    """Writes the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/docs"), help="folder of the pages")
    arguments = parser.parse_args()
    warnings.simplefilter("error", UserWarning)  # pdoc's: a name or an annotation that it can't resolve
    for module in (hf_vanilla_transformer, engine, translation):
        for name in module.__all__:  # they are imported at their first use, so pdoc doesn't see them
            setattr(module, name, getattr(module, name))
    # The configuration inherits a field whose annotation needs it.
    vars(configuration_vanilla_transformer)["Literal"] = Literal
    pdoc.render.configure(docformat="google", footer_text=f"Version {hf_vanilla_transformer.__version__}")
    pdoc.pdoc(*MODULES, output_directory=arguments.output)
    print(f"The API reference is in {arguments.output / 'hf_vanilla_transformer.html'}")


if __name__ == "__main__":
    main()
