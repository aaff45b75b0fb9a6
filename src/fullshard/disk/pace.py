"""What the scratch files of a folder move, how long their disk takes for it, and whether it has become slow.

[Note: a disk that becomes slow]
Disks slow down when they are hot, when their cache is full, or when others use them; a run goes on, at a fraction of
its speed, and nothing else tells why. So what was moved between two looks, one a step, is held against what the disk
did when it was measured, or else in its first few steps. Only time counts in which something was asked of the disk, and
not what small requests take by themselves. If two looks in a row find it slower by SLOWER, that is said, once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

__all__ = ["SLOWER", "DiskPace", "Moved", "pace_of", "paces"]

SLOWER = 4.0
"""Times slower than at first: what is less has many causes, and passes."""

_FIRST = 3  # looks from which the pace is taken, of a disk that was not measured
_LEAST_BYTES = 1 << 20  # of a look that tells anything
_REQUEST_S = 1e-3  # that any request may take, however little it moves

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moved:
    """Bytes, the seconds in which the disk had something to do, and those in which the program waited for it."""

    read_bytes: int = 0
    written_bytes: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0

    def since(self, before: Moved) -> Moved:
        """What has come to it since it was `before`."""
        return Moved(
            self.read_bytes - before.read_bytes,
            self.written_bytes - before.written_bytes,
            self.busy_s - before.busy_s,
            self.waited_s - before.waited_s,
        )


@dataclass(eq=False)
class DiskPace:
    """Of one folder in this process. Requests are noted by the threads that make them.

    Args:
        folder: the folder.
        clock: the time in seconds.
    """

    folder: Path
    clock: Callable[[], float] = time.perf_counter
    held_bytes: int = 0  # of its files
    _total: Moved = field(default_factory=Moved)
    _looked: Moved = field(default_factory=Moved)
    _requests: int = 0  # since the last look
    _under_way: int = 0
    _since: float = 0.0
    _looks: int = 0
    _slow: int = 0  # looks in a row
    _said: bool = False
    _best_bytes_per_s: float = 0.0
    _expected: Callable[[float, float], float] | None = None
    _lock: Lock = field(default_factory=Lock)

    @property
    def total(self) -> Moved:
        """Since the process began, until now: also while requests are under way."""
        with self._lock:
            self._add(Moved(busy_s=self._busy_since()))
            return self._total

    @contextmanager
    def moving(self, *, read_bytes: int = 0, written_bytes: int = 0) -> Iterator[None]:
        """A context in which a request of so many bytes is under way."""
        with self._lock:
            if not self._under_way:
                self._since = self.clock()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._add(Moved(read_bytes, written_bytes, self._busy_since()))
                self._under_way -= 1
                self._requests += 1

    def _busy_since(self) -> float:
        """The seconds with a request under way that were not asked for before."""
        if not self._under_way:
            return 0.0
        before, self._since = self._since, self.clock()
        return self._since - before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which the program waits for requests."""
        begin = self.clock()
        yield
        with self._lock:
            self._add(Moved(waited_s=self.clock() - begin))

    def hold(self, nbytes: int) -> None:
        """Note that files have so many bytes more."""
        with self._lock:
            self.held_bytes += nbytes

    def _add(self, more: Moved) -> None:
        total = self._total
        self._total = Moved(
            total.read_bytes + more.read_bytes,
            total.written_bytes + more.written_bytes,
            total.busy_s + more.busy_s,
            total.waited_s + more.waited_s,
        )

    def expect(self, seconds: Callable[[float, float], float]) -> None:
        """Go by a measurement: the seconds in which it reads and writes so many bytes, beside other ranks that do so.

        What was moved until now is not looked at.
        """
        self._expected, self._looked = seconds, self.total

    def look(self) -> None:
        """Look at what was moved since the last look, and say once if that took too long."""
        now = self.total
        moved = now.since(self._looked)
        nbytes = moved.read_bytes + moved.written_bytes
        if nbytes < _LEAST_BYTES or moved.busy_s <= 0:
            return
        self._looked = now
        with self._lock:
            requests, self._requests = self._requests, 0
        self._looks += 1
        if self._expected is None and self._looks <= _FIRST:
            self._best_bytes_per_s = max(self._best_bytes_per_s, nbytes / moved.busy_s)
            return
        known = "when it was measured" if self._expected is not None else "in the first steps"
        expected_s = (
            self._expected(moved.read_bytes, moved.written_bytes)
            if self._expected is not None
            else nbytes / self._best_bytes_per_s
        )
        is_slow = moved.busy_s > SLOWER * expected_s + _REQUEST_S * requests
        self._slow = self._slow + 1 if is_slow else 0
        if self._slow > 1 and not self._said:
            self._said = True
            _log.warning(
                "the disk of %s has become slow: %.3g GB/s now, %.3g GB/s %s. A step moves %.3g GB, for which it needs "
                "%.3g s instead of %.3g s, and the step waits %.3g s for it. Look at its temperature and at who else "
                "uses it, or offload less.",
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
    """That of `folder`, the same as long as the process lives."""
    return _paces.setdefault(folder, DiskPace(folder))


def paces() -> list[DiskPace]:
    """Those of all folders in which this process has files."""
    return [pace for pace in _paces.values() if pace.held_bytes]
