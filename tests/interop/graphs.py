"""ONNX graphs as another program runs them, and models of the kinds that transformers.js opens."""

import contextlib
import io
import itertools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import torch
from transformers import PreTrainedTokenizerBase
from unlike import PRE, small_model

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration, cli
from hf_vanilla_transformer.data.symbols import train_tokenizer
from scripts.quickstart.corpus import generate_pairs

PAIRS = [{"source": source, "target": target} for source, target in generate_pairs(1000)]
# Fields of a configuration, the class, and the kind of tokenizer.
KINDS = {
    "bpe": ({}, "MarianMTModel"),
    "words": ({**PRE, "output_bias": True}, "BlenderbotForConditionalGeneration"),
    "characters": ({**PRE, "position_encoding": "fairseq", "attention_bias": True}, "M2M100ForConditionalGeneration"),
}


class Graphs:
    """The two graphs of a folder."""

    def __init__(self, folder, end=""):
        names = ("encoder_model", "decoder_model_merged")
        self.encoder, self.decoder = (onnxruntime.InferenceSession(folder / f"{one}{end}.onnx") for one in names)

    def encode(self, ids, mask):
        return self.encoder.run(None, {"input_ids": np.asarray(ids), "attention_mask": np.asarray(mask)})[0]

    def decode(self, memory, mask, target, past=None):
        """Logits and the next past; without one, the decoder is given a past of no positions."""
        inputs = {"encoder_hidden_states": memory, "encoder_attention_mask": mask, "input_ids": target}
        for one in self.decoder.get_inputs():
            if one.name.startswith("past"):
                empty = np.zeros((len(target), one.shape[1], 0, one.shape[3]), "f4")
                inputs[one.name] = past[one.name] if past else empty
        inputs["use_cache_branch"] = [past is not None]
        names = [one.name for one in self.decoder.get_outputs()]
        inputs = {name: np.asarray(one) for name, one in inputs.items()}
        found = dict(zip(names, self.decoder.run(names, inputs), strict=True))
        return found.pop("logits"), {name.replace("present", "past_key_values"): one for name, one in found.items()}

    def logits(self, ids, mask, target, first, step):
        """The decoder's `first` positions, and then `step` at a time; a past makes the encoder's output unread."""
        memory, found, past = self.encode(ids, mask), [], None
        for begin, end in itertools.pairwise([0, *range(first, target.shape[1], step), target.shape[1]]):
            logits, past = self.decode(memory * (not past), mask, target[:, begin:end], past)
            found.append(torch.from_numpy(logits))
        return torch.cat(found, dim=1)

    def greedy(self, ids, start, limit):
        mask, found, past = np.ones((1, len(ids)), np.int64), [start], None
        memory = self.encode([ids], mask)
        while len(found) <= limit and found[-1] != 2:
            logits, past = self.decode(memory, mask, np.array([found[-1:]]), past)
            found.append(int(logits[0, -1].argmax()))
        return found


class Exported(NamedTuple):
    """A model that has learned a little, so that outputs depend on all that it reads, and what commands made of it."""

    model: VanillaTransformerForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase
    place: Path  # with model, onnx (--to onnx) and out (--to stock --onnx)
    said: str  # by --to onnx

    @property
    def folder(self):
        return self.place / "out"


def export(kind: str, place: Path, steps: int = 60) -> Exported:
    """Trains a model and exports it by both commands; the graphs are the same and traced once, as that takes long."""
    from hf_vanilla_transformer.interop import onnx, transformers_js

    fields, name = KINDS[kind]
    torch.manual_seed(0)
    tokenizer = train_tokenizer(PAIRS, [kind], vocab_size=600)
    model = small_model(len(tokenizer), **fields).train()
    model.generation_config.max_new_tokens = 20
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        some = PAIRS[step * 16 % 960 :][:16]
        options = {"padding": True, "truncation": True, "max_length": 60, "return_tensors": "pt"}
        batch = tokenizer([one["source"] for one in some], **options)
        labels = tokenizer(text_target=[one["target"] for one in some], **options)["input_ids"]
        model(**batch, labels=labels.masked_fill(labels == 0, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for one in (model.eval(), tokenizer):
        one.save_pretrained(place / "model")
    command, traced = ["export", "--model", str(place / "model"), "--output"], []
    write = onnx.write_graphs

    def write_once(model, folder, progress):
        """What is written a second time is a copy."""
        if traced:
            assert all(torch.equal(one, other) for one, other in zip(model.parameters(), traced, strict=True))
            for file in (place / "onnx").glob("*.onnx"):
                (folder / file.name).write_bytes(file.read_bytes())
        else:
            write(model, folder, progress)
            traced.extend(model.parameters())

    onnx.write_graphs = transformers_js.write_graphs = write_once
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert cli.main([*command, str(place / "onnx"), "--to", "onnx"]) == 0
        assert cli.main([*command, str(place / "out"), "--to", "stock", "--onnx"]) == 0
    finally:
        onnx.write_graphs = transformers_js.write_graphs = write
    assert json.loads((place / "out" / "config.json").read_text())["architectures"] == [name]
    return Exported(model, tokenizer, place, said.getvalue())


def types_in(graph):
    """The types of all values of a graph, those of its branches, constants and casts too."""
    values = [*graph.input, *graph.output, *graph.value_info]
    found = {one.type.tensor_type.elem_type for one in values} | {one.data_type for one in graph.initializer}
    for attribute in (one for node in graph.node for one in node.attribute):
        found |= {attribute.i} if attribute.name in ("to", "dtype") else set()
        found |= {attribute.t.data_type} if attribute.HasField("t") else set()
        found |= types_in(attribute.g) if attribute.HasField("g") else set()
    return found
