"""The layout of a parameter group's buffers: arithmetic on sizes, nothing else.

A parameter group (the parameters of a unit that share a dtype) has two 1-D buffers, both counted in elements:

    unsharded    [A, every row][B, every row]...[w, every element][b]...     read by compute
    shard        [A, my rows][B, my rows]...[w, b: my shards, packed]        kept by this rank

A parameter *in place* (A, B) is divided on dim 0 into ceil(rows / world) rows a rank. Its region of the unsharded
buffer holds `world` such shards, so rank r's shard lands where it belongs and the first rows *are* the parameter.
*Packed* parameters (w, b) are small, or cannot be divided so that every shard starts on a 16-byte boundary. Their
shards lie side by side at the end of the shard buffer and travel as one message, the pack, at the price of a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fullshard.layout.offsets import aligned_offsets
from fullshard.layout.shard_spec import ShardSpec, choose_spec

__all__ = ["ALIGNMENT_BYTES", "GroupLayout", "ParamLayout", "lay_out"]

ALIGNMENT_BYTES = 16
"""Every shard starts on such a boundary: NCCL moves packs of 16 bytes, and falls to single elements otherwise."""

PACK_BELOW_BYTES = 16 * 1024
"""A shard smaller than this costs more as a message of its own than as a copy into the pack."""

MAX_PADDING = 1 / 32
"""The share of a parameter that may be added as rows that exist on no rank, before the parameter is packed."""


@dataclass(frozen=True)
class ParamLayout:
    """The offsets of one parameter, in elements; `shard_offset` is the same on every rank."""

    spec: ShardSpec
    in_place: bool
    unsharded_offset: int
    shard_offset: int

    @property
    def region(self) -> slice:
        """The parameter's stretch of the unsharded buffer, with the padding rows of a parameter in place."""
        return slice(self.unsharded_offset, self.unsharded_offset + region_numel(self.spec, self.in_place))

    @property
    def part(self) -> slice:
        """The stretch of the shard buffer that holds any rank's shard of this parameter."""
        return slice(self.shard_offset, self.shard_offset + self.spec.part_numel)


@dataclass(frozen=True)
class GroupLayout:
    """The layout of a group's unsharded buffer and of every rank's shard buffer, in elements."""

    world: int
    params: tuple[ParamLayout, ...]  # in the order of the parameters
    unsharded_numel: int
    shard_numel: int
    pack_offset: int  # start of the pack, which travels as one message, in the shard buffer

    @property
    def pack_numel(self) -> int:
        """Elements of one rank's pack."""
        return self.shard_numel - self.pack_offset

    @property
    def pack(self) -> slice:
        """The stretch of the shard buffer that is the pack."""
        return slice(self.pack_offset, self.shard_numel)

    @cached_property
    def in_place(self) -> tuple[ParamLayout, ...]:
        """The layouts of the parameters that need no copy, in order."""
        return tuple(param_layout for param_layout in self.params if param_layout.in_place)

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """The indices of the packed parameters, in the order of the pack."""
        packed = [i for i, param_layout in enumerate(self.params) if not param_layout.in_place]
        return tuple(sorted(packed, key=lambda i: self.params[i].shard_offset))


def region_numel(spec: ShardSpec, in_place: bool) -> int:
    """Elements that a parameter takes in the unsharded buffer."""
    return spec.world * spec.part_numel if in_place else spec.numel


def fits_in_place(spec: ShardSpec, itemsize: int) -> bool:
    """True if the shards, laid end to end, are the parameter: aligned, large enough, and with little padding."""
    part_bytes = spec.part_numel * itemsize
    return (
        spec.dim == 0
        and part_bytes >= PACK_BELOW_BYTES
        and part_bytes % ALIGNMENT_BYTES == 0
        and spec.padding <= MAX_PADDING * spec.numel
    )


def lay_out(
    shapes: Sequence[Sequence[int]], world: int, itemsize: int, dims: Sequence[int | None] | None = None
) -> GroupLayout:
    """The layout of parameters of `shapes`, in order, where `itemsize` is the smallest element (bytes) that travels.

    Args:
        dims: the dim that each is sharded along, or None to leave it open.
    """
    step = max(1, ALIGNMENT_BYTES // itemsize)
    chosen = dims or [None] * len(shapes)
    specs = [choose_spec(shape, world, dim) for shape, dim in zip(shapes, chosen, strict=True)]
    direct = [fits_in_place(spec, itemsize) for spec in specs]
    unsharded_offsets, unsharded_numel = aligned_offsets(
        [region_numel(spec, d) for spec, d in zip(specs, direct, strict=True)], step
    )
    order = sorted(range(len(specs)), key=lambda i: not direct[i])  # stable: in place first, then the pack
    part_offsets, shard_numel = aligned_offsets([specs[i].part_numel for i in order], step)
    shard_offsets = dict(zip(order, part_offsets, strict=True))
    packed = [shard_offsets[i] for i in order if not direct[i]]
    params = tuple(ParamLayout(spec, direct[i], unsharded_offsets[i], shard_offsets[i]) for i, spec in enumerate(specs))
    return GroupLayout(world, params, unsharded_numel, shard_numel, packed[0] if packed else shard_numel)
