"""Public names that are imported on first access, so that `import fullshard` does not import torch."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` (PEP 562) of a package, for names and submodules that are imported lazily.

    Define them where type checkers do not look, because they assume that a module with `__getattr__` has every name:

        if TYPE_CHECKING:
            from fullshard.optim.muon import Muon
        else:
            __getattr__, __dir__ = lazy_names(__name__, {"fullshard.optim.muon": ["Muon"]})
    """
    origins = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in origins:
            value = getattr(importlib.import_module(origins[name]), name)
        elif name in submodules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *origins, *submodules})

    return get, names
