"""The learning rate of section 5.3."""

from collections.abc import Callable
from types import SimpleNamespace

from torch.optim.lr_scheduler import LambdaLR

from ..checkpoints.loading import load_config
from .arguments import RecipeError, VanillaTransformerTrainingArguments
from .recipe import parse_recipe


def paper_learning_rate(d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """The highest rate of the paper's schedule (5.3): factor * (d_model * warmup)^-0.5, reached after the warm-up.

    transformers' "inverse_sqrt" scheduler with it is factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), where
    the first update has step 0 and so no effect; `count_from_one` lets it have step 1, as in the paper.
    """
    return factor * (d_model * warmup_steps) ** -0.5


def peak_learning_rate(args: VanillaTransformerTrainingArguments, model: object) -> float:
    """The highest learning rate of a run: `learning_rate`, or without one that of the paper's schedule (5.3).

    Args:
        args: The arguments of the run.
        model: Its model, whose configuration has `d_model` or, as other models have it, `hidden_size`.

    Raises:
        ValueError: There is no `learning_rate`, and the paper's can't be computed.
    """
    if args.learning_rate is not None:
        return args.learning_rate
    config = getattr(model, "config", None)
    d_model = getattr(config, "d_model", None) or getattr(config, "hidden_size", None)
    if d_model is None:
        raise ValueError("This model's configuration has no d_model for the paper's schedule; give `learning_rate`.")
    if 0 < args.warmup_steps < 1 and args.max_steps < 1:
        raise ValueError(
            f"warmup_steps={args.warmup_steps} is a share of the updates, whose number isn't known without max_steps; "
            "give either as a number of updates, or learning_rate."
        )
    return paper_learning_rate(d_model, _warmup(args), args.learning_rate_factor)


def _warmup(args: VanillaTransformerTrainingArguments) -> int:
    """Returns the updates of the warm-up, at least 1."""
    return max(int(args.get_warmup_steps(args.max_steps)), 1)


def count_from_one(scheduler: LambdaLR) -> None:
    """Lets a schedule count updates from 1, not 0: each update gets the rate of the next one."""
    scheduler.lr_lambdas = [_one_later(function) for function in scheduler.lr_lambdas]
    set_rates(scheduler)


def _one_later(function: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: function(step + 1)


def set_rates(scheduler: LambdaLR) -> tuple[list[float], list[float]]:
    """Gives an optimizer the rates of its next update, and returns the old and the new ones."""
    groups = scheduler.optimizer.param_groups
    before = [float(group["lr"]) for group in groups]
    rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    after = [float(base) * function(scheduler.last_epoch) for base, function in rates]
    for group, rate in zip(groups, after, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(after)
    return before, after


def schedule_of_recipe(recipe: str) -> tuple[float, int]:
    """Returns the highest learning rate of a recipe, and the updates until then.

    Args:
        recipe: A recipe's name or file.

    Raises:
        RecipeError: It is no recipe, or has another schedule than the paper's.
        CheckpointError: The model that it fine-tunes can't be found.
    """
    _, model, args = parse_recipe([recipe])
    if args.lr_scheduler_type != "inverse_sqrt" or args.lr_scheduler_kwargs or not args.warmup_steps:
        raise RecipeError(
            f"{recipe} has another schedule than the paper's (inverse_sqrt with a warm-up, without "
            "lr_scheduler_kwargs); give the folder of a run, whose log has the rates"
        )
    name = model.model_name_or_path
    config = model.config(model.vocab_size) if name is None else load_config(name)
    return peak_learning_rate(args, SimpleNamespace(config=config)), _warmup(args)
