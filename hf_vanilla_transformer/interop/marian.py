"""Hugging Face's Marian, and with it OPUS-MT (Helsinki-NLP/opus-mt-*): the same logits and the same translations.

    model, tokenizer = from_marian("Helsinki-NLP/opus-mt-en-de")

Marian differs from the paper in its layout of the sinusoids, biases on all projections and on the output, an epsilon of
1e-5 in LayerNorm and, in OPUS-MT, the activation function and padding as the start token: all of them are fields of our
configuration.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, StrictDataclassError
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig, MarianConfig, MarianMTModel, MarianTokenizer, PreTrainedModel
from transformers.utils import logging

from ..checkpoints.loading import (
    check_tokenizer,
    json_object,
    named,
    read_json,
    tokenizer_fingerprint,
    without_advice,
)
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import first_line
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, sinusoidal_table
from .base import ConversionError, Converted, Options

logger = logging.get_logger(__name__)

# Fields that have the same name and the same meaning in both configurations.
SAME_FIELDS = (
    "vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads",
    "encoder_ffn_dim", "decoder_ffn_dim", "dropout", "attention_dropout", "activation_dropout", "activation_function",
    "max_position_embeddings", "scale_embedding", "share_encoder_decoder_embeddings", "tie_word_embeddings",
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "use_cache",
)  # fmt: skip
# What Marian always has.
FIXED_FIELDS: dict[str, Any] = {
    "position_encoding": "marian",
    "attention_bias": True,
    "output_bias": True,
    "layer_norm_eps": 1e-5,
}
# This model's parameter -> Marian's name, where it isn't the same; within layers, only the feed-forward maps differ.
NAMES = {"model.encoder.embed_tokens.weight": "model.shared.weight", "lm_head.bias": "final_logits_bias"}
POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
# Systems that look alike, and why their models can't be opened.
REFUSED = {
    "fsmt": "its tokenizer consists of Moses' scripts and fairseq's BPE, which no tokenizer here reproduces exactly",
    "vanilla_transformer": "it is a model of this package already; load it as it is",
}
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
NAMES_PER_ERROR = 20


def from_marian(
    source: str | Path | MarianMTModel,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> tuple[VanillaTransformerForConditionalGeneration, MarianTokenizer | None]:
    """Opens a Marian model as this package's.

    Args:
        source: A folder or a name on the Hub of a `MarianMTModel` with its tokenizer's files, or such a model.
        revision: Branch, tag or commit on the Hub.
        token: As for `from_pretrained`.
        local_files_only: Whether a name on the Hub is only looked for among the files of earlier downloads.

    Returns:
        The model, in evaluation mode and in the type of its weights, and its tokenizer; None with a model.

    Raises:
        ConversionError: It is no such model, a file is missing or damaged, or tensors are missing, unknown, of another
            shape or type, or not finite.
    """
    if isinstance(source, PreTrainedModel):
        if not isinstance(source, MarianMTModel):
            raise ConversionError(f"{type(source).__name__} is not a MarianMTModel")
        tensors = {name: value.detach().clone() for name, value in source.state_dict().items()}
        return _build(source.config, tensors, copy.deepcopy(source.generation_config)), None
    return _load(str(source), _folder_of(str(source), revision, token, local_files_only))


def load(source: str | Path, options: Options) -> Converted:
    """Opens a Marian model with its tokenizer and what its card says.

    Raises:
        ConversionError: As for `from_marian`.
    """
    where = {name: getattr(options, name) for name in ("revision", "token", "local_files_only")}
    folder = _folder_of(str(source), **where)
    model, tokenizer = _load(str(source), folder)
    try:
        metadata = ModelCard.load(folder / "README.md").data.to_dict()
    except Exception:  # there is none, or its YAML is damaged: what isn't known is left out
        metadata = {}
    base_model = None if Path(source).is_dir() else str(source)
    return Converted(model, tokenizer if options.with_tokenizer else None, metadata, base_model)


def recognises(source: Path) -> bool:
    """Tells by its config.json whether a folder has a Marian model of transformers."""
    return is_marian(source)


def is_marian(folder: Path) -> bool:
    """Tells by its config.json whether a folder has a Marian model of transformers."""
    config = read_json(folder / "config.json")
    return isinstance(config, dict) and config.get("model_type") == "marian"


# ---- Files ----
def _folder_of(source: str, revision: str | None, token: str | bool | None, local_files_only: bool) -> Path:
    """Returns the folder with a source's files, which are downloaded if it is a name on the Hub."""
    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        raise ConversionError(f"{source} is neither a folder nor a name on the Hub")
    where: dict[str, Any] = {"revision": revision, "token": token, "local_files_only": local_files_only}
    try:
        folder = Path(snapshot_download(source, allow_patterns=["*.json", "*.spm", "*.safetensors", "*.md"], **where))
        if not any((folder / name).is_file() for name in WEIGHTS[:2]):  # many repositories have pytorch_model.bin only
            folder = Path(snapshot_download(source, allow_patterns="pytorch_model*.bin", **where))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConversionError(f"{source} can't be downloaded ({first_line(error)})") from error
    return folder


def _marian_config(folder: Path) -> MarianConfig:
    """Reads config.json.

    Raises:
        ConversionError: It is missing, damaged, or another system's.
    """
    fields = json_object(folder / "config.json")
    system = fields.get("model_type")
    if system != "marian":
        reason = REFUSED.get(str(system), "it is not of Marian's architecture")
        raise ConversionError(f"{folder} has a model of the type {system!r}: {reason}")
    read = (*SAME_FIELDS, "decoder_vocab_size", "encoder_layerdrop", "decoder_layerdrop")  # others can't do harm then
    try:
        return MarianConfig(**{name: fields[name] for name in read if name in fields})
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConversionError(f"{folder / 'config.json'} is damaged ({first_line(error)})") from error


def _generation_config(folder: Path) -> GenerationConfig:
    """Reads the settings of decoding; older checkpoints have them in config.json."""
    file = "generation_config.json" if (folder / "generation_config.json").exists() else "config.json"
    fields = json_object(folder / file)
    try:
        return GenerationConfig.from_model_config(fields) if file == "config.json" else GenerationConfig(**fields)
    except (TypeError, ValueError) as error:
        raise ConversionError(f"{folder / file} is damaged ({first_line(error)})") from error


def _tensors_in(folder: Path) -> dict[str, Tensor]:
    """Reads the weights: safetensors, or PyTorch's files without running what a pickle may hold; sharded or not."""
    file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise ConversionError(f"{folder} has none of {', '.join(WEIGHTS)}")
    files = [file]
    if file.suffix == ".json":
        shards = json_object(file).get("weight_map")
        names = set(shards.values()) if isinstance(shards, dict) else set()
        if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ConversionError(f"{file} has no weight_map with the names of files beside it")
        files = [folder / name for name in sorted(names)]
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            part = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
        except Exception as error:  # a damaged or hostile file raises whatever its reader raises
            raise ConversionError(f"{file} can't be read ({first_line(error)})") from error
        if not isinstance(part, dict) or not all(isinstance(value, Tensor) for value in part.values()):
            raise ConversionError(f"{file} is not a table of tensors")
        tensors |= part
    return tensors


# ---- Tokenizer ----
def opus_mt_tokenizer(folder: Path) -> MarianTokenizer:
    """Opens the MarianTokenizer of a folder: source.spm, target.spm and vocab.json, and target_vocab.json for a second.

    Raises:
        ValueError: A file is missing or damaged, or the end or the unknown token has two ids; the message says which.
    """
    settings = json_object(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    separate = bool(settings.get("separate_vocabs"))
    for name in ("source.spm", "target.spm"):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder}: {name} is missing; OPUS-MT models with BPE instead of SentencePiece can't be converted"
            )
    vocabularies = [json_object(folder / name) for name in ("vocab.json", "target_vocab.json")[: 1 + separate]]
    try:
        with without_advice():
            tokenizer = MarianTokenizer.from_pretrained(folder)
    except Exception as error:  # a damaged file raises whatever its reader raises
        raise ValueError(f"{folder}: the tokenizer can't be opened ({first_line(error)})") from error
    if separate:
        _compare_special(tokenizer, *vocabularies)
    return tokenizer


def _compare_special(tokenizer: MarianTokenizer, source: Mapping[str, int], target: Mapping[str, int]) -> None:
    """Compares the ids of special tokens in two vocabularies; MarianTokenizer takes the source's for both.

    Raises:
        ValueError: The end or the unknown token has two ids.
    """
    for token in (tokenizer.eos_token, tokenizer.unk_token):
        if source.get(token) != target.get(token):
            raise ValueError(f"{token} has different ids in vocab.json and target_vocab.json")
    names = {number: token for token, number in target.items()}
    if (lost := names.get(tokenizer.pad_token_id)) != tokenizer.pad_token:
        logger.warning(
            f"{tokenizer.pad_token} has other ids in vocab.json than in target_vocab.json: MarianTokenizer leaves "
            f"{lost!r}, which has the id of the source's there, out of translations."
        )


# ---- Model ----
def _load(source: str, folder: Path) -> tuple[VanillaTransformerForConditionalGeneration, MarianTokenizer]:
    """Makes model and tokenizer of the files in a folder; `source` is what the user calls it."""
    try:
        config = _marian_config(folder)
        tokenizer, ours = opus_mt_tokenizer(folder), _config(config)
        ours.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
        check_tokenizer(tokenizer, ours, source)
        model = _build(config, _tensors_in(folder), _generation_config(folder))
        model.config.tokenizer_fingerprint = ours.tokenizer_fingerprint
    except ValueError as error:
        raise ConversionError(str(error)) from error
    model.config._name_or_path = source
    return model, tokenizer


def _build(
    marian: MarianConfig, tensors: dict[str, Tensor], generation_config: GenerationConfig
) -> VanillaTransformerForConditionalGeneration:
    """Makes the model of Marian's configuration, tensors and settings of decoding."""
    config = _config(marian)
    with torch.device("meta"):
        shapes = {
            name: value.shape for name, value in VanillaTransformerForConditionalGeneration(config).state_dict().items()
        }
    weights = _renamed(tensors, shapes, config)
    dtype = weights["model.encoder.embed_tokens.weight"].dtype
    model = VanillaTransformerForConditionalGeneration.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype
    )
    for name, value in config.decoding_tokens.items():
        if getattr(generation_config, name) is None:
            setattr(generation_config, name, value)
    generation_config._from_model_config = False  # it says what Marian's says, and the paper's isn't wanted
    model.generation_config = generation_config
    return model.eval()


def _config(marian: MarianConfig) -> VanillaTransformerConfig:
    """Translates a configuration."""
    for stack in ("encoder", "decoder"):
        if getattr(marian, f"{stack}_layerdrop"):
            raise ConversionError(
                f"{stack}_layerdrop is {getattr(marian, f'{stack}_layerdrop')}; there is no layer drop here"
            )
    fields = {name: getattr(marian, name) for name in SAME_FIELDS} | FIXED_FIELDS
    shares = marian.share_encoder_decoder_embeddings
    try:
        return VanillaTransformerConfig(**fields, decoder_vocab_size=None if shares else marian.decoder_vocab_size)
    except StrictDataclassError as error:
        raise ConversionError(f"config.json makes no valid model ({first_line(error.__cause__ or error)})") from error


def _renamed(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], config: VanillaTransformerConfig
) -> dict[str, Tensor]:
    """Gives Marian's tensors our names.

    Raises:
        ConversionError: Tensors are missing, unknown, of another shape, no floating-point numbers or not finite;
            matrices differ that should be one; or the positional table isn't Marian's.
    """
    names = {ours: marian_names(ours, config) for ours in shapes}
    tensors = dict(tensors)
    tensors.setdefault(NAMES["lm_head.bias"], torch.zeros(1, config.target_vocab_size))  # absent in the first ones
    known = {name for one in names.values() for name in one} | set(POSITIONS)
    found = {ours: [name for name in one if name in tensors] for ours, one in names.items()}
    problems = {
        "missing": [names[ours][0] for ours, present in found.items() if not present],
        "unknown": tensors.keys() - known,
        "of another shape": [
            f"{name} {tuple(tensors[name].shape)} instead of {tuple(_shape_there(name, shapes[ours]))}"
            for ours, present in found.items()
            for name in present
            if tensors[name].shape != _shape_there(name, shapes[ours])
        ],
        "not of floating-point numbers": [name for name, value in tensors.items() if not value.is_floating_point()],
    }
    _refuse(problems)
    _refuse(
        {
            "not finite": [name for name, value in tensors.items() if not value.isfinite().all()],
            "different, though config.json says that they are one matrix": [
                " and ".join(present)
                for present in found.values()
                if any(not torch.equal(tensors[present[0]], tensors[name]) for name in present[1:])
            ],
            "not Marian's sinusoids": [name for name in POSITIONS if name in tensors and not _is_table(tensors[name])],
        }
    )
    dtype = tensors[found["model.encoder.embed_tokens.weight"][0]].dtype
    return {ours: tensors[present[0]].reshape(shapes[ours]).to(dtype) for ours, present in found.items()}


def marian_names(name: str, config: VanillaTransformerConfig) -> list[str]:
    """Returns the names that a parameter, or the matrix that it is tied to, may have in a Marian checkpoint."""
    source, target, output = (
        f"{part}.weight" for part in ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    )
    groups = [[source], [target], [output]]
    if config.share_encoder_decoder_embeddings:
        groups = [[NAMES[source], source, target], [output]]
    if config.tie_word_embeddings:
        groups = [*groups[:-2], groups[-2] + groups[-1]]
    own = NAMES.get(name) or name.replace(".feed_forward.", ".")
    return next((group for group in groups if name in group), [own])


def _shape_there(name: str, shape: torch.Size) -> torch.Size:
    return torch.Size([1, *shape]) if name == NAMES["lm_head.bias"] else shape


def _is_table(table: Tensor) -> bool:
    """Tells whether a saved positional table, (positions, d_model), has the numbers that we compute."""
    if table.ndim != 2 or table.shape[1] % 2:
        return False
    expected = sinusoidal_table(table.shape[0], table.shape[1], "marian")
    # Saved in half precision, sines are rounded to 2^-11.
    tolerance = 1e-5 if table.dtype in (torch.float32, torch.float64) else torch.finfo(table.dtype).eps
    return torch.allclose(table.double(), expected.double(), rtol=0, atol=tolerance)


def _refuse(problems: Mapping[str, Iterable[str]]) -> None:
    found = ((problem, set(names)) for problem, names in problems.items())
    if reasons := [f"{problem}: {named(names, NAMES_PER_ERROR)}" for problem, names in found if names]:
        raise ConversionError(f"the weights don't match config.json; {'; '.join(reasons)}")
