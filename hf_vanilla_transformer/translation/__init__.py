"""Translating with a model: `Translator`, transformers' pipeline("vanilla-translation"), and what they are made of."""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = [
    "Alignment",
    "Attention",
    "Likelihood",
    "TargetScore",
    "Translation",
    "Translator",
    "attention_of",
    "decode",
    "ensemble",
    "register_pipeline",
    "score_pairs",
    "score_targets",
    "translate",
]
TASK = "vanilla-translation"

if TYPE_CHECKING:
    from .attention import Attention, attention_of
    from .decoding import Alignment, Translation, decode, translate
    from .ensembles import ensemble
    from .scoring import Likelihood, TargetScore, score_pairs, score_targets
    from .translator import Translator
else:
    # A module is imported when its name is used: importing the package registers the pipeline without it.
    _MODULES = {
        **dict.fromkeys(("Attention", "attention_of"), "attention"),
        **dict.fromkeys(("Alignment", "Translation", "decode", "translate"), "decoding"),
        "ensemble": "ensembles",
        **dict.fromkeys(("Likelihood", "TargetScore", "score_pairs", "score_targets"), "scoring"),
        "Translator": "translator",
    }

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


def register_pipeline() -> None:
    """Registers pipeline("vanilla-translation") with transformers, whose pipeline("translation") is gone.

    The pipeline is named and not imported, as transformers has it with its own. `PIPELINE_REGISTRY.register_pipeline`
    would need the class, and would make `save_pretrained` copy its code, which can't do without this package.
    """
    from transformers import AutoModelForSeq2SeqLM  # here, as the command line reads `limits` before it imports them
    from transformers.pipelines import PIPELINE_REGISTRY

    PIPELINE_REGISTRY.supported_tasks[TASK] = {
        "impl": f"{__name__}.pipeline.VanillaTranslationPipeline",
        "pt": (AutoModelForSeq2SeqLM,),
        "type": "text",
    }
