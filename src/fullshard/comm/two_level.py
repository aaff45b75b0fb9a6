"""Gathers and reductions over one axis in two levels: across groups of neighbouring ranks, and within a group.

N ranks are h groups of k neighbours: rank r has place j = r % k in group g = r // k. A whole of N equal parts is

    [part 0][part 1]...[part k-1]   [part k]...[part 2k-1]   ...      part g * k + j is that of rank (g, j)

and the *group part* of place j is what the ranks (0, j), (1, j), ... have together: parts j, k + j, 2k + j, end to end.
A gather fills group parts across groups, then wholes within each group. As long as group parts are kept and true, only
the second half is needed: nothing crosses a group's border. A reduction goes the other way: `reduce_within` is its
first half, and a reduce-scatter over `across` the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fullshard.comm.collectives import Collectives, Pending
from fullshard.comm.encoded import EncodedGather
from fullshard.tape.recorder import Origin

__all__ = ["TwoLevel"]


class TwoLevel:
    """The two collectives of one rank.

    Args:
        within: of its group, whose ranks are neighbours.
        across: of the ranks that have its place in every group.
    """

    def __init__(self, within: Collectives, across: Collectives) -> None:
        self._within = within
        self.across = across
        self.size = within.world
        self.groups = across.world

    def reserve_tags(self, count: int) -> tuple[int, int]:
        """The tags for `count` tensors of one kind of call, across and within."""
        return self.across.reserve_tags(count), self._within.reserve_tags(count * self.groups)

    def all_gather(
        self,
        wholes: Sequence[Tensor],
        group_parts: Sequence[Tensor],
        parts: Sequence[Tensor],
        *,
        across: Collectives | EncodedGather,
        tags: tuple[int, int],
        origin: Origin,
    ) -> Pending:
        """Every rank's part of each tensor in the corresponding whole; and the group parts on the way.

        Args:
            wholes: see `Collectives.all_gather`.
            group_parts: of each whole.
            parts: this rank's.
            across: `self.across`, or what encodes what goes over it.
            tags: see `reserve_tags`.
            origin: for the record.
        """
        gathered = across.all_gather(group_parts, parts, tag=tags[0], origin=origin)
        return self._then(gathered, lambda: self.gather_within(wholes, group_parts, tags=tags, origin=origin))

    def gather_within(
        self, wholes: Sequence[Tensor], group_parts: Sequence[Tensor], *, tags: tuple[int, int], origin: Origin
    ) -> Pending:
        """The wholes, from group parts that are in place on every rank of the group."""
        places = [place for whole in wholes for place in whole.view(self.groups, -1)]
        mine = [part for parts in group_parts for part in parts.view(self.groups, -1)]
        return self._within.all_gather(places, mine, tag=tags[1], origin=origin)

    def reduce_within(
        self,
        group_sums: Sequence[Tensor],
        wholes: Sequence[Tensor],
        part_numels: Sequence[int],
        *,
        tags: tuple[int, int],
        origin: Origin,
    ) -> Pending:
        """The sum over the group of this place's group part of each whole. The last parts may be short or empty."""
        sums, terms, numels = [], [], []
        for group_sum, whole, n in zip(group_sums, wholes, part_numels, strict=True):
            for group in range(self.groups):
                first = (group * self.size + self._within.rank) * n
                owned = max(0, min(n, whole.numel() - first))
                sums.append(group_sum[group * n : group * n + owned])
                terms.append(whole[group * self.size * n : (group + 1) * self.size * n])
                numels.append(n)
        return self._within.reduce_scatter(sums, terms, numels, 1, tag=tags[1], origin=origin)

    def _then(self, first: Pending, second: Callable[[], Pending]) -> Pending:
        if self._within.is_queued:
            first.wait()
            return second()

        def finish() -> None:
            first.wait()
            second().wait()

        return Pending(finish)
