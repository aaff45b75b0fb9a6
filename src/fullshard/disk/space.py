"""Scratch: room in a file of a rank, given out in extents. What nobody has any more is used before the file grows.

[Note: an extent is given back by dropping it]
Whoever has an extent has its stretch of the file; when the last one lets go of it, the stretch is free. That may be at
any moment, so it is only noted then. The next one who asks for room takes what was noted, as far as nothing is written
to it any more: a late write would destroy what another one has there by then.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fullshard._compat import FakeTensor
from fullshard.device.travel import travel
from fullshard.disk.files import DiskFile, DiskWork, aligned

__all__ = ["Extent", "Scratch", "shared_scratch"]


class _NoFile:
    """What stands for a file in a dry run, whose tensors have no values to be kept."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def read(self, offset: int, into: Tensor) -> DiskWork:
        return DiskWork([])

    def write(self, offset: int, source: Tensor) -> DiskWork:
        return DiskWork([])

    def grow(self, nbytes: int) -> None:
        self.nbytes += nbytes

    def close(self) -> None:
        """Nothing is open."""


class _Writes:
    """Writes to one extent that may still go on, or have failed."""

    def __init__(self) -> None:
        self._under_way: list[tuple[int, int, DiskWork]] = []  # start, end

    def add(self, start: int, end: int, work: DiskWork) -> None:
        """Note a write of these bytes. Those before it to any of them are over."""
        self._under_way = [item for item in self._under_way if not (item[2].is_well or _meet(item, start, end))]
        self._under_way.append((start, end, work))

    def wait(self, start: int, end: int) -> None:
        """Wait until these bytes are there.

        Raises:
            DiskError: they could not be written.
        """
        for item in self._under_way:
            if _meet(item, start, end):
                item[2].wait()

    @property
    def done(self) -> bool:
        """True if nothing is written any more."""
        return all(work.done for _, _, work in self._under_way)

    def settle(self) -> None:
        """Wait until nothing is written any more."""
        for _, _, work in self._under_way:
            work.settle()


def _meet(write: tuple[int, int, DiskWork], start: int, end: int) -> bool:
    return write[0] < end and start < write[1]


class Extent:
    """A stretch of a scratch file, of whole blocks of the disk. See [Note: an extent is given back by dropping it]."""

    def __init__(self, scratch: Scratch, file: DiskFile | _NoFile, offset: int, nbytes: int, state: str) -> None:
        self.state = state  # whose bytes they are, for `travel`
        self._scratch = scratch  # which closes its file once nobody needs it
        self._file = file
        self._offset = offset
        self.nbytes = nbytes
        self.version = 0  # how often it was written to
        self._writes = _Writes()

    def __del__(self) -> None:
        self._scratch._dropped.append((self._offset, self.nbytes, self._writes))

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return self._scratch.folder

    def read(self, into: Tensor, start: int = 0) -> DiskWork:
        """Begin to fill the aligned buffer `into` with the bytes from `start` on, a multiple of ALIGNMENT.

        Raises:
            DiskError: what was written there last could not be.
        """
        self._writes.wait(start, start + into.numel())
        travel.note("disk", self.state, came=into.numel())
        return self._file.read(self._offset + start, into)

    def write(self, source: Tensor, start: int = 0) -> DiskWork:
        """Begin to write the aligned buffer `source`; reads of these bytes from now on wait for it.

        Raises:
            DiskError: what was written there last could not be.
        """
        end = start + source.numel()
        self._writes.wait(start, end)
        travel.note("disk", self.state, went=source.numel())
        work = self._file.write(self._offset + start, source)
        self.version += 1
        self._writes.add(start, end, work)
        return work


class Scratch:
    """A scratch file of one rank, made when it is first needed, which grows when it is full.

    It is closed, and its room on the disk free, when this and the last extent of it are dropped.

    Args:
        folder: see `DiskFile`.
        name: see `DiskFile`.
        step_bytes: what it grows by, at least.
    """

    def __init__(self, folder: Path, name: str, step_bytes: int = 0) -> None:
        self.folder = folder
        self._name, self._step_bytes = name, step_bytes
        self._file: DiskFile | _NoFile | None = None
        self._free: list[tuple[int, int]] = []  # start and end of each stretch, in order, none beside another
        self._dropped: deque[tuple[int, int, _Writes]] = deque()  # start, bytes, and what may still go on there

    @property
    def nbytes(self) -> int:
        """What it takes of the disk."""
        return 0 if self._file is None else self._file.nbytes

    @property
    def free_bytes(self) -> int:
        """How much of that nobody has."""
        self._take_back(wait=True)
        return sum(end - start for start, end in self._free)

    def take(self, nbytes: int, more: int = 0, *, state: str = "other") -> Extent:
        """A new extent of `nbytes`, a multiple of ALIGNMENT; about `more` bytes are going to be taken after it.

        `state` is whose bytes they are, see `device/travel.py`.

        Raises:
            DiskError: there is no such room, and the disk has no more.
        """
        if not nbytes:
            return Extent(self, _NoFile(0), 0, 0, state)
        self._take_back()
        start = self._found(nbytes)
        if start is None:
            before = self._grow(max(nbytes + aligned(more), self._step_bytes))
            self._give(before, self.nbytes)
            start = self._found(nbytes)
        assert start is not None and self._file is not None, "there is room by now"
        return Extent(self, self._file, start, nbytes, state)

    def _grow(self, nbytes: int) -> int:
        """Have so many bytes more: where they begin."""
        before = self.nbytes
        if self._file is not None:
            self._file.grow(nbytes)
            return before
        is_dry = isinstance(torch.empty(0), FakeTensor)
        self._file = _NoFile(nbytes) if is_dry else DiskFile(self.folder, self._name, nbytes)
        weakref.finalize(self, self._file.close)
        return before

    def _found(self, nbytes: int) -> int | None:
        """Where the first free stretch begins that is large enough, of which `nbytes` are free no more."""
        for i, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                self._free[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def _take_back(self, *, wait: bool = False) -> None:
        """Have what was dropped free again, as far as nothing is written there; or after waiting for that."""
        for _ in range(len(self._dropped)):
            start, nbytes, writes = self._dropped.popleft()
            if wait:
                writes.settle()
            if writes.done:
                self._give(start, start + nbytes)
            else:
                self._dropped.append((start, nbytes, writes))

    def _give(self, start: int, end: int) -> None:
        if start < end:
            insort(self._free, (start, end))
            self._free = list(_joined(self._free))


def shared_scratch(folder: Path) -> Scratch:
    """The scratch file in `folder` that all who ask for it share; dry runs have one of their own, which is no file."""
    key = folder, isinstance(torch.empty(0), FakeTensor)
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = Scratch(folder, "shards", _SHARED_STEP)
    return found


_SHARED_STEP = 16 << 20  # bytes that it grows by, at least
_shared: weakref.WeakValueDictionary[tuple[Path, bool], Scratch] = weakref.WeakValueDictionary()


def _joined(stretches: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Those that lie end to end as one."""
    start, end = stretches[0]
    for begin, stop in stretches[1:]:
        if begin == end:
            end = stop
        else:
            yield start, end
            start, end = begin, stop
    yield start, end
