"""Weights that were prepared for a model, kept as long as the model has the very weights that they were made of."""

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from ..support import parameters_of, used_modules
from .weights import Weights


@dataclass
class Prepared:
    """What is kept for a model.

    Attributes:
        modules: The modules whose weights these are; weakly, as they may be replaced.
        key: Where the parameters lie, their shapes, and numbers that are part of the weights, such as LayerNorm's eps.
        checksum: Of every byte of the parameters.
        is_frozen: Whether the user has promised not to change them.
        versions: What torch counts when it writes to a parameter.
        weights: By compute type.
    """

    modules: list[weakref.ref[nn.Module]] = field(default_factory=list)
    key: tuple[Any, ...] = ()
    checksum: int | None = None
    is_frozen: bool = False
    versions: tuple[int, ...] = ()
    weights: dict[str, Weights] = field(default_factory=dict)


_prepared: "weakref.WeakKeyDictionary[nn.Module, Prepared]" = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def weights_of(model: Any, compute_type: str = "default") -> Weights:
    """Returns the weights of a model as decoding needs them: those of the last call, if they are still the model's.

    Every byte is compared by a checksum, unless the model is frozen; and on a GPU they are prepared at each call.

    Args:
        model: A model that `unsupported_reason` has nothing against.
        compute_type: One of `COMPUTE_TYPES`.
    """
    modules = used_modules(model)
    parameters = parameters_of(modules)
    if parameters[0].device.type != "cpu":
        return Weights(model, compute_type)
    with _lock:
        kept = _prepared.setdefault(model, Prepared())
        if not _is_current(kept, modules, parameters):
            kept.modules, kept.key = [weakref.ref(module) for module in modules], _key(modules, parameters)
            kept.checksum, kept.versions = checksum(parameters), _versions(parameters)
            kept.weights = {}
        if compute_type not in kept.weights:
            kept.weights[compute_type] = Weights(model, compute_type)
        return kept.weights[compute_type]


def freeze(model: Any) -> None:
    """Takes the user's word that a model's weights don't change until `model.train()` or `release(model)`.

    Calls of `generate()` then save the comparison of all bytes, which is made once more here. Steps of an optimizer,
    `load_state_dict`, and whatever else torch counts as a write are noticed all the same; a write by `parameter.data`
    or numpy is not.

    Args:
        model: A model in evaluation mode.

    Raises:
        ValueError: The model is in training mode.
    """
    if model.training:
        raise ValueError("a model in training mode can't be frozen, as its weights change; call model.eval() first")
    with _lock:
        kept = _prepared.setdefault(model, Prepared())
        if kept.weights and not kept.is_frozen:
            modules = used_modules(model)
            if not _is_current(kept, modules, parameters_of(modules)):
                # They were changed before the promise, perhaps without torch's notice, and would never be compared.
                kept = _prepared[model] = Prepared()
        kept.is_frozen = True


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """Freezes a model inside of a `with`; afterwards it is frozen only if it was so before.

    Args:
        model: As for `freeze`.
    """
    was_frozen = model in _prepared and _prepared[model].is_frozen
    freeze(model)
    try:
        yield
    finally:
        if model in _prepared:
            _prepared[model].is_frozen = was_frozen


def release(model: Any) -> None:
    """Lets go of all that is kept for a model, and of the promise of `freeze`; `model.train()` does so too."""
    if model in _prepared:
        with _lock:
            _prepared.pop(model, None)


def _is_current(kept: Prepared, modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> bool:
    if len(kept.modules) != len(modules) or kept.key != _key(modules, parameters):
        return False
    if any(reference() is not module for reference, module in zip(kept.modules, modules, strict=True)):
        return False
    if kept.is_frozen:
        return kept.versions == _versions(parameters)
    return kept.checksum == checksum(parameters)


def _key(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> tuple[Any, ...]:
    places = tuple((one.data_ptr(), one.shape, one.stride(), one.dtype) for one in parameters)
    owners = tuple(tuple(map(id, module._parameters.values())) for module in modules if module._parameters)
    numbers: list[tuple[Any, ...]] = []
    for module in modules:
        values = vars(module)
        if isinstance(module, nn.LayerNorm):
            numbers.append((module.normalized_shape, module.eps))
        elif "scaling" in values:
            numbers.append((values["scaling"], values["head_dim"], values["value_head_dim"]))
        elif "embed_tokens" in module._modules:
            numbers.append((values["config"].embedding_scale, values["config"].norm_position))
    return places, owners, tuple(numbers)


def _versions(parameters: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple(-1 if one.is_inference() else one._version for one in parameters)


def checksum(tensors: Iterable[Tensor]) -> int:
    """Returns a number that depends on the place of every byte of tensors in a CPU's memory (xxh3).

    One thread reads memory at full speed; more would compete with torch's, which wait actively for their next work.
    """
    return hash(tuple(map(_digest, tensors)))


def _digest(tensor: Tensor) -> int:
    # In the order of its memory, whatever its strides; a tensor with gaps or repeats is laid out anew.
    order = sorted(range(tensor.ndim), key=lambda dim: tensor.stride()[dim], reverse=True)
    row: Any = tensor.detach().permute(order).contiguous().view(-1).view(torch.uint8).numpy()
    return int(xxhash.xxh3_64_intdigest(row))
