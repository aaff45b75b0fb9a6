"""The state of a unit: whether its parameters are sharded, being gathered or unsharded, and what changes that.

[Note: states of a unit]
Only `Residency` writes the state. Each state determines which form the modules show, and whether the unit occupies the
memory of its unsharded parameters (its slot, see `device/memory.py`):

    state           modules show            memory
    META            shards without values   free (or occupied, if kept between steps)
    SHARDED         shards                  free
    GATHERING       shards                  being filled
    BROKEN          shards                  as GATHERING, but the wait for its gather failed
    UNSHARDED       unsharded parameters    filled
    KEPT            shards                  occupied: used again without a gather unless shards have changed
    DEFERRED_FREE   shards                  as KEPT, until the next gather has started
    SUMMONED        the user's copies       as in the previous state

    SHARDED, KEPT or DEFERRED_FREE -> GATHERING -> UNSHARDED -> KEPT (-> DEFERRED_FREE) -> SHARDED

`start_unshard` leads to GATHERING, `finish_gather` and `wait_unshard` to UNSHARDED, and `reshard` back to SHARDED, or
to KEPT with `keep=True`. A unit whose parameters are unsharded between steps is KEPT instead of SHARDED. After a failed
gather, the unit raises the same error whenever it is needed, until it is resharded or `forget_gather` is called. A wait
that was only interrupted (`KeyboardInterrupt`) is repeated instead.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from fullshard.comm.transport import Pending
from fullshard.device.memory import Slot
from fullshard.device.streams import Mark
from fullshard.engine.communicating import Communicating
from fullshard.engine.param_group import ParamGroup, start_gathers
from fullshard.engine.unit_parts import UnitParts
from fullshard.engine.unit_plans import are_on_meta
from fullshard.engine.unsharded_memory import UnshardedMemory
from fullshard.errors import StateError
from fullshard.policy.strategy import Placement
from fullshard.tape.recorder import Event, Phase, active, note_wait


class UnitState(Enum):
    """The state of a unit. See [Note: states of a unit]."""

    __hash__ = object.__hash__  # faster than that of `Enum`, which is a Python function

    META = "on the meta device"
    SHARDED = "sharded"
    GATHERING = "being gathered"
    BROKEN = "broken"
    UNSHARDED = "unsharded"
    KEPT = "kept"
    DEFERRED_FREE = "to be freed"
    SUMMONED = "summoned"


_META, _SHARDED, _GATHERING, _BROKEN = UnitState.META, UnitState.SHARDED, UnitState.GATHERING, UnitState.BROKEN
_UNSHARDED, _KEPT, _DEFERRED_FREE = UnitState.UNSHARDED, UnitState.KEPT, UnitState.DEFERRED_FREE
_SUMMONED = UnitState.SUMMONED

TRANSITIONS: dict[UnitState, tuple[UnitState, ...]] = {
    _META: (_SHARDED, _KEPT, _SUMMONED),
    _SHARDED: (_GATHERING, _SUMMONED, _META, _KEPT),  # to KEPT: memory was allocated, but the gather failed to start
    _GATHERING: (_UNSHARDED, _BROKEN, _KEPT),  # to KEPT: the gathered data was rejected, or the gather was dropped
    _BROKEN: (_UNSHARDED, _KEPT),
    _UNSHARDED: (_KEPT,),
    _KEPT: (_GATHERING, _DEFERRED_FREE, _SHARDED, _SUMMONED, _META),
    _DEFERRED_FREE: (_GATHERING, _SHARDED, _KEPT, _META),
    _SUMMONED: (_SHARDED, _KEPT, _META),
}
"""The states that may follow each state."""

INACTIVE = (_META, _SHARDED, _KEPT, _DEFERRED_FREE)
"""States with a sharded form in the modules and without a pending gather."""

ACTIVE = (_GATHERING, _BROKEN, _UNSHARDED)
"""States of a unit that is unsharded or being gathered."""

_GATHERS = (_GATHERING, _BROKEN)
_OCCUPIED = (_KEPT, _DEFERRED_FREE)


class Residency:
    """The state of one unit. See [Note: states of a unit].

    Only this class writes `state`. Drivers and the scheduler also write `users`, `awaits_backward`,
    `is_unsharded_manually` and `is_used_without_forward`.
    """

    def __init__(self, unit: UnitParts, memory: UnshardedMemory) -> None:
        self._unit = unit
        self.memory = memory
        self.state = self._inactive_state()
        self.users = 0  # number of running forwards and backwards that need the unit unsharded
        self.is_unsharded_manually = False  # by `unshard()`, until it is resharded
        self.is_used_without_forward = False  # unsharded by `unshard()`, and no forward of the unit has begun since
        self.awaits_backward = False  # kept until the end of the next backward
        self.written_in: set[Phase] = set()  # phases in which shards were written to before the unit was needed
        self._pending: list[Pending] = []
        self._failure: Exception | None = None  # of the pending gather
        self._gathered: Mark | None = None
        self._stale: list[ParamGroup] = []
        self.deferred_steps: list[Callable[[], None]] = []  # optimizer steps that run before the shards are used
        self._ordered_versions: list[tuple[int, ...]] = []  # after the writes that gathers wait for
        self.has_secondary = any(param_group.gather.is_two_level for param_group in unit.param_groups)
        """True if there may be secondary shards."""
        self._keeps_secondary = unit.options.placements.parameters is Placement.GROUPED

    def _become(self, state: UnitState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise StateError(
                f"{self._unit.name or 'the root'} is {self.state.value} and cannot become {state.value}. This is a "
                "bug in fullshard: please report it with the calls that led to it."
            )
        self.state = state

    def _inactive_state(self) -> UnitState:
        if are_on_meta([param_group.plan for param_group in self._unit.param_groups]):
            return _META
        return _KEPT if self.memory.is_occupied else _SHARDED

    def note_layout(self) -> None:
        """Record that the memory of shards or unsharded parameters was replaced. The unit must not be in use."""
        self.has_secondary = any(param_group.gather.is_two_level for param_group in self._unit.param_groups)
        if self.state is not _SUMMONED and (found := self._inactive_state()) is not self.state:
            self._become(found)

    # -- unshard ------------------------------------------------------------------------------------------------------

    def start_unshard(self, phase: Phase) -> None:
        """Start the all-gather of the unsharded parameters, unless they have been gathered or are being gathered."""
        if self.state in ACTIVE:
            return
        unit = self._unit
        unit.check_replacements()
        groups = unit.param_groups
        for param_group in groups:
            if not param_group.holds_its_shards:  # a submodule was moved or cast separately
                unit.shards.adopt()
                break
        if self.state is _META:
            unit.check_materialized()
        recorder = active.recorder
        is_recorded = recorder is not None and recorder.follows_memory
        is_allocated = self.state in _OCCUPIED
        if not is_allocated:
            self.memory.allocate(groups)
            if is_recorded:
                self._note("allocate", phase, self.memory.nbytes)
        stale = list[ParamGroup]()
        for param_group in groups:
            if not param_group.gather.is_current:
                stale.append(param_group)
        streams = unit.streams
        secondary_nbytes, separate_nbytes = (self.secondary_nbytes, self._separate_nbytes) if is_recorded else (0, 0)
        origin, into_shared = unit.origin(phase), self.memory.slot.is_rank_shared
        try:
            with Communicating(origin, streams.gather, is_recorded=is_recorded):
                if len(stale) == 1:
                    self._pending = [stale[0].start_gather(origin, into_shared=into_shared)]
                else:
                    self._pending = start_gathers(stale, origin, into_shared=into_shared) if stale else []
                self._gathered = streams.gather.mark() if streams.gather.is_stream else None
        except BaseException:
            if not is_allocated:
                self._become(_KEPT)
            raise
        if is_recorded:
            if self.secondary_nbytes > secondary_nbytes and not self._keeps_secondary:
                self._note("allocate", phase, self.secondary_nbytes - secondary_nbytes)
            if self._separate_nbytes > separate_nbytes:
                self._note("allocate", phase, self._separate_nbytes - separate_nbytes)
        self._stale = stale
        self._become(_GATHERING)

    def wait_unshard(self) -> bool:
        """Wait for the all-gather, and show the unsharded parameters to the modules.

        Gather again if shards were written to since the gather started, for example by a hook of an earlier module.

        Returns:
            True if shards were written to.
        """
        if self.finish_gather():
            return False
        self.reshard(keep=True)
        self.run_deferred_steps()
        streams = self._unit.streams
        streams.gather.wait(streams.compute.mark())
        self.start_unshard(Phase.IDLE)
        self.finish_gather()
        return True

    def finish_gather(self) -> bool:
        """Wait for the pending all-gather, and show the gathered parameters to the modules.

        Returns:
            True unless shards were written to since the gather started.
        """
        if self.state not in _GATHERS:
            return True
        if self._failure is not None:
            raise self._failure
        unit = self._unit
        streams = unit.streams
        try:
            for pending in self._pending:
                pending.wait()
        except BaseException as error:
            if self.state is _GATHERING:
                self._become(_BROKEN)
            self._failure = error if isinstance(error, Exception) else None
            raise
        if self._gathered is not None:
            is_over = None if active.recorder is None else note_wait(streams.compute, unit.origin(Phase.FORWARD))
            streams.compute.wait(self._gathered)
            if is_over is not None:
                is_over()
        stale, self._pending, self._gathered, self._stale = self._stale, [], None, []
        try:
            renewed = False
            for param_group in stale:
                renewed = param_group.finish_gather() or renewed
        except BaseException:  # a tensor subclass rejected the gathered data
            self._become(_KEPT)
            raise
        self._become(_UNSHARDED)
        unit.show_unsharded(renewed=renewed)
        for param_group in stale:
            if not param_group.gather.is_current:
                return False
        return True

    def forget_gather(self) -> None:
        """Drop a pending gather that failed or that not all ranks have started, and invalidate the values."""
        if self.state in _GATHERS:
            self._pending, self._failure, self._gathered, self._stale = [], None, None, []
            self._become(_KEPT)
        for param_group in self._unit.param_groups:
            param_group.gather.note_changed_shards()

    # -- reshard ------------------------------------------------------------------------------------------------------

    def reshard(self, phase: Phase = Phase.IDLE, *, keep: bool = False) -> None:
        """Show the sharded parameters to the modules, and free the unsharded ones.

        Args:
            phase: The phase to record.
            keep: Whether to keep the unsharded parameters in memory. They are gathered again only if shards change.
        """
        if self._failure is not None:
            self.forget_gather()
        elif self.state in _GATHERS:
            self.finish_gather()
        unit = self._unit
        if self.state is _UNSHARDED:
            unit.hide_unsharded()
            self._become(_KEPT)
        self.awaits_backward = self.awaits_backward and keep
        if self.state in _OCCUPIED and not (keep or unit.keeps_unsharded):
            recorder = active.recorder
            is_recorded = recorder is not None and recorder.follows_memory
            nbytes = self.memory.nbytes + self._separate_nbytes if is_recorded else 0
            self.memory.slot.free()
            for param_group in unit.param_groups:
                param_group.release()
            self._become(_SHARDED)
            if is_recorded:
                self._note("free", phase, nbytes)
        if phase is not Phase.FORWARD and self.has_secondary:
            self.release_secondary(phase)

    def defer_free(self) -> None:
        """Mark a kept unit to be freed when the next gather has started."""
        if self.state is _KEPT and not self._unit.keeps_unsharded:
            self._become(_DEFERRED_FREE)

    def cancel_free(self) -> None:
        """Cancel `defer_free`."""
        if self.state is _DEFERRED_FREE:
            self._become(_KEPT)

    def hand_over_shards(self) -> None:
        """Reshard, and make the host wait for copies from the shards, so that it may write to the shards."""
        self.reshard()
        self.await_copies_of_shards()

    def await_copies_of_shards(self) -> None:
        """Make the host wait until the gather stream has read the shards, if they are in host memory."""
        if self._unit.shards.is_on_cpu and self.state is not _META:
            streams = self._unit.streams
            streams.host.wait(streams.gather.mark())

    def release_secondary(self, phase: Phase) -> None:
        """Free the secondary shards, which are kept from forward to backward."""
        if self._keeps_secondary:
            return
        nbytes = 0
        for param_group in self._unit.param_groups:
            if param_group.gather.secondary_nbytes:
                nbytes += param_group.gather.secondary_nbytes
                param_group.gather.release_secondary()
        if nbytes:
            self._note("free", phase, nbytes)

    def move(self, slot: Slot) -> None:
        """Use `slot` for the unsharded parameters. No pending graph may have a view of the current slot."""
        assert self.state in INACTIVE, "only a sharded unit moves"
        self.memory.move(slot, self._unit.param_groups)
        self.note_layout()

    # -- the user's copies --------------------------------------------------------------------------------------------

    def summon(self) -> None:
        """Record that the modules show the user's full parameters. The unit must be resharded."""
        self._become(_SUMMONED)

    def end_summon(self) -> None:
        """Record that the modules show the sharded parameters again."""
        self._become(self._inactive_state())

    def check_not_summoned(self) -> None:
        """Raise if the unit's parameters are summoned."""
        if self.state is _SUMMONED:
            raise StateError(
                f"{self._unit.name or 'the root'} was used within summon_full_params, which has not written back "
                "changes yet. Exit the context first."
            )

    # -- changes of shards --------------------------------------------------------------------------------------------

    def invalidate_if_stepped(self) -> None:
        """Invalidate unsharded parameters if an optimizer may have stepped since their gradients were delivered."""
        groups = self._unit.param_groups
        stepped = [param_group for param_group in groups if param_group.gradients.take_possible_step()]
        if stepped and self.state in _GATHERS:
            self.finish_gather()
            streams = self._unit.streams
            streams.gather.wait(streams.compute.mark())  # compute has unpacked the received data
        for param_group in stepped:
            param_group.gather.note_changed_shards()
        if self.state is _UNSHARDED and not all(param_group.gather.is_current for param_group in groups):
            self.reshard(keep=True)

    def note_writes_ordered(self) -> None:
        """Record that later gathers are ordered after all writes to shards so far."""
        self._ordered_versions = [param_group.gather.versions for param_group in self._unit.param_groups]

    @property
    def are_writes_ordered(self) -> bool:
        """True if gathers are ordered after all known writes. (Writes of fused optimizers have no versions.)"""
        return self._ordered_versions == [param_group.gather.versions for param_group in self._unit.param_groups]

    def run_deferred_steps(self) -> None:
        """Run all deferred steps."""
        if not self.deferred_steps:
            return
        steps, self.deferred_steps = self.deferred_steps, []
        for step in steps:
            step()
        self.note_writes_ordered()  # the steps run on the CPU, before later gathers are queued

    # -- bytes --------------------------------------------------------------------------------------------------------

    @property
    def secondary_nbytes(self) -> int:
        """Bytes of the secondary shards that are in memory."""
        return sum(param_group.gather.secondary_nbytes for param_group in self._unit.param_groups)

    @property
    def _separate_nbytes(self) -> int:
        return sum(param_group.present_separate_nbytes for param_group in self._unit.param_groups)

    def _note(self, name: str, phase: Phase, nbytes: int) -> None:
        recorder = active.recorder
        if recorder is not None:
            recorder.add(Event(name, self._unit.origin(phase), nbytes=nbytes)).finish()
