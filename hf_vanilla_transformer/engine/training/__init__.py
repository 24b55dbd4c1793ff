"""Shortcuts of a training step on a CPU: the paper's loss and gradients in less memory and, in bfloat16, less time."""

from .shortcuts import paused_shortcuts, training_shortcuts

__all__ = ["paused_shortcuts", "training_shortcuts"]
