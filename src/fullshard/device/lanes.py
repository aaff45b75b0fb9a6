"""Lanes: compute, gathers and reductions run beside each other on a GPU. On a CPU there is nothing to do.

[Note: who owns memory]
All memory is allocated and freed on the compute lane. A gather or a reduction borrows it between two events: it starts
after the event at which the compute lane had it ready, and the compute lane waits for the event that ends it before it
reuses or drops the memory. So no tensor needs `record_stream`, and peak memory is the same in every run. Since a gather
is started before the memory of the unit before it is freed, at most two units are unsharded at once, though the CPU
never waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

__all__ = ["Lane", "is_capturing", "pretending_to_capture"]


def is_capturing(device: torch.device) -> bool:
    """True if work queued on `device` goes into a CUDA graph, which replays it without this library's code."""
    return _pretends or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


_pretends = False


@contextmanager
def pretending_to_capture() -> Iterator[None]:
    """A context in which `is_capturing` is True for every device: for tests."""
    global _pretends
    _pretends = True
    try:
        yield
    finally:
        _pretends = False


class Lane:
    """A stream beside the compute stream of `device`; on devices without streams, the program order itself."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @property
    def is_stream(self) -> bool:
        """True if work is queued here in order, so that nothing needs to be waited for before more is queued."""
        return self._stream is not None

    def after_compute(self) -> AbstractContextManager[object]:
        """A context in which work is queued on this lane, behind all work queued on the compute lane so far."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """An event behind all work queued on this lane so far; None without streams."""
        return None if self._stream is None else self._stream.record_event()

    def hold_compute_until(self, event: torch.Event | torch.cuda.Event | None) -> None:
        """Let the compute lane go on only after `event`, which the user recorded; without streams it is past."""
        if self._stream is not None and event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)

    @staticmethod
    def hold_compute(event: torch.cuda.Event | None) -> None:
        """Let the compute lane go on only after `event`. The CPU does not wait."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
