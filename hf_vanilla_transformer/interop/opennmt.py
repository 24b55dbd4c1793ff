"""OpenNMT-py 3: a .pt file with the weights of a pre-norm encoder-decoder, its vocabularies and its options.

Its source has no end-of-sentence token; its target begins with the start token of the checkpoint's vocabulary.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ..tokenization_dictionary import DictionaryTokenizer
from .interface import ConversionError, ConversionOptions, Converted, Settings, check_options
from .layout import OUTPUT, POSITIONS, SOURCE, TARGET, Layout, from_tensors, layer_names
from .pickles import fields_of, read, tensors_of, texts_in
from .segmentation import converted, sizes_of, tokenizer_of

EMBEDDINGS = "embeddings.make_embedding"
ATTENTION = {
    "q_proj": "linear_query",
    "k_proj": "linear_keys",
    "v_proj": "linear_values",
    "out_proj": "final_linear",
    "encoder_attn": "context_attn",
}
LAYERS = {"encoder": "encoder.transformer.*", "decoder": "decoder.transformer_layers.*"}
NAMES = {
    SOURCE: f"encoder.{EMBEDDINGS}.emb_luts.0.weight",
    TARGET: f"decoder.{EMBEDDINGS}.emb_luts.0.weight",
    OUTPUT.removesuffix(".weight"): "generator",
    **{ours: f"{ours.partition('.')[0]}.{EMBEDDINGS}.pe.pe" for ours in POSITIONS},
    **{f"{stack}.layer_norm": f"{stack}.layer_norm" for stack in LAYERS},
    **layer_names(
        LAYERS,
        {
            **ATTENTION,
            "fc1": "w_1",
            "fc2": "w_2",
            "encoder.self_attn_layer_norm": "layer_norm",
            "decoder.self_attn_layer_norm": "layer_norm_1",
            "encoder_attn_layer_norm": "layer_norm_2",
            "final_layer_norm": "feed_forward.layer_norm",
        },
    ),
}
# Options that the model has to have with one of these values, if at all.
WANTED: dict[str, tuple[object, ...]] = {
    "model_task": ("seq2seq",),
    "encoder_type": ("transformer",),
    "decoder_type": ("transformer",),
    "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
    "layer_norm": ("standard",),
    "generator_function": ("softmax",),
    "position_encoding_type": ("SinusoidalInterleaved", "SinusoidalConcat"),
    "pos_ffn_activation_fn": ("relu", "gelu"),
    "position_encoding": (True,),
}
# Options that have to be off; others have tensors of their own.
UNWANTED = ("max_relative_positions", "sliding_window", "parallel_residual")
POSITION_ENCODINGS = {"SinusoidalInterleaved": "paper", "SinusoidalConcat": "tensor2tensor"}
PAD, BOS, EOS = "<blank>", "<s>", "</s>"
DECODING = "it comes without generation settings: the paper's are written (beam of 4, alpha 0.6)"
SPECIAL_TOKENS = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "unk_token": "<unk>"}
# Transforms of texts that the tokenizer does, and those that are for training alone.
TRANSFORMS = {"bpe", "sentencepiece", "clean", "filtertoolong", "switchout", "tokendrop", "tokenmask"}
SIDES = ("src", "tgt")


def recognises(source: Path) -> bool:
    """Tells by the texts in its pickle whether a file is a checkpoint of OpenNMT-py."""
    return source.is_file() and texts_in(source) >= {"vocab", "opt", "src", "tgt"}


def load(source: str | Path, options: ConversionOptions) -> Converted:
    """Reads a checkpoint."""
    file = Path(source)
    if any(text.startswith("torchtext") for text in texts_in(file)):
        raise ConversionError(
            f"{file} is of OpenNMT-py 2: its vocabularies are objects of torchtext, and these may run code. Convert it "
            "with tools/convertv2_v3.py of OpenNMT-py 3 first"
        )
    checkpoint = read(file)
    settings = fields_of(checkpoint.get("opt")) if isinstance(checkpoint, Mapping) else {}
    if not settings or "vocab" not in checkpoint:
        raise ConversionError(f"{file} is no checkpoint of OpenNMT-py 3: it lacks `opt` or `vocab`")
    check_options(settings, WANTED, UNWANTED)
    tokens, fields = tokens_of(checkpoint["vocab"])
    layout = Layout(NAMES, {**_fields(settings), **fields}, required=_required(settings))
    model = from_tensors(_tensors(checkpoint, file), layout)
    return converted(model, options, lambda: tokenizer_for(file.parent, tokens, settings), DECODING)


def _fields(settings: Settings) -> dict[str, object]:
    dropout, attention_dropout = (_last(settings.get(name, 0.0)) for name in ("dropout", "attention_dropout"))
    return {
        **{f"{stack}_attention_heads": settings.get("heads", 8) for stack in LAYERS},
        "norm_position": "pre",
        "final_layer_norm": True,
        "layer_norm_eps": settings.get("norm_eps", 1e-6),
        "position_encoding": POSITION_ENCODINGS[settings.get("position_encoding_type", "SinusoidalInterleaved")],
        "activation_function": settings.get("pos_ffn_activation_fn", "relu"),
        "dropout": dropout,
        "attention_dropout": attention_dropout,
        "activation_dropout": dropout,
        "output_bias": True,
        **({"attention_bias": True} if settings.get("add_qkvbias") else {}),
    }


def _last(value: object) -> object:
    """Returns the last of the values that an option had while the model was trained, or its only one."""
    return value[-1] if isinstance(value, list) and value else value


def _required(settings: Settings) -> tuple[str, ...]:
    """Returns the biases that the model has to have; versions before 3.2 always have those of the feed-forward maps."""
    attention = ("*_attn.*",) if settings.get("add_qkvbias") else ()
    feed_forward = ("*.fc?.bias",) if settings.get("add_ffnbias", True) else ()
    return ("*layer_norm.bias", "lm_head.bias", *attention, *feed_forward)


def tokens_of(vocabularies: object) -> tuple[tuple[list[str], list[str]], dict[str, object]]:
    """Returns the tokens of source and target, and the fields that they tell: sizes, and the ids of special ones."""
    found = fields_of(vocabularies)
    source, target = found.get("src", ()), found.get("tgt") or found.get("src", ())
    if not source or not (_is_list_of_texts(source) and _is_list_of_texts(target)):
        raise ConversionError("its vocabulary has no lists of tokens named src and tgt")
    start = found.get("decoder_start_token") or BOS
    if absent := [f"{token!r}" for token in (PAD, start, EOS) if token not in target]:
        raise ConversionError(f"the target vocabulary has no {', '.join(absent)}")
    pad = target.index(PAD)
    if PAD not in source or source.index(PAD) != pad:
        raise ConversionError(f"{PAD} has another id in the source than in the target vocabulary, where it is {pad}")
    return (list(source), list(target)), {
        **sizes_of((source, target)),
        "pad_token_id": pad,
        "bos_token_id": target.index(BOS) if BOS in target else None,
        "eos_token_id": target.index(EOS),
        "decoder_start_token_id": target.index(start),
    }


def tokenizer_for(folder: Path, tokens: tuple[list[str], list[str]], settings: Settings) -> DictionaryTokenizer:
    """Makes the tokenizer of a model whose sources have no end; refuses transforms of texts that no tokenizer does."""
    if others := sorted(_transforms(settings) - TRANSFORMS):
        raise ConversionError(
            f"the model's texts go through {', '.join(others)}, and no tokenizer here does that; convert without one: "
            "--no-tokenizer"
        )
    named = (settings.get(f"{side}_subword_model") for side in SIDES)
    source, target = (file if isinstance(file, str) and file else None for file in named)
    files = (source, target or source)
    special = {name: token for name, token in SPECIAL_TOKENS.items() if token in (*tokens[0], *tokens[1])}
    return tokenizer_of(folder, tokens, special, files=files, source_eos=False)


def _transforms(settings: Settings) -> set[str]:
    """Returns the transforms of all corpora; a prefix or suffix without any text is none."""
    corpora = settings.get("data")
    parts = [settings, *(one for one in fields_of(corpora).values() if isinstance(one, Mapping))]
    lists = [part.get("transforms") for part in parts]
    found = {str(name) for names in lists if isinstance(names, Sequence) for name in names}
    for name in ("prefix", "suffix"):
        if not any(part.get(f"{side}_{name}") for part in parts for side in SIDES):
            found.discard(name)
    for side in SIDES:
        if settings.get(f"{side}_vocab_threshold") and settings.get(f"{side}_subword_vocab"):
            found.add(f"{side}_vocab_threshold")
    return found


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, str) for one in value)


def _tensors(checkpoint: Settings, file: Path) -> dict[str, Tensor]:
    if "model" in checkpoint:
        output = tensors_of(checkpoint.get("generator"), file)
        # In version 3.0.0 the output was the first of several modules.
        output = {f"generator.{name.removeprefix('0.')}": value for name, value in output.items()}
        return {**tensors_of(checkpoint["model"], file), **output}
    parts = [one for one in sorted(file.parent.glob("*.safetensors")) if one.name.startswith(f"{file.stem}.")]
    if not parts:
        raise ConversionError(f"{file} has no weights, and there is no {file.stem}.safetensors beside it")
    return {name: value for part in parts for name, value in read(part).items()}
