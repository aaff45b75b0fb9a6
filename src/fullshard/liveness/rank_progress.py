"""The current activity of this rank, which the engine records and the watchdog reports.

[Note: waits of all threads]
Any thread of this process may wait for other ranks, so a wait belongs to the thread that recorded it. Background
threads, such as the one that writes checkpoints, call `work_behind`. Their waits count as the program's while the
program waits for such a thread (`waiting_here`). Otherwise they only indicate that this process cannot continue after
the loss of a rank. Collectives that users call through torch are found by inspecting the stacks of the threads.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident, main_thread
from time import monotonic
from types import FrameType
from typing import Protocol

import torch

from fullshard._compat import visits_frames
from fullshard.errors import FullshardError
from fullshard.tape.recorder import Origin, Phase


class End(Protocol):
    """The end of asynchronous work on a device, such as a torch event."""

    def query(self) -> bool:
        """Return True once it has been reached. Never waits."""


class GroupProgress:
    """The number of collectives of one process group that this rank has started. All of its ranks count them from 1.

    Args:
        name: A unique name of the group, identical on all of its ranks.
        ranks: The ranks of the group, numbered as in the default group.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name = name
        self.ranks = ranks
        self.started = 0
        self.unsent: dict[int, bool] = {}
        """Started collectives of which this rank still has to send a second message, by number: True if it sends that
        message while it waits for any collective of the group, False if only while it waits for this one."""
        self.broken: FullshardError | None = None  # why the group cannot be used anymore

    def end_wait(self) -> None:
        """Make the thread that waits for a collective of this group raise `broken`. Called by the watchdog."""


@dataclass(slots=True)
class Task:
    """A collective that this rank waits for, and the time since when, in seconds of `time.monotonic`.

    For a collective on a GPU, the wait starts when those queued before it have ended.
    """

    name: str
    origin: Origin | None  # None if it belongs to no unit
    since: float
    in_first_step: bool  # in or before the first step, where ranks may compile
    ended: End | None = None  # the end of a collective on a GPU, while the host continues
    is_torchs: bool = False  # called through torch, not by this package; its process group has a separate timeout
    thread: int | None = None  # the thread that is in a call of torch
    group: GroupProgress | None = None  # the group of a collective of this package that the host waits for
    number: int = 0  # number of the collective in that group

    @property
    def waited_s(self) -> float:
        """Seconds of the wait so far."""
        return monotonic() - self.since

    def __str__(self) -> str:
        if self.origin is None:
            return self.name
        microbatch = f", microbatch {self.origin.microbatch}" if self.origin.microbatch else ""
        return f"{self.name} of {self.origin.unit or 'the root'} in {self.origin.phase.value}{microbatch}"


@dataclass(frozen=True)
class Wait:
    """The collective that a rank waits for, and the collectives that it has started.

    A waiting rank starts no other collective. So it waits forever if it waits for a rank that also waits forever and
    has not sent all data of that collective (`has_sent`).
    """

    group: str
    ranks: list[int]  # of that group
    number: int  # of the collective
    since: float  # identifies the wait: no two waits of a rank begin at the same time
    started: dict[str, int]  # number of started collectives, by group
    unsent: dict[str, list[int]]  # started collectives of which messages are not sent during this wait

    def has_sent(self, other: Wait) -> bool:
        """Return True if this rank has sent, or sends during this wait, all that `other` waits for."""
        return self.started.get(other.group, 0) >= other.number and other.number not in self.unsent.get(other.group, ())


@dataclass(frozen=True)
class Unwatched:
    """A queued collective whose end cannot be detected, and the reason."""

    task: Task
    error: Exception


@dataclass(frozen=True)
class _TorchCall:
    """A call of torch that a thread is in, according to its stack."""

    name: str
    frame: int  # together with `after` it identifies a call
    after: float  # when the last collective of this package had ended


@dataclass
class RankProgress:
    """The activity of this rank. Waiting threads write it, and the watchdog's thread reads it."""

    step: int = 0  # number of steps that the last root has begun
    unwatched: Unwatched | None = None  # the last queued collective whose end could not be detected
    _waiting: dict[int, Task] = field(default_factory=dict)  # by thread
    _behind: set[int] = field(default_factory=set)  # background threads
    _joining: dict[int, float] = field(default_factory=dict)  # since when a thread waits for background threads
    _trains: set[int] = field(default_factory=set)  # threads that have waited for ranks, except for the main thread
    _observed_calls: dict[int, tuple[_TorchCall, Task]] = field(default_factory=dict)
    _queued: deque[Task] = field(default_factory=deque)
    _drops: threading.Lock = field(default_factory=threading.Lock)  # held while ended collectives are dropped
    _last: Task | None = None
    _left: float = field(default_factory=monotonic)
    _observed: set[tuple[str, str, Phase]] = field(default_factory=set)  # collectives before the first step
    _groups: dict[str, weakref.ref[GroupProgress]] = field(default_factory=dict)  # by name

    def register(self, group: GroupProgress) -> None:
        """Record that this process is a rank of `group`, which replaces a destroyed group of the same name."""
        for name in [name for name, known in self._groups.items() if known() is None]:
            del self._groups[name]
        self._groups[group.name] = weakref.ref(group)

    @property
    def groups(self) -> dict[str, GroupProgress]:
        """The process groups that this process is a rank of, by name."""
        known = {name: group() for name, group in self._groups.copy().items()}
        return {name: group for name, group in known.items() if group is not None}

    def enter(
        self, name: str, origin: Origin | None = None, group: GroupProgress | None = None, number: int = 0
    ) -> None:
        """Record that this thread starts to wait for a collective: number `number` of `group`, if given."""
        thread = get_ident()
        self._waiting[thread] = self._new_task(name, origin, None, group, number)
        if thread not in self._trains and thread not in self._behind:
            self._trains.add(thread)

    def leave(self) -> None:
        """Record that this thread has stopped waiting."""
        thread = get_ident()
        task = self._waiting.pop(thread, None)
        if thread not in self._behind:
            self._last, self._left = task, monotonic()

    @contextmanager
    def waiting(
        self, name: str, origin: Origin | None = None, group: GroupProgress | None = None, number: int = 0
    ) -> Iterator[None]:
        """Context manager that records a wait of this thread for other ranks."""
        self.enter(name, origin, group, number)
        try:
            yield
        finally:
            self.leave()

    @contextmanager
    def waiting_here(self) -> Iterator[None]:
        """Context manager that records that this thread waits for background threads, and so for what they wait for."""
        thread = get_ident()
        self._joining[thread] = monotonic()
        try:
            yield
        finally:
            del self._joining[thread]

    def work_behind(self) -> None:
        """Record that this thread is a background thread."""
        self._behind.add(get_ident())

    def queue(self, name: str, origin: Origin, ended: End | None) -> None:
        """Record that a device has a queued collective, which ends with `ended`. If that is None, record nothing."""
        if ended is not None:
            self._drop_ended()  # a watchdog also does this, but not every job has one
            self._queued.append(self._new_task(name, origin, ended))

    def forget_group(self) -> None:
        """Forget the state of a destroyed default process group, except for current waits of threads."""
        self.step, self.unwatched, self._last = 0, None, None
        self._left = monotonic()
        self._observed.clear()
        self._queued.clear()
        self._trains.clear()

    def waits(self) -> list[Task]:
        """Return the current waits of all threads of this process, oldest first, without calls of torch."""
        return sorted(self._waiting.copy().values(), key=lambda task: task.since)

    @property
    def waited_s(self) -> float:
        """Seconds of the wait for the current collective; 0 if there is none."""
        task = self.task
        return 0.0 if task is None else task.waited_s

    @property
    def waited_behind_s(self) -> float:
        """Seconds of the longest current wait of any thread, including calls of torch on background threads."""
        calls = [task for task in map(self._torch_call_of, self._behind.copy()) if task is not None]
        return max((task.waited_s for task in [*self.waits(), *calls]), default=0.0)

    def now(self) -> tuple[str, float]:
        """Return a description of this rank's current activity, and its duration in seconds."""
        step = f", step {self.step}" if self.step else ""
        task = self.task
        if task is not None:
            place = f", {_line_of(task.thread)}" if task.is_torchs else ""
            return f"in {task}{step}{place}", task.waited_s
        line = _line_of(main_thread().ident)
        joining = self._joining.copy()
        if joining:
            return f"waiting for one of its threads{step}, {line}", monotonic() - min(joining.values())
        last = f"the last was {self._last}{step}" if self._last is not None else "there has been none"
        return f"in no collective ({last}), {line}", monotonic() - self._left

    @property
    def is_waiting(self) -> bool:
        """True if the host waits in a collective of this package or torch. Whether a GPU waits is not known."""
        task = self.task
        return task is not None and (task.ended is None or self._torch_call() is not None)

    @property
    def wait(self) -> Wait | None:
        """The wait of this process for a numbered collective, during which it does not start another collective.

        None if it does not wait for such a collective, or if more than one of its threads trains.
        """
        trains = self._trains.copy()
        task = self._waiting.get(trains.pop()) if len(trains) == 1 else None
        if task is None or task.group is None:
            return None
        groups, local = self.groups, task.group
        unsent = {
            name: [
                number
                for number, sends_always in group.unsent.copy().items()
                if group is not local or not (sends_always or number == task.number)
            ]
            for name, group in groups.items()
        }
        started = {name: group.started for name, group in groups.items()}
        return Wait(local.name, list(local.ranks), task.number, task.since, started, unsent)

    def __str__(self) -> str:
        place, seconds = self.now()
        return f"{place}, for {seconds:.0f} s"

    @property
    def task(self) -> Task | None:
        """The current collective, if there is one."""
        self._drop_ended()
        waiting = self._waiting.copy()
        is_joining = bool(self._joining)
        tasks = [task for thread, task in waiting.items() if is_joining or thread not in self._behind]
        if tasks:
            return min(tasks, key=lambda task: task.since)
        try:
            return self._queued[0]
        except IndexError:
            return self._torch_call()

    def _torch_call(self) -> Task | None:
        """Return the collective that the program has called through torch. Its wait starts when it is detected here."""
        return next(filter(None, map(self._torch_call_of, self._threads())), None)

    def _torch_call_of(self, thread: int) -> Task | None:
        call = _torch_call_of(thread, self._left)
        if call is None:
            self._observed_calls.pop(thread, None)
            return None
        visited = self._observed_calls.get(thread)
        if visited is None or visited[0] != call:
            in_first_step = self.step < 2 and self._is_first(call.name, None)
            task = Task(call.name, None, monotonic(), in_first_step, is_torchs=True, thread=thread)
            visited = self._observed_calls[thread] = call, task
        return visited[1]

    def _threads(self) -> list[int]:
        """Return the threads whose torch calls count: the main thread, and threads that have waited for ranks before.

        Background threads are included while one of these threads waits for them.
        """
        main = main_thread().ident or 0
        behind = self._behind.copy() if self._joining else ()
        return [main, *(thread for thread in self._trains.copy() if thread != main), *behind]

    def _drop_ended(self) -> None:
        """Drop ended collectives at the head of the queue, unless another thread is doing so. Never waits."""
        if not self._drops.acquire(blocking=False):
            return
        try:
            while self._queued and self._has_ended(self._queued[0]):
                now = monotonic()
                if len(self._queued) > 1:  # the next one begins now, which must be set before it is at the head
                    self._queued[1].since = now
                self._last, self._left = self._queued.popleft(), now
        finally:
            self._drops.release()

    def _has_ended(self, task: Task) -> bool:
        """Return True if `task` has ended, or its end cannot be detected."""
        assert task.ended is not None
        try:
            return task.ended.query()
        except Exception as error:  # any error of CUDA: the main thread gets it in its next call
            self.unwatched = Unwatched(task, error)
            return True

    def _new_task(
        self,
        name: str,
        origin: Origin | None,
        ended: End | None = None,
        group: GroupProgress | None = None,
        number: int = 0,
    ) -> Task:
        in_first_step = self.step < 2 and self._is_first(name, origin)
        return Task(name, origin, monotonic(), in_first_step, ended, group=group, number=number)

    def _is_first(self, name: str, origin: Origin | None) -> bool:
        """Return True if a collective belongs to the first step or, without training, is the first of its kind."""
        if self.step:
            return True
        collective = (name, origin.unit, origin.phase) if origin is not None else (name, "", Phase.IDLE)
        is_new = collective not in self._observed
        self._observed.add(collective)
        return is_new


_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = (str(Path(__file__).parent.parent), _TORCH)
# A thread that waits for a collective of torch has one of these files on its stack.
_COLLECTIVES = tuple(
    str(Path(_TORCH, "distributed", name)) for name in ("distributed_c10d.py", "_functional_collectives.py")
)
_LEAVING = ("destroy_process_group", "abort")  # these do not wait for other ranks


@visits_frames
def _torch_call_of(thread: int, after: float) -> _TorchCall | None:
    """Return the collective of torch that `thread` is in, with the name of the call; None if it is in none.

    Collectives are also called by other functions of torch, such as `DTensor.full_tensor`: the outermost one counts.
    """
    frame, found = sys._current_frames().get(thread), None
    while frame is not None and (found is not None or _is_of(frame, _LIBRARIES)):
        is_torchs = _is_of(frame, (_TORCH,))
        if frame.f_code.co_filename in _COLLECTIVES or (found is not None and is_torchs and _is_public(frame)):
            name = frame.f_code.co_qualname
            where = "torch.distributed." if frame.f_code.co_filename == _COLLECTIVES[0] else ""
            found = None if name.startswith(_LEAVING) else _TorchCall(f"{where}{name}", id(frame), after)
        elif not is_torchs:
            break
        frame = frame.f_back
    return found


def _is_of(frame: FrameType, folders: tuple[str, ...]) -> bool:
    return frame.f_code.co_filename.startswith((*folders, "<"))


def _is_public(frame: FrameType) -> bool:
    """Return True for a function of `torch.distributed` that users call: not private, and not a wrapper."""
    code = frame.f_code
    is_own = code.co_filename.startswith(str(Path(_TORCH, "distributed")))
    return (
        is_own
        and not any(part.startswith(("_", "<")) for part in code.co_qualname.split("."))
        and (code.co_name != "wrapper")
    )


@visits_frames
def _line_of(thread: int | None) -> str:
    """Return the line that `thread` is at, in the user's own code if there is any on the stack."""
    innermost = frame = sys._current_frames().get(thread or 0)
    while frame is not None and _is_of(frame, _LIBRARIES):
        frame = frame.f_back
    frame = frame or innermost
    return "ended" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


here = RankProgress()
