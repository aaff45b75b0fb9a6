"""The reductions of a root's units that are under way: how many at once, and when each is completed."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.engine.finite import Tally, raise_on_every_rank, tally
from fullshard.engine.reduction import UnitReduction
from fullshard.engine.registry import process_groups_along
from fullshard.engine.unit import Unit
from fullshard.policy.switches import switches
from fullshard.tape.recorder import Phase

__all__ = ["ReductionQueue"]


class ReductionQueue:
    """The reductions under way, oldest first.

    Args:
        units: the root's.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._under_way: dict[Unit, UnitReduction] = {}
        self._early: set[Unit] = set()  # in this backward, those that reduce what is unused here, too
        self._tallies: list[Tally] = []

    def start(self, unit: Unit) -> None:
        """Begin to reduce what whole gradients `unit` has, or hold them back if no step is to follow."""
        unit.state.arrived_grads.clear()
        if switches.checks_finite:
            self._tallies += tally(unit)
        if unit.holds_grads_back:
            unit.hold_grads()
        elif unit.has_whole_grads or unit.awaits_second_sum or (unit.state.reduces_unused and unit.is_trained):
            # One at a time: gradients of more than two units at once would be memory without a bound.
            self.finish(all_but=0 if unit in self._under_way else 1)
            self._under_way[unit] = unit.start_reduce(Phase.POST_BACKWARD)

    def start_before_end(self, unit: Unit) -> None:
        """Begin to reduce `unit` whether or not it has gradients here: others may have. `finish_all` passes it by."""
        self._early.add(unit)
        self.start(unit)

    def complete_arrived(self) -> None:
        """Free whole gradients as soon as other ranks' have come.

        Ranks do so at different moments, so the optimizer's gradients stay as they are: if a backward fails, all ranks
        must have the same.
        """
        for reduction in self._under_way.values():
            if not reduction.is_complete:
                reduction.complete_if_arrived()

    def finish(self, *, all_but: int = 0) -> None:
        """Have the optimizer's gradients ready. `all_but` so many of those that have only second sums to wait for."""
        for unit, reduction in list(self._under_way.items()):
            if len(self._under_way) > all_but or not reduction.is_late:
                del self._under_way[unit]
                reduction.finish()
            else:
                reduction.free_whole_grads()

    def finish_all(self) -> None:
        """Have the gradients of all units ready for the optimizer, those that nothing had begun to reduce too."""
        for unit in reversed(self._units):
            if unit not in self._early:
                self.start(unit)
        self.finish()
        self._early.clear()

    def has_hooks(self, unit: Unit) -> bool:
        """True if gradients of `unit` are under way to hooks, which may step with them."""
        return unit in self._under_way and self._under_way[unit].has_hooks

    def take_tallies(self) -> list[Tally]:
        """What was counted since the last call, where the user has asked whether gradients are finite."""
        tallies, self._tallies = self._tallies, []
        return tallies

    def check_finite(self, tallies: Sequence[Tally]) -> None:
        """Raise on every rank if one of them counted anything that is not finite, where the user has asked for it.

        Raises:
            NonFiniteError: one did.
        """
        if switches.checks_finite:
            raise_on_every_rank(tallies, process_groups_along(self._units), self._units[0].device)

    def abandon(self) -> None:
        """Drop all, whether their messages have come or not."""
        under_way, self._under_way = self._under_way, {}
        self._early.clear()
        self._tallies.clear()
        for reduction in under_way.values():
            reduction.abandon()
