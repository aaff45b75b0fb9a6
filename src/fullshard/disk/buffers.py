"""Aligned memory of the host's, through which what rests on a disk passes.

[Note: buffers do not depend on the disk]
Whether a buffer that was given back is still being written or copied is no question of time here: the last MOST_WRITING
of such buffers are taken to be, and older ones are waited for when they are taken. So a fast disk and a slow one have a
run use the same buffers, and a dry run, which has none, tells how many.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fullshard.device.accelerator import Accelerator, accelerator_for
from fullshard.device.lanes import Mark
from fullshard.disk.files import ALIGNMENT, DiskWork, aligned_buffer, aligned_part

__all__ = ["MOST_WRITING", "Buffer", "Buffers", "buffers_of"]

MOST_WRITING = 2
"""Buffers that may still be written out, or copied to a device, when another one is asked for: more are waited for."""


@dataclass(eq=False)
class Buffer:
    """Memory that somebody has for now: `data`, 1-D uint8, at an aligned address."""

    data: Tensor
    whole: Tensor  # the memory that `data` begins
    work: DiskWork | None = None  # which reads or fills it still, after it was given back
    read_by: Mark | None = None  # behind the last copy out of it

    @property
    def is_idle(self) -> bool:
        """True if nothing has been under way to it or from it since it was last waited for."""
        return self.work is None and self.read_by is None

    def settle(self) -> None:
        """Wait until nothing reads or fills it."""
        if self.work is not None:
            self.work.settle()
        if self.read_by is not None:
            self.read_by.synchronize()
        self.work = self.read_by = None


class Buffers:
    """Buffers that are taken and given back: page-locked where the device has lanes.

    Args:
        device: that computes with what is in them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._given: deque[Buffer] = deque()  # oldest first

    @property
    def idle_nbytes(self) -> int:
        """Bytes of those that nobody has."""
        return sum(buffer.whole.numel() for buffer in self._given)

    def take(self, nbytes: int) -> Buffer:
        """A buffer of `nbytes`, contents undefined. It may have to be written out first.

        See [Note: buffers do not depend on the disk].
        """
        busy = [item for item in self._given if not item.is_idle][-MOST_WRITING:]
        free = [item for item in self._given if item not in busy]
        fitting = [item for item in free if item.whole.numel() >= nbytes]
        if fitting:
            found = min(fitting, key=lambda item: item.whole.numel())
            found.settle()
            self._given.remove(found)
            return Buffer(found.whole[:nbytes], found.whole)
        while free:  # what is too small goes before there is more
            small = free.pop()
            small.settle()
            self._given.remove(small)
            del small
        whole = self._new(nbytes)
        return Buffer(whole, whole)

    def give(self, buffer: Buffer, work: DiskWork | None = None, read_by: Mark | None = None) -> None:
        """Take `buffer` back, whose contents nobody needs once `work` has ended and `read_by` was passed."""
        goes_on = work if work is not None and not work.was_awaited else None
        self._given.append(Buffer(buffer.whole, buffer.whole, goes_on, read_by))

    def drop(self) -> None:
        """Let go of what nobody has, which is the system's again when nothing is under way to it any more.

        Page-locked memory is kept: to get it again would hold up the device.
        """
        if not accelerator_for(self._device).has_lanes:
            self._given.clear()

    @torch.inference_mode(False)  # may be written to in either mode
    def _new(self, nbytes: int) -> Tensor:
        accelerator = accelerator_for(self._device)
        if not accelerator.has_lanes:
            return aligned_buffer(nbytes)
        return aligned_part(accelerator.host_zeros(nbytes + ALIGNMENT, torch.uint8, pinned=True))


_buffers: WeakKeyDictionary[Accelerator, dict[torch.device, Buffers]] = WeakKeyDictionary()


def buffers_of(device: torch.device) -> Buffers:
    """The buffers for what computes on `device`, which all units of the process share."""
    of_each = _buffers.setdefault(accelerator_for(device), {})
    if device not in of_each:
        of_each[device] = Buffers(device)
    return of_each[device]
