"""Measured speeds of collectives between the GPUs of this host: all-gathers and reductions of the backend, by size."""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fullshard.plan.speeds_of_ranks import as_rank, found_by_ranks

SIZES = tuple(4**power for power in range(5, 14))  # bytes of the unsharded tensor: 1 KiB to 64 MiB
CALLS, ROUNDS = 5, 5


def link_speeds(world: int, device_type: str = "cuda") -> list[dict[str, float]]:
    """Return by size the median seconds of an all-gather and of a reduction between `world` ranks."""
    found = found_by_ranks("fullshard.plan.link_speeds", world, [device_type], patience_s=120)
    sizes: list[dict[str, float]] = found["sizes"]
    return sizes


def measure(device: torch.device) -> dict[str, Any]:
    """Run all measurements on this rank."""
    return {"sizes": [_of_size(nbytes, device) for nbytes in SIZES]}


def _of_size(nbytes: int, device: torch.device) -> dict[str, float]:
    world = dist.get_world_size()
    numel = max(1, nbytes // 4 // world)
    whole, part = torch.zeros(numel * world, device=device), torch.zeros(numel, device=device)
    return {
        "nbytes": 4 * numel * world,
        "gather_s": _seconds(lambda: dist.all_gather_into_tensor(whole, part), device),
        "reduce_s": _seconds(lambda: dist.reduce_scatter_tensor(part, whole), device),
    }


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one of several consecutive calls. The first round does not count."""
    found = []
    for _ in range(1 + ROUNDS):
        dist.barrier()
        _finish(device)
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        _finish(device)
        found.append((time.perf_counter() - start) / CALLS)
    return statistics.median(found[1:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(folder: str, world: str, rank: str, device_type: str) -> None:
    """Measure as one of `world` ranks, each with a separate GPU, and print the result as JSON."""
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for these calls that 2.11 lacks
    device = torch.device(device_type, int(rank)) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    as_rank(backend, folder, int(world), int(rank), lambda: measure(device))


if __name__ == "__main__":
    main(*sys.argv[1:])
