"""The model of the caching allocator: blocks are within segments and never overlap, and memory is reused."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import chain, inputs

from fullshard import dry, fully_shard
from fullshard.plan.allocator import AllocatorUse, CachingAllocator, allocator_use

MIB = 1 << 20
sizes = st.one_of(st.integers(0, 4096), st.integers(0, 3 * MIB), st.integers(9 * MIB, 40 * MIB))
requests = st.lists(st.tuples(sizes, st.sampled_from(["compute", "reduce"]), st.booleans()), max_size=60)
kinds = pytest.mark.parametrize("expandable", [False, True])


def blocks_after(allocator: CachingAllocator, wishes: Any) -> list[Any]:
    """Return the allocated blocks after requests. Each request optionally frees the oldest block."""
    held: list[Any] = []
    for nbytes, stream, frees in wishes:
        held.append((allocator.allocate(nbytes, stream), nbytes, stream))
        if frees:
            allocator.free(held.pop(0)[0])
    return held


@kinds
@given(wishes=requests)
def test_allocated_blocks_are_large_enough_and_disjoint(expandable, wishes):
    allocator = CachingAllocator(expandable=expandable)
    held = blocks_after(allocator, wishes)
    spans = sorted((block.start, block.start + block.nbytes) for block, _, _ in held)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert all(block.nbytes >= nbytes and block.nbytes % 512 == 0 for block, nbytes, _ in held)
    assert allocator.allocated == sum(block.nbytes for block, _, _ in held) <= allocator.reserved


@kinds
@given(wishes=requests)
def test_allocator_reuses_freed_memory_without_reserving_more(expandable, wishes):
    allocator = CachingAllocator(expandable=expandable)
    for block, _, _ in blocks_after(allocator, wishes):
        allocator.free(block)
    assert allocator.allocated == 0
    reserved = allocator.reserved
    for nbytes, stream, _ in wishes:
        allocator.free(allocator.allocate(nbytes, stream))
    assert allocator.reserved == reserved


def reserved_for(*wishes: int, expandable: bool = False) -> int:
    allocator = CachingAllocator(expandable=expandable)
    for nbytes in wishes:
        allocator.allocate(nbytes, "compute")
    return allocator.reserved


def test_segment_sizes_match_torch_documentation():
    assert reserved_for(1) == reserved_for(MIB, MIB) == 2 * MIB
    assert reserved_for(MIB, MIB, 1) == 4 * MIB
    assert reserved_for(MIB + 1) == reserved_for(*[9 * MIB] * 2) == 20 * MIB
    assert reserved_for(10 * MIB) == 10 * MIB
    assert reserved_for(11 * MIB + 1) == 12 * MIB
    assert reserved_for(*[11 * MIB] * 3, expandable=True) == 40 * MIB


@given(wishes=requests, room=st.integers(20, 200))
def test_reserved_memory_stays_within_device_memory(wishes, room):
    """Free segments are released before the allocator requests more. With enough free memory it requests nothing."""
    allocator, endless = CachingAllocator(room=room * MIB), CachingAllocator()
    held, as_many = (blocks_after(item, wishes) for item in (allocator, endless))
    assert allocator.failures or allocator.reserved <= room * MIB
    assert allocator.allocated == sum(block.nbytes for block, _, _ in held) <= allocator.reserved
    if endless.reserved <= room * MIB:
        assert (allocator.retries, allocator.requested) == (0, endless.requested) and len(held) == len(as_many)


def test_allocator_releases_free_segments_when_memory_runs_out():
    allocator = CachingAllocator(room=64 * MIB)
    one, other = (allocator.allocate(30 * MIB, stream) for stream in ("compute", "reduce"))
    allocator.free(one)
    allocator.allocate(32 * MIB, "reduce")
    assert (allocator.retries, allocator.given_back, allocator.failures) == (1, 1, 0)
    allocator.allocate(30 * MIB, "compute")
    assert (allocator.retries, allocator.given_back, allocator.failures) == (2, 1, 1)
    assert not other.is_free


def test_allocator_never_reuses_blocks_across_streams():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, "compute"))
    allocator.allocate(30 * MIB, "reduce")
    assert allocator.reserved == 60 * MIB


def test_large_block_is_split_only_if_remainder_is_large():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, "compute"))
    assert allocator.allocate(29 * MIB, "compute").nbytes == 30 * MIB  # the remaining MiB stays part of the block
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, "compute"))
    assert allocator.allocate(28 * MIB, "compute").nbytes == 28 * MIB


@kinds
def test_allocator_use_of_trace_covers_peak_bytes(expandable):
    tape = dry.run(lambda: chain(fully_shard), inputs, world=8)
    use = allocator_use(tape, expandable=expandable)
    assert use.tensors == tape.peak_bytes() <= use.allocated <= use.reserved
    assert allocator_use(dry.Tape()) == AllocatorUse(0, 0, 0)
