"""A unit: the modules whose parameters are gathered and freed together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard._compat import holds_tensors
from fullshard.comm.mesh import Axes
from fullshard.device.accelerator import accelerator_for
from fullshard.device.memory import MemoryKind, Slot
from fullshard.device.streams import Streams
from fullshard.disk.buffers import buffers_of
from fullshard.engine.at_rest import accept_calls, refuse_calls
from fullshard.engine.findings import DiskFailures
from fullshard.engine.group_plan import GroupPlan
from fullshard.engine.group_transports import AxesCollectives, GroupTransports
from fullshard.engine.managed import Managed, managed_by
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.payload_group import group_type
from fullshard.engine.reduction import UnitReduction
from fullshard.engine.residency import AT_REST, Residency, UnitState
from fullshard.engine.sharded_param import Owner, ShardedParam, Source
from fullshard.engine.unit_plans import (
    by_kind,
    check_one_dtype,
    contract_for,
    device_of,
    plan_for,
)
from fullshard.engine.unit_settings import UnitSettings
from fullshard.engine.unsharded_memory import UnshardedMemory
from fullshard.errors import ConfigError, StateError
from fullshard.policy.offload import OffloadPolicy, StatePlacement
from fullshard.policy.options import ShardOptions
from fullshard.policy.strategy import Placement
from fullshard.tape.recorder import Origin, Phase, acting_for, allocating

__all__ = ["Unit"]


class Unit:
    """The parameters of some modules, gathered and freed together. The runtime decides when.

    Args:
        modules: the modules whose forward needs them.
        sources: their parameters that no other unit has.
        borrowed: units that have parameters which are tied to some of these modules'.
        options: the user's options.
        axes: the mesh axes to shard and replicate over; a source may have others.
        device: where compute runs.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        sources: Sequence[Source],
        borrowed: Sequence[Unit],
        options: ShardOptions,
        axes: Axes,
        device: torch.device,
    ) -> None:
        self.modules = tuple(modules)
        self.module = self.modules[0]
        self.name = type(self.module).__name__  # until a root gives it its FQN
        self.borrowed = list(borrowed)
        self.options = options
        self.axes = axes
        self.device = device
        alongside = accelerator_for(device).has_streams
        self.destination = options.offload.in_full.placement_of_all(
            alongside=alongside
        )  # until the root knows all of its units
        if self.destination is StatePlacement.STEPPED_ON_CPU and not any(
            source.param.requires_grad for source in sources
        ):
            self.destination = StatePlacement.DEVICE
        if _goes_to_disk(options, sources, alongside=alongside):
            self.destination = StatePlacement.DISK
        self.settings = UnitSettings(options.reshard_after_forward)
        self.runtime: Any = None  # the `Runtime` of its root, set in the first forward
        self.number = -1  # among the units of its root
        self.is_root = False
        self.data_ranks: frozenset[int] = frozenset()  # ranks of the root: a gradient is the mean over their data
        self.arrived_grads: set[int] = set()  # parameters that have a gradient in this backward
        self.finished_modules: set[int] = set()  # whose forward is over, where the unit has several
        self.keeps_unsharded = options.keeps_unsharded  # between steps
        self.microbatch = 0  # of the step, starting with 1
        self.trainable = 0  # number of parameters that a backward computes gradients for
        self.holds_grads = False  # whole gradients wait for a later microbatch's reduction
        kinds = by_kind(sources)
        where = device_of(sources, device)
        memory = self._memory_found_on(where)
        plans = [plan_for(kind, options, where, memory) for kind in kinds]
        self.collectives = _collectives_along([axes, *(plan.axes for plan in plans)], device)
        memory_of_unsharded = UnshardedMemory(self, where, keeps=self.keeps_unsharded)
        regions = memory_of_unsharded.occupy(memory_of_unsharded.slot, plans)
        self.param_groups = [
            group_type(plan).of(kind, plan, GroupTransports.bind(plan, self.collectives[plan.axes]), region)
            for kind, plan, region in zip(kinds, plans, regions, strict=True)
        ]
        memory_of_unsharded.slot.count_references()
        self.residency = Residency(self, memory_of_unsharded)
        self.params = tuple(param for param_group in self.param_groups for param in param_group.params)
        ordered = (source for kind in kinds for source in kind)
        self._managed = [
            Managed(self, param, weakref.ref(source.param)) for source, param in zip(ordered, self.params, strict=True)
        ]
        self._register_params()
        self._leaves = _leaves_alongside(self.modules, self.params)
        self.keepers: list[nn.Module] = []  # modules whose forward may set tensors as attributes, once a root is known
        self.show_sharded()
        _made.add(self)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.params)} parameters, {self.residency.state.value})"

    def _register_params(self) -> None:
        for managed in self._managed:
            managed.register()

    # -- what it has --------------------------------------------------------------------------------------------------

    @property
    def unsharded_nbytes(self) -> int:
        """The bytes of its unsharded parameters, including gathered payloads of tensor subclasses."""
        return self.slot_nbytes + sum(param_group.separate_nbytes for param_group in self.param_groups)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of its slot that hold unsharded parameters."""
        return self.residency.memory.nbytes

    @property
    def slot(self) -> Slot:
        """The memory of its unsharded parameters, which several units may share."""
        return self.residency.memory.slot

    @property
    def is_meta(self) -> bool:
        """True if its shards have no memory yet."""
        return self.residency.state is UnitState.META

    @property
    def whole_nbytes(self) -> int:
        """Bytes of its parameters as they are stored, on all ranks of the shard axis together."""
        return sum(param.layout.spec.numel * param.sharded.itemsize for param in self.params)

    @property
    def trained_nbytes(self) -> int:
        """The bytes of those that are trainable."""
        trained = (param for param in self.params if param.sharded.requires_grad)
        return sum(param.layout.spec.numel * param.sharded.itemsize for param in trained)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether it is resharded after forward: the user's choice, else the strategy's. A root is not: its backward is
        next.
        """
        return self.frees_in_step and not (self.is_root and self.settings.reshard_after_forward is None)

    @property
    def frees_in_step(self) -> bool:
        """Whether it is freed if its backward may be far, as in a pipeline stage: the user's choice, else the
        strategy's.
        """
        choice = self.settings.reshard_after_forward
        return self.options.placements.parameters_in_step is not Placement.WHOLE if choice is None else choice

    @property
    def is_trained(self) -> bool:
        """True if any parameter is trained."""
        return any(param.sharded.requires_grad for param in self.params)

    @property
    def shard_device(self) -> torch.device:
        """The device of the shards, once they have memory."""
        return self._memory.device

    @property
    def disk_failures(self) -> list[DiskFailures]:
        """Failures of the disk that stores it, see `engine/disks.py`."""
        return [disk_failure for param_group in self.param_groups for disk_failure in param_group.disk_failures]

    def offload_as(self, policy: OffloadPolicy) -> None:
        """Offload states and activations according to `policy`, starting with the next step and forward."""
        self.options = replace(self.options, offload=policy)

    @property
    def _memory(self) -> MemoryKind:
        return self.memory_at(self.destination)

    def memory_at(self, destination: StatePlacement) -> MemoryKind:
        """Return the memory of its shards at `destination`."""
        if destination is StatePlacement.DEVICE:
            return MemoryKind(self.device)
        alongside = accelerator_for(self.device).has_streams
        if destination is StatePlacement.DISK:
            return MemoryKind(torch.device("cpu"), offloaded=alongside, pinned=alongside, folder=self._folder)
        if not alongside:
            return MemoryKind(torch.device("cpu"))
        pinned, copied = self.options.offload.in_full.pin_memory, destination is StatePlacement.STEPPED_ON_CPU
        return MemoryKind(torch.device("cpu"), offloaded=True, pinned=pinned, copied=copied)

    @property
    def is_on_cpu(self) -> bool:
        """True if shards and gradients are on the CPU, and the optimizer steps them there, wherever compute runs."""
        return self.destination in (StatePlacement.STEPPED_ON_CPU, StatePlacement.CPU)

    @property
    def is_on_disk(self) -> bool:
        """True if shards, gradients and the optimizer's state are on a disk between uses."""
        return self.destination is StatePlacement.DISK

    @property
    def is_offloaded(self) -> bool:
        """True if shards are offloaded from the device that computes."""
        return self._memory.offloaded

    def _memory_found_on(self, device: torch.device) -> MemoryKind:
        """Return the memory kind of shards on `device`, or created from tensors on it."""
        if device.type == "meta":
            return MemoryKind(device, folder=self._folder)
        return MemoryKind(device) if self.destination is StatePlacement.DEVICE else self._memory

    @property
    def _folder(self) -> Path | None:
        return self.options.offload.in_full.disk_folder if self.is_on_disk else None

    @property
    def description(self) -> str:
        """A text that is the same on all ranks: the name, and every parameter's FQN, shape and dtypes."""
        params = (
            f"{param.fqn} {tuple(param.sharded.shape)} {param_group.plan.contract}"
            + ("" if param.sharded.requires_grad else ", frozen")
            for param_group in self.param_groups
            for param in param_group.params
        )
        where = ", on a disk" if self.is_on_disk else ""
        return f"{self.name or 'the root'}{where} ({'; '.join(params)})"

    def digests(self, axes: Axes) -> list[int | None]:
        """Return digests of the initial local values, one per parameter.

        None if they are unknown or modified since, or if ranks along `axes` may have different values.
        """
        return [
            param.made_of if param_group.plan.axes == axes else None
            for param_group in self.param_groups
            for param in param_group.params
        ]

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The process groups of its parameters: the engine's, then those of the original parameters."""
        own = [group for axes in self.collectives for group in (axes.shard_group, axes.replicate_group)]
        found = [*own, *(group for param in self.params for group in param.view.process_groups)]
        return list(dict.fromkeys(group for group in found if group is not None))

    @property
    def is_broken(self) -> bool:
        """True if communication is impossible, because ranks made different calls or one was lost."""
        return any(collectives.is_broken for collectives in self.collectives.values())

    def origin(self, phase: Phase) -> Origin:
        """Return the origin of events of this unit in `phase`."""
        return Origin(self.name, phase, self.microbatch)

    # -- what modules show ---------------------------------------------------------------------------------------------

    def uses(self, unit: Unit) -> bool:
        """Return True if calls of this unit use parameters of `unit`, its own or tied ones."""
        return unit is self or unit in self.borrowed

    @property
    def has_valid_values(self) -> bool:
        """True if compute can read the unsharded parameters now."""
        return all(param_group.validity.is_valid for param_group in self.param_groups)

    @property
    def has_grads_waiting(self) -> bool:
        """True if there are gradients that an optimizer can still step with, or that wait for a reduction."""
        return self.holds_grads or any(param_group.gradients.are_waiting for param_group in self.param_groups)

    @property
    def streams(self) -> Streams:
        """The streams of the device that computes."""
        return accelerator_for(self.device).streams

    def check_replacements(self) -> None:
        """Adopt weights that were tied after sharding, and refuse parameters that were replaced by others.

        Call it while modules show sharded parameters, before these are read or written.

        Raises:
            StateError: a parameter was replaced by one that no unit has.
        """
        for param in self.params:
            for owner in param.owners:
                if owner.module._parameters.get(owner.name) is not param.sharded:
                    self._adopt_tie(param, owner)

    def refuse_replacements(self) -> None:
        """Refuse parameters that were replaced by others while modules show unsharded ones. Changes nothing.

        Raises:
            StateError: a parameter was replaced by one that no unit has.
        """
        for param in self.params:
            for owner in param.owners:
                found = owner.module._parameters.get(owner.name)
                if found is None or managed_by(found) is None:
                    param.refuse_replacement(owner)

    def _adopt_tie(self, param: ShardedParam, owner: Owner) -> None:
        """Record `owner` as an owner of the managed parameter that is now in place of `param`, and borrow its unit.

        Raises:
            StateError: it is not a managed parameter of the same shape, or it is used in another tree.
        """
        found = owner.module._parameters.get(owner.name)
        managed = None if found is None else managed_by(found)
        if managed is None or managed.param is param or managed.param.sharded.shape != param.sharded.shape:
            param.refuse_replacement(owner)
        if holds_tensors(param.local):  # its class gathers it for one module
            param.refuse_replacement(owner)
        lender = managed.unit
        if lender is not self and lender.runtime is not self.runtime:
            param.refuse_replacement(owner)
        param.owners = [known for known in param.owners if known != owner]
        managed.param.owners.append(owner)
        owner.module._parameters[owner.name] = managed.param.shown
        if lender is not self and lender not in self.borrowed:
            self.borrowed.append(lender)
            lender.residency.users += self.residency.users
        self._leaves = _leaves_alongside(self.modules, self.params)

    def show_sharded(self) -> None:
        """Show the modules the sharded parameters."""
        for param in self.params:
            param.show(param.sharded)
        self.hide_unsharded()

    def hide_unsharded(self) -> None:
        """Show the sharded parameters to the modules that have the unsharded ones."""
        for param in self.params:
            if param.unsharded.requires_grad is not param.is_unsharded_trained:
                param.keep_requires_grad()
            param.hide_unsharded()
        refuse_calls(self._leaves)

    def show_unsharded(self, *, renewed: bool) -> None:
        """Set the unsharded parameters in the modules. `renewed` ones are new objects."""
        if renewed:
            self._register_params()
        self.trainable = sum(param.follow_requires_grad() for param in self.params)
        for param in self.params:
            param.show(param.unsharded)
        accept_calls(self._leaves)

    def read_ahead(self) -> None:
        """Start to read shards from a disk for a gather that will start soon."""
        if self.is_on_disk and self.residency.state in AT_REST and not self.is_meta:
            for param_group in self.param_groups:
                param_group.gather.read_ahead()

    def forget_ahead(self) -> None:
        """Free the data that was read for a gather that did not start."""
        if self.is_on_disk and self.residency.state in AT_REST:
            for param_group in self.param_groups:
                param_group.gather.forget_ahead()

    def check_materialized(self) -> None:
        """Raise if any parameter has no values yet.

        Raises:
            StateError: some are on the meta device.
        """
        names = [param.fqn for param in self.params if param.local.is_meta]
        if names:
            raise StateError(
                f"{self.name or 'the root'}: {len(names)} parameters are still on the meta device, such as "
                f"{names[0]!r}. Call model.to_empty(device=...) and initialise or load them first, or pass "
                "param_init_fn."
            )

    # -- other memory or dtypes ---------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # what is made stays, whatever mode finds it
    @torch.no_grad()
    def adopt(self, *, may_wait: bool = False) -> None:
        """Adopt parameters that `Module.to`, `to_empty`, `load_state_dict(assign=True)` or similar set in the modules.

        Args:
            may_wait: do nothing if parameters that shared a dtype do not share it any more. The other modules of the
                unit, or those that borrow it, may follow. Otherwise the next unshard calls this again, and raises.

        Raises:
            ConfigError: parameters that shared a dtype do not share it any more.
        """
        for param_group in self.param_groups:
            _let_unused_follow(param_group.params)
            if may_wait and len({param.shown.dtype for param in param_group.params}) > 1:
                return
            check_one_dtype(param_group)
        changed = [param.adopt() for param in self.params]
        if not any(changed) and all(param_group.holds_its_shards for param_group in self.param_groups):
            return
        if len({param.local.is_meta for param in self.params}) > 1:
            return  # some have been given values; this is called again when others are
        self._has_layout_of([self._plan_as_found(param_group) for param_group in self.param_groups])

    @torch.inference_mode(False)
    @torch.no_grad()
    def reduce_in(self, dtype: torch.dtype) -> None:
        """Sum gradients in `dtype` from the next backward. Only for a unit without gradients.

        Raises:
            ConfigError: the encoding of gradients cannot be combined with `dtype`.
        """
        assert not self.has_grads_waiting, "checked by the caller"
        self.options = replace(self.options, precision=replace(self.options.precision, reduce_dtype=dtype))
        self.residency.reshard()
        plans = []
        for param_group in self.param_groups:
            plan = param_group.plan
            view, stored, grad = param_group.params[0].view, plan.contract.stored, plan.contract.grad
            contract = contract_for(self.options, view, stored, grad)
            plans.append(replace(plan.changed(contract, plan.device, plan.memory), options=self.options))
        self._has_layout_of(plans)

    @torch.inference_mode(False)
    @torch.no_grad()
    def move_to(self, destination: StatePlacement) -> None:
        """Move the shards and their gradients to `destination`. The optimizer's state follows in its next step.

        Call it between steps only. The storages that pending graphs have saved views of do not change. Units can leave
        a disk, but cannot move to one: units on a disk were created there.

        Raises:
            DiskError: the shards cannot be read from the disk.
        """
        assert self.is_on_disk or destination is not StatePlacement.DISK, "no unit goes to a disk"
        self.forget_ahead()
        was_on_disk, self.destination = self.is_on_disk, destination
        if self.is_meta or all(param_group.plan.memory == self._memory for param_group in self.param_groups):
            return
        self.residency.settle()
        self.residency.reshard()
        grads = {param: param.grad for param in self.params if param.grad is not None}
        plans = [
            param_group.plan.changed(param_group.plan.contract, self.device, self._memory)
            for param_group in self.param_groups
        ]
        self._has_layout_of(plans, self.slot)
        for param, grad in grads.items():
            with allocating("gradient shards"):
                param.grad = self._memory.zeros(grad.numel(), grad.dtype).view(grad.shape).copy_(grad)
        if was_on_disk:
            buffers_of(self.device).drop()  # their number was for more units

    def _has_layout_of(self, plans: Sequence[GroupPlan], slot: Slot | None = None) -> None:
        """Move the parameter groups to the memory of `plans`, with the present values of the shards.

        Args:
            plans: one for each group.
            slot: The slot for the unsharded parameters: the current one to keep them, or None for a new one.
        """
        collectives = self.collectives
        if plans and plans[0].memory.device.type != "meta":
            self.device = plans[0].device
            self.collectives = _collectives_along(self.collectives, self.device)
        memory = self.residency.memory
        memory.drop_views(self.param_groups)
        is_new = slot is None
        if is_new:  # graphs that wait for a backward have views of the present one
            for param in self.params:
                param.counters.renew()
        slot = slot or Slot(plans[0].device if plans else self.device)
        others = 0 if is_new else slot.others
        regions = memory.occupy(slot, plans)
        for i, (param_group, plan, region) in enumerate(zip(self.param_groups, plans, regions, strict=True)):
            is_same = self.collectives == collectives and plan.needs_transports_of(param_group.plan)
            bound = param_group.transports if is_same else GroupTransports.bind(plan, self.collectives[plan.axes])
            if is_new:
                bound.forget_errors()
            self.param_groups[i] = param_group.moved(plan, bound, region)
        slot.count_references(others)
        self.residency.note_layout()
        self._register_params()
        self.show_sharded()

    def _plan_as_found(self, param_group: ParamGroup) -> GroupPlan:
        """Return the plan of `param_group` with the present dtype and device of its shards."""
        shard = param_group.params[0].local
        contract = contract_for(self.options, param_group.params[0].view, shard.dtype, param_group.plan.contract.grad)
        stays = not (shard.is_meta or self.destination is StatePlacement.DEVICE)
        device = self.device if stays else shard.device
        return param_group.plan.changed(contract, device, self._memory_found_on(shard.device))

    # -- gradients ----------------------------------------------------------------------------------------------------

    def watch(self, on_grad: Callable[[ShardedParam], None]) -> None:
        """Call `on_grad(param)` whenever autograd has added to the whole gradient of one of its parameters."""
        for param in self.params:
            param.watch(on_grad)

    @property
    def finishes_sums(self) -> bool:
        """True if a reduction now takes the second sum too: over the replicate axis, or across groups."""
        return self.settings.syncs_gradients and self.settings.syncs_replicas

    @property
    def awaits_second_sum(self) -> bool:
        """True if the second level of withheld sums is due now."""
        return self.finishes_sums and any(param_group.awaits_second_sum for param_group in self.param_groups)

    @property
    def holds_grads_back(self) -> bool:
        """True if whole gradients wait until a later microbatch is synced, instead of being reduced now."""
        return not self.settings.syncs_gradients and self.options.placements.gradients is not Placement.GROUPED

    @property
    def has_whole_grads(self) -> bool:
        """True if whole gradients wait for a reduction."""
        return any(param_group.holds_whole_grads for param_group in self.param_groups)

    def hold_grads(self) -> None:
        """Keep whole gradients for a later reduction."""
        for param_group in self.param_groups:
            param_group.gradients.hold()
        self.holds_grads = self.has_whole_grads

    def drop_grads(self) -> None:
        """Drop whole gradients."""
        self.holds_grads = False
        for param_group in self.param_groups:
            param_group.gradients.drop()

    def abandon_grads(self) -> None:
        """Drop all gradients: whole ones, first sums, those that the optimizer would see; and error feedback."""
        self.drop_grads()
        for param_group in self.param_groups:
            param_group.gradients.state.first_sums.clear()
            param_group.transports.forget_errors()
        for param in self.params:
            param.sharded.grad = None

    def start_reduce(self, phase: Phase) -> UnitReduction:
        """Start the reduction of whole gradients to those that the optimizer sees."""
        streams = self.streams
        self.holds_grads = False
        finishes, origin, hook = self.finishes_sums, self.origin(phase), self.settings.all_reduce_hook
        divisor = self.settings.gradient_divisor
        taken = [(param_group, param_group.gradients.take()) for param_group in self.param_groups]
        read = [dict(grads) for _, grads in taken]
        with torch.no_grad(), acting_for(origin, "messages"), streams.reduce.after(streams.compute):
            reductions = []
            for param_group, grads in taken:
                if self.settings.reduces_unused:
                    param_group.gradients.fill_missing(grads)
                if grads or (finishes and param_group.awaits_second_sum):
                    by = divisor or param_group.averaged_over(self.data_ranks)
                    reductions.append(
                        param_group.start_reduction(grads, divisor=by, finishes=finishes, origin=origin, hook=hook)
                    )
        with acting_for(origin, "messages"):
            return UnitReduction(reductions, read, streams, origin)


def _goes_to_disk(options: ShardOptions, sources: Sequence[Source], *, alongside: bool) -> bool:
    """Return True if the shards of a new unit go to a disk, so that the policy's fraction of all units is there.

    The fraction refers to all units with the same policy that were not in a step yet: those of the model that is being
    built. With a budget, all units that can go to the disk do, until fractions are chosen.

    Args:
        options: the options of the unit.
        sources: its parameters.
        alongside: whether the device that computes is not a CPU. A budget then uses the CPU instead.

    Raises:
        ConfigError: a fraction was requested, but the class of a parameter has values in several tensors.
    """
    wrapped = [source for source in sources if source.sends_payloads or holds_tensors(source.local)]
    if options.starts_on_disk:
        return not (alongside or wrapped) and bool(sources)
    fraction = options.parameters_on_disk
    if not fraction:
        return False
    if wrapped:
        raise ConfigError(
            f"Offload(parameters={{'disk': {fraction}}}): {wrapped[0].fqn} is a {type(wrapped[0].local).__name__}, "
            "whose values are in tensors of its own, which cannot rest on a disk. Give its unit a policy without "
            "parameters."
        )
    identical = [unit for unit in _made if unit.runtime is None and unit.options.offload == options.offload]
    there = sum(unit.whole_nbytes for unit in identical if unit.is_on_disk)
    nbytes = sum(source.local.numel() * source.local.itemsize for source in sources)
    return there < fraction * (nbytes + sum(unit.whole_nbytes for unit in identical))


_made: weakref.WeakSet[Unit] = weakref.WeakSet()


def _let_unused_follow(params: Sequence[ShardedParam]) -> None:
    """Cast and move parameters that no module has any more, since it was tied to another one, as the others were."""
    used = next((param.shown for param in params if param.owners), None)
    for param in params:
        shard = param.sharded
        if used is not None and not param.owners and (shard.dtype, shard.device) != (used.dtype, used.device):
            param.sharded = nn.Parameter(shard.detach().to(used.device, used.dtype), shard.requires_grad)


def _collectives_along(each: Iterable[Axes], device: torch.device) -> dict[Axes, AxesCollectives]:
    return {axes: AxesCollectives.along(axes, device) for axes in each}


def _leaves_alongside(modules: Sequence[nn.Module], params: Sequence[ShardedParam]) -> list[nn.Module]:
    """Return the leaf modules that have any of `params` and are not in `modules`: their calls need the parameters."""
    owners = dict.fromkeys(owner.module for param in params for owner in param.owners)
    return [owner for owner in owners if not owner._modules and all(owner is not module for module in modules)]
