"""Stock models for the browser: `stock`'s folder with the ONNX graphs and the tokenizer that transformers.js opens.

There, one graph decodes: a decoder with a past, which begins with an `If` between the first past and the given one.
"""

import copy
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import Sequential, common
from onnxruntime.quantization import quantize_dynamic
from onnxscript.optimizer import fold_constants
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from ..data.symbols import train_tokenizer
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..tokenization_vanilla_transformer import WORD_OR_PUNCTUATION
from . import stock
from .interface import ConversionError
from .onnx import (
    DECODER_WITH_PAST,
    ENCODER,
    FIRST_PAST,
    Progress,
    difference,
    opener,
    quiet,
    run_graph,
    write_graphs,
)

FOLDER, MERGED, FLAG = "onnx", "decoder_model_merged", "use_cache_branch"
QUANTIZED = "_quantized"  # the end of the names of graphs in 8 bits
LARGEST = 1_500_000_000  # bytes of weights; torch.onnx writes more into files of their own
# Where a piece of bpe begins, as empty matches: before the white space of WORD_START, and before CONTROL_TOKEN_END.
BEFORE_WORD = r"(?<![\s\p{P}])(?=\s+(?![\s\p{P}]))"
BEFORE_CONTROL_TOKEN_END = r"(?<=<pad|<s|</s)(?=>)"
# A branch has no weights of its own, and none of its names is also one of the graph around it.
SHARE = Sequential(
    common.LiftSubgraphInitializersToMainGraphPass(), common.DeduplicateInitializersPass(LARGEST), common.NameFixPass()
)
# transformers.js has no Pegasus; a Blenderbot is one whose positions are in the file.
CLASSES = {key: stock.BLENDERBOT if kind is stock.PEGASUS else kind for key, kind in stock.CLASSES.items()}


def write_transformers_js(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    progress: Progress = lambda step: None,
) -> list[str]:
    """Writes a model as `write_stock` does, and its graphs in float32 and in 8 bits: a writer of `export`.

    Raises:
        ConversionError: As `write_stock` and `write_onnx`; or transformers.js has no such class or other ids.
    """
    if CLASSES.get((model.config.norm_position, model.config.position_encoding)) is stock.FSMT:
        raise ConversionError("transformers.js has no FSMT, which this model would be; leave out --onnx")
    if 4 * model.num_parameters() >= LARGEST:
        raise ConversionError(f"in float32 its weights have more than {LARGEST:,} bytes; leave out --onnx")
    progress("weights")
    notes = stock.write_stock(model, _for_javascript(tokenizer), folder, CLASSES)
    (folder / FOLDER).mkdir()
    exact, rough = _write(model, folder / FOLDER, progress)
    return [
        *notes,
        f"transformers.js opens the graphs in {FOLDER}/: logits of random tokens differ from the model's by at most "
        f"{exact:.0e} of the largest in float32, and by {rough:.0e} in 8 bits",
        'in JavaScript, `await pipeline("translation", NAME)` searches greedily, whatever `num_beams` is, for up to '
        "256 tokens, or `max_new_tokens`. Give it one sentence per call: in a batch, it continues behind the end of a "
        'sentence. "</s>" in a text is the token',
    ]


# ---- Graphs ----
def _write(model: VanillaTransformerForConditionalGeneration, folder: Path, progress: Progress) -> tuple[float, float]:
    """Writes the graphs; returns how far logits differ from the model's in float32 and in 8 bits."""
    with tempfile.TemporaryDirectory() as parts, quiet():
        write_graphs(model, Path(parts), (ENCODER, FIRST_PAST, DECODER_WITH_PAST), progress)
        shutil.move(Path(parts) / f"{ENCODER}.onnx", folder)
        decoder = _merged(*(ir.load(Path(parts) / f"{name}.onnx") for name in (FIRST_PAST, DECODER_WITH_PAST)))
        ir.save(decoder, folder / f"{MERGED}.onnx")
        progress("8 bits")
        # Otherwise the output matrix, the embeddings transposed, stays in float32 and is computed again for each token.
        fold_constants(decoder, input_size_limit=LARGEST, output_size_limit=LARGEST)
        ir.save(SHARE(decoder).model, Path(parts) / f"{MERGED}.onnx")
        for name, place in ((ENCODER, folder), (MERGED, Path(parts))):
            files = place / f"{name}.onnx", folder / f"{name}{QUANTIZED}.onnx"
            quantize_dynamic(*files, extra_options={"EnableSubgraph": True})
    progress("comparison")
    exact = difference(model, partial(_run, opener(folder)))
    return exact, difference(model, partial(_run, opener(folder, QUANTIZED)), float("inf"))


def _run(opened: Callable[[str], Any], name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Computes what one of `write_onnx`'s graphs does."""
    if name == ENCODER:
        return run_graph(opened(ENCODER), inputs)
    flag, sizes, unread = np.array([name == DECODER_WITH_PAST]), {"batch": len(inputs["input_ids"])}, {}
    for one in opened(MERGED).get_inputs():
        # Optimum gives a past of one position in place of none.
        shape = [size if isinstance(size, int) else sizes.get(size, 1) for size in one.shape]
        unread[one.name] = np.zeros(shape, np.float32)
    return run_graph(opened(MERGED), unread | inputs | {FLAG: flag})


def _merged(first_past: ir.Model, decoder_with_past: ir.Model) -> ir.Model:
    """Makes one graph of two: the second with the past that it is given, or the first one's.

    It has the inputs of both, and passes on the keys and values of the source.
    """
    first, graph = first_past.graph, decoder_with_past.graph
    (inner,) = first.inputs
    memory = _like(inner, inner.name)
    inner.replace_all_uses_with(memory)
    first.inputs.clear()
    flag = ir.Value(name=FLAG, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    given = [value for value in graph.inputs if str(value.name).startswith("past_key_values")]
    past = [_like(value, f"{value.name}.read") for value in given]
    for value, chosen in zip(given, past, strict=True):
        value.replace_all_uses_with(chosen)
    same = [_same(value, f"{value.name}.given") for value in given]
    branches = {
        "then_branch": ir.Graph([], [one.outputs[0] for one in same], nodes=same, name="given"),
        "else_branch": first,
    }
    graph.insert_before(graph[0], ir.node("If", [flag], branches, outputs=past))
    made = {value.name: value for value in graph.outputs}
    names = {str(value.name).replace("past_key_values", "present"): value for value in given}
    passed_on = [_same(chosen, name) for name, chosen in zip(names, past, strict=True) if name not in made]
    graph.extend(passed_on)
    graph.outputs.extend(one.outputs[0] for one in passed_on)
    graph.inputs.extend([memory, flag])
    return SHARE(ir.Model(graph, ir_version=decoder_with_past.ir_version)).model


def _like(value: ir.Value, name: str | None) -> ir.Value:
    return ir.Value(name=name, type=value.type, shape=value.shape)


def _same(value: ir.Value, name: str) -> ir.Node:
    return ir.node("Identity", [value], outputs=[_like(value, name)])


# ---- Tokenizer ----
def _for_javascript(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Returns a tokenizer that has the same ids in JavaScript; raises `ConversionError` if there is none.

    JavaScript's Metaspace "first" writes a space before each word, its FixedLength divides characters, and its Split
    doesn't merge. A normalizer writes a text's first space, and empty matches divide before a word.
    """
    new = copy.deepcopy(tokenizer)
    backend, special = getattr(new, "backend_tokenizer", None), {*tokenizer.special_tokens_map.values()}
    if backend is not None and {one.content for one in backend.get_added_tokens_decoder().values()} <= special:
        if _parts(backend) in [_parts(_example_of(kind)) for kind in ("words", "characters")]:
            return new
        for merge_punctuation, words in ((True, BEFORE_WORD), (False, WORD_OR_PUNCTUATION)):
            if _parts(backend) == _parts(_example_of("bytes", merge_punctuation=merge_punctuation)):
                backend.normalizer = normalizers.Prepend(" ")
                divided = [pre_tokenizers.Split(Regex(one), "isolated") for one in (words, BEFORE_CONTROL_TOKEN_END)]
                bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
                backend.pre_tokenizer = pre_tokenizers.Sequence([*divided, bytes_])
                return new
    raise ConversionError(
        f"transformers.js would have other ids than its tokenizer, {type(tokenizer).__name__}: it has to be of bpe, "
        "words, characters or bytes, without added tokens; leave out --onnx"
    )


def _example_of(kind: str, **options: Any) -> Tokenizer:
    """A tokenizer as `train` makes it."""
    return train_tokenizer([{"source": "a", "target": "a"}], [kind], **options).backend_tokenizer


def _parts(backend: Tokenizer) -> list[Any]:
    """All but the vocabulary."""
    parts = json.loads(backend.to_str())
    return [parts[name] for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
