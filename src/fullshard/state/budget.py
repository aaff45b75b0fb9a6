"""The fractions of `Offload(budget=...)`: decided at the first step of an optimizer, by what is known then.

[Note: what a budget goes by]
At that step everything is known but temporaries: bytes of parameters, of gradients and of what is gathered follow from
shapes; those of states from the optimizer; and what forward keeps was counted, storage by storage, while it travelled.
What is computed within a unit beyond what it keeps is taken to be as much as the unit keeps that keeps most. Nothing
here is measured by an allocator or a clock, and ranks take the largest of each number over all of them: so all decide
alike, in every run alike. A rank needs the more of

    forward and backward   parameters + states + gathered + whole gradients + working memory
                           + what is kept and gradients: the larger, or both if microbatches add up
    the step               parameters + states + gradients + a copy of the largest of them

Of units that the CPU steps beside the device, a copy of the shards is left of parameters, and no states; of gradients,
what is on its way down: those of two units. Whole ones, of four: two are copied into a message meanwhile.

The CPU beside the device has a memory of its own, with as much room as the kernel says: the one number that may differ
from run to run, and of which ranks take the least. Shards and gradients of all units are there by then, and so are the
buffers of what forward keeps. What comes are states of the units that it steps, two temporaries as large as the largest
gradient, and the buffers through which states of others pass to a disk.

Where the CPU computes, units may rest on a disk, with gradients and states. Then parts of them pass through buffers,
all of which are taken to be as large as the largest. In forward and backward there are those of the units that are read
ahead, of the gradients of two units, and as many as may still be written (`disk/buffers.py`). In the step there are
those of two portions, of shards and gradients beside the states, and again what is written.

Before it, all is away that can be, so that a model which fits at all comes so far: units rest on the CPU beside the
device, or on the disk, and those that fit come to the device then, with gradients, and with states that were loaded
(`Unit.move_to`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import islice
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._compat import FakeTensor, local_tensor, set_local_tensor
from fullshard.comm.mesh import ranks_of_this_host
from fullshard.comm.routes import collectives_for
from fullshard.device.accelerator import accelerator_for
from fullshard.disk.buffers import MOST_WRITING
from fullshard.disk.files import ALIGNMENT, aligned
from fullshard.disk.tensors import OnDisk
from fullshard.engine import offloaded
from fullshard.engine.findings import DiskFailures
from fullshard.engine.footprint import gathered_peak, kept_between_steps
from fullshard.engine.group_plan import GroupPlan
from fullshard.engine.managed import in_model_order, managed_by
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.placements import on_disk_in_turn, place_as_requested, stepped_on_cpu_in_turn
from fullshard.engine.registry import process_groups_along
from fullshard.engine.runtime import Runtime, runtime_or_none
from fullshard.engine.unit import Unit
from fullshard.errors import ConfigError
from fullshard.policy.offload import Offload, StatePlacement
from fullshard.policy.strategy import Placement
from fullshard.policy.tiers import Tier, least_that_fits
from fullshard.state import on_disk
from fullshard.tape.recorder import Origin, Phase

__all__ = ["choose_for_budget"]

_log = logging.getLogger(__name__)
_ORIGIN = Origin("budget", Phase.STEP)
_ANY = 1 << 62  # bytes, where nobody can tell how many there are
_REDUCTIONS = 2  # units whose gradients are reduced at once
_observed: WeakSet[Optimizer] = WeakSet()


def choose_for_budget(optimizer: Optimizer) -> None:
    """Choose the fractions of a budget, if units of `optimizer`, which is about to step, have one: a collective then.

    Not within a backward, whose hooks may step, if any could move: all stays away then.

    Raises:
        ConfigError: nothing that can be away is enough. The budget that would do is named. Or the host's memory has no
            room for what would have to be there. Or units have several budgets.
        DiskError: on some rank, what is to be in memory again cannot be read.
    """
    if optimizer in _observed:
        return
    params = in_model_order([param for group in optimizer.param_groups for param in group["params"]])
    units = dict.fromkeys(managed.unit for param in params if (managed := managed_by(param)) is not None)
    runtimes = dict.fromkeys(runtime_or_none(unit) for unit in units)
    if None in runtimes:  # nothing has run: there is nothing to go by
        return
    if any(runtime is not None and _is_in_backward(runtime) for runtime in runtimes):
        return
    for runtime in runtimes:
        assert runtime is not None
        policies = [policy for unit in runtime.units if (policy := _open(unit)) is not None]
        if any(policy != policies[0] for policy in policies):
            raise ConfigError(
                f"budgets of {' and '.join(dict.fromkeys(repr(policy.budget) for policy in policies))} "
                "for units of one model: "
                "a budget is of all that a rank has. Give all of these units the same policy."
            )
        if policies:
            _choose(runtime, policies[0], optimizer)
    _bring_alongside(optimizer, params)
    _observed.add(optimizer)


def _is_in_backward(runtime: Runtime) -> bool:
    """True if an optimizer that steps now does so within a backward, and units would move that it needs."""
    is_elsewhere = (unit.is_on_disk or unit.is_on_cpu for unit in runtime.units if _open(unit) is not None)
    return runtime.phase is Phase.BACKWARD and any(is_elsewhere)


def _open(unit: Unit) -> Offload | None:
    """The policy of `unit`, if it is a budget for which nothing has been chosen."""
    policy = unit.options.offload
    return policy if isinstance(policy, Offload) and policy.budget is not None else None


@dataclass(frozen=True)
class _UnitNeeds:
    """Bytes of one unit that a rank needs on the device if nothing is away, as far as they can be elsewhere."""

    kept: int  # by forward for backward
    gradients: int
    states: int
    shards: int  # beyond the copy of them that stays on the device while the CPU steps them
    outstanding: int  # of states, in the host's memory once the CPU beside the device steps them
    # Where its shards rest on a disk:
    buffer: int = 0  # the largest that some of them, or their gradients, pass through
    chunk: int = 0  # the most of both that is in memory while it is stepped
    inseparable: int = 0  # shards that are stepped as one
    reads: int = 0  # how many buffers a read of all of it takes
    writes: int = 0  # and one of its gradients


@dataclass(frozen=True)
class _Needs:
    """Bytes that a rank needs if nothing is away. See [Note: what a budget goes by]."""

    parameters: int
    gathered: int
    whole_gradients: int
    steps_at_once: int  # 1 if an optimizer makes temporaries of all gradients at once, as on an accelerator
    largest: int  # gradient of a parameter
    adds_up: int  # 1 if a step has several microbatches
    steps_wholes: int  # 1 if each rank steps whole parameters, whose gradients are no others than those of backward
    held_whole: int  # 1 if whole gradients wait for a later microbatch
    reads_ahead: int  # units whose shards are read from a disk, or were and are still sent, at once
    units: tuple[_UnitNeeds, ...]

    @property
    def gradients(self) -> int:
        """Of all units."""
        return sum(unit.gradients for unit in self.units)

    @property
    def states(self) -> int:
        """Of all units."""
        return sum(unit.states for unit in self.units)

    @property
    def kept(self) -> int:
        """By forward for backward, of all units."""
        return sum(unit.kept for unit in self.units)

    @property
    def working(self) -> int:
        """What is computed within a unit beyond what it keeps, as far as that can be told."""
        return max(unit.kept for unit in self.units)

    def at_most(
        self, on_cpu: Collection[int] = (), *, gone: int = 0, buffers: int = 0, on_disk: Collection[int] = ()
    ) -> int:
        """Bytes that are needed on the device at once.

        Args:
            on_cpu: the numbers of units that the CPU beside it steps.
            gone: how much of what forward keeps is away.
            buffers: for that.
            on_disk: the numbers of units whose shards and gradients rest on a disk. States are counted all the same.
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
        """Bytes of the buffers through which shards and gradients of units pass that rest on a disk."""
        if not stored_there:
            return 0
        count, of_pass = len(stored_there), max(unit.buffer for unit in stored_there)
        reads = min(self.reads_ahead, count) * max(unit.reads for unit in stored_there)
        writes = min(_REDUCTIONS, count) * max(unit.writes for unit in stored_there)
        in_step = 2 + MOST_WRITING  # a portion that is stepped, and the next one
        in_all = max(reads + writes + MOST_WRITING, in_step)
        of_step = max(of_pass, *(unit.chunk for unit in stored_there))
        return (in_all - in_step) * of_pass + in_step * of_step

    def states_buffers(self, numbers: Collection[int] = (), *, of: int) -> int:
        """Bytes of the buffers for so many bytes of states on a disk, if shards of the units of `numbers` are there."""
        inseparable = max((self.units[number].inseparable for number in numbers), default=0)
        largest = max(self.largest, inseparable)
        blocks = 2 * on_disk.BUFFERS * ALIGNMENT  # that buffers are larger, to begin and to end with one
        return min(of, on_disk.BUFFERS * max(on_disk.CHUNK_NBYTES, on_disk.STATES * largest)) + blocks

    def on_host(self, on_cpu: Collection[int], *, passing: int = 0) -> int:
        """Bytes that are to come to the host's memory beside the device.

        Args:
            on_cpu: the numbers of units that the CPU there steps.
            passing: of the states of others, those that go to a disk.
        """
        states = sum(self.units[number].outstanding for number in on_cpu)
        temporaries = 2 * self.largest if on_cpu else 0
        return states + temporaries + (self.states_buffers(of=passing) if passing else 0)

    def _on_their_way(self, units: Sequence[_UnitNeeds]) -> int:
        """Gradients of `units`, which the CPU steps, that are on the device at once until they have come down."""
        gradients = sorted(unit.gradients for unit in units)
        if not self.steps_wholes:
            return sum(gradients[-2:])
        return sum(gradients) + sum(gradients[-2:]) if self.held_whole else sum(gradients[-4:])

    def over_all_ranks(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> _Needs:
        """The largest of each number over the ranks that `groups` reach."""
        names = [field.name for field in fields(self) if field.name != "units"]
        own_part = [getattr(self, name) for name in names] + [number for unit in self.units for number in astuple(unit)]
        most = iter(_over_all_ranks(own_part, groups, device, dist.ReduceOp.MAX))
        common = {name: next(most) for name in names}
        width = len(fields(_UnitNeeds))
        units = tuple(_UnitNeeds(*islice(most, width)) for _ in self.units)
        return _Needs(**common, units=units)


def _over_all_ranks(
    own_part: Sequence[int], groups: Sequence[dist.ProcessGroup], device: torch.device, how: dist.ReduceOp.RedOpType
) -> Sequence[int]:
    """The largest, or the least, of each number over the ranks that `groups` reach: a collective."""
    numbers = torch.tensor(own_part, dtype=torch.int64, device=device)
    for group in groups:
        collectives_for(group, device).combine(numbers, how, origin=_ORIGIN)
    if isinstance(numbers, FakeTensor):  # a dry run, whose ranks are all like this one
        return own_part
    found: list[int] = numbers.tolist()
    return found


@dataclass(frozen=True)
class _Budget:
    """What is to be kept within, and of what.

    Args:
        nbytes: on the device, at most.
        policy: that says so.
        runtime: of all units of the model.
        units: those of them that may be elsewhere.
        needs: of all ranks.
    """

    nbytes: int
    policy: Offload
    runtime: Runtime
    units: Sequence[Unit]
    needs: _Needs

    def number_of(self, unit: Unit) -> int:
        """Its place among all units, and so in `needs`."""
        return self.runtime.units.index(unit)

    def needs_of(self, unit: Unit) -> _UnitNeeds:
        """What of it can be elsewhere."""
        return self.needs.units[self.number_of(unit)]

    def least_that_fits(self, tiers: Sequence[Tier]) -> tuple[list[tuple[Tier, float]], int]:
        """Those of `tiers` that are used, with their fractions; and the bytes that are needed then, which are more than
        the budget if no less will do.
        """
        return least_that_fits(self.needs.at_most(), self.nbytes, tiers)


def _choose(runtime: Runtime, policy: Offload, optimizer: Optimizer) -> None:
    nbytes = policy.budget_bytes
    assert nbytes is not None
    needs = _needs(runtime, optimizer).over_all_ranks(process_groups_along(runtime.units), runtime.units[0].device)
    units = [unit for unit in runtime.units if _open(unit) == policy]
    budget = _Budget(nbytes, policy, runtime, units, needs)
    has_streams = accelerator_for(units[0].device).has_streams
    chosen, least = _chosen_alongside(budget) if has_streams else _chosen_on_cpu(budget)
    if least > nbytes:
        raise _too_small(budget, least)
    decided = _decided(policy, chosen)
    for unit in units:
        unit.offload_as(decided)
    _move(runtime, units, decided)
    on_disk.choose_chunks_again(units)
    runtime.activations.choose_again()
    if dist.get_rank() == 0:
        stated = [f"{fraction:.0%} of {tier.what} to {tier.where}" for tier, fraction in chosen]
        _log.info(
            "a budget of %d bytes, of which %d are needed if nothing is away, and %d as chosen: %s.",
            nbytes,
            needs.at_most(),
            least,
            ", ".join(stated) or "nothing is away",
        )


def _decided(policy: Offload, chosen: Iterable[tuple[Tier, float]]) -> Offload:
    """The fractions that are `chosen` in place of the budget of `policy`."""
    fractions: dict[str, dict[str, float]] = {"optimizer": {}, "activations": {}, "parameters": {}}
    for tier, fraction in chosen:
        fractions[tier.what][tier.where] = min(fraction, 1 - sum(fractions[tier.what].values()))
    return replace(policy, budget=None, **fractions)  # type: ignore[arg-type]  # the names are those of tiers


def _move(runtime: Runtime, units: Sequence[Unit], decided: Offload) -> None:
    """Have `units` rest where `decided` has them: a collective, if any of them comes from a disk.

    Raises:
        DiskError: what is there cannot be read on some rank.
    """
    if not any(unit.is_on_disk for unit in units):
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
    """What of `unit` can be elsewhere. Nothing, of states, where a policy of its own has the CPU step it already."""
    each = [(param, local_tensor(param).nbytes) for param in _trained(unit)] if _is_stepped_here(unit) else []
    here = [_plan_on_device(unit, param_group) for param_group in unit.param_groups]
    there = [replace(plan, memory=unit.memory_at(StatePlacement.STEPPED_ON_CPU)) for plan in here]
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
    """What of `unit` passes through memory while its shards rest on a disk, as they do at the moment."""
    if not (unit.is_on_disk and unit.params):
        return {}
    shards, gradients, inseparable = [], [], 0
    for param_group in unit.param_groups:
        layout, contract = param_group.plan.layout, param_group.plan.contract
        shards.append(aligned(layout.shard_numel * contract.stored.itemsize))
        if param_group.is_trained:
            gradients.append(aligned(layout.shard_numel * contract.delivered.itemsize))
            numel = max(layout.pack_numel, *(item.spec.part_numel for item in layout.in_place), 0)
            inseparable = max(inseparable, aligned(numel * max(contract.stored.itemsize, contract.delivered.itemsize)))
    # Of the values in a portion one is the shard's, and one the gradient's. Shards in place, of 16 KiB and more, are in
    # whole blocks of the disk, which are 4 KiB.
    of_each = max(on_disk.CHUNK_NBYTES // (on_disk.STATES + 2) * 5 // 4, inseparable)
    return {
        "buffer": max(shards + gradients),
        "chunk": min(sum(shards + gradients), 2 * of_each),
        "inseparable": inseparable,
        "reads": len(shards),
        "writes": len(gradients),
    }


def _is_stepped_here(unit: Unit) -> bool:
    """True if the device that computes steps `unit`, or will if nothing is chosen to be away."""
    return _open(unit) is not None or not unit.is_offloaded


def _plan_on_device(unit: Unit, param_group: ParamGroup) -> GroupPlan:
    """The plan of a group of `unit` as it is if nothing is away."""
    plan: GroupPlan = param_group.plan
    return (
        plan if _open(unit) is None else plan.changed(plan.contract, plan.device, unit.memory_at(StatePlacement.DEVICE))
    )


def _trained(unit: Unit) -> list[nn.Parameter]:
    return [param.sharded for param in unit.params if param.sharded.requires_grad]


def _values(optimizer: Optimizer, param: nn.Parameter) -> int:
    """Values that the optimizer of `param` keeps for each of its own; those of AdamW, if it is another one."""
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
    """Bytes of states of `param` that were loaded to the host's memory beside the device, where its shard is."""
    managed = managed_by(param)
    if managed is None or not managed.unit.is_offloaded:
        return 0
    memory_of = accelerator_for(managed.unit.device).memory_of
    states = (value._local_tensor for value in optimizer.state.get(param, {}).values() if isinstance(value, DTensor))
    in_memory = (local for local in states if not isinstance(local, OnDisk))
    return sum(local.nbytes for local in in_memory if memory_of(local) == memory_of(managed.param.local))


# -- where the CPU computes -------------------------------------------------------------------------------------------


def _chosen_on_cpu(budget: _Budget) -> tuple[list[tuple[Tier, float]], int]:
    """What `least_that_fits` gives where the CPU computes."""
    disk = [] if budget.policy.folder is None else [_states_on_disk(budget)]
    kept = [] if budget.policy.activations_tier == "cpu" else [_activations(budget)]
    shards = [_shards_on_disk(budget, disk + kept)] if on_disk_in_turn(budget.units) else []
    chosen, least = budget.least_that_fits(disk + kept + shards)
    if any(tier.what == "parameters" for tier, _ in chosen):  # [Note: shards go last]
        chosen = [*((tier, 1.0) for tier in disk + kept), chosen[-1]]
    return chosen, least


def _states_on_disk(budget: _Budget, on_cpu: Collection[int] = ()) -> Tier:
    """That of the optimizer's state of units, but of those whose numbers are `on_cpu`."""
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
    """That of shards, with their gradients, when all is away that `before` has.

    [Note: shards go last]
    States and what forward keeps are all away then, even where that frees nothing while shards are in memory: buffers
    for states are needed anyway, and what is the most in memory may be another moment now.
    """
    needs, total = budget.needs, sum(unit.whole_nbytes for unit in budget.units)
    gone = sum(budget.needs_of(unit).kept for unit in budget.units)
    needed = needs.at_most() - sum(max((freed for _, freed in tier.steps), default=0) for tier in before)
    steps, taken, numbers = [], 0, []
    for unit in on_disk_in_turn(budget.units):
        taken += unit.whole_nbytes
        numbers.append(budget.number_of(unit))
        then = needs.at_most(gone=gone, buffers=2 * offloaded.WINDOW_BYTES, on_disk=numbers)
        then -= needs.states - needs.states_buffers(numbers, of=needs.states)
        steps.append((taken / total, needed - then))
    return Tier(what="parameters", where="disk", steps=steps)


# -- beside an accelerator --------------------------------------------------------------------------------------------


def _chosen_alongside(budget: _Budget) -> tuple[list[tuple[Tier, float]], int]:
    """What `least_that_fits` gives beside an accelerator: a collective.

    [Note: what the host has no room for]
    States go to the CPU as if there were room for all of them. Where there is not, for what the budget asks for, only
    as many units are stepped there as the host's memory has room for, and the states of the others go through it to
    the disk, if there is a folder. Their shards and gradients stay on the device. What they took of the host's memory
    counts as taken: torch keeps page-locked memory that is given back.

    Raises:
        ConfigError: the budget would do, but for the room that the host's memory has.
    """
    numbers = [budget.number_of(unit) for unit in stepped_on_cpu_in_turn(budget.units)]
    chosen, least = budget.least_that_fits(_tiers_alongside(budget, numbers))
    room, requested = _room_on_host(budget.runtime.units), budget.needs.on_host(numbers[: _count_on_cpu(chosen)])
    if requested > room:
        would_do = least <= budget.nbytes
        chosen, least = _chosen_with_room(budget, numbers, room)
        if would_do and least > budget.nbytes:
            raise _host_too_small(budget.policy, requested, room, least)
    return chosen, least


def _chosen_with_room(budget: _Budget, numbers: Sequence[int], room: int) -> tuple[list[tuple[Tier, float]], int]:
    """As `_chosen_alongside`, where no more than `room` bytes are to come to the host's memory."""
    found = []
    for to_disk in (True, False) if budget.policy.folder is not None else (False,):
        fitting = _that_fit(budget.needs, numbers, room, to_disk=to_disk)
        if fitting is not None:
            found.append(budget.least_that_fits(_tiers_alongside(budget, fitting, to_disk=to_disk)))
    return next((item for item in found if item[1] <= budget.nbytes), min(found, key=lambda item: item[1]))


def _room_on_host(units: Sequence[Unit]) -> int:
    """Bytes that are to come to the host's memory on each rank at most: the least of all ranks'."""
    device, groups = units[0].device, process_groups_along(units)
    room = accelerator_for(device).host_room(min(ranks_of_this_host(), dist.get_world_size()))
    return _over_all_ranks([_ANY if room is None else max(0, room)], groups, device, dist.ReduceOp.MIN)[0]


def _that_fit(needs: _Needs, numbers: Sequence[int], room: int, *, to_disk: bool) -> Sequence[int] | None:
    """The first of the units of `numbers` whose states there is `room` for, while those of the others go `to_disk`;
    None if there is not even room for the buffers of these.
    """
    states = [needs.units[number].states for number in numbers]
    passing = [sum(states[count:]) if to_disk else 0 for count in range(len(numbers) + 1)]
    fit = [count for count, its in enumerate(passing) if needs.on_host(numbers[:count], passing=its) <= room]
    return numbers[: max(fit)] if fit else None


def _count_on_cpu(chosen: Iterable[tuple[Tier, float]]) -> int:
    """How many units the CPU steps then."""
    tiers = ((tier, fraction) for tier, fraction in chosen if (tier.what, tier.where) == ("optimizer", "cpu"))
    return sum([share for share, _ in tier.steps].index(fraction) + 1 for tier, fraction in tiers)


def _tiers_alongside(budget: _Budget, numbers: Sequence[int], *, to_disk: bool = False) -> list[Tier]:
    """What can be away, the cheapest first: states of the units of `numbers` on the CPU, and of others `to_disk`."""
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


# -- wherever ---------------------------------------------------------------------------------------------------------


def _activations(budget: _Budget, on_cpu: Collection[int] = ()) -> Tier:
    """That of what forward keeps, when the CPU steps the units of the numbers `on_cpu` already."""
    needs, ordered = budget.needs, sorted(budget.units, key=lambda unit: unit.state.is_root)
    steps, taken = [], 0
    for number, unit in enumerate(ordered, 1):
        taken += budget.needs_of(unit).kept
        freed = needs.at_most(on_cpu) - needs.at_most(on_cpu, gone=taken, buffers=2 * offloaded.WINDOW_BYTES)
        steps.append((number / len(ordered), freed))
    return Tier(what="activations", where=budget.policy.activations_tier, steps=steps)


def _bring_alongside(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Have states that were loaded before the homes of units were known in the memory in which they are stepped."""
    follow = {id(param) for group in optimizer.param_groups if _counts_follow(group) for param in group["params"]}
    for param in params:
        managed, state = managed_by(param), optimizer.state.get(param)
        if managed is None or not state or managed.unit.is_on_disk:
            continue
        shard, accelerator = managed.param.local, accelerator_for(managed.unit.device)
        for name, value in state.items():
            if isinstance(value, DTensor) and not isinstance(value._local_tensor, OnDisk):
                set_local_tensor(value, accelerator.alongside(value._local_tensor, shard))
            elif isinstance(value, Tensor) and (value.numel() > 1 or id(param) in follow):
                state[name] = moved = accelerator.alongside(value, shard)
                vars(moved).update(vars(value))


def _counts_follow(group: Mapping[str, Any]) -> bool:
    """True if counts of steps are where the parameters of `group` are, and not on the CPU wherever these are."""
    return bool(group.get("fused") or group.get("capturable"))


def _too_small(budget: _Budget, least: int) -> ConfigError:
    needs, policy = budget.needs, budget.policy
    remedies = [f"Give budget={least}", "shard over more ranks", "compute fewer rows at a time, or blocks again"]
    remedies += _remedies(policy, budget.units)
    return ConfigError(
        f"Offload(budget={policy.budget!r}): a rank needs {least} bytes with all away that can be, of "
        f"{needs.at_most()} if nothing is: {needs.parameters} of parameters, {needs.gradients} of gradients, "
        f"{needs.states} of states, {needs.gathered} gathered, {needs.kept} kept for backward, {needs.working} to work "
        f"in. {', '.join(remedies[:-1])}; or {remedies[-1]}."
    )


def _host_too_small(policy: Offload, requested: int, room: int, least: int) -> ConfigError:
    folder = ["Name a folder on a disk, where states can be, too"] if policy.folder is None else []
    remedies = [*folder, f"give budget={least}", "free memory of the host", "shard over more hosts"]
    stated = f"{', '.join(remedies[:-1])}; or {remedies[-1]}."
    return ConfigError(
        f"Offload(budget={policy.budget!r}): the optimizer's states that have to be on the CPU would take {requested} "
        "more "
        f"bytes of the host's memory on each rank, and a rank may take {room} more. {stated[0].upper()}{stated[1:]}"
    )


def _remedies(policy: Offload, units: Sequence[Unit]) -> list[str]:
    """What else would have more of `units` away."""
    options = units[0].options
    if accelerator_for(units[0].device).has_streams or on_disk_in_turn(units):
        return []
    if policy.folder is None:
        return ["name a folder on a disk, where the optimizer's state can be"]
    if options.placements.parameters is Placement.WHOLE:
        return ["choose a strategy that shards parameters, such as 'zero3', so that they can be on the disk"]
    if options.precision.reduce_wire is not None:
        return ["leave reduce_wire out, so that parameters can be on the disk"]
    return []
