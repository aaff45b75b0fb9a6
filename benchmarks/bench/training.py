"""A rank of one system: it creates the system once, and trains on request."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from benchmarks.bench.systems import SYSTEMS
from benchmarks.bench.turns import Turn, timed
from benchmarks.bench.workload import Workload
from fullshard._dry_compat import storage_watch
from fullshard.plan.memory_used import PeakBytes, PeakMemory

__all__ = ["WATCHED_STEPS", "Prepared", "Training"]

WATCHED_STEPS = 2  # the first creates the optimizer's state, so the second is like all later ones


@dataclass(frozen=True)
class Prepared:
    """The figures of a rank after the creation of its system."""

    tensor_bytes: int  # the peak of live tensors in a step
    losses: Sequence[float]  # of the observed steps


class Training:
    """One rank of the system `name`."""

    def __init__(self, workload: Workload, name: str) -> None:
        self._workload = workload
        self._system = SYSTEMS[name]
        self._rank = dist.get_rank()
        self._device = workload.device(self._rank)
        importlib.import_module(self._system.needs)
        dist.barrier()
        gc.collect()
        self._memory = PeakMemory(self._device)

    def prepare(self) -> Prepared:
        """Create the system and train the first steps, observing the memory of all tensors."""
        with storage_watch(every_operation=True) as watch:
            self._trainer = self._system.build(self._workload, self._workload.model(self._device))
            losses: list[float] = []
            for step in range(WATCHED_STEPS):
                watch.peak_bytes = 0
                losses += self.run(step, 1).losses
        gc.collect()
        return Prepared(watch.peak_bytes, losses)

    def run(self, first: int, steps: int) -> Turn:
        """Train `steps` steps, the first of them number `first`."""
        batches = [self._workload.tokens(step, self._rank).to(self._device) for step in range(first, first + steps)]
        span, losses = timed(self._trainer.step, batches, self._device)
        return Turn(span, [loss.item() for loss in losses])

    def forget_peak(self) -> None:
        """Reset the peak of memory."""
        self._memory.reset()

    def memory(self) -> PeakBytes:
        """Return the peaks of memory since the reset."""
        return self._memory.peak()
