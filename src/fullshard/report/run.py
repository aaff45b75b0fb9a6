"""What is known of a run once all its ranks' records are read: the one value that causes and pages are made from.

Arrays have an axis of ranks, of steps, or both, in that order. Seconds, bytes and numbers are plain; what was not
measured is empty, None or NaN, never 0. A page draws this, `causes.py` explains it, and neither knows anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "PARTS",
    "Finding",
    "HostWait",
    "Memory",
    "OutOfMemory",
    "RankFacts",
    "Run",
    "Shard",
    "Span",
    "TensorHeld",
    "Tier",
    "UnitTimes",
    "WhatIf",
]

PARTS = ("input", "forward", "backward", "gather", "reduce", "optimizer", "checkpoint", "other")
"""The parts that a step is split into, which add up to it. `gather` and `reduce` are what is exposed of them."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Where a rank ran."""

    rank: int
    host: str
    device: str  # such as "cpu" or "NVIDIA H100 80GB HBM3"
    cores: int  # that the process may run on
    threads: int = 0  # that an operation of torch's takes; 0 if not known


@dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """What a unit's collectives took in a step: the mean over recorded steps and ranks."""

    fqn: str  # empty for the root
    nbytes: int  # of its unsharded parameters
    trains: bool  # whether any of its parameters does
    gathers: float  # all-gathers in a step
    gathered_bytes: float  # that a rank receives by them
    gather_s: float
    gather_exposed_s: float  # in which compute, or the program, waited for them
    reductions: float
    reduced_bytes: float  # that a rank sends for them
    reduce_s: float
    reduce_exposed_s: float
    gathers_ahead: float = float("nan")  # of the gathers in a step, those that were started before they were needed
    param_dtype: str = ""  # that it computes in, such as "bfloat16"
    reduce_dtype: str = ""  # that its gradients are summed in
    recomputed: bool = False  # whether backward runs its forward again


@dataclass(frozen=True, kw_only=True)
class HostWait:
    """Something that makes the program wait for the device, or for other ranks, in every step: clipping, logging."""

    what: str  # such as "clipping", "logging" or "item() in train.py:41"
    waits: float  # in a step: the mean over recorded steps and ranks
    waited_s: float  # by them all, in a step


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that a lane did in the step that is shown. Seconds from the start of that step."""

    lane: str  # one of `fullshard.device.lanes.LANES`
    name: str  # "forward", "backward", "all_gather", "wait", "optimizer", "input", ...
    unit: str  # FQN
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class TensorHeld:
    """A tensor that was alive at the peak."""

    nbytes: int
    state: str  # a value of `fullshard.plan.memory.State`
    what: str  # whose it is: an FQN, a unit and phase


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of tensors of one rank over one step, by state, the last of the arrays being after the step."""

    rank: int
    at_s: NDArray[np.float64]  # when, from the start of the step; shape (moments,)
    labels: tuple[str, ...]  # unit and phase of each moment
    by_state: Mapping[str, NDArray[np.int64]]  # by value of `State`; each of shape (moments,)
    peak: int  # the place of the largest sum
    largest: tuple[TensorHeld, ...]  # at the peak, at most ten, the largest first
    predicted: NDArray[np.int64] | None  # the tape's sum at as many moments; None if nothing was predicted
    held: int  # what the allocator, or the process, held beyond tensors at most
    limit: int | None  # of this rank: the device's, the cgroup's or the process's


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A parameter, and the rows that each rank owns."""

    fqn: str
    unit: str
    shape: tuple[int, ...]
    dtype: str
    dim: int  # that is cut
    rows: tuple[tuple[int, int], ...]  # by rank of the shard axis: from row, up to row
    packed: bool
    padding_bytes: int


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause of lost time or memory: the number that proves it, and the change that helps."""

    cause: str  # a short name, such as "slow input"; the same words as in the docs page
    said: str  # one or two sentences with the number and where: units, ranks
    change: str  # what to do: the flag, the line, the host
    lost: float  # the part of a step that it costs, from 0 to 1
    of_memory: float = 0.0  # the part of a rank's memory, or of its peak, that it takes, from 0 to 1
    gain_s: float | None = None  # seconds a step that the change is simulated to gain


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A change that was simulated."""

    change: str
    step_s: float
    gain_s: float
    command: str  # to try it


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A place where something rests, and what travels between it and the device in a step; of one rank, by state.

    States are those of `device/travel.py`, and "other", of what travels.
    """

    name: str  # "device", "CPU" or "disk"
    at_rest: Mapping[str, int]  # bytes; without what is not known
    comes: Mapping[str, float]  # bytes that come from there in a step: the mean over steps
    goes: Mapping[str, float]  # bytes that go there


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """The allocation that failed, or would soon have."""

    rank: int
    asked_bytes: int | None
    where: str  # unit and phase
    used_bytes: int
    limit_bytes: int
    by_state: Mapping[str, int]
    largest: tuple[TensorHeld, ...]
    would_fit: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, or what there is of one that still goes."""

    name: str
    facts: Mapping[str, str]  # versions, flags, seeds, topology, git commit: in the order in which they are shown
    ranks: tuple[RankFacts, ...]
    steps: NDArray[np.int64]  # the numbers of the recorded steps; shape (steps,)
    step_s: NDArray[np.float64]  # by the clock; shape (ranks, steps)
    parts_s: NDArray[np.float64]  # shape (ranks, steps, len(PARTS)); add up to `step_s`
    waited_for_s: NDArray[np.float64]  # how much later than the first rank each came to its collectives; (ranks, steps)
    busy_s: NDArray[np.float64]  # by the process's clock of the CPU, or the GPU's own time; (ranks, steps)
    units: tuple[UnitTimes, ...]
    link_gb_s: float | None  # what the link gave between two ranks when it was measured
    shown_step: int  # the number of the step of `spans`
    spans: Mapping[int, tuple[Span, ...]]  # by rank
    memory: Memory | None
    held_bytes: NDArray[np.int64]  # by the process or the allocator at the end of each step; (ranks, steps)
    shards: tuple[Shard, ...]
    training: Mapping[
        str, NDArray[np.float64]
    ]  # "loss", "bits per byte", "gradient norm", "learning rate", "tokens/s",
    # "MFU": each of shape (steps,)
    strategy: str
    settings: Mapping[str, str] = field(default_factory=dict)  # that two runs may differ in
    what_ifs: tuple[WhatIf, ...] = ()
    out_of_memory: OutOfMemory | None = None
    work: NDArray[np.float64] | None = None  # numbers that the root's forwards were given; (ranks, steps)
    starved_s: NDArray[np.float64] | None = None  # ready to run, the program had no core to run on; (ranks, steps)
    output_nbytes: int = 0  # of what the root's forward returns: logits, mostly
    host_waits: tuple[HostWait, ...] = ()
    tiers: tuple[Tier, ...] = ()  # the device first; none if nothing is away
    links_gb_s: tuple[float, ...] = ()  # as `link_gb_s`, by rank: what came to it from the rank before it
