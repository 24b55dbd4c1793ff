"""The decoder's step as machine code, for `compute_type="compiled"`.

With few rows, a step of a small model spends most of its time on calling operators. PyTorch's ahead-of-time compiler
makes one function of all of them, with weights packed for its own matrix products. Two programs are made where they are
needed, one for few rows and one for many; each takes half a minute the first time and is kept in a folder of the user's
own (`program_cache`), for the next process to load. Where that isn't possible, steps are computed without compiling.
"""

import hashlib
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging

from .. import torch_private
from ..cpu import CPU
from ..program_cache import (
    OTHER_FOLDER,
    UnusableFolderError,
    discard,
    keep,
    kept_programs,
    programs_folder,
    workspace,
)
from .incremental import IncrementalDecoder
from .weights import Weights, through_layers

logger = logging.get_logger(__name__)

# Weights become constants, which can be packed.
CONSTANT_WEIGHTS = {"freezing": True}
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "few": {**CONSTANT_WEIGHTS, "max_autotune": True, "max_autotune_gemm_backends": "CPP"},
    "many": CONSTANT_WEIGHTS,
}

# Precompiled headers lie below the temporary directory, whatever `TORCHINDUCTOR_CACHE_DIR` says.
NO_SHARED_HEADERS = {"aot_inductor.precompile_headers": False, "cpp_cache_precompile_headers": False}

# Sizes of the inputs that a program is made with. It takes any others, but is chosen to be fast for these; no two are
# alike, so that the exporter doesn't take one for another, and none is 1, which it would take for a constant.
SENTENCES = {"few": 2, "many": 32}
BEAMS, POSITIONS, ROOM, SOURCE_LENGTH, ROWS_OF_ROOM = 4, 12, 40, 14, 200

Program = Callable[[list[Tensor]], list[Tensor]]

# One compilation at a time, as it changes the environment.
_lock = threading.RLock()


class NoCompilerError(RuntimeError):
    """There is no C++ compiler."""


class DecoderStep(nn.Module):
    """`IncrementalDecoder.step` as a function of tensors alone.

    Args:
        weights: The model's, prepared as "compiled".
    """

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.stack, self.lm_head = weights.decoder, weights.lm_head

    def forward(
        self,
        tokens: Tensor,
        table: Tensor,
        position: Tensor,
        so_far: Tensor,
        past: Tensor,
        memory_keys: Tensor,
        memory_values: Tensor,
        memory_bias: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Advances by one position, with k rows for each of B sentences.

        Args:
            tokens: The tokens at this position, (B, k).
            table: Of embeddings, (V', d_model); the model's own, as a copy of it would take much memory.
            position: The position's own embedding, (1, d_model).
            so_far: A number for each position up to this one, (T,); only how many they are is looked at.
            past: Keys and values of all layers, (layers, T or more, B k or more, h d_k + h d_v). This step's are
                written to it.
            memory_keys: (layers, B or more, h, S, d_k).
            memory_values: (layers, B or more, h, S, d_v).
            memory_bias: Added to the scores, (B, h, S).

        Returns:
            Logits of the next tokens, (B k, V), and the mean of what the last layer's heads attend to, (B k, S).
        """
        stack, (sentences, beams), length = self.stack, tokens.shape, so_far.shape[0]
        rows = sentences * beams
        row, now = torch.arange(rows), torch.full((rows,), length - 1)
        shares_of_memory: list[Tensor] = []  # of each layer, (B, k, h, S)

        def attend_to_past(number: int, x: Tensor) -> Tensor:
            query, new = stack.layers[number].qkv(x).split_with_sizes([stack.qkv_sizes[0], past.shape[-1]], dim=-1)
            # By index, and not to a view of it: for that, the compiler would copy all of it.
            past.index_put_((torch.full((rows,), number), now, row), new)
            parts = past[number, :length, :rows].split_with_sizes(stack.qkv_sizes[1:], dim=-1)
            keys, values = (part.view(length, rows, stack.heads, -1).permute(1, 2, 0, 3) for part in parts)
            # Sums in place of small matrix products, which would be one call each.
            shares = (query.view(rows, stack.heads, 1, -1) * keys).sum(dim=-1).softmax(dim=-1)  # (rows, h, T)
            return (shares[..., None] * values).sum(dim=-2).flatten(1)

        def attend_to_memory(number: int, x: Tensor, residual: Tensor) -> Tensor:
            layer = stack.layers[number]
            query = layer.cross_query(x).view(sentences, beams, stack.heads, 1, -1)
            scores = (query * memory_keys[number, :sentences, None]).sum(dim=-1) + memory_bias[:, None]
            shares_of_memory.append(scores.softmax(dim=-1))
            heads = (shares_of_memory[-1][..., None] * memory_values[number, :sentences, None]).sum(dim=-2)
            return layer.cross_out(heads.view(rows, -1), residual)

        x = F.embedding(tokens.flatten(), table) * stack.scale + position
        logits = self.lm_head(through_layers(stack, x, attend_to_past, attend_to_memory))
        return logits, shares_of_memory[-1].mean(dim=2).flatten(0, 1)


class CompiledDecoder(IncrementalDecoder):
    """An `IncrementalDecoder` whose steps are machine code; where there can't be any, it is one without.

    Args:
        weights: Of a float32 model on a CPU, prepared as "compiled".
        memory: As of `IncrementalDecoder`, like all others.
        memory_mask: Likewise.
        beams: Likewise.
        keep_attention: Likewise.

    Raises:
        RuntimeError: There is no C++ compiler.
    """

    def __init__(
        self,
        weights: Weights,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        beams: int = 1,
        keep_attention: bool = False,
    ) -> None:
        self.program = program_of(weights, beams * len(memory))
        self.can_fold = self.program is None
        super().__init__(weights, memory, memory_mask, beams, keep_attention)
        if self.program is not None and self.memory_bias is None:
            self.memory_bias = memory.new_zeros(len(memory), self.weights.heads, memory.shape[1])

    def _view(self) -> None:
        if self.program is None:  # it needs no views of its caches
            super()._view()

    def step(self, tokens: Tensor) -> Tensor:
        """As `IncrementalDecoder.step`: logits, (rows, V), of what follows `tokens`, (rows,)."""
        if self.program is None:
            return super().step(tokens)
        stack, sentences = self.weights, self.num_sentences
        self._make_room()
        table, so_far = stack.embed_tokens.weight, tokens.new_empty(self.length)
        inputs = [tokens.view(sentences, -1), table, self._position(), so_far]
        caches = [self.past, self.memory_keys, self.memory_values, self.memory_bias[:sentences]]  # type: ignore[index]
        logits, attention = self.program(inputs + caches)
        if self.keep_attention:
            self.attention = attention
        return logits


def program_of(weights: Weights, rows: int) -> Program | None:
    """Returns the program for a batch: that of the last call, one that was kept, or a new one.

    Args:
        weights: Prepared as "compiled".
        rows: Rows of the batch at most.

    Returns:
        The program; None: there can't be one, and a warning has said why.

    Raises:
        RuntimeError: There is no C++ compiler.
    """
    kind = "few" if rows <= CPU.rows_for_compiled_products else "many"
    key = f"{kind}-{torch.get_num_threads()}"  # how work is shared among threads is part of a program
    with _lock:
        if key not in weights.programs:
            # Not as part of what the caller records, casts or tests with fake tensors.
            with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
                weights.programs[key] = _load_or_compile(weights, kind)
    program: Program | None = weights.programs[key]
    return program


def _load_or_compile(weights: Weights, kind: str) -> Program | None:
    name = f"{kind}-{_fingerprint(weights, kind)}"
    try:
        _check_torch(torch_private.RUNNER)
        folder = programs_folder()
        return _load_kept(folder, name) or _make(weights, kind, folder, name)
    except UnusableFolderError as error:
        logger.warning_once(f'`compute_type="compiled"` decodes without compiling, which is slower: {error}.')
        return None


def _check_torch(*paths: str) -> None:
    """Checks that torch has private functions.

    Raises:
        UnusableFolderError: It lacks one.
    """
    if (path := torch_private.missing(*paths)) is not None:
        raise UnusableFolderError(f"torch {torch.__version__} lacks {path}; install torch 2.13")


def _load_kept(folder: Path, name: str) -> Program | None:
    for path in kept_programs(folder, name):
        try:
            return _load(path)
        except Exception as error:  # whatever another machine's program makes of the loader
            discard(path, f"can't be loaded ({_cause(error)})")
    return None


def _make(weights: Weights, kind: str, folder: Path, name: str) -> Program:
    """Compiles a program, moves it to where programs are kept, and loads it.

    Raises:
        NoCompilerError: There is no C++ compiler.
        UnusableFolderError: The folder can't be written or is full, or the compiler fails or is missing in torch.
    """
    _check_torch(torch_private.COMPILE, torch_private.CLEAR_CACHES)  # here, as to look for them takes seconds
    size = f"{'up to' if kind == 'few' else 'more than'} {CPU.rows_for_compiled_products} hypotheses at a time"
    try:
        with workspace(folder) as temporary:
            with _compiler_files_in(temporary):
                _check_compiler()
                logger.warning(f"Compiling the decoder for {size}: half a minute or longer, once for this model.")
                library = _compile(weights, kind, temporary)
            path = keep(library, folder, name)
        return _load(path)
    except NoCompilerError:
        raise
    except OSError as error:
        reason = f"{folder} can't be written ({_cause(error)}); give permission or make room there"
        raise UnusableFolderError(f"{reason}, or {OTHER_FOLDER}") from error
    except Exception as error:  # whatever the compiler raises: it may have found the disk full
        reason = f"compiling in {folder} failed ({_cause(error)}); repair the C++ compiler or make room there"
        raise UnusableFolderError(f"{reason}, or {OTHER_FOLDER}") from error


def _load(path: Path) -> Program:
    return torch_private.load_program(path)


@contextmanager
def _compiler_files_in(folder: Path) -> Iterator[None]:
    """Has PyTorch's compiler keep its files, some of which it runs, in a folder that only the user may write.

    By default it keeps them below the temporary directory, under a name that others can guess.
    """
    variable = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(variable)
    os.environ[variable] = str(folder)
    try:
        torch_private.clear_compiler_caches()  # of files elsewhere
        try:
            yield
        finally:
            torch_private.clear_compiler_caches()  # of files that will be removed
    finally:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before


def _check_compiler() -> None:
    """Checks that there is a C++ compiler.

    Raises:
        NoCompilerError: PyTorch finds none.
    """
    try:
        torch_private.check_cpp_compiler()
    except Exception as error:
        raise NoCompilerError(
            f'`compute_type="compiled"` needs a C++ compiler that PyTorch can use, and {type(error).__name__} was '
            f"raised ({_cause(error)}); install g++ or clang, name it in the environment variable CXX, or leave "
            '`compute_type` at "default".'
        ) from error


def _compile(weights: Weights, kind: str, folder: Path) -> Path:
    """Compiles a program into a library in a folder."""
    any_size = torch.export.Dim.DYNAMIC
    memory = {1: any_size, 3: any_size}
    tokens, so_far, past = {0: any_size, 1: any_size}, {0: any_size}, {1: any_size, 2: any_size}
    bias = {0: any_size, 2: any_size}
    dynamic: Any = (tokens, {}, {}, so_far, past, memory, memory, bias)
    library, examples = folder / "program.so", _examples(weights, kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(DecoderStep(weights), examples, dynamic_shapes=dynamic)
        options = {**COMPILER_OPTIONS[kind], **NO_SHARED_HEADERS, "aot_inductor.output_path": str(library)}
        torch_private.compile_program(exported.module(), examples, options)
    return library


def _cause(error: Exception) -> str:
    """Returns the line that tells most: of a C++ compiler's output, the first error."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = (line for line in lines if re.search(r"\berror: ", line, re.IGNORECASE))
    return next(errors, lines[0] if lines else type(error).__name__)


def _examples(weights: Weights, kind: str) -> tuple[Tensor, ...]:
    """Makes inputs of `DecoderStep`."""
    stack, sentences = weights.decoder, SENTENCES[kind]
    heads, layers = stack.heads, len(stack.layers)
    return (
        torch.zeros(sentences, BEAMS, dtype=torch.long),
        stack.embed_tokens.weight.detach(),
        torch.zeros(1, stack.embed_tokens.weight.shape[1]),
        torch.zeros(POSITIONS, dtype=torch.long),
        torch.zeros(layers, ROOM, ROWS_OF_ROOM, sum(stack.qkv_sizes[1:])),
        torch.zeros(layers, sentences + 1, heads, SOURCE_LENGTH, stack.key_dim),
        torch.zeros(layers, sentences + 1, heads, SOURCE_LENGTH, stack.value_dim),
        torch.zeros(sentences, heads, SOURCE_LENGTH),
    )


def _fingerprint(weights: Weights, kind: str) -> str:
    """Says in a few letters what a program depends on: this code, the machine, and all that it has of the model."""
    digest = hashlib.sha256()
    for name in ("compiled", "incremental", "linear", "weights"):
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    machine = (torch.__version__, torch.get_num_threads(), sorted(torch.cpu.get_capabilities().items()))
    stack = weights.decoder
    numbers = [stack.heads, stack.key_dim, stack.value_dim, stack.pre_norm, stack.scale]
    numbers += [module.scaling for module in weights.sources[0].modules() if hasattr(module, "scaling")]
    settings = (machine, COMPILER_OPTIONS[kind], os.environ.get("CXX"), numbers, weights.sources)
    digest.update(repr(settings).encode())
    for part in weights.sources:
        for parameter in part.parameters():
            digest.update(parameter.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:32]
