"""How fast the disk of a folder reads and writes, and by what requests: measured in under ten seconds."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard.disk.files import DiskFile, DiskWork, aligned_buffer
from fullshard.disk.folder import free_bytes, made, mount_of
from fullshard.errors import ConfigError, DiskError

__all__ = ["TYPICAL", "DiskSpeed", "measure"]

REQUESTS = tuple(1 << power for power in (18, 20, 22, 24))  # bytes: 256 KiB to 16 MiB
DEPTHS = (1, 2, 4, 8, 16)
LARGEST = 1 << 30  # bytes of the file that is measured on
SHARE_OF_FREE = 0.1  # that it takes at most
MEMORY = 192 << 20  # bytes that requests take in turn, as in a run: what the CPU's cache holds moves a third faster
ENOUGH = 0.9  # of the best rate: with smaller buffers, if several reach it

# Of the seconds that are given, the parts for filling the file, for the search, and for each of the three rates.
_FILL, _SEARCH, _RATE = 0.2, 0.35, 0.15


@dataclass(frozen=True)
class DiskSpeed:
    """What the disk of a folder can do. Rates are of one process, in bytes a second."""

    folder: Path
    file_system: str | None  # such as "ext4"; None where the system does not tell
    is_direct: bool  # past the system's cache
    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float  # read and written together, if as much is read as is written
    request_bytes: int  # of the requests that reach this
    depth: int  # of them at once, each way
    free_bytes: int
    disk_bytes: int  # of the whole file system

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """What it takes to read and to write so much, both at once as long as there is something of both."""
        paired = min(read_bytes, written_bytes)
        rest = (read_bytes - paired) / self.read_bytes_per_s + (written_bytes - paired) / self.write_bytes_per_s
        return 2 * paired / self.both_bytes_per_s + rest


TYPICAL = DiskSpeed(
    folder=Path("/nvme/run"),
    file_system=None,
    is_direct=True,
    read_bytes_per_s=3.0e9,
    write_bytes_per_s=1.5e9,
    both_bytes_per_s=2.0e9,
    request_bytes=1 << 20,
    depth=8,
    free_bytes=1 << 40,
    disk_bytes=1 << 41,
)
"""A consumer SSD on four lanes of PCIe 3 that has written for hours, with its cache full: what a plan goes by where no
disk was measured."""


def measure(folder: Path, *, seconds: float = 8.0, clock: Callable[[], float] = time.perf_counter) -> DiskSpeed:
    """What the disk of `folder` can do, measured on a scratch file of at most 1 GiB and a tenth of what is free, but of
    16 MiB at least.

    What the file system's and the disk's own caches take at first, it may not keep up for hours.

    Args:
        folder: see `DiskFile`.
        seconds: how long it may take, about.
        clock: the time in seconds.

    Raises:
        ConfigError: `seconds` is not positive.
        DiskError: the folder cannot be written to, or has no room.
    """
    if seconds <= 0:
        raise ConfigError(f"measuring the disk of {folder} for {seconds:g} seconds: takes some time. Give it 8.")
    with made(folder):
        free = free_bytes(folder)
    largest = max(REQUESTS)
    nbytes = max(min(LARGEST, int(free * SHARE_OF_FREE)) // largest, 1) * largest
    if nbytes > free:
        raise DiskError(
            f"{folder}: {free} bytes are free there, and {nbytes} are needed to measure on. Make room, or name another "
            "folder."
        )
    file = DiskFile(folder, "speed", nbytes, request_bytes=largest, depth=max(DEPTHS))
    try:
        found = _Measuring(file, seconds, clock).run()
    finally:
        file.close()
    mount, whole = mount_of(folder), os.statvfs(folder)
    return DiskSpeed(
        folder=folder,
        file_system=None if mount is None else mount.kind,
        is_direct=file.is_direct,
        read_bytes_per_s=found.read,
        write_bytes_per_s=found.write,
        both_bytes_per_s=found.both,
        request_bytes=found.request_bytes,
        depth=found.depth,
        free_bytes=free,
        disk_bytes=whole.f_blocks * whole.f_frsize,
    )


class _Found(NamedTuple):
    read: float
    write: float
    both: float
    request_bytes: int
    depth: int


class _Measuring:
    """One measurement: fills the file, since what was never written is not read from the disk; then looks for requests
    that are fast both ways at once, and takes the rates with these.
    """

    def __init__(self, file: DiskFile, seconds: float, clock: Callable[[], float]) -> None:
        self._file = file
        self._seconds = seconds
        self._clock = clock
        self._memory = _noise(min(MEMORY, file.nbytes))  # disks may store zeros for nothing
        self._filled = file.nbytes

    def run(self) -> _Found:
        """The rates in bytes a second, and the requests."""
        fastest_fill = self._fill()
        chosen = self._search(fastest_fill)
        read, write, both = (self._rate(verbs, *chosen, self._seconds * _RATE) for verbs in (READ, WRITE, BOTH))
        return _Found(read, write, both, *chosen)

    def _fill(self) -> float:
        """Write the file from its start, as far as time allows; the rate."""
        request = max(REQUESTS)
        start, end = self._clock(), self._clock() + self._seconds * _FILL
        filled = 0
        while filled < self._file.nbytes and (not filled or self._clock() < end):
            self._file.write(filled, self._memory[filled % len(self._memory) :][:request]).wait()
            filled += request
        self._filled = filled
        return filled / max(self._clock() - start, 1e-9)

    def _search(self, bytes_per_s: float) -> tuple[int, int]:
        """The requests with the smallest buffers that are nearly as fast as the fastest."""
        each_s = self._seconds * _SEARCH / (len(REQUESTS) * len(DEPTHS))
        rates = {
            (request, depth): self._rate(BOTH, request, depth, each_s)
            for request, depth in itertools.product(REQUESTS, DEPTHS)
            if request * depth <= max(bytes_per_s * each_s, REQUESTS[0])  # what is under way at the end is waited for
        }
        best = max(rates.values())
        return min(
            (item for item, rate in rates.items() if rate >= ENOUGH * best), key=lambda rate: (rate[0] * rate[1], rate)
        )

    def _rate(self, verbs: tuple[str, ...], request_bytes: int, depth: int, seconds: float) -> float:
        """Bytes a second of requests, twice `depth` of them at once, of each kind as many."""
        begin, offsets = self._clock(), _in_turn(self._filled, request_bytes)
        buffers = (self._memory[item : item + request_bytes] for item in _in_turn(len(self._memory), request_bytes))
        under_way: deque[DiskWork] = deque()
        done = 0
        while self._clock() < begin + seconds or not done:
            while len(under_way) < 2 * depth:
                under_way += [self._start(verb, next(offsets), next(buffers)) for verb in verbs]
            under_way.popleft().wait()
            done += request_bytes
        for work in under_way:
            work.wait()
        done += len(under_way) * request_bytes
        return done / max(self._clock() - begin, 1e-9)

    def _start(self, verb: str, offset: int, buffer: Tensor) -> DiskWork:
        """Begin a request, which may meet another one in memory: nobody looks at what is there."""
        return self._file.read(offset, buffer) if verb == "read" else self._file.write(offset, buffer)


def _in_turn(nbytes: int, request_bytes: int) -> Iterator[int]:
    """Offsets one after another in so many bytes, around and around."""
    return itertools.cycle(range(0, nbytes, request_bytes))


READ, WRITE, BOTH = ("read",), ("write",), ("read", "write")


def _noise(nbytes: int) -> Tensor:
    noise = aligned_buffer(nbytes)
    noise.view(torch.int64).random_()  # a value of 8 bytes takes no longer than one of 1
    return noise
