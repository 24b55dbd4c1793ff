"""transformers' pipeline("vanilla-translation"): a `Translator` with the outputs that pipeline("translation") had."""

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.loading import read_into_memory
from ..engine import attach_if_supported
from ..integration_vanilla_transformer import VanillaTransformerPipeline
from .translator import Result, Translator


class VanillaTranslationPipeline(VanillaTransformerPipeline):
    """Translates with any sequence-to-sequence model that transformers loads.

        translate = pipeline("vanilla-translation", model="outputs/quickstart/model")
        translate("It is half past nine.")  # [{"translation_text": "Es ist halb zehn."}]

    The pipeline owns its model: the engine is attached to it, if it is one of this package. Unlike `Translator`, it
    doesn't convert a Marian model: that decodes as in transformers. `compute_type` is as for `Translator`, and options
    of its calls are defaults of each call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        compute_type: str = "default",
        **kwargs: object,
    ) -> None:
        super().__init__(model=model, tokenizer=tokenizer, **kwargs)
        read_into_memory(self.model)
        attach_if_supported(self.model, compute_type)
        self.translator = Translator(self.model, tokenizer=self.tokenizer)

    def __call__(self, inputs: str | Iterable[str], **options: object) -> Any:
        """Translates a string, a list of strings, or an iterator, with options of `Translator`'s calls.

        A string gives [{"translation_text": ...}]; a list, {"translation_text": ...} for each; an iterator yields the
        result of a string for each. With `n_best` above 1, each text has a list of `n_best` records, with their scores.
        """
        options = {"batch_size": self._batch_size, **self._forward_params, **options}
        options.pop("num_workers", None)  # a pipeline's, without use here
        results = self.translator(inputs, **options)
        if isinstance(inputs, str):
            return _records(results)
        if not isinstance(results, list):
            return map(_records, results)
        records = [_records(result) for result in results]
        return [row[0] for row in records] if (self.translator.call(options).n_best or 1) == 1 else records


def _records(result: Result) -> list[dict[str, object]]:
    if isinstance(result, str):
        return [{"translation_text": result}]
    rows = result if isinstance(result, list) else [result]
    values = [{"translation_text": one.text, "score": one.score, "alignment": one.alignment} for one in rows]
    return [{name: value for name, value in row.items() if value is not None} for row in values]
