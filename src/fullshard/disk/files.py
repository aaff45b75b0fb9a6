"""Scratch files: asynchronous reads and writes of data that does not stay in memory.

[Note: a scratch file has no name]
No other process needs the content: a run resumes from its checkpoint. So the file is opened without a name if the file
system supports that, and otherwise unlinked immediately. The system frees the space when the process ends in any way.

[Note: direct I/O]
If the file system allows it, reads and writes bypass the page cache (O_DIRECT). The page cache would hold all data in
memory a second time, and the disk would seem faster than it is until memory is full. O_DIRECT requires offsets, sizes
and addresses that are multiples of ALIGNMENT. Otherwise the same calls use the page cache.

[Note: huge pages]
A direct request is sent to the disk as a list of pages, which the system looks up and pins one by one. With pages of
2 MiB there are few: 2 instead of 1024 for a request of 4 MiB. So large buffers have separate mappings, for which huge
pages are requested. These mappings are also returned to the system as soon as they are dropped. `malloc` does not
return memory between other allocations.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fullshard._compat import FakeTensor
from fullshard.device.streams import Mark
from fullshard.disk.folder import creating, free_bytes, why_unfit
from fullshard.disk.interface import ALIGNMENT, aligned
from fullshard.disk.pace import DiskPace, pace_of
from fullshard.errors import DiskError

_log = logging.getLogger(__name__)

REQUEST_BYTES = 4 << 20  # the default size of one read or write system call
DEPTH = 4  # the default number of such calls in flight per file

_HUGE_PAGE_NBYTES = 2 << 20
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_warned: set[Path] = set()


def aligned_buffer(nbytes: int) -> Tensor:
    """Return a new uint8 CPU tensor of `nbytes` whose address is a multiple of ALIGNMENT. Contents are undefined.

    See [Note: huge pages].
    """
    if nbytes < _HUGE_PAGE_NBYTES or isinstance(torch.empty(0), FakeTensor):
        return aligned_part(torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu"))
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def aligned_part(memory: Tensor) -> Tensor:
    """Return a slice of a 1-D uint8 tensor that starts at a multiple of ALIGNMENT and is ALIGNMENT bytes shorter."""
    start = 0 if isinstance(memory, FakeTensor) else -memory.data_ptr() % ALIGNMENT
    return memory[start : start + memory.numel() - ALIGNMENT]


class DiskWork:
    """A read or write in progress. `pace` records the time that the program waits for it."""

    def __init__(self, parts: Sequence[Future[None]], pace: DiskPace | None = None) -> None:
        self._parts = parts
        self._pace = pace
        self._marks: tuple[Mark, ...] = ()
        self.was_awaited = False
        """True if the program has waited for its end. Unlike `done`, it does not depend on timing."""

    @classmethod
    def of_all(cls, works: Iterable[DiskWork]) -> DiskWork:
        """Return the combination of `works`."""
        works = list(works)
        combined = cls([part for work in works for part in work._parts])
        combined._marks = tuple(mark for work in works for mark in work._marks)
        return combined

    def mark_with(self, mark: Mark | None) -> None:
        """Set the event that marks the end of this work in a dry run."""
        self._marks = () if mark is None else (mark,)

    @property
    def done(self) -> bool:
        """True once it has ended, successfully or not."""
        if self._marks:
            if not all(mark.query() for mark in self._marks):
                return False
            wait(self._parts)
        return all(part.done() for part in self._parts)

    @property
    def is_well(self) -> bool:
        """True once it has ended successfully."""
        return self.done and all(part.exception() is None for part in self._parts)

    def settle(self) -> None:
        """Wait until it has ended, successfully or not. Errors are ignored, because its result is not needed."""
        wait(self._parts)
        self._reach_marks()
        self.was_awaited = True

    def _reach_marks(self) -> None:
        for mark in self._marks:
            mark.synchronize()

    def wait(self) -> None:
        """Wait until it has ended. After that the caller can use the tensor again, even after an error.

        Raises:
            DiskError: It failed. The message has the path, offset, bytes and the system's error.
        """
        if self._pace is not None and not self.done:
            with self._pace.waiting():
                wait(self._parts)
        self._reach_marks()
        self.was_awaited = True
        for part in self._parts:
            part.result()


class DiskFile:
    """One preallocated scratch file of one rank. It is deleted when it is closed or when the process ends in any way.

    Concurrent reads and writes must not overlap: wait for a write before reading the same bytes.

    Args:
        folder: The folder, which is created if it does not exist.
        name: A name for messages.
        nbytes: The size, which is allocated on the disk completely and immediately.
        direct: Whether to bypass the page cache (True), use it (False), or bypass it if possible (None).
        request_bytes: The size of one system call, a multiple of ALIGNMENT.
        depth: The number of such calls in flight.

    Raises:
        DiskError: The folder is not writable, the disk has too little free space, or `direct` is not supported.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        nbytes: int,
        *,
        direct: bool | None = None,
        request_bytes: int = REQUEST_BYTES,
        depth: int = DEPTH,
    ) -> None:
        assert request_bytes % ALIGNMENT == 0, "direct I/O needs aligned requests"
        self.path = folder / name
        self.nbytes = aligned(nbytes)
        self._request_bytes = request_bytes
        self._descriptor = -1
        self._pace = pace_of(folder)
        self.held_bytes = 0  # on the disk
        self._pace.files.add(self)
        with creating(folder, f"a scratch file of {nbytes} bytes"):
            self._descriptor = _open_nameless(folder, name)
        try:
            self._allocate(0, self.nbytes)
            self.is_direct = direct is not False and self._set_direct()
            if direct and not self.is_direct:
                raise DiskError(
                    f"{folder}: its file system does not support direct I/O. Leave `direct` out, or choose a folder "
                    "on another file system."
                )
        except BaseException:
            self._close()
            raise
        self._threads = ThreadPoolExecutor(depth, thread_name_prefix=f"fullshard-disk-{name}")
        reason = why_unfit(folder)
        if reason is not None and folder not in _warned:
            _warned.add(folder)
            _log.warning(
                "offloading to %s is slow or frees no memory: %s. Choose a folder on a local disk.", folder, reason
            )

    def __repr__(self) -> str:
        return f"DiskFile({str(self.path)!r}, {self.nbytes} bytes, {'direct' if self.is_direct else 'cached'})"

    def read(self, offset: int, into: Tensor) -> DiskWork:
        """Start to fill `into` with the bytes at `offset`.

        Args:
            offset: Bytes from the start of the file, a multiple of ALIGNMENT.
            into: A contiguous uint8 CPU tensor whose address and size are multiples of ALIGNMENT. It must not be used
                before `wait()` has returned.
        """
        return self._start(_READ, offset, into)

    def write(self, offset: int, source: Tensor) -> DiskWork:
        """Start to write `source` to `offset`. The requirements are those of `read`."""
        return self._start(_WRITE, offset, source)

    def close(self) -> None:
        """Free the disk space once all work has ended. Nothing can be read afterwards."""
        if self._descriptor >= 0:
            self._threads.shutdown()
            self._close()

    def __del__(self) -> None:
        """Free the disk space of an unreferenced file. Work in progress keeps a reference.

        Garbage collection calls this in any thread at any time, even while the thread holds a lock. So this must not
        wait for anything.
        """
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self.held_bytes = 0
            os.close(descriptor)

    def grow(self, nbytes: int) -> None:
        """Extend the file by `nbytes` on the disk."""
        self._allocate(self.nbytes, aligned(nbytes))
        self.nbytes += aligned(nbytes)

    def _allocate(self, start: int, nbytes: int) -> None:
        if not nbytes:
            return
        try:
            os.posix_fallocate(self._descriptor, start, nbytes)
            self.held_bytes = start + nbytes
        except OSError as error:
            free = free_bytes(self.path.parent)
            raise DiskError(
                f"{self.path}: growing the scratch file from {start} to {start + nbytes} bytes failed, {free} bytes "
                f"are free: {error.strerror} (errno {error.errno}). Free space, choose a folder on another disk, or "
                "offload less."
            ) from error

    def _set_direct(self) -> bool:
        """Bypass the page cache for reads and writes. Return False if that is not possible."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag or not self.nbytes:
            return False
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        probe = aligned_buffer(ALIGNMENT)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | flag)
            _READ.move(self._descriptor, probe.data_ptr(), ALIGNMENT, 0)
        except OSError as error:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            if error.errno in _NO_DIRECT:
                return False
            raise self._failure(_READ, 0, ALIGNMENT, error) from error
        return True

    def _start(self, kind: _Kind, offset: int, tensor: Tensor) -> DiskWork:
        nbytes = tensor.numel()
        assert tensor.dtype == torch.uint8 and tensor.is_contiguous() and tensor.device.type == "cpu", "not plain bytes"
        if (offset | nbytes | tensor.data_ptr()) % ALIGNMENT or not 0 <= offset <= self.nbytes - nbytes:
            raise DiskError(
                f"{self.path}: cannot {kind.verb} offset {offset}, {nbytes} bytes at address {tensor.data_ptr():#x}: "
                f"all three must be multiples of {ALIGNMENT}, within the {self.nbytes} bytes of the file. Allocate "
                "the memory with aligned_buffer."
            )
        starts = range(0, nbytes, self._request_bytes)
        parts = [self._threads.submit(self._move, kind, offset, [tensor], start) for start in starts]
        return DiskWork(parts, self._pace)

    def _move(self, kind: _Kind, offset: int, held: list[Tensor], start: int) -> None:
        """Run one request. `held` keeps the tensor's memory alive until the request ends, and is emptied then.

        The thread keeps references to its arguments a little longer. A reference to the tensor would make its buffer
        appear to be in use.
        """
        tensor = held.pop()
        nbytes = min(self._request_bytes, tensor.numel() - start)
        try:
            with self._pace.moving(**{kind.counted: nbytes}):
                kind.move(self._descriptor, tensor.data_ptr() + start, nbytes, offset + start)
        except OSError as error:
            raise self._failure(kind, offset + start, nbytes, error) from error

    def _failure(self, kind: _Kind, offset: int, nbytes: int, error: OSError) -> DiskError:
        return DiskError(
            f"{self.path}: cannot {kind.verb} {nbytes} bytes at offset {offset}: {error.strerror} (errno "
            f"{error.errno}). The changes of this step are incomplete: continue from the last checkpoint, on another "
            "disk."
        )


@dataclass(frozen=True)
class _Kind:
    """The kind of a request: read or write."""

    verb: str
    call: str  # function of `os` that takes a descriptor, buffers and an offset, and returns the number of bytes
    counted: str  # the argument of `DiskPace.moving`

    def move(self, descriptor: int, address: int, nbytes: int, offset: int) -> None:
        """Read or write all bytes. If the system processes fewer, continue at a multiple of ALIGNMENT."""
        done = 0
        while done < nbytes:
            memory = (ctypes.c_char * (nbytes - done)).from_address(address + done)
            count = getattr(os, self.call)(descriptor, [memory], offset + done)
            if done + count < nbytes:
                count -= count % ALIGNMENT
            if count <= 0:
                raise OSError(errno.EIO, f"only {done} of {nbytes} bytes were transferred")
            done += count


_READ = _Kind("read", "preadv", "read_bytes")
_WRITE = _Kind("write", "pwritev", "written_bytes")


def _open_nameless(folder: Path, name: str) -> int:
    """Open a new empty file in `folder` without a name, or unlinked. See [Note: a scratch file has no name]."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (*_NO_DIRECT, errno.EISDIR):
                raise
    path = folder / f".{name}.{os.urandom(16).hex()}.scratch"  # other processes cannot guess it and create it first
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    path.unlink()
    return descriptor
