"""A parameter group: parameters of a unit that share a mesh and a dtype, and are either all trained or all frozen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from fullshard._compat import address
from fullshard.comm.mesh import local_shard
from fullshard.comm.transport import Pending
from fullshard.disk.interface import TensorOnDisk
from fullshard.engine.findings import DiskFailures
from fullshard.engine.gather import Gather, gather_for
from fullshard.engine.gradients import Gradients, GradientState
from fullshard.engine.group_buffers import (
    CopiedShards,
    OwnShards,
    Region,
    RowsOfUnsharded,
    ShardStorage,
    UnshardedBuffer,
    UnshardedItself,
    WholeCopy,
)
from fullshard.engine.group_plan import GroupPlan
from fullshard.engine.group_transports import GroupTransports
from fullshard.engine.pack import Pack
from fullshard.engine.reduction import Reduction, ReductionOf, start_reduction
from fullshard.engine.sharded_param import Assignments, ShardedParam, Source
from fullshard.engine.validity import Validity
from fullshard.tape.recorder import Origin

_LOCAL = attrgetter("sharded._local_tensor")


class ParamGroup:
    """The parameters of a group, the storage of their shards, their all-gather and their gradients."""

    def __init__(
        self,
        plan: GroupPlan,
        pack: Pack,
        params: Sequence[ShardedParam],
        gather: Gather,
        unsharded: UnshardedBuffer | None,
        transports: GroupTransports,
        state: GradientState,
    ) -> None:
        self.plan = plan
        self.params = list(params)
        self._pack = pack
        self.transports = transports
        self.gradients = gradients_for(plan, self.params, state)
        self.gather = gather
        self._unsharded = unsharded
        self._note_shards()
        self.assignments = Assignments(self.params)
        self.validity = self._new_validity()
        self._point_to(unsharded)

    def _new_validity(self) -> Validity:
        plan = self.plan
        stepped = plan.lives_in_unsharded
        keeping = [param for param in self.params if stepped and (param.layout.in_place or not plan.shards_optimizer)]
        return Validity(self.params, keeping)

    def _note_shards(self) -> None:
        self._addresses = self._present_addresses()
        self._without_rows = [param for param in self.params if not param.local.numel()]  # these have no address

    @classmethod
    def of(
        cls, sources: Sequence[Source], plan: GroupPlan, transports: GroupTransports, region: Region | None
    ) -> ParamGroup:
        """Shard the parameters in `sources`, and return their group."""
        pack = Pack(plan.layout, plan.rank)
        unsharded = region and UnshardedBuffer(plan, pack, region)
        storage = shard_storage_for(plan, unsharded)
        params, own = [], []
        for source, param_layout, local in zip(sources, plan.layout.params, storage.shards, strict=True):
            params.append(ShardedParam(source, param_layout, local, plan))
            placements = plan.axes.tensor_placements(param_layout.spec, sharded=plan.shards_optimizer)
            own.append(None if source.param.is_meta else local_shard(source.local, plan.axes.mesh, placements))
        storage.fill(own)
        for param, source, part in zip(params, sources, own, strict=True):
            if part is not None:
                param.note_initial_values(source.local, part)
        return cls(plan, pack, params, gather_for(params, storage, transports), unsharded, transports, GradientState())

    def moved(self, plan: GroupPlan, transports: GroupTransports, region: Region | None) -> ParamGroup:
        """Return a group of the same parameters in other memory, after `Module.to` and similar functions.

        The new group has the current values of the sharded parameters. This group must not be used afterwards.
        """
        if (plan.contract.compute, plan.device) != (self.plan.contract.compute, self.plan.device):
            for param in self.params:
                param.renew_unsharded(plan.contract.compute, plan.device)
        self.gather.release_secondary()
        pack = Pack(plan.layout, plan.rank)
        unsharded = region and UnshardedBuffer(plan, pack, region)
        storage = shard_storage_for(plan, unsharded)
        storage.fill([param.local for param in self.params])
        for param, param_layout, shard in zip(self.params, plan.layout.params, storage.shards, strict=True):
            param.local, param.layout = shard, param_layout
        gather = gather_for(self.params, storage, transports)
        return ParamGroup(plan, pack, self.params, gather, unsharded, transports, self.gradients.state)

    # -- memory of unsharded parameters -------------------------------------------------------------------------------

    def contained_in(self, region: Region | None) -> None:
        """Set `region` as the memory of the unsharded parameters. None means that they have no memory."""
        self._point_to(region and UnshardedBuffer(self.plan, self._pack, region))

    def _point_to(self, unsharded: UnshardedBuffer | None) -> None:
        self._unsharded = unsharded
        nothing = torch.empty(0, dtype=self.plan.contract.compute, device=self.plan.device)
        wholes = [nothing] * len(self.params) if unsharded is None else unsharded.params
        self.validity.invalidate()
        for param, whole in zip(self.params, wholes, strict=True):
            param.point_to(whole)
        self.validity.refresh()

    # -- values -------------------------------------------------------------------------------------------------------

    @property
    def holds_its_shards(self) -> bool:
        """True if every sharded parameter still has its shard at its original address."""
        stored, device = self.plan.contract.stored, self.plan.memory.device
        for param in self._without_rows:
            if param.local.dtype != stored or param.local.device != device:
                return False
        shards = [*map(_LOCAL, self.params)]
        if {*map(type, shards)} <= {Tensor}:  # `map` calls functions of C without the interpreter
            return [*map(Tensor.data_ptr, shards)] == self._addresses
        return self._present_addresses() == self._addresses

    def _present_addresses(self) -> list[Any]:
        shards = [param.local for param in self.params]
        return [shard.data_ptr() if type(shard) is Tensor else _place(shard) for shard in shards]

    @property
    def has_shards_alone(self) -> bool:
        """True if no other code refers to any shard as a plain tensor, or to its memory."""
        return self.gather.has_shards_alone

    @property
    def is_trained(self) -> bool:
        """True if the parameters require gradients. (Users may change `requires_grad` of single parameters later.)"""
        return self.params[0].sharded.requires_grad

    def start_gather(self, origin: Origin, *, into_shared: bool) -> Pending:
        """Start to fill the unsharded buffer, see `Gather.start`."""
        assert self._unsharded is not None, "a group is bound before it is gathered"
        if self.gather.overwrites and self.validity.is_valid:
            self.validity.invalidate()
        return self.gather.start(self._unsharded, origin, into_shared=into_shared)

    def joint_messages(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the receive and send buffers of a gather that starts now, together with those of other groups."""
        assert self._unsharded is not None, "a group is bound before it is gathered"
        if self.validity.is_valid:
            self.validity.invalidate()
        return self._unsharded.receive, self.gather.shards_to_send()

    def finish_gather(self) -> bool:
        """Complete the unsharded parameters. Call it when the gather has ended.

        Returns:
            True if any of them is a new object.
        """
        assert self._unsharded is not None, "a group is bound before it is gathered"
        self.gather.finish(self._unsharded)
        self.validity.validate(self.gather.gathered_versions)
        return False

    def release(self) -> None:
        """Invalidate the unsharded parameters, and free memory outside of the unit's storage."""
        if self.validity.is_valid:
            self.validity.invalidate()
        self.gather.invalidate()

    @property
    def separate_nbytes(self) -> int:
        """The known bytes of unsharded parameters outside of the unit's storage."""
        return 0

    @property
    def present_separate_nbytes(self) -> int:
        """The bytes of unsharded parameters outside of the unit's storage that are currently in memory."""
        return 0

    @property
    def disk_failures(self) -> list[DiskFailures]:
        """Failures of the disk with shards and with gradients; empty if they are not on a disk."""
        return [item for item in (self.gather.disk_failures, self.gradients.failures) if item is not None]

    # -- gradients ----------------------------------------------------------------------------------------------------

    def averaged_over(self, data_ranks: frozenset[int]) -> int:
        """Return the divisor of the sum of a gradient, for a root on `data_ranks`.

        This is the number of the root's ranks if the parameters are on a subset of these ranks, or if another
        parallelism has split them. Such parameters, for example experts, process tokens of all of the root's ranks. For
        other parameters, it is the number of the parameters' ranks.
        """
        axes = self.plan.axes
        is_mean_of_all = axes.ranks <= data_ranks or self.is_cut
        return len(data_ranks) if is_mean_of_all else axes.world

    def may_be_averaged_over_own_ranks(self, data_ranks: frozenset[int]) -> bool:
        """Return True if the parameters are plain, trained, and on fewer ranks than a root on `data_ranks`.

        If these ranks exchange tokens, their gradient is a mean over the root's ranks. If they do not, it is a mean
        over their own ranks. The placement does not show which of the two is the case.
        """
        return self.is_trained and self.plan.axes.ranks < data_ranks and not self.is_cut

    @property
    def is_cut(self) -> bool:
        """True if another parallelism has already split any of the parameters over other ranks."""
        return any(param.view.is_cut for param in self.params)

    def start_reduction(
        self,
        grads: dict[int, Tensor],
        *,
        divisor: float,
        finishes: bool,
        origin: Origin,
        hook: Callable[[Tensor], None] | None,
    ) -> Reduction:
        """Start to sum `grads`, from `gradients.take()`, over the ranks. For other arguments see `ReductionOf`."""
        return start_reduction(
            ReductionOf(grads, self.gradients, self.transports, self._pack, divisor, finishes, origin, hook)
        )

    @property
    def holds_whole_grads(self) -> bool:
        """True if unsharded gradients wait for a reduction."""
        if self.gradients.state.whole:
            return True
        for param in self.params:  # a loop, because `any` with a generator is slower
            if param.unsharded.grad is not None:
                return True
        return False

    @property
    def awaits_second_sum(self) -> bool:
        """True if first-level sums wait for their second level."""
        return bool(self.gradients.state.first_sums)

    @property
    def error_feedback_nbytes(self) -> int:
        """Bytes that error feedback of encoded gradients keeps."""
        return self.transports.error_feedback_nbytes


def shard_storage_for(plan: GroupPlan, unsharded: UnshardedBuffer | None) -> ShardStorage:
    """Return storage for the shards of a group, filled with zeros. See the table in `group_buffers.py`."""
    if plan.is_on_disk:
        from fullshard.engine.shards_on_disk import ShardsOnDisk  # imported here, because few programs need it

        return ShardsOnDisk(plan)
    if plan.keeps_copy:
        return CopiedShards(plan)
    if not plan.lives_in_unsharded:
        return OwnShards(plan) if plan.shards_optimizer else WholeCopy(plan)
    assert unsharded is not None
    return RowsOfUnsharded(plan, unsharded) if plan.shards_optimizer else UnshardedItself(plan, unsharded)


def gradients_for(plan: GroupPlan, params: Sequence[ShardedParam], state: GradientState) -> Gradients:
    """Return the gradients of a group, in memory or on a disk."""
    if plan.is_on_disk:
        from fullshard.engine.gradients_on_disk import GradientsOnDisk  # imported here, because few programs need it

        return GradientsOnDisk(plan, params, state)
    return Gradients(plan, params, state)


def start_gathers(groups: Sequence[ParamGroup], origin: Origin, *, into_shared: bool) -> list[Pending]:
    """Start the gathers of `groups`.

    On NCCL, groups with the same dtype, such as adapters and frozen layers, share a call.
    """
    channels = [group.gather.joint_channel if type(group) is ParamGroup else None for group in groups]
    first, *others = channels
    dtypes = {group.plan.sent_dtype for group in groups}
    if not others or first is None or into_shared or len(dtypes) > 1:
        return [group.start_gather(origin, into_shared=into_shared) for group in groups]
    if any(channel is None or channel.collectives is not first.collectives for channel in others):
        return [group.start_gather(origin, into_shared=into_shared) for group in groups]
    messages = [group.joint_messages() for group in groups]
    receive = [buffer for received, _ in messages for buffer in received]
    send = [buffer for _, sent in messages for buffer in sent]
    return [first.all_gather(receive, send, origin=origin)]


def _place(local: Tensor) -> Any:
    """Return a value that identifies the memory of `local`, a shard."""
    return (id(local.extent), local.start) if isinstance(local, TensorOnDisk) else address(local)
