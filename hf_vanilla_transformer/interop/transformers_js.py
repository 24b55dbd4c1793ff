"""Stock models for the browser: `stock`'s folder with the ONNX graphs and the tokenizer that transformers.js opens."""

import copy
import json
import tempfile
from pathlib import Path

import onnx_ir as ir
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxscript.optimizer import fold_constants
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from ..data.symbols import train_tokenizer
from ..modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ..tokenization_vanilla_transformer import WORD_OR_PUNCTUATION
from . import stock
from .interface import ConversionError, check_distance
from .onnx import DECODER, ENCODER, LARGEST, SHARE, Progress, difference, quiet, save, write_graphs

FOLDER = "onnx"
QUANTIZED = "_quantized"  # the end of the names of graphs in 8 bits
# Where a piece of bpe begins, as empty matches: before the white space of WORD_START, and before CONTROL_TOKEN_END.
BEFORE_WORD = r"(?<![\s\p{P}])(?=\s+(?![\s\p{P}]))"
BEFORE_CONTROL_TOKEN_END = r"(?<=<pad|<s|</s)(?=>)"
# transformers.js has no Pegasus; a Blenderbot is one whose positions are in the file.
CLASSES = {key: "blenderbot" if kind == "pegasus" else kind for key, kind in stock.CLASSES.items()}


def write_transformers_js(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    progress: Progress = lambda step: None,
) -> list[str]:
    """Writes a model as `write_stock` does, and its graphs in float32 and in 8 bits: a writer of `export`."""
    if CLASSES.get((model.config.norm_position, model.config.position_encoding)) == "fsmt":
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
    write_graphs(model, folder, progress)
    progress("8 bits")
    with tempfile.TemporaryDirectory() as parts, quiet():
        # Otherwise the output matrix, the embeddings transposed, stays in float32 and is computed again for each token.
        decoder = ir.load(folder / f"{DECODER}.onnx")
        fold_constants(decoder, input_size_limit=LARGEST, output_size_limit=LARGEST)
        save(SHARE(decoder).model, Path(parts) / f"{DECODER}.onnx")
        for name, place in ((ENCODER, folder), (DECODER, Path(parts))):
            files = place / f"{name}.onnx", folder / f"{name}{QUANTIZED}.onnx"
            # Sums of signed weights overflow on processors with AVX2 and without VNNI.
            quantize_dynamic(*files, weight_type=QuantType.QUInt8, extra_options={"EnableSubgraph": True})
    progress("comparison")
    return check_distance(difference(model, folder), "onnx"), difference(model, folder, QUANTIZED)


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


def _example_of(kind: str, merge_punctuation: bool = True) -> Tokenizer:
    texts = [{"source": "a", "target": "a"}]
    return train_tokenizer(texts, [kind], merge_punctuation=merge_punctuation).backend_tokenizer


def _parts(backend: Tokenizer) -> list[object]:
    """All but the vocabulary."""
    parts = json.loads(backend.to_str())
    return [parts[name] for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
