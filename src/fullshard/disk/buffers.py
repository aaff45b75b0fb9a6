"""Aligned buffers in host memory for data that is read from or written to a disk.

[Note: buffers do not depend on the disk]
The choice of a buffer must not depend on the time at which writes and copies end. The last MOST_WRITING released
buffers count as busy. When an older buffer is taken, the program waits for its pending work. So a run uses the same
buffers on a fast disk and on a slow one, and a dry run without a disk predicts their number.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fullshard.device.accelerator import Accelerator, accelerator_for
from fullshard.device.streams import Mark
from fullshard.disk.files import DiskWork, aligned_buffer, aligned_part
from fullshard.disk.interface import ALIGNMENT, MOST_WRITING


@dataclass(eq=False)
class Buffer:
    """A borrowed buffer: `data` is 1-D uint8 at an aligned address."""

    data: Tensor
    whole: Tensor  # the memory that `data` is a slice of
    work: DiskWork | None = None  # disk work that still uses it after its release
    read_by: Mark | None = None  # recorded after the last copy from it

    def settle(self) -> None:
        """Wait until all work that uses this buffer has finished."""
        if self.work is not None:
            self.work.settle()
        if self.read_by is not None:
            self.read_by.synchronize()
        self.work = self.read_by = None


class Buffers:
    """A pool of buffers, page-locked if the device has streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._given: deque[Buffer] = deque()  # oldest first

    @property
    def idle_nbytes(self) -> int:
        """Bytes of the buffers that are not borrowed."""
        return sum(buffer.whole.numel() for buffer in self._given)

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer of `nbytes` with undefined contents. This may wait for a write.

        See [Note: buffers do not depend on the disk].
        """
        busy = [item for item in self._given if item.work is not None or item.read_by is not None][-MOST_WRITING:]
        free = [item for item in self._given if item not in busy]
        fitting = [item for item in free if item.whole.numel() >= nbytes]
        if fitting:
            found = min(fitting, key=lambda item: item.whole.numel())
            found.settle()
            self._given.remove(found)
            return Buffer(found.whole[:nbytes], found.whole)
        while free:  # free small buffers before the allocation
            small = free.pop()
            small.settle()
            self._given.remove(small)
            del small
        whole = self._new(nbytes)
        return Buffer(whole, whole)

    def give(self, buffer: Buffer, work: DiskWork | None = None, read_by: Mark | None = None) -> None:
        """Return `buffer` to the pool. It can be reused after `work` and `read_by`."""
        pending = work if work is not None and not work.was_awaited else None
        self._given.append(Buffer(buffer.whole, buffer.whole, pending, read_by))

    def drop(self) -> None:
        """Free buffers that are not borrowed. Their memory returns to the system once no work uses it.

        Page-locked memory is kept, because allocating it again would stall the device.
        """
        if not accelerator_for(self._device).has_streams:
            self._given.clear()

    @torch.inference_mode(False)  # writable both in inference mode and outside of it
    def _new(self, nbytes: int) -> Tensor:
        accelerator = accelerator_for(self._device)
        if not accelerator.has_streams:
            return aligned_buffer(nbytes)
        return aligned_part(accelerator.host_zeros(nbytes + ALIGNMENT, torch.uint8, pinned=True))


_buffers: WeakKeyDictionary[Accelerator, dict[torch.device, Buffers]] = WeakKeyDictionary()


def buffers_of(device: torch.device) -> Buffers:
    """Return the buffers for computation on `device`, which all units of the process share."""
    return _buffers.setdefault(accelerator_for(device), {}).setdefault(device, Buffers(device))
