"""A set of rank processes that are started once, answer calls, and sleep in between."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench.workload import Workload
from fullshard.errors import FullshardError
from fullshard.testing.ranks import loopback_store

__all__ = ["Team", "TeamFailed"]

_LOOPBACK = "127.0.0.1"
_GRACE_S = 2.0  # how long to look for a lost rank once another rank has raised
# Modules that the fork server imports once for all ranks: the first DTensor imports torch._dynamo.
_PRELOAD = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.optim",
    "torch._dynamo",
    "benchmarks.bench.training",
)


class TeamFailed(FullshardError):  # noqa: N818  # says what happened
    """A rank of a team raised, died, or did not answer in time; `details` has its traceback, if there is one."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class _Failure:
    """The report of a rank that cannot continue."""

    stated: str
    traceback: str = ""


@dataclass(frozen=True)
class _Job:
    """The job of all ranks of a team, sent to them at the start."""

    make: Callable[[Workload], Any]
    workload: Workload
    world: int
    port: int
    timeout: float


class Team:
    """`world` rank processes with a separate process group. Each rank creates the object `make(workload)`.

    Args:
        make: Creates, on each rank, the object whose methods are called; it must be importable.
        workload: the training job.
        world: the number of ranks; that of the workload, if None.
        timeout: Time limit of a call in seconds.

    Raises:
        TeamFailed: A rank cannot be created, or does not answer.
    """

    def __init__(
        self, make: Callable[[Workload], Any], workload: Workload, *, world: int | None = None, timeout: float = 600.0
    ) -> None:
        self._timeout = timeout
        world = workload.world if world is None else world
        # The store is in this process, so that it outlives each rank.
        self._store = loopback_store(timeout)
        job = _Job(make, workload, world, self._store.port, timeout)
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []
        try:
            for rank in range(world):
                self._ranks.append(_started(job, rank))
            self._answers()
        except BaseException:
            self.end()
            raise

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call `method(*arguments)` of each rank's object and return the results in rank order.

        Raises:
            TeamFailed: a rank raised, died, or did not answer in time.
        """
        for _, connection in self._ranks:
            with suppress(BrokenPipeError):  # a lost rank is detected when it should answer
                connection.send((method, arguments))
        return self._answers()

    def end(self) -> None:
        """Stop all processes, even if they are busy."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            process.close()
            connection.close()
        self._ranks.clear()

    def _answers(self) -> list[Any]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeout
        while waiting:
            ready = wait_for_any(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(str(rank) for rank in waiting.values())
                raise TeamFailed(f"rank {late} did not answer within {self._timeout:g} s.")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                answers[rank] = self._answer(rank)
        return [answers[rank] for rank in range(len(self._ranks))]

    def _answer(self, rank: int) -> Any:
        _, connection = self._ranks[rank]
        try:
            answer = connection.recv()
        except (EOFError, ConnectionResetError):
            raise self._lost(rank) from None
        if isinstance(answer, _Failure):
            self._raise_if_lost()
            raise TeamFailed(f"rank {rank}: {answer.stated}", answer.traceback)
        return answer

    def _raise_if_lost(self) -> None:
        """Raise if a rank has died. Ranks that raise stay alive, so an error of another rank is its consequence.

        The error can arrive before the system reports the death, so wait a moment for that.
        """
        rank_of = {process.sentinel: rank for rank, (process, _) in enumerate(self._ranks)}
        for sentinel in wait_for_any(list(rank_of), timeout=_GRACE_S):
            assert isinstance(sentinel, int)
            raise self._lost(rank_of[sentinel])

    def _lost(self, rank: int) -> TeamFailed:
        process, _ = self._ranks[rank]
        process.join(timeout=_GRACE_S)
        return TeamFailed(f"rank {rank} ended with exit code {process.exitcode}.")


def _started(job: _Job, rank: int) -> tuple[ForkServerProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    own, peer = context.Pipe()
    process = context.Process(target=_serve, args=(job, rank, peer), name=f"rank {rank}", daemon=True)
    process.start()
    peer.close()  # the rank holds the only other end now, so its end reads as an end of file here
    return process, own


# ------------------------------------------------------------------------------------------------- the rank's side


def _serve(job: _Job, rank: int, connection: Connection) -> None:
    """Run one rank: create the object, then call its methods on request, until the connection closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends it
    gone = (EOFError, BrokenPipeError, ConnectionResetError)
    with suppress(*gone), Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        try:
            with _limit(job):
                _begin(job, rank)
                subject = job.make(job.workload)
            connection.send(None)
            while True:
                method, arguments = connection.recv()
                with _limit(job):
                    answer = getattr(subject, method)(*arguments)
                connection.send(answer)
        except gone:
            raise
        except BaseException as error:
            lines = str(error).strip().splitlines()
            stated = f"{type(error).__name__}: {lines[0] if lines else ''}"
            connection.send(_Failure(stated, "".join(traceback.format_exception(error))))
            connection.recv()  # an exit now would break connections that slower ranks still use
    os._exit(0)


@contextmanager
def _limit(job: _Job) -> Iterator[None]:
    """End this process if the block hangs, in case the caller was killed and cannot do so."""
    faulthandler.dump_traceback_later(2 * job.timeout, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _begin(job: _Job, rank: int) -> None:
    """Set up threads, device and process group of this rank, without warnings, which the user cannot fix."""
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world), LOCAL_WORLD_SIZE=str(job.world))
    torch.set_num_threads(job.workload.threads)
    limit = timedelta(seconds=2 * job.timeout)  # the limit of a call comes first, with a better message
    store = dist.TCPStore(_LOOPBACK, job.port, is_master=False, timeout=limit)
    device = job.workload.device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=job.world, timeout=limit, device_id=device)
        return
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=limit)
