"""Metrics of evaluations during training: BLEU, chrF and others of the translated validation set."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import EvalPrediction, PreTrainedTokenizerBase

from ..data.corpora import lengths_of
from ..metrics import corpus_bleu, corpus_chrf, why_unmeasurable

Metric = Callable[[list[str], list[str]], float]  # of translations and references


class TranslationMetrics:
    """Scores the translations of the validation set, for `compute_metrics`, and keeps a few of them to look at.

    Args:
        tokenizer: Decodes the token ids.
        tokenize: sacreBLEU's way to split words; "none" for text that is split already.
        metrics: Further ones, beside BLEU and chrF: functions `f(translations, references)`, reported by their names.
        num_samples: How many translations to keep as samples.

    Attributes:
        samples: Of the last evaluation: (source, translation, reference); the source is empty unless the Trainer was
            told `include_for_metrics=["inputs"]`.
        signature: sacreBLEU's, of the last evaluation.

    Raises:
        TypeError: A metric is no function; when called, the predictions are logits.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tokenize: str = "13a",
        metrics: Sequence[Metric] = (),
        num_samples: int = 3,
    ) -> None:
        if wrong := [type(metric).__name__ for metric in metrics if not hasattr(metric, "__name__")]:
            raise TypeError(f"metrics has a {wrong[0]}; pass functions f(translations, references)")
        self.tokenizer, self.tokenize, self.metrics = tokenizer, tokenize, tuple(metrics)
        self.num_samples = num_samples
        self.samples: list[tuple[str, str, str]] = []
        self.signature = ""

    def __call__(self, predictions: EvalPrediction) -> dict[str, float]:
        """Scores translations that `generate()` made: {name: value}, BLEU and chrF from 0 to 100."""
        if isinstance(predictions.predictions, tuple) or np.issubdtype(predictions.predictions.dtype, np.floating):
            raise TypeError("the predictions are logits, not translations; set predict_with_generate=True")
        hypotheses, references = self._texts(predictions.predictions), self._texts(predictions.label_ids)
        bleu = corpus_bleu(hypotheses, references, tokenize=self.tokenize)
        self.signature = bleu.signature
        self.samples = self._samples(predictions.inputs, hypotheses, references)
        scores = {"bleu": bleu.value, "chrf": corpus_chrf(hypotheses, references).value}
        return scores | {metric.__name__: float(metric(hypotheses, references)) for metric in self.metrics}

    def why_unmeasurable(self, rows: Iterable[Mapping[str, Any]]) -> str | None:
        """Returns why BLEU can't measure translations of tokenized rows, or None if it can."""
        labels = [np.asarray([row["labels"]]) for row in rows if "labels" in row]
        references = [text for ids in labels for text in self._texts(ids)]
        alone = corpus_bleu(references, references, tokenize=self.tokenize) if references else None
        return why_unmeasurable(alone) if alone else None

    def _samples(
        self, inputs: NDArray[np.int64] | None, hypotheses: list[str], references: list[str]
    ) -> list[tuple[str, str, str]]:
        places = list(range(len(hypotheses)))
        if self.num_samples < len(places):  # some from everywhere
            places = np.linspace(0, len(places) - 1, self.num_samples + 2).astype(int)[1:-1].tolist()
        sources = [""] * len(places)
        if inputs is not None and places:
            sources = self._texts(inputs[places], use_source_tokenizer=True)
        return [(source, hypotheses[place], references[place]) for source, place in zip(sources, places, strict=True)]

    def _texts(self, token_ids: NDArray[np.int64], **options: bool) -> list[str]:
        token_ids = np.where(token_ids == -100, self.tokenizer.pad_token_id, token_ids)
        return list(self.tokenizer.batch_decode(token_ids, skip_special_tokens=True, **options))


def by_length(dataset: datasets.Dataset) -> datasets.Dataset:
    """The dataset with its longest sentences first, so that little is padded and lack of memory shows at once."""
    return dataset.select(np.argsort(-lengths_of(dataset, "input_ids"), kind="stable"))


__all__ = ["TranslationMetrics"]
