"""Tensors inside the inputs and outputs of modules.

`map_tensors` and `tensors_in` look into lists, tuples, dicts and subclasses of these, dataclasses, and registered
pytrees. `tensors_in` also looks into attributes of other objects, and into functions: closures, defaults, and arguments
of partials. `map_tensors` cannot replace tensors there.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from operator import is_
from types import CellType, FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fullshard._compat import taken_one_level

_ATOMS = frozenset({type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device, torch.Size})
_OPAQUE = (type, ModuleType, nn.Module)  # not part of what a module returns, though objects refer to them
_DEEPEST = 32
_MOST = 4096  # objects to look into


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any, unmapped: Callable[[Any], None] | None = None) -> Any:
    """Return `tree` with every tensor replaced by `function(tensor)`.

    Containers without changes are not copied.

    Args:
        function: A function that returns another tensor or the same one.
        tree: The inputs or outputs of a module.
        unmapped: called with each object whose tensors cannot be replaced.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    kind = type(tree)
    if kind in _ATOMS:
        return tree
    if kind is tuple or kind is list:  # the usual case: much faster than a pytree
        items = [map_tensors(function, item, unmapped) for item in tree]
        return tree if _are_same(tree, items) else kind(items)
    if kind is dict:
        mapped = {key: map_tensors(function, item, unmapped) for key, item in tree.items()}
        return tree if _are_same(tree.values(), mapped.values()) else mapped
    return _map_other(partial(map_tensors, function, unmapped=unmapped), tree, unmapped)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in `tree`, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    _find(tree, found, set(), 0)
    return found


def keepers_among(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules whose forward may set tensors as attributes: all except torch's own layers."""
    return [module for module in modules if not type(module).__module__.startswith("torch.nn.")]


def tensors_kept_by(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors in attributes of `modules`, and in lists, tuples and dicts there."""
    found: list[Tensor] = []
    for module in modules:
        for name, value in vars(module).items():
            kind = type(value)
            if kind not in _ATOMS and name not in _OF_EVERY_MODULE:
                if isinstance(value, Tensor):
                    found.append(value)
                elif isinstance(value, list | tuple | dict) and len(value) <= _MOST:
                    _find(value, found, set(), _DEEPEST - _DEEP_IN_ATTRIBUTES)
    return found


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_DEEP_IN_ATTRIBUTES = 3


# The next functions are not nested functions that call themselves. Such a function is a reference cycle, which would
# keep tensors in memory until the garbage collector runs.


def _map_other(mapped: Callable[[Any], Any], value: Any, unmapped: Callable[[Any], None] | None) -> Any:
    parts = taken_one_level(value)
    if parts is not None:
        children, made_of = parts
        items = [mapped(child) for child in children]
        return value if _are_same(children, items) else made_of(items)
    if is_dataclass(value) and not isinstance(value, type):
        return _with_attributes(
            value, {field.name: mapped(getattr(value, field.name, None)) for field in fields(value)}
        )
    if isinstance(value, list | tuple | dict):
        return _map_subclass(mapped, value)
    if unmapped is not None and any(mapped(tensor) is not tensor for tensor in tensors_in(value)):
        unmapped(value)
    return value


def _map_subclass(mapped: Callable[[Any], Any], value: Any) -> Any:
    """Return `value`, an instance of a subclass of list, tuple or dict, or a copy if anything in it was replaced."""
    old = list(value.values()) if isinstance(value, dict) else list(value)
    new = [mapped(item) for item in old]
    changed = value
    if not _are_same(old, new):
        if isinstance(value, tuple):
            changed = tuple.__new__(type(value), new)
            getattr(changed, "__dict__", {}).update(getattr(value, "__dict__", {}))
        else:
            changed = copy.copy(value)
            if isinstance(value, dict):
                for key, item in zip(value, new, strict=True):
                    dict.__setitem__(changed, key, item)
            else:
                list.__setitem__(changed, slice(None), new)
    attributes = {name: mapped(item) for name, item in getattr(value, "__dict__", {}).items()}
    return _with_attributes(changed, attributes, copied=changed is not value)


def _with_attributes(value: Any, new: Mapping[str, Any], *, copied: bool = False) -> Any:
    """Return a copy of `value` with `new` attributes, or `value` itself if they are unchanged."""
    if all(getattr(value, name, None) is item for name, item in new.items()):
        return value
    changed = value if copied else copy.copy(value)
    for name, item in new.items():
        object.__setattr__(changed, name, item)
    return changed


def _are_same(old: Iterable[Any], new: Iterable[Any]) -> bool:
    return all(map(is_, old, new))


def _find(value: Any, found: list[Tensor], visited: set[int], depth: int) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    kind = type(value)
    if kind in _ATOMS or depth > _DEEPEST:
        return
    parts: Iterable[Any]
    if kind is tuple or kind is list:
        parts = value
    elif kind is dict:
        parts = value.values()
    elif id(value) in visited or len(visited) > _MOST or isinstance(value, _OPAQUE):
        return
    else:
        visited.add(id(value))
        parts = list(_parts(value))
    for part in parts:
        if isinstance(part, Tensor):
            found.append(part)
        elif not (type(part) in _ATOMS or (type(part) is dict and not part)):
            _find(part, found, visited, depth + 1)


def _parts(value: Any) -> Iterator[Any]:
    """Yield the objects that `value` refers to, as far as this is possible without calling methods of its class."""
    if isinstance(value, FunctionType):
        yield from (value.__defaults__ or (), value.__kwdefaults__ or {})
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY)
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, GeneratorType):
        yield {} if value.gi_frame is None else dict(value.gi_frame.f_locals)
    else:
        parts = taken_one_level(value)
        if parts is not None:
            yield parts[0]
        elif isinstance(value, dict):
            yield list(dict.values(value))
        elif isinstance(value, list | tuple | Set | deque):
            yield list(value)
    if hasattr(value, "__dict__"):
        yield dict(vars(value))
    for kind in type(value).__mro__:
        for name in _slots(kind):
            with suppress(AttributeError):  # not set
                yield object.__getattribute__(value, name)


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    private = [f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") else name for name in names]
    return [name for name in private if isinstance(kind.__dict__.get(name), MemberDescriptorType)]


_EMPTY = CellType()
