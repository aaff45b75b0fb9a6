"""The one recorder: what the engine did, in order, for tests, ledgers and timelines.

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
from fullshard.device.lanes import Lane, Stamp

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
    """The phases of a step in which a unit is used."""

    IDLE = "idle"
    FORWARD = "forward"
    PRE_BACKWARD = "pre-backward"
    BACKWARD = "backward"
    POST_BACKWARD = "post-backward"
    STEP = "step"  # of the optimizer


@dataclass(frozen=True)
class Origin:
    """The cause of an operation: a unit (by FQN; the root's is empty), its phase, and the microbatch.

    Microbatches of a step count from 1 on; 0 is before the first. `note` says what is unusual about it.
    """

    unit: str
    phase: Phase
    microbatch: int = 0
    note: str = ""


def _now() -> float:
    """Looked up at each call, unlike a default factory: tests pretend a clock."""
    return time.perf_counter()


@dataclass(slots=True)
class Event:
    """One thing the engine did.

    `name` is a collective of tensors (one of `COLLECTIVES`) or of objects, "allocate" or "free" of a unit's unsharded
    storage, "orthogonalise" of a matrix, "checkpoint" while the program saves one, or "wait" while a lane waits for a
    collective of that origin. `sent_bytes` counts what this rank sends in `messages` to the others of
    `ranks`; through shared memory too, where a message says what was published for the other to read. `nbytes` are
    those of the storage or the matrix. Times are seconds of `time.perf_counter`; `end` is None while it is under way.
    Of a collective, `launched` is when the program went on beside it, and `awaited` when the program began to wait for
    it; None where it was waited for at once. What a lane does at other times than the program has `began` and `ended`
    there, if the recorder reads lanes.
    """

    name: str
    origin: Origin
    lane: str = "compute"
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
        """Note that it is over."""
        self.end = _now()


COLLECTIVES = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
)


class Recorder:
    """A list of events, and the questions that tests and reports ask of it.

    Within the context of another recorder it lets that one know of everything, too.
    """

    reads_lanes = False
    """True if events are to have the times of lanes, where these do things at other times than the program."""

    def __init__(self) -> None:
        self.outer: Recorder | None = None
        self.events: list[Event] = []
        self.origin = Origin("", Phase.IDLE)  # whose work is being asked for
        self.purpose = ""  # what memory that is allocated is for, where the engine knows

    def add(self, event: Event) -> Event:
        """Append `event`, and give it back."""
        self.events.append(event)
        if self.outer is not None:
            self.outer.add(event)
        return event

    def turn_to(self, origin: Origin) -> None:
        """Take what is asked for from now on as on behalf of `origin`: the program turns to another unit or phase."""
        self.origin = origin
        if self.outer is not None:
            self.outer.turn_to(origin)

    def collectives(self, name: str | None = None) -> list[Event]:
        """The collectives, in the order they were started; only those called `name`, if given."""
        return [event for event in self.events if event.name in ((name,) if name else COLLECTIVES)]

    def names(self) -> list[str]:
        """The names of the collectives, in the order they were started."""
        return [event.name for event in self.collectives()]

    def sent_bytes(self, name: str | None = None) -> int:
        """Bytes that this rank sent to others, in all collectives or in those called `name`."""
        return sum(event.sent_bytes for event in self.collectives(name))

    def gathered_peak_bytes(self) -> int:
        """The most bytes of unsharded parameters at once, beyond those kept unsharded between steps."""
        held = peak = 0
        for event in self.events:
            held += {"allocate": event.nbytes, "free": -event.nbytes}.get(event.name, 0)
            peak = max(peak, held)
        return peak


_active: Recorder | None = None  # not a context variable: backward may run on a thread of autograd's


def active_recorder() -> Recorder | None:
    """The recorder that the engine records to, if there is one."""
    return _active


R = TypeVar("R", bound=Recorder)


@contextmanager
def recording_to(recorder: R) -> Iterator[R]:
    """A context in which everything the engine does in this process is recorded by `recorder`."""
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
    """A context in which everything the engine does in this process is recorded."""
    return recording_to(Recorder())


def note_origin(origin: Origin) -> None:
    """Have what is asked for from now on recorded as on behalf of `origin`."""
    if _active is not None:
        _active.turn_to(origin)


def allocating(purpose: str) -> AbstractContextManager[None]:
    """A context in which memory is allocated for `purpose`."""
    return nullcontext() if _active is None else acting_for(_active.origin, purpose)


@contextmanager
def acting_for(origin: Origin, purpose: str = "") -> Iterator[None]:
    """A context in which work is on behalf of `origin`, and memory is allocated for `purpose`."""
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
    """A context in which the program does something that is recorded as an event of that name."""
    recorder = _active
    if recorder is None:
        yield
        return
    event = recorder.add(Event(name, recorder.origin, "host", began=stamp_here() if recorder.reads_lanes else None))
    try:
        yield
    finally:
        event.ended = stamp_here() if recorder.reads_lanes else None
        event.finish()


@contextmanager
def noting_wait(lane: Lane, origin: Origin) -> Iterator[None]:
    """A context in which `lane` is made to wait for a collective of `origin`; the program itself does not wait."""
    recorder = _active
    if recorder is None or not (recorder.reads_lanes and lane.is_stream):
        yield
        return
    event = Event("wait", origin, lane.name, began=lane.stamp())
    yield
    event.ended = lane.stamp()
    recorder.add(event).finish()
