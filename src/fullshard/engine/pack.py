"""The pack: one message for all parameters that are small or cannot be split into aligned shards. It needs a copy.

[Note: one kernel, and CUDA graphs]
On a GPU `torch._chunk_cat` and `torch.split_with_sizes_copy` are one kernel for many tensors. They write the addresses
of the tensors to page-locked memory, queue a copy of it to the device, and free it. A replayed graph would repeat this
copy when the memory may be in use for other data. So within a capture each tensor is copied separately: the addresses
are then arguments in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from operator import attrgetter

import torch
from torch import Tensor

from fullshard.device.accelerator import accelerator_for, is_capturing
from fullshard.layout.group_layout import GroupLayout, ParamLayout
from fullshard.layout.shard_spec import ShardSpec

_FEW_COPIES = 2  # up to this number, separate copies are as fast as one kernel, which needs a copy of the addresses

_DTYPE = attrgetter("dtype")

_Pair = tuple[Tensor, Tensor]


class Pack:
    """Copies between the packed parameters of a group and messages.

    A message has one row per rank, `(world, pack_numel)`, and some columns for each parameter.
    """

    def __init__(self, layout: GroupLayout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self._columns = list(_columns(layout))
        self._whole = [i for i in layout.packed if layout.params[i].spec.dim is None]
        self._strided = [i for i in layout.packed if layout.params[i].spec.dim not in (0, None)]
        self._zeros: dict[torch.dtype, _ZeroColumns] = {}

    def pairs(self, i: int, whole: Tensor, message: Tensor) -> Iterator[_Pair]:
        """Return pairs of slices with the same values: a slice of parameter `i`, and a slice of `message`."""
        return _pairs(self._layout.params[i].spec, whole, self._rows(i, message), self._rank)

    def _rows(self, i: int, message: Tensor) -> Tensor:
        """Return the columns of parameter `i`."""
        part, start = self._layout.params[i].part, self._layout.pack_offset
        return message[:, part.start - start : part.stop - start]

    def unpacking(self, wholes: Sequence[Tensor], message: Tensor) -> Unpacking:
        """Return the copies from `message` to the packed parameters among `wholes`, the parameters of the group."""
        return Unpacking(self._layout, self._rank, self._columns, wholes, message)

    def write(self, message: Tensor, grads: Mapping[int, Tensor]) -> None:
        """Write the gradients of packed parameters to `message`, one row per rank.

        Args:
            message: (world, pack_numel). Padding becomes zeros.
            grads: The unsharded gradients by parameter index. Missing ones become zeros. If all have the same dtype,
                which may differ from that of the message, the same kernel casts them.
        """
        if is_capturing(message.device):  # [Note: one kernel, and CUDA graphs]
            message.zero_()
            _copy_each([pair for i in self._layout.packed if i in grads for pair in self._parts(i, grads[i], message)])
            return
        world = self._layout.world
        given = {i: grads[i] for i in self._layout.packed if i in grads}
        dtypes = {*map(_DTYPE, given.values())}
        dtype = dtypes.pop() if len(dtypes) == 1 else message.dtype
        for i, grad in given.items():
            if grad.dtype is not dtype:
                given[i] = grad.to(dtype)
        for i in self._whole:
            if i in given:
                given[i] = given[i].view(1, -1).expand(world, -1).contiguous()
        strided = [i for i in self._strided if given.pop(i, None) is not None]
        if dtype not in self._zeros:
            self._zeros[dtype] = _ZeroColumns(message, dtype)
        zeros = self._zeros[dtype]
        torch._chunk_cat(
            [given[i] if i in given else zeros[width] for i, width in self._columns], 0, world, out=message
        )
        _copy_each([(row, part) for i in strided for part, row in self.pairs(i, grads[i], message)])

    def _parts(self, i: int, grad: Tensor, message: Tensor) -> Iterator[_Pair]:
        """Return pairs of slices with the same values: of `message`, and of the ranks' shards of `grad`."""
        if self._layout.params[i].spec.dim is None:
            yield self._rows(i, message), grad.view(1, -1).expand(self._layout.world, -1)
        else:
            for part, row in self.pairs(i, grad, message):
                yield row, part


class _ZeroColumns(dict[int, Tensor]):
    """Tensors of zeros, by number of columns. They are contiguous, which makes `torch._chunk_cat` fast."""

    def __init__(self, message: Tensor, dtype: torch.dtype) -> None:
        self._message, self._dtype = message.new_empty(message.shape[0], 0), dtype

    def __missing__(self, width: int) -> Tensor:
        self[width] = self._message.new_zeros(self._message.shape[0], width, dtype=self._dtype)
        return self[width]


class Unpacking:
    """The copies from a message to the packed parameters, all of them contiguous. It keeps views of both.

    [Note: copies out of the pack]
    The columns of one parameter are a strided view. `torch._foreach_copy_` copies strided views one by one. This is the
    fastest way on a CPU, but on a GPU it launches one kernel per parameter. There `torch.split_with_sizes_copy` copies
    all columns of the message in one kernel. It needs a contiguous target for each slice of columns, with one row per
    rank. A parameter whose shards have equal sizes is such a target. All other columns are copied to contiguous scratch
    memory in the same kernel, and from there by one `torch._foreach_copy_`, which is one more kernel. Only parameters
    that are sharded on a dim other than 0 need one kernel each.

    Args:
        layout: The layout of the group.
        rank: the index of this rank's shard.
        columns: See `_columns`.
        wholes: The parameters of the group.
        message: (world, pack_numel).
    """

    def __init__(
        self,
        layout: GroupLayout,
        rank: int,
        columns: Sequence[tuple[int, int]],
        wholes: Sequence[Tensor],
        message: Tensor,
    ) -> None:
        self._message = message
        self._rank = rank
        self._widths = [width for _, width in columns]
        self._targets: list[Tensor | None] = []  # one for each slice of columns; None for scratch memory
        self._others: list[tuple[ShardSpec, Tensor] | None] = []  # the parameter of each scratch target; None: padding
        for i, width in columns:
            spec = None if i < 0 else layout.params[i].spec
            divides = spec is not None and spec.dim == 0 and not spec.padding
            self._targets.append(wholes[i].view(-1, width) if divides else None)
            if not divides:
                self._others.append(None if spec is None else (spec, wholes[i]))
        pairs = [
            pair
            for (i, _), rows in zip(columns, message.split(self._widths, 1), strict=True)
            if i >= 0
            for pair in _pairs(layout.params[i].spec, wholes[i], rows, rank)
        ]
        self._each = [to for to, _ in pairs], [sent for _, sent in pairs]
        self._scratch_widths = [n for n, target in zip(self._widths, self._targets, strict=True) if target is None]
        self._at_once = len(pairs) > _FEW_COPIES and accelerator_for(message.device).has_streams

    def copy(self) -> None:
        """Copy the message into the parameters."""
        if self._at_once and not is_capturing(self._message.device):  # [Note: one kernel, and CUDA graphs]
            self.copy_at_once()
        elif self._each[0]:
            torch._foreach_copy_(*self._each)

    def copy_at_once(self) -> None:
        """Copy the message into the parameters in as few kernels as possible."""
        world, widths = self._message.shape[0], self._scratch_widths
        if not widths:
            all_targets = [target for target in self._targets if target is not None]
            torch.split_with_sizes_copy(self._message, self._widths, dim=1, out=all_targets)
            return
        scratch = self._message.new_empty(world * sum(widths)).split([world * n for n in widths])
        rows = [flat.view(world, n) for flat, n in zip(scratch, widths, strict=True)]
        free = iter(rows)
        targets = [next(free) if target is None else target for target in self._targets]
        torch.split_with_sizes_copy(self._message, self._widths, dim=1, out=targets)
        flat, strided = list[_Pair](), list[_Pair]()
        for other, sent in zip(self._others, rows, strict=True):
            if other is None:
                continue
            spec, whole = other
            if spec.dim == 0:
                flat.append((whole.view(-1), sent.view(-1)[: spec.numel]))
            elif spec.dim is None:
                flat.append((whole.view(-1), sent[self._rank]))
            else:
                strided += _pairs(spec, whole, sent, self._rank)
        _copy_each(flat)
        _copy_each(strided)


def _copy_each(pairs: Sequence[_Pair]) -> None:
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [sent for _, sent in pairs])


def _columns(layout: GroupLayout) -> Iterator[tuple[int, int]]:
    """Yield the index of the parameter, -1 for padding, and the width, of each slice of columns from left to right."""
    end = layout.pack_offset
    for i in layout.packed:
        param_layout: ParamLayout = layout.params[i]
        if param_layout.shard_offset > end:
            yield -1, param_layout.shard_offset - end
        if param_layout.spec.part_numel:
            yield i, param_layout.spec.part_numel
        end = param_layout.part.stop
    if layout.shard_numel > end:
        yield -1, layout.shard_numel - end


def _pairs(spec: ShardSpec, whole: Tensor, rows: Tensor, rank: int) -> Iterator[_Pair]:
    """Yield pairs of slices with the same values: of `whole`, and of `rows`, which has one row per rank."""
    if spec.dim is None:
        yield whole.view(1, -1), rows[rank : rank + 1]
    elif spec.part_numel:
        size, part = spec.shape[spec.dim], len(spec.span(0))
        before, after = prod(spec.shape[: spec.dim]), prod(spec.shape[spec.dim + 1 :])
        spread = whole.view(before, size, after)
        full = size // part  # number of ranks with a full shard; one more rank may have the remainder
        equal = spread[:, : full * part].unflatten(1, (full, part)).transpose(0, 1)
        yield equal, rows[:full].unflatten(1, (before, part, after))
        remaining = spread[:, full * part :]
        if remaining.numel():
            yield remaining, rows[full, : remaining.numel()].view(remaining.shape)
