"""The learning rate of section 5.3."""

from collections.abc import Callable

from torch.optim.lr_scheduler import LambdaLR

from .arguments import VanillaTransformerTrainingArguments


def paper_learning_rate(d_model: int, warmup_steps: int, factor: float = 1.0) -> float:
    """The highest rate of the paper's schedule (5.3): factor * (d_model * warmup)^-0.5, reached after the warm-up.

    transformers' "inverse_sqrt" scheduler with it is factor * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5), where
    the first update has step 0 and so no effect; `count_from_one` lets it have step 1, as in the paper.
    """
    return factor * (d_model * warmup_steps) ** -0.5


def peak_learning_rate(args: VanillaTransformerTrainingArguments, model: object) -> float:
    """Returns the highest learning rate of a run: `learning_rate`, or without one that of the paper's schedule (5.3).

    Raises:
        ValueError: The paper's can't be computed for this model or warm-up.
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
    warmup = max(int(args.get_warmup_steps(args.max_steps)), 1)
    return paper_learning_rate(d_model, warmup, args.learning_rate_factor)


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
