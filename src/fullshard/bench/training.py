"""A rank of one system: it builds the system once, and trains when asked to."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from fullshard._compat import storage_watch
from fullshard.bench.systems import SYSTEMS
from fullshard.bench.turns import Turn, timed
from fullshard.bench.workload import Workload
from fullshard.plan.memory_used import Memory, PeakMemory

__all__ = ["WATCHED_STEPS", "Prepared", "Training"]

WATCHED_STEPS = 2  # the first makes the optimizer's state, so the second is like all that follow


@dataclass(frozen=True)
class Prepared:
    """The figures of a rank once its system is built."""

    tensor_bytes: int  # the most that were alive at once in a step
    losses: Sequence[float]  # of the watched steps


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
        """Build the system and train the first steps, watching the memory of all tensors that are made."""
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
        """Count the peak of memory from here on."""
        self._memory.reset()

    def memory(self) -> Memory:
        """The peaks of memory since then."""
        return self._memory.peak()
