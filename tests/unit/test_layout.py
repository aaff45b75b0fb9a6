"""Ownership and offsets of shards: laws that hold for any shapes at any world size."""

from dataclasses import replace
from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fullshard.errors import LayoutError
from fullshard.layout.group_layout import (
    ALIGNMENT_BYTES,
    ON_A_QUEUE,
    PAIRWISE,
    GroupLayout,
    MessageRule,
    fits_in_place,
    lay_out,
)
from fullshard.layout.offsets import align
from fullshard.layout.shard_spec import ShardSpec, choose_spec, owned

WORLDS = st.integers(1, 9)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])
DIMS = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 31, 96, 97, 192, 504, 1031])
ODD = st.lists(DIMS, max_size=3).map(tuple).filter(lambda shape: prod(shape) < 1 << 19)
MATRICES = st.tuples(st.sampled_from([97, 127, 192, 504, 1031]), st.sampled_from([96, 97, 192, 512]))
SHAPES = ODD | MATRICES  # many of the latter are in place with padding
CHOICES = SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.sampled_from([None, *range(len(shape))])))


FEW = MessageRule(least_nbytes=1 << 14, most=2, always_from_nbytes=1 << 19, start_step_bytes=256)
RULES = st.sampled_from([PAIRWISE, ON_A_QUEUE, FEW])


@st.composite
def layouts(draw: st.DrawFn) -> GroupLayout:
    """Draw layouts with some parameters sharded along a dim chosen by the user."""
    choices = draw(st.lists(CHOICES, max_size=8))
    return lay_out([c[0] for c in choices], draw(WORLDS), draw(ITEMSIZES), [c[1] for c in choices], draw(RULES))


LAYOUTS = layouts()


def aligned(elements: int, itemsize: int) -> bool:
    return elements * itemsize % ALIGNMENT_BYTES == 0


def regions_are_disjoint(regions: list[slice], room: int) -> bool:
    """Return True if regions follow one another without overlap, within 0 and `room`."""
    filled = sorted((s.start, s.stop) for s in regions if s.start < s.stop)
    return all(a[1] <= b[0] for a, b in pairwise([(0, 0), *filled, (room, room)]))


@given(st.integers(0, 300), WORLDS)
def test_owned_rows_match_torch_chunk(size, world):
    """A shard therefore equals `DTensor`'s `Shard`, at every size."""
    expected = [part.tolist() for part in torch.arange(size).chunk(world)] if size else []
    expected += [[]] * (world - len(expected))
    assert [list(owned(size, world, rank)) for rank in range(world)] == expected


@given(SHAPES, WORLDS)
def test_every_element_is_owned_once(shape, world):
    spec = choose_spec(shape, world)
    owners = torch.zeros(shape, dtype=torch.int)
    for rank in range(world):
        span = spec.span(rank)
        local = owners if spec.dim is None else owners.narrow(spec.dim, span.start, len(span))
        local += 1
        assert tuple(local.shape) == spec.shard_shape(rank)
        assert local.numel() == spec.shard_numel(rank) <= spec.part_numel
    assert (owners == (1 if shape else world)).all()  # a scalar is whole on every rank


@given(SHAPES, WORLDS)
def test_choose_spec_minimizes_shard_size_if_rows_are_fewer_than_ranks(shape, world):
    spec = choose_spec(shape, world)
    if not shape:
        assert spec.dim is None
    elif shape[0] >= world or prod(shape) == 0:
        assert spec.dim == 0  # as users of DTensor expect
    else:
        assert spec.part_numel == min(ShardSpec(shape, dim, world).part_numel for dim in range(len(shape)))


@given(st.lists(CHOICES, max_size=8), WORLDS, ITEMSIZES)
def test_parameters_are_sharded_along_requested_dims(choices, world, itemsize):
    layout = lay_out([c[0] for c in choices], world, itemsize, [c[1] for c in choices])
    for (shape, dim), param_layout in zip(choices, layout.params, strict=True):
        assert param_layout.spec == (choose_spec(shape, world) if dim is None else ShardSpec(shape, dim, world))
        assert param_layout.spec.dim == 0 or not param_layout.in_place  # all others are not contiguous


@given(LAYOUTS)
def test_unsharded_regions_are_disjoint(layout):
    assert regions_are_disjoint([param_layout.region for param_layout in layout.params], layout.unsharded_numel)


@given(LAYOUTS)
def test_shard_parts_are_disjoint_and_pack_follows_in_place_parts(layout):
    assert regions_are_disjoint([param_layout.part for param_layout in layout.params], layout.shard_numel)
    for param_layout in layout.params:
        inside = layout.pack.start <= param_layout.part.start and param_layout.part.stop <= layout.pack.stop
        assert inside if not param_layout.in_place else param_layout.part.stop <= layout.pack.start
    assert layout.pack_numel == layout.shard_numel - layout.pack_offset


@given(st.lists(SHAPES, max_size=8), WORLDS, ITEMSIZES, RULES)
def test_all_offsets_are_16_byte_aligned(shapes, world, itemsize, rule):
    """A misaligned message makes NCCL many times slower, at any world size."""
    layout = lay_out(shapes, world, itemsize, rule=rule)
    for param_layout in layout.params:
        assert aligned(param_layout.shard_offset, itemsize)
        assert aligned(param_layout.unsharded_offset, itemsize)
        if param_layout.in_place:  # the part of rank r starts r parts later
            assert aligned(param_layout.spec.part_numel, itemsize)
    assert aligned(layout.pack_offset, itemsize)
    assert aligned(layout.pack_numel, itemsize)


@given(st.lists(SHAPES, max_size=8), WORLDS, ITEMSIZES)
def test_unsharded_offsets_on_queue_are_256_byte_aligned(shapes, world, itemsize):
    """This is the alignment of separate tensors. It costs gaps below 256 bytes. The shard buffer has no such gaps."""
    layout = lay_out(shapes, world, itemsize, rule=ON_A_QUEUE)
    assert all(param_layout.unsharded_offset * itemsize % 256 == 0 for param_layout in layout.params)
    assert layout.unsharded_numel * itemsize % 256 == 0  # the pack's message follows
    filled = sum(param_layout.region.stop - param_layout.region.start for param_layout in layout.params)
    assert (layout.unsharded_numel - filled) * itemsize < 256 * max(1, len(shapes))
    dense = lay_out(shapes, world, itemsize, rule=replace(ON_A_QUEUE, start_step_bytes=ALIGNMENT_BYTES))
    assert (layout.shard_numel, layout.pack) == (dense.shard_numel, dense.pack)
    assert [p.part for p in layout.params] == [p.part for p in dense.params]


@given(st.lists(SHAPES, max_size=8), WORLDS, ITEMSIZES, RULES)
def test_in_place_parameters_have_little_padding_and_minimum_size(shapes, world, itemsize, rule):
    for param_layout in lay_out(shapes, world, itemsize, rule=rule).in_place:
        assert param_layout.spec.dim == 0
        assert param_layout.spec.padding <= rule.max_padding * param_layout.spec.numel
        assert param_layout.spec.part_numel * itemsize >= rule.least_part_nbytes
        assert param_layout.spec.numel * itemsize >= rule.least_nbytes
        assert param_layout.region.stop - param_layout.region.start == world * param_layout.spec.part_numel


@given(st.lists(MATRICES, max_size=8), WORLDS, ITEMSIZES, RULES)
def test_largest_parameters_are_in_place_up_to_message_limit(shapes, world, itemsize, rule):
    params = lay_out(shapes, world, itemsize, rule=rule).params
    in_place = [p.spec.numel for p in params if p.in_place]
    packed = [p.spec.numel for p in params if not p.in_place and fits_in_place(p.spec, itemsize, rule)]
    if rule.most is None:
        assert not packed
        return
    always = [numel for numel in in_place if numel * itemsize >= rule.always_from_nbytes]
    assert len(in_place) <= max(rule.most, len(always))
    assert not packed or (len(in_place) >= rule.most and max(packed) <= min(in_place))
    assert all(numel * itemsize < rule.always_from_nbytes for numel in packed)


def test_many_small_experts_use_few_messages_on_queue():
    """Exceptions: experts so large that a copy costs more than a message, and CPUs, where a copy always costs more."""
    small, large = [(1024, 704)] * 300, [(2048, 4096)] * 300
    for world in (1, 8, 512):
        assert len(lay_out(small, world, itemsize=2, rule=ON_A_QUEUE).in_place) == ON_A_QUEUE.most
        assert len(lay_out(large, world, itemsize=2, rule=ON_A_QUEUE).in_place) == 300
    assert len(lay_out(small, 8, itemsize=2).in_place) == 300


def test_in_place_choice_on_queue_does_not_depend_on_world_size():
    """A message operates on the full parameter, whatever the size of a shard."""
    for world in (1, 8, 64, 512):
        params = lay_out([(1024, 2048), (512, 512)], world, itemsize=2, rule=ON_A_QUEUE).params
        assert [param_layout.in_place for param_layout in params] == [True, False]


@given(st.lists(SHAPES, max_size=8), WORLDS, ITEMSIZES, RULES)
def test_padding_is_bounded(shapes, world, itemsize, rule):
    """Check the memory of all ranks in addition to the parameters.

    In place: at most `max_padding` of the parameter. Packed: the last ranks' missing rows, fewer than `world` of them
    (for a scalar, its other copies), and a gap before the next boundary in each rank's pack.
    """
    layout = lay_out(shapes, world, itemsize, rule=rule)
    gap = ALIGNMENT_BYTES // itemsize - 1
    bound = 0.0
    for param_layout in layout.params:
        numel, rows = param_layout.spec.numel, max(1, (param_layout.spec.shape or (1,))[0])
        bound += rule.max_padding * numel if param_layout.in_place else (world - 1) * numel / rows + world * gap
    assert world * layout.shard_numel - sum(param_layout.spec.numel for param_layout in layout.params) <= bound
    start_gap = rule.start_step_bytes // itemsize - 1
    assert layout.unsharded_numel <= sum(p.region.stop - p.region.start + start_gap for p in layout.params)


@given(st.lists(SHAPES, max_size=8), WORLDS, ITEMSIZES, RULES)
def test_concatenated_parts_equal_in_place_parameter(shapes, world, itemsize, rule):
    """Gathers need no copy, because the first rows of the region are the full parameter."""
    for param_layout in lay_out(shapes, world, itemsize, rule=rule).in_place:
        for rank in range(world):
            start = min(rank * param_layout.spec.part_numel, param_layout.spec.numel)
            assert start == param_layout.spec.span(rank).start * prod(param_layout.spec.shape[1:])


@given(st.lists(SHAPES, min_size=1, max_size=8), ITEMSIZES)
def test_layout_of_one_rank_has_no_padding(shapes, itemsize):
    layout = lay_out(shapes, 1, itemsize)
    assert all(param_layout.spec.padding == 0 for param_layout in layout.params)
    assert layout.shard_numel == layout.unsharded_numel


def test_parameter_is_packed_at_world_size_with_too_much_padding():
    """97 rows need 3 rows of padding on 4 ranks, but 7 on 8 ranks."""
    in_place = {world: lay_out([(97, 512)], world, itemsize=4).params[0].in_place for world in (1, 2, 3, 4, 8)}
    assert in_place == {1: True, 2: True, 3: True, 4: True, 8: False}


@given(MATRICES, st.sampled_from([8, 64, 96]), ITEMSIZES)
def test_padding_on_queue_does_not_force_packing(shape, world, itemsize):
    """A packed parameter has the same padding: its part of the message is equally large."""
    rule = replace(ON_A_QUEUE, least_nbytes=0)
    layout = lay_out([shape], world, itemsize, rule=rule)
    [param_layout] = layout.params
    aligned = param_layout.spec.part_numel * itemsize % ALIGNMENT_BYTES == 0
    assert param_layout.in_place == (aligned and param_layout.spec.dim == 0)
    packed = lay_out([shape], world, itemsize, rule=replace(rule, most=0))
    assert layout.shard_numel == packed.shard_numel
    assert layout.unsharded_numel <= packed.unsharded_numel + world * packed.pack_numel


def test_transformer_block_matrices_are_in_place():
    """The matrices of real models are never packed, also at world sizes that do not divide them."""
    matrices = [(4096, 1024), (1024, 4096), (3072, 1024), (50257, 1024)]
    for world in range(1, 10):
        layout = lay_out([*matrices, (1024,), (4096,), ()], world, itemsize=2)
        assert [param_layout.in_place for param_layout in layout.params] == [True] * 4 + [False] * 3


@given(st.integers(0, 1000), st.integers(1, 64))
def test_align_rounds_up_to_multiple(position, step):
    assert align(position, step) % step == 0
    assert position <= align(position, step) < position + step


@given(SHAPES, st.integers(-5, 5))
def test_shard_spec_along_missing_dim_raises(shape, dim):
    assume(not 0 <= dim < len(shape))
    with pytest.raises(LayoutError, match=rf"along dim {dim}: it has {len(shape)} dims"):
        ShardSpec(shape, dim, 2)


def test_layout_without_parameters_is_empty():
    assert lay_out([], 4, 4) == GroupLayout(4, (), 0, 0, 0)
