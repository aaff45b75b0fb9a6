"""Running functions on several ranks of this machine, as the other testing tools do."""

from __future__ import annotations

import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, TypeVar

import torch
import torch.distributed as dist

from fullshard.device.current import count_devices, set_current_device, usual_device_type
from fullshard.errors import ConfigError, FullshardError
from fullshard.policy.arguments import check_callable, check_type, is_number

T = TypeVar("T")

_log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
# Modules that the fork server imports once for all ranks. (The first DTensor imports torch._dynamo, which takes most of
# a second.) The second group is slow to import too, and is preloaded if the caller has imported it.
_PRELOAD = (
    *("torch", "torch.distributed", "torch.distributed.tensor", "torch._dynamo", "fullshard", "fullshard.testing"),
    *("fullshard.comm.shared_memory", "fullshard.optim.plain_step"),
    *("fullshard.state.first_step", "fullshard.state.loaded_states"),
)
_PRELOAD_IF_USED = (
    *("fullshard.checkpoint", "fullshard.train.loop"),
    *("numpy", "pytest", "hypothesis", "sklearn", "lightning.pytorch"),
    *("transformers.modeling_utils", "transformers.trainer"),
)
_ON_CPU = ("gloo", "fake")  # backends that need no device
_GRACE_S = 0.5  # the time for other ranks to report their failures after the first one
_LONGEST_TIMEOUT_S = 2_000_000  # poll accepts at most 2**31 milliseconds
_TRACE_S = 2.0  # the time for ranks to write their stacks after a timeout


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank: the exception that it raised, or the end of its process.

    Args:
        rank: The number of the rank.
        kind: The class of the exception, or how the process ended.
        message: The message of the exception.
        traceback: The traceback; empty if there is none.
    """

    rank: int
    kind: str  # full name of the exception, such as "fullshard.errors.ConfigError"; "exit" if the process just ended
    message: str
    traceback: str


_Report = bytes | RankFailure  # a rank's serialized result, or its failure


class RanksFailed(FullshardError):  # noqa: N818  # says what happened, as torch's ProcessRaisedException does
    """At least one rank raised an error, died or did not end in time. The message contains all tracebacks.

    `failures` maps each failing rank to its failure, the likely cause first. `running` lists the ranks that were still
    running and were stopped.
    """

    def __init__(self, message: str, failures: Mapping[int, RankFailure], running: Sequence[int]) -> None:
        super().__init__(message)
        self.failures = dict(failures)
        self.running = list(running)


def run_ranks(
    world: int, function: Callable[..., T], *args: Any, timeout: float = 300.0, backend: str = "gloo"
) -> list[T]:
    """Run `function(*args)` on `world` ranks and return the results in rank order.

    The ranks are new processes on this machine with an initialized default process group and one torch thread each.
    They have the caller's environment variables and warning filters, and torchrun's variables RANK, WORLD_SIZE,
    LOCAL_RANK and LOCAL_WORLD_SIZE. With NCCL, rank `r` uses device `r` modulo the number of devices.

    Arguments and results are copied. Returned tensors are on the CPU. A DTensor cannot be returned: return
    `.to_local()` or `.full_tensor()`. Results may depend on the number of threads, so also compute a plain reference
    with `run_ranks(1, ...)` if bits are compared.

    Args:
        world: The number of ranks.
        function: A function of a module, which new processes can import.
        *args: The arguments of `function`.
        timeout: Seconds until ranks are stopped.
        backend: The backend of the process group, such as `"gloo"`, `"nccl"` or `"cpu:gloo,cuda:nccl"`.

    Raises:
        RanksFailed: A rank raises an error or dies, and the other ranks are stopped; or ranks do not end within
            `timeout` seconds, and the message has their stacks.
    """
    with RankPool(world, timeout=timeout, backend=backend) as ranks:
        return ranks.run(function, *args)


class RankPool:
    """Ranks like those of `run_ranks` that keep their processes and state for several calls of `run`.

    The first call starts the ranks. A failed call ends them.
    """

    def __init__(self, world: int, *, timeout: float = 300.0, backend: str = "gloo") -> None:
        check_type("world", world, int, "the number of ranks, followed by the function: run_ranks(2, function)")
        if world < 1:
            raise ConfigError(f"run_ranks: world={world}, but there must be at least one rank.")
        if not (is_number(timeout) and 0 < timeout <= _LONGEST_TIMEOUT_S):
            raise ConfigError(
                f"run_ranks: timeout={timeout!r}, but it must be a positive number of seconds, at most "
                f"{_LONGEST_TIMEOUT_S}."
            )
        _check_backend(backend)
        self._world, self._timeout, self._backend = world, timeout, backend
        self._ranks: list[_RankProcess] = []
        self._store: dist.TCPStore | None = None
        self._traces: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function` as `run_ranks` does, with the same results and errors."""
        check_callable("function", function, "a function, followed by its arguments")
        job = _Job.make(self._world, function, args, self._timeout, self._backend)
        try:
            if self._ranks:
                for rank in self._ranks:
                    rank.call(job)
            else:
                self._start(job)
            reports = _collect(self._ranks, self._timeout)
            _raise_on_failure(self._ranks, reports, self._timeout)
        except BaseException:
            self.end()
            raise
        return [_load(reports[rank]) for rank in range(self._world)]

    def end(self) -> None:
        """Stop the ranks, even if they are busy."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.end()
        self._ranks.clear()
        self._store = None
        if self._traces is not None:
            self._traces.cleanup()
            self._traces = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _start(self, job: _Job) -> None:
        self._store = loopback_store(self._timeout)
        self._traces = tempfile.TemporaryDirectory(prefix="fullshard-ranks-")
        for rank in range(self._world):
            self._ranks.append(_RankProcess.start(job, rank, self._store.port, Path(self._traces.name)))


# --------------------------------------------------------------------------------------------- the caller's side


def _check_backend(backend: object) -> None:
    """Raise an error if the ranks could not create a process group with `backend`.

    Raises:
        ConfigError: `backend` has an unknown name, or needs a device that this machine does not have.
    """
    check_type("backend", backend, str, "the name of a backend, such as 'gloo'")
    names = _backends_in(str(backend))
    has_devices = count_devices() > 0
    known = [*_ON_CPU, *(name for name in dist.Backend.backend_list if name not in (*_ON_CPU, "undefined"))]
    usable = [name for name in known if name in _ON_CPU or (has_devices and dist.is_backend_available(name))]
    refused = next((name for name in names if name not in usable), None)
    if refused is not None:
        lacks_device = refused in known and not has_devices
        reason = "but this machine has no device for it" if lacks_device else "which is unknown"
        allowed = ", ".join(usable)
        raise ConfigError(f"run_ranks: backend={backend!r} names {refused!r}, {reason}. Pass one of {allowed}.")


def _backends_in(backend: str) -> list[str]:
    """Return the names in `backend`, which is one name, or a list of pairs such as "cpu:gloo,cuda:nccl"."""
    return [pair.rpartition(":")[2].lower() for pair in backend.split(",")]


@dataclass(frozen=True)
class _Job:
    """A function call for all ranks, in serialized form."""

    world: int
    backend: str
    timeout: float
    payload: (
        bytes  # function, arguments and warning filters; the rank loads them, so that it can report a failed import
    )
    environ: dict[str, str]

    @classmethod
    def make(cls, world: int, function: Callable[..., Any], args: Any, timeout: float, backend: str) -> _Job:
        try:
            payload = _dump((function, args, list(warnings.filters)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"run_ranks: cannot send {function!r} and its arguments to the ranks ({error}). The function must be "
                "defined at the top level of a file, and the arguments must be picklable: no lambdas, no local "
                "functions."
            ) from error
        return cls(world, backend, timeout, payload, dict(os.environ))


def loopback_store(timeout: float) -> dist.TCPStore:
    """Return the store for the rendezvous of the ranks.

    The store is in the caller's process, so that it outlives a rank that ends early. The system chooses its port when
    the store starts to listen, so that no other process can take it.

    The socket supports IPv4 only. By default the store also listens on IPv6, gets connections from ::ffff:127.0.0.1,
    and queries the name server for that address, which takes 5 s if the answer is lost.
    """
    listening = socket.create_server((_LOOPBACK, 0), backlog=1024)
    port = listening.getsockname()[1]
    limit = timedelta(seconds=timeout)
    return dist.TCPStore(
        _LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listening.detach()
    )


@dataclass(frozen=True)
class _RankProcess:
    """The caller's handle of one rank."""

    rank: int
    process: BaseProcess
    connection: Connection
    trace: Path  # the file for the rank's stacks, which it writes on SIGUSR1

    @classmethod
    def start(cls, job: _Job, rank: int, port: int, folder: Path) -> _RankProcess:
        context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")
        if "forkserver" in multiprocessing.get_all_start_methods():
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([*_PRELOAD, *(name for name in _PRELOAD_IF_USED if name in sys.modules)])
        elif rank == 0:
            _log.info("this system has no fork server: every rank imports torch itself, which takes seconds")
        own, peer = context.Pipe()
        trace = folder / f"rank{rank}.txt"
        process = context.Process(target=_rank_main, args=(job, rank, port, trace, peer), name=f"rank {rank}")
        process.start()
        peer.close()  # now only the rank has the other end, so this side gets an end of file if the rank ends
        return cls(rank, process, own, trace)

    def call(self, job: _Job) -> None:
        """Send the rank another job. `receive` detects a lost process."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(job)

    def receive(self) -> _Report:
        """Return the rank's report, or a failure if the process ended without a report."""
        try:
            report: _Report = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(timeout=1.0)
            return RankFailure(self.rank, "exit", _exit_reason(self.process.exitcode), traceback="")
        return report

    def end(self) -> None:
        """Stop the process, even if it is busy."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()


def _collect(ranks: Sequence[_RankProcess], timeout: float) -> dict[int, _Report]:
    """Return the reports by rank in order of arrival. Some are missing after a timeout or a failure."""
    waiting = {rank.connection: rank for rank in ranks}
    reports: dict[int, _Report] = {}
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait_for_any(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        failed_before = bool(_failures(reports))
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            reports[rank.rank] = rank.receive()
        if _failures(reports) and not failed_before:
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    return reports


def _failures(reports: Mapping[int, _Report]) -> dict[int, RankFailure]:
    """Return the failures in order of arrival, but those of lost processes first.

    A lost process breaks the connections of its peers, which may report this before the loss itself is detected.
    """
    failures = [report for report in reports.values() if isinstance(report, RankFailure)]
    return {failure.rank: failure for failure in sorted(failures, key=lambda failure: failure.kind != "exit")}


def _raise_on_failure(ranks: Sequence[_RankProcess], reports: Mapping[int, _Report], timeout: float) -> None:
    failures = _failures(reports)
    running = [rank for rank in ranks if rank.rank not in reports]
    if not failures and not running:
        return
    names = _names([rank.rank for rank in running])
    if failures:
        head = f"{_names(sorted(failures))} of {len(ranks)} failed"
        head += f"; {names} still ran and were stopped" if running else ""
        parts = [
            f"---- rank {rank}: {failure.kind}: {failure.message}\n{failure.traceback}"
            for rank, failure in failures.items()
        ]
    else:
        head = f"{names} of {len(ranks)} did not end within {timeout:g} s"
        parts = [f"---- rank {rank} was here:\n{stacks}" for rank, stacks in _stacks(running).items()]
    raise RanksFailed("\n".join([f"{head}.", *parts]).rstrip(), failures, [rank.rank for rank in running])


def _stacks(ranks: Sequence[_RankProcess]) -> dict[int, str]:
    """Return the current stacks of each rank's threads, by rank."""
    for rank in ranks:
        if rank.process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(rank.process.pid, signal.SIGUSR1)
    written = {rank.rank: "" for rank in ranks}
    deadline = time.monotonic() + _TRACE_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before = written
        written = {rank.rank: rank.trace.read_text() if rank.trace.exists() else "" for rank in ranks}
        if before == written and all(written.values()):
            break
    return {rank: stacks or "(unknown: it was still starting or did not answer)" for rank, stacks in written.items()}


def _names(ranks: Sequence[int]) -> str:
    listed = ", ".join(str(rank) for rank in ranks)
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def _exit_reason(code: int | None) -> str:
    if code is None:
        return "closed its connection without a report"
    if code < 0:
        return f"process was killed by {signal.Signals(-code).name} before it returned"
    return f"process ended with exit code {code} before it returned"


# ------------------------------------------------------------------------------------------------- the rank's side


def _rank_main(job: _Job, rank: int, port: int, trace: Path, connection: Connection) -> None:
    """Run one rank: execute each job and send a report, until the caller ends the process."""
    # Without this, each garbage collection visits the fork server's imports, which takes a fifth of a second and copies
    # their pages.
    gc.freeze()
    with trace.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        # The process must not end after the report: this would close sockets that slower ranks still use, and they
        # would report a failure.
        with suppress(EOFError, ConnectionResetError):
            while True:
                connection.send(_report(job, rank, port, stacks))
                job = connection.recv()
        os._exit(0)


def _report(job: _Job, rank: int, port: int, stacks: TextIO) -> _Report:
    # This ends the process if the caller was killed and cannot do so.
    faulthandler.dump_traceback_later(2 * job.timeout, exit=True, file=stacks)
    try:
        return _run(job, rank, port)
    except BaseException as error:
        return _failure(rank, error)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run(job: _Job, rank: int, port: int) -> bytes:
    os.environ.clear()
    os.environ.update(job.environ)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world), LOCAL_WORLD_SIZE=str(job.world))
    torch.set_num_threads(1)
    if not set(_backends_in(job.backend)) <= set(_ON_CPU):
        set_current_device(torch.device(usual_device_type(), rank % count_devices()))
    if not dist.is_initialized():
        _init_process_group(job, rank, port)
    function, args, filters = _load(job.payload)
    _set_warning_filters(filters)
    return _dump(function(*args))


def _init_process_group(job: _Job, rank: int, port: int) -> None:
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    limit = timedelta(seconds=2 * job.timeout)  # longer than the caller's timeout, which has a better message
    store = dist.TCPStore(_LOOPBACK, port, is_master=False, timeout=limit)
    dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.world, timeout=limit)


def _set_warning_filters(filters: Sequence[tuple[Any, Any, type[Warning], Any, int]]) -> None:
    """Use the caller's warning filters, so that a warning that is an error in a test is also an error on its ranks."""
    warnings.resetwarnings()
    for action, message, category, module, lineno in reversed(filters):
        warnings.filterwarnings(action, _pattern(message), category, _pattern(module), lineno)


def _pattern(regex: re.Pattern[str] | str | None) -> str:
    return regex.pattern if isinstance(regex, re.Pattern) else regex or ""


def _failure(rank: int, error: BaseException) -> RankFailure:
    kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    error = error.with_traceback(_below_this_file(error.__traceback__))
    return RankFailure(rank, kind, str(error), "".join(traceback.format_exception(error)))


def _below_this_file(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that starts at the user's code; all of it if there is no such part."""
    below = trace
    while below is not None and below.tb_frame.f_code.co_filename == __file__:
        below = below.tb_next
    return below or trace


def _dump(value: Any) -> bytes:
    # Not with pickle: multiprocessing pickles a tensor as a handle to memory that is freed with its process.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: Any) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
