"""The memory of a parameter group: storage of its shards, and the buffer of its unsharded parameters.

The storage of shards depends on the placements and the dtypes:

    parameters sharded, or cast for compute    a buffer of this rank's shards            OwnShards
    the same, on the CPU for the optimizer     the same, and a copy on the device        CopiedShards
    whole between steps, optimizer sharded     this rank's rows of the unsharded buffer  RowsOfUnsharded
    optimizer whole, compute cast              a separate whole buffer                   WholeCopy
    optimizer whole                            the unsharded buffer                      UnshardedItself
    parameters sharded, and on a disk          a scratch file                            ShardsOnDisk
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from math import prod

import torch
from torch import Tensor

from fullshard._compat import held_twice, storage_references
from fullshard.device.memory import Pool, typed_view
from fullshard.device.transfers import transfers
from fullshard.engine.findings import DiskFailures
from fullshard.engine.group_plan import GroupPlan
from fullshard.engine.pack import Pack
from fullshard.tape.recorder import allocating

Region = tuple[torch.UntypedStorage, int]
"""A storage and a byte offset, at which the memory begins."""


class UnshardedBuffer:
    """The slice of a unit's storage for the unsharded parameters of one group.

    `params` are these parameters. `receive` are the buffers that a gather fills: the regions of parameters that are
    gathered in place, and the receive buffer of the pack.
    """

    def __init__(self, plan: GroupPlan, pack: Pack, region: Region) -> None:
        storage, byte_offset = region
        with torch.inference_mode(False):  # may be written to with or without inference mode
            layout, dtype = plan.layout, plan.contract.compute
            view = partial(typed_view, storage, dtype, device=plan.device)
            self.flat = view(byte_offset, (layout.unsharded_numel,))
            offsets = [byte_offset + param.unsharded_offset * dtype.itemsize for param in layout.params]
            shapes = [param.spec.shape for param in layout.params]
            self.params = [view(o, s) for o, s in zip(offsets, shapes, strict=True)]
            self.receive = [self.flat[item.region] for item in layout.in_place]
            message_offset = byte_offset + layout.unsharded_numel * dtype.itemsize
            message = view(message_offset, (layout.world * layout.pack_numel,))
            if layout.pack_numel:
                self.receive.append(message)
            unpacking = pack.unpacking(self.params, message.view(layout.world, layout.pack_numel))
        self.unpack = unpacking.copy
        """Copy the received pack into the parameters."""


class ShardStorage(ABC):
    """The memory that stores a group's shards on this rank.

    `shards` are this rank's values of each parameter, in their shape. `memory` is what they need in addition to the
    unsharded buffer.
    """

    shards: list[Tensor]
    failures: DiskFailures | None = None  # of the disk that stores them

    def __init__(self, plan: GroupPlan) -> None:
        self.plan = plan
        with allocating("shards"):
            self.memory = plan.memory.zeros(plan.stored_numel, plan.contract.stored)
        self._references = -1

    def note_references(self) -> None:
        """Record the current number of references to the memory, for `is_alone`. Call it after creating the shards."""
        self._references = storage_references(self.memory.untyped_storage())

    @property
    def is_alone(self) -> bool:
        """True if only this object and the parameters refer to the shards and their memory; False if unknown."""
        return storage_references(self.memory.untyped_storage()) == self._references and held_twice(self.shards)

    @torch.no_grad()
    def fill(self, values: Iterable[Tensor | None]) -> None:
        """Copy one value into each shard. A value of None leaves its shard unchanged."""
        for shard, value in zip(self.shards, values, strict=True):
            if value is not None:
                shard.copy_(value)

    def read_ahead(self) -> None:  # noqa: B027  # nothing to read
        """Start to read the shards that `to_send` will return."""

    def note_sent(self) -> None:  # noqa: B027  # nothing to free
        """Record that the buffers of `to_send` have been sent, or will not be."""

    @abstractmethod
    def to_send(self, scratch: Pool, *, changed: bool) -> tuple[list[Tensor], Tensor | None]:
        """Return this rank's send buffers for a gather, and the scratch memory that contains them, if any."""


class OwnShards(ShardStorage):
    """A contiguous buffer of this rank's shards."""

    def __init__(self, plan: GroupPlan) -> None:
        super().__init__(plan)
        self.shards = [
            self.memory[param.shard_offset :][: param.spec.shard_numel(plan.rank)].view(
                param.spec.shard_shape(plan.rank)
            )
            for param in plan.layout.params
        ]
        self._is_copied = plan.sent_dtype != plan.contract.stored or plan.memory.offloaded  # before it is sent
        self._parts = [] if self._is_copied else self._parts_of(self.memory)
        self.note_references()

    def to_send(self, scratch: Pool, *, changed: bool) -> tuple[list[Tensor], Tensor | None]:
        """See `ShardStorage.to_send`. A cast or an upload is one copy of the whole buffer."""
        if not self._is_copied:
            return self._parts, None
        plan = self.plan
        taken = scratch.take(plan.layout.shard_numel, plan.sent_dtype)
        taken.copy_(self.memory, non_blocking=True)
        if plan.memory.offloaded:
            transfers.note("cpu", "parameters", arrived=taken.nbytes)
        return self._parts_of(taken), taken

    def _parts_of(self, shards: Tensor) -> list[Tensor]:
        layout = self.plan.layout
        parts = [shards[item.part] for item in layout.in_place]
        return [*parts, shards[layout.pack]] if layout.pack_numel else parts


class CopiedShards(OwnShards):
    """Shards in host memory, with a copy on the device in the dtype to send. It is updated once per step."""

    def __init__(self, plan: GroupPlan) -> None:
        super().__init__(plan)
        self._copy: Tensor | None = None  # allocated on the stream that gathers

    def to_send(self, scratch: Pool, *, changed: bool) -> tuple[list[Tensor], Tensor | None]:
        """See `ShardStorage.to_send`."""
        if self._copy is None:
            with allocating("shards"):
                self._copy = torch.empty(
                    self.plan.layout.shard_numel, dtype=self.plan.sent_dtype, device=self.plan.device
                )
            changed = True
        if changed:
            self._copy.copy_(self.memory, non_blocking=True)
            transfers.note("cpu", "parameters", arrived=self._copy.nbytes)
        return self._parts_of(self._copy), None


class RowsOfUnsharded(ShardStorage):
    """This rank's rows of the unsharded buffer, and a buffer of its packed shards."""

    def __init__(self, plan: GroupPlan, unsharded: UnshardedBuffer) -> None:
        super().__init__(plan)
        layout = plan.layout
        self._rows = [whole.view(layout.world, -1)[plan.rank] for whole in unsharded.receive[: len(layout.in_place)]]
        rows = iter(self._rows)
        self.shards = []
        for param in layout.params:
            shape = param.spec.shard_shape(plan.rank)
            flat = next(rows) if param.in_place else self.memory[param.shard_offset - layout.pack_offset :]
            self.shards.append(flat[: prod(shape)].view(shape))

    def to_send(self, scratch: Pool, *, changed: bool) -> tuple[list[Tensor], Tensor | None]:
        return [*self._rows, self.memory] if self.plan.layout.pack_numel else self._rows, None


class WholeCopy(ShardStorage):
    """Unsharded parameters for the optimizer, separate from those in the compute dtype."""

    def __init__(self, plan: GroupPlan) -> None:
        super().__init__(plan)
        self.shards = [
            self.memory[param.unsharded_offset :][: param.spec.numel].view(param.spec.shape)
            for param in plan.layout.params
        ]
        self.note_references()

    def to_send(self, scratch: Pool, *, changed: bool) -> tuple[list[Tensor], Tensor | None]:
        """See `ShardStorage.to_send`: nothing, since every rank has all values."""
        return [], None


class UnshardedItself(WholeCopy):
    """Unsharded parameters that the optimizer updates in the unsharded buffer itself."""

    def __init__(self, plan: GroupPlan, unsharded: UnshardedBuffer) -> None:
        ShardStorage.__init__(self, plan)
        self.shards = [
            unsharded.flat[param.unsharded_offset :][: param.spec.numel].view(param.spec.shape)
            for param in plan.layout.params
        ]
