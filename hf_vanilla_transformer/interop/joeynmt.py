"""JoeyNMT 2: a folder with config.yaml, best.ckpt, src_vocab.txt and trg_vocab.txt; post-norm or pre-norm.

Sources end with the end-of-sentence token, targets begin with that of their start.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedTokenizerBase

from ..errors import first_line
from ..tokenization_dictionary import SEPARATOR
from .conversion import ConversionError, Converted, Options
from .layout import OUTPUT, POSITIONS, SOURCE, STACKS, TARGET, Layout, from_tensors, layer_names
from .pickles import read, tensors_of
from .segmentation import tokenizer_of

NAMES = {
    SOURCE: "src_embed.lut.weight",
    TARGET: "trg_embed.lut.weight",
    OUTPUT: "decoder.output_layer.weight",
    **{ours: f"{ours.partition('.')[0]}.pe.pe" for ours in POSITIONS},
    **layer_names(
        {stack: f"{stack}.layers.*" for stack in STACKS},
        {
            **{f"{one}_proj": f"{one}_layer" for one in "qkv"},
            "out_proj": "output_layer",
            "encoder.self_attn": "src_src_att",
            "decoder.self_attn": "trg_trg_att",
            "encoder_attn": "src_trg_att",
            "fc1": "pwff_layer.0",
            "fc2": "pwff_layer.3",
            "encoder.self_attn_layer_norm": "layer_norm",
            "decoder.self_attn_layer_norm": "x_layer_norm",
            "encoder_attn_layer_norm": "dec_layer_norm",
            "final_layer_norm": "feed_forward.layer_norm",
        },
    ),
}
SIDES = ("src", "trg")
LAST_NORMS = ("encoder.layer_norm", "decoder.layer_norm")  # pre-norm alone has them
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu"}
# JoeyNMT's own defaults, of the encoder and of the decoder.
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "type": ("recurrent", "transformer"),
    "num_heads": (4, 8),
    "alpha": (1.0, 1.0),
    "activation": ("relu", "relu"),
    "layer_norm": (None, "post"),  # of the encoder: "pre" in 2.3, "post" before
    "dropout": (0.1, 0.1),
}
SPECIAL = {"unk": (0, "<unk>"), "pad": (1, "<pad>"), "bos": (2, "<s>"), "eos": (3, "</s>")}
# Settings of the texts of one side that change them before they are segmented.
CHANGES = ("lowercase", "normalize")
OTHER_SETTINGS = ("repetition_penalty", "no_repeat_ngram_size")


def recognises(source: Path) -> bool:
    """Tells by the names of its files whether a folder has a model of JoeyNMT."""
    return (source / "config.yaml").is_file() and any(source.glob("*.ckpt"))


def load(source: str | Path, options: Options) -> Converted:
    """Reads a model.

    Args:
        source: The model's folder, or one of its .ckpt files; of a folder, it is best.ckpt, or the only one.
        options: What a user says of the model.

    Raises:
        ConversionError: A file is missing or can't be read, the model has what ours doesn't, or tensors are missing,
            unknown or of another shape.
    """
    place = Path(source)
    folder = place.parent if place.is_file() else place
    config = _config(folder)
    file = place if place.is_file() else _checkpoint(folder)
    state = read(file)
    if not isinstance(state, Mapping) or "model_state" not in state:
        raise ConversionError(f"{file} is no checkpoint of JoeyNMT: it has no model_state")
    tensors = tensors_of(state["model_state"], file)
    special = _special(config)
    fields, is_pre = _fields(config["model"], has_last_norms="encoder.layer_norm.weight" in tensors)
    fields |= {f"{name}_token_id": special[name][0] for name in ("pad", "bos", "eos")}
    fields |= {"decoder_start_token_id": special["bos"][0], **_vocabularies(folder, config, special)}
    names = {**NAMES, **{name: name for name in LAST_NORMS if is_pre}}
    model = from_tensors(tensors, Layout(names, fields, required=("*.bias",)))
    settings, notes = _decoding(config, special)
    model.generation_config.update(**settings)
    tokenizer = _tokenizer(folder, config, special) if options.with_tokenizer else None
    return Converted(model, tokenizer, notes=notes)


# ---- Files ----
def _config(folder: Path) -> dict[str, Any]:
    """Reads config.yaml; its sections that are needed are tables."""
    file = folder / "config.yaml"
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConversionError(f"{file} can't be read ({first_line(error)})") from error
    if isinstance(config, dict):
        config = {"data": {}, "testing": {}, **config}
    for path in ("model.encoder.embeddings", "model.decoder", "data", "testing"):
        section: Any = config
        for name in path.split("."):
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            raise ConversionError(f"{file} has no section {path}, as those of JoeyNMT have")
    return dict(config)


def _checkpoint(folder: Path) -> Path:
    if (folder / "best.ckpt").is_file():
        return folder / "best.ckpt"
    files = sorted(folder.glob("*.ckpt"))
    if len(files) != 1:
        known = f"{len(files)} others: give one of them as the source" if files else "no other"
        raise ConversionError(f"{folder} has no best.ckpt, and {known}")
    return files[0]


def _vocabularies(folder: Path, config: Mapping[str, Any], special: Mapping[str, tuple[int, str]]) -> dict[str, int]:
    """Returns the vocabularies' sizes, as far as their files are there."""
    sizes = {}
    for side, field in (("src", "vocab_size"), ("trg", "decoder_vocab_size")):
        if tokens := vocabulary(folder, config, side):
            sizes[field] = len(tokens)
            wrong = [f"{token} isn't {i}" for i, token in special.values() if tokens[i : i + 1] != [token]]
            if wrong:
                raise ConversionError(f"the {side} vocabulary isn't that of config.yaml: the id of {', '.join(wrong)}")
    return sizes


def vocabulary(folder: Path, config: Mapping[str, Any], side: str) -> list[str]:
    """Returns the tokens of a side ("src" or "trg") by their ids; none if their file isn't in the folder."""
    section = config["data"].get(side)
    given = section.get("voc_file") if isinstance(section, dict) else None
    names = (f"{side}_vocab.txt", *([Path(given).name] if isinstance(given, str) and given else []))
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{file} can't be read ({first_line(error)})") from error
    symbols = _symbols(config)
    first = [token for _, token in _special(config).values()]
    separator = [symbols["sep_token"]] if symbols.get("sep_token") else []
    return list(dict.fromkeys([*first, *separator, *symbols.get("lang_tags", []), *lines]))


def _tokenizer(
    folder: Path, config: Mapping[str, Any], special: Mapping[str, tuple[int, str]]
) -> PreTrainedTokenizerBase:
    """Makes the tokenizer.

    Raises:
        ConversionError: A file is missing, or texts are changed or segmented in ways that the tokenizer doesn't have.
    """
    sides = [config["data"].get(side) for side in SIDES]
    files = []
    for name, side in zip(SIDES, sides, strict=True):
        side = side if isinstance(side, dict) else {}
        settings = side.get("tokenizer_cfg")
        settings = settings if isinstance(settings, dict) else {}
        problems = [f"{change}: {side[change]}" for change in CHANGES if side.get(change)]
        if side.get("level") != "bpe":
            problems.append(f"level: {side.get('level')}")
        if settings.get("pretokenizer", "none") != "none":
            problems.append(f"pretokenizer: {settings['pretokenizer']}")
        if settings.get("separator", SEPARATOR) != SEPARATOR:
            problems.append(f"separator: {settings['separator']}")
        if problems:
            raise ConversionError(
                f"data.{name} of config.yaml has {', '.join(problems)}, which no tokenizer here does; convert without "
                "one: --no-tokenizer"
            )
        file = settings.get("model_file") or settings.get("codes")
        files.append(file if isinstance(file, str) else None)
    return tokenizer_of(
        folder,
        (vocabulary(folder, config, "src"), vocabulary(folder, config, "trg")),
        {f"{name}_token": token for name, (_, token) in special.items()},
        files=(files[0], files[1]),
        restricted=True,
    )


# ---- Settings ----
def _symbols(config: Mapping[str, Any]) -> dict[str, Any]:
    symbols = config["data"].get("special_symbols") or {}
    tags = symbols.get("lang_tags", []) if isinstance(symbols, dict) else None
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise ConversionError("data.special_symbols of config.yaml is no table, or its lang_tags is no list of tokens")
    return dict(symbols)


def _special(config: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Returns the ids and the texts of the four special tokens."""
    symbols = _symbols(config)
    special = {
        name: (symbols.get(f"{name}_id", index), symbols.get(f"{name}_token", token))
        for name, (index, token) in SPECIAL.items()
    }
    for name, (index, token) in special.items():
        if isinstance(index, bool) or not isinstance(index, int) or index < 0 or not isinstance(token, str):
            raise ConversionError(f"data.special_symbols of config.yaml: {name} is {token!r} with the id {index!r}")
    return special


def _fields(model: Mapping[str, Any], has_last_norms: bool) -> tuple[dict[str, Any], bool]:
    """Returns fields of our configuration, and whether the model is pre-norm.

    Raises:
        ConversionError: A setting is one that this model can't have.
    """
    encoder, decoder = (
        {name: model[stack].get(name, default[number]) for name, default in DEFAULTS.items()}
        for number, stack in enumerate(("encoder", "decoder"))
    )
    for stack, settings in (("encoder", encoder), ("decoder", decoder)):
        if settings["type"] != "transformer":
            raise ConversionError(f"the {stack} is of the type {settings['type']!r}, not a Transformer")
        if settings["alpha"] != 1:
            raise ConversionError(
                f"the {stack}'s alpha is {settings['alpha']!r}: ours adds a sub-layer's input as it is, not weighted"
            )
        if settings["activation"] not in ACTIVATIONS:
            raise ConversionError(
                f"the {stack}'s activation is {settings['activation']!r}; known are {', '.join(ACTIVATIONS)}"
            )
    norm = _norm_position(model, has_last_norms)
    if encoder["activation"] != decoder["activation"]:
        raise ConversionError(
            f"activation is {encoder['activation']!r} in the encoder and {decoder['activation']!r} in the decoder; "
            "here, it is one for both"
        )
    dropout = encoder["dropout"]
    return {
        "encoder_attention_heads": encoder["num_heads"],
        "decoder_attention_heads": decoder["num_heads"],
        "norm_position": norm,
        "final_layer_norm": norm == "pre",
        "layer_norm_eps": 1e-6,
        "position_encoding": "paper",
        "scale_embedding": _scaled(model),
        "activation_function": ACTIVATIONS[encoder["activation"]],
        "attention_bias": True,
        "dropout": dropout,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
    }, norm == "pre"


def _norm_position(model: Mapping[str, Any], has_last_norms: bool) -> str:
    """Tells where the normalization is, for which versions have different defaults."""
    encoder, decoder = (model[stack].get("layer_norm") for stack in ("encoder", "decoder"))
    if encoder is None and decoder is None and has_last_norms:  # JoeyNMT 1 has pre-norm alone
        return "pre"
    if encoder is None:
        raise ConversionError(
            "config.yaml has no model.encoder.layer_norm, for which JoeyNMT 2.3 takes pre without a last normalization "
            "and 2.0 to 2.2 take post: write layer_norm: post there if one of the latter has trained the model; "
            "the other can't be converted"
        )
    decoder = DEFAULTS["layer_norm"][1] if decoder is None else decoder
    if encoder != decoder or encoder not in ("pre", "post"):
        raise ConversionError(
            f"layer_norm is {encoder!r} in the encoder and {decoder!r} in the decoder; ours has pre or post in both"
        )
    return str(encoder)


def _scaled(model: Mapping[str, Any]) -> bool:
    """Tells whether embeddings are scaled; tied ones have the encoder's settings."""
    source = model["encoder"]["embeddings"].get("scale", False)
    other = model["decoder"].get("embeddings")
    target = other.get("scale", False) if isinstance(other, dict) and not model.get("tied_embeddings") else source
    if bool(source) != bool(target):
        raise ConversionError("the embeddings of one side are scaled, and those of the other aren't: ours are alike")
    return bool(source)


def _decoding(
    config: Mapping[str, Any], special: Mapping[str, tuple[int, str]]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns settings of our decoding, and what of the model's own they leave out."""
    testing, symbols = config["testing"], _symbols(config)
    alpha = testing.get("alpha", testing.get("beam_alpha", -1))  # its name was alpha before version 2
    defaults = {"beam_size": 1, "min_output_length": 1, "max_output_length": -1}
    beams, shortest, longest = (testing.get(name, value) for name, value in defaults.items())
    if not (all(isinstance(one, int) for one in (beams, shortest, longest)) and isinstance(alpha, int | float)):
        raise ConversionError(f"testing of config.yaml: one of {', '.join(defaults)} and beam_alpha is no number")
    has_separator = bool(symbols.get("sep_token"))
    marks = range(len(SPECIAL), len(SPECIAL) + has_separator + len(symbols.get("lang_tags", [])))
    unwanted = ["bos", "pad"] if testing.get("generate_unk", True) else ["bos", "pad", "unk"]
    settings = {
        "num_beams": max(beams, 1),
        "early_stopping": False,
        "gnmt_length_penalty": max(alpha, 0.0),
        "min_new_tokens": shortest,
        "suppress_tokens": [*(special[name][0] for name in unwanted), *marks],
        **({"max_new_tokens": longest} if longest > 0 else {}),
    }
    notes = tuple(f"testing.{name} of config.yaml isn't taken over" for name in OTHER_SETTINGS if _is_on(testing, name))
    if has_separator:
        notes += ("prompts (sep_token) aren't converted; sources without one are translated as they were",)
    return settings, notes


def _is_on(testing: Mapping[str, Any], name: str) -> bool:
    value = testing.get(name, -1)
    return not isinstance(value, int | float) or value > 0
