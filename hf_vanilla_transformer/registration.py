"""Registers the classes when transformers is imported, and not before: that takes seconds and hundreds of megabytes."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

LIBRARY = "transformers"
# What is registered, each behind those that it imports. Where one is imported first, transformers comes before it.
OWN = tuple(
    f"{__package__}.{name}"
    for name in (
        *("configuration_vanilla_transformer", "integration_vanilla_transformer"),
        *("generation_vanilla_transformer", "modeling_vanilla_transformer"),
        *("tokenization_dictionary", "tokenization_source_target", "tokenization_vanilla_transformer"),
    )
)


class Registration:
    """Calls `register` when transformers has been imported; until then, it is one of Python's finders of modules."""

    def __init__(self, register: Callable[[], None]) -> None:
        self._register = register
        self._waiting: dict[str, Callable[[], None]] = {}  # modules of `OWN` until transformers is imported

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds a module as the other finders do, and has it executed by `execute`."""
        finders = [one for one in sys.meta_path if one is not self] if name in (LIBRARY, *OWN) else []
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)
        if spec is not None:
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]  # it has what that one has
        return spec

    def execute(self, name: str, module: Callable[[], None]) -> None:
        """Executes a module; for transformers, an error of registering is that of its import."""
        if name != LIBRARY:
            self._waiting[name] = module
            __import__(LIBRARY)
            self._execute_waiting(name)
            return
        module()
        for own in OWN:
            __import__(own)  # one that another thread imports, which waits for this one, is there without its content
            self._execute_waiting(own)
        self._register()
        sys.meta_path = [one for one in sys.meta_path if one is not self]  # other threads may be reading the old list

    def _execute_waiting(self, name: str) -> None:
        if (module := self._waiting.pop(name, None)) is not None:
            try:
                module()
            except BaseException:
                self._waiting[name] = module  # the thread that imports it gets the error, too
                raise


class _Loader:
    """A module's loader but for `exec_module`; the module gets that loader itself."""

    def __init__(self, loader: Loader | None, registration: Registration) -> None:
        assert loader is not None, "these modules have one"
        self._loader, self._registration = loader, registration

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Executes a module."""
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._loader
        self._registration.execute(module.__name__, partial(self._loader.exec_module, module))
