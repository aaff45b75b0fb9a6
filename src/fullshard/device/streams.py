"""Streams: compute, gathers, reductions and copies run beside each other on an accelerator. A CPU has one order of
work.

[Note: who owns memory]
A caching allocator keeps freed memory for the stream on which it was allocated, and gives it to the next allocation on
that stream at once, whatever other streams still do with it. So each kind of memory is allocated on one stream:

    gradients as autograd makes them, activations                           compute
    unsharded parameters, secondary shards, shards on their way             gather
    sums on their way to the optimizer, send buffers of packs               reduce
    what encoded sums need on the second level                              replicate

and is freed by the host only when the stream that owns it has waited for every other stream's last use of it; until
then a reference keeps it. Where a stream waits for all that compute has queued, that includes what compute has waited
for. So no tensor needs `record_stream`, and peak memory is the same in every run.

The gather stream waits for compute when memory of its own is freed, not when a gather starts; and where shards may have
changed: at the beginning of a forward or a backward, after hooks on gradients, and when their versions say so. A gather
is started before the memory of the unit before it is freed. So it runs beside that unit's computation even where the
host only then learnt that it is needed; and at most two units are unsharded at once, though the host never waits.
`dry/races.py` holds all this to a law: see there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

__all__ = ["STREAMS", "ComputeStream", "DeviceStream", "HostStream", "Mark", "Stamp", "Stream", "Streams", "stamp_on"]


class Mark(Protocol):
    """A point in the work of a stream: an event."""

    def query(self) -> bool:
        """True if the stream has come so far."""

    def synchronize(self) -> None:
        """Let the host wait until it has."""


class Stamp(Protocol):
    """A point in the work of a stream whose time can be read, once the stream has come so far."""

    def query(self) -> bool:
        """True if it has."""

    def synchronize(self) -> None:
        """Let the host wait until it has."""

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds from here to `other`, on the same device. Both have been reached."""


class Stream:
    """One order of work. This one is the order of the program, in which nothing is ever to be waited for."""

    is_stream = False
    """True if work is queued here in order, so that the host need not wait before it queues more."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def queueing(self) -> AbstractContextManager[object]:
        """A context in which work is queued on this stream."""
        return nullcontext()

    def after(self, *others: Stream) -> AbstractContextManager[object]:
        """A context in which work is queued on this stream, behind all work queued on `others` so far."""
        for other in others:
            self.wait(other.mark())
        return self.queueing()

    def mark(self) -> Mark | None:
        """A mark behind all work queued on this stream so far; None where work is done when it is called for."""
        return None

    def stamp(self) -> Stamp | None:
        """A stamp behind all work queued on this stream so far; None where work is done when it is called for."""
        return None

    def wait(self, mark: Mark | None) -> None:
        """Let this stream go on only after `mark`. The host does not wait, unless this is its own stream."""


class HostStream(Stream):
    """The host's own order of work beside an accelerator: waiting here holds the program up."""

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            mark.synchronize()


class DeviceStream(Stream):
    """A stream of `device` beside its compute stream. Communication comes first where both could run."""

    is_stream = True

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name)
        self._own = torch.Stream(device, priority=-1)

    @property
    def _stream(self) -> torch.Stream:
        return self._own

    def queueing(self) -> AbstractContextManager[object]:
        """See `Stream.queueing`. By a new handle of the stream: torch keeps the stream to go back to in the handle,
        which until torch 2.12 cannot be entered twice, as it is by threads that share a stream.
        """
        own = self._own
        return torch.Stream(stream_id=own.stream_id, device_index=own.device_index, device_type=own.device_type)

    def mark(self) -> Mark:
        return self._stream.record_event()

    def stamp(self) -> Stamp:
        return stamp_on(self._stream)

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            assert type(mark) is torch.Event  # of a subclass, such as CUDA's, this would wait for nothing
            self._stream.wait_event(mark)


class ComputeStream(DeviceStream):
    """The stream that is current on `device`, whichever that is: ask it outside of other streams' contexts only."""

    def __init__(self, name: str, device: torch.device) -> None:
        Stream.__init__(self, name)
        self._device = device

    @property
    def _stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def queueing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self, mark: Mark | None) -> None:
        """See `Stream.wait`. A mark may be the user's, of a class that can only hold the current stream."""
        if mark is not None:
            with _current(self._device):
                mark.wait()  # type: ignore[attr-defined]  # every event of torch's has it


def stamp_on(stream: torch.Stream) -> Stamp:
    """A stamp behind all work queued on `stream` so far."""
    event = torch.Event(stream.device, enable_timing=True)
    stream.record_event(event)
    return event


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
    """The streams of one device, which all that computes there shares."""

    compute: Stream
    gather: Stream
    reduce: Stream  # sums over the shard axis, or within groups
    replicate: Stream  # sums over the replicate axis, or across groups: the slow network holds up nothing else
    offload: Stream  # copies to the host
    host: Stream

    def join(self) -> None:
        """Let compute wait for all other streams, and these for compute: memory of each can then be freed."""
        others = (self.gather, self.reduce, self.replicate, self.offload)
        for stream in others:
            self.compute.wait(stream.mark())
        for stream in others:
            stream.wait(self.compute.mark())


STREAMS = tuple(stream.name for stream in fields(Streams))
"""Their names, in that order."""
