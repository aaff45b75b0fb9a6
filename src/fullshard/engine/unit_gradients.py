"""The gradients of a unit, from autograd to the start of their reduction."""

from __future__ import annotations

import weakref
from collections.abc import Container
from contextlib import nullcontext

from fullshard.engine.communicating import Communicating
from fullshard.engine.reduction import UnitReduction
from fullshard.engine.sharded_param import ShardedParam
from fullshard.engine.unit_parts import UnitParts
from fullshard.policy.strategy import Placement
from fullshard.tape.recorder import Phase, acting_for, active

holding: weakref.WeakSet[UnitGradients] = weakref.WeakSet()
"""Objects that hold, or have held, gradients of microbatches that are not completely reduced."""


class UnitGradients:
    """The gradients of the parameter groups of a unit."""

    def __init__(self, unit: UnitParts) -> None:
        self._unit = unit
        self.arrived: dict[ShardedParam, bool] = {}  # parameters that have a gradient in this backward
        self.are_held = False  # unsharded gradients wait for the reduction of a later microbatch

    @property
    def have_whole(self) -> bool:
        """True if unsharded gradients wait for a reduction."""
        for param_group in self._unit.param_groups:
            if param_group.holds_whole_grads:
                return True
        return False

    @property
    def are_waiting(self) -> bool:
        """True if there are gradients that an optimizer can still step with, or that wait for a reduction."""
        if self.are_held:
            return True
        for param_group in self._unit.param_groups:
            if param_group.gradients.are_waiting:
                return True
        return False

    @property
    def holds_back(self) -> bool:
        """True if gradients of the next backward are to wait for the reduction of a later microbatch."""
        return (
            not self._unit.settings.syncs_gradients and self._unit.options.placements.gradients is not Placement.GROUPED
        )

    @property
    def await_second_sum(self) -> bool:
        """True if the second level of sums that were held back is due now."""
        for param_group in self._unit.param_groups:
            if param_group.gradients.state.first_sums:
                return self._finish_sums
        return False

    @property
    def _finish_sums(self) -> bool:
        """True if a reduction now includes the second level: over the replicate axis, or across groups."""
        return self._unit.settings.syncs_gradients and self._unit.settings.syncs_replicas

    def hold(self) -> None:
        """Keep the unsharded gradients for a later reduction."""
        for param_group in self._unit.param_groups:
            param_group.gradients.hold()
        self.are_held = self.have_whole
        holding.add(self)

    def drop_unreduced(self, dropped: Container[ShardedParam]) -> None:
        """Drop gradients of the `dropped` parameters that are not reduced yet, or only over the first level."""
        for param_group in self._unit.param_groups:
            state = param_group.gradients.state
            for i, param in enumerate(param_group.params):
                if param in dropped:
                    param.unsharded.grad = None
                    state.whole.pop(i, None)
                    state.first_sums.pop(i, None)
        self.are_held = self.are_held and self.have_whole

    def drop(self) -> None:
        """Drop the unsharded gradients."""
        self.are_held = False
        for param_group in self._unit.param_groups:
            param_group.gradients.drop()

    def abandon(self) -> None:
        """Drop all gradients (unsharded, first-level sums, and those the optimizer would see) and error feedback."""
        self.drop()
        for param_group in self._unit.param_groups:
            param_group.gradients.state.first_sums.clear()
            param_group.transports.forget_errors()
        for param in self._unit.params:
            param.sharded.grad = None

    def start_reductions(self, phase: Phase) -> UnitReduction:
        """Start the reduction of unsharded gradients to the optimizer's gradients."""
        streams = self._unit.streams
        self.are_held = False
        finishes, origin, hook = self._finish_sums, self._unit.origin(phase), self._unit.settings.all_reduce_hook
        divisor = self._unit.settings.gradient_divisor
        noted = origin
        if divisor is not None or hook is not None:  # so that ranks compare these settings
            note = ["with an all-reduce hook"] * (hook is not None) + [f"divided by {divisor}"] * (divisor is not None)
            noted = origin._replace(note=", ".join(note))
        if not finishes:
            holding.add(self)
        taken = []
        for param_group in self._unit.param_groups:
            taken.append((param_group, param_group.gradients.take()))
        read = [dict(grads) for _, grads in taken] if streams.reduce.is_stream else []
        if streams.reduce.is_stream:
            streams.reduce.wait(streams.compute.mark())
        recorder = active.recorder
        is_recorded = recorder is not None and recorder.follows_memory
        with Communicating(origin, streams.reduce, is_recorded=is_recorded):
            reductions = []
            for param_group, grads in taken:
                if self._unit.settings.reduces_unused:
                    param_group.gradients.fill_missing(grads)
                if grads or (finishes and param_group.awaits_second_sum):
                    by = divisor or param_group.averaged_over(self._unit.data_ranks)
                    reductions.append(
                        param_group.start_reduction(grads, divisor=by, finishes=finishes, origin=noted, hook=hook)
                    )
        with acting_for(origin, "messages") if is_recorded else nullcontext():
            return UnitReduction(reductions, read, streams, origin)
