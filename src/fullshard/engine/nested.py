"""Tensors inside what modules take and give: lists, tuples, dicts, dataclasses, and whatever is a registered pytree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fullshard._compat import tree_map

__all__ = ["map_tensors", "tensors_in"]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`tree` with every tensor replaced by what `function` makes of it. What holds no tensor is passed on as it is."""
    if isinstance(tree, Tensor):
        return function(tree)
    kind = type(tree)
    if kind is tuple or kind is list:  # most of what modules are called with, at a small part of a pytree's cost
        return kind([map_tensors(function, item) for item in tree])
    if kind is dict:
        return {key: map_tensors(function, item) for key, item in tree.items()}
    if kind in _ATOMS:
        return tree
    return tree_map(partial(_map_leaf, function), tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in `tree`, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


_ATOMS = (type(None), bool, int, float, str)


# A function of its own, and not one within `map_tensors` that calls itself: that would be a reference cycle, and keep
# tensors in memory until the garbage collector comes by.
def _map_leaf(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _map_fields(function, value)
    return value


def _map_fields(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A copy of a dataclass whose fields were mapped, or the same object if nothing in it changed."""
    old = {field.name: getattr(value, field.name) for field in fields(value)}
    new = {name: map_tensors(function, item) for name, item in old.items()}
    if all(_same(old[name], new[name]) for name in old):
        return value
    changed = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(changed, name, item)
    return changed


def _same(old: Any, new: Any) -> bool:
    return old is new or (not isinstance(old, Tensor) and tensors_in(old) == [] and tensors_in(new) == [])
