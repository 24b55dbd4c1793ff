"""The trainer, recipes, and the run from corpora to scores."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .trainer import VanillaTransformerTrainer


def train(
    recipes: Iterable[str | Path] = (),
    overrides: Mapping[str, object] | None = None,
    *,
    resume: bool = False,
    dry_run: bool = False,
    trust_remote_code: bool = False,
    say: Callable[[str], object] = print,
) -> "VanillaTransformerTrainer":
    """Trains a model from recipes, as `vanilla-transformer train` does.

    Args:
        recipes: YAML files of options, or names of the package's recipes; later ones override earlier ones.
        overrides: Options that override the recipes': `{"max_steps": 1000}`.
        resume: Whether to resume from the last complete checkpoint of `output_dir`.
        dry_run: Whether to train for a few updates in a temporary folder only.
        trust_remote_code: Whether code that comes with a model or a tokenizer may run.
        say: Is called with each line for the user, in the main process only.

    Returns:
        The trainer; its model has the weights of the last update. The final model is in `output_dir`.

    Raises:
        RecipeError: A recipe or an option is wrong, or the run can't start.
        CorpusError: A corpus can't be read, or nothing of it is left.
        HubError: A model or tokenizer is neither a folder nor on the Hub, or there is no token to push with.
        DivergedError: The loss isn't finite any more.
        FinishError: The model is trained, but can't be averaged, scored or described.
        KeyboardInterrupt: The run was interrupted; the message says how it is resumed.
    """
    from .recipe import parse_recipe

    arguments = parse_recipe(recipes, overrides)  # a wrong option is an error before the slow imports
    from .run import Run
    from .run_folder import how_to_resume

    run = Run(arguments, say, resume=resume, dry_run=dry_run, trust_remote_code=trust_remote_code)
    try:
        run.check()
        return run.run()
    except BaseException as error:
        if not _was_interrupted(error):
            raise
        raise KeyboardInterrupt(how_to_resume(run.output)) from error


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether an error is or follows a KeyboardInterrupt: datasets' processes answer it with a TimeoutError."""
    return isinstance(error, KeyboardInterrupt) or (error is not None and _was_interrupted(error.__context__))
