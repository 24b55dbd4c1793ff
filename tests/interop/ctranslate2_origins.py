"""Small models in CTranslate2's format as each of its converters writes them, with the tokenizers of their authors."""

import json
import math
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import sentencepiece
import torch
from ctranslate2.converters import MarianConverter, OpenNMTPyConverter, TransformersConverter
from ctranslate2.converters import fairseq as of_fairseq
from ctranslate2.specs import transformer_spec

from hf_vanilla_transformer.interop.ctranslate2_files import Folder
from hf_vanilla_transformer.modeling_vanilla_transformer import sinusoidal_table
from tests.interop import test_fairseq, test_marian_npz, test_opennmt
from tests.interop.opus_mt import TEXTS, opus_mt_folder, spm_model

ALL = [*TEXTS["source"], *TEXTS["target"]]
HEADS = 3


def opus_mt(folder: Path, quantization: str | None = None, **config: object) -> Path:
    """By ct2-transformers-converter, with the files of its tokenizer; `</s>` is written by that."""
    torch.manual_seed(3)
    source = opus_mt_folder(folder / "marian", decoder_attention_heads=2, **config)
    copied = ["source.spm", "target.spm"]
    return _converted(TransformersConverter(str(source), copy_files=copied), folder, quantization)


def opennmt(
    folder: Path,
    quantization: str | None = None,
    shared: bool = True,
    tied: bool = False,
    pieces: Sequence[str] = (),
    **options: object,
) -> Path:
    """By ct2-opennmt-py-converter: pre-norm, one SentencePiece model or other pieces, sources without an end."""
    texts = {"src": ALL, "tgt": ALL} if shared else {"src": TEXTS["source"], "tgt": TEXTS["target"]}
    vocabulary = {}
    for side, own in texts.items():
        model = spm_model(own, 150)
        (folder / f"{side}.spm.model").write_bytes(model)
        vocabulary[side] = [*test_opennmt.SPECIAL, *(pieces or _pieces(model))]
    torch.manual_seed(3)
    value = test_opennmt.checkpoint(vocabulary=vocabulary, **options)
    for stack in ("encoder", "decoder"):
        value["model"][f"{stack}.embeddings.make_embedding.pe.pe"] = sinusoidal_table(600, test_opennmt.WIDTH)[:, None]
    if tied:
        one, other = (f"{stack}.embeddings.make_embedding.emb_luts.0.weight" for stack in ("encoder", "decoder"))
        value["model"][one] = value["model"][other] = value["generator"]["weight"]
    torch.save(value, folder / "model.pt")
    converter = OpenNMTPyConverter(str(folder / "model.pt"), unsafe_deserialization=True)
    made = _converted(converter, folder, quantization)
    config = json.loads((made / "config.json").read_text()) | {"layer_norm_epsilon": 1e-6}
    (made / "config.json").write_text(json.dumps(config))
    if shared:
        shutil.copy(folder / "src.spm.model", made / "sentencepiece.model")
    return made


def quickmt(folder: Path, quantization: str | None = None) -> Path:
    """The files of quickmt's repositories: two vocabularies, src.spm.model and tgt.spm.model."""
    made = opennmt(folder, quantization, shared=False, pos_ffn_activation_fn="gelu")
    for name in ("src.spm.model", "tgt.spm.model"):
        shutil.copy(folder / name, made / name)
    return made


def fairseq(folder: Path, quantization: str | None = None, **case: object) -> Path:
    """By the functions of ct2-fairseq-converter, as fairseq itself can't be installed; CTranslate2 adds `</s>`."""
    model = spm_model(ALL, 150)
    tokens = [*("<s>", "<blank>", "</s>", "<unk>"), *_pieces(model)]
    with patch.multiple(
        test_fairseq, WORDS=len(tokens), TARGET_WORDS=len(tokens), HEADS=dict.fromkeys(test_fairseq.LAYERS, HEADS)
    ):
        state = test_fairseq.tensors(case)
    is_pre = bool(case.get("encoder_normalize_before"))
    layers = tuple(test_fairseq.LAYERS.values())
    spec = transformer_spec.TransformerSpec.from_config(layers, HEADS, pre_norm=is_pre, alignment_heads=0)
    made = _tree(state)
    for stack in (made.encoder, made.decoder):
        angles = np.arange(400)[:, None] * np.exp(-np.log(10000) / 5 * np.arange(6))
        table = torch.tensor(np.hstack([np.sin(angles), np.cos(angles)]), dtype=torch.float32)
        stack.embed_positions = SimpleNamespace(weights=table, padding_idx=1)
        stack.embed_scale, stack.layernorm_embedding = np.sqrt(test_fairseq.D), None
        stack.layer_norm = getattr(stack, "layer_norm", None)
    made.decoder.project_in_dim = made.decoder.project_out_dim = None
    of_fairseq.set_transformer_encoder(spec.encoder, made.encoder)
    of_fairseq.set_transformer_decoder(spec.decoder, made.decoder)
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.decoder_start_token, spec.config.add_source_eos = "</s>", True
    spec.validate()
    spec.optimize(quantization)
    (folder / "ct2").mkdir()
    spec.save(str(folder / "ct2"))
    (folder / "ct2" / "sentencepiece.bpe.model").write_bytes(model)
    return folder / "ct2"


def marian(folder: Path, quantization: str | None = None, **options: object) -> Path:
    """By ct2-marian-converter: the decoder starts from zeros, CTranslate2 adds `</s>`."""
    model = spm_model(ALL, 150)
    tokens = ["</s>", "<unk>", *_pieces(model)]
    more = {"transformer-no-projection": False, "transformer-postprocess-emb": "d"}
    more |= {"transformer-decoder-autoreg": "self-attention", "transformer-guided-alignment-layer": "last"}
    with patch.object(test_marian_npz, "WORDS", tokens):
        arrays = test_marian_npz.arrays(**{**more, **options})
    settings = arrays["special:model.yml"].tobytes().rstrip(b"\0") + b"\0"
    np.savez(folder / "model.npz", **arrays | {"special:model.yml": np.frombuffer(settings, dtype=np.int8)})
    lines = (f"{json.dumps(token, ensure_ascii=False)}: {number}\n" for number, token in enumerate(tokens))
    (folder / "vocab.yml").write_text("".join(lines), encoding="utf-8")
    made = _converted(MarianConverter(str(folder / "model.npz"), [str(folder / "vocab.yml")]), folder, quantization)
    for name in ("source.spm", "target.spm"):
        (made / name).write_bytes(model)
    return made


def argos(
    folder: Path, quantization: str | None = "int8", codes: str = "", pieces: Sequence[str] = (), **metadata: str
) -> Path:
    """A package of Argos Translate, packed; as there, source, target and output share their embeddings.

    With subword-nmt's `codes` and their `pieces`, it has a bpe.model in place of a SentencePiece model.
    """
    made = sharpened(opennmt(folder, quantization, tied=True, pieces=pieces))
    package = folder / "translate-en_de-1_0"
    package.mkdir()
    made.rename(package / "model")
    (package / "model" / "sentencepiece.model").rename(package / "sentencepiece.model")
    if codes:
        (package / "sentencepiece.model").unlink()
        (package / "bpe.model").write_text(codes, encoding="utf-8")
    languages = {"from_code": "en", "to_code": "de", "package_version": "1.0", **metadata}
    (package / "metadata.json").write_text(json.dumps(languages))
    with zipfile.ZipFile(folder / "en_de.argosmodel", "w") as packed:
        for file in sorted(package.rglob("*")):
            packed.write(file, file.relative_to(folder))
    return folder / "en_de.argosmodel"


ORIGINS = {"opus_mt": opus_mt, "opennmt": opennmt, "fairseq": fairseq, "marian": marian, "quickmt": quickmt}


def _converted(converter: object, folder: Path, quantization: str | None) -> Path:
    return Path(converter.convert(str(folder / "ct2"), quantization=quantization))


# What random weights are multiplied by, so that translations differ, and what the end's bias is.
FACTORS = {"/attention/linear_": 1.7, "layer_norm/beta": 0.1, "bias": 0.1}
END_BIAS = 0.5


def sharpened(folder: Path) -> Path:
    """Changes a model in place: it looks at the source more than at anything that is always the same."""
    content = bytearray((folder / "model.bin").read_bytes())
    reader = Folder.read(folder)
    for name, one in {one.offset: (name, one) for name, one in reader.variables.items()}.values():
        if one.dtype in ("float32", "float16") and one.shape:
            values = np.frombuffer(content, one.dtype, math.prod(one.shape), one.offset).copy()
            for part, factor in FACTORS.items():
                is_scale = name.endswith("_scale")  # which weights are divided by
                values = values * (1 / factor if is_scale else factor) ** (part in name)
            if name == "decoder/projection/bias":
                values[reader.vocabularies[1].index("</s>")] = END_BIAS
            scaled = values.astype(one.dtype).tobytes()
            content[one.offset : one.offset + len(scaled)] = scaled
    (folder / "model.bin").write_bytes(content)
    return folder


def _pieces(model: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(number) for number in range(3, len(processor))]


def _tree(state: dict[str, torch.Tensor]) -> SimpleNamespace:
    """Objects by the names of tensors, with lists for layers."""
    top = SimpleNamespace()
    for name, value in state.items():
        *path, last = name.split(".")
        place = top
        for part in path:
            if isinstance(place, list):
                place.extend(SimpleNamespace() for _ in range(int(part) + 1 - len(place)))
                place = place[int(part)]
            else:
                vars(place).setdefault(part, [] if part == "layers" else SimpleNamespace())
                place = vars(place)[part]
        setattr(place, last, value)
        vars(place).setdefault("bias", None)
    return top
