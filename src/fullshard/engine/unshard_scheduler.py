"""The schedule of a root's all-gathers and frees, and the ordering of all-gathers after other work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fullshard.device.streams import Mark, Streams
from fullshard.engine.order import OrderTracker
from fullshard.engine.reduction_queue import ReductionQueue
from fullshard.engine.residency import ACTIVE, UnitState
from fullshard.engine.slot_sharing import SlotSharing
from fullshard.engine.unit import Unit
from fullshard.tape.recorder import Phase


class UnshardScheduler:
    """Gathers and frees the units of a root, and orders all-gathers after other work."""

    def __init__(self, units: Sequence[Unit], reductions: ReductionQueue) -> None:
        self._units = units
        self._reductions = reductions
        self.after_optimizer: Mark | None = None  # event that the next forward waits for
        self.slots = SlotSharing(units)
        self._deferred_frees: list[tuple[Unit, Phase]] = []  # to be freed once the next gather has started
        self._clock = 0

    @property
    def _streams(self) -> Streams:
        return self._units[0].streams

    def tick(self) -> int:
        """Count an event, and return its number."""
        self._clock += 1
        return self._clock

    def hold(self, unit: Unit) -> None:
        """Add a user to `unit`, and to units whose parameters it borrows, until `release`."""
        for held in (unit, *unit.borrowed):
            held.residency.users += 1

    def release(self, unit: Unit) -> None:
        """Remove a user from `unit`, and from units whose parameters it borrows."""
        for held in (unit, *unit.borrowed):
            if held.residency.users > 0:
                held.residency.users -= 1

    def unshard(self, unit: Unit, phase: Phase) -> None:
        """Unshard `unit`, and units whose parameters it borrows, for the next compute work."""
        if unit.residency.state not in ACTIVE:
            self.start_unshard(unit, phase)
        for lender in unit.borrowed:  # `start_unshard` may have added one, for a weight tied after sharding
            self.start_unshard(lender, phase)
        for item in (unit, *unit.borrowed):
            if item.residency.wait_unshard():
                item.residency.written_in.add(phase)

    def start_unshard(self, unit: Unit, phase: Phase) -> None:
        """Start to gather `unit`, unless it is unsharded or being gathered."""
        residency = unit.residency
        if residency.state in ACTIVE:
            return
        if residency.state is UnitState.SUMMONED:
            residency.check_not_summoned()
        is_stream = unit.streams.gather.is_stream
        # Evaluated before deferred steps, which are not the user's writes.
        are_writes_ordered = not is_stream or residency.are_writes_ordered
        if residency.deferred_steps:
            residency.run_deferred_steps()
        if unit in self._reductions.pending and self._reductions.has_hooks(unit):
            self._reductions.finish()  # hooks may step the shards with gradients of an earlier use
        if phase is Phase.IDLE:
            residency.invalidate_if_stepped()
            self.order_gathers_after_compute()
        elif is_stream:
            if not are_writes_ordered:
                residency.written_in.add(phase)
                self.order_gathers_after_compute()
            elif residency.written_in:
                residency.written_in.discard(phase)
        occupant = residency.memory.slot.occupant
        if occupant is not None and occupant is not unit and not unit.keeps_unsharded:
            self._free_slot_for(unit)
        residency.start_unshard(phase)
        if not self.slots.are_assigned:
            self.slots.note_unsharded(unit, self.tick())
        if self._deferred_frees:
            self._free_deferred()

    def prefetch(self, units: Iterable[Unit], phase: Phase) -> None:
        """Start to gather `units`, except for those that cannot be gathered yet.

        A unit is not prefetched if its shards were written to in the last pass before it was needed, because the same
        hook may write to them again while the gather reads them.
        """
        needed_in = Phase.FORWARD if phase is Phase.FORWARD else Phase.PRE_BACKWARD
        for unit in units:
            residency = unit.residency
            if needed_in in residency.written_in or residency.state in ACTIVE:
                continue
            occupant = residency.memory.slot.occupant
            may_move = occupant is None or occupant is unit or unit.keeps_unsharded
            if may_move and not (unit in self._reductions.pending and self._reductions.has_hooks(unit)):
                self.start_unshard(unit, phase)

    def order_writes_after(self, unit: Unit) -> None:
        """Make later writes to the shards of `unit` wait until its gather has read them."""
        self._streams.compute.wait(self._streams.gather.mark())
        unit.residency.await_copies_of_shards()

    def order_gathers_after_compute(self) -> None:
        """Make later gathers wait for all compute work queued so far, which may have changed the shards."""
        self._streams.compute.wait(self.after_optimizer)
        self.after_optimizer = None
        if self._streams.gather.is_stream:
            self._streams.gather.wait(self._streams.compute.mark())
            for unit in self._units:
                unit.residency.note_writes_ordered()

    def reshard(self, unit: Unit, phase: Phase, *, keep: bool = False) -> None:
        """Reshard `unit`: free its unsharded parameters, or `keep` them in memory for the next use."""
        unit.residency.is_unsharded_manually = unit.residency.awaits_backward = False
        unit.residency.reshard(phase, keep=keep)
        if not (keep or self.slots.are_assigned):
            self.slots.note_freed(unit, self.tick())

    def free(self, unit: Unit, phase: Phase, order: OrderTracker) -> None:
        """Reshard `unit`, which is not in use, and free it once the gather of the next unit has started.

        A gather waits until compute has finished with all units that were freed earlier. So if the gather of the next
        unit in `order` has not started, `unit` is freed after the next gather has started. That gather then overlaps
        with the compute of `unit`.
        """
        is_deferred = unit.streams.gather.is_stream and not self._is_next_started(order)
        self.reshard(unit, phase, keep=is_deferred)
        if is_deferred:
            unit.residency.defer_free()
            self._deferred_frees.append((unit, phase))

    def forget_deferred_frees(self) -> None:
        """Cancel all deferred frees. The caller frees the units."""
        for unit, _ in self._deferred_frees:
            unit.residency.cancel_free()
        self._deferred_frees.clear()

    def _is_next_started(self, order: OrderTracker) -> bool:
        """Return True if the next unit is unsharded or being gathered, or if no unit follows."""
        coming = order.following(1)
        return self._units[coming[0]].residency.state in ACTIVE if coming else order.is_at_end

    def _free_deferred(self) -> None:
        deferred, self._deferred_frees = self._deferred_frees, []
        for unit, phase in deferred:
            if unit.residency.state not in ACTIVE:
                self.reshard(unit, phase)

    def _free_slot_for(self, unit: Unit) -> None:
        """Free the slot of `unit`, which another unit occupies, or give `unit` separate memory."""
        other = next((other for other in self._units if other is unit.slot.occupant), None)
        held = other is None or other.residency.is_unsharded_manually or other.residency.awaits_backward
        if other is not None and other.residency.users == 0 and not held:
            self.reshard(other, Phase.IDLE)  # it was prefetched or kept, and can be gathered again
        if not unit.residency.memory.can_occupy:
            if other is not None:  # a pending gather has views of the slot, and completes on each rank at its own time
                other.residency.wait_unshard()
            self.slots.give_separate_memory(unit)
