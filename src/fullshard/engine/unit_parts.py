"""The interface of a unit for its components, and the settings that users change between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fullshard.comm.mesh import Axes
from fullshard.device.memory import Slot
from fullshard.device.streams import Streams
from fullshard.engine.group_transports import AxesCollectives
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.sharded_param import ShardedParam
from fullshard.policy.options import ShardOptions
from fullshard.tape.recorder import Origin, Phase


@dataclass(eq=False)
class UnitSettings:
    """The settings of a unit that users can change. `FSDPModule` has a method for each."""

    reshard_after_forward: bool | None
    gradient_divisor: float | None = None  # replaces the number of ranks as the divisor of gradient sums
    all_reduce_hook: Callable[[Tensor], None] | None = None  # called with the sums of each parameter group
    reshard_after_backward: bool = True
    unshards_in_backward: bool = True
    syncs_gradients: bool = True
    syncs_replicas: bool = True
    reduces_unused: bool = False
    next_forward: list[Any] | None = None  # units to gather ahead, instead of those in the recorded order
    next_backward: list[Any] | None = None

    def copy(self) -> UnitSettings:
        """Return a copy for another unit, without the units to prefetch, which are different for that unit."""
        return replace(self, next_forward=None, next_backward=None)


class UnitParts(Protocol):
    """The interface of a unit that its components use, because `Unit` is defined after them."""

    name: str
    device: torch.device
    streams: Streams
    options: ShardOptions
    settings: UnitSettings
    runtime: Any
    keeps_unsharded: bool
    data_ranks: frozenset[int]
    collectives: dict[Axes, AxesCollectives]
    param_groups: list[ParamGroup]
    params: tuple[ShardedParam, ...]
    shards: Any  # the `UnitShards`
    gradients: Any  # the `UnitGradients`
    residency: Any  # the `Residency`

    @property
    def slot(self) -> Slot:
        """The memory of the unit's unsharded parameters, which several units may share."""

    @property
    def is_meta(self) -> bool:
        """True if the unit's shards have no memory yet."""

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the unit's full parameters in the stored dtype."""

    def compute_on(self, device: torch.device) -> None:
        """Set the device that computes, and use its streams."""

    def origin(self, phase: Phase) -> Origin:
        """Return the origin of events of this unit in `phase`."""

    def register_params(self) -> None:
        """Let `managed_by` find the parameters by all their current forms."""

    def show_sharded(self) -> None:
        """Show the sharded parameters to the modules."""

    def hide_unsharded(self) -> None:
        """Show the sharded parameters to the modules that have the unsharded ones."""

    def show_unsharded(self, *, renewed: bool) -> None:
        """Show the unsharded parameters to the modules. If `renewed`, they are new objects."""

    def check_replacements(self) -> None:
        """Adopt weights that were tied, and raise if parameters were replaced."""

    def check_materialized(self) -> None:
        """Raise if any parameter has no values yet."""
