"""Puts the engine on a model and takes it off again.

The contract is that of `torch.compile` or of an export: while the engine is attached, the model's weights and settings
are constants. Changes that `watch` notices at each call let transformers' loop decode, and a warning names the reason:
after a change of the model until `attach` is called again; with hooks, in training mode, under autocast, and for
options that the engine doesn't have, for that call. docs/engine.md names what isn't noticed.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext

from transformers import PreTrainedModel
from transformers.utils import logging

from ..plan_vanilla_transformer import ENGINE_OPTIONS, Plan
from .checkpoint_code import warn_of_other_code
from .decoding.generate import INPUTS, Output, Uncovered, generate
from .decoding.graph import Graph
from .decoding.packed import Packed
from .decoding.prepared import Prepared
from .support import unsupported_reason
from .watch import Snapshot

logger = logging.get_logger(__name__)

COMPUTE_TYPES = ("default", "float32", "bfloat16", "float16", "float64", "int8")


class EngineError(ValueError):
    """The engine can't be attached or run a call; the message says why."""


class Engine:
    """The weights of one model, prepared for decoding; `model.engine` while it is attached.

    It belongs to this one model and holds it weakly: copies, pickles and saved checkpoints of the model have None. Each
    call has buffers of its own, so that threads may share it. Use it in a `with` to take it off at the end. Arguments
    and errors are those of `attach`.

    Attributes:
        compute_type: "int8", or the type of the weights, such as "float32".
        calls: Calls of `generate()`, and batches of a `Translator`, that the engine has decoded.
        fallbacks: Those that it has left to transformers' loop or the model's own modules.
        last_reason: Why it left the last one of them.
    """

    def __init__(self, model: PreTrainedModel, compute_type: str = "default", allow_autocast: bool = False) -> None:
        if compute_type not in COMPUTE_TYPES:
            raise EngineError(f"compute_type is {compute_type!r}; choose one of {', '.join(map(repr, COMPUTE_TYPES))}")
        if (reason := unsupported_reason(model, compute_type, allow_autocast=allow_autocast)) is not None:
            raise EngineError(f"the engine can't be attached to this model: {reason}")
        is_default, is_int8 = compute_type == "default", compute_type == "int8"
        self.compute_type = str(model.lm_head.weight.dtype).removeprefix("torch.") if is_default else compute_type
        self.calls, self.fallbacks = 0, 0
        self.last_reason: str | None = None
        self._model = weakref.ref(model)
        self._snapshot: Snapshot | None = Snapshot(model, allow_autocast)
        self._prepared: Prepared | None = Graph(model) if model.device.type == "cuda" else Packed(model, is_int8)
        self._change: str | None = None  # why it is off
        self._warned: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether the engine decodes; False after a change of the model, until `attach` is called again."""
        return self._prepared is not None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # a copy of the model isn't attached

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        if (model := self._model()) is not None:
            detach(model)

    def generate(self, model: PreTrainedModel, arguments: dict[str, object]) -> Output:
        """Decodes for `model.generate(**arguments)` with the same result as without the engine.

        A call that is left to transformers' loop, but has an option of the engine's own, raises `EngineError`.
        """
        options = {name: value for name, value in arguments.items() if name not in INPUTS}
        plan = Plan.of(options, model.generation_config)
        prepared, reason = self.ready(model)
        if prepared is not None and (reason := prepared.unsupported(plan)) is None:
            try:
                output = generate(model, plan, arguments, prepared)
                self.calls += 1
                return output
            except Uncovered as uncovered:
                reason = str(uncovered)
        self.step_aside(str(reason))
        if plan.needs_attention:
            name = "coverage_penalty" if plan.coverage_penalty else "output_alignments"
            raise EngineError(f"`{name}` needs the engine, and it can't run this call: {reason}")
        arguments = {name: value for name, value in arguments.items() if name not in ENGINE_OPTIONS}
        return model.generate_by_transformers(arguments)

    def ready(self, model: PreTrainedModel) -> tuple[Prepared | None, str | None]:
        """Returns what decodes for a model now, or None and the reason; goes off for good after a change."""
        if self._model() is not model:
            return None, "the engine belongs to another model, of which this is a copy"
        if self._snapshot is not None and (change := self._snapshot.change(model)) is not None:
            self.switch_off(f"{change} since the engine was attached; call engine.attach(model) again")
        reason = self._change if self._snapshot is None else self._snapshot.obstacle(model)
        return (self._prepared, None) if reason is None else (None, reason)

    def switch_off(self, reason: str) -> None:
        """Frees the weights and all that decoding has made of them."""
        self._prepared = self._snapshot = None
        self._change = reason

    def step_aside(self, reason: str) -> None:
        """Counts a call that is left to transformers' loop, and warns once of each reason."""
        self.fallbacks += 1
        self.last_reason = reason
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning(f"The model decodes without the engine: {reason}.")


def attach(model: PreTrainedModel, compute_type: str = "default", *, allow_autocast: bool = False) -> Engine:
    """Puts the engine on a model: `model.generate()` then decodes with it, and `model.engine` counts its calls.

        engine.attach(model)  # until engine.detach(model)
        with engine.attach(model, compute_type="int8"): ...  # inside of the `with` alone

    While it is attached, weights and settings of the model are constants (`engine.attachment`).

    `compute_type` "default" computes in the type of the weights, and the name of that type is taken too; "int8" rounds
    the weights of a float32 model on a CPU to 8 bits. With `allow_autocast`, the model may have Accelerate's `forward`
    with autocast, a method that the engine doesn't call. A model that isn't supported, or not with this `compute_type`,
    raises `EngineError`.
    """
    attached = Engine(model, compute_type, allow_autocast)
    warn_of_other_code(model)
    model.engine = attached
    return attached


def attach_if_supported(
    model: PreTrainedModel, compute_type: str = "default", *, allow_autocast: bool = False
) -> AbstractContextManager[object]:
    """Attaches the engine to a model whose owner is the caller, or leaves a model of another kind as it is.

    Then it returns a context manager that does nothing; but a `compute_type` that is named has to be possible, or
    raises `EngineError`.
    """
    try:
        return attach(model, compute_type, allow_autocast=allow_autocast)
    except EngineError as error:
        if compute_type != "default":
            raise
        logger.info(f"{type(model).__name__} decodes without the engine: {error}.")
        return nullcontext()


def detach(model: PreTrainedModel) -> None:
    """Takes the engine off a model; one without an engine is left as it is."""
    if (attached := vars(model).pop("engine", None)) is not None:
        attached.switch_off("the engine was detached")
