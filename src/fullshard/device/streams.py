"""Streams: compute, gathers, reductions and copies run concurrently on an accelerator. A CPU has one order of work.

[Note: who owns memory]
A caching allocator keeps freed memory for the stream that it was allocated on. It immediately reuses the memory for the
next allocation on that stream, even if other streams still use it. So each kind of memory is allocated on one stream:

    gradients from autograd, activations                                    compute
    unsharded parameters, secondary shards, shards to send                  gather
    sums before delivery to the optimizer, send buffers of packs            reduce
    buffers of encoded sums on the second level                             replicate

The host frees memory only after the stream that owns it has waited for the last use by every other stream. Until then a
reference keeps it alive. Waiting for all work queued on compute includes all work that compute has waited for. So no
tensor needs `record_stream`, and peak memory is identical in every run.

The gather stream waits for compute when its own memory is freed, not when a gather starts. It also waits when shards
may have changed: at the beginning of a forward or a backward, after hooks on gradients, and when their versions
changed. A gather starts before the memory of the previous unit is freed. So it overlaps with the computation of that
unit even without a prefetch. At most two units are unsharded at the same time, although the host never waits.
`dry/races.py` checks these rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """An event: a point in the work of a stream."""

    def query(self) -> bool:
        """Return True if the stream has reached this point."""

    def synchronize(self) -> None:
        """Make the host wait for this point."""


class Stamp(Protocol):
    """A timed event: a point in the work of a stream whose time can be read after the stream has reached it."""

    def query(self) -> bool:
        """Return True if the stream has reached this point."""

    def synchronize(self) -> None:
        """Make the host wait for this point."""

    def elapsed_time(self, other: Any) -> float:
        """Return the milliseconds from this stamp to `other` on the same device. Both must have been reached."""


class Stream:
    """A sequence of work. This class represents program order on a CPU, which never waits."""

    is_stream = False  # True if the host can queue work without waiting for earlier work

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def queueing(self) -> AbstractContextManager[object]:
        """Return a context that queues work on this stream."""
        return _PROGRAM_ORDER

    def after(self, *others: Stream) -> AbstractContextManager[object]:
        """Return a context that queues work on this stream, after all work queued on `others` so far."""
        for other in others if self.is_stream else ():
            self.wait(other.mark())
        return self.queueing()

    def mark(self) -> Mark | None:
        """Record an event after all work queued on this stream so far. Return None if work is not queued."""
        return None

    def stamp(self) -> Stamp | None:
        """Record a timed event after all work queued on this stream so far. Return None if work is not queued."""
        return None

    def wait(self, mark: Mark | None) -> None:
        """Make this stream wait for `mark`. The host waits only if this is a `HostStream`."""


_PROGRAM_ORDER = nullcontext()


class HostStream(Stream):
    """The host of an accelerator, as a stream. Waiting blocks the program."""

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            mark.synchronize()


class DeviceStream(Stream):
    """A stream of `device` in addition to its compute stream. It has priority over compute, for communication."""

    is_stream = True

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name)
        self._own = torch.Stream(device, priority=-1)

    @property
    def _stream(self) -> torch.Stream:
        return self._own

    def queueing(self) -> AbstractContextManager[object]:
        """See `Stream.queueing`. Use a new handle, because threads may share a stream.

        A handle stores the previous stream. Before torch 2.12 it cannot be entered twice.
        """
        own = self._own
        return torch.Stream(stream_id=own.stream_id, device_index=own.device_index, device_type=own.device_type)

    def mark(self) -> Mark:
        return self._stream.record_event()

    def stamp(self) -> Stamp:
        return stamp_on(self._stream)

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            assert type(mark) is torch.Event  # waiting for a subclass, such as torch.cuda.Event, has no effect
            self._stream.wait_event(mark)


class ComputeStream(DeviceStream):
    """The current stream of `device`. Use it outside of the contexts of other streams only."""

    def __init__(self, name: str, device: torch.device) -> None:
        Stream.__init__(self, name)
        self._device = device

    @property
    def _stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device.index)

    def queueing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self, mark: Mark | None) -> None:
        """See `Stream.wait`. `mark` may be an event of the user, of a class that can only block the current stream."""
        if mark is not None:
            with _current(self._device):
                mark.wait()  # type: ignore[attr-defined]  # all event classes of torch have it


def stamp_on(stream: torch.Stream) -> Stamp:
    """Return a stamp after all work queued on `stream` so far."""
    unused = _unused.setdefault(stream.device, [])
    event = unused.pop() if unused else torch.Event(stream.device, enable_timing=True)
    stream.record_event(event)
    return event


_unused: dict[torch.device, list[torch.Event]] = {}


def reuse_stamps(stamps: Iterable[Stamp | None]) -> None:
    """Let `stamp_on` reuse `stamps` whose times were read. Creating an event is slower than recording one.

    Args:
        stamps: The stamps, possibly with duplicates. Stamps that are not events of torch are ignored.
    """
    for event in {id(stamp): stamp for stamp in stamps}.values():
        if isinstance(event, torch.Event):
            _unused.setdefault(event.device, []).append(event)


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    before = torch.accelerator.current_device_index()
    if device.index in (None, before):
        yield
        return
    torch.accelerator.set_device_index(device)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


@dataclass(frozen=True)
class Streams:
    """The streams of one device, shared by all its users."""

    compute: Stream
    gather: Stream
    reduce: Stream  # sums over the shard axis, or within groups
    replicate: Stream  # sums over the replicate axis, or across groups: the slow network does not delay other work
    offload: Stream  # copies to and from the host
    host: Stream

    def join(self) -> None:
        """Make compute wait for all other streams and vice versa, so that the memory of each can be freed."""
        others = (self.gather, self.reduce, self.replicate, self.offload)
        for stream in others:
            self.compute.wait(stream.mark())
        for stream in others:
            stream.wait(self.compute.mark())


STREAMS = tuple(stream.name for stream in fields(Streams))  # their names, in that order
