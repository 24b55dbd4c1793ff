"""Translating with a model: `Translator`, transformers' pipeline("vanilla-translation"), and their parts."""

__all__ = ["register_pipeline"]


def register_pipeline(task: str) -> None:
    """Registers the pipeline of a task, "vanilla-translation", with transformers, which has none for translation.

    It is named, not imported: of a class, `save_pretrained` would copy the code, which can't run without this package.
    Checkpoints carry a simpler one, `VanillaTransformerPipeline`.
    """
    from transformers import AutoModelForSeq2SeqLM  # here, as importing the folder needs neither
    from transformers.pipelines import PIPELINE_REGISTRY

    PIPELINE_REGISTRY.supported_tasks[task] = {
        "impl": f"{__name__}.pipeline.VanillaTranslationPipeline",
        "pt": (AutoModelForSeq2SeqLM,),
        "type": "text",
    }
