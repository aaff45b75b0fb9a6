"""Counts of training steps of this library and of other systems, by dry runs: free of measurement noise."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.bench import peers
from fullshard import MixedPrecisionPolicy, dry, fully_shard
from fullshard.plan.costs import Costs
from fullshard.plan.timeline import Timeline, lay_out
from fullshard.tape.recorder import Origin, Phase, note_origin
from fullshard.tape.tape import HOST, Collective, Entry, Operation, Recorded, Waited

__all__ = ["SYSTEMS", "Counts", "StepTape", "Task", "cast", "plain_step", "sharded_step"]

SMALL = 10**6  # messages below this number of bytes are dominated by latency
COMPUTE, REDUCE = torch.bfloat16, torch.float32


M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and a batch.

    Args:
        make_model: Creates the unsharded model, which returns the loss of a batch.
        units: Selects the modules that are units; the rest belongs to the root.
        make_batch: Creates the batch of one rank.
        ranks_per_replica: The number of ranks that shard one replica of the model; None for all.
    """

    make_model: Callable[[], nn.Module]
    units: Callable[[nn.Module], Sequence[nn.Module]]
    make_batch: Callable[[], Tensor]
    ranks_per_replica: int | None = None


Shard = Callable[[nn.Module, DeviceMesh], object]


@dataclass(frozen=True)
class _System:
    shard: Shard
    context: Callable[[], AbstractContextManager[None]] = nullcontext


def _own(module: nn.Module, mesh: DeviceMesh) -> object:
    return fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=COMPUTE, reduce_dtype=REDUCE))


SYSTEMS = {
    "fullshard": _System(_own),
    "fsdp2": _System(peers.shard_by_fsdp2(COMPUTE, REDUCE), peers.fsdp2_on_dry_streams),
}


@dataclass(frozen=True)
class StepTape:
    """The tape of the second training step, since the order of the first is not yet known.

    `casts` has, for each unit, the bytes of this rank's shards in the compute dtype, for parameters that are stored
    with a different dtype. `grads` has the elements of all trainable parameters.
    """

    entries: list[Entry]
    peak_bytes: int  # peak bytes of live tensors on the accelerator
    casts: dict[str, int]
    grads: int
    races: int  # in both steps

    def copied_bytes(self) -> int:
        """Return the bytes that copies write."""
        return sum(access.nbytes for operation in self._operations() if operation.copies for access in operation.writes)

    def needed_copies(self) -> int:
        """Return the bytes that copies must write if the dtypes of storage, sums and compute differ.

        A cast of this rank's shards for every gather of a unit, and one of every gradient.
        """
        gathers = {
            (collective.origin.unit, collective.origin.phase)
            for collective in self._collectives()
            if "gather" in collective.name
        }
        return sum(self.casts[unit] for unit, _ in gathers) + self.grads * REDUCE.itemsize

    def counts(self, plain: StepTape) -> Counts:
        """Return the counts of the step, compared with the same step of the plain model."""
        collectives = self._collectives()
        sizes = [size for collective in collectives for size in collective.sizes]
        timeline = self.timeline()
        return Counts(
            launches=self.launches(),
            launches_beyond_plain=self.launches() - plain.launches(),
            copied_bytes=self.copied_bytes() - plain.copied_bytes() - self.needed_copies(),
            collectives=len(collectives),
            messages=len(sizes),
            sent_bytes=sum(sizes),
            small_messages=sum(sum(collective.sizes) < SMALL for collective in collectives),
            host_operations=sum(
                isinstance(entry, Operation | Collective | Recorded | Waited) for entry in self.entries
            ),
            peak_bytes=self.peak_bytes,
            exposed_s=timeline.exposed_s("compute"),
            step_s=timeline.end,
            races=self.races,
        )

    def launches(self) -> int:
        """Operations on streams of the accelerator, and collectives. A collective of several tensors is one launch."""
        return len(self._operations()) + len(self._collectives())

    def copies_by_name(self) -> Counter[str]:
        """Return the bytes that copies write, by operation, stream and phase."""
        found = Counter[str]()
        for operation in self._operations():
            if operation.copies:
                found[f"{operation.name} on {operation.stream}, {operation.origin.phase.value}"] += sum(
                    access.nbytes for access in operation.writes
                )
        return found

    def launches_by_name(self) -> Counter[str]:
        """Launches by operation and stream."""
        launched: list[Operation | Collective] = [*self._operations(), *self._collectives()]
        return Counter(f"{item.name} on {item.stream}" for item in launched)

    def timeline(self, costs: Costs | None = None) -> Timeline:
        """Return the timeline of the step."""
        return lay_out(self.entries, costs)

    def _operations(self) -> list[Operation]:
        return [entry for entry in self.entries if isinstance(entry, Operation) and entry.stream != HOST]

    def _collectives(self) -> list[Collective]:
        return [entry for entry in self.entries if isinstance(entry, Collective)]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """One step of one rank, in numbers."""

    launches: int
    launches_beyond_plain: int
    copied_bytes: int  # in addition to those of the plain model and the necessary ones
    collectives: int
    messages: int  # tensors in them
    sent_bytes: int  # input of this rank to collectives
    small_messages: int  # collectives of less than `SMALL` bytes
    host_operations: int  # operations, collectives, events and waits issued by the host
    peak_bytes: int
    exposed_s: float  # while compute waits for a collective, on the machine of `Costs`
    step_s: float
    races: int


def sharded_step(system: str, task: Task, world: int) -> StepTape:
    """Return a step of a system of `SYSTEMS` on rank 0 of `world` ranks."""
    chosen = SYSTEMS[system]
    with dry.world(world):
        mesh = _mesh_of(world, task.ranks_per_replica or world)
        with dry.taped() as tape, chosen.context():
            model = task.make_model()
            units = {
                name: module
                for name, module in model.named_modules()
                if any(module is unit for unit in task.units(model))
            }
            shards = task.ranks_per_replica or world
            casts = {name: _cast_bytes(unit.parameters(), shards) for name, unit in units.items()}
            casts[""] = _cast_bytes(model.parameters(), shards) - sum(casts.values())
            grads = sum(param.numel() for param in model.parameters() if param.requires_grad)
            for module in (*units.values(), model):
                chosen.shard(module, mesh)
            begun = _second_step(model, task, tape)
    return StepTape(tape.entries[begun:], tape.peak_bytes(since=begun), casts, grads, races=len(dry.races(tape)))


def _mesh_of(world: int, ranks_per_replica: int) -> DeviceMesh:
    if ranks_per_replica == world:
        return init_device_mesh("cpu", (world,))
    shape = world // ranks_per_replica, ranks_per_replica
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def plain_step(task: Task) -> StepTape:
    """Return a step of the plain model on one rank, fully in the compute dtype."""
    with dry.taped() as tape:
        begun = _second_step(cast(task.make_model(), COMPUTE), task, tape)
    return StepTape(tape.entries[begun:], tape.peak_bytes(since=begun), {"": 0}, 0, races=0)


def cast(module: M, dtype: torch.dtype) -> M:
    """Cast the parameters of `module` to `dtype`, which `Module.to` cannot do on fake tensors. Ties are kept."""
    made = dict[nn.Parameter, nn.Parameter]()
    for each in module.modules():
        for name, param in each.named_parameters(recurse=False):
            if param not in made:
                made[param] = nn.Parameter(param.detach().to(dtype), param.requires_grad)
            setattr(each, name, made[param])
    return module


def _second_step(model: nn.Module, task: Task, tape: dry.Tape) -> int:
    """Run two steps and return the number of entries on `tape` before the second."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], fused=True)
    for _ in range(2):
        note_origin(Origin("", Phase.IDLE))
        gc.collect()
        begun = len(tape.entries)
        model(task.make_batch()).backward()
        note_origin(Origin("", Phase.STEP))
        optimizer.step()
        optimizer.zero_grad()
    return begun


def _cast_bytes(params: Iterable[nn.Parameter], world: int) -> int:
    """Return the bytes, in the compute dtype, of this rank's shards of parameters with a different dtype."""
    return sum(-(-param.numel() // world) * COMPUTE.itemsize for param in params if param.dtype != COMPUTE)
