"""The device that computes, as seen by the engine: its streams, its memory, and whether it records a graph.

Accelerator            a CPU: one order of work, in host memory
├── StreamAccelerator  all devices of torch.accelerator: CUDA, ROCm, XPU, ...
└── DryAccelerator     simulated: it records its calls, see `dry/`
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property

import torch
from torch import Tensor

from fullshard.device.host_memory import share_of_host
from fullshard.device.streams import (
    STREAMS,
    ComputeStream,
    DeviceStream,
    HostStream,
    Mark,
    Stamp,
    Stream,
    Streams,
    stamp_on,
)


class Accelerator:
    """The device that computes. This base class represents a CPU.

    `has_streams` is True for an accelerator: work is queued, its memory is not the host's, and freeing and reallocating
    memory is cheap.
    """

    has_streams = False
    is_dry = False  # simulated in host memory, independent of the devices of this machine

    @cached_property
    def streams(self) -> Streams:
        """The streams of the device. On a CPU, work on any stream runs immediately, in program order."""
        return Streams(*[Stream(name) for name in STREAMS])

    @property
    def is_capturing(self) -> bool:
        """True if a graph is being captured. Replaying it will not run this library's code."""
        return False

    def mark_here(self) -> Mark | None:
        """Return a mark after all work queued on the current stream; None if there is nothing to wait for."""
        return None

    def stamp_here(self) -> Stamp | None:
        """Like `mark_here`, but return a timed event."""
        return None

    def keep_busy(self, seconds: float) -> None:
        """Keep the current stream busy for about that many seconds, if the device has streams and supports this."""

    def end_pass(self) -> None:
        """Record that a forward or backward pass has ended, so that a graph capture may end."""

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate or free the memory of `storage`, on the current stream."""
        storage.resize_(nbytes)

    def note_shared(self, storage: torch.UntypedStorage, ranks: int, purpose: str) -> None:
        """Record that `ranks` ranks share the memory of `storage`, which is for `purpose`."""

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return `tensor`, or a copy of it in the memory of `device`."""
        return tensor.to(device)

    def alongside(self, tensor: Tensor, other: Tensor) -> Tensor:
        """Return `tensor`, or a copy of it in the memory of `other`."""
        return tensor.to(other.device)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` in host memory. The host waits for the copy."""
        return tensor.to("cpu", copy=True)

    def memory_of(self, tensor: Tensor) -> Hashable:
        """Return a value that identifies the memory of `tensor`, equal for all tensors that one kernel can use."""
        return tensor.device

    def on_host(self) -> AbstractContextManager[object]:
        """Return a context for work on host memory that does not involve the device."""
        return nullcontext()

    def note_disk_transfer(self, memory: Tensor, file: object, offset: int, *, name: str) -> Mark | None:
        """Record that a thread fills `memory` from a file, or writes it to the file. Return a mark after this work.

        Return None if the device has no events for such work. `name` is the name of a `DiskTransfer`.
        """
        return None

    def host_zeros(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """Return a new 1-D buffer in host memory; `pinned` if copies to and from it must not block the host."""
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=pinned)

    def host_room(self, ranks: int) -> int | None:
        """Return the bytes of host memory that this rank, one of `ranks` per host, can allocate; None if unknown."""
        return share_of_host(ranks)


_CYCLES_PER_S = 1.5e9  # about the clock rate of a GPU


class StreamAccelerator(Accelerator):
    """An accelerator with streams and events, through torch's interface."""

    has_streams = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", bool)

    @cached_property
    def streams(self) -> Streams:
        first, *alongside, last = STREAMS
        streams = [DeviceStream(name, self._device) for name in alongside]
        return Streams(*[ComputeStream(first, self._device), *streams, HostStream(last)])

    @property
    def is_capturing(self) -> bool:
        return bool(self._is_capturing())

    def mark_here(self) -> Mark | None:
        return None if self.is_capturing else torch.accelerator.current_stream(self._device.index).record_event()

    def stamp_here(self) -> Stamp | None:
        return None if self.is_capturing else stamp_on(torch.accelerator.current_stream(self._device.index))

    def keep_busy(self, seconds: float) -> None:
        """See `Accelerator.keep_busy`. CUDA and ROCm have a kernel that waits for a number of clock cycles."""
        sleep = getattr(torch.get_device_module(self._device), "_sleep", None)
        if sleep is not None and not self.is_capturing:
            sleep(round(seconds * _CYCLES_PER_S))

    def end_pass(self) -> None:
        """See `Accelerator.end_pass`. A capture cannot end before compute has waited for all streams in it.

        The gather stream is part of a capture from its first wait for compute, even if no work was queued after its
        last wait.
        """
        if self.is_capturing:
            self.streams.compute.wait(self.streams.gather.mark())


_cpu = Accelerator()
_known: dict[torch.device, Accelerator] = {torch.device("cpu"): _cpu, torch.device("meta"): _cpu}
_pretended: Accelerator | None = None


def accelerator_for(device: torch.device) -> Accelerator:
    """Return the accelerator of `device`, always the same object."""
    if _pretended is not None:
        return _pretended
    known = _known.get(device)  # called some hundred times per step
    if known is not None:
        return known
    if device.type in ("cpu", "meta"):
        return _cpu
    if device == torch.device(device.type) and torch.accelerator.is_available():  # whichever is current
        return accelerator_for(torch.device(device.type, torch.accelerator.current_device_index()))
    return _known.setdefault(device, StreamAccelerator(device))


@contextmanager
def pretending(accelerator: Accelerator) -> Iterator[None]:
    """Return a context within which every device is replaced by the simulated `accelerator`."""
    global _pretended
    before, _pretended = _pretended, accelerator
    try:
        yield
    finally:
        _pretended = before


def on_stream(stream: torch.Stream, function: Callable[[Tensor], None], tensor: Tensor) -> None:
    """Call `function(tensor)` on `stream`, ordered after earlier and before later work of the current stream.

    On a CPU, which has no streams, this is a plain call.
    """
    if tensor.device.type == "cpu":
        function(tensor)
        return
    current = torch.accelerator.current_stream(tensor.device)
    stream.wait_stream(current)
    with stream:
        function(tensor)
    current.wait_stream(stream)


_captures = False


def is_capturing(device: torch.device) -> bool:
    """Return True if a graph is being captured on `device`. Replaying it will not run this library's code."""
    accelerator = accelerator_for(device)
    return _captures or (accelerator.has_streams and accelerator.is_capturing)


@contextmanager
def pretending_to_capture() -> Iterator[None]:
    """Return a context that makes `is_capturing` True for every device."""
    global _captures
    before, _captures = _captures, True
    try:
        yield
    finally:
        _captures = before
