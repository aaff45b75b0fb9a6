"""Shard specs: the rows of one tensor that each rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from fullshard.errors import LayoutError


def owned(size: int, world: int, rank: int) -> range:
    """Return the indices that `rank` owns: equal ranges in rank order. The last range may be short or empty."""
    part = -(-size // world)
    start = min(rank * part, size)
    return range(start, min(start + part, size))


@dataclass(frozen=True)
class ShardSpec:
    """The sharding of one tensor of `shape` over `world` ranks along `dim`. If `dim` is None, it is replicated."""

    shape: tuple[int, ...]
    dim: int | None
    world: int

    def __post_init__(self) -> None:
        if self.dim is not None and not 0 <= self.dim < len(self.shape):
            raise LayoutError(
                f"cannot split a tensor of shape {self.shape} along dim {self.dim}: it has {len(self.shape)} dims. "
                f"Choose a dim from 0 to {len(self.shape) - 1}."
            )

    @cached_property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return prod(self.shape)

    def span(self, rank: int) -> range:
        """Return the range of indices along `dim` that `rank` owns."""
        if self.dim is None:
            return range(1)
        return owned(self.shape[self.dim], self.world, rank)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of `rank`'s shard."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], len(self.span(rank)), *self.shape[self.dim + 1 :])

    def shard_numel(self, rank: int) -> int:
        """Return the number of elements of `rank`'s shard."""
        return prod(self.shard_shape(rank))

    @cached_property
    def part_numel(self) -> int:
        """Number of elements of the largest shard, that of rank 0."""
        return self.shard_numel(0)

    @property
    def padding(self) -> int:
        """Number of padding elements that make all shards equal."""
        return 0 if self.dim is None else self.world * self.part_numel - self.numel

    def consists_of_blocks(self, block: int) -> bool:
        """Return True if every shard starts at a multiple of `block` elements of the tensor in memory."""
        if self.dim is None or self.part_numel == self.numel:
            return True
        return prod(self.shape[: self.dim]) == 1 and self.part_numel % block == 0


def choose_spec(shape: Sequence[int], world: int, dim: int | None = None) -> ShardSpec:
    """Return the spec along `dim`. If None, along dim 0, as `DTensor` users expect, unless it has fewer rows than ranks
    and a different dim divides better.
    """
    shape = tuple(shape)
    if dim is not None:
        return ShardSpec(shape, dim, world)
    if not shape:
        return ShardSpec(shape, None, world)
    by_rows = ShardSpec(shape, 0, world)
    if shape[0] >= world or not by_rows.numel:
        return by_rows
    return min((ShardSpec(shape, dim, world) for dim in range(len(shape))), key=lambda spec: spec.part_numel)
