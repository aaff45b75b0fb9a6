"""The memory of a unit's unsharded parameters."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from fullshard.device.memory import Slot
from fullshard.engine.group_buffers import Region
from fullshard.engine.group_plan import GroupPlan
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.unit_parts import UnitParts
from fullshard.engine.unit_plans import nbytes_of, regions_of
from fullshard.errors import StateError


class UnshardedMemory:
    """A slot, and the regions of the unit's parameter groups in it."""

    def __init__(self, unit: UnitParts, device: torch.device, *, keeps: bool) -> None:
        self._unit = unit
        self._keeps = keeps
        self.slot = Slot(device)
        self.nbytes = 0
        self._has_views = False  # the parameter groups have views of the slot

    @property
    def can_occupy(self) -> bool:
        """True if no other unit occupies the slot."""
        return self.slot.occupant in (None, self._unit)

    @property
    def is_occupied(self) -> bool:
        """True if this unit occupies the slot: its unsharded parameters are in use or kept."""
        return self.slot.occupant is self._unit

    def occupy(self, slot: Slot, plans: Sequence[GroupPlan]) -> Sequence[Region | None]:
        """Use `slot`. Return the region of each group in it; None for each if the slot's memory is not permanent.

        Views of memory that is not permanent are created when it is first allocated. Creating them needs memory for all
        of the unit's parameters, which a rank that only creates its shards may not have.
        """
        self.slot, self.nbytes = slot, nbytes_of(plans)
        self._has_views = self._keeps or slot.shared
        if not self._has_views:
            return [None] * len(plans)
        occupant, slot.occupant = slot.occupant, None
        slot.allocate(self._unit, self.nbytes, self._unit.streams.compute)
        slot.occupant = occupant if slot.shared else self._unit
        return regions_of(slot, plans)

    def allocate(self, groups: Sequence[ParamGroup]) -> None:
        """Occupy the slot, which must be free or occupied by this unit, and give the groups views of it."""
        if self._has_views and self.slot.occupant is None and self.slot.storage.nbytes() >= self.nbytes:
            self.slot.occupant = self._unit
            return
        self.slot.allocate(self._unit, self.nbytes, self._unit.streams.gather)
        if not self._has_views:
            self._has_views = True
            self._give(groups, regions_of(self.slot, [group.plan for group in groups]))
            self.slot.count_references()

    def move(self, slot: Slot, groups: Sequence[ParamGroup]) -> None:
        """Use `slot` instead of the current slot. No pending graph may have views of the current one."""
        if self.slot.is_referenced:
            gc.collect()
        if self.slot.is_referenced:
            raise StateError(
                f"{self._unit.name or 'the root'} and {getattr(self.slot.occupant, 'name', '') or 'the root'} "
                "share one buffer because they were never unsharded at the same time before. This step needs both, and "
                "a graph that waits for its backward has views of the buffer. Call "
                "fullshard.share_memory_between_units(False) before the first forward."
            )
        self.drop_views(groups)
        regions = self.occupy(slot, [group.plan for group in groups])
        if self._has_views:
            self._give(groups, regions)
        slot.count_references()
        for group in groups:
            group.gather.invalidate()

    def drop_views(self, groups: Sequence[ParamGroup]) -> None:
        """Make the groups drop their views of the slot."""
        with self.slot.dropping_views():
            self._give(groups, [None] * len(groups))

    def _give(self, groups: Sequence[ParamGroup], regions: Sequence[Region | None]) -> None:
        for group, region in zip(groups, regions, strict=True):
            group.contained_in(region)
