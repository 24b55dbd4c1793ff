"""The files that a checkpoint may have, and what they say that a folder is: nothing is loaded or fetched."""

import json
from enum import StrEnum
from pathlib import Path

from ..errors import CheckpointError

MODEL_TYPE = "vanilla_transformer"  # in the configuration of this package's models
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
CT2_WEIGHTS, ONNX_ENCODER = "model.bin", "encoder_model.onnx"
ARGOS, ARGOS_METADATA = ".argosmodel", "metadata.json"  # a package in CTranslate2's format: a zip, or its folder
ARGOS_WEIGHTS = f"model/{CT2_WEIGHTS}"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
OLD_TOKENIZER_SETTINGS = ("special_tokens_map.json", "added_tokens.json")  # no longer written, and read if they exist
TOKENIZER_SETTINGS = (TOKENIZER_CONFIG, *OLD_TOKENIZER_SETTINGS)
VOCABULARY, SOURCE_SPM = "vocab.json", "source.spm"
VOCABULARIES, SPMS = (VOCABULARY, "target_vocab.json"), (SOURCE_SPM, "target.spm")  # of OPUS-MT's models
# Of tokenizers, this package's and others; "segmentation.json" is of converted models.
# In full, as a pattern like "vocab*" would publish a user's own files, and remove them from a repository.
VOCABULARY_FILES = (
    *(TOKENIZER, "target_tokenizer.json", "segmentation.json", "vocab.txt", "merges.txt"),
    *(*VOCABULARIES, "vocab-src.json", "vocab-tgt.json"),  # FSMT's are the last two
    *(*SPMS, "sentencepiece.bpe.model", "spiece.model", "tokenizer.model"),
)
# What `from_pretrained` reads beside weights and code.
SETTINGS_FILES = (CONFIG, GENERATION_CONFIG, *TOKENIZER_SETTINGS, *VOCABULARY_FILES)
SAFETENSORS = "model*.safetensors"  # in one file or sharded
PYTORCH_WEIGHTS = "pytorch_model*.bin"  # pickles, which transformers loads where there is no safetensors
CARD, SCORES = "README.md", "scores.json"
FACTS = "model_card.json"  # the facts of a card, beside it; `vanilla-transformer card` makes a new card from them
REPORT_FILES = (CARD, FACTS, SCORES, "*.translations.txt")  # of a run


class Kind(StrEnum):
    """What a name stands for."""

    NAME = "a name on the Hub"
    MODEL = "a model"
    OPUS_MT = "a Marian model with OPUS-MT's tokenizer"
    CTRANSLATE2 = "a model in CTranslate2's format"
    ONNX = "a model in ONNX's format, for onnxruntime"
    ADAPTER = "an adapter of PEFT"
    RUN = "the folder of a training, without a model of its own"
    OTHER = "a folder without a model"


WITHOUT_CONFIG = f"is not a checkpoint: it has no {CONFIG}; "
PROBLEMS = {
    Kind.CTRANSLATE2: "is in CTranslate2's format; give the model that it was exported from, or what `convert` makes "
    "of it",
    Kind.ONNX: "is in ONNX's format, for onnxruntime; give the model that it was exported from",
    Kind.ADAPTER: f"{WITHOUT_CONFIG}it is an adapter of PEFT: give PeftModel.from_pretrained(model, folder).eval() and "
    "the model's tokenizer",
    Kind.RUN: "is the folder of a training and has no model of its own yet; give one of its checkpoints: ",
    Kind.OTHER: f"{WITHOUT_CONFIG}give a folder that save_pretrained wrote, or a name on the Hub",
}


def kind_of(name: str | Path) -> Kind:
    """Tells what a folder is, or that a name is none: then it may be one on the Hub."""
    folder = Path(name)
    if not folder.is_dir():
        return Kind.CTRANSLATE2 if folder.suffix == ARGOS and folder.is_file() else Kind.NAME
    if (folder / CT2_WEIGHTS).is_file() or all((folder / one).is_file() for one in (ARGOS_METADATA, ARGOS_WEIGHTS)):
        return Kind.CTRANSLATE2
    if (folder / ONNX_ENCODER).is_file():
        return Kind.ONNX
    if (folder / CONFIG).is_file():
        return Kind.OPUS_MT if _is_opus_mt(folder) else Kind.MODEL
    if (folder / ADAPTER_CONFIG).is_file():
        return Kind.ADAPTER
    return Kind.RUN if _checkpoints(folder) else Kind.OTHER


def check_kind(name: str | Path, *also: Kind) -> Kind:
    """Returns the kind of a name; a folder that is neither a model nor of a kind in `also` is a `CheckpointError`."""
    kind = kind_of(name)
    if kind not in also and (problem := PROBLEMS.get(kind)) is not None:
        raise CheckpointError(f"{name} {problem}{', '.join(_checkpoints(Path(name))) if kind is Kind.RUN else ''}")
    return kind


def _checkpoints(run: Path) -> list[str]:
    return sorted(file.parent.name for kind in ("checkpoint", "averaged") for file in run.glob(f"{kind}-*/{CONFIG}"))


def _is_opus_mt(folder: Path) -> bool:
    """Whether a model is Marian's, with the tokenizer of its own; transformers loads all others as they are."""
    try:
        kind = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, RecursionError, AttributeError):  # loading it says what is wrong
        return False
    return kind == "marian" and ((folder / SOURCE_SPM).is_file() or not (folder / TOKENIZER).is_file())
