"""Describes a checkpoint by its files: nothing is computed with its weights, and none of its code runs.

`interop.describe` describes models in CTranslate2's format, too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from ..checkpoints.code import other_code
from ..checkpoints.headers import read_json, tensors_in
from ..checkpoints.kinds import (
    GENERATION_CONFIG,
    PYTORCH_WEIGHTS,
    SAFETENSORS,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Kind,
    check_kind,
)
from ..checkpoints.loading import check_tokenizer, load_config, load_tokenizer, tokenizer_fingerprint
from ..data.hub_names import without_weights
from ..errors import CheckpointError

PARTS = ("embeddings", "encoder", "decoder", "output projection", "others")
PROJECTION = ("lm_head", "final_logits_bias", "projection")  # names of its tensors
SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}  # of safetensors' types; others have one byte
NOT_DECODING = ("_from_model_config", "transformers_version")


@dataclass(frozen=True)
class TokenizerFacts:
    """A checkpoint's tokenizer."""

    kind: str  # its class, or its files
    size: int  # number of its tokens
    special_tokens: Mapping[str, str]  # name of each, such as "eos_token" -> its text and id, "</s> (2)"
    fingerprint: str | None = None  # digest of its vocabulary and segmentation


@dataclass(frozen=True)
class Description:
    """The description of a checkpoint."""

    name: str  # as given
    kind: str  # its class, "VanillaTransformerForConditionalGeneration", or the format of an export
    config: Mapping[str, object]  # fields of its configuration
    parameters: Mapping[str, int]  # one of `PARTS` -> their number; tied matrices count once; empty: no weights here
    types: Sequence[str]  # of the saved tensors, as safetensors names them
    saved_bytes: int  # what the saved tensors take
    tokenizer: TokenizerFacts | None  # None: there is none, or it can't be used
    decoding: Mapping[str, object]  # what generation_config.json sets
    code: str | None = None  # what its own code is, if it isn't this version's
    problems: Sequence[str] = ()  # why the model or its tokenizer can't be used as they are

    @property
    def total(self) -> int | None:
        """Number of parameters; None: it isn't known."""
        return sum(self.parameters.values()) or None


def describe(name: str) -> Description:
    """Describes a checkpoint, in a folder or on the Hub, by its configuration, its weights' headers and other files.

    Raises:
        CheckpointError: It is no model of transformers, or a file is damaged.
        HubError: The Hub has no such model, or it can't be reached.
    """
    folder, tensors = (Path(name), None) if Path(name).is_dir() else without_weights(name)
    kind, config = check_kind(folder, Kind.ONNX), load_config(folder)
    if tensors is None:
        is_pickled = any(folder.glob(PYTORCH_WEIGHTS)) and not any(folder.glob(SAFETENSORS))
        has_headers = kind is not Kind.ONNX and not is_pickled
        tensors = {key: entry for key, (_, entry) in tensors_in(folder).items()} if has_headers else {}
    tokenizer, problem = _tokenizer(folder, config)
    return Description(
        name=name,
        kind=str(kind) if kind is Kind.ONNX else ", ".join(config.architectures or [config.model_type]),
        config={key: value for key, value in config.to_dict().items() if not key.startswith("_")},
        parameters=parameters_by_part(tensors),
        types=sorted({kind for kind, _ in tensors.values()}),
        saved_bytes=sum(math.prod(shape) * SIZES.get(kind, 1) for kind, shape in tensors.values()),
        tokenizer=tokenizer,
        decoding=_decoding(folder),
        code=other_code(folder).note(name),
        problems=[problem] if problem else [],
    )


def parameters_by_part(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, int]:
    """Counts the numbers in tensors, which are given with their types and shapes, by `PARTS`."""
    parts = dict.fromkeys(PARTS, 0)
    for name, (_, shape) in tensors.items():
        is_embedding = ".embed" in name or "shared." in name
        stack = "embeddings" if is_embedding else name.removeprefix("model.").partition(".")[0]
        part = "output projection" if stack in PROJECTION else stack
        parts[part if part in PARTS else "others"] += math.prod(shape)
    return {part: number for part, number in parts.items() if number}


def _tokenizer(folder: Path, config: PreTrainedConfig) -> tuple[TokenizerFacts | None, str | None]:
    """Returns the facts about the tokenizer, and the reason why it can't be used."""
    if not any((folder / file).is_file() for file in (TOKENIZER_CONFIG, TOKENIZER)):
        return None, None
    try:
        tokenizer = load_tokenizer(folder)
    except CheckpointError as error:
        return None, f"the tokenizer: {error}"
    special = {
        name: f"{token} ({tokenizer.convert_tokens_to_ids(str(token))})"
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    facts = TokenizerFacts(type(tokenizer).__name__, len(tokenizer), special, tokenizer_fingerprint(tokenizer))
    try:
        check_tokenizer(tokenizer, config, folder.name)
    except CheckpointError as error:
        return facts, str(error)
    return facts, None


def _decoding(folder: Path) -> dict[str, object]:
    if not (folder / GENERATION_CONFIG).exists():
        return {}
    values = read_json(folder / GENERATION_CONFIG)
    return {name: value for name, value in values.items() if value is not None and name not in NOT_DECODING}
