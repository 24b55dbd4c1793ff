"""Puts the engine on a model and takes it off again.

The contract is that of `torch.compile` or of an export: while the engine is attached, the model's weights and settings
are constants. Changes are noticed at each call where that costs next to nothing; then transformers' loop decodes, and a
warning names the reason:

- other modules, classes or parameters, changed weights (torch's count of writes, the address, and 16 values of each
  parameter), methods that an instance has of its own, another type or device: the engine is off from then on, until
  `attach` is called again;
- hooks, training mode, autocast, and options that the engine doesn't have: it steps aside for that call.

Not noticed are elements written through `.data` or NumPy that miss the 16, changed settings of modules (`eps`,
`scaling`) and of the configuration, and patched functions or classes of torch and transformers.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import logging

from ..plan_vanilla_transformer import ENGINE_OPTIONS
from .checkpoint_code import warn_of_other_code
from .decoding.generate import Output, Uncovered, generate, plan_of
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

    It belongs to this one model and holds it weakly: copies, pickles and saved checkpoints of the model have None.
    Each call has buffers of its own, so that threads may share it. Use it in a `with` to take it off at the end.

    Args:
        model: The model.
        compute_type: As for `attach`.
        allow_autocast: As for `attach`.

    Attributes:
        compute_type: "int8", or the type of the weights, such as "float32".
        calls: Calls of `generate()`, and batches of a `Translator`, that the engine has decoded.
        fallbacks: Those that it has left to transformers' loop or the model's own modules.
        last_reason: Why it left the last one of them.

    Raises:
        EngineError: The model isn't supported.
    """

    def __init__(self, model: PreTrainedModel, compute_type: str = "default", allow_autocast: bool = False) -> None:
        if compute_type not in COMPUTE_TYPES:
            raise EngineError(f"compute_type is {compute_type!r}; choose one of {', '.join(map(repr, COMPUTE_TYPES))}")
        if (reason := unsupported_reason(model, compute_type, allow_autocast=allow_autocast)) is not None:
            raise EngineError(f"the engine can't be attached to this model: {reason}")
        own_type = str(model.lm_head.weight.dtype).removeprefix("torch.")
        self.compute_type = own_type if compute_type == "default" else compute_type
        self.allow_autocast = allow_autocast
        self.calls, self.fallbacks = 0, 0
        self.last_reason: str | None = None
        self._model = weakref.ref(model)
        self._snapshot: Snapshot | None = Snapshot(model, allow_autocast)
        self._prepared: Prepared | None = (
            Graph(model) if model.device.type == "cuda" else Packed(model, is_int8=compute_type == "int8")
        )
        self._change: str | None = None  # why it is off
        self._replaced: tuple[str, bool] | None = None  # what was attached before, for `__exit__`
        self._warned: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether the engine decodes; False after a change of the model, until `attach` is called again."""
        return self._prepared is not None

    def __repr__(self) -> str:
        state = "" if self.is_on else ", off"
        return f"Engine({self.compute_type}, calls={self.calls}, fallbacks={self.fallbacks}{state})"

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # a copy of the model isn't attached

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if (model := self._model()) is not None:
            _restore(model, self._replaced)

    def generate(self, model: PreTrainedModel, arguments: dict[str, object]) -> Output:
        """Decodes for `model.generate(**arguments)` with the same result as without the engine.

        There are two more arguments: `coverage_penalty` (beta of Wu et al. 2016, eq. 15) and `output_alignments`
        (whether the output has `alignments`).

        Raises:
            EngineError: One of the two is given for a call that is left to transformers' loop.
        """
        plan = plan_of(model, arguments)
        prepared, reason = self.ready(model)
        if prepared is not None and (reason := prepared.unsupported(plan)) is None:
            try:
                output = generate(model, plan, arguments, prepared)
                self.calls += 1
                return output
            except Uncovered as uncovered:
                reason = str(uncovered)
        self.step_aside(str(reason))
        asked = zip(ENGINE_OPTIONS, (plan.coverage_penalty, plan.alignments), strict=True)
        if own := [name for name, is_set in asked if is_set]:
            raise EngineError(f"`{own[0]}` needs the engine, and it can't run this call: {reason}")
        arguments = {name: value for name, value in arguments.items() if name not in ENGINE_OPTIONS}
        return GenerationMixin.generate(model, **model.prepare_decoding(arguments))

    def ready(self, model: PreTrainedModel) -> tuple[Prepared | None, str | None]:
        """Returns what decodes for a model now, or None and the reason; goes off for good after a change."""
        if self._model() is not model:
            return None, "the engine belongs to another model, of which this is a copy"
        if self._snapshot is None:
            return None, self._change
        if (change := self._snapshot.change(model)) is not None:
            self.close()
            self._prepared = self._snapshot = None
            self._change = f"{change} since the engine was attached; call engine.attach(model) again"
            return None, self._change
        obstacle = self._snapshot.obstacle(model)
        return (self._prepared, None) if obstacle is None else (None, obstacle)

    def close(self) -> None:
        """Frees what decoding has made for later calls: captured steps, on a GPU."""
        if self._prepared is not None:
            self._prepared.close()

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

    While it is attached, weights and settings of the model are constants: `engine.attachment` says which changes are
    noticed.

    Args:
        model: The paper's model.
        compute_type: "default" computes in the type of the weights, and the name of that type is taken too; "int8"
            rounds the weights of a float32 model on a CPU to 8 bits.
        allow_autocast: Whether the model may have Accelerate's `forward` with autocast, a method that the engine
            doesn't call.

    Returns:
        The engine.

    Raises:
        EngineError: The model isn't supported, or not with this `compute_type`.
    """
    before = _attached_as(model)
    attached = Engine(model, compute_type, allow_autocast)
    attached._replaced = before
    warn_of_other_code(model)
    model.engine = attached
    return attached


def attach_if_supported(
    model: PreTrainedModel, compute_type: str = "default", *, allow_autocast: bool = False
) -> AbstractContextManager[object]:
    """Attaches the engine to a model whose owner is the caller, or leaves a model of another kind as it is.

    Args:
        model: As for `attach`, like the others.
        compute_type: As for `attach`; one that is named has to be possible.
        allow_autocast: As for `attach`.

    Returns:
        The engine, or a context manager that does nothing.

    Raises:
        EngineError: The model isn't supported, and a `compute_type` is named.
    """
    try:
        return attach(model, compute_type, allow_autocast=allow_autocast)
    except EngineError as error:
        if compute_type != "default":
            raise
        logger.info(f"{type(model).__name__} decodes without the engine: {error}.")
        return nullcontext()


class detach:  # noqa: N801  # a function that may stand in a `with`
    """Takes the engine off a model; in a `with`, it is attached again at the end if it still can be.

        engine.detach(model)
        with engine.detach(model): ...

    Args:
        model: A model; one without an engine is left as it is.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._replaced = model, _attached_as(model)
        _restore(model, None)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _restore(self._model, self._replaced)


def _attached_as(model: PreTrainedModel) -> tuple[str, bool] | None:
    """Returns the compute type of the engine that decodes for a model, and whether it allows autocast; or None."""
    attached = getattr(model, "engine", None)
    if not isinstance(attached, Engine) or not attached.is_on:
        return None
    return attached.compute_type, attached.allow_autocast


def _restore(model: PreTrainedModel, arguments: tuple[str, bool] | None) -> None:
    if (attached := vars(model).pop("engine", None)) is not None:
        attached.close()
    if arguments is None:
        return
    compute_type, allow_autocast = arguments
    if unsupported_reason(model, compute_type, allow_autocast=allow_autocast) is None:
        attach(model, compute_type, allow_autocast=allow_autocast)
