"""A thread that reports the progress of all ranks when a collective takes long, and ends a process that would hang.

Ranks wait forever if one of them is lost, or if they do not reach the same collective. The ring (`ring.py`) and, on
gloo, the connections of the process group detect the first case. A timer detects the second, on every backend. Ranks
then exchange messages through the store, because the process group is stuck.

A rank that waits too long posts a question for the progress of all ranks on the board. Every rank answers. The rank
that posted the question collects the answers and logs them. If the question ends the job, the ranks then exit. If it is
an early question, the answers are logged only if all ranks wait for different collectives.

[Note: waits in a circle]
Ranks that make different calls may wait for each other in different process groups. No rank then receives a fingerprint
that shows the difference. So each rank also publishes the collective that it waits for, and the number of collectives
that it has started in each group. A number identifies one collective on all ranks; otherwise fingerprints differ and
all ranks raise. Assume that each rank waits for a rank that has not started that collective, and that no rank has
progressed between two reports. Then no rank will ever continue, however slow the network is: all raise
RankMismatchError. First they mark their process groups as broken, and wait until all have done so. Otherwise a rank
that raises and exits would seem to be lost.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from fullshard._compat import default_store, group_timeout_s, store_address
from fullshard.errors import ConfigError, RankLostError, RankMismatchError, named_ranks, same_calls
from fullshard.liveness.rank_progress import Task, Wait, here
from fullshard.liveness.ring import Ring
from fullshard.liveness.store import PatientStore
from fullshard.policy.arguments import is_number
from fullshard.policy.switches import switches

EXIT_CODE = os.EX_TEMPFAIL  # 75: a temporary failure, after which the job can be restarted
"""The exit code of a process that the watchdog ends."""

SILENCE_S = 30
"""Seconds without an answer of a host before it is considered lost. Tests set less, before the first forward."""

_LOOK_S = 1.0  # interval between two reads of the store; longer with many ranks
_LOOKS_A_SECOND = 500
_GRACE_S = 3.0  # time for a rank to raise an exception after a loss, before its process is ended
_LONG_GRACE_S = 10.0  # the same if only a background thread waits, or a collective of other code
_ANSWER_S = 4.0  # time for the other ranks to report their progress
_STORE_S = 5.0  # timeout of the store
_EARLY_S = 10.0  # wait before an early question
_LINES = 16  # maximum number of ranks that an error names
_SETTLED_S = 2.0  # shorter waits are ignored, because the rank may be about to start the collective of the others
_LEAD_S = 10.0  # time for the report before the timeout of the process group, whose error names one rank only

_NO_WORD = "its process ended without a message (killed, out of memory, or crashed)"
_NO_ANSWER = "its host does not answer (powered off, or the network is down)"

_log = logging.getLogger(__name__)

T = TypeVar("T")


def set_collective_timeout(seconds: float | None, *, report_after: float | None = 120.0) -> None:
    """End the job when a collective takes longer than `seconds`; never if None.

    Each rank then writes its progress to the standard error stream (step, microbatch, unit, phase, collective,
    duration), and the first rank to detect the timeout also writes the progress of all ranks. The processes end with
    exit code 75. By default this happens a few seconds before the timeout of the default process group
    (`init_process_group(timeout=...)`: 30 minutes on gloo, 10 on NCCL). A longer time has no effect, because the group
    then aborts its collectives.

    The progress of all ranks is also reported earlier, once for each stuck collective, as a warning of the logger
    `fullshard.liveness.watchdog`. The job continues after this: one rank may delay the others to evaluate or to save.

    Collectives before and during a root's first step are not reported, because ranks may take different times to
    compile. They end the job after the process group's timeout or `seconds`, whichever is longer. For a model that is
    never trained, these are the collectives of its first forward.

    This function may be called at any time. The rank with the shortest time decides.

    Args:
        seconds: The time in seconds until the job ends.
        report_after: The time in seconds until the report. None disables the report.

    Raises:
        ConfigError: A time is not a positive number.
    """
    for name, value in (("seconds=", seconds), ("report_after=", report_after)):
        if value is not None and not (is_number(value) and value > 0):
            requested = f"set_collective_timeout({name}{value!r})"
            raise ConfigError(f"{requested}: expected a positive number of seconds, or None.")
    switches.end_after_s = math.inf if seconds is None else seconds
    switches.report_after_s = math.inf if report_after is None else report_after


def watch() -> None:
    """Start to watch the default process group, if it has several ranks. Repeated calls are cheap."""
    global _watchdog
    group = dist.group.WORLD
    if _watchdog is not None and _watchdog.group is group:
        return
    if _watchdog is not None:
        _watchdog.stop()
        _watchdog = None
        here.forget_group()
    if group is not None and dist.get_world_size() > 1 and dist.get_backend() != "fake":
        _watchdog = _Watchdog(group)
        _watchdog.start()


class PeerGoneError(Exception):
    """The connection to `peer`, numbered as in its group, is broken. Internal: users get the error of `lost`."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.peer = peer


def lost(rank: int, where: str) -> RankLostError:
    """Return the error of a rank whose connection to `rank` broke during `where`, and publish it on the board."""
    account = None if _watchdog is None else _watchdog.account_for(rank)
    return RankLostError(_loss(account or _Loss(rank, "its process is gone"), where))


@dataclass(frozen=True)
class _Loss:
    """A lost rank, and how it ended."""

    rank: int
    how: str


def _loss(loss: _Loss, where: str) -> str:
    return (
        f"rank {loss.rank} was lost: {loss.how}. Rank {dist.get_rank()} was {where}. The remaining ranks cannot "
        "continue with this process group: end them and restart from the last checkpoint."
    )


class _Watchdog:
    """The watchdog of one process group. The main thread only calls `account_for` and `stop`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._rank = dist.get_rank()
        self._world = dist.get_world_size()
        self._look_s = max(_LOOK_S, self._world / _LOOKS_A_SECOND)
        stores = default_store(), default_store()  # for the main thread, and for the watchdog's thread
        self._way = store_address(stores[0])
        self._store, self._own_store = (
            PatientStore(dist.PrefixStore("fullshard/watchdog", store), _STORE_S) for store in stores
        )
        self._board, self._own_board = _Board(self._store), _Board(self._own_store)
        self._stopped = threading.Event()
        self._ring: Ring | None = None
        self._joined = False
        self._missed_since = math.inf
        self._answered: _Question | None = None
        self._reported: Task | None = None
        self._requested_early: tuple[Task, float] | None = None  # and when to ask again, in seconds of waiting
        self._ended: tuple[Task, float, str] | None = None  # a wait that was ended, when, and why
        self._stated: set[str] = set()  # causes of the watchdog's own failures
        self._thread = threading.Thread(target=self._run, name="fullshard watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, *, failure: str = "") -> None:
        """Stop the thread. If this rank ends with a `failure`, publish it for the other ranks."""
        self._board.publish_end(self._rank, failure or "its process ended while other ranks waited for it")
        self._stopped.set()
        if self._ring is not None:
            self._ring.leave(farewell=not failure)
        self._thread.join(timeout=self._look_s)
        for store in (self._store, self._own_store):
            store.close()

    def forget(self) -> None:
        """Close the inherited connections in a forked process. Otherwise the end of its parent would not be noticed."""
        if self._ring is not None:
            self._ring.forget()

    def account_for(self, rank: int) -> _Loss:
        """Return the rank that was lost first and how it ended, now that the connection to `rank` is broken."""
        loss = self._board.first_loss(_Loss(rank, self._board.end_of(rank, _NO_WORD)))
        self._board.publish_end(self._rank, f"it lost its connection to rank {loss.rank}")
        return loss

    def _run(self) -> None:
        """Run checks until the group no longer exists. Failures are logged, and the next check tries again."""
        while not self._stopped.is_set() and self._is_needed:
            try:
                self._look()
            except Exception as error:
                self._warn_once(
                    repr(error),
                    f"the watchdog failed and retries: {error!r}. Until it succeeds, this rank detects neither long "
                    "waits nor lost ranks and does not answer other ranks",
                )
                self._stopped.wait(self._look_s)
            self._report_what_is_not_watched()
        if self._ring is not None and not self._stopped.is_set():  # the group is destroyed
            self._ring.leave(farewell=True)

    @property
    def _is_needed(self) -> bool:
        """True while the group is the default one, and afterwards while a thread still waits after a loss."""
        return dist.group.WORLD is self.group or (self._missed_since < math.inf and here.waited_behind_s > 0)

    def _look(self) -> None:
        """Check the previous rank, the board and the timeouts."""
        self._joined = self._joined or self._join()
        if (noticed := self._lost_previous()) is not None:
            self._own_board.first_loss(noticed)
        task = here.task
        question = self._ask(task) or self._own_board.last_question()
        if question is not None and question != self._answered:
            self._answered = question
            self._answer(question, task)
            if task is not None and task.waited_s > _SETTLED_S:
                self._requested_early = task, 2 * max(task.waited_s, _EARLY_S)
            if question.purpose in ("report", "end"):
                self._reported = task
        loss = self._own_board.known_loss()
        self._missed_since = min(self._missed_since, monotonic()) if loss else math.inf
        if loss and self._is_stuck(here.task):
            self._end(_loss(loss, str(here)))
        if self._ended is not None:
            ended, since, why = self._ended
            if here.task is ended and monotonic() - since > _GRACE_S:
                self._end(why)

    def _is_stuck(self, task: Task | None) -> bool:
        """Return True if this process hangs: it has waited too long after a loss, for `task` or in any thread."""
        missed_s = monotonic() - self._missed_since
        if task is not None and min(missed_s, task.waited_s) > (_LONG_GRACE_S if task.is_torchs else _GRACE_S):
            return True
        return min(missed_s, here.waited_behind_s) > _LONG_GRACE_S

    def _report_what_is_not_watched(self) -> None:
        """Log if this rank cannot query its GPU, or ranks cannot exchange questions."""
        if (blind := here.unwatched) is not None:
            self._warn_once(
                repr(blind.error),
                f"the GPU does not report whether {blind.task} has ended: {blind.error!r}. Collectives with this "
                "error are not watched. Lost ranks are still detected",
            )
        if self._own_board.silent_s > SILENCE_S:
            self._warn_once(
                "store",
                f"the store of the process group has not answered for {SILENCE_S} s: {self._own_board.error!r}. Until "
                "it answers, ranks cannot exchange their progress or report lost ranks. This rank still watches its "
                "own collectives and the previous rank",
            )

    def _warn_once(self, cause: str, failure: str) -> None:
        """Log a failure of the watchdog itself, once per cause."""
        if cause not in self._stated:
            self._stated.add(cause)
            _log.warning("rank %d: %s.", self._rank, failure)

    def _ask(self, task: Task | None) -> _Question | None:
        """Return the question to answer if `task` takes too long: this rank's, or that of a rank that asked before."""
        if task is None:
            return None
        if task.waited_s > self._end_s(task) and not task.is_torchs:  # torch's calls have the timeout of their group
            return self._own_board.ask(self._rank, "end")
        if task.waited_s > switches.report_after_s and not task.in_first_step and task is not self._reported:
            return self._own_board.ask(self._rank, "report")
        requested, again_s = self._requested_early or (None, 0.0)
        if here.is_waiting and task.waited_s > (again_s if task is requested else _EARLY_S):
            return self._own_board.ask(self._rank, "again" if task is requested else "early")
        return None

    def _end_s(self, task: Task | None) -> float:
        """Return the seconds of waiting for `task` after which the job ends; if None, for any other collective."""
        timeout_s = group_timeout_s(self.group)
        own_s = timeout_s - min(_LEAD_S, timeout_s / 2)
        if switches.end_after_s is None:
            return own_s
        return max(switches.end_after_s, own_s) if task is not None and task.in_first_step else switches.end_after_s

    def _answer(self, question: _Question, task: Task | None) -> None:
        """Publish this rank's progress. If this rank has asked, report that of all ranks. End if requested."""
        ends = question.purpose == "end"
        if question.purpose == "deadlock":
            self._end_waits(question)
            return
        self._publish_place(question)
        if question.rank == self._rank:
            end_s = self._end_s(task)
            verdict = _too_long(end_s) if ends else _separate(end_s) if question.purpose == "early" else _long(end_s)
            report = self._collect(question, verdict)
            if question.purpose in ("early", "again") and self._found_deadlock(question):
                return
            is_split = question.purpose == "early" and self._own_board.is_split(question, self._world)
            if question.purpose == "report" or is_split:
                _log.warning(report)
        else:
            report = f"another rank has waited too long for a collective. Rank {self._rank} is {here}"
        if ends:
            self._own_board.await_account(question)
            self._end(report)

    def _publish_place(self, question: _Question) -> None:
        self._own_board.answer(question, self._rank, *here.now(), is_waiting=here.is_waiting, wait=here.wait)

    def _found_deadlock(self, question: _Question) -> bool:
        """Return True, and make all ranks raise, if no rank will ever continue, see [Note: waits in a circle]."""
        before = self._own_board.waits(question, self._world)
        if not is_deadlock(before):
            return False
        again = self._own_board.ask(self._rank, "again")
        if again.rank != self._rank or again.purpose != "again":
            return False  # another rank has asked, and is answered next
        self._answered = again
        self._publish_place(again)
        self._await_answers(again)
        if self._own_board.waits(again, self._world) != before:
            return False
        places = [place for place, _, _ in self._own_board.places(again, self._world)]
        groups = sorted({wait.group for wait in before if wait is not None})
        verdict = self._own_board.ask(self._rank, "deadlock", error=_deadlock(before, places), groups=groups)
        if verdict.purpose != "deadlock":
            return False
        self._answered = verdict
        self._end_waits(verdict)
        return True

    def _end_waits(self, question: _Question) -> None:
        """Raise the error of `question` in the thread that waits, once all ranks know of it."""
        task = here.task
        groups = [group for name, group in here.groups.items() if name in question.groups]
        for group in groups:
            group.broken = RankMismatchError(question.error)
        self._publish_place(question)
        self._await_answers(question)
        if task is not None:
            self._ended = task, monotonic(), f"rank {self._rank} is {here}. {question.error}"
        for group in groups:
            group.end_wait()

    def _join(self) -> bool:
        """Join the ring as far as possible now. Return True if this is complete or has failed."""
        try:
            self._ring = self._ring or Ring(
                self._own_store, self._rank, self._world, silence_s=SILENCE_S, way=self._way
            )
            return self._ring.join()
        except (OSError, RuntimeError) as error:  # the store of torch raises RuntimeError
            _log.warning("rank %d: lost ranks may be detected late, because a connection failed: %s", self._rank, error)
            return True

    def _lost_previous(self) -> _Loss | None:
        """Wait a little, and return the previous rank if it has ended without a farewell."""
        if self._ring is None or not self._ring.watches:
            self._stopped.wait(self._look_s)
            return None
        if not self._ring.lost_previous(self._look_s) or self._stopped.is_set():
            return None
        otherwise = _NO_ANSWER if self._ring.previous_is_silent else _NO_WORD
        return _Loss(self._ring.previous, self._own_board.end_of(self._ring.previous, otherwise))

    def _collect(self, question: _Question, verdict: str) -> str:
        """Return the report of all ranks, with a header that ends with `verdict`. Ranks may exit after this call."""
        head = f"rank {self._rank} is {here}, {verdict}. Progress of all ranks:"
        self._await_answers(question)
        lines = [f"  {line}" for line in self._own_board.answers(question, self._world)]
        self._own_board.close_account(question)
        return "\n".join([head, *lines])

    def _await_answers(self, question: _Question) -> None:
        deadline = monotonic() + _ANSWER_S + self._look_s
        while monotonic() < deadline and not self._own_board.has_answers(question, self._world):
            sleep(self._look_s / 10)

    def _end(self, report: str) -> NoReturn:
        self._own_board.publish_end(self._rank, "its watchdog ended it")
        with suppress(OSError, ValueError):  # the reader may have closed stderr
            sys.stderr.write(f"[fullshard] {report}\n")
            sys.stderr.flush()
        os._exit(EXIT_CODE)


def _long(end_s: float) -> str:
    """Return the conclusion of a report on a collective that takes long."""
    return "and the job continues" + ("" if math.isinf(end_s) else f"; it will be ended after {end_s:g} s")


def _separate(end_s: float) -> str:
    """Return the conclusion of a report on ranks that all wait, for different collectives."""
    return (
        "and all ranks wait, but not for the same collective: every rank must make the same calls (including saving, "
        f"state dicts and barriers) after the same number of batches; {_long(end_s).removeprefix('and ')}"
    )


def _too_long(end_s: float) -> str:
    """Return the conclusion of a report on a collective that takes too long, which ends the job."""
    more = "give init_process_group a longer timeout"
    if switches.end_after_s is not None:
        more = "call fullshard.set_collective_timeout(seconds)"
    return (
        f"longer than the {end_s:g} s allowed for a collective, so all ranks end now. If a collective needs more "
        f"time, {more}"
    )


def is_deadlock(waits: Sequence[Wait | None]) -> bool:
    """Return True if each rank waits for data that another waiting rank has not sent."""
    return all(wait is not None and _missing(wait, waits) for wait in waits)


def _missing(wait: Wait, waits: Sequence[Wait | None]) -> list[int]:
    """Return the ranks that have not sent the data that `wait` waits for."""
    others = ((rank, waits[rank]) for rank in wait.ranks)
    return [rank for rank, other in others if other is not None and not other.has_sent(wait)]


def _deadlock(waits: Sequence[Wait | None], places: Sequence[str]) -> str:
    """Return the error of ranks that wait for one another."""
    lines = []
    for rank, (wait, place) in enumerate(zip(waits, places, strict=True)):
        assert wait is not None
        missing = _missing(wait, waits)
        lines.append(f"  rank {rank}: {place}, over {named_ranks(wait.ranks)}, and waits for {named_ranks(missing)}")
    if len(lines) > _LINES:
        lines[_LINES:] = [f"  and {len(lines) - _LINES} more ranks"]
    return "\n".join(
        [
            "ranks are deadlocked: they wait for one another in different process groups or for different collectives:",
            *lines,
            same_calls(),
        ]
    )


@dataclass(frozen=True)
class _Question:
    """A rank's question for the progress of all ranks."""

    number: int
    rank: int  # that asks, and collects the answers
    purpose: str  # "early", "again", "report", "deadlock": waits end, or "end": ranks end when they have answered
    error: str = ""  # of a deadlock
    groups: Sequence[str] = ()  # that ranks wait in, for a deadlock


class _Board:
    """The messages between ranks through the store. Without the store, writes are lost and reads return nothing."""

    def __init__(self, store: PatientStore) -> None:
        self._store = store
        self._loss: _Loss | None = None
        self._question = ""  # the last one that was read
        self.error: RuntimeError | None = None  # of the last call, if the store did not answer
        self._silent_since = 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since the first call that the store has not answered; 0 if it has answered the last one."""
        return 0.0 if self.error is None else monotonic() - self._silent_since

    def publish_end(self, rank: int, how: str) -> None:
        """Publish how `rank` ends, unless this was published before."""
        self._first(f"end/{rank}", how)

    def end_of(self, rank: int, otherwise: str) -> str:
        """Return the published end of `rank`, or `otherwise`."""
        return self._read(f"end/{rank}") or otherwise

    def first_loss(self, loss: _Loss) -> _Loss:
        """Publish `loss`, unless there has been one before, and return the first loss."""
        self._loss = self._loss or _Loss(**json.loads(self._first("loss", json.dumps(asdict(loss)))))
        return self._loss

    def known_loss(self) -> _Loss | None:
        """Return the loss that was noticed first, if there was any."""
        message = "" if self._loss else self._read("loss")
        return _Loss(**json.loads(message)) if message else self._loss

    def ask(self, rank: int, purpose: str, *, error: str = "", groups: Sequence[str] = ()) -> _Question:
        """Post a question of `rank` for the progress of all ranks, unless there is a new one. Return the question."""
        last = _question(self._question)
        local = json.dumps(asdict(_Question(last.number + 1 if last else 0, rank, purpose, error, groups)))
        self._question = self._replace("question", self._question, local)
        return _Question(**json.loads(self._question))

    def last_question(self) -> _Question | None:
        """Return the last question, if there was any."""
        self._question = self._read("question") or self._question
        return _question(self._question)

    def answer(
        self,
        question: _Question,
        rank: int,
        place: str,
        seconds: float,
        *,
        is_waiting: bool,
        wait: Wait | None = None,
    ) -> None:
        """Publish the progress of `rank`, its duration in seconds, and the collective that it waits for."""
        waits = None if wait is None else asdict(wait)
        self._first(f"where/{question.number}/{rank}", json.dumps([place, seconds, is_waiting, waits]))
        self._call(self._store.add, f"answers/{question.number}", 1, otherwise=0)

    def has_answers(self, question: _Question, world: int) -> bool:
        """Return True if all ranks have answered, or the store is unavailable."""
        return self._call(self._store.add, f"answers/{question.number}", 0, otherwise=world) >= world

    def answers(self, question: _Question, world: int) -> list[str]:
        """Return the answers as text, with one line for all ranks with the same progress."""
        ranks: dict[str, list[int]] = {}
        times: dict[str, list[float]] = {}
        for rank, (place, seconds, _) in enumerate(self.places(question, world)):
            ranks.setdefault(place, []).append(rank)
            times.setdefault(place, []).append(seconds)
        waited = {place: f", for {max(of_all):.0f} s" if max(of_all) else "" for place, of_all in times.items()}
        return [f"{named_ranks(who)}: {place}{waited[place]}" for place, who in ranks.items()]

    def is_split(self, question: _Question, world: int) -> bool:
        """Return True if all ranks have been waiting for a while for different collectives."""
        answers = self.places(question, world)
        settled = all(is_waiting and seconds > _SETTLED_S for _, seconds, is_waiting in answers)
        return settled and len({place for place, _, _ in answers}) > 1

    def places(self, question: _Question, world: int) -> list[tuple[str, float, bool]]:
        """Return the progress of each rank, its duration in seconds, and whether it waits."""
        return [(place, seconds, is_waiting) for place, seconds, is_waiting, _ in self._answers(question, world)]

    def waits(self, question: _Question, world: int) -> list[Wait | None]:
        """Return the collective that each rank waits for; None if it does not wait, or has not answered."""
        return [wait and Wait(**wait) for _, _, _, wait in self._answers(question, world)]

    def _answers(self, question: _Question, world: int) -> list[tuple[str, float, bool, Any]]:
        texts = [self._read(f"where/{question.number}/{rank}") for rank in range(world)]
        return [
            json.loads(text) if text else ("gives no answer (stopped, or gone)", 0.0, False, None) for text in texts
        ]

    def close_account(self, question: _Question) -> None:
        """Publish that the report is complete, so that ranks, and the store with them, may end."""
        self._first(f"closed/{question.number}", "yes")

    def await_account(self, question: _Question) -> None:
        """Wait until the answers have been collected, until a timeout, or until the store is unavailable."""
        deadline = monotonic() + 2 * _ANSWER_S
        while monotonic() < deadline:
            try:
                if self._store.check([f"closed/{question.number}"]):
                    return
            except dist.DistNetworkError:
                return
            except RuntimeError:  # the store is slow
                pass
            sleep(0.1)

    def _first(self, key: str, value: str) -> str:
        """Set `key` to `value` unless it has been set, and return its value."""
        return self._replace(key, "", value)

    def _replace(self, key: str, old: str, new: str) -> str:
        """Set `key` to `new` if it was `old`, and return its value, or `new` if the store is unavailable."""
        return self._call(self._store.compare_set, key, old, new, otherwise=new.encode()).decode()

    def _read(self, key: str) -> str:
        is_there = self._call(self._store.check, [key], otherwise=False)
        return self._call(self._store.get, key, otherwise=b"").decode() if is_there else ""

    def _call(self, call: Callable[..., T], *args: Any, otherwise: T) -> T:
        """Return the answer of the store. If it is unavailable or slow, record the error and return `otherwise`."""
        try:
            answer = call(*args)
        except RuntimeError as error:
            if self.error is None:
                self._silent_since = monotonic()
            self.error = error
            return otherwise
        self.error = None
        return answer


def _question(requested: str) -> _Question | None:
    return _Question(**json.loads(requested)) if requested else None


_watchdog: _Watchdog | None = None


def _stop_at_exit() -> None:
    """Publish how this process ends. The exception that ends it has been stored by Python."""
    error = getattr(sys, "last_value", None)
    if _watchdog is not None:
        _watchdog.stop(failure="" if error is None else f"it raised {type(error).__name__}: {error}")


def _forget_in_child() -> None:
    """Close inherited connections: a forked process is not a rank, and would keep them open after its parent ended."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.forget()
        _watchdog = None


atexit.register(_stop_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
