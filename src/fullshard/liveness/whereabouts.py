"""What this rank is doing at the moment: kept by the engine, read by the watchdog when something goes wrong."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import torch

from fullshard.tape.recorder import Origin

__all__ = ["Whereabouts", "here"]


@dataclass(frozen=True, slots=True)
class _Task:
    """A collective, and since when it is waited for (seconds of `time.monotonic`)."""

    name: str
    origin: Origin
    since: float
    ended: torch.cuda.Event | None = None  # of one that a GPU carries out, while the host goes on

    def __str__(self) -> str:
        microbatch = f", microbatch {self.origin.microbatch}" if self.origin.microbatch else ""
        return f"{self.name} of {self.origin.unit or 'the root'} in {self.origin.phase.value}{microbatch}"


@dataclass
class Whereabouts:
    """Where this rank's main thread is. Written by that thread, read by another one."""

    step: int = 0
    """Steps that the root which ran last has begun."""
    _waiting: _Task | None = None
    _queued: deque[_Task] = field(default_factory=deque)
    _last: _Task | None = None
    _left: float = field(default_factory=monotonic)

    def enter(self, name: str, origin: Origin) -> None:
        """Note that the host waits for a collective from now on."""
        self._waiting = _Task(name, origin, monotonic())

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
        self._queued.append(_Task(name, origin, monotonic(), ended))

    @property
    def waited_s(self) -> float:
        """How long the collective that is under way has been waited for; 0 if there is none."""
        task = self._present()
        return 0.0 if task is None else monotonic() - task.since

    def now(self) -> tuple[str, float]:
        """Where this rank is, in words, and for how many seconds it has been there."""
        step = f", step {self.step}" if self.step else ""
        task = self._present()
        if task is not None:
            return f"in {task}{step}", monotonic() - task.since
        last = f"the last was {self._last}{step}" if self._last is not None else "there has been none"
        return f"in no collective ({last}), {_line_of_main_thread()}", monotonic() - self._left

    def __str__(self) -> str:
        place, seconds = self.now()
        return f"{place}, for {seconds:.0f} s"

    def _present(self) -> _Task | None:
        queued = self._queued
        while queued and queued[0].ended is not None and queued[0].ended.query():
            self._last, self._left = queued.popleft(), monotonic()
        return self._waiting or (queued[0] if queued else None)


here = Whereabouts()

_LIBRARIES = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))


def _line_of_main_thread() -> str:
    """The line that the main thread is at, in the user's own code where there is any on the stack."""
    innermost = frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    frame = frame or innermost
    return "ended" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
