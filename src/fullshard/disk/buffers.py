"""Aligned memory of the host's, through which what rests on a disk passes."""

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
"""Buffers that are still written out, or copied to a device, when another one is asked for: more are waited for."""


@dataclass(eq=False)
class Buffer:
    """Memory that somebody has for now: `data`, 1-D uint8, at an aligned address."""

    data: Tensor
    whole: Tensor  # the memory that `data` begins
    work: DiskWork | None = None  # which reads or fills it still, after it was given back
    read_by: Mark | None = None  # behind the last copy out of it

    @property
    def is_free(self) -> bool:
        """True if nothing reads or fills it."""
        return (self.work is None or self.work.done) and (self.read_by is None or self.read_by.query())

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
        """A buffer of `nbytes`, contents undefined. It may have to be written out first."""
        free = [it for it in self._given if it.is_free]
        if len(self._given) - len(free) >= MOST_WRITING:
            oldest = next(it for it in self._given if it not in free)
            oldest.settle()
            free.append(oldest)
        fitting = [it for it in free if it.whole.numel() >= nbytes]
        found = min(fitting, key=lambda it: it.whole.numel()) if fitting else None
        if found is None and free:  # grow rather than keep what is too small
            self._given.remove(min(free, key=lambda it: it.whole.numel()))
        if found is None:
            whole = self._new(nbytes)
        else:
            self._given.remove(found)
            found.settle()  # at once; but those who look for races see no more than waits
            whole = found.whole
        return Buffer(whole[:nbytes], whole)

    def give(self, buffer: Buffer, work: DiskWork | None = None, read_by: Mark | None = None) -> None:
        """Take `buffer` back, whose contents nobody needs once `work` has ended and `read_by` was passed."""
        self._given.append(Buffer(buffer.whole, buffer.whole, work, read_by))

    def drop(self) -> None:
        """Give back to the system what nobody has and nothing is under way to."""
        self._given = deque(it for it in self._given if not it.is_free)

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
