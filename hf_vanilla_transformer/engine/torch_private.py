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


def _all(*paths: str) -> Any:
    """Looks up what is of use together alone, as a tuple; None: this version of torch lacks one of them."""
    found = tuple(map(find, paths))
    return None if None in found else found


# ---- Linear maps ----
def onednn_linear() -> Any:
    """Returns oneDNN's map, x W^T + b and then a ReLU, and what copies a weight into oneDNN's own order.

    The map's overload `binary` adds a residual. Without them, there is `F.linear`.
    """
    return _all("torch.ops.mkldnn._linear_pointwise", "torch.ops.mkldnn._reorder_linear_weight")


def has_onednn_bfloat16() -> bool:
    """Tells whether oneDNN takes bfloat16 on this processor, fast or not; if not, it is left to `F.linear`."""
    is_supported = find("torch.ops.mkldnn._is_mkldnn_bf16_supported")
    return is_supported is not None and bool(is_supported())


def int8_linear() -> Any:
    """Returns oneDNN's product of 8 bits and, before it, what packs a weight; without them, `attach` refuses "int8"."""
    return _all("torch.ops.onednn.qlinear_prepack", "torch.ops.onednn.qlinear_pointwise")


def int8_linear_of_few_rows() -> Any:
    """Returns what makes FBGEMM's weights of integers, what packs them, and the product of these.

    torch will remove them, and oneDNN's take their place, more slowly.
    """
    quantized = "torch._make_per_channel_quantized_tensor"
    return _all(quantized, "torch.ops.quantized.linear_prepack", "torch.ops.quantized.linear_dynamic")


# ---- Hooks and compilers ----
def has_global_hooks() -> bool:
    """Tells whether there are hooks on all modules; where torch doesn't tell, there might be."""
    ask = find("torch.nn.modules.module._has_any_global_hook")
    return ask is None or bool(ask())
