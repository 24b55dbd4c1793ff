"""Hugging Face's Marian, and with it OPUS-MT (Helsinki-NLP/opus-mt-*): the same logits and the same translations.

    model, tokenizer = from_marian("Helsinki-NLP/opus-mt-en-de")

Marian differs from the paper in its layout of the sinusoids, biases on all projections and on the output, an epsilon of
1e-5 in LayerNorm and, in OPUS-MT, the activation function and padding as the start token: all of them are fields of
VanillaTransformerConfig. The other classes of `export --to stock` differ from Marian in the place of the norms and in
their positions.
"""

import copy
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from torch import Tensor
from transformers import GenerationConfig, MarianMTModel, MarianTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from ..checkpoints.headers import read_json
from ..checkpoints.kinds import CONFIG, SPMS, TOKENIZER, TOKENIZER_CONFIG, VOCABULARIES, check_kind
from ..checkpoints.loading import check_tokenizer, load_model, load_tokenizer, tokenizer_fingerprint, without_advice
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..errors import first_line
from ..hub.facts import load_card
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .interface import ConversionError, ConversionOptions, Converted, Settings
from .layout import OUTPUT, POSITIONS, SOURCE, STACKS, TARGET, Layout, from_tensors, layer_names

logger = logging.get_logger(__name__)

# Fields that have the same name and the same meaning in both configurations.
SAME_FIELDS = (
    "vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads",
    "encoder_ffn_dim", "decoder_ffn_dim", "dropout", "attention_dropout", "activation_dropout", "activation_function",
    "max_position_embeddings", "scale_embedding", "share_encoder_decoder_embeddings", "tie_word_embeddings",
    "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "use_cache",
)  # fmt: skip
ALWAYS = {"attention_bias": True, "output_bias": True, "layer_norm_eps": 1e-5}
PRE_NORM = {**ALWAYS, "norm_position": "pre", "final_layer_norm": True}
# What each class of transformers has, by its model_type.
FIXED_FIELDS: dict[str, Settings] = {
    "marian": {**ALWAYS, "position_encoding": "marian"},
    "fsmt": {**ALWAYS, "position_encoding": "fairseq", "output_bias": False},
    "pegasus": {**PRE_NORM, "position_encoding": "marian"},
    "blenderbot": {**PRE_NORM, "position_encoding": "learned"},
    "m2m_100": {**PRE_NORM, "position_encoding": "fairseq", "output_bias": False},
}
NAMES = {
    "lm_head.bias": "final_logits_bias",
    **{f"{stack}.layer_norm": f"model.{stack}.layer_norm" for stack in STACKS},
    **{name: f"model.{name}" for name in POSITIONS},
    **layer_names(
        {stack: f"model.{stack}.layers.*" for stack in STACKS}, {f"feed_forward.{one}": one for one in ("fc1", "fc2")}
    ),
}
# The vocabularies' matrices, with the names that they may have.
NAMES_THERE = {
    SOURCE: ["model.shared.weight", f"model.{SOURCE}"],
    TARGET: [f"model.{TARGET}"],
    OUTPUT: [OUTPUT, "model.decoder.output_projection.weight"],
}
# The classes of tokenizers that are a tokenizer.json.
TOKENIZER_FILES = ("PreTrainedTokenizerFast", "TokenizersBackend")


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
    return _load(str(source), _folder_of(str(source), revision, token, local_files_only), with_tokenizer=True)


def load(source: str | Path, options: ConversionOptions) -> Converted:
    """Opens a Marian model with its tokenizer and the metadata of its card."""
    folder = _folder_of(str(source), options.revision, None, options.local_files_only)
    model, tokenizer = _load(str(source), folder, options.with_tokenizer)
    try:
        metadata = load_card(folder).data.to_dict()  # type: ignore[no-untyped-call]
    except Exception:  # there is none, or its YAML is damaged
        metadata = {}
    base_model = None if Path(source).is_dir() else str(source)
    return Converted(model, tokenizer, metadata, base_model)


# ---- Files ----
def _folder_of(source: str, revision: str | None, token: str | bool | None, local_files_only: bool) -> Path:
    """Returns the folder with a source's files; those of a name on the Hub are downloaded."""
    if Path(source).is_dir():
        return Path(source)
    if Path(source).exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", source):
        raise ConversionError(f"{source} is neither a folder nor a name on the Hub")
    download = partial(snapshot_download, source, revision=revision, token=token, local_files_only=local_files_only)
    try:
        folder = Path(download(allow_patterns=["*.json", "*.spm", "*.safetensors", "*.md"]))
        if not any(folder.glob("*.safetensors")):  # many repositories have pytorch_model.bin only
            folder = Path(download(allow_patterns="pytorch_model*.bin"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConversionError(f"{source} can't be downloaded ({first_line(error)})") from error
    return folder


# ---- Tokenizer ----
def _tokenizer(folder: Path, system: str) -> PreTrainedTokenizerBase:
    file, settings = folder / TOKENIZER, folder / TOKENIZER_CONFIG
    name = read_json(settings).get("tokenizer_class") if settings.is_file() else None
    if file.is_file() and name in TOKENIZER_FILES:
        return load_tokenizer(folder)
    if system == "marian":
        return opus_mt_tokenizer(folder)
    raise ConversionError(
        f"{folder} has a tokenizer of the class {name}, which needs code of its own; convert without it: --no-tokenizer"
    )


def opus_mt_tokenizer(folder: Path) -> MarianTokenizer:
    """Opens a folder's MarianTokenizer; raises ValueError if a file is missing or damaged, or special ids differ."""
    settings = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    separate = bool(settings.get("separate_vocabs"))
    for name in SPMS:
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder}: {name} is missing; OPUS-MT models with BPE instead of SentencePiece can't be converted"
            )
    vocabularies = [read_json(folder / name) for name in VOCABULARIES[: 1 + separate]]
    try:
        with without_advice():
            tokenizer = MarianTokenizer.from_pretrained(folder)
    except Exception as error:  # a damaged file raises whatever its reader raises
        raise ValueError(f"{folder}: the tokenizer can't be opened ({first_line(error)})") from error
    if separate:
        _compare_special(tokenizer, *vocabularies)
    return tokenizer


def _compare_special(tokenizer: MarianTokenizer, source: Mapping[str, int], target: Mapping[str, int]) -> None:
    """Compares the ids of special tokens in two vocabularies; MarianTokenizer takes the source's for both."""
    for token in (tokenizer.eos_token, tokenizer.unk_token):
        if source.get(token) != target.get(token):
            raise ValueError(f"{token} has different ids in vocab.json and target_vocab.json")
    names = {number: token for token, number in target.items()}
    if (lost := names.get(tokenizer.pad_token_id)) != tokenizer.pad_token:
        logger.warning(
            f"{tokenizer.pad_token} has other ids in vocab.json than in target_vocab.json: MarianTokenizer leaves "
            f"{lost!r} out of translations, as it has the id of the source's."
        )


# ---- Model ----
def _load(
    source: str, folder: Path, with_tokenizer: bool
) -> tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase | None]:
    """Makes model and tokenizer of the files in a folder; `source` is what the user calls it."""
    try:
        check_kind(folder)
        system = read_json(folder / CONFIG).get("model_type")
        if system not in FIXED_FIELDS:
            is_own = system == VanillaTransformerConfig.model_type
            reason = "a model of this package already; load it as it is" if is_own else "not of Marian's architecture"
            raise ConversionError(f"{folder} has a model of the type {system!r}: it is {reason}")
        tokenizer, marian = _tokenizer(folder, system) if with_tokenizer else None, load_model(folder)
        model = _build(marian.config, marian.state_dict(), marian.generation_config)
        if tokenizer is not None:
            model.config.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
            check_tokenizer(tokenizer, model.config, source)
    except ValueError as error:
        raise ConversionError(str(error)) from error
    model.config._name_or_path = source
    return model, tokenizer


def _build(
    marian: PreTrainedConfig, tensors: dict[str, Tensor], generation_config: GenerationConfig
) -> VanillaTransformerForConditionalGeneration:
    """Makes the model of a configuration, of tensors and settings of decoding."""
    model = from_tensors(tensors, layout_of(marian, tensors))
    for name, value in model.config.decoding_tokens.items():
        if getattr(generation_config, name) is None:
            setattr(generation_config, name, value)
    generation_config._from_model_config = False  # the paper's settings aren't added to Marian's
    model.generation_config = generation_config
    return model


def layout_of(marian: PreTrainedConfig, tensors: Mapping[str, Tensor]) -> Layout:
    """Returns the layout of a checkpoint."""
    for stack in STACKS:
        if drop := getattr(marian, f"{stack}_layerdrop"):
            raise ConversionError(f"{stack}_layerdrop is {drop}; there is no layer drop here")
    kind = FIXED_FIELDS[marian.model_type]
    fields = {**{name: getattr(marian, name) for name in SAME_FIELDS if hasattr(marian, name)}, **kind}
    if marian.model_type == "fsmt":
        matrices = (tensors[f"model.{name}"] for name in (SOURCE, TARGET))
        one = marian.src_vocab_size == marian.tgt_vocab_size and torch.equal(*matrices)
        fields |= {"vocab_size": marian.src_vocab_size, "share_encoder_decoder_embeddings": one}
    fields.setdefault("share_encoder_decoder_embeddings", True)
    if not fields["share_encoder_decoder_embeddings"]:
        fields["decoder_vocab_size"] = getattr(marian, "decoder_vocab_size", None) or marian.tgt_vocab_size
    names, copies = dict(NAMES), []
    if kind["position_encoding"] == "fairseq":  # computed, and beside a row for padding
        copies += [f"model.{name}" for name in POSITIONS]
        names = {ours: theirs for ours, theirs in names.items() if ours not in POSITIONS}
    for group in _tied(fields["share_encoder_decoder_embeddings"], marian.tie_word_embeddings):
        present = [name for parameter in group for name in NAMES_THERE[parameter] if name in tensors]
        copies += present[1:]
        if different := [name for name in present[1:] if not torch.equal(tensors[present[0]], tensors[name])]:
            both = f"{present[0]} and {different[0]}"
            raise ConversionError(f"config.json says that {both} are one matrix, and they differ")
        names |= dict.fromkeys(group, present[0] if present else NAMES_THERE[group[0]][0])
    return Layout(names, fields, ignored=tuple(copies), required=("encoder.*.bias", "decoder.*.bias"))


def _tied(share: bool, tie: bool) -> list[list[str]]:
    """Returns the parameters of the vocabularies, those together that are one matrix."""
    groups = [[SOURCE, TARGET], [OUTPUT]] if share else [[SOURCE], [TARGET], [OUTPUT]]
    return [*groups[:-2], groups[-2] + groups[-1]] if tie else groups
