"""What the log of translations writes for odd texts; tests of the command cover what it does in a run."""

from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoTokenizer, EvalPrediction

from hf_vanilla_transformer.training.callbacks import TranslationLog
from hf_vanilla_transformer.training.evaluation import TranslationMetrics


@pytest.fixture
def evaluated(tiny_checkpoint, tmp_path):
    """Runs one evaluation's callback on given translations, and returns the file's text."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)

    def evaluated(texts, places, num_lines, zero=True, scores=None):
        ids = tokenizer(texts, padding=True, return_tensors="np")["input_ids"]
        metrics = TranslationMetrics(tokenizer, num_samples=9)
        metrics(EvalPrediction(predictions=ids, label_ids=np.where(ids == 0, -100, ids), inputs=ids))
        state = SimpleNamespace(is_world_process_zero=zero, global_step=7)
        log = TranslationLog(metrics, places, num_lines)
        log.on_evaluate(SimpleNamespace(output_dir=tmp_path), state, None, metrics=scores or {"eval_bleu": 1.0})
        file = tmp_path / "translations" / "update-7.txt"
        return file.read_text(encoding="utf-8") if file.exists() else None

    return evaluated


def test_a_translation_with_line_breaks_is_one_line(evaluated):
    text = evaluated(["nine\r\nten", "one\u2028two", "zero"], [2, 0, 3], 4)
    assert text == "one two\n\nnine ten\nzero\n"


def test_other_processes_and_evaluations_without_translations_write_nothing(evaluated):
    assert evaluated(["nine"], [0], 1, zero=False) is None
    assert evaluated(["nine"], [0], 1, scores={"eval_loss": 1.0}) is None
