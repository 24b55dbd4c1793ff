"""A warning for checkpoints with code of their own that doesn't run."""

from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import cached_file, logging

from ..checkpoints.code import OF_MODELS, differs

logger = logging.get_logger(__name__)


def warn_of_other_code(model: PreTrainedModel) -> None:
    """Warns, once for each checkpoint, if its code differs from the installed code, the code that runs.

    Comments and layout make no difference. Nothing is fetched: files are those of a folder or of earlier downloads.
    """
    name, commit = str(model.name_or_path), getattr(model.config, "_commit_hash", None)
    if not name or not getattr(model.config, "auto_map", None):
        return
    differing = [file for file in OF_MODELS if _differs(name, file, commit)]
    if differing:
        logger.warning_once(
            f"{name} has code of its own that differs from hf_vanilla_transformer's: {', '.join(differing)}. It was "
            "edited, or saved by another version. The package is imported, so its code runs. To run the checkpoint's "
            "own, load it with `trust_remote_code=True` in a process that doesn't import the package, or by "
            "`transformers.dynamic_module_utils."
            'get_class_from_dynamic_module("modeling_vanilla_transformer.VanillaTransformerForConditionalGeneration", '
            f'"{name}").from_pretrained("{name}")`.'
        )


def _differs(name: str, file: str, commit: str | None) -> bool:
    try:
        own = cached_file(name, file, revision=commit, local_files_only=True)
    except (OSError, ValueError):  # no such folder any more, or not this file
        return False
    return differs(Path(own), file)
