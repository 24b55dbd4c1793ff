"""Describes a folder of any kind: a model of transformers, or one in CTranslate2's or ONNX's format."""

from pathlib import Path

from ..checkpoints.kinds import Kind, kind_of
from ..hub.description import Description, TokenizerFacts, parameters_by_part
from ..hub.description import describe as describe_checkpoint
from .ctranslate2_files import EMBEDDINGS, Folder, unpacked

# CTranslate2's types -> as safetensors names them.
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "int16": "I16", "int32": "I32"}


def describe(name: str) -> Description:
    """Describes a folder, an Argos package or a model on the Hub; errors are those of `hub.description.describe`."""
    if kind_of(name) is not Kind.CTRANSLATE2:
        return describe_checkpoint(name)
    with unpacked(Path(name)) as path:
        return _of_ctranslate2(name, Folder.read(path))


def _of_ctranslate2(name: str, folder: Folder) -> Description:
    saved = [(key, one) for key, one in folder.variables.items() if one.shape and "position_" not in key]
    # Embeddings that are tied count once; vectors may be equal, and in the file only once, without being one.
    once = {one.offset if len(one.shape) > 1 else key: (key, one) for key, one in saved if not key.endswith("_scale")}
    tensors = {
        key.replace("decoder/projection", "projection").replace("/", "."): (NAMES[one.dtype], one.shape)
        for key, one in once.values()
    }
    source, target = folder.vocabularies
    sizes = {"vocab_size": len(source), "decoder_vocab_size": None if source == target else len(target)}
    special = {one: f"{token} ({target.index(token)})" for one, token in folder.settings.items() if token in target}
    files = dict.fromkeys(file.name for file in folder.tokenizer_files())
    return Description(
        name=name,
        kind=str(Kind.CTRANSLATE2),
        config={**_architecture(folder), **sizes},
        parameters=parameters_by_part(tensors),
        types=sorted({kind for kind, _ in tensors.values()}),
        saved_bytes=folder.weights.stat().st_size,
        tokenizer=TokenizerFacts(", ".join(files), len(target), special),
        decoding={key: value for key, value in folder.decoding.items() if value is not None},
    )


def _architecture(folder: Folder) -> dict[str, object]:
    """Returns an architecture by the names of a configuration's fields."""
    found: dict[str, object] = {"d_model": folder.variables[EMBEDDINGS[1]].shape[-1]}
    for stack in ("encoder", "decoder"):
        layers = {
            key.split("/")[1] for key in folder.variables if key.startswith(f"{stack}/layer_") and key.count("/") > 2
        }
        found[f"{stack}_layers"] = len(layers)
        found[f"{stack}_attention_heads"] = int(folder.value(f"{stack}/num_heads", 8))
        if (inner := folder.variables.get(f"{stack}/layer_0/ffn/linear_0/weight")) is not None:
            found[f"{stack}_ffn_dim"] = inner.shape[0]
    found["norm_position"] = "pre" if folder.value("encoder/pre_norm", 1) else "post"
    return found
