"""What makes the paper's model fast: it takes the place of plain code only where it computes the same.

    from hf_vanilla_transformer import engine

    engine.unsupported_reason(model)  # why `generate()` takes transformers' loop, or None
    engine.freeze(model)  # the weights stay as they are, so they needn't be compared at each call
    with engine.frozen(model): ...  # for a while
    engine.release(model)  # lets go of what is kept for the model
    with engine.training_shortcuts(model): ...  # the same loss and gradients in less time; the trainer does it itself

The engine knows the paper, and the paper doesn't know it: importing the package puts it into `EngineSlot.engine`.
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Engine", "freeze", "frozen", "keep_freed_memory", "release", "training_shortcuts", "unsupported_reason"]

if TYPE_CHECKING:
    from .decoding.generate import Engine
    from .decoding.prepared import freeze, frozen, release
    from .memory import keep_freed_memory
    from .support import unsupported_reason
    from .training.shortcuts import training_shortcuts
else:
    # A module is imported when its name is used: the options of a training need `torch_private`, but no model.
    _MODULES = {
        "Engine": "decoding.generate",
        **dict.fromkeys(("freeze", "frozen", "release"), "decoding.prepared"),
        "keep_freed_memory": "memory",
        "training_shortcuts": "training.shortcuts",
        "unsupported_reason": "support",
    }

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
