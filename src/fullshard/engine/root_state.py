"""The state of one root: the phase of its step, and the components that both drivers of its steps use."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullshard._compat import in_backward
from fullshard.device.accelerator import accelerator_for
from fullshard.device.streams import Streams
from fullshard.engine.activations import Activations
from fullshard.engine.call import ForwardCall
from fullshard.engine.expected import ExpectedOrder
from fullshard.engine.findings import DiskFailures
from fullshard.engine.finite import Tally
from fullshard.engine.microbatches import Microbatches
from fullshard.engine.nested import map_tensors
from fullshard.engine.reduction_queue import ReductionQueue
from fullshard.engine.registry import process_groups_along
from fullshard.engine.residency import UnitState
from fullshard.engine.unit import Unit
from fullshard.engine.unshard_scheduler import UnshardScheduler
from fullshard.errors import StateError
from fullshard.policy.precision import is_castable
from fullshard.tape.recorder import Origin, Phase, active_recorder, note_origin


class Disks:
    """The disks that store units of one root, and their failures in a forward or backward.

    Failures are reported to all ranks at the end of the pass: see [Note: a disk that fails on one rank] in
    `findings.py`. Outside of these passes, ranks may do different things, so a failure is raised where it occurs.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._failures = DiskFailures()
        self.are_in_pass = False
        """True if the shards of any unit were on a disk when the last pass began."""

    @property
    def are_used(self) -> bool:
        """True if the shards of any unit are on a disk."""
        return any([unit.shards.is_on_disk for unit in self._units])

    def begin_pass(self) -> None:
        """Record that all ranks begin the same forward or backward."""
        self.are_in_pass = self.are_used
        for of_unit in self._of_units():
            of_unit.are_reported = True

    def end_pass(self, activations: DiskFailures | None = None) -> None:
        """Raise on all ranks if the disk of one of them has failed. All ranks must call it at the end of the same pass.

        This is a collective if anything is stored on a disk.

        Args:
            activations: failures with activations, if these are on a disk in this pass.

        Raises:
            DiskError: the disk of a rank has failed.
        """
        self._collect()
        if activations is not None:
            self._failures.add(activations.take())
        if activations is not None or self.are_used:
            self._failures.raise_on_every_rank(process_groups_along(self._units), self._units[0].device)

    def forget(self) -> None:
        """Record that an exception has ended a pass."""
        self._collect()
        self._failures.take()

    def _collect(self) -> None:
        for of_unit in self._of_units():
            self._failures.add(of_unit.take())
            of_unit.are_reported = False

    def _of_units(self) -> list[DiskFailures]:
        return [
            disk_failure for unit in self._units if unit.shards.is_on_disk for disk_failure in unit.shards.disk_failures
        ]


_log = logging.getLogger(__name__)


class RootState:
    """The state of one root.

    Args:
        units: the units of the root, in the order of `root.modules()`.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.phase = Phase.IDLE
        self.stack: list[tuple[Unit, ForwardCall | None]] = []  # forwards that are executing, outermost first
        self.expected = ExpectedOrder(units)
        self.reductions = ReductionQueue(units)
        self.scheduler = UnshardScheduler(units, self.reductions)
        self.microbatches = Microbatches(units)
        self.activations = Activations(units)
        self.disks = Disks(units)

    @property
    def device(self) -> torch.device:
        """The compute device, which `Module.to` may have changed."""
        return self.units[0].device

    @property
    def streams(self) -> Streams:
        """The streams of the compute device."""
        return self.units[0].streams

    @property
    def is_interrupted(self) -> bool:
        """True if an exception has ended a forward or backward."""
        return self.phase is not Phase.IDLE and not self.stack and not in_backward()

    @property
    def is_running(self) -> bool:
        """True within a forward or backward, except for a forward with broken communication, which stays in `stack`."""
        return in_backward() or (bool(self.stack) and not any(unit.is_broken for unit in self.units))

    def prepare_inputs(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the inputs of a forward of `unit` on its device and in its input dtype."""
        policy = unit.options.precision
        outermost = not self.stack
        casts = policy.cast_forward_inputs or (unit.is_root and unit.options.casts_inputs_at_root)
        dtype = policy.param_dtype if casts else None
        moves = outermost and unit.streams.compute.is_stream
        if dtype is None and not moves:
            return args, kwargs

        def prepare(tensor: Tensor) -> Tensor:
            if moves:
                tensor = tensor.to(self.device, non_blocking=True)
            return tensor.to(dtype) if dtype is not None and is_castable(tensor.dtype) else tensor

        prepared: tuple[Any, Any] = map_tensors(prepare, (args, kwargs), partial(_warn_of_unmapped, "input", unit.name))
        return prepared

    def begin_microbatch(self) -> None:
        """Begin a microbatch. It is counted if gradients are enabled and no earlier forward waits for its backward."""
        self.check_streams()
        self.activations.begin_forward()
        self.microbatches.begin(counts=torch.is_grad_enabled() and not self.expected.open)

    def begin_backward(self) -> None:
        """Begin a backward whose hooks drive the step."""
        self.phase = Phase.BACKWARD
        self.disks.begin_pass()
        self.microbatches.count_writes()

    def check_streams(self) -> None:
        """Raise if a model that was sharded within `fullshard.dry.taped()` is used outside of it, or vice versa.

        Models without streams are not checked, because their operations are recorded in either case.
        """
        now, known = accelerator_for(self.device).streams, self.streams
        if now is not known and (now.compute.is_stream or known.compute.is_stream):
            raise StateError(
                f"{type(self.units[0].module).__name__} was sharded outside of this context of fullshard.dry.taped() "
                "or in one that has ended, so only a part of its steps would be recorded. Create, shard and train a "
                "model within one context."
            )

    def await_reads_of_shards(self) -> None:
        """Make the host wait until the gather stream has read shards in host memory, because the user may write to
        them.
        """
        if any([unit.shards.is_on_cpu for unit in self.units]):
            self.streams.host.wait(self.streams.gather.mark())

    def reshard_after_backward(self, unit: Unit) -> None:
        """Reshard `unit` at the end of a backward, or keep it in memory if it is needed again."""
        residency = unit.residency
        if residency.state is UnitState.SHARDED and self.scheduler.slots.are_assigned:  # as most units are
            residency.is_unsharded_manually = residency.awaits_backward = False
            if residency.has_secondary:
                residency.release_secondary(Phase.POST_BACKWARD)
            return
        unneeded = residency.state is UnitState.GATHERING and not self._is_kept_for_backward(unit)
        self.scheduler.reshard(unit, Phase.POST_BACKWARD, keep=self.stays_after_backward(unit) and not unneeded)

    def stays_after_backward(self, unit: Unit) -> bool:
        """Return True if `unit` stays unsharded after its backward."""
        return not unit.settings.reshard_after_backward or self._is_kept_for_backward(unit)

    def _is_kept_for_backward(self, unit: Unit) -> bool:
        """Return True if `unit` stays unsharded for a pending backward."""
        return not unit.reshards_after_forward and self.expected.awaits_backward_of(unit)

    def return_to_idle(self, *, trained: bool = True) -> None:
        """Reset to idle after a backward. `trained` is False if it computed gradients of inputs only."""
        if self.disks.are_in_pass:
            for unit in self.units:
                unit.shards.forget_ahead()
        if any([unit.shards.is_on_cpu for unit in self.units]):  # the optimizer reads their gradients next
            self.streams.host.wait(self.streams.offload.mark())
        self.await_reads_of_shards()
        accelerator_for(self.device).end_pass()
        self.phase = Phase.IDLE
        note_origin(Origin("", Phase.IDLE))
        if trained:
            self.microbatches.note_end()
        _last[:] = [weakref.ref(self)]

    def check_backward(self, tallies: Sequence[Tally]) -> None:
        """Raise the errors found in the last backward, on every rank. `tallies` count its non-finite gradients.

        Raises:
            DiskError: the disk of a rank has failed.
            StateError: a parameter was added after sharding, and is trained.
            NonFiniteError: the gradients of a rank are not finite.
        """
        self.disks.end_pass(self.activations.disk_failures)
        self.activations.end_backward()
        self.microbatches.late_params.check()
        self.reductions.check_finite(tallies)


def attribute_to(unit: Unit, phase: Phase) -> None:
    """Attribute later events of the trace to `unit`."""
    if active_recorder() is not None:
        note_origin(unit.origin(phase))


def cast_outputs(unit: Unit, output: Any) -> Any:
    """Cast the output of `unit` to its output dtype, and return it."""
    dtype = unit.options.precision.output_dtype
    if dtype is None:
        return output
    cast_one = partial(_cast_one, dtype)
    return map_tensors(cast_one, output, partial(_warn_of_unmapped, "output", unit.name))


def _cast_one(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if is_castable(tensor.dtype) else tensor


def _warn_of_unmapped(which: str, unit: str, value: Any) -> None:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if (which, kind) not in _unmapped:
        _unmapped.add((which, kind))
        _log.warning(
            "An %s of %s is a %s that holds tensors. They are neither cast to the dtype of the precision policy nor "
            "moved to the device, since fullshard cannot make a copy of such an object with other tensors. Use a "
            "dataclass, a dict, or torch.utils._pytree.register_pytree_node; or cast the tensors in the module.",
            which,
            unit or "the root",
            kind,
        )


_unmapped: set[tuple[str, str]] = set()


_last: list[weakref.ref[RootState]] = []  # the state of the root whose backward ended last, at most one


def state_of_last_backward() -> RootState | None:
    """Return the state of the root whose backward ended last; None if there was none, or its model no longer exists."""
    return _last[0]() if _last else None
