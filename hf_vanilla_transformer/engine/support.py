"""Which models the engine knows: the paper's, with exactly its modules and shapes."""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel, activations
from transformers.utils import output_capturing

from .. import modeling_vanilla_transformer as modeling
from ..configuration_vanilla_transformer import VanillaTransformerConfig
from . import torch_private

HEAD = modeling.VanillaTransformerForConditionalGeneration
PARTS = (nn.Linear, nn.LayerNorm, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList)
LAYERS = (modeling.VanillaTransformerEncoderLayer, modeling.VanillaTransformerDecoderLayer)
KERNELS = ("sdpa", "eager")  # of eq. 1, `attn_implementation`

# Hooks without effect on decoding, by the file and the name of their code.
HARMLESS_HOOKS = {
    (output_capturing.__file__, "output_capturing_hook"),
    (sys.modules["transformers.modeling_utils"].__file__, "make_inputs_require_grads"),
}

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
MADE_OF: dict[type, Mapping[str, Collection[type]]] = {
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


# ---- What a model is made of ----
def members_of(model: PreTrainedModel) -> Sequence[PreTrainedModel]:
    """Returns the models that decode as one: the members of an ensemble, or the model itself."""
    return list(getattr(model, "members", None) or [model])


def tree(module: nn.Module) -> list[nn.Module]:
    """Returns a module and all below it; `modules()` takes several times as long, as it makes their names too."""
    found = [module]
    for parent in found:  # which grows on the way
        found += [child for child in parent._modules.values() if child is not None]
    return found


def used_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the modules that decoding with a model runs, and no others."""
    return [model, model.model, *tree(model.model.encoder), *tree(model.model.decoder), *tree(model.lm_head)]


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Returns the parameters of modules, each once."""
    found = (value for module in modules for value in module._parameters.values() if value is not None)
    return list({id(one): one for one in found}.values())


# ---- What can't be supported ----
def unsupported_reason(
    model: PreTrainedModel, compute_type: str = "default", *, allow_autocast: bool = False
) -> str | None:
    """Says why the engine can't be attached to a model, or None if it can.

    Args:
        model: A model, or what `ensemble` made of several.
        compute_type: As for `attach`.
        allow_autocast: As for `attach`.
    """
    reasons = (_model_reason(one, allow_autocast) or _type_reason(one, compute_type) for one in members_of(model))
    return next((reason for reason in reasons if reason is not None), None)


def _model_reason(model: PreTrainedModel, allow_autocast: bool) -> str | None:
    kind = type(model)
    if kind is not HEAD and kind.__name__ == HEAD.__name__ and kind.__module__.startswith("transformers_modules."):
        return "its class came with the checkpoint; import hf_vanilla_transformer before loading the model"
    if kind is not HEAD:
        return f"{kind.__name__} is not {HEAD.__name__} itself"
    if getattr(model, "is_quantized", False):
        return "its weights are quantized"
    modules = used_modules(model)
    for module in modules:
        if (reason := _module_reason(module, allow_autocast and module is model)) is not None:
            return reason
        if vars(module).get("config", model.config) is not model.config:
            return f"{type(module).__name__} has a configuration of its own"
    return _configuration_reason(model) or _shape_reason(model) or _parameter_reason(modules)


def _module_reason(module: nn.Module, allow_autocast: bool) -> str | None:
    kind = type(module)
    if kind not in MADE_OF:
        return f"{kind.__name__} is not one of the model's own modules"
    for name, kinds in MADE_OF[kind].items():
        part = type(module._modules.get(name))
        if part not in kinds:
            return f"{part.__name__} is not one of the model's own modules, or not as {name}"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "an Embedding is renormalised as it is read"
    if isinstance(module, nn.LayerNorm) and (module.weight is None or module.bias is None):
        return f"a {kind.__name__} has no weight or bias"
    return shadowed_reason(module, allow_autocast) or hook_reason(module)


def shadowed_reason(module: nn.Module, allow_autocast: bool = False) -> str | None:
    """Says which attribute of a module runs in place of its class's, or None; Accelerate's `forward` may be allowed."""
    attributes = vars(module)
    if NAMES[type(module)].isdisjoint(attributes):  # the usual case, in a microsecond
        return None
    names = NAMES[type(module)] & attributes.keys()
    if allow_autocast and "_original_forward" in attributes:
        names -= {"forward"}
    return f"a {type(module).__name__} has a {min(names)} of its own" if names else None


def hook_reason(module: nn.Module) -> str | None:
    """Says that a module has hooks that could see or change what it computes, or None."""
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        code = getattr(hook, "__code__", None)
        if code is None or (code.co_filename, code.co_name) not in HARMLESS_HOOKS:
            return f"a {type(module).__name__} has hooks"
    return None


def _names(kind: type) -> frozenset[str]:
    """Names that an instance may not have attributes of, as these would run in place of the class's."""
    called = {name for base in kind.__mro__ for name, value in vars(base).items() if callable(value)}
    return frozenset(called - {"__class__", "loss_of_targets"}) | {"weight", "bias", "_hf_hook"}


NAMES = {kind: _names(kind) for kind in MADE_OF}


def _configuration_reason(model: PreTrainedModel) -> str | None:
    config = model.config
    if type(config) is not VanillaTransformerConfig:
        return f"{type(config).__name__} is another configuration"
    kernel = config._attn_implementation or "eager"
    if kernel not in KERNELS:
        return f"the attention is {kernel}"
    return "the configuration has `is_causal`" if getattr(config, "is_causal", None) is not None else None


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def _shape_reason(model: PreTrainedModel) -> str | None:
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


def _parameter_reason(modules: Iterable[nn.Module]) -> str | None:
    first, *others = parameters_of(modules)
    if first.device.type == "meta" or not first.dtype.is_floating_point:
        return f"its parameters are {first.dtype} on {first.device}"
    for one in (first, *others):
        if type(one) is not nn.Parameter or one.layout is not torch.strided or not one.numel():
            return f"its parameters are of type {type(one).__name__}, {one.layout}, {tuple(one.shape)}"
        if one.dtype is not first.dtype or one.device != first.device:
            return "its parameters have several devices or types"
    return None


def _type_reason(model: PreTrainedModel, compute_type: str) -> str | None:
    weight = model.lm_head.weight
    own = str(weight.dtype).removeprefix("torch.")
    if compute_type == "int8" and (weight.device.type, own) != ("cpu", "float32"):
        return f"int8 needs a model in float32 on a CPU, and this one is in {own} on {weight.device.type}"
    if compute_type == "int8" and not torch_private.has_int8():
        return f"int8 needs products of 8 bits, and torch {torch.__version__} lacks them on this machine"
    if compute_type not in ("default", "int8", own):
        return f"its weights are in {own}; load it with dtype={compute_type}, or leave compute_type out"
    return None
