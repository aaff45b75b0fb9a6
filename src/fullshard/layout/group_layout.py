"""The layout of a parameter group's buffers, computed from sizes only.

A parameter group (the parameters of a unit that share a dtype) has two 1-D buffers, both counted in elements:

    unsharded    [A, all rows][B, all rows]...[w, all elements][b]...            read by compute
    shard        [A, local rows][B, local rows]...[w, b: local shards, packed]   stored on this rank

A parameter *in place* (A, B) is divided on dim 0 into ceil(rows / world) rows per rank. Its region of the unsharded
buffer holds `world` such shards, so rank r's shard is received in its final position, and the first rows *are* the
parameter. *Packed* parameters (w, b) are too small for a separate message, or cannot be divided so that every shard
starts on a 16-byte boundary. Their shards are contiguous at the end of the shard buffer. They are sent as one message,
the pack, which needs a copy.

[Note: the cost of a message]
A separate message saves a copy out of the pack, or into it. Which of the two is cheaper depends on the transport.

Between each pair of ranks (CPUs) a message is one shard to one rank. There a copy is expensive, about 5 GB/s, and each
message costs microseconds, independent of their number: a shard of 16 KiB takes 2 x 16 KiB / 5 GB/s = 7 us to copy.

On a queue (GPUs) a message is one operation, on the full parameter, in a group of operations. A GPU reads and writes
2.5 TB/s, so a copy of 1 MiB takes 2 x 1 MiB / 2.5 TB/s = 0.8 us: about the cost of one more operation among a few, at
any world size. Above about 16 operations, which a backend's channels run in parallel, each costs some microseconds (980
small ones in one group took 70 times as long as one flat call: https://github.com/NVIDIA/nccl/issues/725), like a copy
of several MiB. The message of a pack also needs as much memory as its parameters. So all parameters of 2 MiB or more,
such as separate experts, are sent in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fullshard.layout.offsets import align, aligned_offsets
from fullshard.layout.shard_spec import ShardSpec, choose_spec

ALIGNMENT_BYTES = 16
"""Alignment of every shard. NCCL moves 16 bytes at a time, and single elements if they are not aligned."""

FEW_OPERATIONS = 16  # number of operations in one group that take little more time than one operation on a GPU


@dataclass(frozen=True, kw_only=True)
class MessageRule:
    """The rule that decides which parameters get a separate message, and where they start in the unsharded buffer.

    See [Note: the cost of a message]. Bytes are those of the elements that are sent.
    """

    least_part_nbytes: int = 0  # of a shard
    least_nbytes: int = 0  # of the full parameter
    most: int | None = None  # maximum number of them in a group, largest first; None for no limit
    always_from_nbytes: int = 0  # full parameters of at least this size get one even beyond `most`
    start_step_bytes: int = ALIGNMENT_BYTES  # parameters start at multiples of this
    max_padding: float = 1 / 32  # maximum size of the padding rows, as a fraction of the parameter


PAIRWISE = MessageRule(least_part_nbytes=16 << 10)  # for messages between each pair of ranks: gloo, and shared memory

ON_A_QUEUE = MessageRule(
    least_nbytes=1 << 20,
    most=FEW_OPERATIONS,
    always_from_nbytes=2 << 20,
    start_step_bytes=256,  # as torch's allocator aligns tensors on a GPU, because alignment affects kernel selection
    max_padding=1.0,  # as large as the parameter, because the pack has the same padding
)
"""For a backend's own collectives on a queue, such as NCCL."""


@dataclass(frozen=True)
class ParamLayout:
    """The offsets of one parameter, in elements; `shard_offset` is the same on every rank."""

    spec: ShardSpec
    in_place: bool
    unsharded_offset: int
    shard_offset: int

    @property
    def region(self) -> slice:
        """The parameter's slice of the unsharded buffer, including the padding rows of a parameter in place."""
        return slice(self.unsharded_offset, self.unsharded_offset + region_numel(self.spec, self.in_place))

    @property
    def part(self) -> slice:
        """The slice of the shard buffer for any rank's shard of this parameter."""
        return slice(self.shard_offset, self.shard_offset + self.spec.part_numel)


@dataclass(frozen=True)
class GroupLayout:
    """The layout of a group's unsharded buffer and of every rank's shard buffer, in elements."""

    world: int
    params: tuple[ParamLayout, ...]  # in the order of the parameters
    unsharded_numel: int
    shard_numel: int
    pack_offset: int  # start of the pack, which is sent as one message, in the shard buffer

    @cached_property
    def pack_numel(self) -> int:
        """Elements of one rank's pack."""
        return self.shard_numel - self.pack_offset

    @cached_property
    def pack(self) -> slice:
        """The slice of the shard buffer that is the pack."""
        return slice(self.pack_offset, self.shard_numel)

    @cached_property
    def in_place(self) -> tuple[ParamLayout, ...]:
        """The layouts of the parameters in place, which need no copy, in order."""
        return tuple(param_layout for param_layout in self.params if param_layout.in_place)

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """The indices of the packed parameters, in the order of the pack."""
        packed = [i for i, param_layout in enumerate(self.params) if not param_layout.in_place]
        return tuple(sorted(packed, key=lambda i: self.params[i].shard_offset))


def region_numel(spec: ShardSpec, in_place: bool) -> int:
    """Return the elements of a parameter in the unsharded buffer."""
    return spec.world * spec.part_numel if in_place else spec.numel


def fits_in_place(spec: ShardSpec, itemsize: int, rule: MessageRule = PAIRWISE) -> bool:
    """Return True if a parameter can be sent in place: its shards are aligned, large enough, and barely padded."""
    part_bytes = spec.part_numel * itemsize
    return (
        spec.dim == 0
        and 0 < part_bytes >= rule.least_part_nbytes
        and spec.numel * itemsize >= rule.least_nbytes
        and part_bytes % ALIGNMENT_BYTES == 0
        and spec.padding <= rule.max_padding * spec.numel
    )


def _in_place(specs: Sequence[ShardSpec], itemsize: int, rule: MessageRule) -> set[int]:
    """Return the indices of parameters to send in place: those that fit, and are among the largest or very large."""
    fitting = [i for i, spec in enumerate(specs) if fits_in_place(spec, itemsize, rule)]
    largest = sorted(fitting, key=lambda i: -specs[i].numel)[: rule.most]
    return {*largest, *(i for i in fitting if specs[i].numel * itemsize >= rule.always_from_nbytes)}


def lay_out(
    shapes: Sequence[Sequence[int]],
    world: int,
    itemsize: int,
    dims: Sequence[int | None] | None = None,
    rule: MessageRule = PAIRWISE,
    part_step: int = 1,
) -> GroupLayout:
    """Return the layout of parameters of `shapes`, in order.

    Args:
        shapes: The shapes of the parameters.
        world: The number of ranks to shard over.
        itemsize: The size of the smallest element sent, in bytes.
        dims: The dim to shard each parameter along. None selects the best dim.
        rule: The rule that decides which parameters get a separate message.
        part_step: In the shard buffer, in-place shards and the pack start at multiples of this number of elements.
    """
    step = max(1, ALIGNMENT_BYTES // itemsize)
    chosen = dims or [None] * len(shapes)
    specs = [choose_spec(shape, world, dim) for shape, dim in zip(shapes, chosen, strict=True)]
    in_place = _in_place(specs, itemsize, rule)
    unsharded_offsets, unsharded_numel = aligned_offsets(
        [region_numel(spec, i in in_place) for i, spec in enumerate(specs)], max(1, rule.start_step_bytes // itemsize)
    )
    placed, packed = sorted(in_place), [i for i in range(len(specs)) if i not in in_place]
    placed_offsets, pack_offset = aligned_offsets([specs[i].part_numel for i in placed], align(step, part_step))
    packed_offsets, pack_numel = aligned_offsets([specs[i].part_numel for i in packed], step)
    shard_numel = pack_offset + pack_numel
    shard_offsets = dict(zip(placed, placed_offsets, strict=True))
    shard_offsets |= {i: pack_offset + start for i, start in zip(packed, packed_offsets, strict=True)}
    params = tuple(
        ParamLayout(spec, i in in_place, unsharded_offsets[i], shard_offsets[i]) for i, spec in enumerate(specs)
    )
    return GroupLayout(world, params, unsharded_numel, shard_numel, pack_offset)
