"""The read and write speed of a folder's disk and the best requests for it, measured in under ten seconds."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from fullshard.disk.files import DiskFile, DiskWork, aligned_buffer
from fullshard.disk.folder import creating, free_bytes, mount_of
from fullshard.errors import ConfigError, DiskError

REQUESTS = tuple(1 << power for power in (18, 20, 22, 24))  # bytes: 256 KiB to 16 MiB
DEPTHS = (1, 2, 4, 8, 16)
LARGEST = 1 << 30  # maximum bytes of the test file
SHARE_OF_FREE = 0.1  # maximum share of the free space for the test file
MEMORY = 192 << 20  # bytes of buffers: more than a CPU cache, as in a run. Cached buffers make a disk a third faster
ENOUGH = 0.9  # the share of the best rate at which smaller requests are preferred

# Shares of the given time for filling the file, for the search, and for each of the three rates.
_FILL, _SEARCH, _RATE = 0.2, 0.35, 0.15


@dataclass(frozen=True)
class DiskSpeed:
    """The measured speed of the disk of a folder. Rates are for one process, in bytes per second."""

    folder: Path
    file_system: str | None  # such as "ext4"; None if unknown
    is_direct: bool  # bypasses the page cache
    read_bytes_per_s: float
    write_bytes_per_s: float
    both_bytes_per_s: float  # total for reading and writing equal amounts simultaneously
    request_bytes: int  # the request size that reaches these rates
    depth: int  # requests in flight in each direction
    free_bytes: int
    disk_bytes: int  # of the whole file system

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Return the seconds to read and write this many bytes, simultaneously if possible."""
        paired = min(read_bytes, written_bytes)
        remaining = (read_bytes - paired) / self.read_bytes_per_s + (written_bytes - paired) / self.write_bytes_per_s
        return 2 * paired / self.both_bytes_per_s + remaining


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
"""A consumer SSD on PCIe 3.0 x4 that has written for hours, so that its cache is full. It is the default for plans
without a measured disk."""


def measure(folder: Path, *, seconds: float = 8.0, clock: Callable[[], float] = time.perf_counter) -> DiskSpeed:
    """Measure the disk of `folder` with a scratch file of a tenth of the free space, but 16 MiB to 1 GiB.

    The result includes the caches of the file system and of the disk, so sustained rates over hours may be lower.

    Args:
        folder: See `DiskFile`.
        seconds: The approximate duration.
        clock: Returns the time in seconds.

    Raises:
        ConfigError: `seconds` is not positive.
        DiskError: The folder is not writable or the disk has too little free space.
    """
    if seconds <= 0:
        raise ConfigError(
            f"measuring the disk of {folder} for {seconds:g} seconds: must be greater than 0. Pass 8, for example."
        )
    with creating(folder):
        free = free_bytes(folder)
    largest = max(REQUESTS)
    nbytes = max(min(LARGEST, int(free * SHARE_OF_FREE)) // largest, 1) * largest
    if nbytes > free:
        raise DiskError(
            f"{folder}: {free} bytes are free there, but the measurement needs {nbytes}. Free space, or choose "
            "another folder."
        )
    file = DiskFile(folder, "speed", nbytes, request_bytes=largest, depth=max(DEPTHS))
    try:
        found = _Measurement(file, seconds, clock).run()
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


class _Rates(NamedTuple):
    """Bytes per second, and the requests that reach them."""

    read: float
    write: float
    both: float
    request_bytes: int
    depth: int


class _Measurement:
    """One measurement.

    It fills the file, because unwritten blocks are not read from the disk. Then it searches for the fastest requests,
    and measures the rates with them.
    """

    def __init__(self, file: DiskFile, seconds: float, clock: Callable[[], float]) -> None:
        self._file = file
        self._seconds = seconds
        self._clock = clock
        self._memory = aligned_buffer(min(MEMORY, file.nbytes))
        self._memory.view(torch.int64).random_()  # disks may store zeros without writing them
        self._filled = file.nbytes

    def run(self) -> _Rates:
        """Return the rates in bytes per second and the best requests."""
        fastest_fill = self._fill()
        chosen = self._search(fastest_fill)
        read, write, both = (self._rate(verbs, *chosen, self._seconds * _RATE) for verbs in (READ, WRITE, BOTH))
        return _Rates(read, write, both, *chosen)

    def _fill(self) -> float:
        """Fill as much of the file as time allows, and return the rate."""
        request = max(REQUESTS)
        start, end = self._clock(), self._clock() + self._seconds * _FILL
        filled = 0
        while filled < self._file.nbytes and (not filled or self._clock() < end):
            self._file.write(filled, self._memory[filled % len(self._memory) :][:request]).wait()
            filled += request
        self._filled = filled
        return filled / max(self._clock() - start, 1e-9)

    def _search(self, bytes_per_s: float) -> tuple[int, int]:
        """Return the request size and depth with the smallest buffers that nearly reach the maximum rate."""
        each_s = self._seconds * _SEARCH / (len(REQUESTS) * len(DEPTHS))
        rates = {
            (request, depth): self._rate(BOTH, request, depth, each_s)
            for request, depth in itertools.product(REQUESTS, DEPTHS)
            if request * depth <= max(bytes_per_s * each_s, REQUESTS[0])  # requests in flight at the end are waited for
        }
        good = (item for item, rate in rates.items() if rate >= ENOUGH * max(rates.values()))
        return min(good, key=lambda item: (item[0] * item[1], item))

    def _rate(self, verbs: tuple[str, ...], request_bytes: int, depth: int, seconds: float) -> float:
        """Return the bytes per second of `2 * depth` concurrent requests, the same number of each kind."""
        begin, offsets = self._clock(), itertools.cycle(range(0, self._filled, request_bytes))
        starts = itertools.cycle(range(0, len(self._memory), request_bytes))
        buffers = (self._memory[start : start + request_bytes] for start in starts)
        in_flight: deque[DiskWork] = deque()
        done = 0
        while self._clock() < begin + seconds or not done:
            while len(in_flight) < 2 * depth:  # buffers of concurrent requests may overlap, as the data is not used
                in_flight += [getattr(self._file, verb)(next(offsets), next(buffers)) for verb in verbs]
            in_flight.popleft().wait()
            done += request_bytes
        for work in in_flight:
            work.wait()
        done += len(in_flight) * request_bytes
        return done / max(self._clock() - begin, 1e-9)


READ, WRITE, BOTH = ("read",), ("write",), ("read", "write")
