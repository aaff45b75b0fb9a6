"""The switches of this process, each set by a function that users call, for all its units and process groups.

Every other option belongs to a module.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from fullshard.policy.arguments import check_flags

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
    """The present setting of each switch."""

    compares_ranks: bool = True
    checks_finite: bool = False
    shares_memory_between_ranks: bool = os.environ.get("FULLSHARD_SHARED_MEMORY") != "0"
    shares_memory_between_units: bool | None = None  # None: on a CPU
    report_after_s: float = 120.0  # of waiting for a collective
    end_after_s: float | None = None  # None: what the process group gives a collective


switches = Switches()


def compare_ranks(enabled: bool) -> None:
    """Switch the comparison of ranks, collective by collective, on or off. Default: on.

    Concerns collectives over gloo that start after this call; all ranks must agree on it. Without it, ranks that run
    their units in different orders wait for one another until the process group's time-out.
    """
    check_flags(enabled=enabled)
    switches.compares_ranks = enabled


def check_finite_gradients(enabled: bool) -> None:
    """Switch the check of gradients for NaN and infinity at the end of each backward on or off. Default: off.

    If a gradient holds one, `backward()` raises `NonFiniteError` on every rank, once gradients are reduced. It names
    the parameters, their units, and the ranks whose microbatches they come from. All ranks must agree on the switch.

    A check takes two passes over the gradients, an all-reduce of one number and, on a GPU, a wait of the host.
    """
    check_flags(enabled=enabled)
    switches.checks_finite = enabled


def share_memory_between_ranks(enabled: bool) -> None:
    """Switch the exchange of data through shared memory, between ranks on one host, on or off. Default: on.

    Concerns process groups on CPUs whose first collective comes after this call; others use gloo's connections. A group
    shares memory if all of its ranks are on one Linux host, and none of them has this switched off, here or by
    `FULLSHARD_SHARED_MEMORY=0` in the environment. The numbers are the same in any case.
    """
    check_flags(enabled=enabled)
    switches.shares_memory_between_ranks = enabled


def share_memory_between_units(enabled: bool | None) -> None:
    """Switch the sharing of memory, between units that are never unsharded at once, on or off. Default: on for CPUs.

    Concerns models whose first forward comes after this call. Without it every unit's memory goes back to the allocator
    when it is resharded. On a CPU that costs page faults in each gather. On a GPU it costs little and leaves the memory
    to activations; but memory that stays, as much as is unsharded at once, means that the unsharded parameters of a
    unit are at the same addresses from the second step on, as CUDA graphs of parts of a model need.

    Args:
        enabled: None for the device's default.
    """
    if enabled is not None:
        check_flags(enabled=enabled)
    switches.shares_memory_between_units = enabled
