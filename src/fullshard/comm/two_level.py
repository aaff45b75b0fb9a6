"""A shard axis with two levels: across groups of consecutive ranks, and within a group.

N ranks form h groups of k consecutive ranks: rank r has position j = r % k in group g = r // k. A tensor of N parts is

    [part 0][part 1]...[part k-1]   [part k]...[part 2k-1]   ...      part g * k + j is that of rank (g, j)

and the *secondary shard* of position j is the concatenation of parts j, k + j, 2k + j, ... of ranks (0, j), (1, j), ...
A gather fills secondary shards across groups, then full tensors within each group. As long as secondary shards are
valid, only the second step is needed, without communication between groups. A reduction has the opposite order.

[Note: few messages within a group]
Within a group, parts j and k + j of a tensor are not adjacent. So without intermediate buffers, each tensor needs h
messages. This is the cheapest way between CPUs. NCCL is slow at many operations in one group (see the note in
`layout/group_layout.py`). There, more than a few messages are replaced by one message per tensor in the order of
positions, through scratch memory of its size: k contiguous secondary shards. One strided copy converts (position,
group) to (group, position), or back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fullshard.comm.transport import Gathers, PartSums, Pending, Sums, then
from fullshard.device.memory import Pool
from fullshard.layout.group_layout import FEW_OPERATIONS
from fullshard.tape.recorder import Origin


class TwoLevelGathers(Gathers):
    """Gathers across groups, and then within each.

    Args:
        across: The transport between the ranks with the same position in every group.
        within: The transport between the consecutive ranks of this rank's group.
        scratch: The pool for secondary shards, and for tensors that are sent in the order of positions.
    """

    def __init__(self, across: Gathers, within: Gathers, scratch: Pool) -> None:
        self.world = across.world * within.world
        self.rank = across.rank * within.world + within.rank
        self.is_queued = within.is_queued
        self._across = across
        self._within = within
        self._scratch = scratch
        self._flat: Tensor | None = None  # all secondary shards, end to end
        self._secondary: Sequence[Tensor] = ()

    @property
    def secondary_nbytes(self) -> int:
        """Bytes of the secondary shards that are in memory."""
        return 0 if self._flat is None else self._flat.nbytes

    def release(self) -> None:
        """Free the secondary shards."""
        if self._flat is not None:
            self._scratch.give(self._flat)
            self._flat, self._secondary = None, ()

    def all_gather(
        self, receive: Sequence[Tensor], send: Sequence[Tensor], *, origin: Origin, into_shared: bool = False
    ) -> Pending:
        """See `Gathers.all_gather`. This also fills secondary shards, which are kept until `release`."""
        if not receive:  # all parameters are empty
            return Pending()
        if self._flat is None:
            sizes = [whole.numel() // self._within.world for whole in receive]
            self._flat = self._scratch.take(sum(sizes), receive[0].dtype)
            self._secondary = self._flat.split(sizes)
        gathered = self._across.all_gather(self._secondary, send, origin=origin)
        if self.is_queued:
            gathered.wait()
            return self.gather_within(receive, origin=origin)

        def finish() -> None:
            gathered.wait()
            self.gather_within(receive, origin=origin).wait()

        return Pending(finish)

    def gather_within(self, receive: Sequence[Tensor], *, origin: Origin) -> Pending:
        """Gather the full tensors from secondary shards, which must be valid on every rank of the group."""
        groups, size = self._across.world, self._within.world
        if _reorders(self._within, groups * len(receive)):
            numels = [whole.numel() for whole in receive]
            scratch = self._scratch.take(sum(numels), receive[0].dtype)
            by_position = scratch.split(numels)

            def put() -> None:
                for whole, shards in zip(receive, by_position, strict=True):
                    whole.view(groups, size, -1).copy_(shards.view(size, groups, -1).transpose(0, 1))
                self._scratch.give(scratch)

            return then(self._within, self._within.all_gather(by_position, self._secondary, origin=origin), put)
        places = [place for whole in receive for place in whole.view(groups, -1)]
        local = [part for shard in self._secondary for part in shard.view(groups, -1)]
        return self._within.all_gather(places, local, origin=origin)


class TwoLevelSums:
    """Sums within a group. The sums `across` groups are then a reduce-scatter of the results.

    Args:
        across: The transport between the ranks with the same position in every group.
        within: The transport between the consecutive ranks of this rank's group.
        scratch: The pool for tensors that are sent in the order of positions.
    """

    def __init__(self, across: Sums, within: Sums, scratch: Pool) -> None:
        self.across = across
        self._within = within
        self._scratch = scratch

    def reduce_within(
        self, group_sums: Sequence[Tensor], wholes: Sequence[Tensor], part_numels: Sequence[int], *, origin: Origin
    ) -> Pending:
        """Sum this position's secondary shard of each full tensor over the group. The last parts may be short or empty.

        Args:
            group_sums: The receive buffers, with space for equal parts of all groups.
            wholes: The full tensors of this rank.
            part_numels: The elements of a part of each full tensor.
            origin: the unit and phase of the call.
        """
        if _reorders(self._within, self.across.world * len(wholes)):
            return self._reduce_reordered(group_sums, wholes, part_numels, origin)
        sums, terms, numels = [], [], []
        size = self._within.world
        for group_sum, whole, n in zip(group_sums, wholes, part_numels, strict=True):
            for group, owned in enumerate(self._owned(whole.numel(), n)):
                sums.append(group_sum[group * n : group * n + owned])
                terms.append(whole[group * size * n : (group + 1) * size * n])
                numels.append(n)
        return self._within.reduce_scatter(PartSums(sums, terms, numels, 1), origin=origin)

    def _reduce_reordered(
        self, group_sums: Sequence[Tensor], wholes: Sequence[Tensor], part_numels: Sequence[int], origin: Origin
    ) -> Pending:
        size, groups = self._within.world, self.across.world
        numels = [size * groups * n for n in part_numels]
        scratch = self._scratch.take(sum(numels), wholes[0].dtype)
        by_position = scratch.split(numels)
        for whole, shards, n in zip(wholes, by_position, part_numels, strict=True):
            _spread(whole, shards.view(size, groups, n).transpose(0, 1))
        terms = PartSums(group_sums, by_position, [groups * n for n in part_numels], 1)
        return then(
            self._within, self._within.reduce_scatter(terms, origin=origin), lambda: self._scratch.give(scratch)
        )

    def secondary_numel(self, numel: int, part_numel: int) -> int:
        """Return the number of elements of this position's secondary shard of a tensor of `numel`."""
        return sum(self._owned(numel, part_numel))

    def _owned(self, numel: int, part_numel: int) -> list[int]:
        """Return by group the number of elements of a full tensor that belong to the rank of this position."""
        size, place = self._within.world, self._within.rank
        starts = ((group * size + place) * part_numel for group in range(self.across.world))
        return [max(0, min(part_numel, numel - start)) for start in starts]


def _reorders(within: Gathers | Sums, messages: int) -> bool:
    """Return True if one message per tensor plus a copy is faster than `messages` messages."""
    return within.is_queued and messages > FEW_OPERATIONS


@torch.no_grad()
def _spread(whole: Tensor, parts: Tensor) -> None:
    """Copy `whole` to `parts`, of shape (group, position, elements of a part). Missing elements become zero."""
    groups, size, n = parts.shape
    full, remaining = divmod(whole.numel(), max(1, size * n))
    whole_groups, others = whole.split([full * size * n, remaining])
    parts[:full].copy_(whole_groups.view(full, size, n))
    if full < groups:
        parts[full:].zero_()
        count, last = divmod(remaining, max(1, n))
        equal, short = others.split([count * n, last])
        parts[full, :count].copy_(equal.view(count, n))
        if last:
            parts[full, count, :last].copy_(short)
