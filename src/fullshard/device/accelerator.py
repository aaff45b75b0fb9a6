"""The device that computes, as the engine sees it: its streams, its memory, and whether it records a graph.

Accelerator            a CPU: one order of work, in the host's memory
├── StreamAccelerator  whatever torch.accelerator knows: CUDA, ROCm, XPU, ...
└── DryAccelerator     pretended: it writes down what it is told to do, see `dry/`
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

__all__ = [
    "Accelerator",
    "StreamAccelerator",
    "accelerator_for",
    "is_capturing",
    "on_stream",
    "pretending",
    "pretending_to_capture",
]


class Accelerator:
    """The device that computes: this one is a CPU.

    `has_streams` tells whether it is an accelerator: work is queued, its memory is not the host's, and freeing memory
    and allocating it again is cheap.
    """

    has_streams = False
    is_dry = False  # pretended, in the host's memory, whichever devices this machine has

    @cached_property
    def streams(self) -> Streams:
        """The streams; of a CPU, all of them the order of the program."""
        return Streams(*[Stream(name) for name in STREAMS])

    @property
    def is_capturing(self) -> bool:
        """True if work that is queued now goes into a graph, which replays it without this library's code."""
        return False

    def mark_here(self) -> Mark | None:
        """A mark behind all work queued on whichever stream is current; None if there is nothing to wait for."""
        return None

    def stamp_here(self) -> Stamp | None:
        """As `mark_here`, a stamp."""
        return None

    def end_pass(self) -> None:
        """To be called when a forward or a backward is over: a graph that is recorded may end there."""

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate or free the memory of `storage`, on the stream that is current."""
        storage.resize_(nbytes)

    def note_shared(self, storage: torch.UntypedStorage, ranks: int, purpose: str) -> None:
        """Note that the memory of `storage` is one that so many ranks have in common."""

    def to_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        """`tensor`, or a copy of it in the memory of `device`."""
        return tensor.to(device)

    def alongside(self, tensor: Tensor, other: Tensor) -> Tensor:
        """`tensor`, or a copy of it in the memory that `other` is in."""
        return tensor.to(other.device)

    def memory_of(self, tensor: Tensor) -> Hashable:
        """Whose memory `tensor` is in: the same value for all that one kernel can take."""
        return tensor.device

    def on_host(self) -> AbstractContextManager[object]:
        """A context in which the host works on its own memory: there, it makes no tensor for the device."""
        return nullcontext()

    def host_zeros(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
        """A new 1-D buffer in the host's memory; `pinned`, if copies to and from it are not to hold the host up."""
        return torch.zeros(numel, dtype=dtype, device="cpu", pin_memory=pinned)

    def host_room(self, ranks: int) -> int | None:
        """Bytes of the host's memory that this rank, one of so many there, may take beyond what it has; None if nobody
        can tell.
        """
        return share_of_host(ranks)


class StreamAccelerator(Accelerator):
    """An accelerator with streams and events, by torch's own seam to them."""

    has_streams = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    @cached_property
    def streams(self) -> Streams:
        first, *alongside, last = STREAMS
        streams = [DeviceStream(name, self._device) for name in alongside]
        return Streams(*[ComputeStream(first, self._device), *streams, HostStream(last)])

    @property
    def is_capturing(self) -> bool:
        return bool(getattr(self._module, "is_current_stream_capturing", bool)())

    def mark_here(self) -> Mark | None:
        return None if self.is_capturing else torch.accelerator.current_stream(self._device).record_event()

    def stamp_here(self) -> Stamp | None:
        return None if self.is_capturing else stamp_on(torch.accelerator.current_stream(self._device))

    def end_pass(self) -> None:
        """See `Accelerator.end_pass`. A graph cannot end before compute has waited for all streams that are part of it.

        The gather stream is from its first wait for compute on, though it has no work or waited again after its last.
        """
        if self.is_capturing:
            self.streams.compute.wait(self.streams.gather.mark())


_cpu = Accelerator()
_known: dict[torch.device, Accelerator] = {torch.device("cpu"): _cpu, torch.device("meta"): _cpu}
_pretended: Accelerator | None = None


def accelerator_for(device: torch.device) -> Accelerator:
    """The accelerator that `device` names, always the same one."""
    if _pretended is not None:
        return _pretended
    known = _known.get(device)  # asked for some hundred times a step
    if known is not None:
        return known
    if device.type in ("cpu", "meta"):
        return _cpu
    if device == torch.device(device.type) and torch.accelerator.is_available():  # whichever is current
        return accelerator_for(torch.device(device.type, torch.accelerator.current_device_index()))
    return _known.setdefault(device, StreamAccelerator(device))


@contextmanager
def pretending(accelerator: Accelerator) -> Iterator[None]:
    """A context in which every device is taken for `accelerator`."""
    global _pretended
    before, _pretended = _pretended, accelerator
    try:
        yield
    finally:
        _pretended = before


def on_stream(stream: torch.Stream, function: Callable[[Tensor], None], tensor: Tensor) -> None:
    """Call `function(tensor)` on `stream`, between what is queued on the current one and what comes next.

    A CPU has no streams: there it is a call.
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
    """True if work queued on `device` goes into a graph, which replays it without this library's code."""
    return _captures or accelerator_for(device).is_capturing


@contextmanager
def pretending_to_capture() -> Iterator[None]:
    """A context in which `is_capturing` is True for every device."""
    global _captures
    before, _captures = _captures, True
    try:
        yield
    finally:
        _captures = before
