"""One system's model and optimizer, and its training step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from benchmarks.bench.model import Model
from benchmarks.bench.workload import Workload

__all__ = ["Build", "Trainer"]


class Trainer:
    """A standard torch training step: forward, backward, step, zero.

    Args:
        workload: the training job.
        model: the model, wrapped or sharded by the system.
        optimizer: over the parameters of `model`.
        autocast: Compute in the workload's dtype with torch's autocast, for a system without a precision setting.
    """

    def __init__(
        self, workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer, *, autocast: bool = False
    ) -> None:
        self.workload = workload
        self.model = model
        self.optimizer = optimizer
        self.autocast = autocast and workload.casts

    def step(self, tokens: Tensor) -> Tensor:
        """Train on `tokens` and return the loss before the step."""
        with self._computing():
            loss = self.workload.loss(self.model, tokens)
        self.update(loss)
        return loss.detach()

    def update(self, loss: Tensor) -> None:
        """Run backward of `loss` and a step of the optimizer."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _computing(self) -> AbstractContextManager[object]:
        if not self.autocast:
            return nullcontext()
        return torch.autocast(self.workload.device_type, dtype=self.workload.compute_dtype)


Build = Callable[[Workload, Model], Trainer]
"""A function that creates a system from the plain model with initial weights, on a rank with a process group."""
