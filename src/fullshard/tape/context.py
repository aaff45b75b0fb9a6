"""Values that this process keeps for its default process group and drops with it.

    _meshes: Kept[Key, DeviceMesh] = Kept("default meshes")

Groups, connections and memory of a default process group must not be used with a later one. Without a common place that
drops them, they would also leak.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from fullshard._compat import forget_shardings

K = TypeVar("K")
V = TypeVar("V")

_all: list[Kept[Any, Any]] = []
_group: dist.ProcessGroup | None = None  # the default group that all kept values belong to


class Kept(Generic[K, V]):
    """A mapping whose values are created once per default process group."""

    def __init__(self, what: str, close: Callable[[V], None] | None = None) -> None:
        self.what = what
        self._close = close
        self._values: dict[tuple[dist.ProcessGroup | None, K], V] = {}
        _all.append(self)

    def __len__(self) -> int:
        return len(self._values)

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """Return the value for `key`. Call `make()` to create it on first use."""
        drop_if_stale()
        full_key = dist.group.WORLD, key
        if full_key not in self._values:
            self._values[full_key] = make()
        return self._values[full_key]

    def drop(self) -> None:
        """Close and remove all values."""
        values = list(self._values.values())
        self._values.clear()
        if self._close is not None:
            for value in values:
                with suppress(Exception):  # the value may be unusable because its process group no longer exists
                    self._close(value)


def drop_if_stale() -> None:
    """Drop all kept values if their default process group is no longer the default one."""
    global _group
    if dist.group.WORLD is not _group:
        for mapping in _all:
            mapping.drop()
        forget_shardings()
        _group = dist.group.WORLD


def kept() -> dict[str, int]:
    """Return the number of values of each kind that this process keeps for its default process group."""
    return {mapping.what: len(mapping) for mapping in _all}
