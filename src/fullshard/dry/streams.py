"""Simulated streams: queued work runs immediately and is recorded in a trace under the name of the stream."""

from __future__ import annotations

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
from fullshard.tape.tape import HOST, Recorded, Tape, Waited

__all__ = ["OF_TORCH", "DryAccelerator", "DryStream"]

_PACKAGE = Path(__file__).parent.parent
OF_TORCH = "torch: "
"""Prefix of `Waited.site` if torch itself makes the host wait."""

_SEAM = tuple(str(_PACKAGE / room) for room in ("device", "dry"))


class _DryMark:
    """A point in the work of a simulated stream."""

    def __init__(self, number: int, host: DryStream) -> None:
        self.number = number
        self._host = host

    def query(self) -> bool:
        """Return True: simulated work is complete as soon as it is queued."""
        return True

    def synchronize(self) -> None:
        """Make the host wait for this event."""
        self._host.wait(self)


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
            self._accelerator.note_wait(mark.number, self.name)


class DryAccelerator(Accelerator):
    """An accelerator simulated on a CPU.

    Args:
        tape: The trace to record to.
        has_streams: Whether to simulate an accelerator. If False, only the memory of a CPU is recorded.
        host_bytes: The host memory in bytes that this rank may use. None means no limit.
    """

    is_dry = True

    def __init__(self, tape: Tape, *, has_streams: bool = True, host_bytes: int | None = None) -> None:
        self.has_streams = has_streams
        self.tape = tape
        self.stream = STREAMS[0]
        self._host_bytes = host_bytes
        self._marks = 0
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

    def memory_of(self, tensor: Tensor) -> Hashable:
        return HOST if self.storages.is_host(tensor) else self.stream

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
        self._marks += 1
        self.tape.note(Recorded(self._marks, stream, self.tape.origin))
        host = self.streams.host
        assert isinstance(host, DryStream)
        return _DryMark(self._marks, host)

    def note_wait(self, mark: int, stream: str, site: str = "") -> None:
        """Record that `stream` waits for `mark`. `site` is the line that requested it, the caller if empty."""
        self._check_current(stream)
        self.tape.note(Waited(mark, stream, site or _site(), self.tape.origin))

    def _check_current(self, stream: str) -> None:
        """Raise if `stream` is not current. Compute uses the current stream, unless another stream is entered."""
        assert stream != STREAMS[0] or self.stream in (stream, HOST), (
            f"compute was asked for within stream {self.stream}"
        )

    def hold_host(self, stream: str, operation: str) -> None:
        """Record that an operation of torch makes the host wait for `stream`."""
        self._marks += 1
        self.tape.note(Recorded(self._marks, stream, self.tape.origin))
        self.note_wait(self._marks, HOST, f"{OF_TORCH}{operation}")


def _site() -> str:
    """Return the line that requests a wait and the line that calls its function, both outside of the device layer.

    The format is "file:line in function, called by file:line in function". The caller is included because a method that
    several callers share counts as several sites.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith((*_SEAM, "<")):
        frame = frame.f_back
    assert frame is not None, "somebody asks"
    site, caller = _line(frame), frame.f_back
    is_own = caller is not None and caller.f_code.co_filename.startswith(str(_PACKAGE))
    if frame.f_code.co_name == "__del__":  # the garbage collector calls it from an arbitrary line
        is_own = False
    return f"{site}, called by {_line(caller)}" if caller is not None and is_own else site


def _line(frame: FrameType) -> str:
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_qualname}"
