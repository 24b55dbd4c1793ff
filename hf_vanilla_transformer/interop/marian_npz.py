"""Marian's own files, model.npz: what `marian-train` writes, published or trained by yourself.

Marian has no start token: its decoder begins with a vector of zeros. Here, that is the embedding of an added token,
<pad>, whose bias keeps it from being chosen.
"""

import itertools
import json
import re
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..errors import first_line
from ..tokenization_dictionary import SIDES, DictionaryTokenizer
from .interface import ConversionError, ConversionOptions, Converted, Settings, check_options
from .layout import OUTPUT, SOURCE, STACKS, TARGET, Layout, from_tensors
from .pickles import parse_yaml
from .segmentation import converted, tokenizer_of

OPTIONS_INSIDE = "special:model.yml"
PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"
NEVER = -10_000.0  # an output's bias: its probability is 0 in every type
BETA = 0.0  # transformers' length penalty: marian-decoder's `normalize` is 0 unless it is given
# Options whose other values make another model; older files lack some, which then have the first.
WANTED: dict[str, tuple[object, ...]] = {
    "type": ("transformer",),
    "transformer-decoder-autoreg": ("self-attention",),
    "transformer-ffn-depth": (2,),
    "transformer-decoder-ffn-depth": (0, 2),
    "transformer-attention-mask": ("default",),
    "transformer-postprocess-emb": ("d", ""),
    "transformer-ffn-activation": ("swish", "relu"),
    "right-left": (False,),
}
# Options that have to be off.
UNWANTED = (
    *("transformer-no-projection", "transformer-no-bias", "transformer-no-affine", "transformer-pool", "ulr"),
    *("transformer-disable-position-embeddings", "transformer-tied-layers", "input-types", "lemma-dim-emb"),
)
KINDS = {"weight": ("W", "scale"), "bias": ("b", "bias")}  # what they are called in maps and in norms
ATTENTIONS = (("self_attn", "self"), ("encoder_attn", "context"))
# Orders of preprocess, postprocess and postprocess-top -> the position of the norms, and whether there are final ones.
NORMS = {("", "dan", ""): ("post", False), ("n", "da", "n"): ("pre", True)}
# What a vocabulary in YAML 1.1 may not have, or has as an end of a line: there, PyYAML's writer indents the next one.
NOT_IN_YAML = re.compile(
    r"[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]|[\x85\u2028\u2029] *"
)
PRIVATE = range(0xF0000, 0x10FFFE)  # Unicode's characters without a meaning
# Matrices with a row for each token, those of the target behind the source's.
MATRICES = ("encoder_Wemb", "Wemb", "decoder_ff_logit_out_Wt", "decoder_ff_logit_out_W", "decoder_Wemb")
OUTPUT_BIAS = "decoder_ff_logit_out_b"
SPECIAL_TOKENS = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
NOTES = (
    "Marian has no start token: <pad>, an added token with a vector of zeros, begins translations",
    "beams and length penalty are marian-decoder's defaults (12 beams, no normalization); decoder.yml isn't read",
)


def recognises(source: Path) -> bool:
    """Tells by its name that a file is one of Marian's."""
    return source.is_file() and source.suffix == ".npz"


def load(source: str | Path, options: ConversionOptions) -> Converted:
    """Reads a model, and its vocabularies if they are given."""
    file = Path(source)
    arrays = _arrays(file)
    settings = _settings(arrays, file)
    tensors = {name: _tensor(name, value) for name, value in arrays.items() if not name.startswith("special:")}
    if "Wpos" in tensors:
        raise ConversionError(f"{file} has trained positions (Wpos), which aren't supported")
    matrices = [name for name in MATRICES if name in tensors]
    pad = add_pad(tensors, matrices, OUTPUT_BIAS)
    model = from_tensors(tensors, _layout(settings, tensors, pad))
    model.generation_config.update(num_beams=12, length_penalty=BETA, early_stopping=True, gnmt_length_penalty=None)
    if options.with_tokenizer and not options.vocab:
        raise ConversionError(
            f"{file} has no vocabulary in it; give --vocab FILE (.spm, .yml or .json; two, where source and target "
            "have their own), or convert without a tokenizer: --no-tokenizer"
        )
    return converted(model, options, lambda: _tokenizer([Path(name) for name in options.vocab], pad), *NOTES)


# ---- The file ----
def _arrays(file: Path) -> dict[str, NDArray[np.generic]]:
    try:
        with np.load(file, allow_pickle=False) as opened:
            return {name: opened[name] for name in opened.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConversionError(f"{file} can't be read as .npz ({first_line(error)})") from error


def _settings(arrays: Mapping[str, NDArray[np.generic]], file: Path) -> Settings:
    if OPTIONS_INSIDE not in arrays:
        raise ConversionError(f"{file} isn't Marian's: it has no {OPTIONS_INSIDE}; 8-bit .bin files can't be opened")
    settings = parse_yaml(arrays[OPTIONS_INSIDE].tobytes().rstrip(b"\0"), f"{file}: {OPTIONS_INSIDE}")
    if not isinstance(settings, dict):
        raise ConversionError(f"{file}: {OPTIONS_INSIDE} has no options")
    check_options(settings, WANTED, UNWANTED)
    return settings


def _tensor(name: str, value: NDArray[np.generic]) -> Tensor:
    """A tensor in PyTorch's orientation: Marian's matrices are (in, out), but for those of tokens."""
    tensor = torch.from_numpy(np.array(value))
    if len(tensor) == 1 and not name.endswith(("Wemb", "_Wt")):
        return tensor[0]
    return tensor if name.endswith(("Wemb", "_Wt")) else tensor.T.contiguous()


def add_pad(tensors: dict[str, Tensor], matrices: Sequence[str], bias: str) -> int:
    """Adds the token that begins translations to all vocabularies, with zeros; returns its id.

    The last of the matrices is the target's, with a row for each number of the output's bias.
    """
    pad = max(len(tensors[name]) for name in matrices)
    own = tensors[bias] if bias in tensors else torch.zeros(len(tensors[matrices[-1]]))
    tensors[bias] = F.pad(own, (0, pad + 1 - len(own)), value=NEVER)
    for name in matrices:
        tensors[name] = F.pad(tensors[name], (0, 0, 0, pad + 1 - len(tensors[name])))
    return pad


def with_pad(tokens: Sequence[str], pad: int) -> list[str]:
    """Returns a vocabulary with that token."""
    return [*tokens, *(f"<unused {n}>" for n in range(len(tokens), pad)), PAD]


# ---- The model ----
def _layout(settings: Settings, tensors: Mapping[str, Tensor], pad: int) -> Layout:
    order = tuple(
        str(settings.get(f"transformer-{name}", "")) for name in ("preprocess", "postprocess", "postprocess-top")
    )
    if order not in NORMS:
        known = " or ".join(map(str, NORMS))
        raise ConversionError(f"its transformer-preprocess, -postprocess and -postprocess-top are {order}, not {known}")
    position, has_final = NORMS[order]
    names = _names(has_final, "_pre" if position == "pre" else "")
    source, target = (("Wemb",) * 2) if "Wemb" in tensors else ("encoder_Wemb", "decoder_Wemb")
    outputs = [name for name in ("decoder_ff_logit_out_Wt", "decoder_ff_logit_out_W") if name in tensors]
    names |= {SOURCE: source, TARGET: target, OUTPUT: (outputs or [target])[0]}
    fields = {
        **{f"{stack}_attention_heads": settings.get("transformer-heads", 8) for stack in STACKS},
        "norm_position": position,
        "final_layer_norm": has_final,
        "layer_norm_eps": 1e-6,
        "position_encoding": "tensor2tensor",
        "activation_function": settings.get("transformer-ffn-activation", "swish"),
        "dropout": settings.get("transformer-dropout", 0.0),
        "attention_dropout": settings.get("transformer-dropout-attention", 0.0),
        "activation_dropout": settings.get("transformer-dropout-ffn", 0.0),
        "label_smoothing": settings.get("label-smoothing", 0.0),
        "pad_token_id": pad,
        "bos_token_id": None,
        "eos_token_id": 0,
        "decoder_start_token_id": pad,
    }
    return Layout(names, fields, required=("*.bias",))


def _names(has_final: bool, suffix: str) -> dict[str, str | float]:
    """The table of names but the embeddings' and the output's; `suffix` ends those of the norms in layers."""
    names: dict[str, str | float] = {"lm_head.bias": OUTPUT_BIAS}
    for stack, (kind, (map_, norm)) in itertools.product(STACKS, KINDS.items()):
        ours, theirs = f"{stack}.layers.*", f"{stack}_l{{n+1}}"
        for part, there in ATTENTIONS[: 1 + (stack == "decoder")]:
            for one in ("q", "k", "v", "out"):
                names[f"{ours}.{part}.{one}_proj.{kind}"] = f"{theirs}_{there}_{map_}{one[0]}"
            names[f"{ours}.{part}_layer_norm.{kind}"] = f"{theirs}_{there}_Wo_ln_{norm}{suffix}"
        for number in "12":
            names[f"{ours}.feed_forward.fc{number}.{kind}"] = f"{theirs}_ffn_{map_}{number}"
        names[f"{ours}.final_layer_norm.{kind}"] = f"{theirs}_ffn_ffn_ln_{norm}{suffix}"
        if has_final:
            names[f"{stack}.layer_norm.{kind}"] = f"{stack}_top_ln_{norm}"
    return names


# ---- The vocabulary ----
def _tokenizer(files: list[Path], pad: int) -> DictionaryTokenizer:
    if not 1 <= len(files) <= len(SIDES):
        raise ConversionError(f"{len(files)} vocabularies are given; give one, or the source's and the target's")
    files = files if len(files) == len(SIDES) else files * 2
    tokens = [_tokens(file) for file in files]
    for file, own in zip(files, tokens, strict=True):
        if len(own) > pad or own[:1] != [END] or UNKNOWN not in own:
            raise ConversionError(
                f"{file} isn't the vocabulary of this model: it has {len(own):,} tokens for {pad:,} rows, or {END} "
                f"isn't the first or {UNKNOWN} missing"
            )
    filled = [with_pad(own, pad) for own in tokens]
    models = files if all(file.suffix == ".spm" for file in files) else (None, None)
    return tokenizer_of(files[0].parent, filled, SPECIAL_TOKENS, files=models)


def _tokens(file: Path) -> list[str]:
    """Reads the tokens of a vocabulary in the order of their ids: SentencePiece's, or Marian's .yml, .json or .txt."""
    try:
        if file.suffix == ".spm":
            model = sentencepiece.SentencePieceProcessor(model_file=str(file))
            return [model.id_to_piece(number) for number in range(model.get_piece_size())]
        text = file.read_bytes().decode("utf-8-sig")
        if file.suffix == ".txt":
            return text.replace("\r\n", "\n").removesuffix("\n").split("\n")
        entries = _entries(text)
    except (OSError, ValueError, RuntimeError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ConversionError(f"{file} can't be read as a vocabulary ({problem})") from error
    if twice := [token for token, count in Counter(token for token, _ in entries).items() if count > 1]:
        raise ConversionError(f"{file} isn't a vocabulary: {twice[0]!r} is there twice")
    if sorted(number for _, number in entries) != list(range(len(entries))):
        raise ConversionError(f"{file} isn't a vocabulary: its ids aren't 0 to {len(entries) - 1}")
    return [token for token, _ in sorted(entries, key=itemgetter(1))]


def _entries(text: str) -> list[tuple[str, int]]:
    """Returns what a mapping in JSON or YAML says, each token as it is spelled: Marian reads yes or 1.0 as text."""
    with suppress(ValueError, TypeError):  # it is YAML, or no vocabulary
        found = json.loads(text, strict=False, object_pairs_hook=list)
        if all(type(number) is int for _, number in found):
            return [*found]
    # PyYAML refuses these characters, or ends lines at them, as YAML 1.1 does, but not Marian.
    capital = text.upper()
    free = (chr(code) for code in PRIVATE if chr(code) not in text and f"{code:X}" not in capital)
    marks = {one: next(free) for one in {one[0] for one in NOT_IN_YAML.findall(text)}}
    marked = NOT_IN_YAML.sub(lambda one: marks[one[0][0]], text)
    node = yaml.compose(marked, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    is_mapping = isinstance(node, yaml.MappingNode)
    if not is_mapping or not all(isinstance(one, yaml.ScalarNode) for pair in node.value for one in pair):
        raise ValueError("it isn't a mapping of tokens to ids")
    back = {ord(mark): one for one, mark in marks.items()}
    return [(key.value.translate(back), int(value.value)) for key, value in node.value]
