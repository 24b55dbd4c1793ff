"""The Transformer of "Attention Is All You Need" as a Hugging Face model; importing it registers the Auto classes.

It imports neither torch nor transformers: where transformers isn't imported yet, the classes are registered when it is.
"""

import sys
from typing import TYPE_CHECKING, Any

from .registration import Registration

__version__ = "0.4.0"

__all__ = [
    "PRESETS",
    "DictionaryTokenizer",
    "SourceTargetTokenizerFast",
    "Translator",
    "VanillaTransformerConfig",
    "VanillaTransformerDecoder",
    "VanillaTransformerEncoder",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerModel",
    "VanillaTransformerPreTrainedModel",
    "VanillaTransformerTokenizer",
    "VanillaTransformerTokenizerFast",
    "VanillaTransformerTrainer",
    "VanillaTransformerTrainingArguments",
    "__version__",
    "evaluate",
    "export",
    "from_marian",
    "register",
]
# Where the names are that don't say it themselves; the others are in the paper's files.
MODULES = {
    "PRESETS": "configuration_vanilla_transformer",
    "DictionaryTokenizer": "tokenization_dictionary",
    "SourceTargetTokenizerFast": "tokenization_source_target",
    "Translator": "translation.translator",
    "VanillaTransformerTrainer": "training.trainer",
    "VanillaTransformerTrainingArguments": "training.arguments",
    "evaluate": "translation.evaluation",
    "export": "interop.export",
    "from_marian": "interop.marian",
}

if TYPE_CHECKING:
    from .configuration_vanilla_transformer import PRESETS, VanillaTransformerConfig
    from .interop.export import export
    from .interop.marian import from_marian
    from .modeling_vanilla_transformer import (
        VanillaTransformerDecoder,
        VanillaTransformerEncoder,
        VanillaTransformerForConditionalGeneration,
        VanillaTransformerModel,
        VanillaTransformerPreTrainedModel,
    )
    from .tokenization_dictionary import DictionaryTokenizer
    from .tokenization_source_target import SourceTargetTokenizerFast
    from .tokenization_vanilla_transformer import VanillaTransformerTokenizer, VanillaTransformerTokenizerFast
    from .training.arguments import VanillaTransformerTrainingArguments
    from .training.trainer import VanillaTransformerTrainer
    from .translation.evaluation import evaluate
    from .translation.translator import Translator


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    role = "configuration" if name.endswith("Config") else "tokenization" if "Tokenizer" in name else "modeling"
    module = f"{__name__}.{MODULES.get(name, f'{role}_vanilla_transformer')}"
    __import__(module)  # importlib.import_module refuses one whose import waits, in another thread, for this one
    return getattr(sys.modules[module], name)


def __dir__() -> list[str]:
    return sorted(__all__)


def register() -> None:
    """Registers the classes with transformers; a second call changes nothing."""
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

    from .configuration_vanilla_transformer import PIPELINE
    from .translation import register_pipeline

    config_class = __getattr__("VanillaTransformerConfig")
    model_class = __getattr__("VanillaTransformerModel")
    head_class = __getattr__("VanillaTransformerForConditionalGeneration")
    # The paper's tokenizer is the last: it counts if tokenizer_config.json has no name.
    names = ("DictionaryTokenizer", "SourceTargetTokenizerFast", "VanillaTransformerTokenizerFast")
    tokenizer_classes = [__getattr__(name) for name in names]
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    AutoModel.register(config_class, model_class, exist_ok=True)
    AutoModelForSeq2SeqLM.register(config_class, head_class, exist_ok=True)
    for tokenizer_class in tokenizer_classes:
        AutoTokenizer.register(config_class, tokenizer_class=tokenizer_class, exist_ok=True)
    register_pipeline(PIPELINE)
    # Checkpoints carry their code (`trust_remote_code=True`): these say under which Auto class each is found there.
    config_class.register_for_auto_class()
    model_class.register_for_auto_class("AutoModel")
    head_class.register_for_auto_class("AutoModelForSeq2SeqLM")
    for tokenizer_class in tokenizer_classes:
        tokenizer_class.register_for_auto_class("AutoTokenizer")


if "transformers" in sys.modules:
    register()
elif not any(isinstance(finder, Registration) for finder in sys.meta_path):  # as after importlib.reload
    sys.meta_path.insert(0, Registration(register))
