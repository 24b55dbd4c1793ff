"""The translations of the validation set at each evaluation, for the run's folder and for TensorBoard."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.integrations import TensorBoardCallback

from ..checkpoints.files import write_text
from .trainer import TranslationMetrics

FOLDER = "translations"  # in the run's folder
TAG = "validation/translations"  # in TensorBoard


class TranslationLog(TrainerCallback):
    """Writes all translations of an evaluation to `translations/update-N.txt`, and its samples to TensorBoard.

    Args:
        trainer: Whose `compute_metrics` is a `TranslationMetrics`, which keeps the translations.
        places: The line of each sentence of the validation set, from 0: sentences are sorted by length.
        num_lines: Number of lines; those that the validation set leaves out, as they are empty, stay empty.
    """

    def __init__(self, trainer: Trainer, places: Iterable[int], num_lines: int) -> None:
        self.trainer, self.places, self.num_lines = trainer, list(places), num_lines

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Writes the file, whose line n is the translation of the validation set's line n, and the samples."""
        kept = self.trainer.compute_metrics
        if not (state.is_world_process_zero and isinstance(kept, TranslationMetrics) and "eval_bleu" in metrics):
            return
        lines = [""] * self.num_lines
        for place, translation in zip(self.places, kept.translations, strict=True):
            lines[place] = " ".join(translation.splitlines())
        folder = Path(args.output_dir) / FOLDER
        folder.mkdir(exist_ok=True)
        write_text(folder / f"update-{state.global_step}.txt", "".join(f"{line}\n" for line in lines))
        for callback in self.trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                callback.tb_writer.add_text(TAG, _markdown(kept.samples), state.global_step)


def _markdown(samples: Sequence[tuple[str, str, str]]) -> str:
    """A table that TensorBoard shows as one: characters that mean something in Markdown or HTML are shown as such."""
    rows = ["| " + " | ".join("".join(map(_shown, text)) for text in sample) + " |" for sample in samples]
    return "\n".join(["| source | translation | reference |", "|---|---|---|", *rows])


def _shown(character: str) -> str:
    if character in "\r\n":
        return " "
    return f"&#{ord(character)};" if character in "|<>&*_`[]\\#~$" else character
