"""Who owns what, and where it lies: laws that hold for any shapes at any world size."""

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fullshard.errors import LayoutError
from fullshard.layout.group_layout import ALIGNMENT_BYTES, MAX_PADDING, PACK_BELOW_BYTES, GroupLayout, lay_out
from fullshard.layout.offsets import align
from fullshard.layout.shard_spec import ShardSpec, choose_spec, owned

WORLDS = st.integers(1, 9)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])
DIMS = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 31, 96, 97, 192, 504, 1031])
ODD = st.lists(DIMS, max_size=3).map(tuple).filter(lambda shape: prod(shape) < 1 << 19)
MATRICES = st.tuples(st.sampled_from([97, 127, 192, 504, 1031]), st.sampled_from([96, 97, 192, 512]))
SHAPES = ODD | MATRICES  # many of the latter are in place with padding
CHOICES = SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.sampled_from([None, *range(len(shape))])))


@st.composite
def layouts(draw: st.DrawFn) -> GroupLayout:
    """Of parameters some of which the user wants cut along a dim."""
    choices = draw(st.lists(CHOICES, max_size=8))
    return lay_out([c[0] for c in choices], draw(WORLDS), draw(ITEMSIZES), [c[1] for c in choices])


LAYOUTS = layouts()


def aligned(elements: int, itemsize: int) -> bool:
    return elements * itemsize % ALIGNMENT_BYTES == 0


def stretches_are_disjoint(stretches: list[slice], room: int) -> bool:
    """Whether stretches follow one another without overlap, within 0 and `room`."""
    filled = sorted((s.start, s.stop) for s in stretches if s.start < s.stop)
    return all(a[1] <= b[0] for a, b in pairwise([(0, 0), *filled, (room, room)]))


@given(st.integers(0, 300), WORLDS)
def test_owned_is_what_chunk_gives(size, world):
    """So a shard is the one that `DTensor`'s `Shard` means, at every size."""
    expected = [part.tolist() for part in torch.arange(size).chunk(world)] if size else []
    expected += [[]] * (world - len(expected))
    assert [list(owned(size, world, rank)) for rank in range(world)] == expected


@given(SHAPES, WORLDS)
def test_every_element_is_owned_once(shape, world):
    spec = choose_spec(shape, world)
    owners = torch.zeros(shape, dtype=torch.int)
    for rank in range(world):
        span = spec.span(rank)
        mine = owners if spec.dim is None else owners.narrow(spec.dim, span.start, len(span))
        mine += 1
        assert tuple(mine.shape) == spec.shard_shape(rank)
        assert mine.numel() == spec.shard_numel(rank) <= spec.part_numel
    assert (owners == (1 if shape else world)).all()  # a scalar is whole on every rank


@given(SHAPES, WORLDS)
def test_no_cut_makes_smaller_parts_where_rows_are_fewer_than_ranks(shape, world):
    spec = choose_spec(shape, world)
    if not shape:
        assert spec.dim is None
    elif shape[0] >= world or prod(shape) == 0:
        assert spec.dim == 0  # as users of DTensor expect
    else:
        assert spec.part_numel == min(ShardSpec(shape, dim, world).part_numel for dim in range(len(shape)))


@given(st.lists(CHOICES, max_size=8), WORLDS, ITEMSIZES)
def test_parameters_are_cut_along_the_dims_that_are_asked_for(choices, world, itemsize):
    layout = lay_out([c[0] for c in choices], world, itemsize, [c[1] for c in choices])
    for (shape, dim), param_layout in zip(choices, layout.params, strict=True):
        assert param_layout.spec == (choose_spec(shape, world) if dim is None else ShardSpec(shape, dim, world))
        assert param_layout.spec.dim == 0 or not param_layout.in_place  # others do not lie end to end


@given(LAYOUTS)
def test_whole_regions_are_disjoint(layout):
    assert stretches_are_disjoint([param_layout.region for param_layout in layout.params], layout.unsharded_numel)


@given(LAYOUTS)
def test_parts_are_disjoint_and_the_pack_lies_behind_those_in_place(layout):
    assert stretches_are_disjoint([param_layout.part for param_layout in layout.params], layout.shard_numel)
    for param_layout in layout.params:
        inside = layout.pack.start <= param_layout.part.start and param_layout.part.stop <= layout.pack.stop
        assert inside if not param_layout.in_place else param_layout.part.stop <= layout.pack.start
    assert layout.pack_numel == layout.shard_numel - layout.pack_offset


@given(st.lists(SHAPES, max_size=8), WORLDS, ITEMSIZES)
def test_everything_starts_on_a_16_byte_boundary(shapes, world, itemsize):
    """A misaligned message makes NCCL many times slower, at any world size."""
    layout = lay_out(shapes, world, itemsize)
    for param_layout in layout.params:
        assert aligned(param_layout.shard_offset, itemsize)
        assert aligned(param_layout.unsharded_offset, itemsize)
        if param_layout.in_place:  # then rank r's part begins r parts on
            assert aligned(param_layout.spec.part_numel, itemsize)
    assert aligned(layout.pack_offset, itemsize)
    assert aligned(layout.pack_numel, itemsize)


@given(st.lists(SHAPES, max_size=8), WORLDS, ITEMSIZES)
def test_what_is_in_place_has_little_padding_and_is_worth_a_message(shapes, world, itemsize):
    for param_layout in lay_out(shapes, world, itemsize).in_place:
        assert param_layout.spec.dim == 0
        assert param_layout.spec.padding <= MAX_PADDING * param_layout.spec.numel
        assert param_layout.spec.part_numel * itemsize >= PACK_BELOW_BYTES
        assert param_layout.region.stop - param_layout.region.start == world * param_layout.spec.part_numel


@given(st.lists(SHAPES, max_size=8), WORLDS, ITEMSIZES)
def test_padding_is_bounded(shapes, world, itemsize):
    """What all ranks keep beyond the parameters themselves.

    In place: at most MAX_PADDING of the parameter. Packed: the last ranks' missing rows, fewer than `world` of them
    (for a scalar, its other copies), and a gap before the next boundary in each rank's pack.
    """
    layout = lay_out(shapes, world, itemsize)
    gap = ALIGNMENT_BYTES // itemsize - 1
    bound = 0.0
    for param_layout in layout.params:
        numel, rows = param_layout.spec.numel, max(1, (param_layout.spec.shape or (1,))[0])
        bound += MAX_PADDING * numel if param_layout.in_place else (world - 1) * numel / rows + world * gap
    assert world * layout.shard_numel - sum(param_layout.spec.numel for param_layout in layout.params) <= bound
    assert layout.unsharded_numel <= sum(p.region.stop - p.region.start + gap for p in layout.params)


@given(st.lists(SHAPES, max_size=8), WORLDS, ITEMSIZES)
def test_ranks_parts_laid_end_to_end_are_a_parameter_in_place(shapes, world, itemsize):
    """What makes a gather need no copy: the first rows of the region are the whole."""
    for param_layout in lay_out(shapes, world, itemsize).in_place:
        for rank in range(world):
            start = min(rank * param_layout.spec.part_numel, param_layout.spec.numel)
            assert start == param_layout.spec.span(rank).start * prod(param_layout.spec.shape[1:])


@given(st.lists(SHAPES, min_size=1, max_size=8), ITEMSIZES)
def test_at_one_rank_nothing_is_added_but_gaps(shapes, itemsize):
    layout = lay_out(shapes, 1, itemsize)
    assert all(param_layout.spec.padding == 0 for param_layout in layout.params)
    assert layout.shard_numel == layout.unsharded_numel


def test_a_parameter_that_would_be_mostly_padding_at_some_world_is_packed_there():
    """97 rows are 4 x 25 less 3, but 8 x 13 less 7."""
    in_place = {world: lay_out([(97, 512)], world, itemsize=4).params[0].in_place for world in (1, 2, 3, 4, 8)}
    assert in_place == {1: True, 2: True, 3: True, 4: True, 8: False}


def test_a_transformer_block_travels_in_place():
    """The matrices of real models are never packed, also at world sizes that do not divide them."""
    matrices = [(4096, 1024), (1024, 4096), (3072, 1024), (50257, 1024)]
    for world in range(1, 10):
        layout = lay_out([*matrices, (1024,), (4096,), ()], world, itemsize=2)
        assert [param_layout.in_place for param_layout in layout.params] == [True] * 4 + [False] * 3


@given(st.integers(0, 1000), st.integers(1, 64))
def test_align_gives_the_nearest_multiple_above(position, step):
    assert align(position, step) % step == 0
    assert position <= align(position, step) < position + step


@given(SHAPES, st.integers(-5, 5))
def test_a_cut_along_a_dim_that_is_not_there_is_refused(shape, dim):
    assume(not 0 <= dim < len(shape))
    with pytest.raises(LayoutError, match=rf"along dim {dim}: it has {len(shape)} dims"):
        ShardSpec(shape, dim, 2)


def test_a_section_without_parameters_takes_nothing():
    assert lay_out([], 4, 4) == GroupLayout(4, (), 0, 0, 0)
