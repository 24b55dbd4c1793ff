"""Loading checkpoints, and checks of weights and tokenizer."""

import hashlib
import json
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    MarianTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file, logging

from ..errors import CheckpointError, first_line, named
from ..tokenization_vanilla_transformer import VanillaTransformerTokenizerFast
from .headers import read_json
from .kinds import CONFIG, GENERATION_CONFIG, VOCABULARY_FILES

# Embeddings are often padded to a multiple of 64 or 128 rows, or by a few languages' tags.
UNUSED_ROWS, UNUSED_SHARE = 128, 0.01
SECONDS_TO_BAR = 2


class Where(TypedDict, total=False):
    """Where a checkpoint is, and whether its code may run."""

    trust_remote_code: bool  # without it, there is no prompt either
    local_files_only: bool  # a name on the Hub is only looked for among the files of earlier downloads
    revision: str | None  # branch, tag or commit on the Hub
    token: str | bool | None  # for the Hub, as for `from_pretrained`


def load_checkpoint(
    name: str | Path, *, dtype: torch.dtype | str = "auto", **where: Unpack[Where]
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Loads a model as `load_model` does, and its tokenizer; `CheckpointError` if that is another model's, too."""
    tokenizer = load_tokenizer(name, **where)
    model = load_model(name, dtype=dtype, **where)
    check_tokenizer(tokenizer, model.config, str(name))
    return tokenizer, model


def load_tokenizer(name: str | Path, **where: Unpack[Where]) -> PreTrainedTokenizerBase:
    """Loads a tokenizer; arguments and errors as for `load_model`."""
    with _plain_errors(name, where), without_advice():
        folder = _checked_folder(name, where)
        if folder == Path(name) and not any(any(folder.glob(pattern)) for pattern in VOCABULARY_FILES):
            raise ValueError("there is no tokenizer; save it to the same folder by tokenizer.save_pretrained(...)")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **where)
        sides = {"text": ["a"]} if getattr(tokenizer, "tgt_lang", "") is None else {"text": ["a"], "text_target": ["a"]}
        tokenizer(**sides, verbose=False)  # some settings are only read here
        return tokenizer


@contextmanager
def without_advice() -> Iterator[None]:
    """Hides MarianTokenizer's advice to install sacremoses: it never calls it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")
        yield


def load_config(name: str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Loads a configuration from a folder; code that comes with it and errors are as for `load_model`."""
    with _plain_errors(name, {}):
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    return config


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    fields: Mapping[str, object] | None = None,
    **where: Unpack[Where],
) -> PreTrainedModel:
    """Loads a sequence-to-sequence model, and refuses one whose weights don't fit its configuration.

    `from_pretrained` fills in missing tensors with random numbers and ignores unknown ones. `name` is a folder that
    `save_pretrained` wrote, or a name on the Hub. `fields` of the configuration, such as `dropout`, take the place of
    the checkpoint's. The model is on the CPU in evaluation mode.

    `CheckpointError`: it can't be loaded, or tensors are missing, unknown, of another shape or not finite.
    """
    with _plain_errors(name, where), _passing_bars():
        folder = _checked_folder(name, where)
        model, report = AutoModelForSeq2SeqLM.from_pretrained(
            name,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, then
            **where,
            **(fields or {}),
        )
    _check_report(name, report)
    _check_tokens(name, model)
    if (folder / GENERATION_CONFIG).exists():
        read_json(folder / GENERATION_CONFIG)  # of a damaged one, from_pretrained would take defaults
    read_into_memory(model)
    if wrong := not_finite(model):
        raise CheckpointError(f"{name}: {named(wrong)} contains NaN or infinity; the training diverged")
    return model.eval()


@contextmanager
def _passing_bars() -> Iterator[None]:
    """Shows transformers' progress bars on terminals only, if they take a while, and removes them at their end."""
    passing = {"disable": None, "delay": SECONDS_TO_BAR, "leave": False}
    before = logging.set_tqdm_hook(lambda make, args, kwargs: make(*args, **{**kwargs, **passing}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def read_into_memory(model: torch.nn.Module) -> None:
    """Copies weights that are still mapped from their files: these may be written in place while the model lives."""
    for tensor in () if getattr(model, "is_quantized", False) else (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


@contextmanager
def _plain_errors(name: str | Path, where: Where) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each reader of files has errors of its own
        hint = ""
        if not where.get("trust_remote_code") and "trust_remote_code" in str(error):
            hint = "; its own code only runs if you trust it and say so (--trust-remote-code)"
        reason = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
        problem = first_line(reason).removeprefix(f"{name}{os.sep}")
        raise CheckpointError(f"can't load {name} ({problem}){hint}") from error


def _check_report(name: str | Path, report: Mapping[str, Collection[Any]]) -> None:
    """Refuses a model for which `from_pretrained` would only log a warning."""
    mismatched = report.get("mismatched_keys") or ()
    problems = {
        "the weights have no ": report.get("missing_keys"),
        "the model has no ": report.get("unexpected_keys"),
        "": [f"{key} is {tuple(saved)}, not {tuple(wanted)}" for key, saved, wanted in mismatched],
    }
    if found := [f"{problem}{named(names)}" for problem, names in problems.items() if names]:
        raise CheckpointError(f"{name}: {found[0]}; config.json and the weights don't match")
    if report.get("error_msgs"):
        raise CheckpointError(f"{name}: {named(report['error_msgs'])}")


def _checked_folder(name: str | Path, where: Where) -> Path:
    file = cached_file(name, CONFIG, _raise_exceptions_for_missing_entries=False, **where)
    if file is None:  # a tokenizer alone
        return Path(name)
    config = read_json(Path(file))
    if config.get("is_encoder_decoder") is False:
        raise ValueError("is_encoder_decoder is false in config.json, but a model that translates has both")
    if config.get("quantization_config") is not None:
        raise ValueError("its weights are quantized; give Translator what from_pretrained loads, or take the original")
    for field in ("attn_implementation", "_attn_implementation"):
        if "/" in str(config.get(field, "")) and not where.get("trust_remote_code"):
            raise ValueError(f"{field} in config.json names code on the Hub; it needs trust_remote_code")
    return Path(file).parent


def _check_tokens(name: str | Path, model: PreTrainedModel) -> None:
    for token in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        own, wanted = (as_list(getattr(config, token, None)) for config in (model.generation_config, model.config))
        if own and wanted and not set(wanted) <= set(own):
            raise CheckpointError(
                f"{name}: {token} is {own[0]} in generation_config.json and {wanted[0]} in config.json"
            )


def as_list(value: int | list[int] | None) -> list[int]:
    """Returns a setting of one token or several as a list; None is none."""
    return [] if value is None else value if isinstance(value, list) else [value]


def not_finite(model: torch.nn.Module) -> list[str]:
    """Returns the names of a model's parameters that contain NaN or infinity."""
    parameters = [(key, value.detach()) for key, value in model.named_parameters() if value.is_floating_point()]
    # The extremes of NaN and anything are NaN.
    return [key for key, value in parameters if value.numel() and not torch.stack(value.aminmax()).isfinite().all()]


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, name: str) -> None:
    """Checks that a model was trained with a tokenizer, as far as that can be known.

    The configuration's `tokenizer_fingerprint`, if there is one, decides. `CheckpointError` calls the model by `name`:
    special tokens have other ids, the model has no embedding for some, or many that no id has, or another fingerprint.
    """
    for token in ("pad_token_id", "eos_token_id"):
        own, wanted = getattr(tokenizer, token, None), as_list(getattr(config, token, None))
        if own is not None and wanted and own not in wanted:
            raise CheckpointError(
                f"{name}: the tokenizer's {token} is {own} and the model's {wanted[0]}; use the tokenizer that the "
                "model was trained with"
            )
    size, rows = max(tokenizer.get_vocab().values(), default=-1) + 1, config.vocab_size
    sizes = f"{name}: the tokenizer has {size:,} ids, and the model embeddings for {rows:,}"
    if size > rows:
        raise CheckpointError(f"{sizes}; use the tokenizer that the model was trained with")
    known = getattr(config, "tokenizer_fingerprint", None)
    if known is not None and known != tokenizer_fingerprint(tokenizer):
        raise CheckpointError(
            f"{name}: the model was trained with another tokenizer (`tokenizer_fingerprint` in config.json); use that "
            "one, or remove the field if you have converted it"
        )
    if known is None and rows - size > max(UNUSED_ROWS, UNUSED_SHARE * rows):
        raise CheckpointError(
            f"{sizes}, and nothing says that the two belong together; use the tokenizer that the model was trained "
            "with, or set `tokenizer_fingerprint` in config.json to "
            f'"{tokenizer_fingerprint(tokenizer)}" if it is this one'
        )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a digest of a tokenizer's vocabulary and of its ids for a text that contains all of it.

    For tokenizers of converted models, with their two sides, it is a digest of their files' content. Tokens that are
    added to this package's tokenizer later don't change it.
    """
    if isinstance(tokenizer, MarianTokenizer):
        models = [one.serialized_model_proto() for one in (tokenizer.spm_source, tokenizer.spm_target)]
        digests = [hashlib.sha256(model).hexdigest() for model in models]
        content: object = [digests, tokenizer.encoder, getattr(tokenizer, "target_encoder", None)]
    elif type(tokenizer).__name__ == VanillaTransformerTokenizerFast.__name__:  # or the class that a checkpoint brings
        content = _own_pieces(tokenizer)
    elif (content := getattr(tokenizer, "content", None)) is None:
        added = tokenizer.added_tokens_encoder
        vocabulary = sorted((number, token) for token, number in tokenizer.get_vocab().items() if token not in added)
        text = tokenizer.convert_tokens_to_string([token for _, token in vocabulary])
        content = [vocabulary, tokenizer(text, verbose=False)["input_ids"]]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _own_pieces(tokenizer: VanillaTransformerTokenizerFast) -> list[object]:
    """Returns the vocabulary of this package's tokenizer as it was trained, and ids of a text with all its pieces."""
    backend, control = tokenizer.backend_tokenizer, {tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token}
    pieces = backend.get_vocab(with_added_tokens=False).items()
    vocabulary = sorted((number, piece) for piece, number in pieces if piece not in control)
    text = backend.decoder.decode([piece for _, piece in vocabulary])
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    words = backend.pre_tokenizer.pre_tokenize_str(text)
    ids = [token.id for word, _ in words for token in backend.model.tokenize(word)]
    return [vocabulary, [*ids, tokenizer.eos_token_id]]
