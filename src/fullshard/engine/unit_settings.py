"""The settings of a unit that users change between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

__all__ = ["UnitSettings"]


@dataclass(eq=False)
class UnitSettings:
    """The settings of a unit that users change: `FSDPModule` has a method for each."""

    reshard_after_forward: bool | None
    gradient_divisor: float | None = None  # what sums of gradients are divided by, instead of a number of ranks
    all_reduce_hook: Callable[[Tensor], None] | None = None  # called with the sums of each parameter group
    reshard_after_backward: bool = True
    unshards_in_backward: bool = True
    syncs_gradients: bool = True
    syncs_replicas: bool = True
    reduces_unused: bool = False
    next_forward: list[Any] | None = None  # units to gather ahead, instead of those in the recorded order
    next_backward: list[Any] | None = None

    def copy(self) -> UnitSettings:
        """Return a copy for another unit, without the units to gather ahead, which differ there."""
        return replace(self, next_forward=None, next_backward=None)
