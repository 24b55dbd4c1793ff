"""Faster decoding and training for the paper's model, put on by explicit calls.

    from hf_vanilla_transformer import engine

    engine.attach(model)  # generate() decodes with the engine; model.engine.calls and .fallbacks count
    engine.detach(model)
    with engine.attach(model, compute_type="int8"): ...
    engine.unsupported_reason(model)  # why it can't be attached, or None
    with engine.training_shortcuts(model): ...  # the same loss and gradients in less time; the trainer does it itself

The engine knows the paper, and the paper doesn't know it. `engine.attachment` has the contract.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attachment import Engine, EngineError, attach, attach_if_supported, detach
    from .callback import EngineCallback
    from .memory import keep_freed_memory
    from .support import unsupported_reason
    from .training.shortcuts import training_shortcuts

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
# Where the names are, if not in `attachment`. They are imported when used: the options of a training need
# `torch_private`, but no model.
MODULES = {
    "EngineCallback": "callback",
    "keep_freed_memory": "memory",
    "training_shortcuts": "training.shortcuts",
    "unsupported_reason": "support",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{MODULES.get(name, 'attachment')}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
