"""Everything that depends on the processor: its vendor, its instruction sets, and thresholds measured on such ones.

docs/performance.md has the measurements. `vanilla-transformer info --machine` prints what is used. The environment
variable HF_VANILLA_TRANSFORMER_CPU changes it, so that any machine can test what is computed on others.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from . import torch_private

VARIABLE = "HF_VANILLA_TRANSFORMER_CPU"
# Of Intel's and AMD's, and of ARM's processors. oneDNN takes bfloat16 on all with AVX-512; without these instructions,
# products of packed weights are no faster than `F.linear`.
MULTIPLY_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")


def _decides(what: str, **default: Any) -> Any:
    return field(metadata={"decides": what}, **default)


@dataclass(frozen=True)
class Processor:
    """What the engine knows of the CPU that it runs on; each field says what it decides."""

    has_onednn: bool = _decides("whether products may be oneDNN's packed and fused ones, which torch keeps private")
    # torch's own products are MKL's. On other vendors' processors, MKL uses narrower vectors.
    mkl_is_fastest: bool = _decides("whether MKL multiplies where it can, as on Intel's processors, or oneDNN")
    has_fast_bfloat16: bool = _decides("whether decoding packs weights in bfloat16 for oneDNN")
    # Without VNNI, 16-bit sums overflow otherwise.
    reduce_range: bool = _decides("whether 8-bit products take 7 bits of their inputs, as needed without VNNI")
    elements_for_mkl: int = _decides("MKL multiplies in decoding by float32 weights with up to this number of elements")
    elements_for_both: float = _decides("up to this number, MKL multiplies few rows and oneDNN many; above, oneDNN all")
    # 64 rows for a weight of 256 x 256, or on Intel's processors one row for 37,000 x 512.
    multiplications_for_mkl: int = _decides("rows are few up to this number, times the elements of the weight")
    rows_for_fbgemm: int = _decides("rows up to which 8-bit products are FBGEMM's, and above oneDNN's", default=8)


def this_processor(changes: str = "") -> Processor:
    """Finds out what this process runs on.

    Args:
        changes: Fields that are to be others, "mkl_is_fastest=true,reduce_range=false". What follows from one of them
            follows from its new value.

    Returns:
        The processor.

    Raises:
        ValueError: The changes name no field, or a value that it can't have.
    """
    given = dict(_parsed(changes))
    capabilities = torch.cpu.get_capabilities()
    is_intel = "intel" in str(capabilities.get("cpu_name")).lower()
    takes_bfloat16 = torch_private.has_onednn() and torch_private.has_onednn_bfloat16()
    found = {
        "has_onednn": torch_private.has_onednn(),
        "mkl_is_fastest": is_intel and bool(torch.backends.mkl.is_available()),  # type: ignore[no-untyped-call]
        "has_fast_bfloat16": takes_bfloat16 and any(map(capabilities.get, MULTIPLY_BFLOAT16)),
        "reduce_range": not capabilities.get("avx512_vnni"),
    }
    for name in ("has_onednn", "has_fast_bfloat16"):
        if given.get(name) and not found[name]:
            raise _wrong(f"{name}=true, which isn't available on this CPU with this version of torch; leave it out")
    by_mkl = given.get("mkl_is_fastest", found["mkl_is_fastest"])
    thresholds = {
        "elements_for_mkl": 2**22 if by_mkl else 0,
        "elements_for_both": math.inf if by_mkl else 2**16,
        "multiplications_for_mkl": 20_000_000 if by_mkl else 2**22,
    }
    return Processor(**(found | thresholds | given))


def _parsed(changes: str) -> Iterator[tuple[str, Any]]:
    kinds: dict[str, Any] = {one.name: one.type for one in fields(Processor)}
    for part in filter(None, changes.replace(" ", "").split(",")):
        name, _, text = part.partition("=")
        if name not in kinds:
            raise _wrong(f"{part!r}; write NAME=VALUE,NAME=VALUE with names of {', '.join(kinds)}")
        yield name, _value(name, text, kinds[name])


def _value(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise _wrong(f"{name}={text}; give true or false")
        return text == "true"
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not value >= 0:  # NaN neither
        raise _wrong(f"{name}={text}; give {'an integer' if kind is int else 'a number'} of at least 0")
    return value


def _wrong(what: str) -> ValueError:
    return ValueError(f"The environment variable {VARIABLE} says {what}.")


CPU = this_processor(os.environ.get(VARIABLE, ""))
