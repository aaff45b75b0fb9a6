"""The public names of the package: where each one is documented, and how docstrings refer to it."""

import enum
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from fullshard.errors import MissingLibraryError

# In the order of the reference. A name that several modules export is documented with the first one.
MODULES = [
    "fullshard",
    "fullshard.fsdp1",
    "fullshard.wrap",
    "fullshard.optim",
    "fullshard.checkpoint",
    "fullshard.testing",
    "fullshard.dry",
    "fullshard.errors",
    "fullshard.integrations.accelerate",
    "fullshard.integrations.deepspeed",
    "fullshard.integrations.lightning",
    "fullshard.integrations.pipelining",
    "fullshard.integrations.ray",
    "fullshard.integrations.torchft",
    "fullshard.integrations.transformers",
]


@cache
def importable() -> dict[str, ModuleType]:
    """Return the public modules whose libraries are installed."""
    found = {}
    for name in MODULES:
        try:
            found[name] = import_module(name)
        except (MissingLibraryError, ModuleNotFoundError):
            if not name.startswith("fullshard.integrations."):
                raise
    return found


@cache
def documented() -> dict[str, Any]:
    """Return each public object by the name under which it is documented, such as "fullshard.fully_shard"."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, module in importable().items():
        names = {attribute: getattr(module, attribute) for attribute in module.__all__}
        for attribute, thing in sorted(names.items(), key=lambda item: getattr(item[1], "__name__", "") != item[0]):
            if id(thing) not in seen or not is_code(thing):
                found[f"{name}.{attribute}"] = thing
            seen.add(id(thing))
    return found


def is_code(thing: object) -> bool:
    return inspect.isclass(thing) or callable(thing) or inspect.ismodule(thing)


def methods(thing: type) -> Iterator[tuple[str, Any]]:
    """Yield the public functions and properties that a class defines itself, as functions."""
    for name, value in vars(thing).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isroutine(function) and not issubclass(thing, enum.Enum):
            yield name, function


@cache
def links_by_name() -> dict[str, str]:
    """Return the full name for each spelling of a public name in docstrings."""
    found: dict[str, str] = {}
    for full, thing in documented().items():
        short = full.rpartition(".")[2]
        names = {short: full} if short not in WORDS else {}
        if inspect.isclass(thing):
            names |= {f"{short}.{name}": f"{full}.{name}" for name, _ in methods(thing)}
        for name, target in {full: full, **names}.items():
            found.setdefault(name, target)
    return found


WORDS = {"accelerator", "checkpointing", "comm", "load", "ops", "report", "run", "save", "utils", "wrap", "zero"}
