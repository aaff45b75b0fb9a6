"""Times derived from a trace: when each operation and collective would run on a machine of given speeds.

This is a discrete-event simulation. The host requests the entries of the trace one by one, and each costs host time.
Work is queued on a stream, which runs in order. It starts when the host has queued it, the stream has completed earlier
work, every event that the stream waits for is complete, and, for a collective, the communicator (the set of its ranks)
is free. So until the end of a stream's last work, each second of it belongs to one of three states:

    busy        it runs something
    exposed     it waits for an event of another stream, or for a communicator
    starved     the host has not queued its next work yet

Compute takes longer during a collective, by `Costs.alongside`, if the host had queued the collective before it.
Collectives do not take longer, and all ranks are assumed to start them at the same time as this one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fullshard.plan.allocator import TapeAllocator
from fullshard.plan.costs import Costs
from fullshard.tape.tape import HOST, Allocation, Collective, Entry, Free, Operation, Recorded, Waited


@dataclass(frozen=True, slots=True)
class Placed:
    """An operation or a collective with its times, in seconds from the start of the trace."""

    entry: Operation | Collective
    requested: float  # when the host had queued it
    start: float
    end: float

    def __str__(self) -> str:
        origin = self.entry.origin
        return f"{self.entry.name} of {origin.unit or 'the root'} ({origin.phase.value})"


@dataclass(frozen=True, slots=True)
class Stall:
    """A period during which a stream with pending work waits. `cause` is what it waits for, if that is in the trace."""

    stream: str
    start: float
    end: float
    cause: Placed | None

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """A trace with the simulated times of its entries."""

    placed: list[Placed]  # in the host's order
    stalls: list[Stall]
    host_s: float  # when the host has queued everything and completed its waits

    @property
    def end(self) -> float:
        """The time at which all streams and the host are done."""
        return max([self.host_s, *(item.end for item in self.placed)])

    def end_of(self, stream: str) -> float:
        """Return the time at which the last work on `stream` is done."""
        return max((item.end for item in self.placed if item.entry.stream == stream), default=0.0)

    def busy_s(self, stream: str) -> float:
        """Return the seconds during which `stream` runs something."""
        return sum(item.end - item.start for item in self.placed if item.entry.stream == stream)

    def exposed_s(self, stream: str) -> float:
        """Return the seconds that `stream`, with pending work, waits for another stream or for a communicator."""
        return sum(stall.seconds for stall in self.stalls if stall.stream == stream)

    def starved_s(self, stream: str) -> float:
        """Return the seconds during which `stream` is idle because the host has not queued its next work yet."""
        return self.end_of(stream) - self.busy_s(stream) - self.exposed_s(stream)

    def exposed_by(self, stream: str) -> dict[str, float]:
        """Return the exposed seconds of `stream` by what it waited for, as text, the largest first."""
        found: dict[str, float] = defaultdict(float)
        for stall in self.stalls:
            if stall.stream == stream:
                found[str(stall.cause or "what came before")] += stall.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def lay_out(entries: Iterable[Entry], costs: Costs | None = None, memory: TapeAllocator | None = None) -> Timeline:
    """Lay out `entries` of a trace on an idle machine with these costs.

    `entries` can be a part of a trace: events recorded before it count as complete. With `memory`, which has processed
    the earlier entries, each segment that is requested or returned costs host time. If segments must be returned to
    free device memory, the host first waits for all streams, as `cudaFree` does.
    """
    (laid,) = lay_out_parts((entries,), costs, memory)
    return laid


def lay_out_parts(
    parts: Iterable[Iterable[Entry]], costs: Costs | None = None, memory: TapeAllocator | None = None
) -> Iterator[Timeline]:
    """Yield the result of `lay_out` for the first part, the first two parts, and so on, without repeating work."""
    layout = _Layout(costs or Costs(), memory)
    for part in parts:
        for entry in part:
            layout.place(entry)
        yield Timeline(list(layout.placed), list(layout.stalls), layout.now)


_ALONGSIDE = 32  # recent collectives that may overlap with an operation


@dataclass(slots=True)
class _Point:
    """A point in time, and the work that ends then."""

    time: float = 0.0
    cause: Placed | None = None


@dataclass(slots=True)
class _StreamState:
    done: _Point = field(default_factory=_Point)  # the end of the last work
    held: _Point = field(default_factory=_Point)  # the latest event that it waits for

    @property
    def ready(self) -> _Point:
        return self.held if self.held.time > self.done.time else self.done


class _Layout:
    def __init__(self, costs: Costs, memory: TapeAllocator | None) -> None:
        self._memory = memory
        self.placed: list[Placed] = []
        self.stalls: list[Stall] = []
        self.now = 0.0  # the time of the host
        self._costs = costs
        self._streams: dict[str, _StreamState] = defaultdict(_StreamState)
        self._communicators: dict[tuple[int, ...], _Point] = defaultdict(_Point)
        self._marks: dict[int, _Point] = {}
        self._carried: deque[tuple[float, float]] = deque(maxlen=_ALONGSIDE)  # when collectives ran
        self._carried_until = 0.0

    def place(self, entry: Entry) -> None:
        match entry:
            case Allocation() | Free():
                self._costs.note_memory(entry)
                if self._memory is not None:
                    self._ask(self._memory, entry)
            case Operation() if entry.stream == HOST:
                begun = self.now
                self.now += self._costs.host_s + entry.nbytes / self._costs.host_memory_bytes_per_s
                self.placed.append(Placed(entry, begun, begun, self.now))
            case Operation():
                self.now += self._costs.host_s
                self._run(entry, self._costs.of_operation(entry), _Point())
            case Collective():
                self.now += self._costs.host_collective_s + len(entry.sizes) * self._costs.host_tensor_s
                communicator = self._communicators[entry.ranks]
                ran = self._run(entry, self._costs.of_collective(entry), communicator)
                self._communicators[entry.ranks] = _Point(ran.end, ran)
                self._carried.append((ran.start, ran.end))
                self._carried_until = max(self._carried_until, ran.end)
            case Recorded():
                self.now += self._costs.host_mark_s
                self._marks[entry.mark] = self._reached(entry.stream)
            case Waited() if not entry.queried:
                self.now += self._costs.host_mark_s
                self._wait(entry.stream, self._marks.get(entry.mark, _Point()))

    def _ask(self, memory: TapeAllocator, entry: Allocation | Free) -> None:
        """Allocate or free, including the device calls that this needs."""
        retries, calls = memory.retries, memory.requested + memory.given_back
        memory.note(entry)
        if memory.retries > retries:
            self._wait(
                HOST,
                max((stream.done for stream in self._streams.values()), key=lambda done: done.time, default=_Point()),
            )
        self.now += self._costs.segment_s * (memory.requested + memory.given_back - calls)

    def _run(self, entry: Operation | Collective, seconds: float, communicator: _Point) -> Placed:
        """Place `entry` on its stream, after earlier work, the events it waits for, and its communicator."""
        stream = self._streams[entry.stream]
        last = communicator if communicator.time > stream.ready.time else stream.ready
        could = max(self.now, stream.done.time)
        start = max(could, last.time)
        if start > could:
            self.stalls.append(Stall(entry.stream, could, start, last.cause))
        end = start + seconds
        if isinstance(entry, Operation) and start < self._carried_until:
            alongside = self._costs.alongside(entry)
            end = self._end_alongside(start, seconds, alongside) if alongside > seconds else end
        placed = Placed(entry, self.now, start, end)
        self.placed.append(placed)
        stream.done = _Point(placed.end, placed)
        return placed

    def _end_alongside(self, start: float, alone: float, alongside: float) -> float:
        """Return the end of work from `start` that takes `alone` seconds, or `alongside` during collectives."""
        now, left = start, 1.0  # the remaining share
        for begun, over in self._carried:
            if over <= now:
                continue
            free = max(0.0, begun - now)
            if left * alone <= free:
                break
            left, now = left - free / alone, now + free
            if left * alongside <= over - now:
                return now + left * alongside
            left, now = left - (over - now) / alongside, over
        return now + left * alone

    def _reached(self, stream: str) -> _Point:
        """Return the time at which `stream` completes an event that is recorded now."""
        if stream == HOST:
            return _Point(self.now)
        ready = self._streams[stream].ready
        return ready if ready.time > self.now else _Point(self.now, ready.cause)

    def _wait(self, stream: str, point: _Point) -> None:
        if stream == HOST:
            if point.time > self.now:
                self.stalls.append(Stall(HOST, self.now, point.time, point.cause))
                self.now = point.time
        elif point.time > self._streams[stream].held.time:
            self._streams[stream].held = point
