"""Faster decoding and training for the paper's model, put on by explicit calls.

    from hf_vanilla_transformer import engine

    engine.attach(model)  # generate() decodes with the engine; model.engine.calls and .fallbacks count
    engine.detach(model)
    with engine.attach(model, compute_type="int8"): ...
    engine.unsupported_reason(model)  # why it can't be attached, or None
    with engine.training_shortcuts(model): ...  # the same loss and gradients in less time; the trainer does it itself

The engine knows the paper, and the paper doesn't know it. `engine.attachment` has the contract.
"""

from typing import TYPE_CHECKING

from ..lazy import lazy_names

__all__ = [
    "Engine",
    "EngineCallback",
    "EngineError",
    "attach",
    "attach_if_supported",
    "detach",
    "keep_freed_memory",
    "training_shortcuts",
    "unsupported_reason",
]

if TYPE_CHECKING:
    from .attachment import Engine, EngineError, attach, attach_if_supported, detach
    from .callback import EngineCallback
    from .memory import keep_freed_memory
    from .support import unsupported_reason
    from .training.shortcuts import training_shortcuts
else:
    # The options of a training need `torch_private`, but no model.
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "attachment": ("Engine", "EngineError", "attach", "attach_if_supported", "detach"),
            "callback": ("EngineCallback",),
            "memory": ("keep_freed_memory",),
            "support": ("unsupported_reason",),
            "training.shortcuts": ("training_shortcuts",),
        },
    )
