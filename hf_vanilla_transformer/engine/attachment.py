"""Puts the engine on a model and takes it off again.

The contract is that of `torch.compile` or of an export: while the engine is attached, the model's weights and settings
are constants. Changes that are noticed at each call let transformers' loop decode, and a warning names the reason:
after a change of the model until `attach` is called again; with hooks, in training mode, under autocast, and for
options that the engine doesn't have, for that call. docs/engine.md names what isn't noticed.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoints.code import other_code
from ..plan_vanilla_transformer import ENGINE_OPTIONS, Plan
from .decoding.generate import INPUTS, Output, Uncovered, generate
from .decoding.graph import Graph
from .decoding.packed import Packed
from .decoding.prepared import Prepared
from .support import Snapshot, unsupported_reason

logger = logging.get_logger(__name__)


class EngineError(ValueError):
    """The engine can't be attached or run a call; the message says why."""


class Engine(AbstractContextManager["Engine"]):
    """The weights of one model, prepared for decoding; `model.engine` while it is attached.

    Copies, pickles and saved checkpoints of the model have None. Each call has buffers of its own, so that threads may
    share it. Use it in a `with` to take it off at the end. Arguments and errors are those of `attach`.

    Attributes:
        compute_type: "int8", or the type of the weights, such as "float32".
        calls: Calls of `generate()`, and batches of a `Translator`, that the engine has decoded.
        fallbacks: Those that it has left to transformers' loop or the model's own modules.
        last_reason: Why it left the last one of them.
        layouts: By name, how the weights of a decoder's layer are kept: as was measured to be fastest here.
    """

    def __init__(self, model: PreTrainedModel, compute_type: str = "default") -> None:
        if (reason := unsupported_reason(model, compute_type)) is not None:
            raise EngineError(f"the engine can't be attached to this model: {reason}")
        self.compute_type = "int8" if compute_type == "int8" else str(model.dtype).removeprefix("torch.")
        self.calls, self.fallbacks = 0, 0
        self.last_reason: str | None = None
        prepared = Graph(model) if model.device.type == "cuda" else Packed(model, compute_type == "int8")
        self.layouts = prepared.weights.layouts
        self._state: tuple[Prepared, Snapshot] | str = (prepared, Snapshot(model))  # or why it is off
        self._model, self._warned = weakref.ref(model), set[str]()

    @property
    def is_on(self) -> bool:
        """Whether the engine decodes; False after a change of the model, until `attach` is called again."""
        return not isinstance(self._state, str)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # a copy of the model isn't attached

    def __exit__(self, *error: object) -> None:
        if (model := self._model()) is not None:
            detach(model)

    def generate(self, model: PreTrainedModel, arguments: dict[str, object]) -> Output | Tensor:
        """Decodes for `model.generate(**arguments)`; an option that needs the engine in vain is an `EngineError`."""
        options = {name: value for name, value in arguments.items() if name not in INPUTS}
        plan = Plan.of(options, model.generation_config)
        prepared, reason = self.ready(model, plan)
        if prepared is not None:
            try:
                output = generate(model, plan, arguments, prepared)
                self.calls += 1
                return output
            except Uncovered as uncovered:
                reason = str(uncovered)
        self.step_aside(reason)
        if plan.needs_attention:
            name = "coverage_penalty" if plan.coverage_penalty else "output_alignments"
            raise EngineError(f"`{name}` needs the engine, and it can't run this call: {reason}")
        arguments = {name: value for name, value in arguments.items() if name not in ENGINE_OPTIONS}
        return model.generate_by_transformers(arguments)

    def ready(self, model: PreTrainedModel, plan: Plan | None = None) -> tuple[Prepared | None, str]:
        """Returns what decodes for the model now, by a plan; or None and the reason. A change is for good."""
        if isinstance(self._state, str):
            return None, self._state
        prepared, snapshot = self._state
        if (change := snapshot.change(model)) is not None:  # weights, and all that decoding made of them, are freed
            reason = self._state = f"{change} since the engine was attached; call engine.attach(model) again"
            return None, reason
        reason = snapshot.obstacle(model) or (plan and prepared.unsupported(plan)) or ""
        return (None if reason else prepared), reason

    def step_aside(self, reason: str) -> None:
        """Counts a call that is left to transformers' loop, and warns once of each reason."""
        self.fallbacks += 1
        self.last_reason = reason
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning(f"The model decodes without the engine: {reason}.")


def attach(model: PreTrainedModel, compute_type: str = "default") -> Engine:
    """Puts the engine on a model: `model.generate()` then decodes with it, until `detach` or the end of a `with`.

    `compute_type` "default" computes in the type of the weights, and the name of that type is taken too; "int8" rounds
    the weights of a float32 model on a CPU to 8 bits. What isn't supported raises `EngineError`.
    """
    model.engine = attached = Engine(model, compute_type)
    name = model.name_or_path
    if name and (note := other_code(Path(name)).note(name)) is not None:
        logger.warning_once(f"{note}. It doesn't run, as the package is imported: docs/engine.md says how it would.")
    return attached


def attach_if_supported(model: PreTrainedModel, compute_type: str = "default") -> AbstractContextManager[object]:
    """Attaches the engine to the caller's own model if that is supported; with a `compute_type`, it has to be."""
    try:
        return attach(model, compute_type)
    except EngineError as error:
        if compute_type != "default":
            raise
        logger.info(f"{type(model).__name__} decodes without the engine: {error}.")
        return nullcontext()


def detach(model: PreTrainedModel) -> None:
    """Takes the engine off a model; one without an engine is left as it is."""
    if (attached := vars(model).pop("engine", None)) is not None:
        attached._state = "the engine was detached"
