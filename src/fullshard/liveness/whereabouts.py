"""The present activity of this rank: kept by the engine, read by the watchdog when something goes wrong."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import FrameType

import torch

from fullshard.tape.recorder import Origin, Phase

__all__ = ["Task", "Whereabouts", "here"]


@dataclass(frozen=True, slots=True)
class Task:
    """A collective that is waited for, since a time in seconds of `time.monotonic`."""

    name: str
    origin: Origin
    since: float
    in_first_step: bool  # or before it: ranks may compile meanwhile, each for as long as it takes
    ended: torch.cuda.Event | None = None  # of one that a GPU carries out, while the host goes on

    @property
    def waited_s(self) -> float:
        """Seconds that it has been waited for."""
        return monotonic() - self.since

    def __str__(self) -> str:
        microbatch = f", microbatch {self.origin.microbatch}" if self.origin.microbatch else ""
        return f"{self.name} of {self.origin.unit or 'the root'} in {self.origin.phase.value}{microbatch}"


@dataclass
class Whereabouts:
    """The activity of this rank's main thread. Written by that thread, read by another one."""

    step: int = 0
    """Steps that the root which ran last has begun."""
    _waiting: Task | None = None
    _queued: deque[Task] = field(default_factory=deque)
    _last: Task | None = None
    _left: float = field(default_factory=monotonic)
    _seen: set[tuple[str, str, Phase]] = field(default_factory=set)  # collectives before the first step

    def enter(self, name: str, origin: Origin) -> None:
        """Note that the host waits for a collective from now on."""
        self._waiting = self._new_task(name, origin)

    def leave(self) -> None:
        """Note that it waits no longer."""
        self._last, self._waiting, self._left = self._waiting, None, monotonic()

    @contextmanager
    def waiting(self, name: str, origin: Origin) -> Iterator[None]:
        """A context in which the host waits for a collective."""
        self.enter(name, origin)
        try:
            yield
        finally:
            self.leave()

    def queue(self, name: str, origin: Origin) -> None:
        """Note that the current stream has a collective to carry out."""
        if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            return
        ended = torch.cuda.Event()
        ended.record()
        self._queued.append(self._new_task(name, origin, ended))

    @property
    def waited_s(self) -> float:
        """Seconds that the collective under way has been waited for; 0 if there is none."""
        task = self.task
        return 0.0 if task is None else task.waited_s

    def now(self) -> tuple[str, float]:
        """This rank's activity, in words, and the seconds that it has lasted."""
        step = f", step {self.step}" if self.step else ""
        task = self.task
        if task is not None:
            return f"in {task}{step}", task.waited_s
        call = _call_of_main_thread()
        if call:
            return f"in {call}{step}, {_line_of_main_thread()}", monotonic() - self._left
        last = f"the last was {self._last}{step}" if self._last is not None else "there has been none"
        return f"in no collective ({last}), {_line_of_main_thread()}", monotonic() - self._left

    @property
    def is_waiting(self) -> bool:
        """True if the host waits, in a collective of this package's or in one of torch's: of what a GPU has been given,
        nobody knows whether it computes or waits.
        """
        return self._waiting is not None or bool(_call_of_main_thread())

    def __str__(self) -> str:
        place, seconds = self.now()
        return f"{place}, for {seconds:.0f} s"

    @property
    def task(self) -> Task | None:
        """The collective that is under way, if there is one."""
        queued = self._queued
        while queued and queued[0].ended is not None and queued[0].ended.query():
            self._last, self._left = queued.popleft(), monotonic()
        return self._waiting or (queued[0] if queued else None)

    def _new_task(self, name: str, origin: Origin, ended: torch.cuda.Event | None = None) -> Task:
        return Task(name, origin, monotonic(), self.step < 2 and self._is_first(name, origin), ended)

    def _is_first(self, name: str, origin: Origin) -> bool:
        """True if a collective belongs to the first step; of a model that never trains, the first of each kind."""
        if self.step:
            return True
        collective = (name, origin.unit, origin.phase)
        is_new = collective not in self._seen
        self._seen.add(collective)
        return is_new


here = Whereabouts()

_LIBRARIES = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))


_COLLECTIVES = str(Path(torch.__file__).parent / "distributed" / "distributed_c10d.py")


def _frame_of_main_thread() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _call_of_main_thread() -> str:
    """The collective of torch's that the main thread is in, by the name it was called by; empty if it is in none."""
    frame, found = _frame_of_main_thread(), ""
    while frame is not None:
        if frame.f_code.co_filename == _COLLECTIVES:
            found = f"torch.distributed.{frame.f_code.co_name}"
        frame = frame.f_back
    return found


def _line_of_main_thread() -> str:
    """The line that the main thread is at, in the user's own code where there is any on the stack."""
    innermost = frame = _frame_of_main_thread()
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    frame = frame or innermost
    return "ended" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
