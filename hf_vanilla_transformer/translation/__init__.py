"""Translating with a model: `Translator`, transformers' pipeline("vanilla-translation"), and their parts."""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

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
    from .backend import Alignment, Translation
    from .decoding import decode, translate
    from .ensembles import ensemble
    from .scoring import Likelihood, TargetScore, score_pairs, score_targets
    from .translator import Translator
else:
    # Importing the package registers the pipeline, and needs none of these.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "attention": ("Attention", "attention_of"),
            "backend": ("Alignment", "Translation"),
            "decoding": ("decode", "translate"),
            "ensembles": ("ensemble",),
            "scoring": ("Likelihood", "TargetScore", "score_pairs", "score_targets"),
            "translator": ("Translator",),
        },
    )


def register_pipeline() -> None:
    """Registers pipeline("vanilla-translation") with transformers; its own pipeline("translation") is gone.

    The pipeline is named and not imported, as transformers does with its own. `PIPELINE_REGISTRY.register_pipeline`
    would need the class, and `save_pretrained` would copy its code; that can't run without this package.
    """
    from transformers import AutoModelForSeq2SeqLM  # here, as importing the package needs neither
    from transformers.pipelines import PIPELINE_REGISTRY

    PIPELINE_REGISTRY.supported_tasks[TASK] = {
        "impl": f"{__name__}.pipeline.VanillaTranslationPipeline",
        "pt": (AutoModelForSeq2SeqLM,),
        "type": "text",
    }
