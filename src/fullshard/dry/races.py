"""Races in a trace: unordered accesses of several streams to the same memory.

Two accesses to the same bytes on different streams must be ordered if one of them is a write: one stream must have
waited for an event that the other recorded after its access. Freed memory returns to the stream that it was allocated
on, which can reuse it immediately. So all accesses of other streams to the freed memory must precede the next
allocation of that stream. When another stream uses the new memory, it must follow all work that was queued on the
allocating stream before the allocation. (torch's CUDA stream sanitizer drops freed memory, so it cannot detect this.)
The host is a stream as well: it reads the results of copies to its memory, and writes memory that other streams read.
Each read from a disk and each write to a disk is also a stream. A range of a file may be written while it is read
ahead, because the reader detects outdated data. Any use of that data is a race.

Vector clocks (Fidge, 1988; Mattern, 1989) represent the order of accesses. A stream counts its own work, and has the
counts of the work of other streams that it follows. Recording an event copies the counts. Waiting for the event takes
the maximum of both. All queued work follows the earlier work of the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fullshard.dry.storages import GIVEN
from fullshard.tape.recorder import Origin
from fullshard.tape.tape import (
    HOST,
    Access,
    Allocation,
    Collective,
    DiskTransfer,
    Free,
    Operation,
    Recorded,
    Tape,
    Waited,
)

Clock = dict[str, int]


@dataclass(frozen=True)
class Race:
    """Two unordered accesses in a trace. `first` comes first in program order.

    Args:
        what: The kind of the conflict.
        storage: The number of the storage.
        first: The first operation.
        first_stream: The stream of the first operation.
        first_origin: The unit and the phase of the first operation.
        second: The second operation.
        second_stream: The stream of the second operation.
        second_origin: The unit and the phase of the second operation.
    """

    what: str
    storage: int
    first: str
    first_stream: str
    first_origin: Origin
    second: str
    second_stream: str
    second_origin: Origin

    def __str__(self) -> str:
        def use(name: str, stream: str, origin: Origin) -> str:
            return f"{name} on stream {stream} ({origin.unit or 'the root'}, {origin.phase.value})"

        first = use(self.first, self.first_stream, self.first_origin)
        second = use(self.second, self.second_stream, self.second_origin)
        return f"{self.what} storage {self.storage}: {first}, then {second} without a wait between them"


@dataclass
class _Use:
    """An access to a storage by an operation. `time` is the stream's count at that operation."""

    name: str
    stream: str
    origin: Origin
    time: int
    access: Access
    writes: bool
    keeps: bool = False  # the memory stays allocated until the operation has ended
    of_file: bool = False  # the access is to a range of a file


class _Torn(NamedTuple):
    """A byte range of memory with data that was read from a file while the file was written."""

    start: int
    stop: int
    read: _Use
    written: _Use


_Uses = dict[tuple[str, int, int, bool], _Use]
"""The accesses to a storage: the last one of each stream for each byte range, separately for reads and writes."""


def races(tape: Tape, *, without: str = "") -> list[Race]:
    """Return the races in `tape` in program order. The list is empty if no wait is missing.

    Args:
        tape: The trace to check.
        without: The site (see `Waited.site`) of a wait to ignore. A wait only affects the timing of operations, so the
            result is that of an engine without this wait.
    """
    return list(find_races(tape, without=without))


def find_races(tape: Tape, *, without: str = "") -> Iterator[Race]:
    """Yield the races in `tape` as soon as they are found. See `races`."""
    detector = _RaceDetector()
    for entry in tape.entries:
        if not (without and isinstance(entry, Waited) and entry.site == without):
            detector.read(entry)
            if detector.found:
                yield from detector.found
                detector.found.clear()


class _RaceDetector:
    """The state of all streams and storages after the trace entries that have been processed."""

    def __init__(self) -> None:
        self.found: list[Race] = []
        self._clocks: dict[str, Clock] = defaultdict(Clock)
        self._marks: dict[int, Clock] = {}
        self._uses: dict[int, _Uses] = defaultdict(dict)  # by storage
        self._read_into: dict[str, Access] = {}  # memory that a file is read into, by stream
        self._torn: dict[int, list[_Torn]] = defaultdict(list)  # by storage
        self._freed: dict[str, list[_Use]] = defaultdict(list)  # by the stream that the memory has returned to

    def read(self, entry: object) -> None:
        match entry:
            case Operation() | Collective() | DiskTransfer():
                self._use(entry)
            case Recorded():
                self._marks[entry.mark] = dict(self._clock(entry.stream))
            case Waited():
                _join(self._clocks[entry.stream], self._marks[entry.mark])
            case Allocation():
                self._allocate(entry)
            case Free():
                self._free(entry)

    def _clock(self, stream: str) -> Clock:
        """Return the vector clock of work that is queued on `stream` now. It includes all work of the host."""
        clock = self._clocks[stream]
        if stream != HOST:
            _join(clock, self._clocks[HOST])
        return clock

    def _use(self, entry: Operation | Collective | DiskTransfer) -> None:
        clock, stream = self._clock(entry.stream), entry.stream
        clock[stream] = clock.get(stream, 0) + 1
        accesses = [(access, False) for access in entry.reads] + [(access, True) for access in entry.writes]
        for access, writes in accesses:
            if access.nbytes == 0:
                continue
            is_transfer = isinstance(entry, DiskTransfer)
            of_file = is_transfer and writes == (entry.name == "write")
            use = _Use(entry.name, stream, entry.origin, clock[stream], access, writes, is_transfer, of_file)
            uses = self._uses[access.storage]
            if is_transfer and not of_file and writes:
                self._read_into[stream] = access
            if writes or not is_transfer:  # blocks that are written to a disk may end with unused bytes
                self._find_torn(use)
            for key, other in list(uses.items()):
                if clock.get(other.stream, 0) >= other.time:
                    if writes and access.start <= other.access.start and other.access.stop <= access.stop:
                        del uses[key]  # any access that follows this write follows that access, too
                elif _conflict(use, other):
                    if of_file and other.name == "read ahead":
                        into = self._read_into.pop(other.stream, None)
                        if into is not None:
                            self._torn[into.storage].append(_Torn(into.start, into.stop, other, use))
                    else:
                        self._report("both use", other, use)
            uses[stream, access.start, access.stop, writes] = use

    def _find_torn(self, use: _Use) -> None:
        """Report a use of data that was read from a file while the file was written. A write replaces such data."""
        left: list[_Torn] = []
        for torn in self._torn.pop(use.access.storage, []):
            start, stop = max(torn.start, use.access.start), min(torn.stop, use.access.stop)
            if start >= stop:
                left.append(torn)
            elif use.writes:
                rest = [(torn.start, start), (stop, torn.stop)]
                left += [torn._replace(start=first, stop=last) for first, last in rest if first < last]
            else:
                self._report(f"{use.name} uses data that was read while it was being written:", torn.read, torn.written)
        if left:
            self._torn[use.access.storage] = left

    def _allocate(self, entry: Allocation) -> None:
        if entry.stream == GIVEN:
            return
        clock, stream = self._clock(entry.stream), entry.stream
        for use in self._freed.pop(stream, []):
            if clock.get(use.stream, 0) < use.time:
                new = _Use("the next allocation", stream, entry.origin, 0, use.access, writes=True)
                self._report("may be reused while still in use:", use, new)
        # Earlier work of this stream may still use the memory, so other streams must follow that work.
        access = Access(entry.storage, 0, entry.nbytes)
        made = _Use("its allocation", stream, entry.origin, clock.get(stream, 0), access, writes=True)
        self._uses[entry.storage][stream, 0, entry.nbytes, True] = made

    def _free(self, entry: Free) -> None:
        uses = self._uses.pop(entry.storage, {})
        if entry.stream not in (HOST, GIVEN):  # PyTorch waits before it reuses pinned memory
            self._freed[entry.stream] += [use for use in uses.values() if use.stream != entry.stream and not use.keeps]

    def _report(self, what: str, first: _Use, second: _Use) -> None:
        uses = (item for use in (first, second) for item in (use.name, use.stream, use.origin))
        self.found.append(Race(what, first.access.storage, *uses))  # type: ignore[arg-type]


def _conflict(one: _Use, other: _Use) -> bool:
    separate = one.stream == other.stream or not (one.writes or other.writes)
    return not separate and one.access.start < other.access.stop and other.access.start < one.access.stop


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time
