"""The fractions of `Offload(budget=...)`, chosen at the first step of an optimizer.

[Note: the estimate of needed memory]
At that step everything except temporaries is known. The bytes of parameters, gradients and gathered parameters follow
from shapes, and the bytes of states from the optimizer. Activations were counted while they were offloaded. Temporaries
within a unit are assumed to be as large as the activations of the unit with the most activations. No number depends on
an allocator or a clock, and ranks use the maximum of each number over all ranks. So all ranks make the same decision,
in every run. A rank needs the larger of

    forward and backward   parameters + states + gathered + unsharded gradients + working memory
                           + activations or gradients: the larger, or both if microbatches accumulate
    the step               parameters + states + gradients + a copy of the largest of them

On the device, units that the CPU updates need a copy of their shards, no states, and the gradients of two units that
are being copied to the host. Unsharded gradients are those of four units, because those of two units are being copied
into a message.

Host memory is separate from device memory, and the kernel reports how much is available. This is the only number that
may differ between runs, and ranks use its minimum. Shards and gradients of all units are already in host memory at that
time, and so are the buffers of activations. The following are added: the states of the units that the CPU updates, two
temporaries as large as the largest gradient, and the buffers for states that pass to a disk.

When computing on the CPU, units may be on a disk, with gradients and states, and pass through buffers in parts. All
buffers are assumed to be as large as the largest. Forward and backward need buffers for the units that are read ahead,
for the gradients of two units, and for pending writes (`disk/buffers.py`). The step needs buffers for the shards and
gradients of two chunks in addition to the states, and again for pending writes.

Before that step, everything that can be offloaded is offloaded, so that any model that can fit reaches this step. Units
are on the CPU, or on the disk. Those that fit are then moved to the device, with gradients and loaded states
(`UnitShards.move_to`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._compat import FakeTensor, local_tensor
from fullshard.comm.mesh import ranks_of_this_host
from fullshard.comm.routes import collectives_for
from fullshard.device.accelerator import accelerator_for
from fullshard.disk.interface import ALIGNMENT, BUFFERS, MOST_WRITING, TensorOnDisk, aligned
from fullshard.engine import offloaded
from fullshard.engine.findings import DiskFailures
from fullshard.engine.footprint import gathered_peak, kept_between_steps
from fullshard.engine.group_plan import GroupPlan
from fullshard.engine.managed import managed_by
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.placements import open_budget, place_as_requested, units_on_disk, units_steppable_on_cpu
from fullshard.engine.registry import process_groups_along
from fullshard.engine.runtime import Runtime
from fullshard.engine.unit import Unit
from fullshard.errors import ConfigError
from fullshard.policy.offload import Offload, StatePlacement
from fullshard.policy.strategy import Placement
from fullshard.policy.tiers import Tier, least_that_fits
from fullshard.state import on_disk
from fullshard.tape.recorder import Origin, Phase

_log = logging.getLogger(__name__)
_ORIGIN = Origin("budget", Phase.STEP)
_ANY = 1 << 62  # bytes, if the available memory is unknown
_REDUCTIONS = 2  # units whose gradients are reduced at the same time


@dataclass(frozen=True)
class _UnitNeeds:
    """Bytes of one unit that a rank needs on the device without offloading, and that can be offloaded."""

    kept: int  # activations
    gradients: int
    states: int
    shards: int  # without the copy that stays on the device while the CPU steps them
    outstanding: int  # states to add to host memory if the CPU steps them: those that are not there yet
    # If its shards are on a disk:
    buffer: int = 0  # the largest buffer for shards or gradients
    chunk: int = 0  # the largest chunk of shards and gradients in memory during the step
    inseparable: int = 0  # the largest shards that must be stepped together
    reads: int = 0  # number of buffers to read all shards
    writes: int = 0  # number of buffers to write all gradients


@dataclass(frozen=True)
class _Needs:
    """Bytes that a rank needs without offloading. See [Note: the estimate of needed memory]."""

    parameters: int
    gathered: int
    whole_gradients: int
    steps_at_once: int  # 1 if an optimizer creates temporaries for all gradients together, as on an accelerator
    largest: int  # bytes of the largest gradient of a parameter
    adds_up: int  # 1 if a step has several microbatches
    steps_wholes: int  # 1 if each rank steps full parameters, with the gradients of backward
    held_whole: int  # 1 if unsharded gradients wait for a later microbatch
    reads_ahead: int  # number of units whose shards are read from a disk, or sent after a read, at the same time
    units: tuple[_UnitNeeds, ...]

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of all units."""
        return sum(unit.gradients for unit in self.units)

    @property
    def states(self) -> int:
        """Bytes of the optimizer states of all units."""
        return sum(unit.states for unit in self.units)

    @property
    def kept(self) -> int:
        """Bytes of the activations of all units."""
        return sum(unit.kept for unit in self.units)

    @property
    def working(self) -> int:
        """An estimate of the temporaries within a unit, beyond its activations."""
        return max(unit.kept for unit in self.units)

    def at_most(
        self, on_cpu: Collection[int] = (), *, gone: int = 0, buffers: int = 0, on_disk: Collection[int] = ()
    ) -> int:
        """Return the peak of the bytes needed on the device.

        Args:
            on_cpu: The indices of units that the CPU updates.
            gone: Bytes of activations that are offloaded.
            buffers: Bytes of the buffers for activations.
            on_disk: The indices of units whose shards and gradients are on a disk. Their states are still counted.
        """
        there, stored_there = [self.units[number] for number in on_cpu], [self.units[number] for number in on_disk]
        gradients = self.gradients - sum(unit.gradients for unit in (*there, *stored_there))
        stored = self.parameters - sum(unit.shards for unit in (*there, *stored_there))
        stored += self.states - sum(unit.states for unit in there) + self._passing(stored_there)
        kept = self.kept - gone + min(buffers, gone)
        both = kept + gradients if self.adds_up else max(kept, gradients)
        passes = self.gathered + self.whole_gradients + self.working + both + self._on_their_way(there)
        stepped = gradients + sum(unit.gradients for unit in stored_there)
        temporaries = 2 * (gradients if self.steps_at_once else min(self.largest, stepped))
        return stored + max(passes, gradients + temporaries)

    def _passing(self, stored_there: Sequence[_UnitNeeds]) -> int:
        """Return the bytes of the buffers for shards and gradients of units on a disk."""
        if not stored_there:
            return 0
        count, of_pass = len(stored_there), max(unit.buffer for unit in stored_there)
        reads = min(self.reads_ahead, count) * max(unit.reads for unit in stored_there)
        writes = min(_REDUCTIONS, count) * max(unit.writes for unit in stored_there)
        in_step = 2 + MOST_WRITING  # a chunk that is stepped, and the next one
        in_all = max(reads + writes + MOST_WRITING, in_step)
        of_step = max(of_pass, *(unit.chunk for unit in stored_there))
        return (in_all - in_step) * of_pass + in_step * of_step

    def states_buffers(self, numbers: Collection[int] = (), *, of: int) -> int:
        """Return the bytes of buffers for `of` bytes of states on a disk, if units `numbers` have shards there."""
        inseparable = max((self.units[number].inseparable for number in numbers), default=0)
        largest = max(self.largest, inseparable)
        blocks = 2 * BUFFERS * ALIGNMENT  # buffers are larger, to begin and end at a block boundary
        return min(of, BUFFERS * max(on_disk.CHUNK_NBYTES, on_disk.STATES * largest)) + blocks

    def on_host(self, on_cpu: Collection[int], *, passing: int = 0) -> int:
        """Return the bytes that will be added to host memory.

        Args:
            on_cpu: The indices of units that the CPU updates.
            passing: Bytes of the states of other units that go to a disk.
        """
        states = sum(self.units[number].outstanding for number in on_cpu)
        temporaries = 2 * self.largest if on_cpu else 0
        return states + temporaries + (self.states_buffers(of=passing) if passing else 0)

    def _on_their_way(self, units: Sequence[_UnitNeeds]) -> int:
        """Return the peak bytes of gradients on the device that are being copied to the CPU, which updates `units`."""
        gradients = sorted(unit.gradients for unit in units)
        if not self.steps_wholes:
            return sum(gradients[-2:])
        return sum(gradients) + sum(gradients[-2:]) if self.held_whole else sum(gradients[-4:])

    def over_all_ranks(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> _Needs:
        """Return the maximum of each number over the ranks that `groups` reach."""
        names = [field.name for field in fields(self) if field.name != "units"]
        needs = [getattr(self, name) for name in names] + [number for unit in self.units for number in astuple(unit)]
        most = iter(_over_all_ranks(needs, groups, device, dist.ReduceOp.MAX))
        common = {name: next(most) for name in names}
        width = len(fields(_UnitNeeds))
        units = tuple(_UnitNeeds(*islice(most, width)) for _ in self.units)
        return _Needs(**common, units=units)


def _over_all_ranks(
    local: Sequence[int], groups: Sequence[dist.ProcessGroup], device: torch.device, how: dist.ReduceOp.RedOpType
) -> Sequence[int]:
    """Return the maximum or minimum of each number over the ranks that `groups` reach: a collective."""
    numbers = torch.tensor(local, dtype=torch.int64, device=device)
    for group in groups:
        collectives_for(group, device).combine(numbers, how, origin=_ORIGIN)
    if isinstance(numbers, FakeTensor):  # a dry run, whose ranks are all like this one
        return local
    found: list[int] = numbers.tolist()
    return found


@dataclass(frozen=True)
class _Budget:
    """A budget, and the needs that it limits."""

    nbytes: int  # the maximum on the device
    policy: Offload  # the policy with the budget
    runtime: Runtime  # the runtime of all units of the model
    units: Sequence[Unit]  # the units that may be offloaded
    needs: _Needs  # the maximum over all ranks

    def number_of(self, unit: Unit) -> int:
        """Return the index of `unit` among all units, which is its index in `needs`."""
        return self.runtime.units.index(unit)

    def needs_of(self, unit: Unit) -> _UnitNeeds:
        """Return the bytes of `unit` that can be offloaded."""
        return self.needs.units[self.number_of(unit)]

    def least_that_fits(self, tiers: Sequence[Tier]) -> tuple[list[tuple[Tier, float]], int]:
        """Return the `tiers` to use, with their fractions, and the bytes that are then needed.

        The bytes exceed the budget if no choice meets it.
        """
        return least_that_fits(self.needs.at_most(), self.nbytes, tiers)


def choose_fractions(runtime: Runtime, policy: Offload, optimizer: Optimizer) -> None:
    """Choose the fractions of the budget `policy` for the units of `runtime`. This is a collective.

    Raises:
        ConfigError: Offloading everything is not enough (the message contains a sufficient budget), or host memory is
            too small for the offloaded states.
        DiskError: On some rank, a unit that is moved to memory cannot be read.
    """
    nbytes = policy.budget_bytes
    assert nbytes is not None
    needs = _needs(runtime, optimizer).over_all_ranks(process_groups_along(runtime.units), runtime.units[0].device)
    units = [unit for unit in runtime.units if open_budget(unit) == policy]
    budget = _Budget(nbytes, policy, runtime, units, needs)
    has_streams = accelerator_for(units[0].device).has_streams
    chosen, least = _chosen_alongside(budget) if has_streams else _chosen_on_cpu(budget)
    if least > nbytes:
        raise _too_small(budget, least)
    decided = _decided(policy, chosen)
    for unit in units:
        unit.shards.offload_as(decided)
    _move(runtime, units, decided)
    on_disk.choose_chunks_again(units)
    runtime.activations.choose_again()
    if dist.get_rank() == 0:
        stated = [f"{fraction:.0%} of {tier.what} to {tier.where}" for tier, fraction in chosen]
        _log.info(
            "budget of %d bytes: %d bytes are needed without offloading, %d with the chosen placement: %s.",
            nbytes,
            needs.at_most(),
            least,
            ", ".join(stated) or "nothing is offloaded",
        )


def _decided(policy: Offload, chosen: Iterable[tuple[Tier, float]]) -> Offload:
    """Return `policy` with the `chosen` fractions instead of its budget."""
    fractions: dict[str, dict[str, float]] = {"optimizer": {}, "activations": {}, "parameters": {}}
    for tier, fraction in chosen:
        fractions[tier.what][tier.where] = min(fraction, 1 - sum(fractions[tier.what].values()))
    return replace(policy, budget=None, **fractions)  # type: ignore[arg-type]  # the names are those of tiers


def _move(runtime: Runtime, units: Sequence[Unit], decided: Offload) -> None:
    """Move `units` to their tiers in `decided`. This is a collective if any of them is read from a disk."""
    if not any(unit.shards.is_on_disk for unit in units):
        place_as_requested(units, decided)
        return
    failures, device = DiskFailures(), units[0].device
    with failures.noted():
        place_as_requested(units, decided)
    failures.raise_on_every_rank(process_groups_along(runtime.units), device)


def _needs(runtime: Runtime, optimizer: Optimizer) -> _Needs:
    units, placements = runtime.units, runtime.units[0].options.placements
    size = units[0].axes.group_size
    here = [_plan_on_device(unit, param_group) for unit in units for param_group in unit.param_groups]
    whole = sorted((unit.unsharded_nbytes for unit in units), reverse=True)
    if steps_wholes := placements.optimizer is Placement.WHOLE:
        whole = []
    stepped = [local_tensor(param).nbytes for unit in units if _is_stepped_here(unit) for param in _trained(unit)]
    return _Needs(
        parameters=sum(plan.stored_nbytes for plan in here if not plan.memory.offloaded)
        + sum(plan.copy_nbytes for plan in here)
        + kept_between_steps(units, size, placements),
        gathered=0 if all(unit.keeps_unsharded for unit in units) else gathered_peak(units, size, placements),
        whole_gradients=sum(whole if runtime.activations.held_whole else whole[:2]),
        steps_at_once=int(accelerator_for(units[0].device).has_streams),
        largest=max(stepped, default=0),
        adds_up=int(runtime.activations.backwards > 1),
        steps_wholes=int(steps_wholes),
        held_whole=int(runtime.activations.held_whole),
        reads_ahead=1 + max(unit.options.prefetch_depth for unit in units),
        units=tuple(_needs_of(unit, runtime, optimizer) for unit in units),
    )


def _needs_of(unit: Unit, runtime: Runtime, optimizer: Optimizer) -> _UnitNeeds:
    """Return the bytes of `unit` that can be offloaded. States that the CPU already updates by policy count as 0."""
    each = [(param, local_tensor(param).nbytes) for param in _trained(unit)] if _is_stepped_here(unit) else []
    here = [_plan_on_device(unit, param_group) for param_group in unit.param_groups]
    there = [replace(plan, memory=unit.shards.memory_at(StatePlacement.STEPPED_ON_CPU)) for plan in here]
    return _UnitNeeds(
        kept=runtime.activations.most_kept[unit],
        gradients=sum(nbytes for _, nbytes in each),
        states=sum(_values(optimizer, param) * nbytes for param, nbytes in each),
        shards=sum(plan.stored_nbytes for plan in here) - sum(plan.copy_nbytes for plan in there),
        outstanding=sum(
            max(0, _values(optimizer, param) * nbytes - _on_host(optimizer, param)) for param, nbytes in each
        ),
        **_passing_of(unit),
    )


def _passing_of(unit: Unit) -> dict[str, int]:
    """Return the sizes of the buffers that `unit`, whose shards are on a disk, needs."""
    if not (unit.shards.is_on_disk and unit.params):
        return {}
    shards, gradients, inseparable = [], [], 0
    for param_group in unit.param_groups:
        layout, contract = param_group.plan.layout, param_group.plan.contract
        shards.append(aligned(layout.shard_numel * contract.stored.itemsize))
        if param_group.is_trained:
            gradients.append(aligned(layout.shard_numel * contract.delivered.itemsize))
            numel = max(layout.pack_numel, *(item.spec.part_numel for item in layout.in_place), 0)
            inseparable = max(inseparable, aligned(numel * max(contract.stored.itemsize, contract.delivered.itemsize)))
    # Per element, a chunk has the states, the shard and the gradient. Shards in place have 16 KiB or more, and are
    # rounded up to whole blocks of the disk, which are 4 KiB.
    of_each = max(on_disk.CHUNK_NBYTES // (on_disk.STATES + 2) * 5 // 4, inseparable)
    return {
        "buffer": max(shards + gradients),
        "chunk": min(sum(shards + gradients), 2 * of_each),
        "inseparable": inseparable,
        "reads": len(shards),
        "writes": len(gradients),
    }


def _is_stepped_here(unit: Unit) -> bool:
    """Return True if the device that computes updates `unit`, or would do so without offloading."""
    return open_budget(unit) is not None or not unit.shards.is_offloaded


def _plan_on_device(unit: Unit, param_group: ParamGroup) -> GroupPlan:
    """Return the plan of `param_group` without offloading."""
    plan: GroupPlan = param_group.plan
    return (
        plan
        if open_budget(unit) is None
        else plan.changed(plan.contract, plan.device, unit.shards.memory_at(StatePlacement.DEVICE))
    )


def _trained(unit: Unit) -> list[nn.Parameter]:
    return [param.sharded for param in unit.params if param.sharded.requires_grad]


def _values(optimizer: Optimizer, param: nn.Parameter) -> int:
    """Return the number of state values per element of `param`; AdamW's if the optimizer does not have `param`."""
    group = next(
        (
            param_group
            for param_group in optimizer.param_groups
            if any(param is other for other in param_group["params"])
        ),
        None,
    )
    if group is None:
        return on_disk.STATES
    if "amsgrad" in group:
        return on_disk.STATES + bool(group["amsgrad"])
    name = type(optimizer).__name__
    if name == "SGD":
        return int(group["momentum"] != 0)
    if name == "RMSprop":
        return 1 + int(group["momentum"] != 0) + int(group["centered"])
    return {"Muon": 1, "Adagrad": 1, "ASGD": 1}.get(name, on_disk.STATES)


def _on_host(optimizer: Optimizer, param: nn.Parameter) -> int:
    """Return the bytes of the loaded states of `param` that are in host memory, together with its shard."""
    managed = managed_by(param)
    if managed is None or not managed.unit.shards.is_offloaded:
        return 0
    memory_of = accelerator_for(managed.unit.device).memory_of
    states = (value._local_tensor for value in optimizer.state.get(param, {}).values() if isinstance(value, DTensor))
    in_memory = (local for local in states if not isinstance(local, TensorOnDisk))
    return sum(local.nbytes for local in in_memory if memory_of(local) == memory_of(managed.param.local))


# -- computing on the CPU ---------------------------------------------------------------------------------------------


def _chosen_on_cpu(budget: _Budget) -> tuple[list[tuple[Tier, float]], int]:
    """Return the result of `least_that_fits` when computing on the CPU."""
    disk = [] if budget.policy.folder is None else [_states_on_disk(budget)]
    kept = [] if budget.policy.activations_tier == "cpu" else [_activations(budget)]
    shards = [_shards_on_disk(budget, disk + kept)] if units_on_disk(budget.units) else []
    chosen, least = budget.least_that_fits(disk + kept + shards)
    if any(tier.what == "parameters" for tier, _ in chosen):  # [Note: shards go last]
        chosen = [*((tier, 1.0) for tier in disk + kept), chosen[-1]]
    return chosen, least


def _states_on_disk(budget: _Budget, on_cpu: Collection[int] = ()) -> Tier:
    """Return the tier of the optimizer's states on disk, for all units except those with indices in `on_cpu`."""
    sizes = {unit: sum(param.nbytes for param in _trained(unit)) for unit in reversed(budget.units)}
    remaining = {unit: size for unit, size in sizes.items() if size and budget.number_of(unit) not in on_cpu}
    states = sum(budget.needs_of(unit).states for unit in remaining)
    steps, taken = [], 0
    for size in remaining.values():
        taken += size
        nbytes = states * taken // sum(remaining.values())
        steps.append((taken / sum(sizes.values()), nbytes - budget.needs.states_buffers(of=nbytes)))
    return Tier(what="optimizer", where="disk", steps=steps)


def _shards_on_disk(budget: _Budget, before: Sequence[Tier]) -> Tier:
    """Return the tier of shards and their gradients on disk, given that everything in `before` is offloaded.

    [Note: shards go last]
    All states and activations are offloaded before any shards, even if this does not reduce the peak of memory by
    itself: buffers for states are needed in any case, and the peak may be at another time after shards are offloaded.
    """
    needs, total = budget.needs, sum(unit.whole_nbytes for unit in budget.units)
    gone = sum(budget.needs_of(unit).kept for unit in budget.units)
    needed = needs.at_most() - sum(max((freed for _, freed in tier.steps), default=0) for tier in before)
    steps, taken, numbers = [], 0, []
    for unit in units_on_disk(budget.units):
        taken += unit.whole_nbytes
        numbers.append(budget.number_of(unit))
        then = needs.at_most(gone=gone, buffers=2 * offloaded.WINDOW_BYTES, on_disk=numbers)
        then -= needs.states - needs.states_buffers(numbers, of=needs.states)
        steps.append((taken / total, needed - then))
    return Tier(what="parameters", where="disk", steps=steps)


# -- computing on an accelerator --------------------------------------------------------------------------------------


def _chosen_alongside(budget: _Budget) -> tuple[list[tuple[Tier, float]], int]:
    """Return the result of `least_that_fits` when computing on an accelerator. This is a collective.

    [Note: states that do not fit in host memory]
    First, states are assigned to the CPU without a limit. If host memory is too small for this, the CPU updates only as
    many units as fit, and the states of the others pass through host memory to the disk, if there is a folder. Their
    shards and gradients stay on the device. Host memory that these have used still counts, because torch does
    not return page-locked memory to the system.

    Raises:
        ConfigError: The budget is sufficient, but host memory is not.
    """
    numbers = [budget.number_of(unit) for unit in units_steppable_on_cpu(budget.units)]
    chosen, least = budget.least_that_fits(_tiers_alongside(budget, numbers))
    room, requested = _room_on_host(budget.runtime.units), budget.needs.on_host(numbers[: _count_on_cpu(chosen)])
    if requested > room:
        would_do = least <= budget.nbytes
        chosen, least = _chosen_with_room(budget, numbers, room)
        if would_do and least > budget.nbytes:
            raise _host_too_small(budget.policy, requested, room, least)
    return chosen, least


def _chosen_with_room(budget: _Budget, numbers: Sequence[int], room: int) -> tuple[list[tuple[Tier, float]], int]:
    """Like `_chosen_alongside`, with at most `room` more bytes in host memory."""
    found = []
    for to_disk in (True, False) if budget.policy.folder is not None else (False,):
        fitting = _that_fit(budget.needs, numbers, room, to_disk=to_disk)
        if fitting is not None:
            found.append(budget.least_that_fits(_tiers_alongside(budget, fitting, to_disk=to_disk)))
    return next((item for item in found if item[1] <= budget.nbytes), min(found, key=lambda item: item[1]))


def _room_on_host(units: Sequence[Unit]) -> int:
    """Return the bytes of host memory that every rank can still allocate: the minimum over all ranks."""
    device, groups = units[0].device, process_groups_along(units)
    room = accelerator_for(device).host_room(min(ranks_of_this_host(), dist.get_world_size()))
    return _over_all_ranks([_ANY if room is None else max(0, room)], groups, device, dist.ReduceOp.MIN)[0]


def _that_fit(needs: _Needs, numbers: Sequence[int], room: int, *, to_disk: bool) -> Sequence[int] | None:
    """Return the longest prefix of the units `numbers` whose states fit in `room` bytes.

    With `to_disk`, the states of the other units are on disk. Return None if the buffers for them do not fit.
    """
    states = [needs.units[number].states for number in numbers]
    passing = [sum(states[count:]) if to_disk else 0 for count in range(len(numbers) + 1)]
    fit = [count for count, nbytes in enumerate(passing) if needs.on_host(numbers[:count], passing=nbytes) <= room]
    return numbers[: max(fit)] if fit else None


def _count_on_cpu(chosen: Iterable[tuple[Tier, float]]) -> int:
    """Return the number of units that the CPU updates with the `chosen` fractions."""
    tiers = ((tier, fraction) for tier, fraction in chosen if (tier.what, tier.where) == ("optimizer", "cpu"))
    return sum([share for share, _ in tier.steps].index(fraction) + 1 for tier, fraction in tiers)


def _tiers_alongside(budget: _Budget, numbers: Sequence[int], *, to_disk: bool = False) -> list[Tier]:
    """Return the tiers, cheapest first: states of the units `numbers` on the CPU, and of other units `to_disk`."""
    states = _states_on_cpu(budget, numbers)
    most = max((freed for _, freed in states.steps), default=0)
    there = numbers[: next((count for count, (_, freed) in enumerate(states.steps, 1) if freed == most > 0), 0)]
    disk = [_states_on_disk(budget, there)] if to_disk else []
    return [states, *disk, _activations(budget, there)]


def _states_on_cpu(budget: _Budget, numbers: Sequence[int]) -> Tier:
    needs, total = budget.needs, sum(unit.trained_nbytes for unit in budget.units)
    steps, taken = [], 0
    for count, number in enumerate(numbers, 1):
        taken += budget.runtime.units[number].trained_nbytes
        steps.append((taken / total, needs.at_most() - needs.at_most(numbers[:count])))
    return Tier(what="optimizer", where="cpu", steps=steps)


# -- on any device ----------------------------------------------------------------------------------------------------


def _activations(budget: _Budget, on_cpu: Collection[int] = ()) -> Tier:
    """Return the tier of activations, given that the CPU updates the units with indices in `on_cpu`."""
    needs, ordered = budget.needs, sorted(budget.units, key=lambda unit: unit.is_root)
    steps, taken = [], 0
    for number, unit in enumerate(ordered, 1):
        taken += budget.needs_of(unit).kept
        freed = needs.at_most(on_cpu) - needs.at_most(on_cpu, gone=taken, buffers=2 * offloaded.WINDOW_BYTES)
        steps.append((number / len(ordered), freed))
    return Tier(what="activations", where=budget.policy.activations_tier, steps=steps)


def _too_small(budget: _Budget, least: int) -> ConfigError:
    needs, policy = budget.needs, budget.policy
    remedies = [f"Give budget={least}", "shard over more ranks", "use smaller microbatches, or recompute blocks"]
    remedies += _remedies(policy, budget.units)
    return ConfigError(
        f"Offload(budget={policy.budget!r}): a rank needs at least {least} bytes with everything offloaded "
        f"({needs.at_most()} with nothing offloaded): {needs.parameters} of parameters, {needs.gradients} of "
        f"gradients, {needs.states} of states, {needs.gathered} gathered, {needs.kept} saved for backward, "
        f"{needs.working} for temporary tensors. {', '.join(remedies[:-1])}; or {remedies[-1]}."
    )


def _host_too_small(policy: Offload, requested: int, room: int, least: int) -> ConfigError:
    folder = ["Pass a folder on a disk, so that states can also be stored there"] if policy.folder is None else []
    remedies = [*folder, f"give budget={least}", "free host memory", "shard over more hosts"]
    stated = f"{', '.join(remedies[:-1])}; or {remedies[-1]}."
    return ConfigError(
        f"Offload(budget={policy.budget!r}): the optimizer states that must be on the CPU need {requested} more bytes "
        f"of host memory per rank, but {room} are available. {stated[0].upper()}{stated[1:]}"
    )


def _remedies(policy: Offload, units: Sequence[Unit]) -> list[str]:
    """Return advice on other options that would offload more of `units`."""
    options = units[0].options
    if accelerator_for(units[0].device).has_streams or units_on_disk(units):
        return []
    if policy.folder is None:
        return ["pass a folder on a disk, so that the optimizer state can be there"]
    if options.placements.parameters is Placement.WHOLE:
        return ["choose a strategy that shards parameters, such as 'zero3', so that they can be on the disk"]
    if options.precision.reduce_wire is not None:
        return ["leave reduce_wire out, so that parameters can be on the disk"]
    return []
