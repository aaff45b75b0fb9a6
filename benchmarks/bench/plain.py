"""One plain process that does the work of all ranks: the losses that every system should have."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.bench.workload import Workload
from fullshard.plan.memory_used import PeakBytes, PeakMemory

__all__ = ["Plain"]


class Plain:
    """Unsharded training in one process. Gradients are added in rank order and divided once."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._device = workload.device(0)
        self._memory = PeakMemory(self._device)
        self._model = workload.model(self._device)
        self._computing = workload.model(self._device).to(workload.compute_dtype)
        self._optimizer = workload.make_optimizer(self._model.parameters())

    def losses(self, steps: int) -> list[list[float]]:
        """Return the losses of the first `steps` steps, one per step and rank."""
        return [self._step(step) for step in range(steps)]

    def memory(self) -> PeakBytes:
        """Return the peak memory so far."""
        return self._memory.peak()

    def _step(self, step: int) -> list[float]:
        with torch.no_grad():
            for own, param in zip(self._computing.parameters(), self._model.parameters(), strict=True):
                own.copy_(param)
        losses = [self._backward(step, rank) for rank in range(self._workload.world)]
        for param in self._model.parameters():
            assert param.grad is not None
            param.grad.div_(self._workload.world)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return [loss.item() for loss in losses]

    def _backward(self, step: int, rank: int) -> Tensor:
        """Add the gradients of one rank's batch and return its loss."""
        loss = self._workload.loss(self._computing, self._workload.tokens(step, rank).to(self._device))
        loss.backward()
        for own, param in zip(self._computing.parameters(), self._model.parameters(), strict=True):
            assert own.grad is not None
            grad = own.grad.to(param.dtype)
            param.grad = grad if param.grad is None else param.grad.add_(grad)
            own.grad = None
        return loss.detach()
