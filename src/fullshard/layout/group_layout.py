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
from fullshard.layout.shard_spec import Cut, choose_cut

__all__ = ["ALIGNMENT_BYTES", "Place", "SectionLayout", "lay_out"]

ALIGNMENT_BYTES = 16
"""Every shard starts on such a boundary: NCCL moves packs of 16 bytes, and falls to single elements otherwise."""

PACK_BELOW_BYTES = 16 * 1024
"""A part smaller than this costs more as a message of its own than as a copy into the pack."""

MAX_PADDING = 1 / 32
"""The share of a parameter that may be added as rows that exist on no rank, before the parameter is packed."""


@dataclass(frozen=True)
class Place:
    """Where one parameter lies. Offsets count elements; `shard_offset` is the same on every rank."""

    cut: Cut
    in_place: bool
    whole_offset: int
    shard_offset: int

    @property
    def region(self) -> slice:
        """The parameter's stretch of the whole buffer, with the padding rows of a parameter in place."""
        return slice(self.whole_offset, self.whole_offset + region_numel(self.cut, self.in_place))

    @property
    def part(self) -> slice:
        """The stretch of the shard buffer that holds any rank's shard of this parameter."""
        return slice(self.shard_offset, self.shard_offset + self.cut.part_numel)


@dataclass(frozen=True)
class SectionLayout:
    """Where the parameters of a section lie in its whole buffer and in every rank's shard buffer."""

    world: int
    places: tuple[Place, ...]  # in the order of the parameters
    whole_numel: int
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
    def in_place(self) -> tuple[Place, ...]:
        """The places that need no copy, in order."""
        return tuple(place for place in self.places if place.in_place)

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """The indices of the parameters that are packed, as they lie in the pack."""
        packed = [i for i, place in enumerate(self.places) if not place.in_place]
        return tuple(sorted(packed, key=lambda i: self.places[i].shard_offset))

    @property
    def wire_numel(self) -> int:
        """Elements that all ranks' messages of one gather hold together, each rank's own part included."""
        return self.world * (sum(place.cut.part_numel for place in self.in_place) + self.pack_numel)


def region_numel(cut: Cut, in_place: bool) -> int:
    """Elements that a parameter takes in the whole buffer."""
    return cut.world * cut.part_numel if in_place else cut.numel


def fits_in_place(cut: Cut, itemsize: int) -> bool:
    """Whether the ranks' parts, laid end to end, are the parameter, aligned and without padding worth a thought."""
    part_bytes = cut.part_numel * itemsize
    return (
        cut.dim == 0
        and part_bytes >= PACK_BELOW_BYTES
        and part_bytes % ALIGNMENT_BYTES == 0
        and cut.padding <= MAX_PADDING * cut.numel
    )


def lay_out(
    shapes: Sequence[Sequence[int]], world: int, itemsize: int, dims: Sequence[int | None] | None = None
) -> SectionLayout:
    """Places for parameters of `shapes`, in order, when `itemsize` is the smallest item (bytes) that travels.

    Args:
        dims: along which dim each is cut, or None to leave it open.
    """
    step = max(1, ALIGNMENT_BYTES // itemsize)
    chosen = dims or [None] * len(shapes)
    cuts = [choose_cut(shape, world, dim) for shape, dim in zip(shapes, chosen, strict=True)]
    direct = [fits_in_place(cut, itemsize) for cut in cuts]
    whole_offsets, whole_numel = aligned_offsets(
        [region_numel(cut, d) for cut, d in zip(cuts, direct, strict=True)], step
    )
    order = sorted(range(len(cuts)), key=lambda i: not direct[i])  # stable: in place first, then the pack
    part_offsets, shard_numel = aligned_offsets([cuts[i].part_numel for i in order], step)
    shard_offsets = dict(zip(order, part_offsets, strict=True))
    packed = [shard_offsets[i] for i in order if not direct[i]]
    places = tuple(Place(cut, direct[i], whole_offsets[i], shard_offsets[i]) for i, cut in enumerate(cuts))
    return SectionLayout(world, places, whole_numel, shard_numel, packed[0] if packed else shard_numel)
