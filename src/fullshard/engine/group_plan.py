"""A parameter group before memory is allocated: values derived from shapes, dtypes and the user's options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch

from fullshard.comm.mesh import Axes
from fullshard.device.accelerator import accelerator_for
from fullshard.device.memory import MemoryKind
from fullshard.disk.interface import ALIGNMENT
from fullshard.layout.group_layout import ON_A_QUEUE, PAIRWISE, GroupLayout, MessageRule, lay_out
from fullshard.policy.offload import OffloadPolicy
from fullshard.policy.options import ShardOptions
from fullshard.policy.precision import DtypeContract
from fullshard.policy.strategy import Placement, Placements

_MOST_PAYLOADS = 8  # maximum number of payloads per parameter, each of which may be a message


def message_rule(axes: Axes) -> MessageRule:
    """Return the rule for messages along `axes`, which depends on whether the devices of their ranks have streams.

    The current device of the parameters is not used, because it may be the meta device on some ranks only, and all
    ranks need the same layout.
    """
    return ON_A_QUEUE if accelerator_for(torch.device(axes.mesh.device_type)).has_streams else PAIRWISE


@dataclass(frozen=True)
class GroupPlan:
    """The sharding of one parameter group."""

    layout: GroupLayout
    contract: DtypeContract
    options: ShardOptions
    axes: Axes
    device: torch.device
    memory: MemoryKind

    @classmethod
    def of(
        cls,
        shapes: Sequence[Sequence[int]],
        dims: Sequence[int | None],
        contract: DtypeContract,
        options: ShardOptions,
        axes: Axes,
        device: torch.device,
        memory: MemoryKind,
    ) -> Self:
        """Return the plan for parameters of `shapes`, each sharded along its entry of `dims`; None selects the best."""
        smallest = min(contract.stored.itemsize, contract.delivered.itemsize)
        step = 1 if memory.folder is None else ALIGNMENT // smallest
        layout = lay_out(shapes, axes.shard_world, contract.itemsize, dims, message_rule(axes), step)
        return cls(layout, contract, options, axes, device, memory)

    def changed(self, contract: DtypeContract, device: torch.device, memory: MemoryKind) -> Self:
        """Return the plan for the same parameters with other dtypes or on other devices."""
        specs = [param.spec for param in self.layout.params]
        shapes, dims = [spec.shape for spec in specs], [spec.dim for spec in specs]
        return self.of(shapes, dims, contract, self.options, self.axes, device, memory)

    def under(self, group_size: int | None, placements: Placements) -> GroupPlan:
        """Return the plan for the same parameters and mesh under different placements and a different rank group size.

        Parameters on a disk are in memory instead if the placements keep them unsharded between steps.
        """
        precision = self.options.precision
        if placements.optimizer is Placement.WHOLE:
            precision = replace(precision, gather_wire=None)  # nothing is gathered
        offload, memory = self.options.offload, self.memory
        on_disk = self.options.parameters_on_disk or self.options.starts_on_disk
        if placements.parameters is Placement.WHOLE and on_disk:
            offload, memory = OffloadPolicy(), replace(memory, folder=None)
        options = replace(self.options, placements=placements, precision=precision, offload=offload)
        return replace(self, axes=replace(self.axes, group_size=group_size), options=options, memory=memory)

    def can_use_transports_of(self, other: GroupPlan) -> bool:
        """Return True if both plans can use the same transports: the same layout of messages and the same encodings."""
        local, peer = self.contract, other.contract
        transports = (local.gather_wire, local.reduce_wire) == (peer.gather_wire, peer.reduce_wire)
        return transports and self.layout == other.layout

    @cached_property
    def rank(self) -> int:
        """The index of this rank's shard."""
        return self.axes.shard_rank

    @cached_property
    def shards_optimizer(self) -> bool:
        """True if each rank updates only its own shard."""
        return self.options.placements.optimizer is Placement.SHARDED

    @cached_property
    def encodes_gathers(self) -> bool:
        """True if gathers are encoded. If so, this rank's own shard is also decoded."""
        return self.contract.gather_wire is not None and self.shards_optimizer and self.layout.world > 1

    @cached_property
    def casts(self) -> bool:
        """True if compute does not use the stored values: they are cast to a different dtype, or decoded."""
        return self.contract.stored != self.contract.compute or self.encodes_gathers

    @cached_property
    def lives_in_unsharded(self) -> bool:
        """True if the optimizer's parameters are stored in the unsharded buffer itself."""
        return self.options.keeps_unsharded and not self.casts and not self.memory.offloaded

    @cached_property
    def is_on_disk(self) -> bool:
        """True if shards and their gradients are in a file, and in memory only while they are sent or updated."""
        return self.memory.folder is not None and self.memory.device.type != "meta"

    @cached_property
    def keeps_copy(self) -> bool:
        """True if the device has a copy of shards in host memory, because there are several gathers per step."""
        return self.memory.copied and self.shards_optimizer and not self.options.keeps_unsharded

    @cached_property
    def sent_dtype(self) -> torch.dtype:
        """The dtype of the shards that are passed to a gather. If gathers are encoded, the encoding casts them."""
        return self.contract.stored if self.encodes_gathers else self.contract.compute

    @property
    def copy_nbytes(self) -> int:
        """Bytes of the device's copy of shards that are in host memory."""
        return self.layout.shard_numel * self.sent_dtype.itemsize if self.keeps_copy else 0

    @cached_property
    def gathers_in_two_levels(self) -> bool:
        """True if groups of consecutive ranks keep parameters unsharded, with a secondary shard on each rank."""
        placements = self.options.placements
        return self.shards_optimizer and Placement.GROUPED in (placements.parameters, placements.parameters_in_step)

    @property
    def gathers_from_all(self) -> bool:
        """True if one all-gather fills the unsharded buffer with every rank's shard, without encoding."""
        return self.shards_optimizer and not (self.gathers_in_two_levels or self.encodes_gathers)

    @property
    def gather_messages(self) -> int:
        """The maximum number of tensors in a gather."""
        return len(self.layout.in_place) + 1

    @cached_property
    def sums_in_two_levels(self) -> bool:
        """True if gradients are summed within groups of neighboring ranks first."""
        return self.options.placements.gradients is Placement.GROUPED

    @cached_property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded buffer and of the pack's receive buffer next to it."""
        layout = self.layout
        return (layout.unsharded_numel + layout.world * layout.pack_numel) * self.contract.compute.itemsize

    @cached_property
    def stored_numel(self) -> int:
        """Number of elements of the memory that stores shards, in addition to the unsharded buffer."""
        layout = self.layout
        if self.is_on_disk:
            return 0
        if not self.shards_optimizer:
            return 0 if self.lives_in_unsharded else layout.unsharded_numel
        return layout.pack_numel if self.lives_in_unsharded else layout.shard_numel

    @property
    def stored_nbytes(self) -> int:
        """Bytes of `stored_numel` elements."""
        return self.stored_numel * self.contract.stored.itemsize

    @property
    def secondary_numel(self) -> int:
        """Number of elements of this rank's secondary shards, if groups of ranks keep parameters unsharded together."""
        size = self.axes.group_size
        return 0 if size is None else self.axes.shard_world // size * self.layout.shard_numel


@dataclass(frozen=True)
class PayloadPlan(GroupPlan):
    """The plan for tensor subclasses that define how they are gathered. Its layout is that of their gradients.

    Args:
        inner_nbytes: Bytes of the tensors that the unsharded parameters wrap.
    """

    inner_nbytes: int = 0

    @classmethod
    def of(
        cls,
        shapes: Sequence[Sequence[int]],
        dims: Sequence[int | None],
        contract: DtypeContract,
        options: ShardOptions,
        axes: Axes,
        device: torch.device,
        memory: MemoryKind,
    ) -> Self:
        """See `GroupPlan.of`. The class of a parameter chooses the encoding. Parameters are sharded on dim 0 only."""
        contract = replace(contract, gather_wire=None)
        return super().of(shapes, [0 for _ in dims], contract, options, axes, device, memory)

    def changed(self, contract: DtypeContract, device: torch.device, memory: MemoryKind) -> Self:
        return replace(super().changed(contract, device, memory), inner_nbytes=self.inner_nbytes)

    @cached_property
    def casts(self) -> bool:
        return True

    @cached_property
    def keeps_copy(self) -> bool:
        return False

    @cached_property
    def lives_in_unsharded(self) -> bool:
        return False

    @cached_property
    def unsharded_nbytes(self) -> int:
        """See `GroupPlan.unsharded_nbytes`: none in the unit's storage. Received data is in a separate buffer."""
        return 0

    @cached_property
    def stored_numel(self) -> int:
        return 0

    @property
    def stored_nbytes(self) -> int:
        return -(-self.inner_nbytes // self.axes.shard_world) if self.shards_optimizer else self.inner_nbytes

    @property
    def gather_messages(self) -> int:
        return _MOST_PAYLOADS * len(self.layout.params) + 1
