"""The order of units, and the prefetching and slots derived from it. Units are small integers."""

from hypothesis import given
from hypothesis import strategies as st

from fullshard.engine.order import OrderTracker
from fullshard.layout.slots import Interval, assign_slots

UNITS = st.integers(0, 5)
INTERVALS = st.lists(
    st.builds(
        lambda unit, start, length: Interval(unit, start, start + length), UNITS, st.integers(0, 20), st.integers(1, 9)
    )
)
SIZES = st.fixed_dictionaries({unit: st.integers(1, 100) for unit in range(6)})


def used(tracker: OrderTracker, unit: int, depth: int = 1) -> tuple[int, ...]:
    """Record a use of `unit`, and return the units expected next."""
    tracker.record(unit)
    return tracker.following(depth)


def slot_sizes(assigned: dict[int, int], nbytes: dict[int, int]) -> dict[int, int]:
    """Return the bytes of each slot, which are those of its largest unit."""
    sizes: dict[int, int] = {}
    for unit, slot in assigned.items():
        sizes[slot] = max(sizes.get(slot, 0), nbytes[unit])
    return sizes


def most_live_bytes(intervals: list[Interval], nbytes: dict[int, int]) -> int:
    """Return the peak unsharded bytes."""
    moments = {i.start for i in intervals}
    live = [{i.unit for i in intervals if i.start <= now < i.end} for now in moments]
    return max((sum(nbytes[unit] for unit in units) for units in live), default=0)


@given(INTERVALS, SIZES)
def test_concurrently_unsharded_units_never_share_slot(intervals, nbytes):
    assigned = assign_slots(intervals, nbytes)
    for a in intervals:
        for b in intervals:
            if a.unit != b.unit and a.start < b.end and b.start < a.end:
                assert assigned[a.unit] != assigned[b.unit]


@given(INTERVALS, SIZES)
def test_every_unsharded_unit_has_slot(intervals, nbytes):
    assert set(assign_slots(intervals, nbytes)) == {interval.unit for interval in intervals}


@given(INTERVALS, SIZES)
def test_total_slot_bytes_are_between_live_peak_and_all_units(intervals, nbytes):
    assigned = assign_slots(intervals, nbytes)
    total = sum(slot_sizes(assigned, nbytes).values())
    assert most_live_bytes(intervals, nbytes) <= total <= sum(nbytes[unit] for unit in assigned)


@given(INTERVALS, SIZES, st.randoms(use_true_random=False))
def test_slots_do_not_depend_on_order_of_intervals(intervals, nbytes, random):
    """All ranks must assign the same slots, in whatever order they list intervals."""
    shuffled = list(intervals)
    random.shuffle(shuffled)
    assert assign_slots(shuffled, nbytes) == assign_slots(intervals, nbytes)


@given(st.integers(1, 12), st.integers(1, 100), st.integers(1, 100), st.integers(1, 3))
def test_slots_of_consecutive_blocks_equal_live_peak(blocks, block_bytes, root_bytes, ahead):
    """The pattern of transformers under `zero3`: the root stays unsharded, each block overlaps its successor."""
    nbytes = dict.fromkeys(range(blocks), block_bytes) | {blocks: root_bytes}
    forward = [Interval(i, max(0, i - ahead) * 2, i * 2 + 2) for i in range(blocks)]
    end = 2 * blocks
    backward = [Interval(blocks - 1 - i.unit, end + i.start, end + i.end) for i in forward]
    intervals = [Interval(blocks, 0, 2 * end), *forward, *backward]
    total = sum(slot_sizes(assign_slots(intervals, nbytes), nbytes).values())
    assert total == most_live_bytes(intervals, nbytes) == root_bytes + min(blocks, ahead + 1) * block_bytes


@given(st.lists(UNITS, max_size=12), st.integers(1, 3))
def test_tracker_predicts_next_units_if_order_repeats(order, ahead):
    tracker = OrderTracker(order)
    for position, unit in enumerate(order):
        assert used(tracker, unit, ahead) == tuple(order[position + 1 : position + 1 + ahead])
    assert tracker.agrees_on(range(99))


@given(st.lists(UNITS, max_size=12), st.lists(UNITS, max_size=12))
def test_tracker_records_order_and_agrees_only_if_equal(expected, order):
    tracker = OrderTracker(expected)
    for unit in order:
        tracker.record(unit)
    assert tracker.visited == order
    assert tracker.agrees_on(range(99)) == (order == expected)


@given(st.lists(UNITS, max_size=12), st.lists(UNITS, max_size=12), st.sets(UNITS))
def test_tracker_agreement_on_subset_ignores_other_units(expected, order, units):
    tracker = OrderTracker(expected)
    for unit in order:
        tracker.record(unit)
    same = [unit for unit in order if unit in units] == [unit for unit in expected if unit in units]
    assert tracker.agrees_on(units) == same


def test_tracker_without_expected_order_prefetches_nothing():
    tracker = OrderTracker()
    assert [used(tracker, unit) for unit in (0, 1, 0)] == [(), (), ()]


def test_tracker_skips_unused_units():
    """The order continues after a branch that is not used."""
    tracker = OrderTracker([0, 1, 2, 3])
    assert used(tracker, 0) == (1,)
    assert used(tracker, 2) == (3,)
    assert not tracker.agrees_on(range(99))


def test_tracker_predicts_nothing_after_new_unit_and_then_continues():
    tracker = OrderTracker([0, 1, 2])
    used(tracker, 0)
    assert used(tracker, 7) == ()
    assert used(tracker, 1) == (2,)
