"""Metrics of evaluations during training: BLEU, chrF and errors of symbols of the translated validation set."""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import EvalPrediction, PreTrainedTokenizerBase

from ..data.corpora import lengths_of
from ..data.symbols import default_measures, unknown_ids
from ..metrics import MEASURES, Score, corpus_bleu, measure, why_unmeasurable
from ..translation.evaluation import Measures
from ..translation.spelling import Spelling
from .arguments import VanillaTransformerTrainingArguments

NO_SYMBOL = "\ufffd"  # in a reference, for one that no translation can have


class TranslationMetrics:
    """Scores the translations of the validation set, for `compute_metrics`, and keeps a few of them to look at.

    A tokenizer of symbols has references of its known symbols; an unknown one in a reference counts as an error. Pairs
    with the same source are one, with several references, if the Trainer gives the inputs. When it is called, logits in
    place of translations are a TypeError, and a measure that doesn't exist is a ValueError.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,  # decodes the token ids
        tokenize: str = "13a",  # sacreBLEU's way to split words; "none" for text that is split already
        metrics: Sequence[str] = (),  # names of `metrics.MEASURES`; without one, those of `default_measures`
        num_samples: int = 3,  # translations to keep
    ) -> None:
        self.tokenizer = tokenizer
        self.measures = Measures.of(tokenizer, metrics, tokenize=tokenize)
        self.num_samples = num_samples
        # Of the last evaluation: (source, translation, reference), where the source is empty unless the Trainer was
        # told `include_for_metrics=["inputs"]`; and by the names of the measures.
        self.samples: list[tuple[str, str, str]] = []
        self.scores: dict[str, Score] = {}

    def __call__(self, predictions: EvalPrediction) -> dict[str, float]:
        """Scores translations that `generate()` made: {name: value}, BLEU and chrF from 0 to 100."""
        if isinstance(predictions.predictions, tuple) or np.issubdtype(predictions.predictions.dtype, np.floating):
            raise TypeError("the predictions are logits, not translations; set predict_with_generate=True")
        hypotheses, references = self._hypotheses(predictions.predictions), self._references(predictions.label_ids)
        self.samples = self._samples(predictions.inputs, hypotheses, references)
        self.scores = measure(
            self.measures.names,
            hypotheses,
            references,
            sources=None if self.measures.symbols is None else self._sources(predictions.inputs),
            **self.measures.how,
        )
        return {name: score.value for name, score in self.scores.items()}

    def why_unmeasurable(self, rows: Iterable[Mapping[str, list[int]]]) -> str | None:
        """Returns why BLEU can't measure translations of tokenized rows, or None if it can."""
        labels = (row["labels"] for row in rows if "labels" in row) if "bleu" in self.measures.names else ()
        references = [text for ids in labels for text in self._texts(np.asarray([ids]))]
        if not references:
            return None
        return why_unmeasurable(corpus_bleu(references, references, tokenize=self.measures.tokenize))

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

    def _sources(self, inputs: NDArray[np.int64] | None) -> list[Hashable] | None:
        """What sources are equal by: their ids, but for those that have unknown symbols, which may differ."""
        if inputs is None:
            return None
        pad, unknown = self.tokenizer.pad_token_id, unknown_ids(self.tokenizer)[0]
        rows = [tuple(row[(row >= 0) & (row != pad)].tolist()) for row in inputs]
        return [place if unknown in row else row for place, row in enumerate(rows)]

    def _hypotheses(self, ids: NDArray[np.int64]) -> list[str]:
        texts, spelling = self._texts(ids), Spelling.of(self.tokenizer, None)
        for place in np.flatnonzero((ids == (-1 if spelling.unknown is None else spelling.unknown)).any(axis=1)):
            texts[place] = spelling.text(ids[place][ids[place] >= 0].tolist())
        return texts

    def _references(self, labels: NDArray[np.int64]) -> list[str]:
        """The texts of labels; a symbol that the tokenizer doesn't know stays as one that no translation has."""
        texts = self._texts(labels)
        unknown = unknown_ids(self.tokenizer)[1]
        if self.measures.symbols is None or unknown is None:
            return texts
        special = [number for number in self.tokenizer.all_special_ids if number != unknown]
        for place in np.flatnonzero((labels == unknown).any(axis=1)):
            kept = [number for number in labels[place].tolist() if number >= 0 and number not in special]
            tokens = self.tokenizer.convert_ids_to_tokens(kept)
            named = [NO_SYMBOL if number == unknown else name for number, name in zip(kept, tokens, strict=True)]
            texts[place] = self.tokenizer.convert_tokens_to_string(named)
        return texts


def measures_of(args: VanillaTransformerTrainingArguments, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the measures of a run, the criterion of its best checkpoint among them."""
    names = args.metrics or default_measures(tokenizer)
    return list(dict.fromkeys([*names, args.criterion] if args.criterion in MEASURES else names))


def by_length(dataset: datasets.Dataset) -> datasets.Dataset:
    """The dataset with its longest sentences first, so that little is padded and lack of memory shows at once."""
    return dataset.select(np.argsort(-lengths_of(dataset, "input_ids"), kind="stable"))


__all__ = ["TranslationMetrics"]
