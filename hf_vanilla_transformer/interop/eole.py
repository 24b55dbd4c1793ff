"""Eole, OpenNMT-py's heir: a folder with config.json, vocab.json and safetensors of a pre-norm encoder-decoder.

Its source has no end-of-sentence token; its target begins with the start token of vocab.json.
"""

from pathlib import Path

from ..checkpoints.headers import read_json
from ..checkpoints.kinds import CONFIG, VOCABULARY
from .interface import ConversionError, ConversionOptions, Converted, Settings, check_alike, check_options
from .layout import OUTPUT, POSITIONS, SOURCE, STACKS, TARGET, Layout, from_tensors, layer_names
from .opennmt import ATTENTION, DECODING, POSITION_ENCODINGS, tokenizer_for, tokens_of
from .pickles import fields_of, read
from .segmentation import converted

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
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu-tanh": "gelu_pytorch_tanh", "silu": "silu"}
ENCODINGS = {**POSITION_ENCODINGS, "Learned": "learned"}
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
    "mlp_activation_fn": tuple(ACTIVATIONS),
    "position_encoding_type": tuple(ENCODINGS),
}
# Options that have to be off.
UNWANTED = (
    *("parallel_residual", "shared_layer_norm", "ffn_layernorm", "num_experts", "query_norm", "key_norm", "value_norm"),
    *("attn_scaling", "head_dim", "relative_positions_buckets", "sliding_window", "rope_config", "position_shift"),
)


def recognises(source: Path) -> bool:
    """Tells by its files whether a folder is Eole's."""
    files = [source / name for name in (CONFIG, VOCABULARY)]
    return all(file.is_file() for file in files) and "embeddings" in (read_json(files[0]).get("model") or ())


def load(source: str | Path, options: ConversionOptions) -> Converted:
    """Reads a model."""
    folder = Path(source)
    try:
        config, vocabulary = read_json(folder / CONFIG), read_json(folder / VOCABULARY)
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
    made = from_tensors(tensors, layout)
    settings = {name: config.get(name) for name in ("transforms", "data")}
    for one in (config.get("transforms_configs") or {}).values():
        settings |= {name: value for name, value in fields_of(one).items() if value}
    return converted(made, options, lambda: tokenizer_for(folder, tokens, settings), DECODING)


def _names(model: Settings) -> dict[str, str | float]:
    names = dict(NAMES)
    table = "weight" if _encoding(model) == "learned" else "pe"
    names |= {place: f"{side}_emb.pe.{table}" for place, side in zip(POSITIONS, ("src", "tgt"), strict=True)}
    if model.get("share_embeddings"):
        names[TARGET] = names[SOURCE]
    if model.get("share_decoder_embeddings"):
        names |= {OUTPUT: names[TARGET], "lm_head.bias": "generator.bias"}
        del names[OUTPUT.removesuffix(".weight")]
    return names


def _encoding(model: Settings) -> str:
    return ENCODINGS[(model.get("embeddings") or {}).get("position_encoding_type", "SinusoidalInterleaved")]


def _fields(model: Settings) -> dict[str, object]:
    usual = {"heads": 8, "mlp_activation_fn": "relu", "norm_eps": 1e-5}
    stacks = [{**usual, **model, **(model.get(stack) or {})} for stack in STACKS]
    check_alike(stacks[0], stacks[1], ["mlp_activation_fn", "norm_eps"])
    encoding = _encoding(model)
    return {
        **{f"{stack}_attention_heads": one["heads"] for stack, one in zip(STACKS, stacks, strict=True)},
        "norm_position": "pre",
        "final_layer_norm": True,
        "layer_norm_eps": stacks[0]["norm_eps"],
        "position_encoding": encoding,
        "scale_embedding": encoding != "learned",
        "activation_function": ACTIVATIONS[stacks[0]["mlp_activation_fn"]],
        "output_bias": model.get("generator_bias", True),
    }
