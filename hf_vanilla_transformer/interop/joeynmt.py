"""JoeyNMT 2: a folder with config.yaml, best.ckpt, src_vocab.txt and trg_vocab.txt; post-norm or pre-norm.

Sources end with the end-of-sentence token, targets begin with that of their start.
"""

from collections.abc import Mapping
from pathlib import Path

from ..tokenization_dictionary import SEPARATOR, DictionaryTokenizer
from .interface import ConversionError, ConversionOptions, Converted, Settings, check_alike, check_options
from .layout import OUTPUT, POSITIONS, SOURCE, STACKS, TARGET, Layout, from_tensors, layer_names
from .pickles import checkpoint_in, parse_yaml, read, read_text, tensors_of
from .segmentation import converted, sizes_of, tokenizer_of

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
LAST_NORMS = ("encoder.layer_norm", "decoder.layer_norm")  # of pre-norm models
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu"}
# alpha is the weight of a sub-layer's input when its output is added.
WANTED = {"type": ("transformer",), "alpha": (1,), "activation": tuple(ACTIVATIONS)}
# JoeyNMT's own defaults.
DEFAULTS: dict[str, Settings] = {
    "encoder": {"type": "recurrent", "num_heads": 4, "alpha": 1.0, "activation": "relu", "dropout": 0.1},
    "decoder": {"type": "transformer", "num_heads": 8, "alpha": 1.0, "activation": "relu", "layer_norm": "post"},
}
SPECIAL = {"unk": (0, "<unk>"), "pad": (1, "<pad>"), "bos": (2, "<s>"), "eos": (3, "</s>")}
Special = Mapping[str, tuple[int, str]]  # name -> id and token
# Settings of the texts of one side that change them before they are segmented.
CHANGES = ("lowercase", "normalize")
OTHER_SETTINGS = ("repetition_penalty", "no_repeat_ngram_size")
LEVELS = ("word", "char")  # of tokenizers without pieces of words


def recognises(source: Path) -> bool:
    """Tells by the names of its files whether a folder has a model of JoeyNMT."""
    return (source / "config.yaml").is_file() and any(source.glob("*.ckpt"))


def load(source: str | Path, options: ConversionOptions) -> Converted:
    """Reads a model; `source` is its folder, with best.ckpt or one other .ckpt file, or such a file."""
    file = checkpoint_in(Path(source), ["best.ckpt"], "*.ckpt")
    folder = file.parent
    config = _config(folder)
    state = read(file)
    if not isinstance(state, Mapping) or "model_state" not in state:
        raise ConversionError(f"{file} is no checkpoint of JoeyNMT: it has no model_state")
    symbols = config["data"].get("special_symbols") or {}
    special = {
        name: (symbols.get(f"{name}_id", number), symbols.get(f"{name}_token", token))
        for name, (number, token) in SPECIAL.items()
    }
    if prompts := [f"{name}: {symbols[name]}" for name in ("sep_token", "lang_tags") if symbols.get(name)]:
        raise ConversionError(
            f"data.special_symbols of config.yaml has {prompts[0]}: the model reads prompts, and adds embeddings that "
            "tell them from the rest, as none here does"
        )
    vocabularies = tuple(_vocabulary(folder, config, side, special) for side in SIDES)
    fields = {
        **_fields(config["model"]),
        **{f"{name}_token_id": special[name][0] for name in ("pad", "bos", "eos")},
        "decoder_start_token_id": special["bos"][0],
        **sizes_of(vocabularies),
    }
    names = {**NAMES, **{name: name for name in LAST_NORMS if fields["final_layer_norm"]}}
    model = from_tensors(tensors_of(state["model_state"], file), Layout(names, fields, required=("*.bias",)))
    settings = _decoding(config["testing"], special)
    others = [name for name in OTHER_SETTINGS if config["testing"].get(name, -1) != -1]
    notes = tuple(f"testing.{name} of config.yaml isn't converted" for name in others)
    if "max_new_tokens" not in settings:
        notes += (
            "testing.max_output_length isn't set: JoeyNMT limits translations to 1.5 times the longest source of a "
            "batch, and this model to 50 tokens more than their source",
        )
    model.generation_config.update(**settings)

    def tokenizer() -> DictionaryTokenizer:
        tokens = {f"{name}_token": token for name, (_, token) in special.items()}
        levels, files = zip(*(_segmentation(config, side) for side in SIDES), strict=True)
        return tokenizer_of(folder, vocabularies, tokens, files=files, restricted=True, levels=levels)

    return converted(model, options, tokenizer, *notes)


# ---- Files ----
def _config(folder: Path) -> Settings:
    file = folder / "config.yaml"
    config = parse_yaml(read_text(file), file)
    if isinstance(config, dict):
        config = {"data": {}, **config, "testing": config.get("testing") or {}}
    for path in ("model.encoder.embeddings", "model.decoder", "data", "testing"):
        section = config
        for name in path.split("."):
            section = section.get(name) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            raise ConversionError(f"{file} has no section {path}, as those of JoeyNMT have")
    config["testing"] = {name: value for name, value in config["testing"].items() if value is not None}
    return dict(config)


def _vocabulary(folder: Path, config: Settings, side: str, special: Special) -> list[str]:
    """Returns the tokens of a side by their ids; none if their file isn't in the folder."""
    given = _side(config, side).get("voc_file")
    names = (f"{side}_vocab.txt", *([Path(given).name] if isinstance(given, str) and given else []))
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        return []
    lines = read_text(file).removesuffix("\n").split("\n")
    tokens = list(dict.fromkeys([*(token for _, token in special.values()), *lines]))
    if wrong := [f"{token} isn't {i}" for i, token in special.values() if tokens[i : i + 1] != [token]]:
        raise ConversionError(f"the {side} vocabulary isn't that of config.yaml: the id of {', '.join(wrong)}")
    return tokens


def _side(config: Settings, side: str) -> Settings:
    section = config["data"].get(side)
    return section if isinstance(section, dict) else {}


def _segmentation(config: Settings, name: str) -> tuple[str | None, str | None]:
    """Returns the level of a side without pieces of words, or the file that segments it, as config.yaml tells them."""
    side = _side(config, name)
    settings = side.get("tokenizer_cfg") or {}
    problems = [f"{change}: {side[change]}" for change in CHANGES if side.get(change)]
    if side.get("level") not in ("bpe", *LEVELS):
        problems.append(f"level: {side.get('level')}")
    for setting, usual in (("pretokenizer", "none"), ("separator", SEPARATOR)):
        if (value := settings.get(setting, usual)) != usual:
            problems.append(f"{setting}: {value}")
    if problems:
        raise ConversionError(
            f"data.{name} of config.yaml has {', '.join(problems)}; no tokenizer here does that, so convert without "
            "one: --no-tokenizer"
        )
    level, file = side["level"], settings.get("model_file") or settings.get("codes")
    return level if level in LEVELS else None, file if isinstance(file, str) else None


# ---- Settings ----
def _fields(model: Settings) -> dict[str, object]:
    encoder, decoder = ({**DEFAULTS[stack], **model[stack]} for stack in STACKS)
    for stack, settings in zip(STACKS, (encoder, decoder), strict=True):
        check_options(settings, WANTED, of=f"the {stack}'s")
    encoder["scale"], target = encoder["embeddings"].get("scale", False), decoder.get("embeddings")
    decoder["scale"] = target.get("scale", False) if isinstance(target, dict) else encoder["scale"]
    if model.get("tied_embeddings"):  # they have the encoder's settings
        decoder["scale"] = encoder["scale"]
    if encoder.get("layer_norm") is None:
        raise ConversionError(
            "config.yaml has no model.encoder.layer_norm, and versions of JoeyNMT differ in what that means: write "
            "layer_norm: post if 2.0 to 2.2 trained the model, and layer_norm: pre in both stacks if 1 did"
        )
    check_alike(encoder, decoder, ("activation", "scale", "layer_norm"))
    return {
        **{f"{stack}_attention_heads": one["num_heads"] for stack, one in zip(STACKS, (encoder, decoder), strict=True)},
        "norm_position": encoder["layer_norm"],
        "final_layer_norm": encoder["layer_norm"] == "pre",
        "layer_norm_eps": 1e-6,
        "position_encoding": "paper",
        "scale_embedding": encoder["scale"],
        "activation_function": ACTIVATIONS[encoder["activation"]],
        "attention_bias": True,
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), encoder["dropout"]),
    }


def _decoding(testing: Settings, special: Special) -> dict[str, object]:
    alpha = testing.get("alpha", testing.get("beam_alpha", -1))  # its name was alpha before version 2
    longest = testing.get("max_output_length", -1)
    unwanted = ["bos", "pad"] if testing.get("generate_unk", True) else ["bos", "pad", "unk"]
    return {
        "num_beams": max(testing.get("beam_size", 1), 1),
        "early_stopping": False,
        "gnmt_length_penalty": max(alpha, 0.0),
        "min_new_tokens": testing.get("min_output_length", 1),
        "suppress_tokens": [special[name][0] for name in unwanted],
        **({"max_new_tokens": longest} if longest > 0 else {}),
    }
