"""What ranks report of a turn: when each began and ended, and what came out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Span", "Turn", "timed"]

R = TypeVar("R")


@dataclass(frozen=True)
class Span:
    """A stretch of time of one rank, by the clock that all processes of a machine share, in seconds."""

    start: float
    end: float

    @staticmethod
    def seconds(of_ranks: Iterable[Span]) -> float:
        """From when the first rank begins until the last one has ended."""
        spans = list(of_ranks)
        return max(span.end for span in spans) - min(span.start for span in spans)


@dataclass(frozen=True)
class Turn:
    """What one rank did in its turn."""

    span: Span
    losses: Sequence[float]  # one for each step


def timed(run: Callable[[Tensor], R], batches: Sequence[Tensor], device: torch.device) -> tuple[Span, list[R]]:
    """When `run(batch)` for one batch after the other began and ended on this rank, once all ranks were ready for it,
    and what it returned.
    """
    dist.barrier()
    _finish(device)
    start = time.perf_counter()
    results = [run(batch) for batch in batches]
    _finish(device)
    return Span(start, time.perf_counter()), results


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
