"""The data of a run, assembled from the records of all ranks. It is the input of causes and pages.

Arrays have an axis of ranks, of steps, or both, in that order. Values are in seconds, bytes and plain numbers. Values
that were not measured are empty, None or NaN, never 0. `page.py` and `causes.py` use nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

PARTS = ("input", "forward", "backward", "gather", "reduce", "optimizer", "checkpoint", "other")
"""The parts of a step, which add up to it. `gather` and `reduce` are exposed time."""

COUNTERS: Mapping[str, str] = {
    "GPU utilization": "share",
    "GPU clock": "Hz",
    "GPU clock, at most": "Hz",
    "GPU power": "W",
    "GPU temperature": "°C",
    "GPU memory": "bytes",
    "GPU slowed by heat or supply": "share",
    "GPU at its power limit": "share",
    "CPU of this rank": "cores",
    "CPU of the host": "cores",
    "disk reads": "bytes/s",
    "disk writes": "bytes/s",
    "network received": "bytes/s",
    "network sent": "bytes/s",
    "network errors": "1/s",
    "network link": "bytes/s",
    "minor page faults": "1/s",
    "major page faults": "1/s",
    "swapped in": "bytes/s",
    "swapped out": "bytes/s",
    "stalled for memory": "share",
}
"""The hardware counters, with their units. Those of GPUs and "CPU of this rank" belong to a rank, page faults to its
process, the others to its host. "CPU of this rank" includes the processes that it starts."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """The host and device of a rank."""

    rank: int
    host: str
    device: str  # such as "cpu" or "NVIDIA H100 80GB HBM3"
    cores: int  # available to the process
    threads: int = 0  # intra-op threads of torch; 0 if unknown


@dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """The collectives of a unit per step, as means over recorded steps and ranks."""

    fqn: str  # empty for the root
    nbytes: int  # of its unsharded parameters
    trains: bool  # whether any of its parameters is trained
    gathers: float  # all-gathers per step
    gathered_bytes: float  # sent by a rank per step
    gather_s: float
    gather_exposed_s: float  # while compute, or the program, waited for them
    reductions: float
    reduced_bytes: float  # sent by a rank per step
    reduce_s: float
    reduce_exposed_s: float
    gathers_ahead: float = float("nan")  # all-gathers per step that started before they were needed
    param_dtype: str = ""  # compute dtype, such as "bfloat16"
    reduce_dtype: str = ""  # dtype of gradient sums
    recomputed: bool = False  # whether backward recomputes its forward


@dataclass(frozen=True, kw_only=True)
class HostWait:
    """Something that makes the program wait for the device or other ranks in every step: clipping, logging."""

    what: str  # such as "clipping", "logging" or "item() in train.py:41"
    waits: float  # per step: the mean over recorded steps and ranks
    waited_s: float  # in all of them, per step


@dataclass(frozen=True)
class Span:
    """Work of a stream in the displayed step. Times are seconds from the start of that step."""

    stream: str  # one of `fullshard.device.streams.STREAMS`
    name: str  # "forward", "backward", "all_gather", "wait", "optimizer", "input", ...
    unit: str  # FQN
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class OperationTime:
    """Identical operations in one step of the first rank: the same module, name and shapes."""

    part: str  # "forward", "backward", "forward again" or "optimizer"
    unit: str  # FQN
    module: str  # FQN; empty if it is unknown
    name: str  # such as "addmm"
    inputs: str  # dtypes and shapes of its first tensors
    calls: int
    seconds: float  # of all calls


@dataclass(frozen=True, kw_only=True)
class TensorHeld:
    """A tensor that was live at the peak."""

    nbytes: int
    state: str  # a value of `fullshard.plan.memory.State`
    what: str  # its owner: an FQN, or a unit and phase


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of tensors of one rank over one step, by state. The last elements are values after the step."""

    rank: int
    at_s: NDArray[np.float64]  # from the start of the step; shape (moments,)
    labels: tuple[str, ...]  # unit and phase of each moment
    by_state: Mapping[str, NDArray[np.int64]]  # by value of `State`; each of shape (moments,)
    peak: int  # the index of the largest sum
    largest: tuple[TensorHeld, ...]  # at the peak, at most ten, the largest first
    predicted: NDArray[np.int64] | None  # the sum in the trace at each moment; None if nothing was predicted
    held: int  # peak memory of the allocator, or the process, beyond tensors
    limit: int | None  # of this rank: of the device, the cgroup or the process


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A parameter, and the rows that each rank owns."""

    fqn: str
    unit: str
    shape: tuple[int, ...]
    dtype: str
    dim: int  # the sharded dim
    rows: tuple[tuple[int, int], ...]  # by rank of the shard axis: first row, and end of the rows
    packed: bool
    padding_bytes: int


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A cause of lost time or memory: the number that proves it, and a change that helps."""

    cause: str  # a short name, such as "slow input"; the same words as in the docs page
    stated: str  # one or two sentences with the number and the location: units, ranks
    change: str  # what to do: the flag, the line, the host
    lost: float  # the fraction of a step that it costs, from 0 to 1
    of_memory: float = 0.0  # the fraction of a rank's memory, or of its peak, from 0 to 1
    gain_s: float | None = None  # seconds per step that the change gains in a simulation


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A simulated change."""

    change: str
    step_s: float
    gain_s: float
    command: str  # to try it


@dataclass(frozen=True, kw_only=True)
class TierBytes:
    """The bytes in a tier, and those moved between it and the device per step; of one rank, by state.

    States are those of `device/transfers.py`, and "other" for other data.
    """

    name: str  # "device", "CPU" or "disk"
    stored: Mapping[str, int]  # bytes; without unknown values
    comes: Mapping[str, float]  # bytes copied from the tier per step: the mean over steps
    goes: Mapping[str, float]  # bytes copied to the tier


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """The allocation that failed, or would have failed soon."""

    rank: int
    requested_bytes: int | None
    where: str  # unit and phase
    used_bytes: int
    limit_bytes: int
    by_state: Mapping[str, int]
    largest: tuple[TensorHeld, ...]
    would_fit: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, possibly in progress."""

    name: str
    facts: Mapping[str, str]  # versions, flags, seeds, topology, git commit: in display order
    ranks: tuple[RankFacts, ...]
    steps: NDArray[np.int64]  # the numbers of the recorded steps; shape (steps,)
    step_s: NDArray[np.float64]  # wall time; shape (ranks, steps)
    parts_s: NDArray[np.float64]  # shape (ranks, steps, len(PARTS)); add up to `step_s`
    waited_for_s: NDArray[np.float64]  # delay at collectives after the earliest rank; (ranks, steps)
    busy_s: NDArray[np.float64]  # CPU time of the process, or busy time of the GPU; (ranks, steps)
    units: tuple[UnitTimes, ...]
    link_gb_s: float | None  # measured bandwidth between two ranks
    shown_step: int  # the number of the step of `spans`
    spans: Mapping[int, tuple[Span, ...]]  # by rank
    memory: StepMemory | None
    held_bytes: NDArray[np.int64]  # memory of the process or the allocator at the end of each step; (ranks, steps)
    shards: tuple[Shard, ...]
    training: Mapping[str, NDArray[np.float64]]  # "loss", "gradient norm", "tokens/s", ...; each of shape (steps,)
    strategy: str
    settings: Mapping[str, str] = field(default_factory=dict)  # that may differ between two runs
    what_ifs: tuple[WhatIf, ...] = ()
    out_of_memory: OutOfMemory | None = None
    work: NDArray[np.float64] | None = None  # number of elements passed to the root's forwards; (ranks, steps)
    starved_s: NDArray[np.float64] | None = None  # while ready to run but without a core; (ranks, steps)
    output_nbytes: int = 0  # bytes returned by the root's forward: mostly logits
    host_waits: tuple[HostWait, ...] = ()
    operations: tuple[OperationTime, ...] = ()  # of one step, the slowest first
    tiers: tuple[TierBytes, ...] = ()  # the device first; empty without offloading
    reports_input: bool = True  # whether the loop distinguishes input from its other code
    links_gb_s: tuple[float, ...] = ()  # by rank: the bandwidth of its fastest all-gather; empty if any is unknown
    counters: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)  # measured ones; each (ranks, steps)

    @property
    def settled(self) -> NDArray[np.bool_]:
        """A mask of the steps to average over: those that all ranks have recorded, except step 1 (if possible)."""
        known: NDArray[np.bool_] = ~np.asarray(
            np.isnan(self.parts_s).any((0, 2))
        )  # a rank may be ahead, or have failed
        later: NDArray[np.bool_] = known & (self.steps > 1)
        return later if later.any() else known
