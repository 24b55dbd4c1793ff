"""The functions of torch that aren't public but used, each with what replaces it where torch has lost it.

No other file of the package names one. Each is looked up by its path when it is needed, by `find`. Where this version
of torch lacks it, public functions compute the same, or the engine leaves the call to the paper's own modules.
"""

import functools
import pkgutil
from typing import Any


@functools.cache
def find(path: str) -> Any:
    """Looks a function or a class of torch up by its path; None: this version of torch lacks it."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


# ---- Linear maps ----
def has_onednn() -> bool:
    """Tells whether there are oneDNN's packed and fused linear maps; `F.linear` does without."""
    return onednn_linear() is not None and onednn_weight() is not None


def onednn_linear() -> Any:
    """Returns the map, x W^T + b and then a ReLU; its overload `binary` adds a residual."""
    return find("torch.ops.mkldnn._linear_pointwise")


def onednn_weight() -> Any:
    """Returns the function that copies a weight into oneDNN's own order."""
    return find("torch.ops.mkldnn._reorder_linear_weight")


def has_onednn_bfloat16() -> bool:
    """Tells whether oneDNN takes bfloat16 on this processor, fast or not; if not, it is left to `F.linear`."""
    is_supported = find("torch.ops.mkldnn._is_mkldnn_bf16_supported")
    return is_supported is not None and bool(is_supported())


def has_int8() -> bool:
    """Tells whether there are products of 8 bits (oneDNN); without them, `attach` refuses "int8"."""
    return None not in int8_linear()


def int8_linear() -> tuple[Any, Any]:
    """Returns what packs an 8-bit weight, and its product."""
    return find("torch.ops.onednn.qlinear_prepack"), find("torch.ops.onednn.qlinear_pointwise")


def has_int8_of_few_rows() -> bool:
    """Tells whether there are FBGEMM's; torch will remove them, and oneDNN's take their place, more slowly."""
    return None not in int8_linear_of_few_rows()


def int8_linear_of_few_rows() -> tuple[Any, Any]:
    """Returns the same of FBGEMM."""
    return find("torch.ops.quantized.linear_prepack"), find("torch.ops.quantized.linear_dynamic")


# ---- Hooks and compilers ----
def has_global_hooks() -> bool:
    """Tells whether there are hooks on all modules; where torch doesn't tell, there might be."""
    ask = find("torch.nn.modules.module._has_any_global_hook")
    return ask is None or bool(ask())
