"""The shards of a parameter group that are stored on a disk."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fullshard.device.accelerator import accelerator_for, is_capturing
from fullshard.device.memory import Pool
from fullshard.disk.buffers import Buffer, buffers_of
from fullshard.disk.files import DiskWork
from fullshard.disk.interface import aligned
from fullshard.disk.space import shared_scratch
from fullshard.disk.tensors import OnDisk
from fullshard.engine.findings import DiskFailures
from fullshard.engine.group_buffers import ShardStorage
from fullshard.engine.group_plan import GroupPlan
from fullshard.errors import StateError


class ShardsOnDisk(ShardStorage):
    """This rank's shards in a scratch file, laid out as `OwnShards` are. `shards` are `OnDisk` tensors."""

    def __init__(self, plan: GroupPlan) -> None:
        super().__init__(plan)
        folder, stored, device = plan.memory.folder, plan.contract.stored, plan.memory.device
        assert folder is not None
        self._nbytes = aligned(plan.layout.shard_numel * stored.itemsize)
        self._extent = shared_scratch(folder).take(self._nbytes, state="parameters")
        self._stored = [
            OnDisk(
                self._extent, param.shard_offset * stored.itemsize, param.spec.shard_shape(plan.rank), stored, device
            )
            for param in plan.layout.params
        ]
        self.shards = [*self._stored]
        self._buffers = buffers_of(plan.device)
        self._held: Buffer | None = None  # has been read, or is being read
        self._reading = DiskWork([])
        self._version = -1  # of the extent, as it was read
        self.failures: DiskFailures = DiskFailures(are_reported=False)

    @torch.no_grad()
    def fill(self, values: Iterable[Tensor | None]) -> None:
        """See `ShardStorage.fill`. Write all shards together, with zeros for missing values and padding."""
        buffer = self._buffers.take(self._nbytes)
        buffer.data.zero_()
        for shard, value in zip(self._stored, values, strict=True):
            if value is not None:
                shard.over(buffer.data).copy_(value)
        self._buffers.give(buffer, self._extent.write(buffer.data))

    def read_ahead(self) -> None:
        """See `ShardStorage.read_ahead`. Shards that are being read are read again only if they have changed."""
        if self._held is not None and self._version == self._extent.version:
            return
        self.note_sent()
        self._held = self._buffers.take(self._nbytes)
        self._reading, self._version = DiskWork([]), self._extent.version
        with self.failures.noted():
            self._reading = self._extent.read(self._held.data, is_ahead=True)

    @property
    def is_alone(self) -> bool:
        """See `ShardStorage.is_alone`."""
        return False

    def to_send(self, scratch: Pool, *, changed: bool) -> tuple[list[Tensor], Tensor | None]:
        """See `ShardStorage.to_send`. The buffer is copied if the device or the dtype differs.

        Other ranks wait for the data. So after a failed read the buffer is sent unchanged, and the failure is recorded.
        """
        plan, layout, stored, taken = self.plan, self.plan.layout, self.plan.contract.stored, None
        if is_capturing(plan.device):
            raise StateError(
                "parameters offloaded to disk were needed within a CUDA graph, which cannot read a disk when it is "
                "replayed. Leave parameters out of Offload, or do not capture this model."
            )
        self.read_ahead()
        with self.failures.noted():
            self._reading.wait()
        assert self._held is not None, "it has been read"
        shards = self._held.data[: layout.shard_numel * stored.itemsize].view(stored)
        if plan.sent_dtype != stored or plan.memory.offloaded:
            read, shards = shards, scratch.take(layout.shard_numel, plan.sent_dtype)
            shards.copy_(read, non_blocking=True)
            taken = shards
            self.note_sent()
        parts = [shards[item.part] for item in layout.in_place]
        return [*parts, shards[layout.pack]] if layout.pack_numel else parts, taken

    def note_sent(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            streams = accelerator_for(self.plan.device).streams
            self._buffers.give(held, self._reading, streams.gather.mark())
