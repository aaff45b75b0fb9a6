"""The predicted memory and step time of a run, from the trace of a dry run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import dry
from fullshard.errors import ConfigError
from fullshard.plan.allocator import TapeAllocator, allocator_use
from fullshard.plan.costs import costs_of
from fullshard.plan.fusion import fused
from fullshard.plan.hardware import Hardware
from fullshard.plan.memory import MemoryPeak, State, memory_curve, memory_peak, memory_turns
from fullshard.plan.operations import unknown_seconds
from fullshard.plan.process import compute_dtype, process_memory, threshold_set
from fullshard.plan.timeline import Timeline, lay_out
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import Collective, Entry, Operation, Recorded, Tape

COMPUTE = "compute"


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for one rank of a run, derived from its trace."""

    hardware: Hardware
    world: int
    peak: MemoryPeak  # the peak of live tensors once the model is sharded, including the first step
    most_by_state: Mapping[State, int]  # the peak bytes of each state. The peaks occur at different times
    reserved_bytes: int  # the peak memory of an accelerator's caching allocator, or of a CPU rank's process
    step: Timeline  # a step after the first, laid out in time
    flops: float  # the FLOPs of forward and backward per step on one rank, without recomputation for checkpoints
    sent_bytes: int  # the bytes that this rank passes to collectives per step
    dtype: str  # the dtype of most matrix products
    # The turns of that step that change memory, as text, with the peak bytes of each.
    turns: tuple[tuple[str, int], ...] = ()
    # The seconds of each operation that is timed by its bytes because it has no FLOP formula.
    unknown: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.step.end

    @property
    def needed_bytes(self) -> int:
        """The bytes that must fit into the memory of an accelerator, or of a process."""
        return max(self.peak.nbytes, self.reserved_bytes)

    @property
    def fits(self) -> bool:
        """True if `needed_bytes` fit into the memory."""
        return self.needed_bytes <= self.hardware.memory_bytes

    @property
    def flops_utilisation(self) -> float:
        """The model FLOPs utilization (MFU): the model's own FLOPs as a share of the peak rate.

        The definition is that of PaLM (Chowdhery et al., 2022, appendix B): recomputation for checkpoints does not
        count.
        """
        return self.flops / self.step_s / self.hardware.flops_per_s[self.dtype]

    @property
    def exposed_s(self) -> float:
        """Seconds per step during which compute waits for other ranks or for copies."""
        return self.step.exposed_s(COMPUTE)


def predict(
    make_model: Callable[..., nn.Module],
    make_batch: Callable[[], Any],
    *,
    hardware: Hardware,
    world: int,
    ranks_per_host: int | None = None,
    streams: Literal["gpu", "cpu"] | None = None,
    microbatches: int = 1,
    max_norm: float | None = None,
    make_mesh: Callable[[], DeviceMesh] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    host_bytes: int | None = None,
    compile_blocks: bool = False,
) -> Prediction:
    """Return the predicted memory and step time of a run on `world` ranks of `hardware`.

    Only the host's part of two steps is executed, on tensors without memory. Arguments are those of
    `fullshard.dry.run`. If `ranks_per_host` or `streams` is None, it follows from the hardware. With `compile_blocks`,
    the time is that of units below the root compiled by `torch.compile`; see `plan/fusion.py`.

    Raises:
        ConfigError: See `fullshard.dry.run`.
        StateError: A default process group exists in this process.
    """
    tape = dry.run(
        make_model,
        make_batch,
        world=world,
        ranks_per_host=ranks_per_host or hardware.ranks_per_host,
        make_mesh=make_mesh,
        loss=loss,
        make_optimizer=make_optimizer,
        microbatches=microbatches,
        max_norm=max_norm,
        streams=streams or ("gpu" if hardware.kind == "gpu" else "cpu"),
        host_bytes=host_bytes,
    )
    return read_off(tape, hardware, world, ranks_per_host, compile_blocks=compile_blocks)


def read_off(
    tape: Tape,
    hardware: Hardware,
    world: int,
    ranks_per_host: int | None = None,
    *,
    compile_blocks: bool = False,
) -> Prediction:
    """Return the prediction from a trace of at least two steps. By default, hosts have the size given by `hardware`."""
    begins = steps_of(tape.entries)
    if len(begins) < 2:
        raise ConfigError(
            f"a trace of {len(begins)} steps: the first step differs from later ones. Record at least two."
        )
    step, dtype = tape.entries[begins[-1] :], compute_dtype(tape.entries)
    has_streams = any(isinstance(entry, Recorded) for entry in tape.entries)
    on_host = min(world, ranks_per_host or hardware.ranks_per_host)
    if hardware.kind == "gpu":  # on a CPU, the ranks of a host share its cores
        hardware = hardware.with_hosts_of(on_host)
    costs = costs_of(hardware, dtype=dtype, ranks=on_host)
    for entry in tape.entries[: begins[-1]]:
        costs.note_before(entry)
    if has_streams:
        reserved_bytes = allocator_use(tape, since=begins[0]).reserved
    else:
        reserved_bytes = process_memory(tape, threshold=threshold_set()).nbytes
    memory = None
    if has_streams and reserved_bytes > hardware.memory_bytes:
        memory = TapeAllocator(room=hardware.memory_bytes)
        for entry in tape.entries[: begins[-1]]:
            memory.note(entry)
    timeline = lay_out(list(fused(step)) if compile_blocks else step, costs, memory)
    return Prediction(
        hardware=hardware,
        world=world,
        peak=memory_peak(tape, since=begins[0]),
        most_by_state=_most_by_state(tape, begins[0]),
        reserved_bytes=reserved_bytes,
        step=timeline,
        flops=model_flops(step),
        sent_bytes=sum(sum(item.sizes) for item in step if isinstance(item, Collective)),
        dtype=dtype,
        turns=tuple((turn.label, turn.nbytes) for turn in memory_turns(tape, since=begins[-1])),
        unknown=unknown_seconds(timeline.placed),
    )


def _most_by_state(tape: Tape, since: int) -> Mapping[State, int]:
    most = Counter[State]()
    for place, held in memory_curve(tape):
        if place >= since:
            most |= Counter(held)
    return most


def steps_of(entries: Sequence[Entry]) -> list[int]:
    """Return the indices at which steps begin: at the first forward, and at the first forward after an optimizer step.

    Optimizer work that the CPU defers to the next forward does not end a step, because no backward precedes it.
    """
    begins, stepped, has_gradients = [], True, False
    for place, entry in enumerate(entries):
        phase = entry.origin.phase
        has_gradients |= phase in (Phase.PRE_BACKWARD, Phase.BACKWARD, Phase.POST_BACKWARD)
        if phase is Phase.STEP and has_gradients:
            stepped, has_gradients = True, False
        elif stepped and phase is Phase.FORWARD:
            begins.append(place)
            stepped = False
    return begins


def model_flops(step: Sequence[Entry]) -> float:
    """Return the FLOPs of forwards, tripled for backwards: each matrix product becomes two in backward."""
    forward, backwards = 0, set[int]()  # microbatches whose backward has started: later forwards are recomputation
    for entry in step:
        origin = entry.origin
        if origin.phase in (Phase.PRE_BACKWARD, Phase.BACKWARD, Phase.POST_BACKWARD):
            backwards.add(origin.microbatch)
        if isinstance(entry, Operation) and origin.microbatch not in backwards:
            forward += entry.flops
    return 3.0 * forward
