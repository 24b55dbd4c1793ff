"""Everything that depends on the processor: its vendor, its instruction sets, and thresholds measured on such ones.

docs/performance.md has the measurements.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from . import torch_private

# Instructions of Intel's, AMD's and ARM's processors that multiply bfloat16. oneDNN takes bfloat16 on all with AVX-512;
# without these instructions, products of packed weights are no faster than `F.linear`.
MULTIPLY_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True)
class Processor:
    """The engine's knowledge of its CPU."""

    has_onednn: bool  # products may be oneDNN's packed and fused ones, private functions of torch
    has_fast_bfloat16: bool  # decoding packs weights in bfloat16 for oneDNN
    reduce_range: bool  # 8-bit products take 7 bits of inputs: without VNNI, 16-bit sums overflow otherwise
    elements_for_mkl: int  # MKL multiplies in decoding by float32 weights with up to this number of elements
    elements_for_both: float  # up to this number, MKL multiplies few rows and oneDNN many; above, oneDNN all
    multiplications_for_mkl: int  # rows are few up to this number, times the elements of the weight
    rows_for_fbgemm: int = 8  # rows up to which 8-bit products are FBGEMM's, and above oneDNN's


# torch's own products are MKL's. On other vendors' processors than Intel's, MKL uses narrower vectors. Rows are few up
# to 64 for a weight of 256 x 256; on Intel's processors, up to one row for 37,000 x 512.
INTEL = {"elements_for_mkl": 2**22, "elements_for_both": math.inf, "multiplications_for_mkl": 20_000_000}
OTHERS = {"elements_for_mkl": 0, "elements_for_both": 2**16, "multiplications_for_mkl": 2**22}


def this_processor() -> Processor:
    """Finds out what this process runs on."""
    capabilities = torch.cpu.get_capabilities()
    is_intel = "intel" in str(capabilities.get("cpu_name")).lower()
    by_mkl = is_intel and bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
    has_onednn = torch_private.onednn_linear() is not None
    takes_bfloat16 = has_onednn and torch_private.has_onednn_bfloat16()
    thresholds: dict[str, Any] = INTEL if by_mkl else OTHERS
    return Processor(
        has_onednn=has_onednn,
        has_fast_bfloat16=takes_bfloat16 and any(map(capabilities.get, MULTIPLY_BFLOAT16)),
        reduce_range=not capabilities.get("avx512_vnni"),
        **thresholds,
    )


CPU = this_processor()
