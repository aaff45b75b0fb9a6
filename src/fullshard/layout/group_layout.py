"""Where each parameter of a group lies in the group's buffers: arithmetic on sizes, nothing else.

A section (the parameters of a unit that share a dtype) has two buffers, both counted in elements:

    whole    [A, every row][B, every row]...[w, every element][b]...     what compute reads
    shard    [A, my rows][B, my rows]...[w, b: my parts, packed]         what this rank keeps

A parameter *in place* (A, B) is cut on dim 0 into ceil(rows / world) rows a rank. Its region of the whole buffer has
room for `world` such parts, so what rank r sends lands where it belongs and the first rows *are* the parameter.
*Packed* parameters (w, b) are small, or cannot be cut so that every part starts on a 16-byte boundary. Their parts lie
side by side at the end of the shard buffer and travel as one message, the pack, at the price of a copy.
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
"""A part smaller than this costs more as a message of its own than as a copy into the pack."""

MAX_PADDING = 1 / 32
"""The share of a parameter that may be added as rows that exist on no rank, before the parameter is packed."""


@dataclass(frozen=True)
class ParamLayout:
    """Where one parameter lies. Offsets count elements; `shard_offset` is the same on every rank."""

    spec: ShardSpec
    in_place: bool
    unsharded_offset: int
    shard_offset: int

    @property
    def region(self) -> slice:
        """The parameter's stretch of the whole buffer, with the padding rows of a parameter in place."""
        return slice(self.unsharded_offset, self.unsharded_offset + region_numel(self.spec, self.in_place))

    @property
    def part(self) -> slice:
        """The stretch of the shard buffer that holds any rank's shard of this parameter."""
        return slice(self.shard_offset, self.shard_offset + self.spec.part_numel)


@dataclass(frozen=True)
class GroupLayout:
    """Where the parameters of a section lie in its whole buffer and in every rank's shard buffer."""

    world: int
    params: tuple[ParamLayout, ...]  # in the order of the parameters
    unsharded_numel: int
    shard_numel: int
    pack_offset: int  # where in the shard buffer the pack begins, which travels as one message

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
        """The places that need no copy, in order."""
        return tuple(param_layout for param_layout in self.params if param_layout.in_place)

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """The indices of the parameters that are packed, as they lie in the pack."""
        packed = [i for i, param_layout in enumerate(self.params) if not param_layout.in_place]
        return tuple(sorted(packed, key=lambda i: self.params[i].shard_offset))

    @property
    def wire_numel(self) -> int:
        """Elements that all ranks' messages of one gather hold together, each rank's own part included."""
        return self.world * (sum(param_layout.spec.part_numel for param_layout in self.in_place) + self.pack_numel)


def region_numel(spec: ShardSpec, in_place: bool) -> int:
    """Elements that a parameter takes in the whole buffer."""
    return spec.world * spec.part_numel if in_place else spec.numel


def fits_in_place(spec: ShardSpec, itemsize: int) -> bool:
    """Whether the ranks' parts, laid end to end, are the parameter, aligned and without padding worth a thought."""
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
    """Places for parameters of `shapes`, in order, when `itemsize` is the smallest item (bytes) that travels.

    Args:
        dims: along which dim each is cut, or None to leave it open.
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
