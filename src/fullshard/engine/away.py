"""Storages that are away: in the host's memory or on a disk from a forward to its backward.

[Note: what is away, step by step]
On a CPU a storage is copied to a buffer that is written to the disk while forward goes on. On an accelerator the
offload lane copies it to the host's memory, and from there it may go on to the disk. Its own memory is free as soon as
nobody else needs it. Backward asks for storages in about the reverse order: with each one that it takes, those that
were put away before it are begun to be read, as far as the window allows. What is on its way out still is not read.

[Note: bounded buffers]
A window of bytes bounds each of: what is copied and not yet written, or still held on the device by the copy; and what
is read ahead. More than the window is under way only if a single storage is larger, or if the disk has failed: what it
does not take stays in its buffer, and what it does not give back is zeros, until all ranks are told at the end of the
backward. See [Note: a disk that fails on one rank] in `findings.py`.
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
from fullshard.device.lanes import Mark
from fullshard.device.memory import typed_view
from fullshard.device.travel import travel
from fullshard.disk.files import ALIGNMENT, DiskWork, aligned, aligned_buffer, aligned_part
from fullshard.disk.space import Extent, Scratch
from fullshard.engine.findings import DiskFailures
from fullshard.errors import StateError

__all__ = ["WINDOW_BYTES", "Away", "Store", "written_to"]

WINDOW_BYTES = 64 << 20
"""Of buffers on the way out, and as many on the way back."""


class _Buffer:
    """Memory of the host's that is filled again and again."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.used_by: Mark | None = None  # the end of the last copy into it or out of it
        self._own = storage_references(data.untyped_storage())

    @property
    def is_free(self) -> bool:
        """True if no copy fills it or reads it, and no tensor that a graph was given lies in it."""
        is_used = self.used_by is not None and not self.used_by.query()
        return not is_used and storage_references(self.data.untyped_storage()) <= self._own


@dataclass(eq=False)
class Away:
    """One storage that is away, for as long as a graph refers to this. See `Store`."""

    store: Store
    nbytes: int
    order: list[weakref.ref[Away]]  # all that the same forward has put away, in order
    place: int  # its own there
    uses: int = 0  # by saved tensors
    taken: int = 0  # of them, in this backward
    source: Tensor | None = None  # its memory on the device, while a copy of it is under way
    sent: Mark | None = None  # behind that copy
    watched: tuple[Tensor, int] | None = None  # whose version tells whether the source was written to meanwhile
    is_torn: bool = False  # it was
    buffer: _Buffer | None = None  # where it is in the host's memory
    extent: Extent | None = None  # where it is on the disk
    stays: bool = False  # in its buffer, since the disk has not taken it
    writing: DiskWork | None = None
    reading: DiskWork | None = None
    back: Tensor | None = None  # its memory on the device again
    came: Mark | None = None  # behind the copy that fills it
    is_ahead: bool = False  # read, and not asked for yet
    done_in: int = -1  # the backward that asked for it the last time

    @property
    def room_bytes(self) -> int:
        """Of a buffer, or of the disk."""
        return aligned(self.nbytes)

    def __del__(self) -> None:
        self.store.forget(self)


@dataclass(frozen=True)
class _Left:
    """What is left of a storage that no graph refers to any more: free once nothing is under way."""

    room_bytes: int
    extent: Extent | None
    buffer: _Buffer | None
    works: tuple[DiskWork, ...]
    on_device: tuple[tuple[Tensor, Mark | None], ...]  # with what must be over before its memory is free


@dataclass(eq=False)
class Store:
    """Where storages of one device are away to: the host's memory, or a disk.

    Args:
        device: whose memory they leave.
        scratch: the room on the disk; None for the host's memory.
        window_bytes: see [Note: bounded buffers].
        failures: what the disk could not do.
    """

    device: torch.device
    scratch: Scratch | None
    window_bytes: int = WINDOW_BYTES
    failures: DiskFailures = field(default_factory=DiskFailures)
    put_bytes: int = 0  # in all
    read_bytes: int = 0  # from the disk, in all
    _buffers: weakref.WeakSet[_Buffer] = field(default_factory=weakref.WeakSet)
    _free: dict[int, list[_Buffer]] = field(default_factory=dict)  # given back, by size; tensors may lie in them yet
    _leaving: deque[weakref.ref[Away]] = field(default_factory=deque)  # oldest first
    _leaving_bytes: int = 0
    _ahead_bytes: int = 0
    _left: deque[_Left] = field(default_factory=deque)

    # -- out ----------------------------------------------------------------------------------------------------------

    def put(self, tensor: Tensor, order: list[weakref.ref[Away]]) -> Away:
        """Have the contents of the storage of `tensor` away, as the next of `order`."""
        storage = tensor.untyped_storage()
        nbytes, room = storage.nbytes(), aligned(storage.nbytes())
        self._clear_left()
        while self._left and self._leaving_bytes + self._left_bytes + room > self.window_bytes:
            self._clear_left(wait=True)
        while self._leaving and self._leaving_bytes + room > self.window_bytes:
            self._finish_leaving()
        away = Away(self, nbytes, order, len(order))
        away.buffer = self._buffer(nbytes)
        flat = typed_view(storage, torch.uint8, 0, (nbytes,), self.device)
        target = away.buffer.data[:nbytes]
        accelerator = accelerator_for(self.device)
        lanes = accelerator.lanes
        with torch.no_grad():
            if accelerator.has_lanes:
                with lanes.offload.after(lanes.compute):
                    target.copy_(flat, non_blocking=True)
                away.source = flat
                away.sent = away.buffer.used_by = lanes.offload.mark()
                away.watched = tensor.detach(), tensor._version
            else:
                target.copy_(flat)
        if self._writes(away.buffer):
            self._write_those_sent(away)
        if self.scratch is None:
            travel.note("cpu", "activations", went=nbytes)
        order.append(weakref.ref(away))
        self._leaving.append(order[-1])
        self._leaving_bytes += room
        self.put_bytes += nbytes
        return away

    def _write_those_sent(self, newest: Away) -> None:
        """Begin to write what has come to the host's memory."""
        for away in (*self._alive(self._leaving), newest):
            if away.writing is None and not away.stays and (away.sent is None or away.sent.query()):
                self._write(away)

    def _writes(self, buffer: _Buffer) -> bool:
        """True if there is a disk, and this is no dry run of a model that nobody has memory or room for."""
        return self.scratch is not None and not isinstance(buffer.data, FakeTensor)

    def _write(self, away: Away) -> None:
        assert self.scratch is not None and away.buffer is not None
        away.stays = True
        with self.failures.noted():
            away.extent = self.scratch.take(away.room_bytes, state="activations")
            away.writing = away.extent.write(away.buffer.data[: away.room_bytes])
            away.stays = False

    def _finish_leaving(self) -> None:
        """Have the oldest storage on its way out be gone: from the device, and from its buffer if there is a disk."""
        away = self._leaving.popleft()()
        if away is None:
            return  # `forget` has taken it off
        self._leaving_bytes -= away.room_bytes
        lanes = accelerator_for(self.device).lanes
        if away.source is not None and away.sent is not None:
            lanes.compute.wait(away.sent)
            away.source = None
            away.is_torn, away.watched = _was_written_to(away), None
        if self.scratch is not None:
            is_waiting = away.writing is None and not away.stays and away.sent is not None
            if is_waiting and away.buffer and self._writes(away.buffer):
                assert away.sent is not None
                away.sent.synchronize()
                self._write(away)
            self._leave_buffer(away)

    # -- back ---------------------------------------------------------------------------------------------------------

    def get(self, away: Away) -> Tensor:
        """The bytes of `away` on the device, 1-D; valid on the compute lane. Begins to read those put away before it.

        Raises:
            StateError: the user has written to it since it was saved.
        """
        self._clear_left()
        if away.is_torn or _was_written_to(away):
            raise written_to(away.nbytes)
        if away.back is None and away.source is None:
            self._begin_reading(away)
        back = away.source if away.source is not None else self._finish_reading(away)
        away.taken += 1
        if away.taken >= away.uses:  # by a graph that is kept it may be asked for again
            away.taken, away.done_in = 0, backward_number()
            self._drop(away)
        self._read_ahead(away)
        return back

    def _begin_reading(self, away: Away) -> None:
        if away.buffer is None:
            buffer = self._buffer(away.nbytes)
            self.read_bytes += away.nbytes
            if away.extent is not None:
                away.reading = away.extent.read(buffer.data[: away.room_bytes])
            away.buffer = buffer

    def _finish_reading(self, away: Away) -> Tensor:
        if away.is_ahead:
            away.is_ahead = False
            self._ahead_bytes -= away.room_bytes
        lanes = accelerator_for(self.device).lanes
        if away.back is None:
            self._bring_back(away)
        assert away.back is not None
        if away.came is not None:
            lanes.compute.wait(away.came)
            away.came = None
        return away.back

    def _bring_back(self, away: Away) -> None:
        """Have it on the device, as soon as the lanes get there."""
        assert away.buffer is not None
        held = away.buffer.data[: away.nbytes]
        if away.reading is not None:
            failed = True
            with self.failures.noted():
                away.reading.wait()
                failed = False
            if failed:
                held.zero_()
            away.reading = None
        accelerator = accelerator_for(self.device)
        lanes = accelerator.lanes
        if not accelerator.has_lanes:
            away.back = held
            return
        away.back = torch.empty(away.nbytes, dtype=torch.uint8, device=self.device)
        with torch.no_grad(), lanes.offload.after(lanes.compute):
            away.back.copy_(held, non_blocking=True)
        if self.scratch is None:
            travel.note("cpu", "activations", came=away.nbytes)
        away.came = away.buffer.used_by = lanes.offload.mark()

    def _read_ahead(self, away: Away) -> None:
        """Begin to read what is likely to be asked for next."""
        has_lanes, backward = accelerator_for(self.device).has_lanes, backward_number()
        for ref in reversed(away.order[: away.place]):
            earlier = ref()
            if earlier is None or earlier.store is not self or earlier.done_in == backward:
                continue
            if earlier.source is not None or earlier.back is not None:
                continue
            if not earlier.is_ahead and (has_lanes or earlier.buffer is None):
                if self._ahead_bytes and self._ahead_bytes + earlier.room_bytes > self.window_bytes:
                    return
                self._begin_reading(earlier)
                earlier.is_ahead = True
                self._ahead_bytes += earlier.room_bytes
            if has_lanes and earlier.is_ahead and (earlier.reading is None or earlier.reading.done):
                self._bring_back(earlier)

    def _drop(self, away: Away) -> None:
        """Leave it to the graph alone, which has it now."""
        away.back = None
        if self.scratch is not None and away.source is None and (away.writing is None or away.writing.done):
            self._leave_buffer(away)

    def _leave_buffer(self, away: Away) -> None:
        """What is on the disk needs no buffer any more, unless it was asked for meanwhile."""
        if away.writing is not None:
            away.stays = True
            with self.failures.noted():
                away.writing.wait()
                away.stays = False
        if away.buffer is not None and away.back is None and not away.stays:
            self._give(away.buffer)
            away.buffer = None

    # -- memory -------------------------------------------------------------------------------------------------------

    def forget(self, away: Away) -> None:
        """Note that no graph refers to `away` any more. It may be called at any moment, so it only takes notes."""
        works = tuple(work for work in (away.writing, away.reading) if work is not None)
        on_device = tuple((t, mark) for t, mark in ((away.source, away.sent), (away.back, away.came)) if t is not None)
        self._left.append(_Left(away.room_bytes, away.extent, away.buffer, works, on_device))
        if away.is_ahead:
            self._ahead_bytes -= away.room_bytes

    def _clear_left(self, *, wait: bool = False) -> None:
        """Give back what no graph refers to, if nothing is under way to it or from it; or after waiting for that."""
        lanes = accelerator_for(self.device).lanes
        for _ in range(len(self._left)):
            left = self._left.popleft()
            if not wait and not all(work.done for work in left.works):
                self._left.append(left)
                continue
            for work in left.works:
                work.settle()
            for _, mark in left.on_device:
                lanes.compute.wait(mark)
            if left.buffer is not None:
                self._give(left.buffer)
        while self._leaving and self._leaving[0]() is None:
            self._leaving.popleft()
        self._leaving_bytes = sum(away.room_bytes for away in self._alive(self._leaving))

    @property
    def _left_bytes(self) -> int:
        return sum(left.room_bytes for left in self._left)

    @staticmethod
    def _alive(refs: deque[weakref.ref[Away]]) -> Iterator[Away]:
        return (away for ref in refs if (away := ref()) is not None)

    def _buffer(self, nbytes: int) -> _Buffer:
        """One that is free, of the right size, or a new one."""
        nbytes = aligned(nbytes)
        for buffer in self._free.get(nbytes, ()):
            if self.scratch is None or buffer.is_free:  # on one lane what was read before is over
                self._free[nbytes].remove(buffer)
                return buffer
        if self.scratch is not None:  # a few are enough, of sizes that are in use
            self._free = {size: [item for item in given if not item.is_free] for size, given in self._free.items()}
        made = _Buffer(self._new_memory(nbytes))
        self._buffers.add(made)
        return made

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the host's memory that this has at the moment."""
        return sum(buffer.data.numel() for buffer in self._buffers)

    def _give(self, buffer: _Buffer) -> None:
        self._free.setdefault(buffer.data.numel(), []).append(buffer)

    def _new_memory(self, nbytes: int) -> Tensor:
        accelerator = accelerator_for(self.device)
        if not accelerator.has_lanes:
            return aligned_buffer(nbytes)
        return aligned_part(accelerator.host_zeros(nbytes + ALIGNMENT, torch.uint8, pinned=True))


def _was_written_to(away: Away) -> bool:
    """True if the source of `away` was written to since it was put away."""
    return away.watched is not None and away.watched[0]._version != away.watched[1]


def written_to(nbytes: int) -> StateError:
    """What a backward is told that needs values which are not there any more, as autograd would."""
    return StateError(
        f"a tensor of {nbytes} bytes that backward needs was changed in place since forward saved it. Change a clone "
        "of it; torch.autograd.set_detect_anomaly(True) shows the operation that saved it."
    )
