"""The throughput of the scratch files in a folder, and a warning if their disk becomes slow.

[Note: a disk that becomes slow]
Disks slow down when they are hot, when their cache is full, or when other processes use them. Then the run is slow, and
nothing else reports the cause. So each step checks the speed of the transfers since the last check. It is compared with
the measured speed of the disk, or else with the speed in the first few steps. Only the time during which the disk has
requests counts, minus the fixed cost of small requests. If two consecutive checks find the disk slower by a factor of
SLOWER, a warning is logged once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from operator import add, sub
from pathlib import Path
from threading import Lock
from typing import Protocol
from weakref import WeakSet

SLOWER = 4.0
"""The slowdown that causes a warning. Smaller slowdowns have many causes and are temporary."""

_FIRST = 3  # checks that determine the reference speed if the disk was not measured
_LEAST_BYTES = 1 << 20  # a check with fewer bytes is ignored
_REQUEST_S = 1e-3  # the fixed cost of a request of any size

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moved:
    """Bytes read and written, seconds while the disk had requests, and seconds while the program waited."""

    read_bytes: int = 0
    written_bytes: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0

    def since(self, before: Moved) -> Moved:
        """Return the difference to an earlier total."""
        return Moved(*map(sub, astuple(self), astuple(before)))


class HoldsBytes(Protocol):
    """A file on a disk."""

    held_bytes: int


@dataclass(eq=False)
class DiskPace:
    """The throughput of one folder in this process, recorded by the threads that make requests."""

    folder: Path
    clock: Callable[[], float] = time.perf_counter
    files: WeakSet[HoldsBytes] = field(default_factory=WeakSet)  # open, or closed with 0 bytes
    _total: Moved = field(default_factory=Moved)
    _checked: Moved = field(default_factory=Moved)  # the total at the last check
    _requests: int = 0  # since the last check
    _in_flight: int = 0
    _since: float = 0.0
    _checks: int = 0
    _slow: int = 0  # consecutive slow checks
    _has_warned: bool = False
    _best_bytes_per_s: float = 0.0
    _expected: Callable[[float, float], float] | None = None
    _lock: Lock = field(default_factory=Lock)

    @property
    def held_bytes(self) -> int:
        """The size of its files. Closing a file takes no lock, since garbage collection does so in any thread."""
        return sum(file.held_bytes for file in list(self.files))

    @property
    def total(self) -> Moved:
        """The totals since the process started, including the time of requests in progress."""
        with self._lock:
            self._add(Moved(busy_s=self._busy_since()))
            return self._total

    @contextmanager
    def moving(self, *, read_bytes: int = 0, written_bytes: int = 0) -> Iterator[None]:
        """Context manager that records a request of this many bytes."""
        with self._lock:
            if not self._in_flight:
                self._since = self.clock()
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._add(Moved(read_bytes, written_bytes, self._busy_since()))
                self._in_flight -= 1
                self._requests += 1

    def _busy_since(self) -> float:
        """Return the seconds with a request in progress since the last call."""
        if not self._in_flight:
            return 0.0
        before, self._since = self._since, self.clock()
        return self._since - before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager that records the time that the program waits for requests."""
        begin = self.clock()
        yield
        with self._lock:
            self._add(Moved(waited_s=self.clock() - begin))

    def _add(self, more: Moved) -> None:
        self._total = Moved(*map(add, astuple(self._total), astuple(more)))

    def expect(self, seconds: Callable[[float, float], float]) -> None:
        """Use a measurement as the reference for later checks. Earlier transfers are ignored.

        Args:
            seconds: Returns the time to read and write a number of bytes while other ranks do the same.
        """
        self._expected, self._checked = seconds, self.total

    def check(self) -> None:
        """Check the time of transfers since the last check. Warn once if they are slow."""
        now = self.total
        moved = now.since(self._checked)
        nbytes = moved.read_bytes + moved.written_bytes
        if nbytes < _LEAST_BYTES or moved.busy_s <= 0:
            return
        self._checked = now
        with self._lock:
            requests, self._requests = self._requests, 0
        self._checks += 1
        if self._expected is not None:
            known, expected_s = "when it was measured", self._expected(moved.read_bytes, moved.written_bytes)
        elif self._checks <= _FIRST:
            self._best_bytes_per_s = max(self._best_bytes_per_s, nbytes / moved.busy_s)
            return
        else:
            known, expected_s = "in the first steps", nbytes / self._best_bytes_per_s
        is_slow = moved.busy_s > SLOWER * expected_s + _REQUEST_S * requests
        self._slow = self._slow + 1 if is_slow else 0
        if self._slow > 1 and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the disk of %s has become slow: %.3g GB/s now, %.3g GB/s %s. A step moves %.3g GB, which takes %.3g "
                "s instead of %.3g s, and the step waits %.3g s for it. Check the temperature of the disk and "
                "other programs that use it, or offload less.",
                self.folder,
                nbytes / moved.busy_s / 1e9,
                nbytes / expected_s / 1e9,
                known,
                nbytes / 1e9,
                moved.busy_s,
                expected_s,
                moved.waited_s,
            )


_paces: dict[Path, DiskPace] = {}


def pace_of(folder: Path) -> DiskPace:
    """Return the `DiskPace` of `folder`, the same object for the lifetime of the process."""
    return _paces.setdefault(folder, DiskPace(folder))


def paces() -> list[DiskPace]:
    """Return the `DiskPace` of each folder with files of this process."""
    return [pace for pace in _paces.values() if pace.held_bytes]
