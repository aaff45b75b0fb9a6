"""Gradients of a parameter group that are stored on a disk from their reduction to the optimizer's step.

They are summed in a buffer, which is written asynchronously. The optimizer sees `OnDisk` tensors. The code that runs
the step reads them into memory first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from fullshard.disk.buffers import Buffer, buffers_of
from fullshard.disk.interface import aligned
from fullshard.disk.space import Extent, shared_scratch
from fullshard.disk.tensors import OnDisk
from fullshard.engine.findings import DiskFailures
from fullshard.engine.gradients import Gradients, GradientState
from fullshard.engine.group_plan import GroupPlan
from fullshard.engine.sharded_param import ShardedParam


class GradientsOnDisk(Gradients):
    """The gradients of a group whose shards are stored on a disk."""

    def __init__(self, plan: GroupPlan, params: Sequence[ShardedParam], state: GradientState) -> None:
        super().__init__(plan, params, state)
        self._nbytes = aligned(plan.layout.shard_numel * plan.contract.delivered.itemsize)
        self._buffers = buffers_of(plan.device)
        self._buffer: Buffer | None = None  # contains `flat`
        self._extent: Extent | None = None  # contains the stored gradients
        self._counts: list[tuple[int, ...]] = []  # the result of `_references` without references of other code
        self._given: list[int] = []  # parameters whose gradients are in `flat`
        self.failures: DiskFailures = DiskFailures(are_reported=False)

    def new_shards(self) -> Tensor:
        """Return a buffer for the gradient shards, in the optimizer's dtype. `hand_over` releases it."""
        if self.flat is None:
            self._buffer = self._buffers.take(self._nbytes)
            self.flat = self._typed(self._buffer)
        return self.flat

    def _typed(self, buffer: Buffer) -> Tensor:
        delivered = self.plan.contract.delivered
        return buffer.data[: self.plan.layout.shard_numel * delivered.itemsize].view(delivered)

    def give(self, indices: Iterable[int]) -> None:
        """See `Gradients.give`. The optimizer sees the gradients after `hand_over`."""
        self._given += indices

    def hand_over(self) -> None:
        """Start to write the given gradients to the disk, and let the optimizer see them."""
        given, self._given = self._given, []
        buffer, self._buffer, self.flat = self._buffer, None, None
        if buffer is None:
            return
        work = None
        with self.failures.noted():
            if given:
                work = self._unused_extent().write(buffer.data)
                self._show(given)
        self._buffers.give(buffer, work)

    def add(self, sums: Mapping[int, Tensor], *, are_own: bool) -> None:
        """See `Gradients.add`. Gradients on the disk are read and written in one operation each."""
        with self.failures.noted():
            self._add(sums)

    def _add(self, sums: Mapping[int, Tensor]) -> None:
        stored = [i for i in sums if self._stored(i)]
        fresh = [i for i in sums if not self.params[i].has_grad]
        extent = self._extent if stored else self._unused_extent()
        assert extent is not None
        buffer = self._buffers.take(self._nbytes)
        extent.read(buffer.data).wait()
        flat, delivered = self._typed(buffer), self.plan.contract.delivered
        for i, shard in sums.items():
            if i in fresh:
                self.shard_in(i, flat).copy_(shard)
            elif i in stored:
                self.shard_in(i, flat).add_(shard.to(delivered))
            else:
                super().add({i: shard}, are_own=False)
        self._buffers.give(buffer, extent.write(buffer.data))
        self._show(fresh)

    def drop_shards(self) -> None:
        """See `Gradients.drop_shards`. The extent is freed with the last reference to it."""
        super().drop_shards()
        if self._buffer is not None:
            self._buffers.give(self._buffer)
        self._buffer = self._extent = None
        self._given = []

    def _stored(self, i: int) -> bool:
        """Return True if the optimizer's gradient of parameter `i` is the one stored in the extent."""
        grad = self.params[i].grad
        return isinstance(grad, OnDisk) and grad.extent is self._extent

    def _unused_extent(self) -> Extent:
        """Return the extent for all gradients: the last one, unless other code still refers to gradients in it."""
        if self._extent is None or self._counts != self._references():
            plan, delivered = self.plan, self.plan.contract.delivered
            assert plan.memory.folder is not None
            self._shards = []
            self._extent = extent = shared_scratch(plan.memory.folder).take(self._nbytes, state="gradients")
            for placed, param in zip(plan.layout.params, self.params, strict=True):
                shape = placed.spec.shard_shape(plan.rank)
                stored = OnDisk(extent, placed.shard_offset * delivered.itemsize, shape, delivered, plan.memory.device)
                self._shards.append(param.placed(stored))
            self._counts = self._references()
        return self._extent

    def _references(self) -> list[tuple[int, ...]]:
        """Count the references to the last gradients. The counts change if other code refers to them."""
        own = [(sys.getrefcount(shard), shard._use_count()) for shard in self._shards]  # type: ignore[attr-defined]
        return [*own, (sys.getrefcount(self._extent),)]

    def _show(self, indices: Iterable[int]) -> None:
        for i in indices:
            self.params[i].sharded.grad = self._shards[i]
