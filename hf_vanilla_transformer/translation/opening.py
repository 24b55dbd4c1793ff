"""Opens what a `Translator` gets: folders, names on the Hub and models, by PyTorch and transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from transformers import MarianMTModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from ..checkpoints.kinds import CONFIG, SOURCE_SPM, TOKENIZER, Kind, check_kind, kind_of
from ..checkpoints.loading import Where, check_tokenizer, load_checkpoint
from ..data.hub_names import check_model_on_hub
from ..engine import attach_if_supported
from ..errors import CheckpointError, first_line
from ..interop.interface import ConversionError
from ..interop.marian import from_marian
from .backend import Backend, DeviceError, Opening, check_model
from .ctranslate2 import CTranslate2Backend
from .engine_backend import EngineBackend
from .ensembles import ensemble

Opened = tuple[PreTrainedTokenizerBase, Any, Backend]  # the tokenizer, the model, and what decodes with it


def open_to_translate(model: str | Path | PreTrainedModel | Backend | Sequence[str | Path], how: Opening) -> Opened:
    """Opens what a `Translator` gets, and attaches the engine or converts it for CTranslate2.

    Several names are opened as one model that averages their probabilities.
    """
    if how.backend == "engine" and how.threads is not None:
        torch.set_num_threads(how.threads)
    if isinstance(model, Sequence) and not isinstance(model, str):
        return _open_ensemble(model, how)
    if isinstance(model, str | Path):
        place = how.device if how.backend == "engine" else "cpu"
        tokenizer, loaded = load_to_translate(model, place, dtype=how.dtype, **how.where)
    elif how.backend == "engine" and isinstance(model, Backend):  # an ensemble
        if how.tokenizer is None:
            raise ValueError("an ensemble needs the tokenizer of its members; give tokenizer=...")
        if how.device is not None or how.compute_type != "default":
            raise ValueError(
                "device and compute_type are those of an ensemble's members; load them so, or move them and attach the "
                "engine to each, before ensemble(...)"
            )
        return how.tokenizer, model, model
    else:
        tokenizer, loaded = _checked(model, how.tokenizer)
        if how.backend == "engine" and how.device is not None:
            loaded = loaded.to(how.device)
    if how.backend == "ctranslate2":  # a model that is loaded for it is given up now
        own = from_marian(loaded)[0] if isinstance(loaded, MarianMTModel) else loaded
        device = str(how.device or default_device())
        made = CTranslate2Backend.converted(own, tokenizer, device, how.compute_type, how.threads)
        return tokenizer, made, made
    if isinstance(model, str | Path) or how.compute_type != "default":
        attach_if_supported(loaded, how.compute_type)
    return tokenizer, loaded, EngineBackend(loaded, tokenizer)


def _open_ensemble(names: Sequence[str | Path], how: Opening) -> Opened:
    if how.tokenizer is not None:
        raise ValueError("tokenizer is for a model that is given; folders and names have their own")
    if how.backend != "engine":
        raise ValueError(f"several models can't be averaged by the backend {how.backend}; give the models themselves")
    opened = [open_to_translate(name, how) for name in names]
    try:
        averaged = ensemble([model for _, model, _ in opened], [own for own, _, _ in opened])
    except ValueError as error:
        raise ValueError(f"several models can't be averaged: {first_line(error)}") from error
    return opened[0][0], averaged, averaged


def load_to_translate(
    name: str | Path,
    device: str | torch.device | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    **where: Unpack[Where],
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Loads a model and its tokenizer with the arguments of `Translator`; a Marian model is converted first.

    Raises `CheckpointError` (can't be loaded or converted), `HubError` (neither a folder nor on the Hub),
    `DeviceError`.
    """
    device = device or default_device()
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"device {device} can't be used here ({first_line(error)}); try cpu") from error
    kind = check_kind(name)
    # The check of the Hub has no token but the user's own.
    where["local_files_only"] = not (kind is not Kind.NAME or where.get("token") or check_model_on_hub(str(name)))
    if kind is Kind.OPUS_MT or (kind is Kind.NAME and _is_opus_mt(str(name), where)):
        tokenizer, model = _converted(name, dtype, where)
    else:
        tokenizer, model = load_checkpoint(name, dtype=dtype, **where)
    if dtype == "auto" and model.dtype == torch.float16 and torch.device(device).type == "cpu":
        model = model.float()  # the same numbers; CPUs compute half precision slowly
    return tokenizer, model.to(device)


def default_device() -> str:
    """Returns CUDA if it is available, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _is_opus_mt(name: str, where: Where) -> bool:
    """Tells whether a Marian model with OPUS-MT's tokenizer is on the Hub, and fetches these files."""
    quiet = {f"_raise_exceptions_for_{problem}": False for problem in ("missing_entries", "connection_errors")}
    try:
        files = [cached_file(name, file, **where, **quiet) for file in (CONFIG, SOURCE_SPM, TOKENIZER)]
        return files[0] is not None and kind_of(Path(files[0]).parent) is Kind.OPUS_MT
    except (OSError, ValueError):  # loading it says what is wrong
        return False


def _converted(
    name: str | Path, dtype: torch.dtype | str, where: Where
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    is_local = where.get("local_files_only", False)
    try:
        model, tokenizer = from_marian(
            name, revision=where.get("revision"), token=where.get("token"), local_files_only=is_local
        )
    except ConversionError as error:
        raise CheckpointError(f"can't convert {name} ({first_line(error)})") from error
    assert tokenizer is not None
    model.name_or_path = str(name)
    if dtype != "auto":
        model = model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    return tokenizer, model


def _checked(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    if not hasattr(model, "generate") or not hasattr(model, "config"):
        raise ValueError(f"model is of type {type(model).__name__}; give a folder, a name on the Hub, or a model")
    if tokenizer is None:
        raise ValueError("a model needs its tokenizer; give tokenizer=AutoTokenizer.from_pretrained(...)")
    check_model(model)
    check_tokenizer(tokenizer, model.config, type(model).__name__)
    return tokenizer, model
