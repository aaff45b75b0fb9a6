"""The microbatches of a step: their number, and the checks and broadcasts before each of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fullshard.comm.mesh import broadcast_from_first
from fullshard.device.accelerator import is_capturing
from fullshard.engine.comparison import are_identical
from fullshard.engine.late_params import LateParams
from fullshard.engine.registry import replicated_buffers_of
from fullshard.engine.uncounted_writes import count_writes
from fullshard.engine.unit import Unit
from fullshard.liveness.rank_progress import here
from fullshard.tape.recorder import Phase

_log = logging.getLogger(__name__)

_LAST_COMPARISON = 64  # the last step after which parameters outside of units are compared


class Microbatches:
    """The microbatches of a root's steps."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.outside: list[nn.Parameter] = []  # trained parameters outside of units, to be compared between ranks
        self._outside_since = 0  # the step after which `outside` was extended last
        self.late_params = LateParams(units)
        self.number = 0  # of the current microbatch in its step, starting with 1
        self.step = 0  # number of the root's step, starting with 1
        self._counted_writes = 0
        self._buffers_differ = True  # between ranks, because each has processed other data since the last broadcast

    def begin(self, *, counts: bool) -> None:
        """Begin a microbatch: invalidate unsharded parameters after a step or write, and count it if `counts`."""
        self.count_writes()
        for unit in self._units:
            unit.residency.invalidate_if_stepped()
        if counts:
            self._count()
        if torch.is_grad_enabled():
            self.late_params.check(again=counts and self.number == 1 and self.step.bit_count() == 1)
        if self._buffers_differ:
            self._buffers_differ = False
            for unit in self._units:
                if unit.options.broadcasts_buffers and unit.axes.world > 1:
                    _broadcast_buffers(unit)

    def count_writes(self) -> None:
        """Count the writes to shards for which torch counts no version, so that they are gathered again."""
        self._counted_writes = count_writes(self._units, self._counted_writes)

    def count_next(self) -> None:
        """Count one more microbatch of the step."""
        self._set_number(self.number + 1)

    def note_end(self) -> None:
        """Record that a backward is over: buffers may need a broadcast before the next microbatch."""
        self._buffers_differ = self._buffers_differ or any(unit.settings.syncs_gradients for unit in self._units)

    def begin_again(self) -> None:
        """Reset the count to its value before a step."""
        self.number = 0
        self._buffers_differ = True

    def _count(self) -> None:
        """Count a microbatch. It is the first of a step unless earlier gradients still wait for the optimizer."""
        is_first = True
        for unit in self._units:
            if unit.gradients.are_waiting:
                is_first = False
                break
        self._set_number(1 if is_first else self.number + 1)
        self.step += self.number == 1
        here.step = self.step
        age = self.step - self._outside_since
        is_due = self.number == 1 and (age + 1).bit_count() == 1  # repeated, because learning rates may start at 0
        if self.outside and is_due and not is_capturing(self._units[0].device):
            self._compare_outside(age)

    def _set_number(self, number: int) -> None:
        self.number = number
        for unit in self._units:
            unit.microbatch = number

    def compare_outside(self, params: Sequence[nn.Parameter]) -> None:
        """Compare `params`, which do not belong to a unit, between ranks at the start of some of the next steps."""
        known = {id(param) for param in self.outside}
        new = [param for param in params if id(param) not in known]
        if new:
            self.outside += new
            self._outside_since = self.step

    def _compare_outside(self, age: int) -> None:
        unit, params = self._units[0], self.outside
        if not are_identical(params, unit):
            self.outside = []
            if unit.axes.shard_rank == 0:
                _log.warning(
                    "%d parameters do not belong to any unit (the first has shape %s), so each rank trains them "
                    "separately: ranks have different values after %d steps. Call fully_shard on the outermost module, "
                    "which manages all remaining parameters; or call it on the module that owns these; or average "
                    "their gradients yourself and list them in ignored_params.",
                    *(len(params), tuple(params[0].shape), age),
                )
        elif age + 1 >= _LAST_COMPARISON:
            self.outside = []


def _broadcast_buffers(unit: Unit) -> None:
    """Broadcast the buffers of the first rank, in one message per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in replicated_buffers_of(unit.modules, unit.axes):
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    flats = [torch.cat([buffer.detach().reshape(-1) for buffer in same]) for same in by_dtype.values()]
    broadcast_from_first(flats, unit.axes, Phase.FORWARD)
    for flat, same in zip(flats, by_dtype.values(), strict=True):
        for buffer, values in zip(same, flat.split([buffer.numel() for buffer in same]), strict=True):
            buffer.detach().copy_(values.view(buffer.shape))
