"""The switches of this process, which concern all units and process groups in it.

Users turn them by the functions below, and by `set_collective_timeout` of `liveness/watchdog.py`. No other wish
of theirs is kept outside of modules.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = [
    "Switches",
    "check_finite_gradients",
    "compare_ranks",
    "share_memory_between_ranks",
    "share_memory_between_units",
    "switches",
]


@dataclass
class Switches:
    """What is switched on and off at the moment."""

    compares_ranks: bool = True
    checks_finite: bool = False
    shares_memory_between_ranks: bool = os.environ.get("FULLSHARD_SHARED_MEMORY") != "0"
    shares_memory_between_units: bool | None = None  # None: on a CPU
    report_after_s: float = 120.0  # of waiting for a collective
    end_after_s: float | None = None  # None: what the process group gives a collective


switches = Switches()


def compare_ranks(enabled: bool) -> None:
    """Whether ranks compare what they do, collective by collective (they do).

    Concerns collectives over gloo that start after this call; all ranks must agree on it. Without it, ranks that run
    their units in different orders wait for one another until the process group's time-out.
    """
    switches.compares_ranks = enabled


def check_finite_gradients(enabled: bool) -> None:
    """Whether each backward ends with a check that gradients hold no NaN and no infinity (it does not).

    Where one does, `backward()` raises `NonFiniteError` on every rank, once gradients are reduced: with the parameters,
    their units, and the ranks whose own microbatches they come from. All ranks must agree on whether to check.

    Costs two passes over the gradients, one number to all ranks a backward and, on a GPU, a wait of the host.
    """
    switches.checks_finite = enabled


def share_memory_between_ranks(enabled: bool) -> None:
    """Whether ranks on one host exchange data through memory that all of them see, instead of by gloo (they do).

    Concerns process groups on CPUs whose first collective comes after this call. A group shares memory if all of its
    ranks are on one Linux host, and none of them has this switched off, here or by `FULLSHARD_SHARED_MEMORY=0` in the
    environment. The numbers are the same in any case.
    """
    switches.shares_memory_between_ranks = enabled


def share_memory_between_units(enabled: bool | None) -> None:
    """Whether units that are never unsharded at the same time take turns on memory that stays. Unless set: on CPUs.

    Concerns models whose first forward comes after this call. Without it every unit's memory goes back to the allocator
    when it is resharded. On a CPU that costs page faults in each gather. On a GPU it costs little and leaves the memory
    to activations; but memory that stays, as much as is unsharded at once, means that the unsharded parameters of a
    unit are at the same addresses from the second step on, as CUDA graphs of parts of a model need.

    Args:
        enabled: None for what is usual on the device.
    """
    switches.shares_memory_between_units = enabled
