"""The placement of a unit's shards, and moves to other memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fullshard._compat import holds_tensors
from fullshard.comm.mesh import Axes
from fullshard.device.accelerator import accelerator_for
from fullshard.device.memory import MemoryKind, Slot
from fullshard.engine.findings import DiskFailures
from fullshard.engine.group_plan import GroupPlan
from fullshard.engine.group_transports import AxesCollectives, GroupTransports
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.residency import INACTIVE
from fullshard.engine.sharded_param import ShardedParam, Source
from fullshard.engine.unit_parts import UnitParts
from fullshard.engine.unit_plans import check_one_dtype, contract_for
from fullshard.errors import ConfigError
from fullshard.policy.offload import OffloadPolicy, StatePlacement
from fullshard.policy.options import ShardOptions
from fullshard.policy.precision import DtypeContract
from fullshard.tape.recorder import allocating


class UnitShards:
    """The memory of a unit's shards."""

    def __init__(self, unit: UnitParts, sources: Sequence[Source]) -> None:
        self._unit = unit
        alongside = accelerator_for(unit.device).has_streams
        policy = unit.options.offload.in_full
        self.destination = policy.placement_of_all(alongside=alongside)  # until the root chooses for all of its units
        is_trained = any(source.param.requires_grad for source in sources)
        if self.destination is StatePlacement.STEPPED_ON_CPU and not is_trained:
            self.destination = StatePlacement.DEVICE
        if _goes_to_disk(unit.options, sources, alongside=alongside):
            self.destination = StatePlacement.DISK

    @property
    def _memory(self) -> MemoryKind:
        return self.memory_at(self.destination)

    def memory_at(self, destination: StatePlacement) -> MemoryKind:
        """Return the kind of memory of the unit's shards at `destination`."""
        if destination is StatePlacement.DEVICE:
            return MemoryKind(self._unit.device)
        alongside = accelerator_for(self._unit.device).has_streams
        if destination is StatePlacement.DISK:
            return MemoryKind(torch.device("cpu"), offloaded=alongside, pinned=alongside, folder=self._folder)
        if not alongside:
            return MemoryKind(torch.device("cpu"))
        pinned, copied = self._unit.options.offload.in_full.pin_memory, destination is StatePlacement.STEPPED_ON_CPU
        return MemoryKind(torch.device("cpu"), offloaded=True, pinned=pinned, copied=copied)

    @property
    def device(self) -> torch.device:
        """The device of the shards, once they have memory."""
        return self._memory.device

    @property
    def destination(self) -> StatePlacement:
        """The placement of the shards between uses."""
        return self._destination

    @destination.setter
    def destination(self, destination: StatePlacement) -> None:
        self._destination = destination
        self.is_on_cpu = destination in (StatePlacement.STEPPED_ON_CPU, StatePlacement.CPU)
        """True if shards and gradients are on the CPU, where the optimizer steps them."""
        self.is_on_disk = destination is StatePlacement.DISK
        """True if shards, gradients and the optimizer's state are on a disk between uses."""

    @property
    def is_offloaded(self) -> bool:
        """True if shards are offloaded from the device that computes."""
        return self._memory.offloaded

    def memory_found_on(self, device: torch.device) -> MemoryKind:
        """Return the kind of memory of shards that are on `device`, or are created from tensors on it."""
        if device.type == "meta":
            return MemoryKind(device, folder=self._folder)
        return MemoryKind(device) if self.destination is StatePlacement.DEVICE else self._memory

    @property
    def _folder(self) -> Path | None:
        return self._unit.options.offload.in_full.disk_folder if self.is_on_disk else None

    @property
    def disk_failures(self) -> list[DiskFailures]:
        """Failures of the disk that stores the shards, see `engine/root_state.py`."""
        return [disk_failure for param_group in self._unit.param_groups for disk_failure in param_group.disk_failures]

    def offload_as(self, policy: OffloadPolicy) -> None:
        """Offload states and activations according to `policy`, starting with the next step and forward."""
        self._unit.options = replace(self._unit.options, offload=policy)

    def read_ahead(self) -> None:
        """Start to read shards from a disk for a gather that will start soon."""
        if self.is_on_disk and self._unit.residency.state in INACTIVE and not self._unit.is_meta:
            for param_group in self._unit.param_groups:
                param_group.gather.read_ahead()

    def forget_ahead(self) -> None:
        """Free the data that was read for a gather that did not start."""
        if self.is_on_disk and self._unit.residency.state in INACTIVE:
            for param_group in self._unit.param_groups:
                param_group.gather.forget_ahead()

    @torch.inference_mode(False)  # the new tensors must not be inference tensors
    @torch.no_grad()
    def adopt(self, *, may_wait: bool = False) -> None:
        """Adopt parameters that `Module.to`, `to_empty`, `load_state_dict(assign=True)` or similar set in the modules.

        Args:
            may_wait: Whether to do nothing if parameters that shared a dtype no longer do. The other modules of the
                unit, or modules with tied parameters, may still be cast. If they are not, the next unshard calls this
                again, and raises.

        Raises:
            ConfigError: Parameters that shared a dtype no longer do.
        """
        for param_group in self._unit.param_groups:
            _let_unused_follow(param_group.params)
            if may_wait and len({param.shown.dtype for param in param_group.params}) > 1:
                return
            check_one_dtype(param_group)
        changed = [param.adopt() for param in self._unit.params]
        if not any(changed) and all(param_group.holds_its_shards for param_group in self._unit.param_groups):
            return
        if len({param.local.is_meta for param in self._unit.params}) > 1:
            return  # called again when the other parameters have values
        self._has_layout_of([self._plan_as_found(param_group) for param_group in self._unit.param_groups])

    @torch.inference_mode(False)
    @torch.no_grad()
    def reduce_in(self, dtype: torch.dtype) -> None:
        """Sum gradients in `dtype` from the next backward. The unit must not have gradients.

        Raises:
            ConfigError: the encoding of gradients cannot be combined with `dtype`.
        """
        assert not self._unit.gradients.are_waiting, "checked by the caller"
        options = self._unit.options
        self._unit.options = replace(options, precision=replace(options.precision, reduce_dtype=dtype))
        self._unit.residency.reshard()
        plans = []
        for param_group in self._unit.param_groups:
            plan = param_group.plan
            contract = self._contract_with(plan.contract.stored, param_group)
            plans.append(replace(plan.changed(contract, plan.device, plan.memory), options=self._unit.options))
        self._has_layout_of(plans)

    @torch.inference_mode(False)
    @torch.no_grad()
    def move_to(self, destination: StatePlacement) -> None:
        """Move the shards and their gradients to `destination`. The optimizer's state follows in its next step.

        Call it between steps only. Storages that pending graphs have views of do not change. Units can leave a disk,
        but cannot move to one: units on a disk were created there.

        Raises:
            DiskError: the shards cannot be read from the disk.
            StateError: a parameter was replaced, see `Unit.check_replacements`.
        """
        assert self.is_on_disk or destination is not StatePlacement.DISK
        self.forget_ahead()
        was_on_disk, self.destination = self.is_on_disk, destination
        if self._unit.is_meta or {param_group.plan.memory for param_group in self._unit.param_groups} <= {self._memory}:
            return
        self._unit.residency.run_deferred_steps()
        self._unit.residency.reshard()
        self._unit.check_replacements()
        grads = {param: param.grad for param in self._unit.params if param.grad is not None}
        plans = [
            param_group.plan.changed(param_group.plan.contract, self._unit.device, self._memory)
            for param_group in self._unit.param_groups
        ]
        self._has_layout_of(plans, self._unit.slot)
        for param, grad in grads.items():
            with allocating("gradient shards"):
                param.grad = self._memory.zeros(grad.numel(), grad.dtype).view(grad.shape).copy_(grad)
        if was_on_disk:
            from fullshard.disk.buffers import buffers_of  # imported here, because few programs need it

            buffers_of(self._unit.device).drop()  # fewer are needed now

    def _has_layout_of(self, plans: Sequence[GroupPlan], slot: Slot | None = None) -> None:
        """Move the parameter groups to the memory of `plans`, with the current values of the shards.

        Args:
            plans: one for each group.
            slot: The slot for the unsharded parameters: the current one to keep them, or None for a new one.
        """
        collectives = self._unit.collectives
        if plans and plans[0].memory.device.type != "meta":
            self._unit.compute_on(plans[0].device)
            self._unit.collectives = collectives_along(self._unit.collectives, self._unit.device)
        memory = self._unit.residency.memory
        memory.drop_views(self._unit.param_groups)
        is_new = slot is None
        if is_new:  # graphs that wait for a backward have views of the current slot
            for param in self._unit.params:
                param.counters.renew()
        slot = slot or Slot(plans[0].device if plans else self._unit.device)
        others = 0 if is_new else slot.others
        regions = memory.occupy(slot, plans)
        for i, (param_group, plan, region) in enumerate(zip(self._unit.param_groups, plans, regions, strict=True)):
            is_same = self._unit.collectives == collectives and plan.can_use_transports_of(param_group.plan)
            bound = param_group.transports if is_same else GroupTransports.bind(plan, self._unit.collectives[plan.axes])
            if is_new:
                bound.forget_errors()
            if self._unit.runtime is not None:
                bound.reserve_tags()
            held, state = param_group.gradients.take(), param_group.gradients.state
            if plan.device.type != "meta":
                state.whole = {j: grad.to(plan.device, plan.contract.reduce) for j, grad in held.items()}
            self._unit.param_groups[i] = param_group.moved(plan, bound, region)
        slot.count_references(others)
        self._unit.residency.note_layout()
        self._unit.register_params()
        self._unit.show_sharded()

    def _plan_as_found(self, param_group: ParamGroup) -> GroupPlan:
        """Return the plan of `param_group` with the current dtype and device of its shards."""
        shard = param_group.params[0].local
        contract = self._contract_with(shard.dtype, param_group)
        stays = not (shard.is_meta or self.destination is StatePlacement.DEVICE)
        device = self._unit.device if stays else shard.device
        return param_group.plan.changed(contract, device, self.memory_found_on(shard.device))

    def _contract_with(self, stored: torch.dtype, param_group: ParamGroup) -> DtypeContract:
        """Return the dtypes of `param_group` if its shards are stored as `stored`."""
        view, present = param_group.params[0].view, param_group.plan.contract
        return contract_for(self._unit.options, view, stored, present.grad, keeps_dtype=present.keeps_dtype)


def _goes_to_disk(options: ShardOptions, sources: Sequence[Source], *, alongside: bool) -> bool:
    """Return True if the shards of a new unit go to a disk, to reach the policy's fraction of all units.

    The fraction refers to all units with the same policy that have not been in a step yet: the units of the model that
    is being built. With a budget, all possible units go to the disk until fractions are chosen.

    Args:
        options: the options of the unit.
        sources: its parameters.
        alongside: Whether the device that computes is not a CPU. If so, a budget uses the CPU instead.

    Raises:
        ConfigError: A fraction was requested, but the class of a parameter stores values in several tensors.
    """
    wrapped = [source for source in sources if source.sends_payloads or holds_tensors(source.local)]
    if options.starts_on_disk:
        return not (alongside or wrapped) and bool(sources)
    fraction = options.parameters_on_disk
    if not fraction:
        return False
    if wrapped:
        raise ConfigError(
            f"Offload(parameters={{'disk': {fraction}}}): {wrapped[0].fqn} is a {type(wrapped[0].local).__name__}, a "
            "subclass that holds several tensors, which cannot be offloaded to disk. Give its unit a policy without "
            "parameters."
        )
    identical = [unit for unit in _made if unit.runtime is None and unit.options.offload == options.offload]
    there = sum(unit.whole_nbytes for unit in identical if unit.shards.is_on_disk)
    nbytes = sum(source.local.numel() * source.local.itemsize for source in sources)
    return there < fraction * (nbytes + sum(unit.whole_nbytes for unit in identical))


_made: weakref.WeakSet[UnitParts] = weakref.WeakSet()


def note_made(unit: UnitParts) -> None:
    """Count `unit` among the units that share the fractions of a policy."""
    _made.add(unit)


def _let_unused_follow(params: Sequence[ShardedParam]) -> None:
    """Cast and move parameters that no longer belong to a module after tying, like the unit's other parameters."""
    used = next((param.shown for param in params if param.owners), None)
    for param in params:
        shard = param.sharded
        if used is not None and not param.owners and (shard.dtype, shard.device) != (used.dtype, used.device):
            param.sharded = nn.Parameter(shard.detach().to(used.device, used.dtype), shard.requires_grad)


def collectives_along(each: Iterable[Axes], device: torch.device) -> dict[Axes, AxesCollectives]:
    """Return the collectives along the axes of a unit's parameters."""
    return {axes: AxesCollectives.along(axes, device) for axes in each}
