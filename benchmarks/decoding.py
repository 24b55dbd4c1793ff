"""Contenders in decoding: translations of a forced length, by greedy search and beam search."""

import time
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration, engine
from hf_vanilla_transformer.interop.marian import from_marian

from . import models
from .floor import DecodingFloor
from .work import Batch, Case, Size
from .workers import Entrant, Facts, Timing, synchronize


class TransformersDecoder:
    """A model for transformers, ours included, with its `generate()`.

    Args:
        name: "marian", "ours", or "ours, " and a `compute_type`.
        folder: The output of `write_models`.
        cases: What can be run.
        device: "cpu" or "cuda".
        dtype: Of the weights.
    """

    def __init__(self, name: str, folder: Path, cases: tuple[Case, ...], device: str, dtype: torch.dtype) -> None:
        self.device, (name, _, self.compute_type) = device, name.partition(", ")
        self.model = models.load(name, folder, dtype).to(device).eval()
        if isinstance(self.model, VanillaTransformerForConditionalGeneration):
            engine.freeze(self.model)  # as the commands do
        if self.model.generation_config.forced_eos_token_id is None:
            self.model.generation_config.eos_token_id = None
        self.options = {"compute_type": self.compute_type} if self.compute_type else {}
        self.cases = {case.name: (case, [self._prepare(batch) for batch in case.batches]) for case in cases}

    def _prepare(self, batch: Batch) -> dict[str, Any]:
        return {name: value for name, value in batch.tensors(self.device).items() if name != "labels"}

    def facts(self, case: str = "") -> Facts:
        """Its parameters."""
        note = ", ".join(["generate()", *(f"{name}={value!r}" for name, value in self.options.items())])
        in_dtype = self.compute_type != "int8"
        bias = getattr(getattr(self.model, "lm_head", None), "bias", None)  # Marian's is a constant
        alone = {} if bias is None else {"output bias": bias.numel()}
        return Facts(models.count_parameters(self.model), alone, note, has_memory=True, in_dtype=in_dtype)

    def run(self, case: str) -> Timing:
        """Translates all batches of a case."""
        work, batches = self.cases[case]
        outputs = []
        began = time.perf_counter()
        for batch, inputs in zip(work.batches, batches, strict=True):
            outputs.append(self._generate(inputs, work.beams, batch.new_tokens))
            assert outputs[-1].shape[1] == batch.new_tokens + 1, outputs[-1].shape  # the first is the start token
        synchronize(self.device)
        seconds = time.perf_counter() - began
        return Timing(seconds, work.tokens, [row for output in outputs for row in output[:, 1:-1].tolist()])

    def _generate(self, inputs: dict[str, Any], beams: int, new_tokens: int) -> torch.Tensor:
        forced = {"max_new_tokens": new_tokens}
        if self.model.generation_config.eos_token_id is not None:  # the last token is forced to be it
            forced["min_new_tokens"] = new_tokens - 1
        return self.model.generate(**inputs, num_beams=beams, **forced, **self.options)


class CTranslate2Decoder:
    """CTranslate2 with Marian's weights.

    Args:
        cases: What can be run.
        device: "cpu" or "cuda".
        folder: The output of `convert_to_ctranslate2`.
        compute_type: "float32", "int8" ...
        threads: Number of threads; None: as many as torch uses.
    """

    def __init__(
        self, cases: tuple[Case, ...], device: str, folder: Path, compute_type: str, threads: int | None
    ) -> None:
        library: Any = import_module("ctranslate2")
        self.compute_type = compute_type
        self.translator = library.Translator(
            str(folder / compute_type),
            device,
            compute_type=compute_type,
            intra_threads=threads or torch.get_num_threads(),
        )
        self.cases = {case.name: (case, [_words(batch) for batch in case.batches]) for case in cases}

    def facts(self, case: str = "") -> Facts:
        """It has the parameters of the model that it was converted from."""
        is_int8 = self.compute_type == "int8"
        return Facts(note=f"compute_type={self.compute_type!r}", has_memory=True, in_dtype=not is_int8)

    def run(self, case: str) -> Timing:
        """Translates all batches of a case."""
        work, batches = self.cases[case]
        outputs = []
        began = time.perf_counter()
        for batch, words in zip(work.batches, batches, strict=True):
            forced = {"min_decoding_length": batch.new_tokens, "max_decoding_length": batch.new_tokens}
            results = self.translator.translate_batch(words, beam_size=work.beams, **forced)
            outputs += [result.hypotheses[0] for result in results]
            assert all(len(words) == batch.new_tokens for words in outputs[-len(results) :]), outputs
        seconds = time.perf_counter() - began
        tokens = [[int(word.removeprefix("t")) for word in words[:-1]] for words in outputs]
        return Timing(seconds, work.tokens, tokens)


def _words(batch: Batch) -> list[list[str]]:
    pairs = zip(batch.source.tolist(), batch.source_lengths.tolist(), strict=True)
    return [[f"t{token}" for token in tokens[:length]] for tokens, length in pairs]


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


def convert_to_ctranslate2(marian: Path, folder: Path, compute_types: Iterable[str]) -> None:
    """Writes a Marian model in CTranslate2's format, in one folder per type."""
    converters: Any = import_module("ctranslate2.converters")
    for compute_type in compute_types:
        converter = converters.TransformersConverter(str(marian))
        converter.convert(str(folder / compute_type), quantization=compute_type)


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
    threads: int | None,
    folder: Path,
    compute_types: Sequence[str] = ("int8",),
) -> list[Entrant]:
    """Returns ours, ours with `compute_types` where possible, the peers and the floor; writes models to `folder`."""
    write_models(size, folder)
    work = {"cases": cases, "device": device, "dtype": dtype}
    has_types = device == "cpu" and dtype == torch.float32
    names = ["ours", *(f"ours, {kind}" for kind in compute_types if has_types)]
    names += ["marian"] if "marian" in peers else []
    entrants = [Entrant(name, partial(TransformersDecoder, name, folder, **work)) for name in names]
    if "ctranslate2" in peers:
        plain = str(dtype).removeprefix("torch.")
        types = {"ctranslate2": plain, "ctranslate2, int8": "int8"}
        convert_to_ctranslate2(folder / "marian", folder, types.values())
        converted = {"cases": cases, "device": device, "folder": folder, "threads": threads}
        for name, kind in types.items():
            make = partial(CTranslate2Decoder, **converted, compute_type=kind)
            for label, variables in (environments(kind) if size.is_opus_mt else {"": {}}).items():
                full = f"{name}, {label}" if label else name
                entrants.append(Entrant(full, make, library="ctranslate2", environment=variables))
    return [*entrants, Entrant("floor", partial(DecodingFloor, size, **work))]
