"""The functions of torch that aren't public but used, each with what replaces it where torch has lost it.

No other file of the package names one. Each is looked up by its path when it is needed, by `find`. Where this version
of torch lacks it, public functions compute the same, or the engine leaves the call to the paper's own modules.
"""

import functools
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PACK_INT8 = "torch.ops.onednn.qlinear_prepack"
LINEAR_INT8 = "torch.ops.onednn.qlinear_pointwise"
PACK_FEW_INT8 = "torch.ops.quantized.linear_prepack"
LINEAR_FEW_INT8 = "torch.ops.quantized.linear_dynamic"

RUNNER = "torch._C._aoti.AOTIModelContainerRunnerCpu"
COMPILE = "torch._inductor.aot_compile"
CLEAR_CACHES = "torch._inductor.utils.clear_caches"


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


def int8_linear() -> tuple[Any, Any] | None:
    """Returns what packs an 8-bit weight, and its product (oneDNN); None: `RoundedLinear` takes their place."""
    return _both(PACK_INT8, LINEAR_INT8)


def int8_linear_of_few_rows() -> tuple[Any, Any] | None:
    """Returns the same of FBGEMM, which torch means to remove; None: that of oneDNN takes their place, more slowly."""
    return _both(PACK_FEW_INT8, LINEAR_FEW_INT8)


def _both(*paths: str) -> tuple[Any, Any] | None:
    first, second = map(find, paths)
    return None if first is None or second is None else (first, second)


# ---- Surroundings of a call ----
def _has_foreign_mode(modes: Callable[[], Sequence[Any]]) -> bool:
    # `torch.set_default_device` leaves its own mode there, which only says where tensors are made.
    harmless = find("torch.utils._device.DeviceContext")
    return any(type(mode) is not harmless for mode in modes())


_WATCHERS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("torch.nn.modules.module._has_any_global_hook", lambda ask: ask(), "there are hooks on all modules"),
    ("torch.overrides._get_current_function_mode_stack", _has_foreign_mode, "a TorchFunctionMode is active"),
    ("torch._C._len_torch_dispatch_stack", lambda ask: ask() > 0, "a TorchDispatchMode is active"),
    (
        "torch._C._functorch.peek_interpreter_stack",
        lambda ask: ask() is not None,
        "a transform of torch.func is active",
    ),
    ("torch.autograd.forward_ad", lambda module: module._current_level >= 0, "forward-mode gradients are computed"),
)


def watcher() -> str | None:
    """Says what is active that could see or change what a call computes; None: nothing is.

    Where nobody can tell, it says so, and the call is computed by the paper's own modules.
    """
    for path, is_active, activity in _WATCHERS:
        try:
            if is_active(find(path)):
                return activity
        except (AttributeError, TypeError):  # there is no such function
            return f"torch {torch.__version__} lacks {path}, which tells whether {activity}"
    return None


# ---- Compilers ----
def missing(*paths: str) -> str | None:
    """Names the first of `RUNNER`, `COMPILE` and `CLEAR_CACHES` that torch lacks; steps run without them."""
    return next((path for path in paths if find(path) is None), None)


def load_program(path: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    """Loads a compiled program."""
    program: Callable[[list[Tensor]], list[Tensor]] = find(RUNNER)(str(path), 1).run
    return program


def compile_program(module: nn.Module, examples: tuple[Tensor, ...], options: Mapping[str, Any]) -> None:
    """Compiles an exported module into the file that the options name."""
    find(COMPILE)(module, examples, options=dict(options))


def clear_compiler_caches() -> None:
    """Lets the compiler forget the files that it has made."""
    find(CLEAR_CACHES)()


def check_cpp_compiler() -> None:
    """Raises what torch raises if it finds no C++ compiler; where nobody can tell, compiling will."""
    get_compiler = find("torch._inductor.cpp_builder.get_cpp_compiler")
    if get_compiler is not None:
        get_compiler()


def compile_modes() -> list[str]:
    """Returns the modes of `torch.compile`; where torch doesn't list them, those that it documents."""
    modes = find("torch._inductor.list_mode_options")
    documented = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    return documented if modes is None else list(modes())
