"""The pack: what is small, or cannot be cut so that every part is aligned, and travels as one message, with a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import Tensor

from fullshard.layout.group_layout import GroupLayout, ParamLayout
from fullshard.layout.shard_spec import ShardSpec

__all__ = ["Pack"]


class Pack:
    """The packed parameters of a group, on their way to and from messages.

    A message has a row a rank, `(world, pack_numel)`, and in it some columns for each parameter.
    """

    def __init__(self, layout: GroupLayout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self._columns = list(_columns(layout))
        self._gaps: dict[int, Tensor] = {}  # columns of zeros, by their number

    def pairs(self, i: int, whole: Tensor, message: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs (stretch of parameter `i`, stretch of `message`) that hold the same values."""
        param_layout = self._layout.params[i]
        start = param_layout.shard_offset - self._layout.pack_offset
        rows = message[:, start : start + param_layout.spec.part_numel]
        return _pairs(param_layout.spec, whole, rows, self._rank)

    def write(self, message: Tensor, grads: Mapping[int, Tensor]) -> None:
        """Write the gradients of packed parameters to `message`, each rank's parts side by side.

        Args:
            message: (world, pack_numel). Padding becomes zeros.
            grads: whole gradients by index of the parameter; what is missing becomes zeros.
        """
        world = self._layout.world
        columns, odd = [], []
        for i, width in self._columns:
            grad = grads.get(i)
            if grad is None:
                columns.append(self._gap(width, message) if i < 0 else message.new_zeros(world, width))
                continue
            spec = self._layout.params[i].spec
            if spec.dim == 0:
                columns.append(grad)
            elif spec.dim is None:
                columns.append(grad.view(1, -1).expand(world, -1).contiguous())
            else:
                columns.append(message.new_zeros(world, width))
                odd.append(i)
        torch._chunk_cat(columns, 0, world, out=message)
        for i in odd:
            for part, row in self.pairs(i, grads[i], message):
                row.copy_(part)

    def _gap(self, width: int, message: Tensor) -> Tensor:
        """So many columns of zeros. Not expanded: a GPU has one kernel for columns that are contiguous."""
        if width not in self._gaps:
            self._gaps[width] = message.new_zeros(message.shape[0], width)
        return self._gaps[width]


def _columns(layout: GroupLayout) -> Iterator[tuple[int, int]]:
    """Index of the parameter, -1 for padding, and width of each stretch of columns in the pack, from left to right."""
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


def _pairs(spec: ShardSpec, whole: Tensor, rows: Tensor, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs (stretch of the parameter, stretch of `rows`) that hold the same values; `rows` has one a rank."""
    if spec.dim is None:
        yield whole.view(1, -1), rows[rank : rank + 1]
    elif spec.part_numel:
        size, part = spec.shape[spec.dim], len(spec.span(0))
        before, after = prod(spec.shape[: spec.dim]), prod(spec.shape[spec.dim + 1 :])
        spread = whole.view(before, size, after)
        full = size // part  # so many ranks have a part of the same size; one may have the rest
        equal = spread[:, : full * part].unflatten(1, (full, part)).transpose(0, 1)
        yield equal, rows[:full].unflatten(1, (before, part, after))
        rest = spread[:, full * part :]
        if rest.numel():
            yield rest, rows[full, : rest.numel()].view(rest.shape)
