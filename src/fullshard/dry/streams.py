"""Simulated streams: queued work runs immediately and is recorded in a trace under the name of the stream."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from fullshard.device.accelerator import Accelerator
from fullshard.device.streams import STREAMS, Mark, Stream, Streams
from fullshard.dry.storages import Storages
from fullshard.tape.tape import HOST, DiskTransfer, Recorded, Tape, Waited

_PACKAGE = Path(__file__).parent.parent
_DEVICE_LAYER = (*(str(_PACKAGE / name) for name in ("device", "dry", "disk/files.py")), "<")
OF_TORCH = "torch: "  # the prefix of `Waited.site` if torch itself makes the host wait

LAG = 6
"""The number of operations that a simulated device is behind the host.

An event is complete when the host has queued that many operations since, or has waited for it or for a later event of
the same stream.
"""


class _DryMark:
    """A point in the work of a simulated stream."""

    def __init__(self, number: int, stream: str, time: int, accelerator: DryAccelerator) -> None:
        self.number, self.stream, self.time = number, stream, time
        self._accelerator = accelerator

    def query(self) -> bool:
        """Return True if the event is complete; see `LAG`. In that case, later work of the host is ordered after it."""
        return self._accelerator.is_complete(self)

    def synchronize(self) -> None:
        """Make the host wait for this event."""
        self._accelerator.streams.host.wait(self)


class DryStream(Stream):
    """A stream that records its operations in a trace."""

    is_stream = True

    def __init__(self, name: str, accelerator: DryAccelerator) -> None:
        super().__init__(name)
        self._accelerator = accelerator

    def queueing(self) -> AbstractContextManager[object]:
        return self._accelerator.on_stream(self.name)

    def mark(self) -> Mark:
        return self._accelerator.mark(self.name)

    def wait(self, mark: Mark | None) -> None:
        if isinstance(mark, _DryMark):
            self._accelerator.note_wait(mark, self.name)


class DryAccelerator(Accelerator):
    """An accelerator simulated on a CPU.

    Args:
        tape: The trace to record to.
        has_streams: Whether to simulate an accelerator. If False, only the memory of a CPU is recorded.
        host_bytes: The host memory in bytes that this rank may use. None means no limit.
        lag: The number of operations that the device lags behind the host. If 0, each event is complete immediately.
    """

    is_dry = True

    def __init__(self, tape: Tape, *, has_streams: bool = True, host_bytes: int | None = None, lag: int = LAG) -> None:
        self.has_streams = has_streams
        self.tape = tape
        self.stream = STREAMS[0]
        self._host_bytes = host_bytes
        self._lag = lag
        self._marks = 0
        self._reached: dict[str, int] = {}  # by stream, the last event that the host has waited for
        self._transfers = 0  # the number of transfers from and to disks
        self.queued = 0  # the number of operations
        self.storages = Storages(tape)

    @cached_property
    def streams(self) -> Streams:
        return Streams(*[(DryStream(name, self) if self.has_streams else Stream(name)) for name in STREAMS])

    def mark_here(self) -> Mark | None:
        return self.mark(self.stream) if self.has_streams else None

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        self.storages.note_freed(storage)
        super().resize(storage, nbytes)
        self.storages.note_allocated(storage, self.stream, "unsharded parameters")

    def note_shared(self, storage: torch.UntypedStorage, ranks: int, purpose: str) -> None:
        self.storages.note_freed(storage)
        self.storages.note_allocated(storage, self.stream, purpose, ranks)

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        return self._copied(tensor, self.stream) if self.storages.is_host(tensor) else tensor

    def alongside(self, tensor: Tensor, other: Tensor) -> Tensor:
        to_host = self.storages.is_host(other)
        if to_host == self.storages.is_host(tensor):
            return tensor
        return self._copied(tensor, HOST if to_host else self.stream)

    def to_host(self, tensor: Tensor) -> Tensor:
        return self._copied(tensor, HOST) if self.has_streams else super().to_host(tensor)

    def memory_of(self, tensor: Tensor) -> Hashable:
        return HOST if self.storages.is_host(tensor) else self.stream

    def note_disk_transfer(self, memory: Tensor, file: object, offset: int, *, name: str) -> Mark | None:
        if not self.has_streams:
            return None
        if not self.storages.is_host(memory):  # it is copied from or to host memory, and the host waits for the copy
            self.block_host(self.stream, "aten.copy_", queried=True)
        self._transfers += 1
        on_disk = (self.storages.access_to_file(file, offset, offset + memory.nbytes),)
        in_memory, stream = (self.storages.access(memory),), f"disk {self._transfers}"
        read, written = (in_memory, on_disk) if name == "write" else (on_disk, in_memory)
        self.tape.note(DiskTransfer(name, stream, self.tape.origin, read, written))
        return self._mark(stream)

    def _copied(self, tensor: Tensor, stream: str) -> Tensor:
        with self.on_stream(stream):
            copied = torch.empty(tensor.shape, dtype=tensor.dtype)
        return copied.copy_(tensor)

    def host_zeros(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        with self.on_stream(HOST):
            return torch.zeros(numel, dtype=dtype)

    def host_room(self, ranks: int) -> int | None:
        return None if self._host_bytes is None else self._host_bytes - self.storages.nbytes_from(HOST)

    def on_host(self) -> AbstractContextManager[object]:
        return self.on_stream(HOST)

    @contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        """Context manager that queues work on the stream called `name`."""
        before, self.stream = self.stream, name
        try:
            yield
        finally:
            self.stream = before

    def mark(self, stream: str) -> Mark:
        """Record an event on the stream called `stream` and return it."""
        self._check_current(stream)
        return self._mark(stream)

    def _mark(self, stream: str) -> _DryMark:
        self._marks += 1
        self.tape.note(Recorded(self._marks, stream, self.tape.origin))
        return _DryMark(self._marks, stream, self.queued, self)

    def note_wait(self, mark: _DryMark, stream: str, site: str = "", *, queried: bool = False) -> None:
        """Record that `stream` waits for `mark`. `site` is the line that requested it; by default the caller's."""
        self._check_current(stream)
        if stream == HOST:
            self._reached[mark.stream] = max(mark.number, self._reached.get(mark.stream, 0))
        self.tape.note(Waited(mark.number, stream, site or _site(), self.tape.origin, queried))

    def is_complete(self, mark: _DryMark) -> bool:
        """Return True if the work before `mark` is complete. Record a wait if the host has not waited for it."""
        if mark.number <= self._reached.get(mark.stream, 0):
            return True
        if self.queued - mark.time < self._lag:
            return False
        self.note_wait(mark, HOST, queried=True)
        return True

    def _check_current(self, stream: str) -> None:
        """Check that the compute stream is used only while it is the current stream, or on the host."""
        assert stream != STREAMS[0] or self.stream in (stream, HOST), (
            f"compute was requested within stream {self.stream}"
        )

    def block_host(self, stream: str, operation: str, *, queried: bool = False) -> None:
        """Record that an operation of torch makes the host wait for `stream`. See `Waited` for `queried`."""
        self.note_wait(self._mark(stream), HOST, f"{OF_TORCH}{operation}", queried=queried)


def _site() -> str:
    """Return the line that requests a wait and the line that calls its function, both outside of the device layer.

    The format is "file:line in function, called by file:line in function". The caller is included because a method with
    several callers counts as several sites. A line within a comprehension belongs to the function around it.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_DEVICE_LAYER):
        frame = frame.f_back
    site = _line(frame)
    while frame.f_back is not None and frame.f_code.co_name in ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"):
        frame = frame.f_back
    caller = frame.f_back
    is_finalizer = frame.f_code.co_name == "__del__"  # the garbage collector calls it from an arbitrary line
    if caller is None or is_finalizer or not caller.f_code.co_filename.startswith(str(_PACKAGE)):
        return site
    return f"{site}, called by {_line(caller)}"


def _line(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_qualname.split('.<locals>.<')[0]}"
