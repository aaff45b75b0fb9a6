"""What this rank has used by now, cheap enough to be asked for in every step."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

__all__ = ["Usage", "usage_of"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """Seconds and bytes of one rank."""

    busy_s: float  # on a core, of all threads; or on the device
    starved_s: float | None  # in which the main thread could have run, and had no core
    held: int  # bytes, by the process or by the allocator of its device

    def since(self, before: Usage) -> Usage:
        """The seconds since `before`, and the bytes now."""
        known = self.starved_s is not None and before.starved_s is not None
        starved_s = (self.starved_s or 0.0) - (before.starved_s or 0.0) if known else None
        return Usage(self.busy_s - before.busy_s, starved_s, self.held)

    def on_device(self, busy_s: float) -> Usage:
        """The same of a rank whose device was busy for so many seconds."""
        return replace(self, busy_s=busy_s)


def usage_of(device: torch.device) -> Callable[[], Usage]:
    """A function that gives what this rank has used by now. To be made on the thread that trains."""
    held = _resident() if device.type == "cpu" else lambda: int(torch.get_device_module(device).memory_reserved(device))
    starved = _starved()
    return lambda: Usage(time.process_time(), starved(), held())


def _starved() -> Callable[[], float | None]:
    """Seconds that this thread was ready and had no core: the second number of `schedstat`, in nanoseconds."""
    file = _opened(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    return lambda: None if file is None else int(_read(file).split()[1]) / 1e9


def _resident() -> Callable[[], int]:
    file = _opened("/proc/self/statm")
    return lambda: 0 if file is None else int(_read(file).split()[1]) * _PAGE


def _opened(path: str) -> Any:
    with suppress(OSError):  # not Linux
        return open(path, "rb", buffering=0)  # as long as the process lives
    return None


def _read(file: Any) -> bytes:
    content: bytes = os.pread(file.fileno(), 256, 0)
    return content
