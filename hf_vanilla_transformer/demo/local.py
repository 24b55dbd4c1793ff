"""Models of the page as this package loads them: long lines are divided, and the engine decodes."""

from typing import Any

from transformers import PreTrainedModel

from ..translation.attention import attention_of
from ..translation.translator import Translator
from .models import Candidate, Matrix, Model, check_size, described


def translated_by(name: str, translator: Translator, shown: PreTrainedModel | None = None) -> Model:
    """Returns a model for the page.

    Args:
        name: What it is called on the page.
        translator: What translates.
        shown: The model of PyTorch whose attention weights are shown; None: the translator's.
    """
    pictured = translator.model if shown is None else shown

    def translate(lines: list[str], num_beams: int, longest: int | None) -> list[list[Candidate]]:
        options: dict[str, Any] = {"num_beams": num_beams, "progress_bar": False, "on_division": lambda *_: None}
        if longest is not None:
            options["max_new_tokens"] = longest
        if num_beams == 1:  # greedy search has no scores
            return [[Candidate(text)] for text in translator(lines, do_sample=False, early_stopping=False, **options)]
        rows = translator(lines, n_best=num_beams, **options)
        return [[Candidate(one.text, one.num_tokens, one.score) for one in row] for row in rows]

    def attend(source: str, target: str) -> dict[str, Matrix]:
        found = attention_of(pictured, translator.tokenizer, source, target)
        check_size(max(len(found.source_pieces), len(found.target_pieces)))
        return {
            "encoder": Matrix(found.source_pieces, found.source_pieces, found.encoder),
            "decoder": Matrix(found.input_pieces, found.input_pieces, found.decoder),
            "cross": Matrix(found.target_pieces, found.source_pieces, found.cross),
        }

    return described(name, pictured, translate, attend)
