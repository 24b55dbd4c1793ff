"""Mappings that come with the package: YAML files, each for the state dicts of one model that many people have."""

from importlib import resources

FOLDER = resources.files(__name__)


def shipped_mappings() -> dict[str, str]:
    """Returns the mappings' names, sorted -> the first line of each: whose it is."""
    files = sorted((one for one in FOLDER.iterdir() if one.name.endswith(".yaml")), key=lambda one: one.name)
    return {
        one.name.removesuffix(".yaml"): one.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for one in files
    }
