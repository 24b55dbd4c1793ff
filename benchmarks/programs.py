"""Complete programs that translate a file: start-up, loading, translation and output, all that a user waits for."""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, MarianConfig, MarianMTModel

from . import models
from .report import describe_machine
from .work import BenchmarkError

# A minimal program that translates with CTranslate2; like ours, it batches lines and keeps their order.
CTRANSLATE2 = """
import sys
import ctranslate2
from tokenizers import Tokenizer
folder, compute_type, beams, longest, threads = sys.argv[1:]
tokenizer = Tokenizer.from_file(folder + "/marian/tokenizer.json")
settings = {"compute_type": compute_type, "intra_threads": int(threads)}
model = ctranslate2.Translator(folder + "/" + compute_type, "cpu", **settings)
text = sys.stdin.buffer.read().decode().removesuffix("\\n").split("\\n")
lines = [encoding.tokens for encoding in tokenizer.encode_batch(text)]
options = {"beam_size": int(beams), "max_decoding_length": int(longest), "length_penalty": 0.0}
for result in model.translate_batch(lines, max_batch_size=2048, batch_type="tokens", **options):
    ids = map(tokenizer.token_to_id, result.hypotheses[0])
    print(tokenizer.decode([id for id in ids if id is not None]))
"""


@dataclass
class Programs:
    """How long programs took to translate a file.

    Attributes:
        settings: Of the run.
        sentences: Number of lines in the file.
        seconds: Program -> seconds of each round.
        different: Program -> number of lines that differ from ours in float32.
        machine: The machine and the versions.
    """

    settings: dict[str, Any]
    sentences: int
    seconds: dict[str, list[float]]
    different: dict[str, int]
    machine: dict[str, Any] = field(default_factory=describe_machine)

    def to_json(self) -> str:
        """Returns all fields as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __str__(self) -> str:
        lines = [f"translate: {self.sentences:,} sentences", ", ".join(f"{k} {v}" for k, v in self.settings.items())]
        lines += [f"on {', '.join(f'{k} {v}' for k, v in self.machine.items())}", ""]
        width = max(map(len, self.seconds))
        lines.append(f"{'':{width}}  seconds   from     to  sentences/s  other lines")
        for name, seconds in self.seconds.items():
            median = statistics.median(seconds)
            figures = f"{median:7.2f}{min(seconds):7.2f}{max(seconds):7.2f}{self.sentences / median:13.1f}"
            lines.append(f"{name:{width}}  {figures}{self.different[name]:13,}")
        return "\n".join(lines)


def measure_programs(
    model: str,
    file: Path,
    beams: int,
    longest: int,
    rounds: int,
    threads: int,
    peers: Sequence[str],
    say: Any,
    compute_types: Sequence[str] = ("int8",),
) -> Programs:
    """Lets programs translate a file in turns, after a warm-up turn.

    Args:
        model: A checkpoint's folder.
        file: One sentence per line.
        beams: Beam size; scores are log-probabilities without a length penalty, as the formulas differ.
        longest: Most tokens of a translation.
        rounds: Timed turns of each program.
        threads: Threads of each program.
        peers: "ctranslate2" or nothing.
        say: Is called with progress messages.
        compute_types: Compute types of ours, in addition to the default.

    Raises:
        BenchmarkError: The file is missing or empty, or a program fails.
    """
    if not file.is_file() or not (sentences := len(_lines(file.read_bytes()))):
        raise BenchmarkError(f"--input {file} has no lines; give a file with one sentence per line")
    options = ["--num-beams", beams, "--max-new-tokens", longest]
    if beams > 1:  # as CTranslate2 searches
        options += ["--length-penalty", 0, "--coverage-penalty", 0, "--early-stopping", "true"]
    ours = [sys.executable, "-m", "hf_vanilla_transformer", "translate", "--model", model, *options, "--device", "cpu"]
    commands = {"ours": ours}
    commands |= {f"ours, {kind}": [*ours, "--compute-type", kind] for kind in compute_types}
    with tempfile.TemporaryDirectory() as folder:
        if "ctranslate2" in peers:
            say("converting for ctranslate2")
            convert(model, Path(folder), ("float32", "int8"))
            for name, compute_type in {"ctranslate2": "float32", "ctranslate2, int8": "int8"}.items():
                settings = [folder, compute_type, beams, longest, threads]
                commands[name] = [sys.executable, "-c", CTRANSLATE2, *settings]
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        outputs: dict[str, list[str]] = {}
        for number in range(rounds + 1):
            for name, command in commands.items():
                say(f"round {number} of {rounds}, {name}" if number else f"warming up {name}")
                took, outputs[name] = _run(command, file, threads)
                if number:
                    seconds[name].append(took)
    pairs = {name: zip(lines, outputs["ours"], strict=True) for name, lines in outputs.items()}
    different = {name: sum(one != other for one, other in both) for name, both in pairs.items()}
    given = {"model": Path(model).name, "input": file.name, "beams": beams, "longest": longest, "rounds": rounds}
    return Programs({**given, "threads": threads}, sentences, seconds, different)


def _run(command: Sequence[Any], file: Path, threads: int) -> tuple[float, list[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with file.open("rb") as lines:
        began = time.perf_counter()
        done = subprocess.run(list(map(str, command)), stdin=lines, capture_output=True, env=environment, check=False)
        took = time.perf_counter() - began
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise BenchmarkError(f"a program failed: {said[-1] if said else f'exit status {done.returncode}'}")
    return took, _lines(done.stdout)


def _lines(text: bytes) -> list[str]:
    return text.decode().removesuffix("\n").split("\n") if text else []


def convert(model: str, folder: Path, compute_types: Sequence[str]) -> None:
    """Converts a checkpoint of ours to CTranslate2's format through Marian, in one folder per type.

    Args:
        model: The checkpoint's folder.
        folder: Where the results are written.
        compute_types: CTranslate2's types, "float32" or "int8".

    Raises:
        BenchmarkError: Marian doesn't support such a model.
    """
    ours = AutoModelForSeq2SeqLM.from_pretrained(model).eval()
    marian_of(ours).save_pretrained(folder / "marian")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "marian")
    transformers: Any = import_module("ctranslate2.converters.transformers")
    bart = transformers.BartLoader

    class Loader(transformers.MarianMTLoader):  # type: ignore[misc, name-defined]
        """CTranslate2's loader for Marian, with our positions, padding and start token."""

        _remove_pad_weights: Callable[..., None] = staticmethod(lambda spec: None)
        set_decoder = bart.set_decoder

        def get_vocabulary(self, model: Any, tokenizer: Any) -> list[str]:
            known: list[str] = bart.get_vocabulary(self, model, tokenizer)
            return [*known, *(f"<unused {number}>" for number in range(len(known), model.config.vocab_size))]

        def set_position_encodings(self, spec: Any, module: Any) -> None:
            spec.encodings = ours.get_encoder().embed_positions.table.numpy()

        def set_config(self, config: Any, model: Any, tokenizer: Any) -> None:
            bart.set_config(self, config, model, tokenizer)
            config.layer_norm_epsilon = ours.config.layer_norm_eps
            config.unk_token = tokenizer.pad_token  # required, though ours has none

    known = transformers._MODEL_LOADERS
    before = known["MarianConfig"]
    known["MarianConfig"] = Loader()
    try:
        converter = transformers.TransformersConverter(str(folder / "marian"))
        for compute_type in compute_types:
            converter.convert(str(folder / compute_type), quantization=compute_type)
    finally:
        known["MarianConfig"] = before


MARIAN_FIELDS = ("vocab_size", "d_model", "encoder_layers", "decoder_layers", "activation_function")
MARIAN_FIELDS += ("encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim")
MARIAN_FIELDS += ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "scale_embedding")


def marian_of(ours: Any) -> MarianMTModel:
    """Returns Marian with the weights of a checkpoint of ours, with zeros for biases that ours lacks; positions differ.

    Raises:
        BenchmarkError: Marian doesn't support such a model.
    """
    config = ours.config
    one_matrix = config.tie_word_embeddings and config.share_encoder_decoder_embeddings
    heads = (config.encoder_attention_heads, config.decoder_attention_heads)
    widths = {number * width for number in heads for width in (config.head_dim, config.value_head_dim)}
    is_usual = config.norm_position == "post" and config.position_encoding != "learned" and widths == {config.d_model}
    if not one_matrix or not is_usual:
        raise BenchmarkError(
            "--model must be post-norm with sinusoids, one matrix for all embeddings and d_k = d_v = d_model / h; "
            "Marian doesn't support others"
        )
    fields = {name: getattr(config, name) for name in MARIAN_FIELDS}
    marian = MarianMTModel(MarianConfig(**fields, forced_eos_token_id=None)).eval()
    with torch.no_grad():
        for parameter in marian.parameters():
            if parameter.ndim == 1:
                parameter.zero_()
    unknown, _ = models.load_ours_into_marian(ours, marian)
    if unknown:
        raise BenchmarkError(f"--model has weights that Marian lacks: {', '.join(unknown)}")
    return marian
