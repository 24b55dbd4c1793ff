"""Limits of what can be asked of a translation. It imports nothing slow, as the command line checks them first."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Padded source tokens per batch, times the number of beams: on two cores, more brings no more speed, and on any
# device caches and logits grow with it. `--batch-tokens` on the command line.
BATCH_TOKENS = 4_096
# Longest source that is translated as one. Sentences are far shorter, and attention to this many tokens takes some
# megabytes per head. `--max-source-tokens` on the command line.
MAX_SOURCE_TOKENS = 1_024


@dataclass(frozen=True)
class Limit:
    """The largest value of an option, and why there is one: beyond, it is a slip that only stalls the machine."""

    largest: int
    reason: str


_BEAMS = Limit(1_000, "memory and time grow with it, and translations get no better")
_TOKENS = Limit(10_000, "a model that finds no end would write them all, ever more slowly")
_SOURCE = Limit(10_000, "attention takes memory by the square of it")
LIMITS = {
    "num_beams": _BEAMS,
    "num_return_sequences": _BEAMS,
    "n_best": _BEAMS,
    "max_new_tokens": _TOKENS,
    "max_length": _TOKENS,
    "max_extra_length": _TOKENS,
    "max_source_tokens": _SOURCE,
    "max_tokens": _SOURCE,
    "batch_tokens": Limit(1_000_000, "a batch is in memory all at once"),
    "batch_size": Limit(100_000, "a batch is in memory all at once"),
}
# Of these, the first one that is given counts.
LENGTHS = ("max_new_tokens", "max_length", "max_extra_length")


def check_limit(name: str, value: Any, where: str = "") -> None:
    """Checks an option that counts something.

    Args:
        name: The option, one of `LIMITS`.
        value: Its value; None is none.
        where: What has the option, to be named in the error; nothing for an argument.

    Raises:
        ValueError: It is no integer, below its least value or above its limit.
    """
    limit, least = LIMITS[name], 0 if name == "max_extra_length" else 1
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_integer and least <= value <= limit.largest):
        why = f" ({limit.reason})" if is_integer and value > limit.largest else ""
        raise ValueError(f"{name}{where} is {value!r}; it has to be an integer from {least} to {limit.largest:,}{why}")


def check_generation(options: Mapping[str, Any], config: Any) -> None:
    """Checks the options of `generate()` that multiply its work, given or from a generation config.

    Args:
        options: Given to `generate()`; they take the place of the config's.
        config: The generation config.

    Raises:
        ValueError: One of them is no integer, or beyond its limit.
    """
    for name in ("num_beams", "num_return_sequences", *LENGTHS):
        if options.get(name) is not None:
            check_limit(name, options[name])
        elif name not in LENGTHS or all(options.get(length) is None for length in LENGTHS):
            check_limit(name, getattr(config, name, None), " of the generation config")
