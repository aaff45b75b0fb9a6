"""The recorder of what the engine does, in order, for tests, memory predictions and timelines.

Nothing is recorded unless a recorder is active:

    with recording() as record:
        model(batch).sum().backward()
    record.names()          # ["all_gather", "all_gather", ..., "reduce_scatter"]
    record.sent_bytes()
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from fullshard.device.current import stamp_here
from fullshard.device.streams import Stamp, Stream

__all__ = [
    "Event",
    "Origin",
    "Phase",
    "Recorder",
    "acting_for",
    "active_recorder",
    "allocating",
    "note_origin",
    "noting",
    "noting_wait",
    "recording",
    "recording_to",
]


class Phase(Enum):
    """The phases of a step, for uses of a unit."""

    IDLE = "idle"
    FORWARD = "forward"
    PRE_BACKWARD = "pre-backward"
    BACKWARD = "backward"
    POST_BACKWARD = "post-backward"
    STEP = "step"  # of the optimizer


@dataclass(frozen=True)
class Origin:
    """The cause of an operation: a unit (by FQN, empty for the root), its phase, and the microbatch.

    Microbatches of a step are numbered from 1; 0 is before the first. `note` describes anything unusual.
    """

    unit: str
    phase: Phase
    microbatch: int = 0
    note: str = ""


def _now() -> float:
    """Return the current time. Unlike a default factory it is looked up at each call, so that tests can patch it."""
    return time.perf_counter()


@dataclass(slots=True)
class Event:
    """One action of the engine.

    `name` is a collective of tensors (one of `COLLECTIVES`) or of objects, "allocate" or "free" for the unsharded
    storage of a unit, "orthogonalise" for a matrix, "checkpoint" while the program saves one, or "wait" while a stream
    waits for a collective of `origin`. `sent_bytes` counts the bytes that this rank sends in `messages` to the other
    `ranks`. Data that peers read from shared memory counts as well. `nbytes` is the size of the storage or matrix.
    Times are seconds of `time.perf_counter`; `end` is None while the action is in progress. For an asynchronous
    collective, `launched` is the time when the program continued and `awaited` the time when it began to wait; both are
    None if it waited immediately. If the recorder reads stream times, `began` and `ended` are the times on the stream,
    where they differ from the program's.
    """

    name: str
    origin: Origin
    stream: str = "compute"
    nbytes: int = 0
    sent_bytes: int = 0
    messages: int = 0
    ranks: tuple[int, ...] = ()
    start: float = field(default_factory=_now)
    end: float | None = None
    launched: float | None = None
    awaited: float | None = None
    began: Stamp | None = None
    ended: Stamp | None = None

    def finish(self) -> None:
        """Record that the action has ended."""
        self.end = _now()


COLLECTIVES = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
)


class Recorder:
    """A list of events with the queries that tests and reports need.

    Within the context of another recorder, it forwards all events to that recorder as well.
    """

    reads_streams = False
    """True if events record times on streams, which can differ from the program's."""

    def __init__(self) -> None:
        self.outer: Recorder | None = None
        self.events: list[Event] = []
        self.origin = Origin("", Phase.IDLE)  # the cause of the current work
        self.purpose = ""  # the purpose of allocated memory, if the engine knows it

    def add(self, event: Event) -> Event:
        """Append `event` and return it."""
        self.events.append(event)
        if self.outer is not None:
            self.outer.add(event)
        return event

    def turn_to(self, origin: Origin) -> None:
        """Attribute all later work to `origin`, because the program proceeds to another unit or phase."""
        self.origin = origin
        if self.outer is not None:
            self.outer.turn_to(origin)

    def collectives(self, name: str | None = None) -> list[Event]:
        """Return the collectives in the order they were started; only those called `name`, if given."""
        return [event for event in self.events if event.name in ((name,) if name else COLLECTIVES)]

    def names(self) -> list[str]:
        """Return the names of the collectives in the order they were started."""
        return [event.name for event in self.collectives()]

    def sent_bytes(self, name: str | None = None) -> int:
        """Return the bytes that this rank sent to others, in all collectives or in those called `name`."""
        return sum(event.sent_bytes for event in self.collectives(name))

    def gathered_peak_bytes(self) -> int:
        """Return the peak bytes of unsharded parameters, not counting those that stay unsharded between steps."""
        held = peak = 0
        for event in self.events:
            held += {"allocate": event.nbytes, "free": -event.nbytes}.get(event.name, 0)
            peak = max(peak, held)
        return peak


_active: Recorder | None = None  # not a context variable: backward may run on a thread of autograd


def active_recorder() -> Recorder | None:
    """Return the recorder that the engine records to, or None."""
    return _active


R = TypeVar("R", bound=Recorder)


@contextmanager
def recording_to(recorder: R) -> Iterator[R]:
    """Context manager that records everything the engine does in this process with `recorder`."""
    global _active
    previous, _active = _active, recorder
    recorder.outer = previous
    if previous is not None:
        recorder.origin = previous.origin
    try:
        yield recorder
    finally:
        _active, recorder.outer = previous, None


def recording() -> AbstractContextManager[Recorder]:
    """Context manager that records everything the engine does in this process."""
    return recording_to(Recorder())


def note_origin(origin: Origin) -> None:
    """Attribute all later work to `origin`."""
    if _active is not None:
        _active.turn_to(origin)


def allocating(purpose: str) -> AbstractContextManager[None]:
    """Context manager that records allocations of memory as for `purpose`."""
    return nullcontext() if _active is None else acting_for(_active.origin, purpose)


@contextmanager
def acting_for(origin: Origin, purpose: str = "") -> Iterator[None]:
    """Context manager that attributes work to `origin`, and allocated memory to `purpose`."""
    recorder = _active
    if recorder is None:
        yield
        return
    before = recorder.origin, recorder.purpose
    recorder.origin, recorder.purpose = origin, purpose
    try:
        yield
    finally:
        recorder.origin, recorder.purpose = before


@contextmanager
def noting(name: str) -> Iterator[None]:
    """Context manager that records what the program does as an event called `name`."""
    recorder = _active
    if recorder is None:
        yield
        return
    event = recorder.add(Event(name, recorder.origin, "host", began=stamp_here() if recorder.reads_streams else None))
    try:
        yield
    finally:
        event.ended = stamp_here() if recorder.reads_streams else None
        event.finish()


@contextmanager
def noting_wait(stream: Stream, origin: Origin) -> Iterator[None]:
    """Context manager that records a wait of `stream` for a collective of `origin`. The program does not wait."""
    recorder = _active
    if recorder is None or not (recorder.reads_streams and stream.is_stream):
        yield
        return
    event = Event("wait", origin, stream.name, began=stream.stamp())
    yield
    event.ended = stream.stamp()
    recorder.add(event).finish()
