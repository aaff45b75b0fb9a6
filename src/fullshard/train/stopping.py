"""Handling of SIGTERM, which cluster schedulers send before they reclaim machines: the run saves and exits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from fullshard.liveness.rank_progress import here

PREEMPTED = os.EX_TEMPFAIL  # exit code 75: the run can be resumed


class StopRequest:
    """A request to stop, which all ranks detect after the same step even if only one rank receives it."""

    def __init__(self) -> None:
        self._requested = False
        self._group = dist.new_group(backend="gloo")  # separate: it is used while a step's collectives are pending
        self._any_requested = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGTERM."""
        self._requested = True

    def exchange(self) -> None:
        """Start to exchange requests with the other ranks. Call it before each step."""
        self._any_requested.fill_(self._requested)
        self._work = dist.all_reduce(self._any_requested, dist.ReduceOp.MAX, self._group, async_op=True)

    def any_requested(self) -> bool:
        """Return True if any rank had a request when the step began. Call it after each step."""
        assert self._work is not None, "exchange() comes first"
        with here.waiting("all_reduce of requests to stop"):
            self._work.wait()
        return bool(self._any_requested)


@contextmanager
def recording_sigterm() -> Iterator[StopRequest]:
    """Context manager that records SIGTERM, which then does not end the process.

    On a thread other than the main thread, signals are left to the owner of the process, such as Ray.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = signal.signal(signal.SIGTERM, request.note)
    try:
        yield request
    finally:
        signal.signal(signal.SIGTERM, before)
