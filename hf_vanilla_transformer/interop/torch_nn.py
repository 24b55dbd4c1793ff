"""Exports models as a state dict of torch.nn.Transformer, by the names of its mapping."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, sinusoidal_table
from .interface import ConversionError, check_plain
from .layout import OUTPUT, POSITIONS, SOURCE, TARGET, Layout, rules_of, to_tensors
from .state_dict import read_names

# Parameters outside of torch.nn.Transformer -> their names in the export.
OWN_NAMES = {
    SOURCE: "src_embed.weight",
    TARGET: "tgt_embed.weight",
    OUTPUT: "generator.weight",
    "lm_head.bias": "generator.bias",
    POSITIONS[0]: "src_positions.weight",
    POSITIONS[1]: "tgt_positions.weight",
}
TORCH = Layout({**read_names("torch"), **OWN_NAMES})
# Biases that torch.nn.Transformer always has.
ATTENTION_BIASES = ("*.in_proj_bias", "*_attn.out_proj.bias")


def write_torch(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> list[str]:
    """Writes a state dict, the arguments of torch.nn.Transformer, and a mapping by which `convert` brings it back.

    It is a writer of `export`.

    Raises:
        ConversionError: torch.nn.Transformer can't express the model.
    """
    config = model.config
    check_plain(model)
    _check(config)
    save_file(_state_dict(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "transformer.json").write_text(json.dumps(_arguments(config), indent=2) + "\n", encoding="utf-8")
    (folder / "mapping.yaml").write_text(yaml.safe_dump(_mapping(config), sort_keys=False), encoding="utf-8")
    tokenizer.save_pretrained(folder)
    return _notes(config)


def _state_dict(model: VanillaTransformerForConditionalGeneration) -> dict[str, Tensor]:
    """Returns the tensors of torch.nn.Transformer, of embeddings, output projection and tables of positions."""
    config = model.config
    tensors = to_tensors(model, TORCH)
    for rule in rules_of(TORCH, {"encoder": config.encoder_layers, "decoder": config.decoder_layers}):
        name, rows = rule.theirs[0], len(rule.ours) * config.d_model
        if "_attn." in name and name.endswith("bias") and name not in tensors:
            tensors[name] = torch.zeros(rows, dtype=model.dtype)
    for name, value in ((TARGET, tensors[OWN_NAMES[SOURCE]]), (OUTPUT, model.lm_head.weight.detach())):
        tensors.setdefault(OWN_NAMES[name], value)
    stacks: list[Any] = [model.model.encoder, model.model.decoder]
    for name, stack in zip(POSITIONS, stacks, strict=True):
        if config.position_encoding != "learned":
            layout = stack.embed_positions.layout
            tensors[OWN_NAMES[name]] = sinusoidal_table(config.max_position_embeddings, *layout)
    return {name: value.clone() for name, value in tensors.items()}  # safetensors wants none shared


def _arguments(config: VanillaTransformerConfig) -> dict[str, Any]:
    """Returns the arguments with which torch.nn.Transformer is the same model."""
    return {
        "d_model": config.d_model,
        "nhead": config.encoder_attention_heads,
        "num_encoder_layers": config.encoder_layers,
        "num_decoder_layers": config.decoder_layers,
        "dim_feedforward": config.encoder_ffn_dim,
        "dropout": config.dropout,
        "activation": config.activation_function,
        "layer_norm_eps": config.layer_norm_eps,
        "batch_first": True,
        "norm_first": config.norm_position == "pre",
    }


def _check(config: VanillaTransformerConfig) -> None:
    """Refuses a model that torch.nn.Transformer can't express."""
    for field in ("attention_heads", "ffn_dim"):
        encoder, decoder = (getattr(config, f"{stack}_{field}") for stack in ("encoder", "decoder"))
        if encoder != decoder:
            raise ConversionError(
                f"torch.nn.Transformer has one number for both stacks, and encoder_{field} is {encoder} and "
                f"decoder_{field} {decoder}"
            )
    usual = config.d_model // config.encoder_attention_heads
    for field in ("head_dim", "value_head_dim"):
        if getattr(config, field) not in (None, usual) or config.d_model % config.encoder_attention_heads:
            raise ConversionError(
                f"torch.nn.Transformer's heads have the width d_model / h = {config.d_model} / "
                f"{config.encoder_attention_heads}, and {field} is {getattr(config, field)}"
            )


def _mapping(config: VanillaTransformerConfig) -> dict[str, Any]:
    """Returns the mapping by which the export comes back."""
    own = {
        one.name for one in dataclasses.fields(VanillaTransformerConfig)
    } & VanillaTransformerConfig.__annotations__.keys()
    names = {ours: theirs for ours, theirs in OWN_NAMES.items() if config.output_bias or ours != "lm_head.bias"}
    mapping: dict[str, object] = {"extends": "torch", "names": names, "first_position": 0}
    if not config.attention_bias:
        mapping["ignored"] = list(ATTENTION_BIASES)
    return {**mapping, "config": {name: getattr(config, name) for name in sorted(own)}}


def _notes(config: VanillaTransformerConfig) -> list[str]:
    activation = ""
    if config.activation_function not in ("relu", "gelu"):  # the names that torch.nn.Transformer knows
        # A function, as copies of its decoder layers take ReLU in place of an activation that is a module.
        function = f"transformers.activations.ACT2FN[{config.activation_function!r}].forward"
        activation = f"arguments['activation'] = {function}; "
    norms = "" if config.final_layer_norm else "transformer.encoder.norm = transformer.decoder.norm = None; "
    return [
        f"load it, in its folder: arguments = json.load(open('transformer.json')); {activation}transformer = "
        f"torch.nn.Transformer(**arguments); {norms}weights = safetensors.torch.load_file('model.safetensors'); "
        "transformer.load_state_dict({n: w for n, w in weights.items() if n.startswith(('encoder.', 'decoder.'))})",
        "back: vanilla-transformer convert DIR/model.safetensors --mapping DIR/mapping.yaml --output NEW; the "
        "tokenizer and the settings of decoding don't come with it",
        f"embeddings are multiplied by {config.embedding_scale!r}, then row n of src_positions or tgt_positions is "
        "added to token n; the decoder needs a causal mask; logits are generator.weight times its output"
        + (", plus generator.bias" if config.output_bias else ""),
    ]
