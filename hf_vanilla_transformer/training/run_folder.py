"""The folder of a run: its lock, `recipe.json`, the checkpoint to resume from, the final model and the log."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from transformers import Trainer

from ..checkpoints.completeness import RECIPE, TRAINER_STATE, last_complete_checkpoint, step_of
from ..checkpoints.files import check_links, write_text
from ..checkpoints.headers import read_json
from ..errors import CheckpointError, first_line
from .arguments import Arguments, DataArguments, ModelArguments
from .options import OF_NEW_TOKENIZERS, RecipeError

TOKENIZER = "tokenizer"  # the folder of the tokenizer that a run trains
LOCK = "run.lock"
SAVING = ".saving"  # a folder for new files until they replace old ones
FINGERPRINT = "data_fingerprint"  # in recipe.json, beside the options
# Options that may change when a run resumes, beside those of validation and test data.
FREE_OPTIONS = {
    *("num_beams", "gnmt_length_penalty", "early_stopping"),
    # Data may move: the fingerprint of its content decides.
    *("data_dir", "train_source", "train_target", "train_data"),
}
BEST = "metric_for_best_model"  # checkpoints keep its best value, which another metric's would be compared with


@contextmanager
def only_process_in(folder: Path) -> Iterator[None]:
    """Creates a run's folder where it is missing, and keeps other processes from training there."""
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(folder / LOCK, timeout=0))
        except Timeout as error:
            raise RecipeError(
                f"another process is training in {folder}; wait until it has ended, or give another --output-dir"
            ) from error
        except OSError as error:
            problem = error.strerror or error
            raise RecipeError(f"{folder} can't be written ({problem}); give another --output-dir") from error
        yield


def is_empty(folder: Path) -> bool:
    """Whether a folder is empty, or has only files of a run that stopped before its first update."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    names = {name for name in names if name not in (LOCK, SAVING) and not name.endswith(".partial")}
    is_run = (folder / RECIPE).exists() and FINGERPRINT in read_recipe(folder)
    return names <= ({RECIPE, TOKENIZER} if is_run else set())


def write_recipe(folder: Path, options: Mapping[str, object], data: str) -> None:
    """Writes the options of a run that can't change, and the fingerprint of its training data."""
    write_text(folder / RECIPE, json.dumps({**options, FINGERPRINT: data}, indent=1))


def read_recipe(folder: Path) -> dict[str, object]:
    """Reads the file of `write_recipe`."""
    if not (folder / RECIPE).exists():
        raise RecipeError(f"there is no run to resume in {folder}; start one without --resume")
    try:
        return read_json(folder / RECIPE)
    except CheckpointError as error:
        raise RecipeError(f"{error}; give another --output-dir") from error


def fixed_options(arguments: Arguments) -> dict[str, object]:
    """Returns the options that must not change when a run resumes: those of data, their order, model and optimizer."""
    data, model, args = arguments
    free = FREE_OPTIONS | (OF_NEW_TOKENIZERS if model.tokenizer_name_or_path else set())
    options = {name: value for name, value in (asdict(data) | asdict(model)).items() if name not in free}
    fixed = {name: value for name, value in options.items() if not name.startswith(("validation_", "test_"))}
    return {**fixed, "optim": args.optimizer, BEST: args.metric_for_best_model, "seed": args.seed_of_data}


def check_folder(arguments: Arguments, *, resume: bool) -> None:
    """Checks that the output folder is new, or has a run with the same options to resume."""
    folder = Path(arguments[2].output_dir or "")
    check_links(folder)
    if not resume:
        if not is_empty(folder):
            raise RecipeError(f"{folder} is not empty; resume with --resume, or give another --output-dir")
        return
    now, before = fixed_options(arguments), read_recipe(folder)
    before = now | asdict(DataArguments()) | asdict(ModelArguments()) | before  # an older one has fewer options
    for name, value in now.items():
        is_first = name == BEST and None in (value, before[name])
        if before[name] != value and not is_first:
            raise RecipeError(
                f"{folder} was started with {name} {before[name]!r}, not {value!r}; resume with the same data, in the "
                "same order, and the same model, or give another --output-dir"
            )


def check_same_data(folder: Path, data: str) -> None:
    """Checks that the training data is that of the run, by its fingerprint."""
    if read_recipe(folder).get(FINGERPRINT, data) != data:
        raise RecipeError(
            f"the training data has changed since the run in {folder} was started; restore it, or remove {FINGERPRINT} "
            f"from its {RECIPE} to train on with the new data"
        )


def checkpoint_to_resume(folder: Path, max_steps: int) -> Path | None:
    """Returns the checkpoint that a run resumes from, the last complete one; None: it starts over."""
    checkpoint = last_complete_checkpoint(folder)
    if checkpoint is None and (model := last_complete_checkpoint(folder, to_resume=False)):
        # a new start would overwrite it
        raise RecipeError(
            f"no checkpoint in {folder} has the state of the optimizer (save_only_model leaves it out); "
            f"start a new run from the weights with --model-name-or-path {model}"
        )
    if checkpoint is not None and 0 <= max_steps < (step := step_of(checkpoint) or 0):
        raise RecipeError(f"max_steps is {max_steps:,}, but {checkpoint} has {step:,} updates already; give more")
    return checkpoint


def how_to_resume(folder: Path) -> str:
    """Says how a run that was interrupted is resumed, or started over."""
    try:
        if checkpoint := checkpoint_to_resume(folder, max_steps=-1):
            return f"the same command with --resume resumes from {checkpoint}"
        is_new = is_empty(folder)
    except RecipeError as error:
        return str(error)
    return f"there is no checkpoint yet; the same command {'' if is_new else 'with --resume '}starts over"


@contextmanager
def saved(trainer: Trainer, folder: Path) -> Iterator[Path]:
    """Yields a temporary folder below a run's with the model as it is, and removes it at the end.

    With a sharded model, all processes have to call this.
    """
    partial, is_main = folder / SAVING, trainer.is_world_process_zero()
    try:
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)  # of a killed run
        trainer.save_model(str(partial))
        yield partial
    finally:
        if is_main:
            shutil.rmtree(partial, ignore_errors=True)


def save_model(trainer: Trainer, folder: Path) -> None:
    """Saves a trained model and the trainer's log in the run's folder; an old model stays until all is written.

    All processes have to call this.
    """
    try:
        with saved(trainer, folder) as partial:
            if trainer.is_world_process_zero():
                trainer.state.save_to_json(str(partial / TRAINER_STATE))
                for file in partial.iterdir():
                    os.replace(file, folder / file.name)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the model can't be saved in {folder} ({first_line(error)}); make room, and give --resume to repeat what "
            "follows training"
        ) from error


def read_log(run: str | Path) -> list[dict[str, float]]:
    """Returns what the Trainer logged in a run, by its folder or its trainer_state.json, in order.

    While it is training, that is up to its last complete checkpoint. An entry has `step`, and numbers such as `loss` or
    `eval_bleu`.
    """
    file = Path(run) if Path(run).is_file() else Path(run, TRAINER_STATE)
    if not file.is_file() and (checkpoint := last_complete_checkpoint(Path(run))) is not None:
        file = checkpoint / TRAINER_STATE
    try:
        log = read_json(file).get("log_history")
    except CheckpointError as error:
        raise RecipeError(f"{error}; give the output folder of a run") from error
    if not isinstance(log, list):
        raise RecipeError(f"{file} has no log of a Trainer (`log_history`); give the output folder of a run")
    return log
