"""The reports of ranks on a turn: start, end and losses."""

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
    """A time interval of one rank in seconds, by the clock that all processes of a machine share."""

    start: float
    end: float

    @staticmethod
    def seconds(of_ranks: Iterable[Span]) -> float:
        """Return the seconds from the start of the first rank until the end of the last."""
        spans = list(of_ranks)
        return max(span.end for span in spans) - min(span.start for span in spans)


@dataclass(frozen=True)
class Turn:
    """The time and losses of one rank in a turn of its system."""

    span: Span
    losses: Sequence[float]  # one for each step


def timed(run: Callable[[Tensor], R], batches: Sequence[Tensor], device: torch.device) -> tuple[Span, list[R]]:
    """Call `run(batch)` for each batch after all ranks are ready. Return the time on this rank and the results."""
    dist.barrier()
    _finish(device)
    start = time.perf_counter()
    results = [run(batch) for batch in batches]
    _finish(device)
    return Span(start, time.perf_counter()), results


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
