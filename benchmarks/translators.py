"""Contenders in decoding. They import what they need and nothing else, as the start of their processes is measured.

The clock runs while `generate()` or `translate_batch()` does: token ids become tensors or words before that.
"""

import json
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from .workers import Timing

Ids = list[int]


class Workload(NamedTuple):
    """Batches of token ids, to be translated into at most `longest` tokens each, the end of sentence included."""

    batches: list[list[Ids]]
    beams: int  # 1 is greedy search
    longest: int
    is_forced: bool = False  # whether all translations are as long
    batch_tokens: int = 0  # of CTranslate2's own batches; 0: those above
    parallel: int = 1  # batches that CTranslate2 translates at the same time


class TransformersTranslator:
    """Marian as it comes, or ours with the engine; with `as_translator`, as `Translator` runs it.

    `decoder` is "packed" or "graph", in place of what the engine takes by itself.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        compute_type: str = "default",
        dtype: str = "float32",
        device: str = "cpu",
        as_translator: bool = False,
        attention: str = "sdpa",
        decoder: str = "",
    ) -> None:
        self.torch: Any = import_module("torch")
        self.device, self.as_translator = device, as_translator
        ours = ("hf_vanilla_transformer", "VanillaTransformerForConditionalGeneration")
        module, name = ours if kind == "ours" else ("transformers", "MarianMTModel")
        load = getattr(import_module(module), name).from_pretrained
        self.model = load(folder, dtype=dtype, attn_implementation=attention).to(device).eval()
        if kind == "ours" and attention == "sdpa":  # the engine has no other
            import_module("hf_vanilla_transformer.engine").attach(self.model, compute_type)
            import_module("benchmarks.text").use_decoder(self.model, decoder)

    def run(self, workload: Workload) -> Timing:
        """Translates all batches."""
        settings = {"num_beams": workload.beams, **self._lengths(workload)}
        work = [{**self._inputs(batch), **settings} for batch in workload.batches]
        self._synchronize()
        began = time.perf_counter()
        with self.torch.inference_mode(self.as_translator):
            outputs = [output.tolist() for output in (self.model.generate(**options) for options in work)]
        self._synchronize()
        seconds = time.perf_counter() - began
        if workload.is_forced:
            assert all(len(rows[0]) == workload.longest + 1 for rows in outputs)  # the first is the start token
        return Timing(seconds, [self._words(row, workload.is_forced) for rows in outputs for row in rows])

    def _synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def _inputs(self, batch: list[Ids]) -> dict[str, Any]:
        torch, lengths = self.torch, self.torch.tensor([len(ids) for ids in batch])
        rows, padding = [torch.tensor(ids) for ids in batch], self.model.config.pad_token_id
        source = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)
        mask = (torch.arange(source.shape[1]) < lengths[:, None]).long()
        return {"input_ids": source.to(self.device), "attention_mask": mask.to(self.device)}

    def _lengths(self, workload: Workload) -> dict[str, Any]:
        if not workload.is_forced:
            return {"max_length": workload.longest + 1}  # the start token counts
        if self.model.generation_config.forced_eos_token_id is None:
            self.model.generation_config.eos_token_id = None
            return {"max_new_tokens": workload.longest}
        return {"max_new_tokens": workload.longest, "min_new_tokens": workload.longest - 1}  # the last one is the end

    def _words(self, row: Ids, is_forced: bool) -> Ids:
        end = self.model.config.eos_token_id
        return row[1:-1] if is_forced else row[1 : row.index(end, 1) if end in row[1:] else len(row)]


class CTranslate2Translator:
    """A program that calls CTranslate2, with token ids; `ids` has those of its words, or is a JSON file with them."""

    def __init__(
        self, folder: Path, ids: dict[str, int] | Path, compute_type: str, threads: int, device: str = "cpu"
    ) -> None:
        self.library: Any = import_module("ctranslate2")
        self.settings = {"model_path": str(folder), "device": device, "compute_type": compute_type}
        self.threads = threads
        self.ids: dict[str, int] = ids if isinstance(ids, dict) else json.loads(ids.read_text(encoding="utf-8"))
        self.words = {number: word for word, number in self.ids.items()}
        self._load(1)

    def _load(self, parallel: int) -> None:
        sizes = {"inter_threads": parallel, "intra_threads": max(self.threads // parallel, 1)}
        self.parallel, self.translator = parallel, self.library.Translator(**self.settings, **sizes)

    def run(self, workload: Workload) -> Timing:
        """Translates all sentences, in the workload's batches or its own."""
        if workload.parallel != self.parallel:
            self._load(workload.parallel)
        lines = [[[self.words[number] for number in ids] for ids in batch] for batch in workload.batches]
        options: dict[str, Any] = {"beam_size": workload.beams, "max_decoding_length": workload.longest}
        if workload.is_forced:
            options["min_decoding_length"] = workload.longest
        else:  # it counts words without the end of sentence, and Marian always ends with one
            options["max_decoding_length"] = max(workload.longest - 1, 1)
        if workload.batch_tokens:
            lines = [[line for batch in lines for line in batch]]
            options |= {"max_batch_size": workload.batch_tokens, "batch_type": "tokens"}
        began = time.perf_counter()
        results = [self.translator.translate_batch(batch, **options) for batch in lines]
        seconds = time.perf_counter() - began
        rows = [result.hypotheses[0] for batch in results for result in batch]
        if workload.is_forced:
            assert all(len(row) == workload.longest for row in rows)
            rows = [row[:-1] for row in rows]
        return Timing(seconds, [[self.ids[word] for word in row] for row in rows])


class Command:
    """A command that runs in a process of its own. This one is small: a child's peak begins with its parent's."""

    def __init__(self, *arguments: str) -> None:
        self.arguments = arguments

    def run(self) -> tuple[float, int]:
        """Returns the seconds from the start to the end of the process, and its peak memory in bytes."""
        began = time.perf_counter()
        process = subprocess.Popen(self.arguments, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{self.arguments} ended with exit code {process.returncode}")
        return seconds, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
