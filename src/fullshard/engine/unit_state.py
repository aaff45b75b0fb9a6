"""The state of a unit in the runtime: switches set by users, current uses, and gradients that have arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["UnitState"]


@dataclass(eq=False)
class UnitState:
    """The switches of a unit, and who uses it.

    The first fields are the user's: `FSDPModule` has a method for each. The others are the runtime's.
    """

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
    is_unsharded_by_hand: bool = False  # by `unshard()`, until it is resharded
    is_used_without_forward: bool = False  # unsharded by `unshard()`, and no forward of the unit has begun since
    awaits_backward: bool = False  # unsharded until the next backward is over, since no hook reports the end of its use
    is_summoned: bool = False  # the modules have whole parameters for the user, not the unit's own

    runtime: Any = None  # the `Runtime` of its root, set in the first forward
    number: int = -1  # among the units of its root
    is_root: bool = False
    data_ranks: frozenset[int] = frozenset()  # ranks of the root: a gradient is the mean over their data
    users: int = 0  # forwards and backwards that need it unsharded at the moment
    arrived_grads: set[int] = field(default_factory=set)  # parameters that have a gradient in this backward
    finished_modules: set[int] = field(default_factory=set)  # whose forward is over, where the unit has several

    def take_switches(self, other: UnitState) -> None:
        """Copy the user's switches from `other`, except for units to gather ahead, which differ here."""
        for name in _SWITCHES:
            setattr(self, name, getattr(other, name))


_SWITCHES = (
    *("reshard_after_forward", "gradient_divisor", "reshard_after_backward", "unshards_in_backward"),
    *("syncs_gradients", "syncs_replicas", "reduces_unused", "all_reduce_hook"),
)
