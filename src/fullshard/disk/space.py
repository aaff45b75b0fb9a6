"""Stretches of a scratch file, given out and taken back: what was given back is used again before the file grows."""

from __future__ import annotations

from bisect import insort
from pathlib import Path

from torch import Tensor

from fullshard.disk.files import DiskFile, DiskWork, aligned

__all__ = ["Space"]

_STEP = 64 << 20  # bytes that the file grows by, at least


class Space:
    """A scratch file of one rank that grows when it is full, made when it is first needed.

    Args:
        folder: see `DiskFile`.
        name: see `DiskFile`.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._file: DiskFile | None = None
        self._free: list[tuple[int, int]] = []  # start and end of each stretch, in order, none beside another

    @property
    def nbytes(self) -> int:
        """What it takes of the disk."""
        return 0 if self._file is None else self._file.nbytes

    @property
    def free_bytes(self) -> int:
        """How much of that nobody has."""
        return sum(end - start for start, end in self._free)

    def take(self, nbytes: int) -> int:
        """The offset of a stretch of `nbytes`, a multiple of ALIGNMENT: the first that is large enough.

        Raises:
            DiskError: there is none, and the disk has no more room.
        """
        for i, (start, end) in enumerate(self._free):
            if end - start >= nbytes:
                self._free[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        before, more = self.nbytes, max(aligned(nbytes), _STEP)
        if self._file is None:
            self._file = DiskFile(self._folder, self._name, more)
        else:
            self._file.grow(more)
        self.give(before, more)
        return self.take(nbytes)

    def give(self, start: int, nbytes: int) -> None:
        """Take a stretch back, which nothing reads or writes any more."""
        insort(self._free, (start, start + nbytes))
        joined: list[tuple[int, int]] = []
        for begin, end in self._free:
            if joined and joined[-1][1] == begin:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((begin, end))
        self._free = joined

    def read(self, offset: int, into: Tensor) -> DiskWork:
        """See `DiskFile.read`."""
        assert self._file is not None, "nothing was written"
        return self._file.read(offset, into)

    def write(self, offset: int, source: Tensor) -> DiskWork:
        """See `DiskFile.write`."""
        assert self._file is not None, "nothing was taken"
        return self._file.write(offset, source)
