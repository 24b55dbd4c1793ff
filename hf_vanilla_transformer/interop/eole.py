"""Eole, OpenNMT-py's heir: a folder with config.json, vocab.json and safetensors of a pre-norm encoder-decoder.

Its source has no end-of-sentence token; its target begins with the start token of vocab.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.headers import read_json
from ..checkpoints.kinds import CONFIG
from .interface import ConversionError, ConversionOptions, Converted, check_options
from .layout import OUTPUT, POSITIONS, SOURCE, STACKS, TARGET, Layout, from_tensors, layer_names
from .opennmt import ATTENTION, DECODING, POSITION_ENCODINGS, refuse_transforms, tokenizer_for, tokens_of
from .opennmt import TRANSFORMS as OPENNMT_TRANSFORMS
from .pickles import read
from .segmentation import TOKENIZED_TEXT

LAYERS = {stack: f"{stack}.transformer_layers.*" for stack in STACKS}
NAMES: dict[str, str | float] = {
    SOURCE: "src_emb.embeddings.weight",
    TARGET: "tgt_emb.embeddings.weight",
    OUTPUT.removesuffix(".weight"): "generator",
    **{f"{stack}.layer_norm": f"{stack}.layer_norm" for stack in STACKS},
    **layer_names(
        LAYERS,
        {
            **ATTENTION,
            "feed_forward": "mlp",
            "fc1": "gate_up_proj",
            "fc2": "down_proj",
            "self_attn_layer_norm": "input_layernorm",
            "encoder_attn_layer_norm": "precontext_layernorm",
            "final_layer_norm": "post_attention_layernorm",
        },
    ),
}
IGNORED = ("*.layer_scalar",)  # ones, and unused beside attention to a source
# Options of the model or of its stacks that have to have one of these values, if at all.
WANTED: dict[str, tuple[object, ...]] = {
    "architecture": ("transformer",),
    "layer_norm": ("standard",),
    "encoder_type": ("transformer",),
    "decoder_type": ("transformer",),
    "encoder_layer_style": ("prenorm", "pre", None),
    "final_encoder_layer_norm": (True,),
    "normalize": (False,),
    "heads_kv": (None, 0),
}
# Options that have to be off.
UNWANTED = (
    *("parallel_residual", "shared_layer_norm", "ffn_layernorm", "num_experts", "query_norm", "key_norm"),
    *("head_dim", "relative_positions_buckets", "sliding_window", "rope_config", "position_shift"),
)
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu-tanh": "gelu_pytorch_tanh", "silu": "silu"}
ENCODINGS = {**POSITION_ENCODINGS, "Learned": "learned"}
TRANSFORMS = (*OPENNMT_TRANSFORMS, "suffix", "prefix")


def recognises(source: Path) -> bool:
    """Tells by its files whether a folder is Eole's."""
    files = [source / name for name in (CONFIG, "vocab.json")]
    return all(file.is_file() for file in files) and "embeddings" in (read_json(files[0]).get("model") or ())


def load(source: str | Path, options: ConversionOptions) -> Converted:
    """Reads a model."""
    folder = Path(source)
    try:
        config, vocabulary = read_json(folder / CONFIG), read_json(folder / "vocab.json")
    except ValueError as error:
        raise ConversionError(str(error)) from error
    model = config.get("model") or {}
    for part in (model, *(model.get(stack) or {} for stack in STACKS), model.get("embeddings") or {}):
        check_options(part, WANTED, UNWANTED)
    files = sorted(folder.glob("model.*.safetensors"))
    if not files:
        raise ConversionError(f"{folder} has no model.00.safetensors; give the folder that `eole train` wrote")
    tensors = {name: value for file in files for name, value in read(file).items()}
    tokens, fields = tokens_of(vocabulary)
    layout = Layout(_names(model), {**_fields(model), **fields}, ignored=IGNORED, required=("*layer_norm.bias",))
    loaded = from_tensors(tensors, layout)
    if not options.with_tokenizer:
        return Converted(loaded, notes=(DECODING,))
    return Converted(loaded, tokenizer_for(folder, tokens, _subword_models(config)), notes=(DECODING, TOKENIZED_TEXT))


def _names(model: Mapping[str, Any]) -> dict[str, str | float]:
    """The table of names, by which matrices are one."""
    names = dict(NAMES)
    table = "weight" if _encoding(model) == "learned" else "pe"
    names |= {place: f"{side}_emb.pe.{table}" for place, side in zip(POSITIONS, ("src", "tgt"), strict=True)}
    if model.get("share_embeddings"):
        names[TARGET] = names[SOURCE]
    if model.get("share_decoder_embeddings"):
        names |= {OUTPUT: names[TARGET], "lm_head.bias": "generator.bias"}
        del names[OUTPUT.removesuffix(".weight")]
    return names


def _encoding(model: Mapping[str, Any]) -> str:
    kind = (model.get("embeddings") or {}).get("position_encoding_type", "SinusoidalInterleaved")
    if kind not in ENCODINGS:
        raise ConversionError(
            f"the model can't be converted: its position_encoding_type is {kind!r}, not one of {', '.join(ENCODINGS)}"
        )
    return ENCODINGS[kind]


def _fields(model: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the configuration that the options tell and the tensors don't."""
    stacks = [{**model, **(model.get(stack) or {})} for stack in STACKS]
    activations = {one.get("mlp_activation_fn", "relu") for one in stacks}
    if len(activations) > 1 or not activations <= set(ACTIVATIONS):
        raise ConversionError(
            f"the model can't be converted: its mlp_activation_fn is {', '.join(sorted(map(str, activations)))}, not "
            f"one of {', '.join(ACTIVATIONS)}"
        )
    encoding = _encoding(model)
    return {
        **{f"{stack}_attention_heads": one.get("heads", 8) for stack, one in zip(STACKS, stacks, strict=True)},
        "norm_position": "pre",
        "final_layer_norm": True,
        "layer_norm_eps": model.get("norm_eps", 1e-5),
        "position_encoding": encoding,
        "scale_embedding": encoding != "learned",
        "activation_function": ACTIVATIONS[activations.pop()],
        "output_bias": model.get("generator_bias", True),
    }


def _subword_models(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The files that segment source and target, as far as config.json names them."""
    refuse_transforms(name for name in config.get("transforms") or [] if name not in TRANSFORMS)
    settings: dict[str, Any] = {}
    for one in (config.get("transforms_configs") or {}).values():
        settings |= one if isinstance(one, dict) else {}
    source, target = (settings.get(f"{side}_subword_model") for side in ("src", "tgt"))
    return source, target or source
