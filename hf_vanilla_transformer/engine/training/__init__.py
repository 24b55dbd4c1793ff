"""Shortcuts of a training step on a CPU: the same loss and gradients as the paper's modules, in less time."""

from .shortcuts import paused_shortcuts, training_shortcuts

__all__ = ["paused_shortcuts", "training_shortcuts"]
