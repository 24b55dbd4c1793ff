"""Names of a package whose modules are imported when the names are first used (PEP 562)."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions `__getattr__` and `__dir__` of a package.

    Args:
        package: Its `__name__`.
        modules: Each of its modules -> the names that are looked up there.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{module_of[name]}", package), name)

    return get, lambda: sorted({*vars(sys.modules[package]), *module_of})
