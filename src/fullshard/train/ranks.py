"""The rank of this process, its device and its process group, read from torchrun's environment."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.checkpoint.keeper import keeps_folders
from fullshard.device.current import count_devices, set_current_device, usual_device_type
from fullshard.errors import ConfigError

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One process of the run."""

    index: int
    world: int
    local_index: int  # among the ranks of this machine
    local_world: int
    machines: int = 1  # in total
    device: torch.device

    @property
    def leads(self) -> bool:
        """True on the rank that writes files and output."""
        return self.index == 0


def runs_under_torchrun() -> bool:
    """Return True if a launcher has started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def end_with_launcher() -> None:
    """Let the system kill this process when the launcher that started it is killed (Linux).

    Otherwise the ranks would continue, and write to the run's folder at the same time as a resumed run.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def rank_from_environment() -> Rank:
    """Return the rank of this process from torchrun's environment."""
    local_index = int(os.environ.get("LOCAL_RANK", "0"))
    world = int(os.environ["WORLD_SIZE"])
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device = torch.device(usual_device_type(), local_index) if count_devices() else torch.device("cpu")
    return Rank(
        index=int(os.environ["RANK"]),
        world=world,
        local_index=local_index,
        local_world=local_world,
        machines=int(os.environ.get("GROUP_WORLD_SIZE", world // local_world)),
        device=device,
    )


def check_restarts(safety_copy_every: int = 0, environ: Mapping[str, str] = os.environ) -> None:
    """Raise an error if lost ranks could not be restarted, or if their safety copies would be useless.

    Raises:
        ConfigError: Restarted ranks would read the addresses of earlier ranks; or safety copies are requested, but the
            launcher does not restart ranks, or this system cannot keep copies.
    """
    restarts = int(environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if safety_copy_every and restarts == 0:
        raise ConfigError(
            f"--safety-copy-every {safety_copy_every}: copies are deleted when the launcher ends, and this launcher "
            "does not restart lost ranks. Start the run with torchrun --max-restarts 3, or leave --safety-copy-every "
            "out."
        )
    if safety_copy_every and not keeps_folders(os.getppid()):
        raise ConfigError(
            f"--safety-copy-every {safety_copy_every}: copies are kept in /dev/shm by a process that watches the "
            "launcher in /proc, but this system lacks one of them. Leave --safety-copy-every out."
        )
    if restarts > 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError(
            f"torchrun --max-restarts {restarts}: lost ranks could not be restarted, since torchrun keeps the "
            "addresses of earlier ranks in its shared store. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun "
            "on every host."
        )


def ranks_of_machine() -> int:
    """Return the default number of ranks of this machine: one per GPU, or per core without GPUs."""
    return count_devices() or cores_of_machine()


def cores_of_machine() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def process_group(rank: Rank) -> Iterator[None]:
    """Context manager within which a default process group exists: NCCL on GPUs, gloo on CPUs."""
    if rank.device.type == "cpu":
        dist.init_process_group("gloo")
    else:
        set_current_device(rank.device)
        dist.init_process_group(dist.get_default_backend_for_device(rank.device), device_id=rank.device)
    try:
        yield
    finally:
        dist.destroy_process_group()


def do_together(action: Callable[[], T], world: int) -> T:
    """Call `action` on every rank, and return its result on this rank. Every rank must call this.

    Raises:
        ConfigError: `action()` raised it on some rank. The same error is raised on every rank.
    """
    results: list[T] = []
    failure: ConfigError | None = None
    try:
        results.append(action())
    except ConfigError as error:
        failure = error
    failures: list[str | None] = [None] * world
    dist.all_gather_object(failures, None if failure is None else str(failure))
    for message in failures:
        if message is not None:
            raise ConfigError(message) from failure
    return results[0]


def gather_in_rank_order(values: Tensor, rank: Rank) -> Tensor:
    """Gather `values` of shape (n, ...) in rank order into shape (world * n, ...) on all ranks."""
    values = values.to(rank.device).contiguous()
    parts = [torch.empty_like(values) for _ in range(rank.world)]
    dist.all_gather(parts, values)
    return torch.cat(parts)
