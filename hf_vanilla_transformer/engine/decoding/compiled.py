"""The decoder's step as machine code, for `compute_type="compiled"`.

With few rows, a step of a small model spends most of its time on calling operators. PyTorch's ahead-of-time compiler
makes one function of all of them, with weights packed for its own matrix products. Two programs are made where they are
needed, one for few rows and one for many; each takes half a minute the first time and is kept beside what
`torch.compile` keeps (`TORCHINDUCTOR_CACHE_DIR`), for the next process to load.
"""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import logging

from .incremental import IncrementalDecoder
from .weights import Weights, through_layers

logger = logging.get_logger(__name__)

# Up to this number of rows, products compiled for the model are faster than oneDNN's; from 16 rows on, they are slower.
FEW_ROWS = 8

# Weights become constants, which can be packed.
CONSTANT_WEIGHTS = {"freezing": True}
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "few": {**CONSTANT_WEIGHTS, "max_autotune": True, "max_autotune_gemm_backends": "CPP"},
    "many": CONSTANT_WEIGHTS,
}

# Sizes of the inputs that a program is made with. It takes any others, but is chosen to be fast for these; no two are
# alike, so that the exporter doesn't take one for another, and none is 1, which it would take for a constant.
SENTENCES = {"few": 2, "many": 32}
BEAMS, POSITIONS, ROOM, SOURCE_LENGTH, ROWS_OF_ROOM = 4, 12, 40, 14, 200

Program = Callable[[list[Tensor]], list[Tensor]]


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
    """An `IncrementalDecoder` whose steps are machine code.

    Args:
        weights: Of a float32 model on a CPU, prepared as "compiled".
        memory: As of `IncrementalDecoder`, like all others.

    Raises:
        RuntimeError: There is no C++ compiler, or it fails.
    """

    shapes_memory = False

    def __init__(self, weights: Weights, memory: Tensor, *settings: Any, **more: Any) -> None:
        super().__init__(weights, memory, *settings, **more)
        if self.memory_bias is None:
            self.memory_bias = memory.new_zeros(len(memory), self.weights.heads, memory.shape[1])
        self.program = program_of(weights, self.past.shape[2])

    def _view(self) -> None:
        """Needs no views of its caches."""

    def step(self, tokens: Tensor) -> Tensor:
        """As `IncrementalDecoder.step`: logits, (rows, V), of what follows `tokens`, (rows,)."""
        stack, sentences = self.weights, self.num_sentences
        self._make_room()
        table, so_far = stack.embed_tokens.weight, tokens.new_empty(self.length)
        inputs = [tokens.view(sentences, -1), table, self._position(), so_far]
        caches = [self.past, self.memory_keys, self.memory_values, self.memory_bias[:sentences]]  # type: ignore[index]
        logits, attention = self.program(inputs + caches)
        if self.keep_attention:
            self.attention = attention
        return logits


def program_of(weights: Weights, rows: int) -> Program:
    """Returns the program for a batch: that of the last call, one that was kept, or a new one.

    Args:
        weights: Prepared as "compiled".
        rows: Rows of the batch at most.

    Raises:
        RuntimeError: There is no C++ compiler, or it fails.
    """
    kind = "few" if rows <= FEW_ROWS else "many"
    name = f"{kind}-{torch.get_num_threads()}"  # how work is shared among threads is part of a program
    if name not in weights.programs:
        # Not as part of what the caller records, casts or tests with fake tensors.
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            weights.programs[name] = _load_or_compile(weights, kind)
    program: Program = weights.programs[name]
    return program


def _load_or_compile(weights: Weights, kind: str) -> Program:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir()) / "vanilla_transformer"
    path = folder / f"{kind}-{_fingerprint(weights, kind)}.pt2"
    if path.exists():
        try:
            return _load(path)
        except Exception as error:  # whatever a file cut short makes of the loader
            logger.warning(f"{path} can't be loaded ({error}), so it is made again.")
    folder.mkdir(parents=True, exist_ok=True)
    size = f"{'up to' if kind == 'few' else 'more than'} {FEW_ROWS} hypotheses at a time"
    logger.warning(f"Compiling the decoder for {size}: half a minute or longer, once for this model.")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        new = Path(temporary) / path.name
        _compile(weights, kind, new)
        os.replace(new, path)  # at once, as other processes may look for it
    return _load(path)


def _load(path: Path) -> Program:
    try:
        # As `aoti_load_package` does it, which imports for a second first.
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
    except TypeError:  # another PyTorch's takes other arguments
        loader = torch._inductor.aoti_load_package(str(path)).loader
    # Without the package's own call, which parses how inputs and outputs are nested each time.
    program: Program = loader.boxed_run
    return program


def _compile(weights: Weights, kind: str, path: Path) -> None:
    """Writes a program to a file.

    Raises:
        RuntimeError: There is no C++ compiler, or it fails.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    any_size = torch.export.Dim.DYNAMIC
    memory = {1: any_size, 3: any_size}
    tokens, so_far, past = {0: any_size, 1: any_size}, {0: any_size}, {1: any_size, 2: any_size}
    bias = {0: any_size, 2: any_size}
    dynamic: Any = (tokens, {}, {}, so_far, past, memory, memory, bias)
    try:
        get_cpp_compiler()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(DecoderStep(weights), _examples(weights, kind), dynamic_shapes=dynamic)
            options = dict(COMPILER_OPTIONS[kind])  # it adds its own to them
            torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=options)
    except Exception as error:
        first_line = str(error).strip().split("\n")[0]
        raise RuntimeError(
            f'`compute_type="compiled"` needs a C++ compiler that PyTorch can use, and {type(error).__name__} was '
            f"raised ({first_line}); install g++ or clang, name it in the environment variable CXX, or leave "
            '`compute_type` at "default".'
        ) from error


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
    for name in ("compiled", "incremental", "weights"):
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
