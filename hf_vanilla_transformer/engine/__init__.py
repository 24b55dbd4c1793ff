"""What makes the paper's model fast: it takes the place of plain code only where it computes the same.

    from hf_vanilla_transformer import engine

    engine.unsupported_reason(model)  # why `generate()` takes transformers' loop, or None
    engine.freeze(model)  # the weights stay as they are, so they needn't be compared at each call
    with engine.frozen(model): ...  # for a while
    engine.release(model)  # lets go of what is kept for the model
    with engine.training_shortcuts(model): ...  # the same loss and gradients in less time; the trainer does it itself

The engine knows the paper, and the paper doesn't know it: importing the package puts it into `EngineSlot.engine`.
"""

from .decoding.generate import Engine
from .decoding.prepared import freeze, frozen, release
from .memory import keep_freed_memory
from .support import unsupported_reason
from .training.shortcuts import training_shortcuts

__all__ = ["Engine", "freeze", "frozen", "keep_freed_memory", "release", "training_shortcuts", "unsupported_reason"]
