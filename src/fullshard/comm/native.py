"""The native collectives of a backend: NCCL and similar backends, and the fake backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._compat import all_gather_each, all_reduce_each, reduce_scatter_each
from fullshard.comm.collectives import Collectives, divide
from fullshard.comm.transport import PartSums

__all__ = ["NativeCollectives"]


class NativeCollectives(Collectives):
    """The native collectives of a backend: one launch for all tensors of a call, queued on the current stream."""

    is_queued = True

    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> Callable[[], None]:
        all_gather_each([*wholes], [*parts], self.group)
        return _nothing

    def reduce_scatter(self, of: PartSums, tag: int) -> Callable[[], None]:
        # Rows missing in the last part are the one reason to copy a gradient: the backend wants equal parts. Who has
        # made room for them behind it has spared that.
        equal = [_padded(whole, n * self.world) for whole, n in zip(of.wholes, of.part_numels, strict=True)]
        receive = [s if s.numel() == n else s.new_empty(n) for s, n in zip(of.sums, of.part_numels, strict=True)]
        reduce_scatter_each(receive, equal, self.group)
        for out, total in zip(receive, of.sums, strict=True):
            if out is not total:
                total.copy_(out[: total.numel()])
        divide(of.sums, of.divisor)
        return _nothing

    def all_reduce(self, tensors: Sequence[Tensor], divisor: float, tag: int) -> Callable[[], None]:
        all_reduce_each([*tensors], self.group)
        divide(tensors, divisor)
        return _nothing

    def all_to_all(self, receive: Sequence[Tensor], send: Sequence[Tensor], tag: int) -> Callable[[], None]:
        nothing = [send[self.rank].new_empty(0)]  # its own is in place
        before, after = slice(self.rank), slice(self.rank + 1, None)
        received, sent = ([*tensors[before], *nothing, *tensors[after]] for tensors in (receive, send))
        dist.all_to_all(received, sent, group=self.group)
        return _nothing


def _nothing() -> None:
    """Do nothing, since the backend has completed the call."""


def _padded(whole: Tensor, numel: int) -> Tensor:
    if whole.numel() == numel:
        return whole
    if whole.storage_offset() == 0 and whole.untyped_storage().nbytes() == numel * whole.itemsize:
        return whole.as_strided((numel,), (1,))
    return torch.nn.functional.pad(whole, (0, numel - whole.numel()))
