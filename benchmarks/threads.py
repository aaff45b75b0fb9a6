"""Several ranks as threads of one process, on one device: collectives are copies, and all ranks share its streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg, _uninstall_threaded_pg

from fullshard.comm.native import NativeCollectives
from fullshard.comm.routes import register_backend
from fullshard.device.memory import Pool
from fullshard.engine import group_transports, runtime
from fullshard.tape import context

__all__ = ["run_threads"]

T = TypeVar("T")


def run_threads(world: int, function: Callable[[int, threading.Lock], T]) -> list[T]:
    """Return the results of `function(rank, lock)` on each rank, in rank order. For a process without a process group.

    All threads draw from one generator, so models are to be made while the lock is held.
    """
    store, lock = dist.HashStore(), threading.Lock()
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", store=store, rank=rank, world_size=world)
            with torch.autograd.set_multithreading_enabled(False):  # ranks wait for one another within backward
                results[rank] = function(rank, lock)
        except BaseException as error:
            failures.append(error)
            raise

    with _ranks_are_threads():
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not failures:
            for thread in threads:
                thread.join(0.1)
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(world)]


@contextmanager
def _ranks_are_threads() -> Iterator[None]:
    """Replace per-process state by per-thread state in this context."""
    register_backend("threaded", NativeCollectives)
    replaced: list[tuple[Any, str, Any]] = [
        (group_transports, "scratch_of", Pool),  # else threads would take one another's
        (runtime, "drop_if_stale", _nothing),  # every thread has a separate default group
        (context, "drop_if_stale", _nothing),
        (runtime, "watch", _nothing),  # a watchdog looks after processes
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    _install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        _uninstall_threaded_pg()
        for (owner, name, _), value in zip(replaced, before, strict=True):
            setattr(owner, name, value)


def _nothing() -> None:
    """Not for threads."""
