"""Runs fairseq's own model code from a folder with its source: python fairseq_original.py SOURCE CHECKPOINT IN OUT.

fairseq can't be imported on this Python: of its packages only the modules of the model and of its beam search are, and
what these ask for beside them (options by hydra, parallel training) is replaced by nothing.
"""

import dataclasses
import functools
import importlib
import sys
import types
from pathlib import Path

import torch

EMPTY = (
    "omegaconf",
    "hydra",
    "fairseq.dataclass.configs",
    "fairseq.dataclass.utils",
    "fairseq.modules.checkpoint_activations",
)
PACKAGES = ("fairseq", *(f"fairseq.{name}" for name in ("data", "dataclass", "distributed", "models", "modules")))
PACKAGES = (*PACKAGES, "fairseq.models.transformer")
# Package -> module of its -> the names that the package has from there; in this order, as some need those before.
NAMES = {
    "fairseq": {"utils": []},
    "fairseq.data": {"dictionary": ["Dictionary"]},
    "fairseq.models": {
        "fairseq_decoder": ["FairseqDecoder"],
        "fairseq_encoder": ["FairseqEncoder"],
        "fairseq_incremental_decoder": ["FairseqIncrementalDecoder"],
        "fairseq_model": ["FairseqEncoderDecoderModel"],
    },
    "fairseq.modules": {
        "fairseq_dropout": ["FairseqDropout"],
        "gelu": ["gelu", "gelu_accurate"],
        "layer_norm": ["LayerNorm"],
        "layer_drop": ["LayerDropModuleList"],
        "learned_positional_embedding": ["LearnedPositionalEmbedding"],
        "sinusoidal_positional_embedding": ["SinusoidalPositionalEmbedding"],
        "positional_embedding": ["PositionalEmbedding"],
        "multihead_attention": ["MultiheadAttention"],
    },
}


class Anything:
    """What is imported and not used."""

    def __init__(self, *arguments, **options):
        pass


def anything(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything


def open_source(folder):
    """Makes fairseq's modules importable, and returns its model's class, dictionary and beam search."""
    for name in PACKAGES:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(Path(folder, *name.split(".")))]
    for name in EMPTY:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__getattr__ = anything
    sys.modules["omegaconf"].II = lambda name: f"${{{name}}}"
    sys.modules["omegaconf"].OmegaConf = types.SimpleNamespace(is_config=lambda value: False)
    sys.modules["fairseq.dataclass"].ChoiceEnum = lambda names: str
    sys.modules["fairseq.dataclass"].FairseqDataclass = dataclasses.dataclass(type("FairseqDataclass", (), {}))
    sys.modules["fairseq.distributed"].fsdp_wrap = lambda module, **options: module
    models = sys.modules["fairseq.models"]
    models.register_model = models.register_model_architecture = lambda *names: lambda cls: cls
    for package, modules in NAMES.items():
        for name, members in modules.items():
            module = importlib.import_module(f"{package}.{name}")
            for member in members or [name]:
                setattr(sys.modules[package], member, getattr(module, member) if members else module)
    sys.modules["fairseq.modules"].__getattr__ = anything  # adaptive softmax and the like
    package = sys.modules["fairseq.models.transformer"]
    made = dataclasses.dataclass
    # Defaults that could change have been an error since Python 3.11, unless they have a hash.
    dataclasses.dataclass = functools.partial(made, unsafe_hash=True)
    package.TransformerConfig = importlib.import_module(f"{package.__name__}.transformer_config").TransformerConfig
    dataclasses.dataclass = made
    sys.modules["fairseq.modules"].transformer_layer = importlib.import_module("fairseq.modules.transformer_layer")
    for part in ("Encoder", "Decoder"):
        module = importlib.import_module(f"{package.__name__}.transformer_{part.lower()}")
        setattr(package, f"Transformer{part}Base", getattr(module, f"Transformer{part}Base"))
    model = importlib.import_module(f"{package.__name__}.transformer_legacy").TransformerModel
    generator = importlib.import_module("fairseq.sequence_generator").SequenceGenerator
    return model, sys.modules["fairseq.data"].Dictionary, generator


def main(folder, checkpoint, questions, answers):
    """Loads the checkpoint with fairseq's classes, and writes its logits and translations."""
    model_class, dictionary_class, generator_class = open_source(folder)
    saved, asked = torch.load(checkpoint, weights_only=False), torch.load(questions)
    task = types.SimpleNamespace()
    for side, language in (("source", "de"), ("target", "en")):
        file = str(Path(checkpoint).with_name(f"dict.{language}.txt"))
        setattr(task, f"{side}_dictionary", dictionary_class.load(file))
    model = model_class.build_model(saved["args"], task).eval()
    known = model.state_dict()  # its latest version has one buffer less
    state = {name: value for name, value in saved["model"].items() if name in known or "_float_tensor" not in name}
    model.load_state_dict(state, strict=True)
    for layer in model.encoder.layers:
        layer.load_to_BT = False  # 0.12.2 calls a private kernel of PyTorch, whose arguments are others today
    found = {"symbols": [task.source_dictionary.symbols, task.target_dictionary.symbols], "model": model.state_dict()}
    with torch.no_grad():
        for name, (source, target) in asked["batches"].items():
            lengths = (source != 1).sum(1)
            found[name] = model(source, lengths, target)[0]
            for beams in asked["beams"]:
                generator = generator_class([model], task.target_dictionary, beam_size=beams)
                sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
                found[name, beams] = [row[0]["tokens"].tolist() for row in generator(sample)]
    torch.save(found, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
