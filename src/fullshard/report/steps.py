"""The recorder that is active in every run. It splits each step into its parts, and keeps only the events of one step.

[Note: parts of a step]
The engine reports when the program turns to another unit and phase. The time until the next turn belongs to that phase:
forward, backward or optimizer. The time after a backward or an optimizer step belongs to no phase. If a forward
follows, it is input unless the loop declares something else; if an optimizer step follows, it is other. The time in
which the program starts a collective or waits for one is removed from the parts and counted as exposed. The time in
which it saves a checkpoint counts as checkpoint. All parts add up to the wall time of the step.

If streams run asynchronously to the program, all times are those of the compute stream, and exposed time is the time
that this stream waits. Times are read once the stream has completed the work; nothing waits for that.

A step ends with the last optimizer step before a training forward. So its end is known only when that forward begins.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fullshard.device.accelerator import Accelerator
from fullshard.device.streams import Stamp, reuse_stamps
from fullshard.report.run import PARTS
from fullshard.report.usage import Usage
from fullshard.tape.recorder import Event, Origin, Phase, Recorder

WATCHED_STEP = 2
"""The step during which memory is observed: the first one with a known order of units. Steps up to it are not timed."""
PAUSE = "pause"  # time that does not belong to a step

_MOST_UNREAD = 8  # steps whose stream times are not available yet: older ones are dropped


@dataclass(slots=True)
class UnitCounts:
    """Totals of a unit's collectives over steps."""

    gathers: int = 0
    gathered_bytes: int = 0
    gather_s: float = 0.0
    gather_exposed_s: float = 0.0
    gathers_ahead: int = 0
    reductions: int = 0
    reduced_bytes: int = 0
    reduce_s: float = 0.0
    reduce_exposed_s: float = 0.0
    recomputed: int = 0  # forwards within backward

    def add(self, other: UnitCounts) -> None:
        """Add the counts of another step."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def is_kept_whole(number: int) -> bool:
    """Return True for steps that can be displayed by stream: those whose number is a power of two."""
    return number.bit_count() == 1


class Piece(NamedTuple):
    """Work on a stream, in seconds from the start of the step."""

    stream: str
    name: str
    unit: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class StepTaken:
    """The parts of a step, in seconds, and the bytes of this rank."""

    number: int
    step_s: float
    parts_s: dict[str, float]  # by part
    host_waits: dict[str, tuple[int, float]]  # by cause of host waits: their number and total time
    usage: Usage
    work: float
    best_bytes_per_s: float  # the best bandwidth of its all-gathers
    units: dict[str, UnitCounts]
    pieces: list[Piece]  # of all streams; empty unless the step is kept whole


class _Turn(NamedTuple):
    """A turn of the program to a unit and phase, with its time in the program and on the compute stream."""

    at: float
    stamp: Stamp | None
    phase: Phase
    unit: str
    reported: str  # by the loop: a part, or the name of an activity; empty if the turn comes from the engine only
    trains: bool


@dataclass
class _Unread:
    """A step whose stream times may not be available yet."""

    number: int
    turns: list[_Turn]  # the last one is its end
    events: list[Event]
    usage: Usage
    work: float
    reports_input: bool


class StepRecorder(Recorder):
    """A recorder that splits events and turns into steps.

    Args:
        accelerator: The device that computes.
        usage: Returns the current usage of this rank.
        done: Called with each step, in order.
        begins: Called with the number of a step when its first forward begins.
        observed: Called with each event as it begins.
        first: The number of the first step.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        usage: Callable[[], Usage],
        done: Callable[[StepTaken], None],
        begins: Callable[[int], None] = lambda number: None,
        observed: Callable[[Event], None] = lambda event: None,
        first: int = 1,
    ) -> None:
        super().__init__()
        self._accelerator = accelerator
        self.number = first  # of the current step
        self.work = 0.0  # number of elements passed to this step's forwards
        self._compute = accelerator.streams.compute
        self._usage, self._done, self._begins, self._observed = usage, done, begins, observed
        self._reported: list[str] = []
        self._turns = [self._turn(self.origin)]
        self.reports_input = False  # whether the loop marks input
        self._stepped = False
        self._end: int | None = None  # the index of the turn at which this step ends, unless more work follows
        self._used = self._used_at_end = usage()
        self._unread: deque[_Unread] = deque()
        self._has_begun = False
        self.follows_memory = False  # except while a `MemoryWatch` is active

    @property
    def reads_streams(self) -> bool:  # type: ignore[override]  # which changes here
        """True if streams run asynchronously to the program and are not being captured into a graph."""
        return self._accelerator.has_streams and not self._accelerator.is_capturing

    # -- from the engine and the loop ----------------------------------------------------------------------------------

    def add(self, event: Event) -> Event:
        """Keep `event` until its step is complete. Events within a pause are dropped."""
        if PAUSE not in self._reported:
            self.events.append(event)
            self._observed(event)
        return event

    def turn_to(self, origin: Origin) -> None:
        """See `Recorder.turn_to`."""
        self.origin = origin
        if PAUSE in self._reported or self._accelerator.is_capturing:
            return
        turn = self._turn(origin)
        if origin.phase is Phase.FORWARD:
            if turn.trains and (self._end is not None or not self._has_begun):
                if self._end is not None:
                    self._end_step()
                    self._read_all()
                self._has_begun = True
                self._begins(self.number)
        elif origin.phase is Phase.STEP:
            self._stepped, self._end = True, None
        elif origin.phase is Phase.IDLE and self._stepped:
            self._end, self._used_at_end = len(self._turns), self._usage()
        self._turns.append(turn)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Context manager within which the program does `what`: a part, the name of another activity, or PAUSE."""
        self.reports_input = self.reports_input or what == "input"
        before, is_paused = self.origin, PAUSE in self._reported
        self._reported.append(what)
        if not is_paused:
            self._turns.append(self._turn(before))
        try:
            yield
        finally:
            self._reported.pop()
            if not is_paused:
                self.origin = before
                self._turns.append(self._turn(before))

    def finish(self) -> None:
        """End the last step if its optimizer step was taken, and wait for the streams."""
        if self._end is not None:
            self._end_step()
        if self._unread and (last := self._unread[-1].turns[-1].stamp) is not None:
            last.synchronize()
        self._read_all()

    def _turn(self, origin: Origin) -> _Turn:
        reported = self._reported[-1] if self._reported else ""
        stamp = self._compute.stamp() if self._accelerator.has_streams else None
        return _Turn(time.perf_counter(), stamp, origin.phase, origin.unit, reported, torch.is_grad_enabled())

    # -- steps --------------------------------------------------------------------------------------------------------

    def _end_step(self) -> None:
        assert self._end is not None
        last = self._turns[self._end]
        before = [event for event in self.events if event.start < last.at]
        used, now = self._used, self._used_at_end
        turns, reports = self._turns[: self._end + 1], self.reports_input
        self._unread.append(_Unread(self.number, turns, before, now.since(used), self.work, reports))
        self.events = [event for event in self.events if event.start >= last.at]
        self._turns = self._turns[self._end :]
        self._end, self._stepped, self._used, self.work = None, False, now, 0.0
        self.number += 1

    def _read_all(self) -> None:
        while self._unread:
            unread = self._unread[0]
            last = unread.turns[-1].stamp
            if last is not None and not last.query():
                if len(self._unread) > _MOST_UNREAD:
                    self._unread.popleft()
                return
            self._unread.popleft()
            taken = _read(unread, self._accelerator.has_streams)
            if last is not None:
                reuse_stamps(_stamps(unread))
            self._done(taken)


def _stamps(step: _Unread) -> Iterator[Stamp | None]:
    """Yield the stamps of a step, except for the last stamp, which is the first of the next step."""
    for turn in step.turns[:-1]:
        yield turn.stamp
    for event in step.events:
        if event.end is not None:
            yield event.began
            yield event.ended


# -- from turns and events to parts -----------------------------------------------------------------------------------


class _TimeRegion(NamedTuple):
    """A time interval of the program, or of the compute stream, and its part."""

    start: float
    end: float
    part: str
    name: str
    unit: str


_LARGE = 1 << 16  # minimum bytes of an all-gather that is used to measure a link
_GATHERS = ("all_gather", "broadcast")
_SUMS = ("reduce_scatter", "all_reduce", "all_to_all")


def _read(step: _Unread, reads_streams: bool) -> StepTaken:
    """Split a step, all of whose stamps have been reached, into its parts."""
    zero, first = step.turns[0].at, step.turns[0].stamp

    def seconds(at: float, stamp: Stamp | None) -> float:
        return at - zero if first is None or stamp is None else first.elapsed_time(stamp) / 1e3

    turned = [turn.at - zero for turn in step.turns]
    units: dict[str, UnitCounts] = {}
    pieces, cuts = list[Piece](), list[_TimeRegion]()
    waits: dict[str, tuple[int, float]] = {}
    best, is_kept = 0.0, is_kept_whole(step.number)
    for event in step.events:
        part = _part_of(event)
        if part is None or event.end is None or (reads_streams and event.ended is None):
            continue
        start, end = seconds(event.start, event.began), seconds(event.end, event.ended)
        if event.launched is None:  # the program, or the compute stream, waited immediately
            exposed = [(start, end)]
        elif reads_streams:  # separate events record its exposed time
            exposed = []
        else:
            exposed = [(start, event.launched - zero), ((event.awaited or event.end) - zero, end)]
        name = "checkpoint" if part == "checkpoint" else "wait"
        cuts += [_TimeRegion(begin, stop, part, name, event.origin.unit) for begin, stop in exposed]
        exposed_s = sum(stop - begin for begin, stop in exposed)
        if event.name == "all_gather" and event.sent_bytes >= _LARGE:
            best = max(best, event.sent_bytes / max(end - start, 1e-9))
        if is_kept and name == "wait" and event.name != "wait":
            pieces.append(Piece(event.stream, event.name, event.origin.unit, start, end))
        if event.origin.phase is Phase.STEP:
            _add_wait(waits, event.origin.unit, exposed_s)
        elif event.launched is not None or event.name == "wait":
            counts = units.setdefault(event.origin.unit, UnitCounts())
            exposed_s = end - start if event.name == "wait" else exposed_s
            _count(counts, event, part == "gather", end - start, exposed_s, zero, turned)
    parts = dict.fromkeys(PARTS, 0.0)
    paused = 0.0
    at = [seconds(turn.at, turn.stamp) for turn in step.turns]
    for item in _with_cuts(_regions(step.turns, at, step.reports_input, units), sorted(cuts)):
        if item.part == PAUSE:
            paused += item.end - item.start
            continue
        parts[item.part] += item.end - item.start
        if item.name not in _NAMES:
            _add_wait(waits, item.name, item.end - item.start)
        if is_kept:
            pieces.append(Piece("compute", item.name, item.unit, item.start - paused, item.end - paused))
    computed_s = parts["forward"] + parts["backward"] + parts["optimizer"]
    return StepTaken(
        number=step.number,
        step_s=sum(parts.values()),
        parts_s=parts,
        host_waits=waits,
        usage=replace(step.usage, busy_s=computed_s) if reads_streams else step.usage,
        work=step.work,
        best_bytes_per_s=best,
        units=units,
        pieces=pieces,
    )


_NAMES = frozenset((*PARTS, "wait", "forward again"))


def _part_of(event: Event) -> str | None:
    """Return the part that the exposed time of an event belongs to; None if the program computes during the event."""
    if event.name == "wait":
        return "reduce" if event.origin.phase is Phase.POST_BACKWARD else "gather"
    if event.name == "checkpoint":
        return "checkpoint"
    return "gather" if event.name in _GATHERS else "reduce" if event.name in _SUMS else None


def _add_wait(waits: dict[str, tuple[int, float]], name: str, seconds: float) -> None:
    times, total = waits.get(name, (0, 0.0))
    waits[name] = times + 1, total + seconds


def _count(
    counts: UnitCounts,
    event: Event,
    is_gather: bool,
    seconds: float,
    exposed_s: float,
    zero: float,
    turned: Sequence[float],
) -> None:
    """Add a collective of a unit, or a wait for one, to the counts."""
    if is_gather:
        counts.gather_exposed_s += exposed_s
    else:
        counts.reduce_exposed_s += exposed_s
    if event.name == "wait":
        return
    if is_gather:
        counts.gathers += 1
        counts.gathered_bytes += event.sent_bytes
        counts.gather_s += seconds
        # If the all-gather was needed immediately, there is no turn between its launch and its wait.
        launched, awaited = (event.launched or 0.0) - zero, (event.awaited or 0.0) - zero
        counts.gathers_ahead += bisect(turned, awaited) > bisect(turned, launched)
    else:
        counts.reductions += 1
        counts.reduced_bytes += event.sent_bytes
        counts.reduce_s += seconds


def _regions(
    turns: Sequence[_Turn], at: Sequence[float], reports_input: bool, units: dict[str, UnitCounts]
) -> Iterator[_TimeRegion]:
    """Yield the time from each turn to the next with its part. Also count recomputed forwards in `units`."""
    in_backward = False
    for turn, following, start, end in zip(turns, turns[1:], at, at[1:], strict=False):
        in_backward = turn.phase not in (Phase.IDLE, Phase.STEP) and (in_backward or turn.phase is not Phase.FORWARD)
        if turn.reported:
            part, name = turn.reported if turn.reported in (*PARTS, PAUSE) else "other", turn.reported
        elif turn.phase is Phase.IDLE:
            before_forward = following.phase is Phase.FORWARD and following.trains and not reports_input
            part = name = "input" if before_forward else "other"
        elif turn.phase is Phase.STEP:
            part = name = "optimizer"
        elif turn.phase is not Phase.FORWARD:
            part = name = "backward"
        elif in_backward:
            part, name = "backward", "forward again"
            units.setdefault(turn.unit, UnitCounts()).recomputed += 1
        elif turn.trains:
            part = name = "forward"
        else:
            part, name = "other", "forward without gradients"
        yield _TimeRegion(start, end, part, name, turn.unit)


def _with_cuts(regions: Iterator[_TimeRegion], cuts: Sequence[_TimeRegion]) -> Iterator[_TimeRegion]:
    """Yield consecutive `regions`, replaced by `cuts` where those cover them.

    If cuts are nested, only the outer one is used.
    """
    coming = deque(_separate(cuts))
    for region in regions:
        at = region.start
        while region.part == PAUSE and coming and coming[0].end <= region.end:
            coming.popleft()
        while region.part != PAUSE and coming and coming[0].start < region.end:
            cut = coming[0]
            start, end = max(cut.start, at), min(cut.end, region.end)
            if start > at:
                yield _TimeRegion(at, start, *region[2:])
            if end > start:
                yield _TimeRegion(start, end, *cut[2:])
            at = max(at, end)
            if cut.end > region.end:
                break
            coming.popleft()
        if at < region.end:
            yield region if at == region.start else _TimeRegion(at, *region[1:])


def _separate(cuts: Sequence[_TimeRegion]) -> Iterator[_TimeRegion]:
    end = float("-inf")
    for cut in cuts:
        if cut.end > end:
            yield cut if cut.start >= end else _TimeRegion(end, *cut[1:])
            end = cut.end
