"""Scratch space: extents in a file of a rank. Freed extents are reused before the file grows.

[Note: an extent is freed by dropping it]
An extent owns a range of the file. The range is free once the last reference to the extent is dropped. That can happen
at any time, so the range is only recorded then. The next allocation reclaims the recorded ranges that have no pending
writes, because a late write would overwrite the data of the new owner.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from fullshard._compat import FakeTensor
from fullshard.device.accelerator import accelerator_for
from fullshard.device.streams import Mark
from fullshard.device.transfers import transfers
from fullshard.disk.files import DiskFile, DiskWork
from fullshard.disk.interface import aligned
from fullshard.errors import StateError


class _NoFile:
    """A replacement for a file in a dry run, where tensors have no values to store."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def read(self, offset: int, into: Tensor) -> DiskWork:
        return DiskWork([])

    def write(self, offset: int, source: Tensor) -> DiskWork:
        return DiskWork([])

    def grow(self, nbytes: int) -> None:
        self.nbytes += nbytes


class _Writes:
    """Writes to one extent that may be in progress or have failed."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, int, DiskWork]] = []  # start and end of the bytes, and the write

    def add(self, start: int, end: int, work: DiskWork) -> None:
        """Record a write to these bytes. Earlier writes to any of them have ended."""
        self._pending = [item for item in self._pending if not (item[2].is_well or _overlaps(item, start, end))]
        self._pending.append((start, end, work))

    def wait(self, start: int, end: int) -> None:
        """Wait until all writes to these bytes have ended."""
        for item in self._pending:
            if _overlaps(item, start, end):
                item[2].wait()

    @property
    def done(self) -> bool:
        """True if no write is in progress."""
        return all(work.done for _, _, work in self._pending)

    def settle(self) -> None:
        """Wait until no write is in progress."""
        for _, _, work in self._pending:
            work.settle()


def _overlaps(write: tuple[int, int, DiskWork], start: int, end: int) -> bool:
    return write[0] < end and start < write[1]


class Extent:
    """A range of whole disk blocks in a scratch file. See [Note: an extent is freed by dropping it]."""

    def __init__(self, scratch: Scratch, file: DiskFile | _NoFile, offset: int, nbytes: int, state: str) -> None:
        self.state = state  # the kind of state, for `transfers`
        self._scratch = scratch  # keeps the file open
        self._file = file
        self._offset = offset
        self.nbytes = nbytes
        self.version = 0  # the number of writes
        self._writes = _Writes()

    def __del__(self) -> None:
        self._scratch._dropped.append((self._offset, self.nbytes, self._writes))

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raise an error. A copy of an `OnDisk` has its values, but torch's `async_save` copies attributes only."""
        raise StateError(
            "torch.distributed.checkpoint.async_save cannot copy states or parameters that Offload stores on a disk. "
            "Call fullshard.checkpoint.async_save, or torch.distributed.checkpoint.save."
        )

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return self._scratch.folder

    def read(self, into: Tensor, start: int = 0, *, is_ahead: bool = False) -> DiskWork:
        """Start to fill the aligned buffer `into` with the bytes from `start`, a multiple of ALIGNMENT.

        If `is_ahead`, these bytes may be written before the data is used. So the caller must compare `version`.
        """
        self._writes.wait(start, start + into.numel())
        transfers.note("disk", self.state, arrived=into.numel())
        work = self._file.read(self._offset + start, into)
        work.mark_with(self._note(into, start, "read ahead" if is_ahead else "read"))
        return work

    def _note(self, memory: Tensor, start: int, name: str) -> Mark | None:
        accelerator = accelerator_for(memory.device)
        return accelerator.note_disk_transfer(memory, self._scratch, self._offset + start, name=name)

    def write(self, source: Tensor, start: int = 0) -> DiskWork:
        """Start to write the aligned buffer `source`. Later reads of these bytes wait for it."""
        end = start + source.numel()
        self._writes.wait(start, end)
        transfers.note("disk", self.state, passed=source.numel())
        work = self._file.write(self._offset + start, source)
        work.mark_with(self._note(source, start, "write"))
        self.version += 1
        self._writes.add(start, end, work)
        return work


class Scratch:
    """A scratch file of one rank that is created on first use and grows when it is full.

    It is closed, and its disk space freed, when this object and its last extent are dropped.
    """

    def __init__(self, folder: Path, name: str, step_bytes: int = 0) -> None:
        self.folder = folder
        self._name, self._step_bytes = name, step_bytes
        self._file: DiskFile | _NoFile | None = None
        self._free: list[tuple[int, int]] = []  # start and end of each free range, in order, adjacent ones merged
        self._dropped: deque[tuple[int, int, _Writes]] = deque()  # start, bytes, and writes that may be in progress

    @property
    def nbytes(self) -> int:
        """The size of the file in bytes."""
        return 0 if self._file is None else self._file.nbytes

    @property
    def free_bytes(self) -> int:
        """The bytes that no extent owns."""
        self._reclaim(wait=True)
        return sum(end - start for start, end in self._free)

    def take(self, nbytes: int, more: int = 0, *, state: str = "other") -> Extent:
        """Return a new extent.

        Args:
            nbytes: The size, a multiple of ALIGNMENT.
            more: The approximate number of bytes that will be requested next.
            state: The kind of state, see `device/transfers.py`.
        """
        if not nbytes:
            return Extent(self, _NoFile(0), 0, 0, state)
        self._reclaim()
        start = self._allocate(nbytes)
        if start is None:
            before = self.nbytes
            self._grow(max(nbytes + aligned(more), self._step_bytes))
            self._free_range(before, self.nbytes)
            start = self._allocate(nbytes)
        assert start is not None and self._file is not None, "the file has grown"
        return Extent(self, self._file, start, nbytes, state)

    def _grow(self, nbytes: int) -> None:
        if self._file is not None:
            self._file.grow(nbytes)
            return
        is_dry = isinstance(torch.empty(0), FakeTensor)
        self._file = _NoFile(nbytes) if is_dry else DiskFile(self.folder, self._name, nbytes)

    def _allocate(self, nbytes: int) -> int | None:
        """Allocate `nbytes` in the first free range that is large enough. Return its start, or None."""
        for i, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                self._free[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def _reclaim(self, *, wait: bool = False) -> None:
        """Free dropped extents without pending writes. If `wait`, wait for writes first."""
        for _ in range(len(self._dropped)):
            start, nbytes, writes = self._dropped.popleft()
            if wait:
                writes.settle()
            if writes.done:
                self._free_range(start, start + nbytes)
            else:
                self._dropped.append((start, nbytes, writes))

    def _free_range(self, start: int, end: int) -> None:
        """Add a range to the free ones, and merge adjacent ranges."""
        if start < end:
            insort(self._free, (start, end))
            merged: list[tuple[int, int]] = []
            for begin, stop in self._free:
                merged.append((merged.pop()[0] if merged and merged[-1][1] == begin else begin, stop))
            self._free = merged


def shared_scratch(folder: Path) -> Scratch:
    """Return the scratch file in `folder` that all callers share. Dry runs share a separate one without a file."""
    key = folder, isinstance(torch.empty(0), FakeTensor)
    return _shared.setdefault(key, Scratch(folder, "shards", _SHARED_STEP))


_SHARED_STEP = 16 << 20  # the minimum number of bytes to grow by
_shared: weakref.WeakValueDictionary[tuple[Path, bool], Scratch] = weakref.WeakValueDictionary()
