"""Assignment of units to shared slots, once, after the first backward that repeats the order of the previous one."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from fullshard.device.accelerator import accelerator_for
from fullshard.device.memory import Slot
from fullshard.engine.order import OrderTracker
from fullshard.engine.unit import Unit
from fullshard.layout.slots import Interval, assign_slots
from fullshard.policy.switches import switches

_MOST_BACKWARDS = 256
"""Backwards after which ranks stop looking for a common order and assign no slots."""


class SlotSharing:
    """The slots of a root's units. See [Note: units share slots] in `device/memory.py`."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._requested = switches.shares_memory_between_units  # None: the default of the device
        self.are_assigned = False
        self._is_paused = False
        self._backwards = 0  # counted until slots are assigned
        self._since: dict[int, int] = {}  # the time at which each unsharded unit was unsharded
        self._intervals: list[Interval] = []

    @property
    def _is_cpu(self) -> bool:
        return not accelerator_for(self._units[0].device).has_streams

    @property
    def _is_enabled(self) -> bool:
        return self._is_cpu if self._requested is None else self._requested

    def note_unsharded(self, unit: Unit, time: int) -> None:
        """Record that `unit` needs its memory from event `time` on, unless it already does."""
        self._since.setdefault(unit.number, time)

    def note_freed(self, unit: Unit, time: int) -> None:
        """Record that `unit` does not need its memory from event `time` on."""
        start = self._since.pop(unit.number, None)
        if start is not None:
            self._intervals.append(Interval(unit.number, start, time))

    def give_separate_memory(self, unit: Unit) -> None:
        """Give `unit` separate memory, since another unit needs its slot at the same time."""
        self._requested = False
        unit.residency.move(Slot(unit.device))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context within which no slots are assigned, because backward passes in it are trials."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def end_backward(self, backward: OrderTracker, *, awaits_more: bool) -> None:
        """Assign slots, once, after a microbatch that repeated the order of the previous one on all ranks.

        Ranks may skip different modules, so the order may be repeated at different microbatches. Therefore all ranks
        exchange their orders after every backward until all of them have repeated it. A rank that called a module
        without a backward does not know whether the microbatch has ended on other ranks. Only units that are gathered
        are compared.

        Args:
            backward: The order in which units were needed.
            awaits_more: Whether a forward of this rank still waits for its backward, or units stay unsharded for one.
        """
        if not (self.are_assigned or self._is_paused):
            self._backwards += 1
            units = [unit for unit in self._units if not unit.keeps_unsharded and unit.slot_nbytes]
            is_in_order = not awaits_more and backward.agrees_on({unit.number for unit in units})
            self.are_assigned = self._assign(units, is_in_order) or self._backwards == _MOST_BACKWARDS
        if self.are_assigned or not awaits_more:
            self._intervals.clear()
            self._since.clear()

    def _assign(self, units: Sequence[Unit], is_in_order: bool) -> bool:
        """Assign slots if the order was repeated on all ranks that may share memory. Return True if it was."""
        if not units or not (self._is_enabled or self._is_cpu):  # on a CPU other ranks may request it
            return is_in_order
        nbytes = {unit.number: unit.slot_nbytes for unit in units}
        may_move = is_in_order and self._is_enabled and _are_unreferenced(units)
        local = [interval for interval in self._intervals if interval.unit in nbytes and may_move]
        assigned = assign_slots(local, nbytes)
        sizes = [max(nbytes[unit] for unit in assigned if assigned[unit] == slot) for slot in set(assigned.values())]
        written = any(param.counters.was_written for unit in units for param in unit.params)
        plan = "parameters are written to" if written else f"{assigned} {nbytes}"
        common = _rank_shared_storages(units, [] if written else sizes, plan if is_in_order else None)
        if common is None or not is_in_order:
            return False
        storages = common or [None] * len(sizes)
        slots = [Slot(units[0].device, shared=True, rank_shared=storage) for storage in storages]
        for number in sorted(assigned, key=lambda number: -nbytes[number]):  # largest first, as it determines the size
            self._units[number].residency.move(slots[assigned[number]])
        for slot in slots:
            slot.count_references()
        return True


def _are_unreferenced(units: Sequence[Unit]) -> bool:
    """Return True if nothing except the units has a view of their storages.

    Reference cycles are collected first, because ranks collect garbage at different times, and all ranks must return
    the same value.
    """
    if any(unit.slot.is_referenced for unit in units):
        gc.collect()
    return not any(unit.slot.is_referenced for unit in units)


def _rank_shared_storages(
    units: Sequence[Unit], sizes: Sequence[int], plan: str | None
) -> Sequence[torch.UntypedStorage | None] | None:
    """Return memory for slots that the ranks of one host share. Each rank writes its shards for all of them.

    A rank whose units cannot move passes no sizes; the list is then empty on all ranks. Return None if any rank's plan
    is None.
    """
    if any(_writes_to_parameters(unit.module) for unit in units):
        return []
    collectives = {along.shard for unit in units for along in unit.collectives.values()}
    plans = (param_group.plan for unit in units for param_group in unit.param_groups)
    if len(collectives) != 1 or not all(plan.gathers_from_all for plan in plans):
        return []
    return collectives.pop().rank_shared_storages(sizes, plan)


def _writes_to_parameters(module: nn.Module) -> bool:
    """Return True if a forward within `module` is known to modify unsharded parameters, which must not be shared."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return any(isinstance(inner, kinds) and inner.max_norm is not None for inner in module.modules())
