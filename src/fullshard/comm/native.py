"""The native collectives of a backend: NCCL and similar backends, and the fake backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._compat import all_gather_each, all_reduce_each, reduce_scatter_each
from fullshard.comm.collectives import Collectives, divide
from fullshard.comm.transport import PartSums


class NativeCollectives(Collectives):
    """The native collectives of a backend: one launch for all tensors of a call, queued on the current stream."""

    is_queued = True
    compares = False

    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], tag: int) -> None:
        all_gather_each([*wholes], [*parts], self.group)

    def reduce_scatter(self, of: PartSums, tag: int) -> None:
        # The backend needs parts of equal size. So a gradient whose last part is short is copied, unless its storage
        # already has space for the padding.
        sums, wholes = [*of.sums], [*of.wholes]
        for i, n in enumerate(of.part_numels):
            if wholes[i].shape[0] != n * self.world:
                wholes[i] = _padded(wholes[i], n * self.world)
            if sums[i].shape[0] != n:
                sums[i] = sums[i].new_empty(n)
        reduce_scatter_each(sums, wholes, self.group)
        for out, total in zip(sums, of.sums, strict=True):
            if out is not total:
                total.copy_(out[: total.numel()])
        divide(of.sums, of.divisor)

    def all_reduce(self, tensors: Sequence[Tensor], divisor: float, tag: int) -> None:
        all_reduce_each([*tensors], self.group)
        divide(tensors, divisor)

    def all_to_all(self, receive: Sequence[Tensor], send: Sequence[Tensor], tag: int) -> None:
        nothing = [send[self.rank].new_empty(0)]  # this rank's own part is in place already
        before, after = slice(self.rank), slice(self.rank + 1, None)
        received, sent = ([*tensors[before], *nothing, *tensors[after]] for tensors in (receive, send))
        dist.all_to_all(received, sent, group=self.group)


def _padded(whole: Tensor, numel: int) -> Tensor:
    if whole.storage_offset() == 0 and whole.untyped_storage().nbytes() == numel * whole.itemsize:
        return whole.as_strided((numel,), (1,))
    return torch.nn.functional.pad(whole, (0, numel - whole.numel()))
