"""For those who use a model: `Translator`, and transformers' pipeline("vanilla-translation")."""

from transformers import AutoModelForSeq2SeqLM
from transformers.pipelines import PIPELINE_REGISTRY

TASK = "vanilla-translation"


def register_pipeline() -> None:
    """Registers pipeline("vanilla-translation") with transformers, whose pipeline("translation") is gone.

    The pipeline is named and not imported, as transformers has it with its own. `PIPELINE_REGISTRY.register_pipeline`
    would need the class, and would make `save_pretrained` copy its code, which can't do without this package.
    """
    PIPELINE_REGISTRY.supported_tasks[TASK] = {
        "impl": f"{__name__}.pipeline.VanillaTranslationPipeline",
        "pt": (AutoModelForSeq2SeqLM,),
        "type": "text",
    }
