"""fairseq's `transformer` and its architectures (base, big, iwslt_de_en ...): post- or pre-norm, sinusoids or a table.

SOURCE is a checkpoint, or a folder with checkpoint_best.pt, checkpoint_last.pt or one .pt file; dict.*.txt beside it
are the vocabularies. The sinusoids of fairseq begin after the padding's index, and its decoder starts from `</s>`.
The generation config is that of fairseq-generate without options.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor
from transformers import GenerationConfig

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from .interface import ConversionError, ConversionOptions, Converted, Settings, check_alike, check_options
from .layout import KINDS, OUTPUT, POSITIONS, SOURCE, STACKS, TARGET, Layout, from_tensors, layer_names
from .pickles import checkpoint_in, fields_of, read, read_text, tensors_of, texts_in
from .segmentation import converted, sizes_of, tokenizer_of

SETTINGS = ("args", "cfg")  # where a checkpoint has them, beside `model`
CHECKPOINTS = ("checkpoint_best.pt", "checkpoint_last.pt")
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # what every dictionary begins with, before the lines of its file
SPECIAL_TOKENS = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
PAD, END = 1, 2
FIXED_FIELDS = {
    "attention_bias": True,
    "layer_norm_eps": 1e-5,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": END,
    "decoder_start_token_id": END,
}
ACTIVATIONS = {
    "relu": "relu",
    "relu_squared": "relu2",
    "gelu": "gelu",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",  # its earlier name
    "swish": "silu",
    "tanh": "tanh",
    "linear": "linear",
}
# Settings of other models that have the same tensors; of another task, a decoder may start from another token.
WANTED = {"task": ("translation",), "activation_fn": tuple(ACTIVATIONS)}
UNWANTED = (
    *("cross_self_attention", "no_token_positional_embeddings"),
    "quant_noise_scalar",  # it computes in 8 bits, in evaluation too
    *("encoder_xformers_att_config", "decoder_xformers_att_config"),
)
# fairseq-generate: a beam of 5, no padding, no empty translation, and at most 200 tokens before </s>.
LONGEST = 200
DECODING = {
    "num_beams": 5,
    "early_stopping": True,
    "length_penalty": 1.0,
    "min_new_tokens": 1,
    "bad_words_ids": [[PAD]],
    "forced_eos_token_id": END,
}
DECODING_NOTE = (
    "it decodes as fairseq-generate does without options: beams of 5, log-probabilities divided by the length "
    f"(length_penalty 1), at most {LONGEST} tokens; generation_config.json says so. With beams, another "
    "translation may win where one is cut at that length: here, its end costs nothing; in fairseq, its probability"
)
NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
OVERWRITE = " #fairseq:overwrite"  # behind a token that takes the place of an earlier one of the same name
LANGUAGES = ("source_lang", "target_lang")
OF_BOTH = ("learned_pos", "normalize_before")  # settings of the stacks that have to be alike
# Copies of an encoder layer's weights in 0.12.2. It fills them when it loads a model; saved in training, they are zero.
COPIES = [f"{part}_{kind}" for part in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")]
IGNORED = (
    *("*.version", "*._float_tensor", "*.embed_positions.weights"),
    *(f"encoder.layers.*[0-9].{copy}" for copy in COPIES),
)


def recognises(source: Path) -> bool:
    """Tells by names whether a folder has a checkpoint of fairseq, and by its entries whether a file is one."""
    if source.is_dir():
        return any((source / name).is_file() for name in CHECKPOINTS) or any(source.glob("dict.*.txt"))
    texts = texts_in(source) if source.suffix == ".pt" else set()
    return "model" in texts and not texts.isdisjoint(SETTINGS)


def load(source: str | Path, options: ConversionOptions) -> Converted:
    """Opens a model."""
    file = checkpoint_in(Path(source), CHECKPOINTS, "*.pt")
    value = read(file)
    if not isinstance(value, Mapping) or "model" not in value or value.keys().isdisjoint(SETTINGS):
        raise ConversionError(f"{file} is no checkpoint of fairseq: it lacks `model`, or `args` and `cfg`")
    settings = _settings(value)
    tensors, dictionaries = tensors_of(value["model"], file), _dictionaries(file.parent, settings)
    model = from_tensors(tensors, _layout(settings, tensors, sizes_of(dictionaries)))
    model.generation_config = _generation_config(settings, model.config)
    if model.config.share_encoder_decoder_embeddings and [] not in dictionaries and dictionaries[0] != dictionaries[1]:
        raise ConversionError("source and target share their embeddings, and their dictionaries differ")
    notes = [DECODING_NOTE]
    if [] in dictionaries:
        notes.append("there are no dictionaries (dict.*.txt) of both languages beside it: none was compared")
    languages = [settings[name] for name in LANGUAGES if isinstance(settings.get(name), str)]
    tokenizer = partial(tokenizer_of, file.parent, dictionaries, SPECIAL_TOKENS, languages=tuple(languages))
    return converted(model, options, tokenizer, *notes, metadata={"language": languages})


def _generation_config(settings: Settings, config: VanillaTransformerConfig) -> GenerationConfig:
    positions = settings.get("max_target_positions")
    longest = min(LONGEST, (positions if isinstance(positions, int) else LONGEST + 1) - 1)
    if config.position_encoding == "learned":
        longest = min(longest, config.max_position_embeddings - 1)
    longest = max(longest, 0) + len(("</s>", "</s>"))  # where it starts and ends
    return GenerationConfig(**DECODING, **config.decoding_tokens, max_length=longest)


# ---- Settings ----
def _settings(checkpoint: Settings) -> Settings:
    """Returns the model's settings under the names of the command line, from `args` or, since 0.10, from `cfg`."""
    config = checkpoint.get("cfg")
    model = fields_of(config.get("model")) if isinstance(config, Mapping) else {}
    task = fields_of(config.get("task")) if isinstance(config, Mapping) else {}
    settings = {**fields_of(checkpoint.get("args")), **task}
    for name, value in model.items():  # its newest form has one table for each stack
        nested = fields_of(value) if name in ("encoder", "decoder", "quant_noise") else None
        settings |= {name: value} if nested is None else {f"{name}_{key}": one for key, one in nested.items()}
    return {**settings, "task": settings.get("task") or task.get("_name")}


def _layout(settings: Settings, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Layout:
    check_options({name: value for name, value in settings.items() if value}, WANTED, UNWANTED)
    encoder, decoder = ({name: bool(settings.get(f"{one}_{name}")) for name in OF_BOTH} for one in STACKS)
    check_alike(encoder, decoder, OF_BOTH)
    is_learned, is_pre = encoder.values()
    shares = bool(settings.get("share_all_embeddings") or settings.get("merge_src_tgt_embed"))
    has_last_norms = is_pre and "encoder.layer_norm.weight" in tensors  # since 0.6
    fields = {
        **FIXED_FIELDS,
        **sizes,
        "share_encoder_decoder_embeddings": shares,
        "tie_word_embeddings": shares or bool(settings.get("share_decoder_input_output_embed")),
        "final_layer_norm": has_last_norms,
        **{name: settings.get(name) for name in ("encoder_attention_heads", "decoder_attention_heads")},
        "norm_position": "pre" if is_pre else "post",
        "activation_function": ACTIVATIONS[settings.get("activation_fn") or "relu"],
        "scale_embedding": not settings.get("no_scale_embedding"),
        "position_encoding": "learned" if is_learned else "fairseq",
    }
    fields["activation_dropout"] = settings.get("relu_dropout") or 0.0  # its earlier name
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        if isinstance(settings.get(name), (int, float)) and settings[name]:
            fields[name] = settings[name]
    names = _names(tensors, is_learned, has_last_norms)
    first = PAD + 1 if is_learned else 0
    return Layout(names, fields, IGNORED, first_position=first, required=("*.bias",))


def _names(tensors: Mapping[str, Tensor], is_learned: bool, has_last_norms: bool) -> dict[str, str]:
    """Returns the table of names, for present and for older versions."""
    output = "decoder.embed_out" if "decoder.embed_out" in tensors else "decoder.output_projection.weight"
    names = {SOURCE: SOURCE, TARGET: TARGET, OUTPUT: output}
    if is_learned:
        names |= {name: name for name in POSITIONS}
    if has_last_norms:
        names |= {f"{stack}.layer_norm": f"{stack}.layer_norm" for stack in STACKS}
    layers = layer_names(
        {stack: f"{stack}.layers.*" for stack in STACKS}, {f"feed_forward.{one}": one for one in ("fc1", "fc2")}
    )
    if "encoder.layers.0.self_attn.in_proj_weight" in tensors:  # until 0.8
        layers = {ours: theirs for ours, theirs in layers.items() if not ours.endswith(("q_proj", "k_proj", "v_proj"))}
        for place in ("encoder.layers.*.self_attn", "decoder.layers.*.self_attn", "decoder.layers.*.encoder_attn"):
            layers |= {f"{place}.{{q,k,v}}_proj.{kind}": f"{place}.in_proj_{kind}" for kind in KINDS}
    if "encoder.layers.0.layer_norms.0.weight" in tensors:  # until 0.6
        for stack, norms in NORMS.items():
            layers |= {f"{stack}.layers.*.{norm}": f"{stack}.layers.*.layer_norms.{n}" for n, norm in enumerate(norms)}
    return names | layers


# ---- Dictionaries ----
def _dictionaries(folder: Path, settings: Settings) -> tuple[list[str], list[str]]:
    """Returns the tokens of source and target in the order of their ids; [] where there is no file."""
    files = [folder / f"dict.{settings.get(name)}.txt" for name in LANGUAGES]
    source, target = (dictionary(file) if file.is_file() else [] for file in files)
    if settings.get("merge_src_tgt_embed") and source and target:
        source = target = list(dict.fromkeys([*source, *target]))
    return source, target


def dictionary(file: Path) -> list[str]:
    """Reads a dict.*.txt: a token and its count per line, after the special tokens."""
    tokens = list(SPECIAL)
    known = set(tokens)
    for number, line in enumerate(read_text(file).rstrip("\n").split("\n"), 1):
        entry = line.rstrip().removesuffix(OVERWRITE)
        token, _, count = entry.rpartition(" ")
        if not count.lstrip("-").isdecimal():
            raise ConversionError(f"{file}, line {number}: {line!r} isn't a token and its count")
        if token in known and entry == line.rstrip():
            raise ConversionError(
                f"{file}, line {number}: the token {token!r} has been there before; end the line with{OVERWRITE} if "
                "it takes the earlier one's place"
            )
        known.add(token)
        tokens.append(token)
    return tokens
