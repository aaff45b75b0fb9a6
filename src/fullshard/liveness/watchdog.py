"""A thread that ends this process, with an account of where every rank is, when it would otherwise wait for ever.

Two things make ranks wait for ever: one of them is gone, or they do not come to the same collective. The first is told
by the ring (`ring.py`) and, on gloo, by the connections of the collective itself; the second by the clock. What ranks
have to say to one another then goes over the store, since the group is stuck.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic, sleep
from typing import NoReturn

import torch.distributed as dist

from fullshard._compat import default_store, store_address
from fullshard.errors import ConfigError, RankLostError, named_ranks
from fullshard.liveness.ring import Ring
from fullshard.liveness.store import PatientStore
from fullshard.liveness.whereabouts import here

__all__ = ["EXIT_CODE", "PeerGoneError", "lost", "set_collective_timeout", "watch"]

EXIT_CODE = os.EX_TEMPFAIL  # 75: start it again, and it goes on
"""Of a process that the watchdog ends: what could be done again may succeed then (`EX_TEMPFAIL`)."""

_LOOK_S = 1.0  # between two looks at the store; longer in large worlds, where it has many to answer
_LOOKS_A_SECOND = 500
_GRACE_S = 3.0  # for a rank that is told of a loss to raise an exception by itself
_ANSWER_S = 4.0  # for the others to say where they are
_STORE_S = 5.0  # for the store to answer

_NO_WORD = "its process ended without a word (killed, out of memory, or crashed)"
_NO_ANSWER = "its host does not answer (powered off, or the network is down)"

_log = logging.getLogger(__name__)

_timeout_s = 120.0


def set_collective_timeout(seconds: float | None) -> None:
    """End the job when a collective is waited for longer than this. 120 seconds unless set; None: never.

    Each rank then writes to the standard error stream where it is (step, microbatch, unit, phase, collective, for how
    long), the first to notice where all ranks are, and the processes end with exit code 75. Choose more than the
    longest time that one rank keeps the others waiting, such as an evaluation or a save on rank 0 alone.

    May be called at any time; the rank with the shortest time decides.

    Raises:
        ConfigError: not a positive number.
    """
    global _timeout_s
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"set_collective_timeout({seconds}): a positive number of seconds, or None, is needed.")
    _timeout_s = math.inf if seconds is None else seconds


def watch() -> None:
    """Look after the default process group from now on, if it has several ranks. Cheap to call again."""
    global _watchdog
    group = dist.group.WORLD
    if _watchdog is not None and _watchdog.group is group:
        return
    if _watchdog is not None:
        _watchdog.stop()
        _watchdog = None
    if group is not None and dist.get_world_size() > 1 and dist.get_backend() != "fake":
        _watchdog = _Watchdog(group)
        _watchdog.start()


class PeerGoneError(Exception):
    """The connection to `peer`, numbered as in its group, is broken. Not for users, who get what `lost` returns."""

    def __init__(self, peer: int) -> None:
        super().__init__(peer)
        self.peer = peer


def lost(rank: int, where: str) -> RankLostError:
    """The error of a rank whose connection to `rank` was broken while it was `where`; the others are told of it."""
    account = None if _watchdog is None else _watchdog.account_for(rank)
    return RankLostError(_loss(account or _Loss(rank, "its process is gone"), where))


@dataclass(frozen=True)
class _Loss:
    """A rank that is gone, and how it ended."""

    rank: int
    how: str


def _loss(loss: _Loss, where: str) -> str:
    return (
        f"rank {loss.rank} was lost: {loss.how}. Rank {dist.get_rank()} was {where}. The ranks that are left cannot go "
        "on with this process group: end them, and start again from the last checkpoint."
    )


class _Watchdog:
    """What looks after one process group. Only `account_for` and `stop` are called by the main thread."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._rank = dist.get_rank()
        self._world = dist.get_world_size()
        self._look_s = max(_LOOK_S, self._world / _LOOKS_A_SECOND)
        stores = default_store(), default_store()  # the main thread's, and one of our own
        self._way = store_address(stores[0])
        self._store, self._own_store = (
            PatientStore(dist.PrefixStore("fullshard/watchdog", store), _STORE_S) for store in stores
        )
        self._board, self._own_board = _Board(self._store), _Board(self._own_store)
        self._stopped = threading.Event()
        self._ring: Ring | None = None
        self._thread = threading.Thread(target=self._run, name="fullshard watchdog", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, *, failure: str = "") -> None:
        """Look no longer. If this rank ends by a `failure`, those that miss it are told."""
        self._board.tell_end(self._rank, failure or "its process ended, when others still waited for it")
        self._stopped.set()
        if self._ring is not None:
            self._ring.leave(farewell=not failure)
        self._thread.join(timeout=self._look_s)
        for store in (self._store, self._own_store):
            store.close()

    def forget(self) -> None:
        """In a process forked from this one: close what it has inherited, or this one's end would not be noticed."""
        if self._ring is not None:
            self._ring.leave(farewell=False)

    def account_for(self, rank: int) -> _Loss:
        """Which rank was lost first, now that the connection to `rank` is broken, and how it ended."""
        loss = self._board.first_loss(_Loss(rank, self._board.end_of(rank, _NO_WORD)))
        self._board.tell_end(self._rank, f"it missed rank {loss.rank} in its turn")
        return loss

    def _run(self) -> None:
        """Look, again and again, at the previous rank, at the board and at the clock."""
        joined, missed_since = False, math.inf
        while not self._stopped.is_set() and dist.group.WORLD is self.group:
            joined = joined or self._join()
            if (noticed := self._lost_previous()) is not None:
                self._own_board.first_loss(noticed)
            if here.waited_s > _timeout_s and self._own_board.sound_alarm(self._rank):
                self._end(self._report())
            if self._own_board.alarm_sounds:
                self._own_board.answer(self._rank, *here.now())
                self._own_board.await_report()
                self._end(f"another rank waits too long for a collective. Rank {self._rank} is {here}")
            loss = self._own_board.known_loss()
            missed_since = min(missed_since, monotonic()) if loss else math.inf
            if loss and min(monotonic() - missed_since, here.waited_s) > _GRACE_S:
                self._end(_loss(loss, str(here)))
        if self._ring is not None and not self._stopped.is_set():  # the group is destroyed
            self._ring.leave(farewell=True)

    def _join(self) -> bool:
        """Whether there is nothing left to do to be in the ring."""
        try:
            self._ring = self._ring or Ring(self._own_store, self._rank, self._world, self._way)
            return self._ring.join()
        except (OSError, RuntimeError) as error:  # torch's errors of the store are of the latter kind
            _log.warning("rank %d: lost ranks may be noticed late, for want of a connection: %s", self._rank, error)
            return True

    def _lost_previous(self) -> _Loss | None:
        """The previous rank, if it has ended without a farewell; waits a little for that."""
        if self._ring is None or not self._ring.watches:
            self._stopped.wait(self._look_s)
            return None
        if not self._ring.lost_previous(self._look_s) or self._stopped.is_set():
            return None
        otherwise = _NO_ANSWER if self._ring.previous_is_silent else _NO_WORD
        return _Loss(self._ring.previous, self._own_board.end_of(self._ring.previous, otherwise))

    def _report(self) -> str:
        """Where all ranks are; they end once this is known."""
        self._own_board.answer(self._rank, *here.now())
        deadline = monotonic() + _ANSWER_S + self._look_s
        while monotonic() < deadline and not self._own_board.has_answers(self._world):
            sleep(0.1)
        lines = [f"  {line}" for line in self._own_board.answers(self._world)]
        self._own_board.end_report()
        head = (
            f"rank {self._rank} is {here}, longer than the {_timeout_s:g} s that a collective may take, so all ranks "
            "end now. If one merely needs more time, call fullshard.set_collective_timeout(seconds). Where they are:"
        )
        return "\n".join([head, *lines])

    def _end(self, said: str) -> NoReturn:
        self._own_board.tell_end(self._rank, "its watchdog ended it")
        sys.stderr.write(f"[fullshard] {said}\n")
        sys.stderr.flush()
        os._exit(EXIT_CODE)


class _Board:
    """What ranks tell one another over the store. Where that is gone, nothing is told, and nothing known."""

    def __init__(self, store: PatientStore) -> None:
        self._store = store
        self._loss: _Loss | None = None

    def tell_end(self, rank: int, how: str) -> None:
        """Say how `rank` ends, unless that has been said."""
        self._first(f"end/{rank}", how)

    def end_of(self, rank: int, otherwise: str) -> str:
        """How `rank` said that it ends, or `otherwise`."""
        return self._read(f"end/{rank}") or otherwise

    def first_loss(self, loss: _Loss) -> _Loss:
        """The loss that was noticed first: `loss`, unless there has been one."""
        self._loss = self._loss or _Loss(**json.loads(self._first("loss", json.dumps(asdict(loss)))))
        return self._loss

    def known_loss(self) -> _Loss | None:
        """The loss that was noticed first, if there was any."""
        told = "" if self._loss else self._read("loss")
        return _Loss(**json.loads(told)) if told else self._loss

    def sound_alarm(self, rank: int) -> bool:
        """Have all ranks say where they are, and end. Whether `rank` is the one to collect what they say."""
        return self._first("alarm", str(rank)) == str(rank)

    @property
    def alarm_sounds(self) -> bool:
        """Whether a rank wants to know where all are."""
        return bool(self._read("alarm"))

    def answer(self, rank: int, place: str, seconds: float) -> None:
        """Say where `rank` is, and for how long."""
        self._first(f"where/{rank}", json.dumps([place, seconds]))
        with suppress(RuntimeError):
            self._store.add("answers", 1)

    def has_answers(self, world: int) -> bool:
        """Whether all ranks have said where they are."""
        with suppress(RuntimeError):
            return self._store.add("answers", 0) >= world
        return True

    def answers(self, world: int) -> list[str]:
        """Which ranks are where, those at the same place together."""
        ranks: dict[str, list[int]] = {}
        times: dict[str, list[float]] = {}
        for rank in range(world):
            answer = self._read(f"where/{rank}")
            place, seconds = json.loads(answer) if answer else ("gives no answer (stopped, or gone)", 0.0)
            ranks.setdefault(place, []).append(rank)
            times.setdefault(place, []).append(seconds)
        waited = {place: f", for {max(of_all):.0f} s" if max(of_all) else "" for place, of_all in times.items()}
        return [f"{named_ranks(who)}: {place}{waited[place]}" for place, who in ranks.items()]

    def end_report(self) -> None:
        """Say that all is known that will be: ranks may end, and the store with them."""
        self._first("reported", "yes")

    def await_report(self) -> None:
        """Return when the answers have been collected, or it is late."""
        deadline = monotonic() + 2 * _ANSWER_S
        while monotonic() < deadline and not self._read("reported"):
            sleep(0.1)

    def _first(self, key: str, value: str) -> str:
        """What `key` was first set to: `value`, if it had not been set."""
        with suppress(RuntimeError):
            return self._store.compare_set(key, "", value).decode()
        return value

    def _read(self, key: str) -> str:
        with suppress(RuntimeError):
            return self._store.get(key).decode() if self._store.check([key]) else ""
        return ""


_watchdog: _Watchdog | None = None


def _stop_at_exit() -> None:
    """Tell the others how this process ends; Python has kept the exception that it ends by."""
    error = getattr(sys, "last_value", None)
    if _watchdog is not None:
        _watchdog.stop(failure="" if error is None else f"it raised {type(error).__name__}: {error}")


def _forget_in_child() -> None:
    """A forked process is no rank, and would keep its parent's connections open beyond the parent's end."""
    global _watchdog
    if _watchdog is not None:
        _watchdog.forget()
        _watchdog = None


atexit.register(_stop_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
