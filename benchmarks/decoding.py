"""Decoding: translations of a forced length, by greedy search and beam search."""

import json
from collections.abc import Iterable, Sequence
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
from .floor import Floor
from .translators import CTranslate2Translator, Job, TransformersTranslator
from .work import Case, Size
from .workers import Entrant


def job_of(case: Case) -> Job:
    """Returns a case's sources, without padding, and the lengths of its translations."""
    sources = [
        [tokens[:length] for tokens, length in zip(batch.source.tolist(), batch.source_lengths.tolist(), strict=True)]
        for batch in case.batches
    ]
    return Job(sources, case.beams, [batch.new_tokens for batch in case.batches], is_forced=True)


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
    (folder / "vocabulary.json").write_text(json.dumps(words))


def convert_to_ctranslate2(marian: Path, folder: Path, compute_types: Iterable[str]) -> None:
    """Writes a Marian model in CTranslate2's format, in one folder per type."""
    converters: Any = import_module("ctranslate2.converters")
    for compute_type in compute_types:
        converters.TransformersConverter(str(marian)).convert(str(folder / compute_type), quantization=compute_type)


def environments(compute_type: str) -> dict[str, dict[str, str]]:
    """Returns variables with which CTranslate2 uses what it leaves out on some processors: AVX-512 and MKL.

    MKL's products of int8 aren't among them: on AMD's processors, they are many times slower than oneDNN's.
    """
    wide = {"CT2_FORCE_CPU_ISA": "AVX512"} if torch.backends.cpu.get_cpu_capability() == "AVX512" else {}
    variants: dict[str, dict[str, str]] = {"": {}, **({"AVX512": wide} if wide else {})}
    return variants if compute_type == "int8" else {**variants, "MKL": {"CT2_USE_MKL": "1", **wide}}


def decoding_entrants(
    peers: list[str],
    size: Size,
    cases: tuple[Case, ...],
    device: str,
    dtype: torch.dtype,
    threads: int,
    folder: Path,
    compute_types: Sequence[str] = ("int8",),
) -> list[Entrant]:
    """Returns ours, ours with `compute_types` where possible, the peers and the floor; writes models to `folder`."""
    write_models(size, folder)
    plain, jobs = str(dtype).removeprefix("torch."), {case.name: job_of(case) for case in cases}
    kinds = {"": {}, **{f", {kind}": {"compute_type": kind} for kind in compute_types}}
    if device != "cpu" or dtype != torch.float32:
        kinds = {"": {}}
    work = {"jobs": jobs, "device": device, "dtype": plain}
    ours, marian = (partial(TransformersTranslator, name, folder / name, **work) for name in ("ours", "marian"))
    entrants = [Entrant(f"ours{name}", partial(ours, **options)) for name, options in kinds.items()]
    if "marian" in peers:
        entrants.append(Entrant("marian", marian))
        entrants += [Entrant("marian, kept memory", marian, keep_freed_memory=True)] if device == "cpu" else []
    if "ctranslate2" in peers:
        types = {"ctranslate2": plain, "ctranslate2, int8": "int8"}
        convert_to_ctranslate2(folder / "marian", folder, types.values())
        files = {"vocabulary": folder / "vocabulary.json", "threads": threads, "jobs": jobs, "device": device}
        for name, kind in types.items():
            make = partial(CTranslate2Translator, folder / kind, compute_type=kind, **files)
            for label, variables in (environments(kind) if size.is_opus_mt else {"": {}}).items():
                full = f"{name}, {label}" if label else name
                entrants.append(Entrant(full, make, library="ctranslate2", environment=variables))
    return [*entrants, Entrant("floor", partial(Floor, size, cases, device, dtype))]
