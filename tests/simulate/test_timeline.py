"""Times computed from a trace: streams run in order, dependencies are respected, all time is accounted for."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.plan.allocator import TapeAllocator
from fullshard.plan.costs import Costs
from fullshard.plan.timeline import Timeline, lay_out, lay_out_parts
from fullshard.tape.recorder import Origin, Phase
from fullshard.tape.tape import Access, Allocation, Collective, Entry, Free, Operation, Recorded, Waited

HERE = Origin("blocks.0", Phase.FORWARD)
MIB = 2**20
STREAMS = ("compute", "gather", "reduce")
COSTS = Costs(
    flops_per_s=1.0,
    memory_bytes_per_s=1.0,
    launch_s=0.0,
    latency_s=0.0,
    link_bytes_per_s=1.0,
    host_s=1.0,
    host_collective_s=1.0,
    host_mark_s=0.0,
)  # one second per byte, and one per request of the host


def work(stream: str, nbytes: int) -> Operation:
    return Operation("work", stream, HERE, (Access(1, 0, nbytes),), ())


def gather(stream: str, nbytes: int, ranks: tuple[int, ...] = (0, 1)) -> Collective:
    reads, writes = (Access(1, 0, nbytes // len(ranks)),), (Access(2, 0, nbytes),)
    return Collective("all_gather", stream, HERE, reads, writes, ranks, (nbytes // len(ranks),))


def spans(timeline: Timeline, stream: str) -> list[tuple[float, float]]:
    return [(item.start, item.end) for item in timeline.placed if item.entry.stream == stream]


def test_streams_run_concurrently_and_the_host_enqueues_in_order():
    timeline = lay_out([work("compute", 5), gather("gather", 8), work("compute", 1)], COSTS)
    assert spans(timeline, "compute") == [(1, 6), (6, 7)]
    assert spans(timeline, "gather") == [(2, 6)]  # half of it comes from the other rank
    assert timeline.end == 7
    assert timeline.starved_s("compute") == 1


def test_timeline_reports_cause_of_stall():
    entries = [
        gather("gather", 20),
        Recorded(1, "gather", HERE),
        Waited(1, "compute", "here", HERE),
        work("compute", 2),
    ]
    timeline = lay_out(entries, COSTS)
    (stall,) = timeline.stalls
    assert (stall.stream, stall.start, stall.end) == ("compute", 2, 11)
    assert stall.cause is timeline.placed[0]
    assert timeline.exposed_by("compute") == {"all_gather of blocks.0 (forward)": 9}
    assert (timeline.busy_s("compute"), timeline.exposed_s("compute"), timeline.starved_s("compute")) == (2, 9, 2)


def test_stall_through_chained_events_names_original_collective():
    entries = [
        *(gather("gather", 20), Recorded(1, "gather", HERE), Waited(1, "reduce", "here", HERE)),
        *(Recorded(2, "reduce", HERE), Waited(2, "compute", "here", HERE), work("compute", 2)),
    ]
    (stall,) = lay_out(entries, COSTS).stalls
    assert stall.cause is not None
    assert stall.cause.entry.stream == "gather"


def test_communicator_runs_one_collective_at_a_time():
    both = [gather("gather", 20), gather("reduce", 20)]
    assert spans(lay_out(both, COSTS), "reduce") == [(11, 21)]
    separate = [gather("gather", 20), gather("reduce", 20, ranks=(2, 3))]
    assert spans(lay_out(separate, COSTS), "reduce") == [(2, 12)]


def test_waiting_host_enqueues_no_work():
    entries = [work("compute", 9), Recorded(1, "compute", HERE), Waited(1, "host", "here", HERE), work("compute", 1)]
    timeline = lay_out(entries, COSTS)
    assert spans(timeline, "compute") == [(1, 10), (11, 12)]
    assert timeline.exposed_s("host") == 9
    assert timeline.host_s == 11


@pytest.mark.parametrize(("room", "seconds", "retries"), [(None, 6.0, 0), (64 * MIB, 8.0, 1)])
def test_segments_are_released_after_all_streams_finish(room, seconds, retries):
    """Allocating a segment takes one second here, and releasing one takes another. Only the release waits."""
    memory = TapeAllocator(room=room)
    for entry in (Allocation(1, 40 * MIB, "compute", HERE), Free(1, 40 * MIB, "compute", HERE)):
        memory.note(entry)
    entries = [work("compute", 5), Allocation(2, 40 * MIB, "gather", HERE)]
    timeline = lay_out(entries, replace(COSTS, segment_s=1.0), memory)
    assert (timeline.end, memory.retries) == (seconds, retries)


def test_events_recorded_before_laid_out_part_are_complete():
    assert lay_out([Waited(7, "compute", "here", HERE), work("compute", 1)], COSTS).end == 2


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [(1, 0), (2, 80 / 2 / 10), (8, 80 * 7 / 8 / 10), (16, 80 * 15 / 16 / 8), (64, 80 * 63 / 64 / 8)],
)
def test_ring_time_depends_on_slowest_link(ranks, seconds):
    costs = Costs(launch_s=0, latency_s=0, link_bytes_per_s=10, network_bytes_per_s=1)
    assert costs.of_collective(gather("gather", 80, tuple(range(ranks)))) == pytest.approx(seconds)


def test_all_reduce_costs_two_reduce_scatters():
    costs = Costs(latency_s=0)
    whole = Access(1, 0, 80)
    once, twice = (
        Collective(name, "reduce", HERE, (whole,), (whole,), (0, 1), (80,)) for name in ("reduce_scatter", "allreduce_")
    )
    assert costs.of_collective(twice) == 2 * costs.of_collective(once)


@st.composite
def tapes(draw: Any) -> list[Entry]:
    entries: list[Entry] = []
    marks = 0
    for kind in draw(st.lists(st.sampled_from(("work", "gather", "record", "wait")), max_size=40)):
        stream = draw(st.sampled_from((*STREAMS, "host")))
        if kind == "work":
            entries.append(work(stream, draw(st.integers(0, 9))))
        elif kind == "gather" and stream != "host":
            entries.append(gather(stream, 2 * draw(st.integers(0, 9))))
        elif kind == "record":
            marks += 1
            entries.append(Recorded(marks, stream, HERE))
        elif marks:
            entries.append(Waited(draw(st.integers(1, marks)), stream, "here", HERE))
    return entries


@given(tapes())
def test_work_on_stream_never_overlaps_and_idle_time_is_counted(entries):
    timeline = lay_out(entries, COSTS)
    assert [item.entry for item in timeline.placed] == [
        entry for entry in entries if isinstance(entry, Operation | Collective)
    ]
    for stream in STREAMS:
        ran = spans(timeline, stream)
        assert all(end <= start for (_, end), (start, _) in pairwise(ran))
        waited = [(stall.start, stall.end) for stall in timeline.stalls if stall.stream == stream]
        together = sorted([*ran, *waited])
        idle = [start - end for (_, end), (start, _) in zip([(0.0, 0.0), *together], together, strict=False)]
        assert all(gap >= 0 for gap in idle)  # a stream waits or runs
        assert sum(idle) == pytest.approx(timeline.starved_s(stream))
    carried = sorted((item.start, item.end) for item in timeline.placed if isinstance(item.entry, Collective))
    assert all(end <= start for (_, end), (start, _) in pairwise(carried))


@given(tapes(), st.integers(0, 40))
def test_lay_out_parts_matches_separate_layouts(entries, count):
    """Also if computation takes longer during a collective."""
    costs = replace(COSTS, slowdown=0.5)
    first, both = lay_out_parts((entries[:count], entries[count:]), costs)
    assert first == lay_out(entries[:count], costs)
    assert both == lay_out(entries, costs)


@given(tapes())
def test_work_starts_only_after_awaited_events(entries):
    timeline = lay_out(entries, COSTS)
    placed = iter(timeline.placed)
    done, reached = dict.fromkeys((*STREAMS, "host"), 0.0), dict[int, float]()
    for entry in entries:
        if isinstance(entry, Operation | Collective):
            item = next(placed)
            assert item.start >= max(done[entry.stream], item.requested)
            done[entry.stream] = item.end
        elif isinstance(entry, Recorded):
            reached[entry.mark] = done[entry.stream]
        elif isinstance(entry, Waited):
            done[entry.stream] = max(done[entry.stream], reached[entry.mark])
