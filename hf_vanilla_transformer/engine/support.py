"""What the engine may speak for: models, code and surroundings of which it can show that it computes the same.

The engine mirrors code: the paper's files, and what these call in torch and transformers. `Mirrored` remembers all of
it at the first look, and each call compares: every method of every class, every function by its name, code, defaults
and closure, each from the file that it should come from. A patch made before the first look has code from elsewhere, or
code that isn't in the file; the paper's own files are compared with digests of the formulas that the engine mirrors
(`engine.source`). Then follow the model's modules and the surroundings of the call.
"""

import functools
import inspect
import operator
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import huggingface_hub
import torch
import transformers
from torch import Tensor, nn
from transformers import activations, cache_utils, masking_utils, modeling_layers, modeling_outputs
from transformers.generation import logits_process, stopping_criteria
from transformers.generation import utils as generation_utils
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import generic, output_capturing

from .. import configuration_vanilla_transformer as configuration
from .. import generation_vanilla_transformer as generation
from .. import modeling_vanilla_transformer as modeling
from . import source, torch_private

PAPER = (configuration, modeling, generation)
HEAD = modeling.VanillaTransformerForConditionalGeneration
PARTS = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList)

# Processors that change the scores of a row in view of that row alone, whatever the batch. The exponential decay is not
# among them: it makes infinities and NaN of tokens that another one bars, whose order is up to torch's top-k.
ROW_BY_ROW = (
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
)
CRITERIA = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria, generation.MaxLengthPerSentence)

# What is mirrored: classes with all that they inherit from, and functions with all that they refer to by name.
CLASSES: tuple[type, ...] = (
    *(value for module in PAPER for value in vars(module).values() if inspect.isclass(value)),
    *PARTS,
    *(value for value in vars(activations).values() if inspect.isclass(value) and issubclass(value, nn.Module)),
    *(value for value in vars(nn.modules.activation).values() if inspect.isclass(value)),
    *(cache_utils.DynamicCache, cache_utils.DynamicLayer, cache_utils.EncoderDecoderCache),
    *(modeling_outputs.BaseModelOutput, modeling_outputs.Seq2SeqLMOutput, modeling_outputs.Seq2SeqModelOutput),
    modeling_outputs.BaseModelOutputWithPastAndCrossAttentions,
    *ROW_BY_ROW,
    *CRITERIA,
    type(ALL_ATTENTION_FUNCTIONS),
    Tensor,
)
MODULES: tuple[types.ModuleType, ...] = (
    *PAPER,
    *(masking_utils, sdpa_attention, cache_utils, modeling_layers, output_capturing, generic, activations),
    *(generation_utils, logits_process, stopping_criteria),
    *(nn.functional, nn.modules.module, nn.modules.linear, nn.modules.normalization, nn.modules.sparse),
    *(nn.modules.dropout, nn.modules.activation, nn.modules.container),
    torch,
)
# Of all classes and modules, what code refers to by name is mirrored, beginning with these: what is called first, and
# what is reached by a registry and not by name.
ROOTS = (
    *("generate", "forward", "_sample", "_beam_search"),
    *("sdpa_attention_forward", "eager_attention", "sdpa_mask", "eager_mask", "label_smoothed_cross_entropy"),
)
ALIASES = ("threshold", "_pair")  # of torch.nn.functional, for functions of other names

# Kernels of eq. 1 that are known, and the masks that they get.
KERNELS = {"sdpa": sdpa_attention.sdpa_attention_forward, "eager": None}
MASKS = {"sdpa": masking_utils.sdpa_mask, "eager": masking_utils.eager_mask}

LAYERS = (modeling.VanillaTransformerEncoderLayer, modeling.VanillaTransformerDecoderLayer)

# Hooks that change nothing of what is decoded, by the file and the name of their code.
HARMLESS_HOOKS = {
    (output_capturing.__file__, "output_capturing_hook"),
    (sys.modules["transformers.modeling_utils"].__file__, "make_inputs_require_grads"),
}

# Where mirrored code comes from, beside the paper's own files.
HOMES = {one.__name__: one for one in (torch, transformers, accelerate, huggingface_hub)}
_FOLDERS = tuple(f"{Path(str(one.__file__)).resolve().parent}/" for one in HOMES.values())
_STANDARD_LIBRARY = f"{Path(sysconfig.get_path('stdlib')).resolve()}/"
_OWN_FILES = {str(Path(str(module.__file__)).resolve()) for module in PAPER}


# ---- Code ----
_CODE_AND_DEFAULTS = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")


class Mirrored:
    """The code that the engine mirrors, as it was at the first look.

    Attributes:
        reason: What was wrong from the beginning, or None.
    """

    def __init__(self) -> None:
        self._functions: dict[int, Any] = {}
        classes = list(dict.fromkeys(base for one in CLASSES for base in one.__mro__ if base is not object))
        callables = {one: _callables(one) for one in (*classes, *MODULES)}
        kept: dict[Any, dict[str, Any]] = {}
        self._used, before = set(ROOTS), 0
        while len(self._used) > before:  # what is referred to is code as well, which may refer to more
            before = len(self._used)
            for one, values in callables.items():
                kept[one] = {name: value for name, value in values.items() if self._is_used(name)}
                self._collect(kept[one].values())
            self._used.update(name for function in self._functions.values() for name in _names(function.__code__))
        owners = [one for one, values in kept.items() if values]
        self._owners = [
            (vars(one), str(one.__name__), tuple(kept[one]), operator.itemgetter(*kept[one])) for one in owners
        ]
        self._values = [get(namespace) for namespace, _, _, get in self._owners]
        self._names = [(one, len(vars(one)), frozenset(vars(one))) for one in classes]
        self._cells = [(cell, _content(cell)) for one in self._functions.values() for cell in one.__closure__ or ()]
        self._with_keyword_defaults = [one for one in self._functions.values() if one.__kwdefaults__]
        self._states = self._look()
        self.reason = self._foreign(kept) or source.difference(PAPER, self._functions.values())

    def _collect(self, values: Iterable[Any]) -> None:
        for function in (one for value in values for one in _functions_in(value)):
            if id(function) not in self._functions:
                self._functions[id(function)] = function
                self._collect(_content(cell) for cell in function.__closure__ or ())

    def _look(self) -> tuple[list[Any], list[Any]]:
        keyword_defaults = [tuple(map(id, one.__kwdefaults__.values())) for one in self._with_keyword_defaults]
        return list(map(_CODE_AND_DEFAULTS, self._functions.values())), keyword_defaults

    def _foreign(self, kept: dict[Any, dict[str, Any]]) -> str | None:
        for function in self._functions.values():
            if not is_at_home(function.__code__):
                return f"{function.__qualname__} comes from {function.__code__.co_filename}"
        for one, values in kept.items():
            for name, value in values.items():
                package = type(value).__module__.partition(".")[0]
                is_known = package in HOMES or package in sys.stdlib_module_names or isinstance(value, type)
                if not is_known or isinstance(value, functools.partial):
                    return f"{name} of {one.__name__} is a {type(value).__name__}"
                # torch's own were defined under their names: others are wrapped, if only by torch's decorators.
                is_wrapped = isinstance(value, types.FunctionType) and value.__code__.co_name != name
                if is_wrapped and one in (*PARTS, nn.functional) and name not in ALIASES:
                    return f"{name} of {one.__name__} is wrapped by {value.__code__.co_qualname}"
        return None

    def _is_used(self, name: str) -> bool:
        return name in self._used or _is_dunder(name)

    def difference(self) -> str | None:
        """Says what is no longer as it was, or None."""
        for (namespace, owner, names, get), values in zip(self._owners, self._values, strict=True):
            try:
                if get(namespace) == values:
                    continue
            except KeyError:
                return f"{next(name for name in names if name not in namespace)} of {owner} was deleted"
            now = (namespace[name] for name in names)
            before = values if len(names) > 1 else (values,)
            changed = next(name for name, new, old in zip(names, now, before, strict=True) if new is not old)
            return f"{changed} of {owner} was replaced"
        for one, size, known in self._names:
            if len(vars(one)) != size:
                more = set(filter(self._is_used, _callables(one).keys() - known))
                if more:
                    return f"{one.__name__} has got {min(more)}"
        if self._look() != self._states or any(_content(cell) is not content for cell, content in self._cells):
            return "the code, the defaults or the closure of a function was changed"
        return None


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _callables(owner: Any) -> dict[str, Any]:
    """What a class or module has that runs: functions, classes, properties and other descriptors, and modules."""
    kinds = (type, types.ModuleType, property, classmethod, staticmethod, functools.cached_property)
    skipped = {"__dict__", "__weakref__", "__builtins__", "__loader__", "__spec__", "__class__"}
    if inspect.isclass(owner) and issubclass(owner, nn.Module):
        skipped |= {"__init__", "__setstate__"}  # not run when a model computes, and replaced by torch.compile
    return {
        name: value
        for name, value in list(vars(owner).items())
        if name not in skipped and (callable(value) or isinstance(value, kinds))
    }


def _functions_in(value: Any) -> Iterator[Any]:
    """The Python functions that run where a value is called or looked up."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, property):
        yield from (one for one in (value.fget, value.fset, value.fdel) if isinstance(one, types.FunctionType))
    elif isinstance(value, (classmethod, staticmethod, types.MethodType)):
        yield from _functions_in(value.__func__)
    elif isinstance(value, (functools.partial, functools.cached_property)):
        yield from _functions_in(value.func)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from _functions_in(value.__wrapped__)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant  # which may be looked up by getattr


def is_at_home(code: types.CodeType) -> bool:
    """Tells by its file whether code is torch's, transformers', the standard library's or the paper's."""
    name = code.co_filename
    if name.startswith("<"):  # what dataclasses write, and the interpreter's own modules
        return name.startswith("<frozen ") or (name == "<string>" and _is_dunder(code.co_name))
    return _is_home(name)


@functools.cache
def _is_home(file: str) -> bool:
    path = str(Path(file).resolve())
    if path in _OWN_FILES or path.startswith(_FOLDERS):
        return True
    return path.startswith(_STANDARD_LIBRARY) and "-packages/" not in path.removeprefix(_STANDARD_LIBRARY)


_look: Mirrored | None = None


def code_reason() -> str | None:
    """Says what of the mirrored code isn't as it should be, or None; the first call takes a tenth of a second."""
    global _look
    look = _look
    if look is None or (look.reason is not None and look.difference() is not None):  # what was wrong may be right now
        look = _look = Mirrored()
    return look.reason or look.difference()


# ---- Surroundings ----
def surroundings_reason() -> str | None:
    """Says what there is around a call that could see or change what the model computes, or None."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "the call is being compiled or traced"
    return torch_private.watcher() or code_reason() or _kernels_reason()


def _kernels_reason() -> str | None:
    if vars(modeling)["ALL_ATTENTION_FUNCTIONS"] is not ALL_ATTENTION_FUNCTIONS:
        return "the attention functions are others"
    for name, function in KERNELS.items():
        if ALL_ATTENTION_FUNCTIONS.get(name) is not function:
            return f"another attention function is registered as {name}"
        if masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(name) is not MASKS[name]:
            return f"another mask function is registered for {name}"
    return None


# ---- Models ----
def tree(module: nn.Module) -> list[nn.Module]:
    """Returns a module and all below it; `modules()` takes several times as long, as it makes their names too."""
    found = [module]
    for parent in found:  # which grows on the way
        found += [child for child in parent._modules.values() if child is not None]
    return found


def used_modules(model: Any) -> list[nn.Module]:
    """Returns the modules that decoding with a model runs; there may be others, which it doesn't."""
    return [model, model.model, *tree(model.model.encoder), *tree(model.model.decoder), *tree(model.lm_head)]


def unsupported_reason(model: Any, is_needed: bool = False) -> str | None:
    """Says what keeps the engine from speaking for a model, or None.

    Args:
        model: A model.
        is_needed: Whether the caller needs what the engine alone can do. It then serves devices too on which nobody
            has measured that it is faster than transformers.
    """
    if type(model) is not HEAD:
        return f"{type(model).__name__} is not {HEAD.__name__} itself"
    if getattr(model, "is_quantized", False):
        return "its weights are quantized"
    reason = surroundings_reason() or _module_reason(model)
    if reason is not None:
        return reason
    modules = used_modules(model)
    for module in modules:
        reason = _module_reason(module) or (None if vars(module).get("config", model.config) is model.config else "")
        if reason is not None:
            return reason or f"{type(module).__name__} has a configuration of its own"
    reason = _configuration_reason(model) or _shape_reason(model) or _parameter_reason(modules)
    if reason is not None:
        return reason
    device = model.lm_head.weight.device.type
    if torch.is_autocast_enabled(device):
        return "autocast is on"
    return None if is_needed or device == "cpu" else f"it has not been measured to be faster on {device}"


@functools.cache
def callable_names(kind: type) -> frozenset[str]:
    """Names that an instance may not have attributes of, as these would run in place of the class's."""
    return frozenset(name for base in kind.__mro__ for name in _callables(base)) | {"weight", "bias", "_hf_hook"}


# Activations that treat each element by itself, so that it makes no difference how positions are laid out.
ACTIVATION_NAMES = (
    "relu", "relu6", "relu2", "gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh",
    "gelu_accurate", "hardswish", "leaky_relu", "linear", "mish", "quick_gelu", "sigmoid", "silu", "swish", "tanh",
)  # fmt: skip
_ACTIVATION_CLASSES = (activations.ACT2CLS[name] for name in ACTIVATION_NAMES if name in activations.ACT2CLS)
ACTIVATIONS = frozenset(kind[0] if isinstance(kind, tuple) else kind for kind in _ACTIVATION_CLASSES)
_RESIDUALS = (modeling.PostNormResidual, modeling.PreNormResidual)
_LAYER = {
    "self_attn": (modeling.VanillaTransformerAttention,),
    "self_attn_layer_norm": _RESIDUALS,
    "feed_forward": (modeling.VanillaTransformerFeedForward,),
    "final_layer_norm": _RESIDUALS,
}
_STACK = {
    "embed_tokens": (nn.Embedding,),
    "embed_positions": (modeling.SinusoidalPositions, modeling.LearnedPositions),
    "dropout": (nn.Dropout,),
    "layers": (nn.ModuleList,),
    "layer_norm": (nn.LayerNorm, nn.Identity),
}
# What each module is made of: the name of a part, and the exact types that it may have.
MADE_OF: dict[type, dict[str, Any]] = {
    HEAD: {"model": (modeling.VanillaTransformerModel,), "lm_head": (nn.Linear,)},
    modeling.VanillaTransformerModel: {
        "encoder": (modeling.VanillaTransformerEncoder,),
        "decoder": (modeling.VanillaTransformerDecoder,),
    },
    modeling.VanillaTransformerEncoder: _STACK,
    modeling.VanillaTransformerDecoder: _STACK,
    modeling.VanillaTransformerEncoderLayer: _LAYER,
    modeling.VanillaTransformerDecoderLayer: {
        **_LAYER,
        "encoder_attn": (modeling.VanillaTransformerAttention,),
        "encoder_attn_layer_norm": _RESIDUALS,
    },
    modeling.VanillaTransformerAttention: dict.fromkeys(("q_proj", "k_proj", "v_proj", "out_proj"), (nn.Linear,)),
    modeling.VanillaTransformerFeedForward: {
        "fc1": (nn.Linear,),
        "activation": ACTIVATIONS,
        "dropout": (nn.Dropout,),
        "fc2": (nn.Linear,),
    },
    **{residual: {"dropout": (nn.Dropout,)} for residual in _RESIDUALS},
    **{leaf: {} for leaf in (modeling.SinusoidalPositions, modeling.LearnedPositions, *PARTS, *ACTIVATIONS)},
}


def _module_reason(module: Any) -> str | None:
    kind, attributes = type(module), vars(module)
    if kind not in MADE_OF:
        return f"{kind.__name__} is not one of the model's own modules"
    for name, kinds in MADE_OF[kind].items():
        part = type(module._modules.get(name))
        if part not in kinds:
            return f"{part.__name__} is not one of the model's own modules, or not as {name}"
    if not (names := callable_names(kind)).isdisjoint(attributes):  # type: ignore[arg-type]
        return f"a {kind.__name__} has a {min(names & attributes.keys())} of its own"
    return _call_reason(module)


def _call_reason(module: Any) -> str | None:
    """Says what else than its class's `forward` a module's call is, or None."""
    kind, attributes = type(module), vars(module)
    # To torch's own modules it makes no difference, but for dropout; new ones are in training mode until `eval()`.
    if module.training and (kind.__module__ == modeling.__name__ or kind is nn.Dropout):
        return f"a {kind.__name__} is in training mode"
    if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(is_harmless(hook) for hook in hooks):
            return f"a {kind.__name__} has hooks"
    if module._compiled_call_impl is not None:
        return f"a {kind.__name__} is compiled"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "an Embedding is renormalised as it is read"
    if isinstance(module, nn.LayerNorm) and (module.weight is None or module.bias is None):
        return f"a {kind.__name__} has no weight or bias"
    return None


def is_harmless(hook: Callable[..., Any]) -> bool:
    """Tells whether a hook is transformers' own and changes nothing of what a module computes."""
    code = getattr(hook, "__code__", None)
    return code is not None and (code.co_filename, code.co_name) in HARMLESS_HOOKS


def _configuration_reason(model: Any) -> str | None:
    config = model.config
    if type(config) is not configuration.VanillaTransformerConfig:
        return f"{type(config).__name__} is another configuration"
    kernel = config._attn_implementation or "eager"
    if kernel not in KERNELS:
        return f"the attention is {kernel}"
    return "the configuration has `is_causal`" if getattr(config, "is_causal", None) is not None else None


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def _shape_reason(model: Any) -> str | None:
    """Says which attention isn't as its stack's others, or None: the engine computes all heads of a layer alike."""
    for stack, is_decoder in ((model.model.encoder, False), (model.model.decoder, True)):
        if not len(stack.layers):
            return "a stack has no layers"
        first = stack.layers[0].self_attn
        dims = (first.head_dim, first.value_head_dim)
        heads = first.q_proj.weight.shape[0] // dims[0]
        for layer in stack.layers:
            if type(layer) is not LAYERS[is_decoder]:
                return f"{type(layer).__name__} is not one of the model's own layers"
            # By `_modules` and `_parameters`, as attributes of modules take ten times as long.
            parts, rows = layer._modules, heads * dims[0]
            attentions = (parts["self_attn"], parts["encoder_attn"]) if is_decoder else (parts["self_attn"],)
            for attention, is_causal in zip(attentions, (is_decoder, False), strict=False):
                own = vars(attention)
                if (own["head_dim"], own["value_head_dim"], own["is_causal"]) != (*dims, is_causal):
                    return "an attention is not as the others of its stack"
                query, key, value, out = (attention._modules[name]._parameters["weight"].shape for name in PROJECTIONS)
                if (query[0], key[0], value[0], out[1]) != (rows, rows, heads * dims[1], heads * dims[1]):
                    return "an attention has another number of heads"
            norms = {type(parts[name]) for name in parts if name.endswith("norm")}
            if norms != {
                modeling.PreNormResidual if model.config.norm_position == "pre" else modeling.PostNormResidual
            }:
                return "a layer's norms stand elsewhere than the configuration says"
    return None


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters of modules, each once."""
    found = (value for module in modules for value in module._parameters.values() if value is not None)
    return list({id(one): one for one in found}.values())


def _parameter_reason(modules: Iterable[nn.Module]) -> str | None:
    first, *others = parameters_of(modules)
    if first.device.type == "meta" or not first.dtype.is_floating_point:
        return f"its parameters are {first.dtype} on {first.device}"
    for one in (first, *others):
        if type(one) is not nn.Parameter or one.layout is not torch.strided:
            return f"its parameters are of type {type(one).__name__}, {one.layout}"
        if one.dtype is not first.dtype or one.device != first.device:
            return "its parameters have several devices or types"
    return None
