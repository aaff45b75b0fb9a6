"""The recorder of the engine's actions, in order, for tests, memory predictions and timelines.

Nothing is recorded unless a recorder is active:

    with recording() as record:
        model(batch).sum().backward()
    record.names()          # ["all_gather", "all_gather", ..., "reduce_scatter"]
    record.sent_bytes()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import NamedTuple, TypeVar

from fullshard.device.current import stamp_here
from fullshard.device.streams import Stamp, Stream


class Phase(Enum):
    """The phases of a step, as recorded for uses of a unit."""

    __hash__ = object.__hash__  # faster than that of `Enum`, which is a Python function

    IDLE = "idle"
    FORWARD = "forward"
    PRE_BACKWARD = "pre-backward"
    BACKWARD = "backward"
    POST_BACKWARD = "post-backward"
    STEP = "step"  # of the optimizer


class Origin(NamedTuple):
    """The cause of an operation: a unit (by FQN, empty for the root), its phase, and the microbatch.

    Microbatches of a step are numbered from 1; 0 is before the first. `note` describes an exceptional cause.
    """

    unit: str
    phase: Phase
    microbatch: int = 0
    note: str = ""


def _now() -> float:
    """Return the current time. It is looked up at each call, so that tests can patch it."""
    return time.perf_counter()


@dataclass(slots=True)
class Event:
    """One action of the engine.

    `name` is a collective of tensors (one of `COLLECTIVES`) or of objects, "allocate" or "free" for the unsharded
    storage of a unit, "orthogonalize" for a matrix, "checkpoint" while the program saves one, or "wait" while a stream
    waits for a collective of `origin`. `sent_bytes` counts the bytes that this rank sends in `messages` to the other
    `ranks`, including data that peers read from shared memory. `nbytes` is the size of the storage or matrix.

    Times are in seconds of `time.perf_counter`. `end` is None while the action is in progress. For an asynchronous
    collective, the program continued at `launched` and began to wait at `awaited`. Both are None if it waited
    immediately. If the recorder reads stream times, `began` and `ended` are the times on the stream where these differ
    from the program's.
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


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


class Recorder:
    """A list of events with the queries that tests and reports need.

    Within the context of another recorder, it forwards all events to that recorder as well.
    """

    reads_streams = False
    """True if events record times on streams, which can differ from the program's."""
    follows_memory = True
    """True if the recorder needs the events "allocate" and "free", and the origin and purpose of allocations."""

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
        """Attribute all later work to `origin`. The program has proceeded to another unit or phase."""
        self.origin = origin
        if self.outer is not None:
            self.outer.turn_to(origin)

    def collectives(self, name: str | None = None) -> list[Event]:
        """Return the collectives in the order of their start. If `name` is given, return only those with this name."""
        return [event for event in self.events if event.name in ((name,) if name else COLLECTIVES)]

    def names(self) -> list[str]:
        """Return the names of the collectives in the order of their start."""
        return [event.name for event in self.collectives()]

    def sent_bytes(self, name: str | None = None) -> int:
        """Return the bytes that this rank sent to other ranks, in all collectives or in those called `name`."""
        return sum(event.sent_bytes for event in self.collectives(name))

    def gathered_peak_bytes(self) -> int:
        """Return the peak bytes of unsharded parameters, without those that stay unsharded between steps."""
        held = peak = 0
        for event in self.events:
            held += {"allocate": event.nbytes, "free": -event.nbytes}.get(event.name, 0)
            peak = max(peak, held)
        return peak


class _Active:
    recorder: Recorder | None = None
    """The recorder that the engine records to, or None. Frequent hooks read it here, to avoid a call."""


active = _Active()  # not a context variable: backward may run on a thread of autograd


def active_recorder() -> Recorder | None:
    """Return the recorder that the engine records to, or None."""
    return active.recorder


R = TypeVar("R", bound=Recorder)


@contextmanager
def recording_to(recorder: R) -> Iterator[R]:
    """Context manager that records everything the engine does in this process with `recorder`."""
    previous, active.recorder = active.recorder, recorder
    recorder.outer = previous
    if previous is not None:
        recorder.origin = previous.origin
    try:
        yield recorder
    finally:
        active.recorder, recorder.outer = previous, None


def recording() -> AbstractContextManager[Recorder]:
    """Context manager that records everything the engine does in this process."""
    return recording_to(Recorder())


def note_origin(origin: Origin) -> None:
    """Attribute all later work to `origin`."""
    if active.recorder is not None:
        active.recorder.turn_to(origin)


def allocating(purpose: str) -> AbstractContextManager[None]:
    """Context manager that records `purpose` for memory allocated in it."""
    recorder = active.recorder
    return nullcontext() if recorder is None else acting_for(recorder.origin, purpose)


class acting_for:  # noqa: N801  # used as a context manager, like a function; faster than a generator
    """Context manager that attributes work to `origin`, and allocated memory to `purpose`."""

    __slots__ = ("_before", "_origin", "_purpose", "_recorder")

    def __init__(self, origin: Origin, purpose: str = "") -> None:
        self._origin, self._purpose = origin, purpose

    def __enter__(self) -> None:
        self._recorder = recorder = active.recorder
        if recorder is not None:
            self._before = recorder.origin, recorder.purpose
            recorder.origin, recorder.purpose = self._origin, self._purpose

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if self._recorder is not None:
            self._recorder.origin, self._recorder.purpose = self._before


@contextmanager
def noting(name: str) -> Iterator[None]:
    """Context manager that records the time within it as an event called `name`."""
    recorder = active.recorder
    if recorder is None:
        yield
        return
    event = recorder.add(Event(name, recorder.origin, "host", began=stamp_here() if recorder.reads_streams else None))
    try:
        yield
    finally:
        event.ended = stamp_here() if recorder.reads_streams else None
        event.finish()


def note_wait(stream: Stream, origin: Origin) -> Callable[[], None] | None:
    """Start to record a wait of `stream` for a collective of `origin`. The program does not wait.

    Returns:
        A function to call after `stream.wait()`; None if nothing is recorded.
    """
    recorder = active.recorder
    if recorder is None or not (recorder.reads_streams and stream.is_stream):
        return None
    event = Event("wait", origin, stream.name, began=stream.stamp())

    def end() -> None:
        event.ended = stream.stamp()
        recorder.add(event).finish()

    return end
