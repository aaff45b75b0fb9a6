"""Scratch files: memory that a rank writes out and reads back while it computes.

[Note: a scratch file has no name]
What lies in it is worth nothing to another process: a killed run's state comes from its checkpoint. So the file is
opened without a name where the file system can do that, and loses it at once where not. The system takes the room
back when the process ends, however it ends: there is nothing to find, to judge or to clear up in the next run.

[Note: straight to the disk]
Where the file system allows, reads and writes go past the system's cache (O_DIRECT), which would hold all of it in
memory a second time, and would make a disk seem faster than it is until memory is full. Offsets, sizes and addresses
must then be multiples of ALIGNMENT. Elsewhere the same calls go through the cache.

[Note: memory that a disk fills]
A request past the cache goes to the disk as a list of pages, which the system looks up and holds one by one. Of pages
of 2 MiB there are few: 2 and not 1024 in a request of 4 MiB. So large buffers are mapped by themselves, and the system
is asked for huge pages. They also go back to it as soon as they are dropped, which `malloc` does not do with what lies
between others.
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
from fullshard.disk.folder import free_bytes, made, why_unfit
from fullshard.disk.pace import DiskPace, pace_of
from fullshard.errors import DiskError

__all__ = ["ALIGNMENT", "DEPTH", "REQUEST_BYTES", "DiskFile", "DiskWork", "aligned", "aligned_buffer", "aligned_part"]

_log = logging.getLogger(__name__)

ALIGNMENT = 4096
"""Offsets, sizes and addresses are multiples of it: no disk or file system in use asks for more."""
REQUEST_BYTES = 4 << 20
"""What one call of the system reads or writes, unless a file is told otherwise."""
DEPTH = 4
"""How many such calls a file has under way at once, unless it is told otherwise."""

_HUGE_PAGE_NBYTES = 2 << 20
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_warned: set[Path] = set()


def aligned(nbytes: int) -> int:
    """`nbytes`, and what is missing to the next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def aligned_buffer(nbytes: int) -> Tensor:
    """A new uint8 tensor on the CPU, of `nbytes`, whose address is a multiple of ALIGNMENT. Contents are undefined.

    See [Note: memory that a disk fills].
    """
    if nbytes < _HUGE_PAGE_NBYTES or isinstance(torch.empty(0), FakeTensor):
        return aligned_part(torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8))
    pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # of a system that was built without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def aligned_part(room: Tensor) -> Tensor:
    """Of a 1-D uint8 tensor all but ALIGNMENT bytes, from an address on that is a multiple of ALIGNMENT."""
    start = 0 if isinstance(room, FakeTensor) else -room.data_ptr() % ALIGNMENT
    return room[start : start + room.numel() - ALIGNMENT]


class DiskWork:
    """A read or write that goes on. `pace` is told how long the program waits for it."""

    def __init__(self, parts: Sequence[Future[None]], pace: DiskPace | None = None) -> None:
        self._parts = parts
        self._pace = pace
        self.was_awaited = False
        """Whether the program has waited for its end: unlike `done` no question of time."""

    @classmethod
    def of_all(cls, works: Iterable[DiskWork]) -> DiskWork:
        """All of `works` as one."""
        return cls([part for work in works for part in work._parts])

    @property
    def done(self) -> bool:
        """True once it has ended, well or not."""
        return all(part.done() for part in self._parts)

    @property
    def is_well(self) -> bool:
        """True once it has ended well."""
        return all(part.done() and part.exception() is None for part in self._parts)

    def settle(self) -> None:
        """Wait until it has ended, well or not: what it was for is of no use any more."""
        wait(self._parts)
        self.was_awaited = True

    def wait(self) -> None:
        """Wait until it has ended. The tensor is the caller's again then, whatever happened.

        Raises:
            DiskError: the disk could not; with path, offset, bytes and the system's error.
        """
        if self._pace is not None and not self.done:
            with self._pace.waiting():
                wait(self._parts)
        self.was_awaited = True
        for part in self._parts:
            part.result()


class DiskFile:
    """One preallocated scratch file of one rank, gone when it is closed or the process ends, however that ends.

    Reads and writes that are under way at once must not meet: whoever reads what is being written waits for it first.

    Args:
        folder: where; made if it is not there.
        name: for messages.
        nbytes: its size, all of which is taken from the disk now.
        direct: past the system's cache (True), through it (False), or past it where that is possible (None).
        request_bytes: what one call of the system reads or writes, a multiple of ALIGNMENT.
        depth: how many such calls are under way at once.

    Raises:
        DiskError: the folder cannot be written to, has not so much room, or cannot do what `direct` asks.
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
        assert request_bytes % ALIGNMENT == 0, "a request that no disk takes past the cache"
        self.path = folder / name
        self.nbytes = aligned(nbytes)
        self._request_bytes = request_bytes
        self._descriptor = -1
        self._pace, self._held = pace_of(folder), 0
        with made(folder, f"a scratch file of {nbytes} bytes"):
            self._descriptor = _open_nameless(folder, name)
        try:
            self._allocate(0, self.nbytes)
            self.is_direct = direct is not False and self._go_direct()
            if direct and not self.is_direct:
                raise DiskError(
                    f"{folder}: its file system reads and writes through the system's cache only. Leave `direct` out, "
                    "or name a folder on another."
                )
        except BaseException:
            self._close()
            raise
        self._threads = ThreadPoolExecutor(depth, thread_name_prefix=f"fullshard-disk-{name}")
        _warn_if_unfit(folder)

    def __repr__(self) -> str:
        return f"DiskFile({str(self.path)!r}, {self.nbytes} bytes, {'direct' if self.is_direct else 'cached'})"

    def read(self, offset: int, into: Tensor) -> DiskWork:
        """Begin to fill `into` with what was written at `offset`.

        Args:
            offset: bytes from the start of the file, a multiple of ALIGNMENT.
            into: contiguous uint8 on the CPU, its address and size multiples of ALIGNMENT; nobody's until the work
                has been waited for.
        """
        return self._start(_READ, offset, into)

    def write(self, offset: int, source: Tensor) -> DiskWork:
        """Begin to write `source` to `offset`; the rules are those of `read`."""
        return self._start(_WRITE, offset, source)

    def close(self) -> None:
        """Give the room back, after what is under way has ended. Nothing can be read any more."""
        if self._descriptor >= 0:
            self._threads.shutdown()
            self._close()

    def __del__(self) -> None:
        """Give the room back of a file that nobody has any more: what is under way holds it."""
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self._pace.hold(-self._held)
            os.close(descriptor)

    def grow(self, nbytes: int) -> None:
        """Take so many bytes more from the disk, at the end of the file.

        Raises:
            DiskError: it has not so much room.
        """
        self._allocate(self.nbytes, aligned(nbytes))
        self.nbytes += aligned(nbytes)

    def _allocate(self, start: int, nbytes: int) -> None:
        if not nbytes:
            return
        try:
            os.posix_fallocate(self._descriptor, start, nbytes)
            self._pace.hold(nbytes)
            self._held = start + nbytes
        except OSError as error:
            free = free_bytes(self.path.parent)
            raise DiskError(
                f"{self.path}: a scratch file of {start + nbytes} bytes was asked for, {start} of which it has, and "
                f"{free} bytes are free there: {error.strerror} (errno {error.errno}). Make room, name a folder on "
                "another disk, or offload less."
            ) from error

    def _go_direct(self) -> bool:
        """Have reads and writes go past the system's cache. False if they cannot."""
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
        found = f"offset {offset}, {nbytes} bytes at address {tensor.data_ptr():#x}"
        assert tensor.dtype == torch.uint8 and tensor.is_contiguous() and tensor.device.type == "cpu", "not plain bytes"
        if (offset | nbytes | tensor.data_ptr()) % ALIGNMENT or not 0 <= offset <= self.nbytes - nbytes:
            raise DiskError(
                f"{self.path}: cannot {kind.verb} {found}: all three must be multiples of {ALIGNMENT}, within the "
                f"{self.nbytes} bytes of the file. Take memory from aligned_buffer."
            )
        starts = range(0, nbytes, self._request_bytes)
        parts = [self._threads.submit(self._move, kind, offset, tensor, start) for start in starts]
        return DiskWork(parts, self._pace)

    def _move(self, kind: _Kind, offset: int, tensor: Tensor, start: int) -> None:
        """One request. The tensor is an argument so that its memory lives as long as this."""
        nbytes = min(self._request_bytes, tensor.numel() - start)
        try:
            with self._pace.moving(**{kind.counted: nbytes}):
                kind.move(self._descriptor, tensor.data_ptr() + start, nbytes, offset + start)
        except OSError as error:
            raise self._failure(kind, offset + start, nbytes, error) from error

    def _failure(self, kind: _Kind, offset: int, nbytes: int, error: OSError) -> DiskError:
        return DiskError(
            f"{self.path}: cannot {kind.verb} {nbytes} bytes at offset {offset}: {error.strerror} (errno "
            f"{error.errno}). What this step has changed is not whole: go on from the last checkpoint, on another disk."
        )


@dataclass(frozen=True)
class _Kind:
    """Reading or writing."""

    verb: str
    call: str  # of `os`: with a descriptor, buffers and an offset, the bytes that it did
    counted: str  # the argument of `DiskPace.moving`

    def move(self, descriptor: int, address: int, nbytes: int, offset: int) -> None:
        """All of it, though the system may do less at a time: then go on at a multiple of ALIGNMENT."""
        done = 0
        while done < nbytes:
            memory = (ctypes.c_char * (nbytes - done)).from_address(address + done)
            count = getattr(os, self.call)(descriptor, [memory], offset + done)
            if done + count < nbytes:
                count -= count % ALIGNMENT
            if count <= 0:
                raise OSError(errno.EIO, f"only {done} of {nbytes} bytes, and then no more")
            done += count


_READ = _Kind("read", "preadv", "read_bytes")
_WRITE = _Kind("write", "pwritev", "written_bytes")


def _open_nameless(folder: Path, name: str) -> int:
    """A new empty file in `folder` that has no name, or none any more. See [Note: a scratch file has no name]."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (*_NO_DIRECT, errno.EISDIR):
                raise
    path = folder / f".{name}.{os.urandom(16).hex()}.scratch"  # nobody else can make it first
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    path.unlink()
    return descriptor


def _warn_if_unfit(folder: Path) -> None:
    reason = why_unfit(folder)
    if reason is not None and folder not in _warned:
        _warned.add(folder)
        _log.warning("%s is a bad place to offload to: %s. Name a folder on a disk of this machine.", folder, reason)
