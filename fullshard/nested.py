"""Tensors inside what modules take and give: lists, tuples, dicts, dataclasses, and whatever is a registered pytree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from fullshard._compat import tree_map

__all__ = ["map_tensors", "tensors_in"]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`tree` with every tensor replaced by what `function` makes of it. What holds no tensor is passed on as it is."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(value)
        if is_dataclass(value) and not isinstance(value, type):
            return _map_fields(leaf, value)
        return value

    return leaf(tree) if isinstance(tree, Tensor) else tree_map(leaf, tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in `tree`, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree)
    return found


def _map_fields(leaf: Callable[[Any], Any], value: Any) -> Any:
    """A copy of a dataclass whose fields were mapped, or the same object if nothing in it changed."""
    old = {field.name: getattr(value, field.name) for field in fields(value)}
    new = {name: tree_map(leaf, item) for name, item in old.items()}
    if all(_same(old[name], new[name]) for name in old):
        return value
    changed = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(changed, name, item)
    return changed


def _same(old: Any, new: Any) -> bool:
    return old is new or (not isinstance(old, Tensor) and tensors_in(old) == [] and tensors_in(new) == [])
