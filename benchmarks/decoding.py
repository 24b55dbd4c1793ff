"""Contenders in decoding, and what they have in common: the models, and translations of a forced length."""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_vanilla_transformer.interop.marian import from_marian

from . import models
from .translators import CTranslate2Translator, TransformersTranslator, Workload
from .work import Case, Size
from .workers import Entrant

Variants = Mapping[str, Mapping[str, str]]  # of this package: name -> options of TransformersTranslator


def workload_of(case: Case) -> Workload:
    """Returns a case's sources and the length of its translations."""
    return Workload([batch.sources for batch in case.batches], case.beams, case.new_tokens, is_forced=True)


def write_models(size: Size, folder: Path) -> None:
    """Saves Marian with a tokenizer with tokens such as "t17", and ours with the same weights, each in its folder."""
    marian = models.marian_to_decode(size)
    from_marian(marian)[0].save_pretrained(folder / "ours")
    marian.save_pretrained(folder / "marian")
    special = {"</s>": models.END, "<pad>": size.pad}
    words = special | {f"t{token}": token for token in range(size.vocab_size) if token not in special.values()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token=f"t{models.UNKNOWN}")),
        eos_token="</s>",
        unk_token=f"t{models.UNKNOWN}",
        pad_token="<pad>",
    )
    tokenizer.save_pretrained(folder / "marian")
    (folder / "marian" / "vocab.json").write_text(json.dumps(words))


def convert_to_ctranslate2(marian: Path, folder: Path, compute_type: str) -> Path:
    """Writes a Marian model in CTranslate2's format, and returns where."""
    converters: Any = import_module("ctranslate2.converters")
    converter = converters.TransformersConverter(str(marian))
    return Path(converter.convert(str(folder / compute_type), quantization=compute_type))


def environments(compute_type: str) -> list[dict[str, str]]:
    """Returns variables with which CTranslate2 uses what it leaves out on some processors: AVX-512 and MKL.

    MKL's products of int8 aren't among them: on AMD's processors, they are many times slower than oneDNN's.
    """
    wide = {"CT2_FORCE_CPU_ISA": "AVX512"} if torch.backends.cpu.get_cpu_capability() == "AVX512" else {}
    variants: list[dict[str, str]] = [{}, wide] if wide else [{}]
    return variants if compute_type == "int8" else [*variants, {"CT2_USE_MKL": "1", **wide}]


def decoding_entrants(
    marian: Path,
    folder: Path,
    peers: Iterable[str],
    variants: Variants,
    threads: int,
    device: str = "cpu",
    dtype: str = "float32",
    is_real: bool = False,
) -> list[Entrant]:
    """Returns Marian, ours with the default options and with each of `variants`, and CTranslate2, of one model.

    `folder` has the model of `marian` in "ours", and gets CTranslate2's models. With `is_real`,
    each is used as for files: ours by `Translator` with kept memory, and CTranslate2 also tuned.
    """
    transformers = partial(TransformersTranslator, dtype=dtype, device=device)
    entrants: list[Entrant] = []
    if "marian" in peers:
        make = partial(transformers, "marian", marian)
        kept = [] if is_real or device != "cpu" else [Entrant("marian, kept memory", make, keep_freed_memory=True)]
        entrants += [Entrant("marian", make), *kept]
    for name, options in {"ours": {}, **variants}.items():
        make = partial(transformers, "ours", folder / "ours", **options, as_translator=is_real)
        entrants.append(Entrant(name, make, is_real))
    second = "int8" if device == "cpu" else "float16"
    kinds = {"ctranslate2": dtype, f"ctranslate2, {second}": second}
    for name, kind in kinds.items() if "ctranslate2" in peers else ():
        converted = convert_to_ctranslate2(marian, folder, kind)
        peer = partial(CTranslate2Translator, converted, marian / "vocab.json", kind, threads, device)
        entrants += [Entrant(one, peer) for one in (name, f"{name}, tuned")[: 1 + is_real]]
    return entrants
