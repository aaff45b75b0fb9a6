"""Public names that are imported on first access, so that `import fullshard` does not import torch."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` (PEP 562) of a package with lazily imported names.

    Define them where type checkers do not look, since a module with `__getattr__` has every name for them:

        if TYPE_CHECKING:
            from fullshard.optim.muon import Muon
        else:
            __getattr__, __dir__ = lazy_names(__name__, {"fullshard.optim.muon": ["Muon"]})
    """
    origins = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(origins[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *origins})

    return get, names
