"""The present activity of this rank: kept by the engine, read by the watchdog when something goes wrong."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Protocol

import torch

from fullshard.tape.recorder import Origin, Phase

__all__ = ["End", "Task", "Whereabouts", "here"]


class End(Protocol):
    """The end of work that a device carries out while the host goes on: an event of torch's, or the like."""

    def query(self) -> bool:
        """True once it has been reached; does not wait."""


@dataclass(frozen=True, slots=True)
class Task:
    """A collective that is waited for, since a time in seconds of `time.monotonic`.

    One that a GPU carries out is waited for since those that were queued before it have ended.
    """

    name: str
    origin: Origin
    since: float
    in_first_step: bool  # or before it: ranks may compile meanwhile, each for as long as it takes
    ended: End | None = None  # of one that a GPU carries out, while the host goes on

    @property
    def waited_s(self) -> float:
        """Seconds that it has been waited for."""
        return monotonic() - self.since

    def __str__(self) -> str:
        microbatch = f", microbatch {self.origin.microbatch}" if self.origin.microbatch else ""
        return f"{self.name} of {self.origin.unit or 'the root'} in {self.origin.phase.value}{microbatch}"


@dataclass(frozen=True)
class Unwatched:
    """A queued collective of which nobody can tell whether it has ended, and why."""

    task: Task
    error: Exception


@dataclass
class Whereabouts:
    """The activity of this rank's main thread. Written by that thread, read by another; both forget what has ended."""

    step: int = 0
    """Steps that the root which ran last has begun."""
    unwatched: Unwatched | None = None
    """The last queued collective that had to be given up, if there was one."""
    _waiting: Task | None = None
    _queued: deque[Task] = field(default_factory=deque)
    _drops: threading.Lock = field(default_factory=threading.Lock)  # held by the thread that drops what has ended
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

    def queue(self, name: str, origin: Origin, ended: End | None) -> None:
        """Note that a device has a collective to carry out, which ends with `ended`; None: nobody can tell."""
        if ended is not None:
            self._drop_ended()  # a watchdog does it too, but not every job has one
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
        self._drop_ended()
        try:
            head = self._queued[0]
        except IndexError:
            head = None
        return self._waiting or head

    def _drop_ended(self) -> None:
        """Forget what has ended at the head of the queue, unless another thread is about to: no thread waits here."""
        if not self._drops.acquire(blocking=False):
            return
        try:
            while self._queued and self._has_ended(self._queued[0]):
                now = monotonic()
                if len(self._queued) > 1:  # what comes next begins now, and is never seen at the head as if before
                    self._queued[1] = replace(self._queued[1], since=now)
                self._last, self._left = self._queued.popleft(), now
        finally:
            self._drops.release()

    def _has_ended(self, task: Task) -> bool:
        """True if `task` need not be waited for any more, be it that nobody can tell."""
        assert task.ended is not None
        try:
            return task.ended.query()
        except Exception as error:  # of CUDA's, whichever: the main thread meets it in its own next call
            self.unwatched = Unwatched(task, error)
            return True

    def _new_task(self, name: str, origin: Origin, ended: End | None = None) -> Task:
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
