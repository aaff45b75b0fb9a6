"""The floor: the minimal work of a step on this machine, measured part by part in the same rounds as the systems.

    compute     forward and backward of the plain model on all ranks at once, nothing exchanged, gradients fresh
    optimizer   the same optimizer call on one flat shard
    gather      the whole model written once, in the dtype of compute, at the speed of a copy in memory;
                counted twice, for forward and for backward
    reduce      one shard's sum over all ranks' gradients, in float32, at the speed of memory

With one rank, gather and reduce are zero. The floor excludes exchange between processes, waits, and page faults other
than those of the gradients. It is a bound, not a system.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.bench.turns import Span, timed
from benchmarks.bench.workload import Workload

__all__ = ["FLOOR", "Floor", "FloorSeconds", "FloorTurn"]

FLOOR = "floor"
_GATHERS = 2


@dataclass(frozen=True, kw_only=True)
class FloorTurn:
    """The time of one rank for each part, repeated `repeats` times."""

    compute: Span
    optimizer: Span
    gather: Span
    reduce: Span
    repeats: int


@dataclass(frozen=True, kw_only=True)
class FloorSeconds:
    """Seconds of each part in one step; `gather` has both."""

    compute: float
    optimizer: float
    gather: float
    reduce: float

    @classmethod
    def of(cls, ranks: list[FloorTurn]) -> FloorSeconds:
        """Return the seconds per step from the turns of all ranks."""
        repeats = ranks[0].repeats
        return cls(
            compute=Span.seconds(turn.compute for turn in ranks) / repeats,
            optimizer=Span.seconds(turn.optimizer for turn in ranks) / repeats,
            gather=_GATHERS * Span.seconds(turn.gather for turn in ranks) / repeats,
            reduce=Span.seconds(turn.reduce for turn in ranks) / repeats,
        )

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.optimizer + self.gather + self.reduce


class Floor:
    """One rank of the floor."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._rank = dist.get_rank()
        self._device = workload.device(self._rank)
        self._model = workload.model(self._device).to(workload.compute_dtype)
        whole, world = workload.parameter_count(), workload.world
        self._whole = torch.zeros(whole, dtype=workload.compute_dtype, device=self._device)
        terms = torch.zeros(world, -(-whole // world), device=self._device)
        self._terms = terms.unbind()
        self._received = terms.flatten().view(workload.compute_dtype)[:whole]
        self._shard = torch.zeros(-(-whole // world), device=self._device, requires_grad=True)
        self._shard.grad = torch.zeros_like(self._shard)
        self._optimizer = workload.make_optimizer([self._shard])

    def run(self, first: int, steps: int) -> FloorTurn:
        """Run each part `steps` times, on the data of `steps` steps starting with number `first`."""
        batches = [self._workload.tokens(step, self._rank).to(self._device) for step in range(first, first + steps)]
        return FloorTurn(
            compute=timed(self._compute, batches, self._device)[0],
            optimizer=timed(self._step, batches, self._device)[0],
            gather=timed(self._gather, batches, self._device)[0],
            reduce=timed(self._reduce, batches, self._device)[0],
            repeats=steps,
        )

    def _compute(self, batch: Tensor) -> None:
        self._workload.loss(self._model, batch).backward()
        self._model.zero_grad()

    def _step(self, batch: Tensor) -> None:
        self._optimizer.step()

    def _gather(self, batch: Tensor) -> None:
        if self._workload.world > 1:
            self._whole.copy_(self._received)

    def _reduce(self, batch: Tensor) -> None:
        total, *others = self._terms
        for term in others:
            total.add_(term)
