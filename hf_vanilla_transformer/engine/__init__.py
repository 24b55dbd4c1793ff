"""Faster decoding and training for the paper's model, put on by explicit calls.

    from hf_vanilla_transformer import engine

    engine.attach(model)  # generate() decodes with the engine; model.engine.calls and .fallbacks count
    engine.detach(model)
    with engine.attach(model, compute_type="int8"): ...
    engine.unsupported_reason(model)  # why it can't be attached, or None
    with engine.training_shortcuts(model): ...  # the same loss and gradients in less time; the trainer does it itself

The engine knows the paper, and the paper doesn't know it. `engine.attachment` has the contract.
"""

from .attachment import Engine, EngineError, attach, attach_if_supported, detach
from .memory import keep_freed_memory
from .support import unsupported_reason
from .training.shortcuts import training_shortcuts

__all__ = [
    "Engine",
    "EngineError",
    "attach",
    "attach_if_supported",
    "detach",
    "keep_freed_memory",
    "training_shortcuts",
    "unsupported_reason",
]
