"""Process-wide settings, each set by a public function. They affect all units and process groups.

All other options belong to a module.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from fullshard.policy.arguments import check_flags


@dataclass
class Switches:
    """The current value of each setting."""

    compares_ranks: bool = True
    checks_finite: bool = False
    shares_memory_between_ranks: bool = os.environ.get("FULLSHARD_SHARED_MEMORY") != "0"
    shares_memory_between_units: bool | None = None  # None: enabled on a CPU
    report_after_s: float = 120.0  # time waiting for a collective before a report
    end_after_s: float | None = None  # None: the timeout of the process group


switches = Switches()


def compare_ranks(enabled: bool) -> None:
    """Enable or disable the comparison of ranks at each collective. Default: enabled.

    It affects collectives over gloo that start after this call. All ranks must use the same setting. Without the
    comparison, ranks that run their units in different orders wait for each other until the process group times out.

    Args:
        enabled: The new setting.
    """
    check_flags(enabled=enabled)
    switches.compares_ranks = enabled


def check_finite_gradients(enabled: bool) -> None:
    """Enable or disable the check of gradients for NaN and infinity at the end of each backward. Default: disabled.

    If a gradient has either, `backward()` raises `NonFiniteError` on every rank after gradients are reduced. The error
    names the parameters, their units, and the ranks whose microbatches caused it. All ranks must use the same setting.

    A check takes two passes over the gradients, an all-reduce of one number and, on a GPU, a host synchronization.

    Args:
        enabled: The new setting.
    """
    check_flags(enabled=enabled)
    switches.checks_finite = enabled


def share_memory_between_ranks(enabled: bool) -> None:
    """Enable or disable communication through shared memory between ranks on one host. Default: enabled.

    It affects process groups on CPUs whose first collective comes after this call. Other process groups use gloo's
    connections. A group shares memory if all of its ranks are on one Linux host and none of them has disabled it with
    this function or with `FULLSHARD_SHARED_MEMORY=0` in the environment. Results are identical in both cases.

    Args:
        enabled: The new setting.
    """
    check_flags(enabled=enabled)
    switches.shares_memory_between_ranks = enabled


def share_memory_between_units(enabled: bool | None) -> None:
    """Enable or disable memory sharing between units that are never unsharded simultaneously. Default: on for CPUs.

    It affects models whose first forward comes after this call. If disabled, the memory of every unit returns to the
    allocator when the unit is resharded. On a CPU this costs page faults in each all-gather. On a GPU it costs little
    and leaves the memory to activations. If enabled, memory for the most parameters that are unsharded simultaneously
    stays allocated, and the unsharded parameters of a unit keep their addresses from the second step on. CUDA graphs of
    parts of a model need that.

    Args:
        enabled: None for the default of the device.
    """
    if enabled is not None:
        check_flags(enabled=enabled)
    switches.shares_memory_between_units = enabled
