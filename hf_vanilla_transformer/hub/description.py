"""Describes a checkpoint by its files: nothing is computed with its weights, and none of its code runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

from ..checkpoints.code import other_code
from ..checkpoints.headers import read_json, tensors_in
from ..checkpoints.kinds import CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG, check_kind
from ..checkpoints.loading import MODEL_TYPE, check_tokenizer, load_config, load_tokenizer, tokenizer_fingerprint
from ..data.hub_names import without_weights
from ..errors import CheckpointError

PARTS = ("embeddings", "encoder", "decoder", "output projection")
SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}  # of safetensors' types; others have one byte
NOT_DECODING = ("_from_model_config", "transformers_version")


@dataclass(frozen=True)
class TokenizerFacts:
    """A checkpoint's tokenizer."""

    kind: str  # its class
    size: int  # number of its tokens
    special_tokens: Mapping[str, str]  # name of each, such as "eos_token" -> its text and id, "</s> (2)"
    fingerprint: str  # digest of its vocabulary and segmentation


@dataclass(frozen=True)
class Description:
    """The description of a checkpoint."""

    name: str  # as given
    config: Mapping[str, object]  # fields of its configuration
    parameters: Mapping[str, int]  # one of `PARTS` -> their number; tied matrices count once; empty: no weights here
    types: Sequence[str]  # of the saved tensors, as safetensors names them
    saved_bytes: int  # what the saved tensors take
    tokenizer: TokenizerFacts | None  # None: there is none, or it can't be used
    decoding: Mapping[str, object]  # what generation_config.json sets
    code: str | None = None  # what its own code is, if it isn't this version's
    problems: Sequence[str] = ()  # why the model or its tokenizer can't be used as they are

    @property
    def total(self) -> int:
        """Number of parameters."""
        return sum(self.parameters.values())


def describe(name: str) -> Description:
    """Describes a checkpoint, in a folder or on the Hub, by its configuration, its weights' headers and other files.

    Raises:
        CheckpointError: It is no checkpoint of this package's models, or a file is damaged.
        HubError: The Hub has no such model, or it can't be reached.
    """
    folder, tensors = (Path(name), None) if Path(name).is_dir() else without_weights(name)
    check_kind(folder)
    kind = read_json(folder / CONFIG).get("model_type")
    if kind != MODEL_TYPE:
        raise CheckpointError(
            f"{name} is a model of type {kind!r}, and only models of this package are described; `vanilla-transformer "
            "convert` converts a Marian model"
        )
    if tensors is None:
        tensors = {key: entry for key, (_, entry) in tensors_in(folder).items()}
    config = load_config(folder)
    tokenizer, problems = _tokenizer(folder, config)
    return Description(
        name=name,
        config={key: value for key, value in config.to_dict().items() if not key.startswith("_")},
        parameters=_parts(tensors),
        types=sorted({kind for kind, _ in tensors.values()}),
        saved_bytes=sum(math.prod(shape) * SIZES.get(kind, 1) for kind, shape in tensors.values()),
        tokenizer=tokenizer,
        decoding=_decoding(folder),
        code=other_code(folder).note(name),
        problems=problems,
    )


def _parts(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> dict[str, int]:
    parts = dict.fromkeys(PARTS, 0)
    for name, (_, shape) in tensors.items():
        stack = "embeddings" if ".embed_" in name else name.removeprefix("model.").partition(".")[0]
        parts[stack if stack in PARTS else "output projection"] += math.prod(shape)
    return {part: number for part, number in parts.items() if number}


def _tokenizer(folder: Path, config: PreTrainedConfig) -> tuple[TokenizerFacts | None, list[str]]:
    """Returns the facts about the tokenizer, and the reasons why it can't be used."""
    if not any((folder / file).is_file() for file in (TOKENIZER_CONFIG, TOKENIZER)):
        return None, []
    try:
        tokenizer = load_tokenizer(folder)
    except CheckpointError as error:
        return None, [f"the tokenizer: {error}"]
    special = {
        name: f"{token} ({tokenizer.convert_tokens_to_ids(str(token))})"
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str)
    }
    problems = []
    try:
        check_tokenizer(tokenizer, config, folder.name)
    except CheckpointError as error:
        problems = [str(error)]
    fingerprint = tokenizer_fingerprint(tokenizer)
    return TokenizerFacts(type(tokenizer).__name__, len(tokenizer), special, fingerprint), problems


def _decoding(folder: Path) -> dict[str, object]:
    if not (folder / GENERATION_CONFIG).exists():
        return {}
    values = read_json(folder / GENERATION_CONFIG)
    return {name: value for name, value in values.items() if value is not None and name not in NOT_DECODING}
