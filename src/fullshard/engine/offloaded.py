"""Offloaded storages: in host memory or on a disk from a forward to its backward.

[Note: offloading, step by step]
On a CPU a storage is copied to a buffer, which is written to the disk while forward continues. On an accelerator the
offload stream copies it to host memory, from where it may be written to the disk. Its device memory is freed when
nothing else refers to it. Backward needs storages in about the reverse order. When it takes one, it starts to read
those that were offloaded before it, up to the window. A storage that is still being written is not read.

[Note: bounded buffers]
A window of bytes limits the storages that are copied and not yet written, or still held on the device by the copy. It
also limits those that are read ahead. The window is exceeded only by a single larger storage, or after a disk failure:
a storage that could not be written stays in its buffer, and one that could not be read is zeros, until the failure is
reported to all ranks at the end of the backward. See [Note: a disk that fails on one rank] in `findings.py`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fullshard._compat import FakeTensor, backward_number, storage_references
from fullshard.device.accelerator import accelerator_for
from fullshard.device.memory import typed_view
from fullshard.device.streams import Mark
from fullshard.device.transfers import transfers
from fullshard.disk.files import DiskWork, aligned_buffer, aligned_part
from fullshard.disk.interface import ALIGNMENT, aligned
from fullshard.disk.space import Extent, Scratch
from fullshard.engine.findings import DiskFailures
from fullshard.errors import StateError

WINDOW_BYTES = 64 << 20
"""Limit for buffers that are being written, and separately for those that are read ahead."""


class _Buffer:
    """A buffer in host memory that is used repeatedly."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.used_by: Mark | None = None  # the end of the last copy into it or out of it
        self._own = storage_references(data.untyped_storage())

    @property
    def is_free(self) -> bool:
        """True if no copy is filling or reading it, and no graph uses a tensor in it."""
        is_used = self.used_by is not None and not self.used_by.query()
        return not is_used and storage_references(self.data.untyped_storage()) <= self._own


@dataclass(eq=False)
class Offloaded:
    """One offloaded storage, for as long as a graph refers to this object. See `Store`."""

    store: Store
    nbytes: int
    order: list[weakref.ref[Offloaded]]  # all that the same forward has offloaded, in order
    place: int  # its index in `order`
    uses: int = 0  # number of saved tensors that use the storage
    taken: int = 0  # number of these that the current backward has read
    source: Tensor | None = None  # its memory on the device, while it is being copied
    sent: Mark | None = None  # after that copy
    watched: tuple[Tensor, int] | None = None  # a tensor of the source, and its version when it was saved
    is_torn: bool = False  # the source was modified while it was copied
    buffer: _Buffer | None = None  # the copy in host memory
    extent: Extent | None = None  # the copy on the disk
    stays: bool = False  # the storage stays in its buffer, because it is not on the disk
    writing: DiskWork | None = None
    reading: DiskWork | None = None
    back: Tensor | None = None  # the restored memory on the device
    arrived: Mark | None = None  # after the copy that fills `back`
    is_ahead: bool = False  # read ahead, and not used yet
    done_in: int = -1  # number of the last backward that used it

    @property
    def room_bytes(self) -> int:
        """The size of the buffer, or of the space on the disk."""
        return aligned(self.nbytes)

    def __del__(self) -> None:
        self.store.forget(self)


@dataclass(frozen=True)
class _Left:
    """The buffers of a storage that no graph refers to. They are freed when its transfers are complete."""

    room_bytes: int
    extent: Extent | None
    buffer: _Buffer | None
    works: tuple[DiskWork, ...]
    on_device: tuple[tuple[Tensor, Mark | None], ...]  # memory, and the event to wait for before it is freed


@dataclass(eq=False)
class Store:
    """The storages offloaded from one device to one tier: host memory or a disk.

    Args:
        device: The device whose memory is offloaded.
        scratch: the space on the disk; None for host memory.
        window_bytes: see [Note: bounded buffers].
        failures: collects failures of the disk.
    """

    device: torch.device
    scratch: Scratch | None
    window_bytes: int = WINDOW_BYTES
    failures: DiskFailures = field(default_factory=DiskFailures)
    put_bytes: int = 0  # total bytes offloaded
    read_bytes: int = 0  # total bytes read from the disk
    _buffers: weakref.WeakSet[_Buffer] = field(default_factory=weakref.WeakSet)
    _free: dict[int, list[_Buffer]] = field(default_factory=dict)  # unused buffers by size; tensors may still use them
    _leaving: deque[weakref.ref[Offloaded]] = field(default_factory=deque)  # oldest first
    _leaving_bytes: int = 0
    _ahead_bytes: int = 0
    _left: deque[_Left] = field(default_factory=deque)

    # -- offloading ---------------------------------------------------------------------------------------------------

    def put(self, tensor: Tensor, order: list[weakref.ref[Offloaded]]) -> Offloaded:
        """Offload the storage of `tensor`, and append it to `order`."""
        storage = tensor.untyped_storage()
        nbytes, room = storage.nbytes(), aligned(storage.nbytes())
        self._clear_left()
        while self._left and self._leaving_bytes + self._left_bytes + room > self.window_bytes:
            self._clear_left(wait=True)
        while self._leaving and self._leaving_bytes + room > self.window_bytes:
            self._finish_leaving()
        offloaded = Offloaded(self, nbytes, order, len(order))
        offloaded.buffer = self._buffer(nbytes)
        flat = typed_view(storage, torch.uint8, 0, (nbytes,), self.device)
        target = offloaded.buffer.data[:nbytes]
        accelerator = accelerator_for(self.device)
        streams = accelerator.streams
        with torch.no_grad():
            if accelerator.has_streams:
                with streams.offload.after(streams.compute):
                    target.copy_(flat, non_blocking=True)
                offloaded.source = flat
                offloaded.sent = offloaded.buffer.used_by = streams.offload.mark()
                offloaded.watched = tensor.detach(), tensor._version
            else:
                target.copy_(flat)
        if self._writes(offloaded.buffer):
            self._write_those_sent(offloaded)
        if self.scratch is None:
            transfers.note("cpu", "activations", passed=nbytes)
        order.append(weakref.ref(offloaded))
        self._leaving.append(order[-1])
        self._leaving_bytes += room
        self.put_bytes += nbytes
        return offloaded

    def _write_those_sent(self, newest: Offloaded) -> None:
        """Start to write the storages whose copy to host memory has ended."""
        for offloaded in (*self._alive(self._leaving), newest):
            if offloaded.writing is None and not offloaded.stays and (offloaded.sent is None or offloaded.sent.query()):
                self._write(offloaded)

    def _writes(self, buffer: _Buffer) -> bool:
        """Return True if there is a disk. In a dry run, whose model may exceed memory and disk, return False."""
        return self.scratch is not None and not isinstance(buffer.data, FakeTensor)

    def _write(self, offloaded: Offloaded) -> None:
        assert self.scratch is not None and offloaded.buffer is not None
        offloaded.stays = True
        with self.failures.noted():
            offloaded.extent = self.scratch.take(offloaded.room_bytes, state="activations")
            offloaded.writing = offloaded.extent.write(offloaded.buffer.data[: offloaded.room_bytes])
            offloaded.stays = False

    def _finish_leaving(self) -> None:
        """Finish the oldest transfer: free the storage's device memory, and its buffer if there is a disk."""
        offloaded = self._leaving.popleft()()
        if offloaded is None:
            return  # handled by `forget`
        self._leaving_bytes -= offloaded.room_bytes
        streams = accelerator_for(self.device).streams
        if offloaded.source is not None and offloaded.sent is not None:
            streams.compute.wait(offloaded.sent)
            offloaded.source = None
            offloaded.is_torn, offloaded.watched = _was_written_to(offloaded), None
        if self.scratch is not None:
            is_waiting = offloaded.writing is None and not offloaded.stays and offloaded.sent is not None
            if is_waiting and offloaded.buffer and self._writes(offloaded.buffer):
                assert offloaded.sent is not None
                offloaded.sent.synchronize()
                self._write(offloaded)
            self._leave_buffer(offloaded)

    # -- restoring ----------------------------------------------------------------------------------------------------

    def get(self, offloaded: Offloaded) -> Tensor:
        """Return the bytes of `offloaded` on the device, 1-D, and start to read the storages offloaded before it.

        The result is valid on the compute stream.

        Raises:
            StateError: the user has written to it since it was saved.
        """
        self._clear_left()
        if offloaded.is_torn or _was_written_to(offloaded):
            raise written_to(offloaded.nbytes)
        if offloaded.back is None and offloaded.source is None:
            self._begin_reading(offloaded)
        back = offloaded.source if offloaded.source is not None else self._finish_reading(offloaded)
        offloaded.taken += 1
        if offloaded.taken >= offloaded.uses:  # a retained graph may need it again
            offloaded.taken, offloaded.done_in = 0, backward_number()
            self._drop(offloaded)
        self._read_ahead(offloaded)
        return back

    def _begin_reading(self, offloaded: Offloaded) -> None:
        if offloaded.buffer is None:
            buffer = self._buffer(offloaded.nbytes)
            self.read_bytes += offloaded.nbytes
            if offloaded.extent is not None:
                offloaded.reading = offloaded.extent.read(buffer.data[: offloaded.room_bytes])
            offloaded.buffer = buffer

    def _finish_reading(self, offloaded: Offloaded) -> Tensor:
        if offloaded.is_ahead:
            offloaded.is_ahead = False
            self._ahead_bytes -= offloaded.room_bytes
        streams = accelerator_for(self.device).streams
        if offloaded.back is None:
            self._bring_back(offloaded)
        assert offloaded.back is not None
        if offloaded.arrived is not None:
            streams.compute.wait(offloaded.arrived)
            offloaded.arrived = None
        return offloaded.back

    def _bring_back(self, offloaded: Offloaded) -> None:
        """Queue the copy of `offloaded` to the device."""
        assert offloaded.buffer is not None
        held = offloaded.buffer.data[: offloaded.nbytes]
        if offloaded.reading is not None:
            failed = True
            with self.failures.noted():
                offloaded.reading.wait()
                failed = False
            if failed:
                held.zero_()
            offloaded.reading = None
        accelerator = accelerator_for(self.device)
        streams = accelerator.streams
        if not accelerator.has_streams:
            offloaded.back = held
            return
        offloaded.back = torch.empty(offloaded.nbytes, dtype=torch.uint8, device=self.device)
        with torch.no_grad(), streams.offload.after(streams.compute):
            offloaded.back.copy_(held, non_blocking=True)
        if self.scratch is None:
            transfers.note("cpu", "activations", arrived=offloaded.nbytes)
        offloaded.arrived = offloaded.buffer.used_by = streams.offload.mark()

    def _read_ahead(self, offloaded: Offloaded) -> None:
        """Start to read the storages offloaded before `offloaded`, which backward needs next."""
        has_streams, backward = accelerator_for(self.device).has_streams, backward_number()
        for ref in reversed(offloaded.order[: offloaded.place]):
            earlier = ref()
            if earlier is None or earlier.store is not self or earlier.done_in == backward:
                continue
            if earlier.source is not None or earlier.back is not None:
                continue
            if not earlier.is_ahead and (has_streams or earlier.buffer is None):
                if self._ahead_bytes and self._ahead_bytes + earlier.room_bytes > self.window_bytes:
                    return
                self._begin_reading(earlier)
                earlier.is_ahead = True
                self._ahead_bytes += earlier.room_bytes
            if has_streams and earlier.is_ahead and (earlier.reading is None or earlier.reading.done):
                self._bring_back(earlier)

    def _drop(self, offloaded: Offloaded) -> None:
        """Drop the reference to the device memory, which the graph owns now."""
        offloaded.back = None
        if (
            self.scratch is not None
            and offloaded.source is None
            and (offloaded.writing is None or offloaded.writing.done)
        ):
            self._leave_buffer(offloaded)

    def _leave_buffer(self, offloaded: Offloaded) -> None:
        """Free the buffer once the storage is on the disk, unless the storage has been needed in the meantime."""
        if offloaded.writing is not None:
            offloaded.stays = True
            with self.failures.noted():
                offloaded.writing.wait()
                offloaded.stays = False
        if offloaded.buffer is not None and offloaded.back is None and not offloaded.stays:
            self._give(offloaded.buffer)
            offloaded.buffer = None

    # -- memory -------------------------------------------------------------------------------------------------------

    def forget(self, offloaded: Offloaded) -> None:
        """Record that no graph refers to `offloaded` anymore. This may run at any time, so it does nothing else."""
        works = tuple(work for work in (offloaded.writing, offloaded.reading) if work is not None)
        on_device = tuple(
            (t, mark)
            for t, mark in ((offloaded.source, offloaded.sent), (offloaded.back, offloaded.arrived))
            if t is not None
        )
        self._left.append(_Left(offloaded.room_bytes, offloaded.extent, offloaded.buffer, works, on_device))
        if offloaded.is_ahead:
            self._ahead_bytes -= offloaded.room_bytes

    def _clear_left(self, *, wait: bool = False) -> None:
        """Free storages that no graph refers to and whose transfers have ended. If `wait`, wait for all transfers."""
        streams = accelerator_for(self.device).streams
        for _ in range(len(self._left)):
            left = self._left.popleft()
            if wait:
                for work in left.works:
                    work.settle()
            elif not all(work.done for work in left.works):
                self._left.append(left)
                continue
            for _, mark in left.on_device:
                streams.compute.wait(mark)
            if left.buffer is not None:
                self._give(left.buffer)
        while self._leaving and self._leaving[0]() is None:
            self._leaving.popleft()
        self._leaving_bytes = sum(offloaded.room_bytes for offloaded in self._alive(self._leaving))

    @property
    def _left_bytes(self) -> int:
        return sum(left.room_bytes for left in self._left)

    @staticmethod
    def _alive(refs: deque[weakref.ref[Offloaded]]) -> Iterator[Offloaded]:
        return (offloaded for ref in refs if (offloaded := ref()) is not None)

    def _buffer(self, nbytes: int) -> _Buffer:
        """Return a free buffer of the right size, or a new one."""
        nbytes = aligned(nbytes)
        for buffer in self._free.get(nbytes, ()):
            if self.scratch is None or buffer.is_free:  # copies on one stream run in order
                self._free[nbytes].remove(buffer)
                return buffer
        if self.scratch is not None:  # drop free buffers of other sizes, which may not be in use anymore
            for size, given in self._free.items():
                self._free[size] = [item for item in given if not item.is_free]
        made = _Buffer(self._new_memory(nbytes))
        self._buffers.add(made)
        return made

    @property
    def buffer_bytes(self) -> int:
        """The bytes of host memory in use."""
        return sum(buffer.data.numel() for buffer in self._buffers)

    def _give(self, buffer: _Buffer) -> None:
        self._free.setdefault(buffer.data.numel(), []).append(buffer)

    def _new_memory(self, nbytes: int) -> Tensor:
        accelerator = accelerator_for(self.device)
        if not accelerator.has_streams:
            return aligned_buffer(nbytes)
        return aligned_part(accelerator.host_zeros(nbytes + ALIGNMENT, torch.uint8, pinned=True))


def _was_written_to(offloaded: Offloaded) -> bool:
    """Return True if the source of `offloaded` was written to since it was offloaded."""
    return offloaded.watched is not None and offloaded.watched[0]._version != offloaded.watched[1]


def written_to(nbytes: int) -> StateError:
    """Return the error for a backward that needs overwritten values. It is similar to autograd's error."""
    return StateError(
        f"a tensor of {nbytes} bytes that backward needs was modified in place after forward saved it. Modify a clone "
        "instead. torch.autograd.set_detect_anomaly(True) shows the operation that saved it."
    )
