"""The queue of the pending reductions of a root's units, which limits their number and completes them."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.engine.finite import Tally, raise_on_every_rank, tally
from fullshard.engine.reduction import UnitReduction
from fullshard.engine.registry import process_groups_along
from fullshard.engine.unit import Unit
from fullshard.policy.switches import switches
from fullshard.tape.recorder import Phase


class ReductionQueue:
    """The pending reductions, oldest first."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.pending: dict[Unit, UnitReduction] = {}  # oldest first
        self.incomplete: list[UnitReduction] = []  # pending reductions that may wait for data of other ranks
        self._early: set[Unit] = set()  # units that `start_before_end` has reduced in this backward
        self._tallies: list[Tally] = []

    def start(self, unit: Unit) -> None:
        """Start to reduce the unsharded gradients of `unit`, or hold them back if no step will follow."""
        unit.gradients.arrived.clear()
        if switches.checks_finite:
            self._tallies += tally(unit)
        if unit.gradients.holds_back:
            unit.gradients.hold()
        elif (
            unit.gradients.have_whole
            or unit.gradients.await_second_sum
            or (unit.settings.reduces_unused and unit.is_trained)
        ):
            # One at a time, to bound the memory of unsharded gradients.
            self.finish(all_but=0 if unit in self.pending else 1)
            self.pending[unit] = reduction = unit.gradients.start_reductions(Phase.POST_BACKWARD)
            if not reduction.is_complete:
                self.incomplete.append(reduction)

    def start_before_end(self, unit: Unit) -> None:
        """Start to reduce `unit` even without local gradients, because other ranks may have some.

        `finish_all` skips the unit.
        """
        self._early.add(unit)
        self.start(unit)

    def complete_arrived(self) -> None:
        """Free the unsharded gradients of reductions for which the data of all ranks has arrived.

        Ranks do this at different times. So the optimizer's gradients are not changed yet: if a backward fails, all
        ranks must have the same gradients.
        """
        for reduction in self.incomplete.copy():
            reduction.complete_if_arrived()
            if reduction.is_complete:
                self.incomplete.remove(reduction)

    def finish(self, *, all_but: int = 0) -> None:
        """Finish reductions, except for up to `all_but` reductions that only wait for second-level sums."""
        for unit, reduction in list(self.pending.items()):
            if len(self.pending) > all_but or not reduction.ends_after_first_sums:
                del self.pending[unit]
                if reduction in self.incomplete:
                    self.incomplete.remove(reduction)
                reduction.finish()
            else:
                reduction.free_whole_grads()

    def finish_all(self, *, starts_others: bool = True) -> None:
        """Finish the reductions of all units, including those that have not been started yet if `starts_others`."""
        for unit in reversed(self._units):
            if starts_others and unit not in self._early:
                self.start(unit)
        self.finish()
        self._early.clear()

    def has_hooks(self, unit: Unit) -> bool:
        """Return True if a pending reduction of `unit` has hooks, which may step with its gradients."""
        return unit in self.pending and self.pending[unit].has_hooks

    def take_tallies(self) -> list[Tally]:
        """Return the counts of non-finite values since the last call, if the user has requested this check."""
        tallies, self._tallies = self._tallies, []
        return tallies

    def check_finite(self, tallies: Sequence[Tally]) -> None:
        """Raise on every rank if any rank has counted non-finite values, if the user has requested this check."""
        if switches.checks_finite:
            raise_on_every_rank(tallies, process_groups_along(self._units), self._units[0].device)

    def abandon(self) -> None:
        """Drop all pending reductions, even if their messages have not arrived."""
        pending, self.pending = self.pending, {}
        self.incomplete.clear()
        self._early.clear()
        self._tallies.clear()
        for reduction in pending.values():
            reduction.abandon()
