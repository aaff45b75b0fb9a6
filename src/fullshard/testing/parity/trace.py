"""The results of the plain process for each step, in files. Every rank reads its own part of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """Parameters, gradients and losses after a step; step 0 is the state before the first."""

    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # before clipping
    norm: Tensor | None = None  # of all gradients together
    losses: dict[int, Tensor] = field(default_factory=dict)  # by number of the microbatch


@dataclass(frozen=True)
class Trace:
    """The steps in a folder."""

    folder: Path

    def write(self, number: int, step: Step) -> None:
        """Write a step."""
        torch.save(asdict(step), self._file(number))

    def read(self, number: int) -> Step:
        """Return the results of step `number`. Tensors are read lazily, on access."""
        return Step(**torch.load(self._file(number), mmap=True, weights_only=True))

    def _file(self, number: int) -> Path:
        return self.folder / f"step{number}.pt"
