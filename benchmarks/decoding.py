"""Contenders in decoding: translations of a forced length, by greedy search and beam search."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration, engine

from . import models
from .floor import DecodingFloor
from .work import Batch, Case, Size
from .workers import Entrant, Facts, Timing, synchronize

Translate = Callable[[Any, int, int], list[list[int]]]  # prepared batch, beams, new tokens


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
        self.model.generation_config.eos_token_id = None
        self.options = {"compute_type": self.compute_type} if self.compute_type else {}
        self.cases = {case.name: (case, [self._prepare(batch) for batch in case.batches]) for case in cases}

    def _prepare(self, batch: Batch) -> dict[str, Any]:
        return {name: value for name, value in batch.tensors(self.device).items() if name != "labels"}

    def facts(self, case: str = "") -> Facts:
        """Its parameters."""
        note = ", ".join(["generate()", *(f"{name}={value!r}" for name, value in self.options.items())])
        in_dtype = self.compute_type != "int8"
        return Facts(models.count_parameters(self.model), note=note, has_memory=True, in_dtype=in_dtype)

    def run(self, case: str) -> Timing:
        """Translates all batches of a case."""
        work, batches = self.cases[case]
        began = time.perf_counter()
        for batch in batches:
            output = self._generate(batch, work.beams, work.new_tokens)
            assert output.shape[1] == work.new_tokens + 1, output.shape  # the first token is the start token
        synchronize(self.device)
        return Timing(time.perf_counter() - began, work.tokens)

    def _generate(self, batch: dict[str, Any], beams: int, new_tokens: int) -> torch.Tensor:
        return self.model.generate(**batch, num_beams=beams, max_new_tokens=new_tokens, **self.options)

    def translations(self, case: str) -> list[list[int]]:
        """Translates the first batch of a case."""
        work, batches = self.cases[case]
        return self._generate(batches[0], work.beams, work.new_tokens)[:, 1:].tolist()


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
        began = time.perf_counter()
        for batch in batches:
            translations = self._translate(batch, work.beams, work.new_tokens)
            assert all(len(words) == work.new_tokens for words in translations), translations
        return Timing(time.perf_counter() - began, work.tokens)

    def _translate(self, batch: list[list[str]], beams: int, new_tokens: int) -> list[list[str]]:
        results = self.translator.translate_batch(
            batch, beam_size=beams, min_decoding_length=new_tokens, max_decoding_length=new_tokens
        )
        return [result.hypotheses[0] for result in results]

    def translations(self, case: str) -> list[list[int]]:
        """Translates the first batch of a case."""
        work, batches = self.cases[case]
        translations = self._translate(batches[0], work.beams, work.new_tokens)
        return [[int(word.removeprefix("t")) for word in words] for words in translations]


def _words(batch: Batch) -> list[list[str]]:
    pairs = zip(batch.source.tolist(), batch.source_lengths.tolist(), strict=True)
    return [[f"t{token}" for token in tokens[:length]] for tokens, length in pairs]


def write_models(size: Size, folder: Path, with_marian: bool) -> None:
    """Saves ours, and Marian with the same weights and a tokenizer with tokens such as "t17", each in its folder."""
    ours = models.vanilla_to_decode(size)
    ours.save_pretrained(folder / "ours")
    if not with_marian:
        return
    models.marian_like(size, ours).save_pretrained(folder / "marian")
    special = {"</s>": models.END, "<unk>": models.UNKNOWN, "<pad>": size.pad}
    words = special | {f"t{token}": token for token in range(size.vocab_size) if token not in special.values()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
    )
    tokenizer.save_pretrained(folder / "marian")


def convert_to_ctranslate2(folder: Path, compute_types: Sequence[str]) -> None:
    """Writes the Marian model of `write_models` in CTranslate2's format, in one folder per type."""
    converters: Any = import_module("ctranslate2.converters")
    for compute_type in compute_types:
        converter = converters.TransformersConverter(str(folder / "marian"))
        converter.convert(str(folder / compute_type), quantization=compute_type)


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
    write_models(size, folder, with_marian=bool(peers))
    work = {"cases": cases, "device": device, "dtype": dtype}
    has_types = device == "cpu" and dtype == torch.float32
    names = ["ours", *(f"ours, {kind}" for kind in compute_types if has_types)]
    names += ["marian"] if "marian" in peers else []
    entrants = [Entrant(name, partial(TransformersDecoder, name, folder, **work)) for name in names]
    if "ctranslate2" in peers:
        plain = str(dtype).removeprefix("torch.")
        types = {"ctranslate2": plain, "ctranslate2, int8": "int8"}
        convert_to_ctranslate2(folder, list(types.values()))
        converted = {"cases": cases, "device": device, "folder": folder, "threads": threads}
        entrants += [
            Entrant(name, partial(CTranslate2Decoder, **converted, compute_type=compute_type), library="ctranslate2")
            for name, compute_type in types.items()
        ]
    return [*entrants, Entrant("floor", partial(DecodingFloor, size, **work))]
