"""A unit: the modules whose parameters are gathered and freed together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard._compat import holds_tensors
from fullshard.comm.mesh import Axes
from fullshard.device.accelerator import accelerator_for
from fullshard.device.memory import Slot
from fullshard.engine.group_plan import GroupPlan, PayloadPlan
from fullshard.engine.group_transports import GroupTransports
from fullshard.engine.managed import Managed, managed_by
from fullshard.engine.param_group import ParamGroup
from fullshard.engine.residency import Residency, UnitState
from fullshard.engine.sharded_param import Owner, ShardedParam, Source
from fullshard.engine.sharded_use import accept_calls, refuse_calls
from fullshard.engine.unit_gradients import UnitGradients
from fullshard.engine.unit_parts import UnitSettings
from fullshard.engine.unit_plans import (
    by_kind,
    device_of,
    plan_for,
)
from fullshard.engine.unit_shards import UnitShards, collectives_along, note_made
from fullshard.engine.unsharded_memory import UnshardedMemory
from fullshard.errors import StateError
from fullshard.policy.options import ShardOptions
from fullshard.policy.strategy import Placement
from fullshard.tape.recorder import Origin, Phase


class Unit:
    """The parameters of some modules, gathered and freed together at times that the runtime chooses.

    Args:
        modules: The modules whose forward needs the parameters.
        sources: Their parameters that do not belong to another unit.
        borrowed: The units whose parameters are tied to parameters of these modules.
        options: The user's options.
        axes: The mesh axes to shard and replicate over; a source may have others.
        device: The device that computes.
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
        self.streams = accelerator_for(device).streams
        self.shards = UnitShards(self, sources)
        self.settings = UnitSettings(options.reshard_after_forward)
        self.runtime: Any = None  # the `Runtime` of its root, set in the first forward
        self.number = -1  # among the units of its root
        self.is_root = False
        self.data_ranks: frozenset[int] = frozenset()  # ranks of the root: a gradient is the mean over their data
        self.gradients = UnitGradients(self)
        self.finished_modules: set[int] = set()  # modules whose forward is over, if the unit has several
        self.keeps_unsharded = options.keeps_unsharded  # between steps
        self.microbatch = 0  # number of the current one in the step, starting with 1
        self._origins: dict[Phase, Origin] = {}
        self.trainable = 0  # number of parameters that require gradients
        kinds = by_kind(sources)
        where = device_of(sources, device)
        memory = self.shards.memory_found_on(where)
        plans = [plan_for(kind, options, where, memory) for kind in kinds]
        self.collectives = collectives_along([axes, *(plan.axes for plan in plans)], device)
        memory_of_unsharded = UnshardedMemory(self, where, keeps=self.keeps_unsharded)
        regions = memory_of_unsharded.occupy(memory_of_unsharded.slot, plans)
        self.param_groups = [
            _group_type(plan).of(kind, plan, GroupTransports.bind(plan, self.collectives[plan.axes]), region)
            for kind, plan, region in zip(kinds, plans, regions, strict=True)
        ]
        memory_of_unsharded.slot.count_references()
        self.residency = Residency(self, memory_of_unsharded)
        self.params = tuple(param for param_group in self.param_groups for param in param_group.params)
        ordered = (source for kind in kinds for source in kind)
        self._managed = [
            Managed(self, param, weakref.ref(source.param)) for source, param in zip(ordered, self.params, strict=True)
        ]
        self.register_params()
        self._leaves = _leaves_alongside(self.modules, self.params)
        self.keepers: list[nn.Module] = []  # modules whose forward may set tensors as attributes, set by the root
        self.show_sharded()
        note_made(self)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {len(self.params)} parameters, {self.residency.state.value})"

    def register_params(self) -> None:
        """Let `managed_by` find the parameters by all their current forms."""
        for managed in self._managed:
            managed.register()

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unit's unsharded parameters, including gathered payloads of tensor subclasses."""
        return self.slot_nbytes + sum(param_group.separate_nbytes for param_group in self.param_groups)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the slot that the unit's unsharded parameters occupy."""
        return self.residency.memory.nbytes

    @property
    def slot(self) -> Slot:
        """The memory of the unit's unsharded parameters, which several units may share."""
        return self.residency.memory.slot

    @property
    def is_meta(self) -> bool:
        """True if the unit's shards have no memory yet."""
        return self.residency.state is UnitState.META

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the unit's full parameters in the stored dtype."""
        return sum(param.layout.spec.numel * param.sharded.itemsize for param in self.params)

    @property
    def trained_nbytes(self) -> int:
        """Bytes of the unit's full trained parameters in the stored dtype."""
        trained = (param for param in self.params if param.sharded.requires_grad)
        return sum(param.layout.spec.numel * param.sharded.itemsize for param in trained)

    @property
    def reshards_after_forward(self) -> bool:
        """True if the unit is resharded after forward. A root is not by default, because its backward is next."""
        choice = self.settings.reshard_after_forward
        if choice is None:
            return not self.is_root and self.options.placements.parameters_in_step is not Placement.WHOLE
        return choice

    @property
    def frees_in_step(self) -> bool:
        """True if the unit is freed between forward and backward of a manually finalized step, as in a pipeline."""
        choice = self.settings.reshard_after_forward
        return self.options.placements.parameters_in_step is not Placement.WHOLE if choice is None else choice

    @property
    def is_trained(self) -> bool:
        """True if any parameter is trained."""
        return any(param.sharded.requires_grad for param in self.params)

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The process groups of the unit's parameters: the engine's, then those of the original parameters."""
        own = [group for axes in self.collectives for group in (axes.shard_group, axes.replicate_group)]
        found = [*own, *(group for param in self.params for group in param.view.process_groups)]
        return list(dict.fromkeys(group for group in found if group is not None))

    @property
    def is_broken(self) -> bool:
        """True if communication is impossible, because ranks made different calls or a rank was lost."""
        for collectives in self.collectives.values():
            if collectives.is_broken:
                return True
        return False

    def origin(self, phase: Phase) -> Origin:
        """Return the origin of events of this unit in `phase`."""
        if phase in self._origins:
            known = self._origins[phase]
            if known.microbatch == self.microbatch and known.unit == self.name:
                return known
        self._origins[phase] = origin = Origin(self.name, phase, self.microbatch)
        return origin

    # -- forms that modules show --------------------------------------------------------------------------------------

    def uses(self, unit: Unit) -> bool:
        """Return True if calls of this unit use parameters of `unit`, which may be this unit."""
        return unit is self or unit in self.borrowed

    @property
    def has_valid_values(self) -> bool:
        """True if the unsharded parameters currently have valid values."""
        return all([param_group.validity.is_valid for param_group in self.param_groups])

    def compute_on(self, device: torch.device) -> None:
        """Set the device that computes, and use its streams."""
        self.device, self.streams = device, accelerator_for(device).streams

    def check_replacements(self) -> None:
        """Adopt weights that were tied after sharding, and raise if parameters were replaced by other parameters.

        Call it while modules show sharded parameters, before these are read or written.

        Raises:
            StateError: a parameter was replaced by one that no unit has, its `data` was assigned, or it has a hook
                that would never be called.
        """
        for param_group in self.param_groups:
            param_group.assignments.refuse()
        for param in self.params:
            for owner in param.owners:
                shown = owner.module._parameters
                if owner.name not in shown or shown[owner.name] is not param.sharded:
                    self._adopt_tie(param, owner)

    def refuse_replacements(self) -> None:
        """Raise if parameters were replaced while modules show unsharded parameters."""
        for param in self.params:
            for owner in param.owners:
                found = owner.module._parameters.get(owner.name)
                if found is None or managed_by(found) is None:
                    param.refuse_replacement(owner)

    def _adopt_tie(self, param: ShardedParam, owner: Owner) -> None:
        """Record `owner` as an owner of the managed parameter that is now in place of `param`, and borrow its unit.

        Raises:
            StateError: The new parameter is not a managed parameter of the same shape, or is used in another tree.
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
        shown = managed.param.shown
        other = managed_by(shown)  # of a different parameter if weights were exchanged
        owner.module._parameters[owner.name] = shown if other is None or other.param is managed.param else found
        peers: Sequence[Unit] = () if self.runtime is None else self.runtime.units
        for user in (self, *peers):  # if `param` was tied before, a unit that borrows this one has the module
            is_user = user is self or self in user.borrowed
            if is_user and lender is not user and lender not in user.borrowed:
                user.borrowed.append(lender)
                lender.residency.users += user.residency.users
        self._leaves = _leaves_alongside(self.modules, self.params)

    def show_sharded(self) -> None:
        """Show the sharded parameters to the modules."""
        for param in self.params:
            param.show(param.sharded)
        self.hide_unsharded()

    # The next two methods run twice per microbatch. A function call for each parameter would double their time.

    def hide_unsharded(self) -> None:
        """Show the sharded parameters to the modules that have the unsharded ones.

        A module with another parameter keeps it, so that `check_replacements` finds it before it is used.
        """
        for param in self.params:
            unsharded = param.unsharded
            if unsharded.requires_grad is not param.is_unsharded_trained:
                param.keep_requires_grad()
            for owner in param.owners:
                shown = owner.module._parameters
                if owner.name in shown and shown[owner.name] is unsharded:
                    shown[owner.name] = param.sharded
        refuse_calls(self._leaves)

    def show_unsharded(self, *, renewed: bool) -> None:
        """Show the unsharded parameters to the modules. If `renewed`, they are new objects."""
        if renewed:
            self.register_params()
        trainable = 0
        for param in self.params:
            unsharded, trained = param.unsharded, param.sharded.requires_grad
            is_followed = unsharded.requires_grad is trained is param.is_unsharded_trained
            if not is_followed or (trained and not (param.is_watched and param.owners)):
                trained = param.follow_requires_grad()
            trainable += trained
            for owner in param.owners:
                owner.module._parameters[owner.name] = unsharded
        self.trainable = trainable
        accept_calls(self._leaves)

    def check_materialized(self) -> None:
        """Raise `StateError` if any parameter has no values yet."""
        names = [param.fqn for param in self.params if param.local.is_meta]
        if names:
            raise StateError(
                f"{self.name or 'the root'}: {len(names)} parameters are still on the meta device, such as "
                f"{names[0]!r}. Call model.to_empty(device=...) and initialize or load them first, or pass "
                "param_init_fn."
            )


def _leaves_alongside(modules: Sequence[nn.Module], params: Sequence[ShardedParam]) -> list[nn.Module]:
    """Return the leaf modules other than `modules` that have any of `params`. Their calls also need the parameters."""
    owners = dict.fromkeys(owner.module for param in params for owner in param.owners)
    return [owner for owner in owners if not owner._modules and all(owner is not module for module in modules)]


def _group_type(plan: GroupPlan) -> type[ParamGroup]:
    """Return the class of the parameter group for `plan`."""
    if not isinstance(plan, PayloadPlan):
        return ParamGroup
    from fullshard.engine.payload_group import PayloadGroup, WholeClassGroup  # imported here, because few need it

    return PayloadGroup if plan.shards_optimizer else WholeClassGroup
