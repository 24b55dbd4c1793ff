"""Translating with a model: `Translator`, transformers' pipeline("vanilla-translation"), and their parts."""

__all__ = ["register_pipeline"]
TASK = "vanilla-translation"


def register_pipeline() -> None:
    """Registers pipeline("vanilla-translation") with transformers; its own pipeline("translation") is gone.

    The pipeline is named and not imported, as transformers does with its own. `PIPELINE_REGISTRY.register_pipeline`
    would need the class, and `save_pretrained` would copy its code; that can't run without this package.
    """
    from transformers import AutoModelForSeq2SeqLM  # here, as importing the folder needs neither
    from transformers.pipelines import PIPELINE_REGISTRY

    PIPELINE_REGISTRY.supported_tasks[TASK] = {
        "impl": f"{__name__}.pipeline.VanillaTranslationPipeline",
        "pt": (AutoModelForSeq2SeqLM,),
        "type": "text",
    }
