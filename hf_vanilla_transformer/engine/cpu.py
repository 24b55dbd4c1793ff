"""Everything that depends on the processor: its vendor, its instruction sets, and thresholds measured on such ones.

docs/performance.md has the measurements. Each field says what it decides.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Processor:
    """What the engine knows of the CPU that it runs on.

    Attributes:
        has_onednn: Whether this build of torch has oneDNN's packed and fused matrix products, which aren't public.
        mkl_is_fastest: torch's own products are MKL's, ahead of oneDNN on Intel's processors; on others it uses
            narrower vectors.
        has_fast_bfloat16: Whether oneDNN multiplies bfloat16 by instructions made for it.
        reduce_range: Whether 8-bit products take 7 bits of their inputs: without VNNI, 16-bit sums overflow otherwise.
        elements_for_mkl: Decoding multiplies by float32 weights of up to this number of elements with MKL.
        elements_for_both: Up to this number, with MKL for few rows and oneDNN for many; above, with oneDNN.
        multiplications_for_mkl: What few rows are, times the weight's elements: 64 rows for a weight of 256 x 256, or
            on Intel's processors one row for 37,000 x 512.
        shortest_source: Decoding pads shorter sources to this length, masked: below the size of its vectors,
            torch's softmax takes up to ten times as long.
        rows_worth_blocks: From this number of rows on, greedy search looks for the highest scores in two stages.
        logits_per_chunk: Logits that the training loss holds at a time: 12 MB in float32.
        rows_per_chunk: But no fewer rows than products are fast with.
        width_for_onednn_gradient: Gradients of weights with no side as wide are left to MKL, as oneDNN needs a
            transposed copy of one of the two matrices.
        scores_of_short_sentences: Up to this number of scores per head and sentence, eq. 1 as it stands trains faster
            than torch's sdpa, which is made for long sentences.
        padding_worth_packing: Below this share of padding, leaving it out of a batch costs more than it saves.
    """

    has_onednn: bool
    mkl_is_fastest: bool
    has_fast_bfloat16: bool
    reduce_range: bool
    elements_for_mkl: int
    elements_for_both: float
    multiplications_for_mkl: int
    shortest_source: int = 16
    rows_worth_blocks: int = 8
    logits_per_chunk: int = 3_000_000
    rows_per_chunk: int = 256
    width_for_onednn_gradient: int = 768
    scores_of_short_sentences: int = 32 * 32
    padding_worth_packing: float = 0.1


def this_processor() -> Processor:
    """Finds out what this process runs on. Functions of torch that aren't public are used where the build has them."""
    operators: Any = torch.ops.mkldnn
    has_onednn = all(hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    is_intel = "Intel" in capabilities.get("cpu_name", "")
    mkl_is_fastest = is_intel and bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
    return Processor(
        has_onednn=has_onednn,
        mkl_is_fastest=mkl_is_fastest,
        has_fast_bfloat16=has_onednn and bool(operators._is_mkldnn_bf16_supported()),
        reduce_range=not getattr(torch.cpu, "_is_vnni_supported", lambda: False)(),
        elements_for_mkl=2**22 if mkl_is_fastest else 0,
        elements_for_both=math.inf if mkl_is_fastest else 2**16,
        multiplications_for_mkl=20_000_000 if mkl_is_fastest else 2**22,
    )


CPU = this_processor()
