"""The current resource usage of this rank. Queries are cheap enough for every step."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """Seconds and bytes of one rank."""

    busy_s: float  # CPU time of all threads, or busy time of the device
    starved_s: float | None  # while the main thread was ready but had no core
    held: int  # bytes of the process, or of the allocator of its device

    def since(self, before: Usage) -> Usage:
        """Return the seconds since `before` and the current bytes."""
        known = self.starved_s is not None and before.starved_s is not None
        starved_s = (self.starved_s or 0.0) - (before.starved_s or 0.0) if known else None
        return Usage(self.busy_s - before.busy_s, starved_s, self.held)


class UsageMeter:
    """A callable that returns the current usage of this rank. Create it on the training thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._starved = _opened(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._resident = _opened("/proc/self/statm")

    def __call__(self) -> Usage:
        starved = _second_number(self._starved)  # nanoseconds ready without a core, see sched-stats
        return Usage(time.process_time(), None if starved is None else starved / 1e9, self._held())

    def _held(self) -> int:
        if self._device.type != "cpu":
            return int(torch.get_device_module(self._device).memory_reserved(self._device))
        return (_second_number(self._resident) or 0) * _PAGE

    def close(self) -> None:
        """Stop measuring."""
        for file in (self._starved, self._resident):
            if file is not None:
                os.close(file)


def _opened(path: str) -> int | None:
    with suppress(OSError):  # not Linux
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    return None


def _second_number(file: int | None) -> int | None:
    return None if file is None else int(os.pread(file, 256, 0).split()[1])
