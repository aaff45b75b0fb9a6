"""A dry run of CPU ranks does what CPU ranks do: the same collectives, and the same peak but for their pace."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from shared_ranks import run_ranks
from small_models import chain, inputs
from torch import Tensor, nn

from fullshard import ConfigError, dry, fully_shard
from fullshard.comm.pretended import PretendedCollectives
from fullshard.dry import watch
from fullshard.plan.hardware import hardware
from fullshard.plan.malloc import Malloc
from fullshard.plan.prediction import read_off
from fullshard.plan.process import FIRST_STEPS_NBYTES, ProcessHeap, process_memory
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import HOST, Allocation, Collective, Entry, Free, Operation

STRATEGIES = ("zero1", "zero3")


def steps(strategy: str) -> None:
    """Run three steps, so that units share memory."""
    model = chain(partial(fully_shard, strategy=strategy))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(3):
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def reported(tape: dry.Tape) -> tuple[int, list[Any], Counter[str]]:
    """Return the peak; what was sent; and how often each operation was done from the first forward on."""
    sent = [
        (collective.name, collective.origin, collective.sent_bytes, collective.messages, collective.ranks)
        for collective in tape.collectives()
    ]
    start = next(i for i, entry in enumerate(tape.entries) if entry.origin.phase is Phase.FORWARD)
    done = Counter(entry.name for entry in tape.entries[start:] if isinstance(entry, Operation))
    return tape.peak_bytes(), sent, done


def real_steps(strategies: tuple[str, ...]) -> list[Any]:
    found = []
    for strategy in strategies:
        with dry.taped(streams="cpu", values=True) as tape:
            steps(strategy)
        found.append(reported(tape))
    return found


def dry_steps(strategy: str, world: int, rank: int, **options: Any) -> dry.Tape:
    with dry.world(world, rank=rank, **options), dry.taped(streams="cpu") as tape:
        steps(strategy)
    return tape


@pytest.mark.parametrize("world", [1, 3])
def test_a_dry_run_of_cpu_ranks_is_what_they_do(world):
    reals = run_ranks(world, real_steps, STRATEGIES)
    for i, strategy in enumerate(STRATEGIES):
        for rank in {0, world - 1}:
            tape = dry_steps(strategy, world, rank)
            peak, sent, done = reported(tape)
            real_peak, really_sent, really_done = reals[rank][i]
            assert sent == really_sent, strategy
            assert done == really_done, strategy
            blocks = sum(
                sorted(allocation.own_nbytes for allocation in tape.of(Allocation) if allocation.ranks > 1)[
                    -2 * world :
                ]
            )
            assert abs(peak - real_peak) <= blocks, strategy  # of two collectives, as ranks' pace decides


def shared_bytes(tape: dry.Tape, purpose: str) -> set[int]:
    return {entry.ranks for entry in tape.of(Allocation) if entry.ranks > 1 and entry.purpose == purpose}


def test_ranks_of_one_host_share_memory_and_others_send():
    here, separate = dry_steps("zero3", 4, 0), dry_steps("zero3", 4, 0, ranks_per_host=2)
    assert shared_bytes(here, "messages") == shared_bytes(here, "unsharded parameters") == {4}
    assert not list(here.of(Collective))
    assert not shared_bytes(separate, "messages") | shared_bytes(separate, "unsharded parameters")
    assert {entry.name for entry in separate.of(Collective)} == {"send", "recv_"}
    assert here.collectives()[0].sent_bytes == separate.collectives()[0].sent_bytes > 0


def test_a_rank_counts_its_part_of_what_ranks_have_in_common():
    tape = dry.Tape()
    origin = tape.origin
    tape.note(Allocation(1, 600, "compute", origin))
    tape.note(Allocation(2, 400, "compute", origin, "messages", 4))
    tape.note(Free(2, 400, "compute", origin, 4))
    tape.note(Allocation(3, 50, "compute", origin))
    assert tape.peak_bytes() == 700
    tape.note(Allocation(4, 999, HOST, origin))
    assert tape.peak_bytes() == 700


def test_no_pretended_rank_is_left_to_those_that_have_a_gpu():
    from fullshard.comm import routes

    with dry.world(2), dry.taped(streams="gpu"):
        steps("zero3")
        assert not any(isinstance(value, PretendedCollectives) for value in routes._of_group._values.values())


# -- models that have been seen to hang or fail -----------------------------------------------------------------------


class Truncated(nn.Linear):
    """Draws its weights until none is out of bounds, as transformers' vision models do."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        nn.init.trunc_normal_(self.weight, std=0.02)


class Experts(nn.Module):
    """A product a group, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x, self.weight, offs=torch.tensor([4, 8], dtype=torch.int32))


@pytest.mark.parametrize("streams", ["gpu", "cpu"])
def test_models_that_read_values_end(streams):
    dry.run(lambda: fully_shard(Truncated()), lambda: torch.randn(4, 8), world=2, streams=streams)
    tape = dry.run(lambda: fully_shard(Experts()), lambda: torch.randn(8, 16), world=2, streams=streams)
    assert [entry.writes for entry in tape.of(Operation) if entry.name == "aten._grouped_mm"]


def test_a_loop_that_waits_for_a_value_is_named(monkeypatch):
    monkeypatch.setattr(watch, "_ENDLESS", 100)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        while (batch > 0).any():
            batch = batch - 1
        return model(batch).mean()

    with pytest.raises(ConfigError, match=r"in .*loss has read a value .*100 times in a row.*values=True"):
        dry.run(lambda: fully_shard(nn.Linear(8, 8)), lambda: torch.randn(4, 8), world=2, loss=loss)


# -- processes --------------------------------------------------------------------------------------------------------


MIB = 1 << 20


def test_memory_of_mappings_is_gone_when_freed_and_that_of_the_heap_is_not():
    fixed, rising = Malloc(threshold=1 << 16), Malloc()
    for malloc in (fixed, rising):
        kept, large = malloc.allocate(100), malloc.allocate_aligned(MIB)
        assert malloc.mapped >= MIB
        malloc.free(large)
        assert malloc.mapped == 0
        below, above = malloc.allocate_aligned(1 << 19), malloc.allocate_aligned(1 << 17)
        assert bool(malloc.mapped) == (malloc is fixed)  # the threshold has risen
        before = malloc.address_nbytes
        malloc.free(below)
        assert (malloc.address_nbytes < before) == (malloc is fixed)
        malloc.free(above)
        malloc.free(kept)
        assert malloc.address_nbytes < MIB


def numbers(below: int, many: int) -> list[int]:
    return torch.randint(1, below, (many,), generator=torch.Generator().manual_seed(0)).tolist()


def test_chunks_of_the_heap_never_overlap():
    malloc, chunks = Malloc(), dict[int, int]()
    for number, nbytes in enumerate(numbers(60_000, 2000)):
        nbytes = nbytes if number % 2 else nbytes % 200
        is_aligned = number % 5 > 1
        address = malloc.allocate_aligned(nbytes) if is_aligned else malloc.allocate(nbytes)
        assert address % 64 == 48 or not is_aligned  # what it holds comes 16 bytes later
        assert all(address + nbytes <= other or other + n <= address for other, n in chunks.items())
        chunks[address] = nbytes
        if number % 3:
            address = list(chunks)[nbytes % len(chunks)]
            malloc.free(address)
            del chunks[address]


def test_large_chunks_join_when_they_are_free_and_small_ones_wait_for_their_size():
    malloc = Malloc()
    chunks = [malloc.allocate(2000 + nbytes) for nbytes in numbers(60_000, 50)]
    for chunk in chunks[::2] + chunks[1::2]:
        malloc.free(chunk)
    assert malloc.allocate(100_000) == 0, "all of it is one free end"
    small, _ = malloc.allocate(100), malloc.allocate(5000)
    malloc.free(small)
    assert malloc.allocate(40) != small and malloc.allocate(100) == small


def test_an_aligned_request_finds_no_room_where_an_equal_one_was():
    malloc = Malloc()
    first = malloc.allocate_aligned(100_000)
    malloc.allocate(5000)
    malloc.free(first)
    before = malloc.nbytes
    second = malloc.allocate_aligned(100_000)
    assert second != first and malloc.nbytes > before, "what was cut off is kept for its size"
    malloc.free(second)
    assert malloc.allocate(100_000) == first


def test_what_is_small_lives_as_long_as_its_tensor_or_as_its_node_of_the_graph():
    heap, origin = ProcessHeap(), dry.Tape().origin

    def in_use(*entries: Entry) -> int:
        for entry in entries:
            heap.note(entry)
        return sum(heap.malloc._sizes.values())

    def done_in(phase: Phase) -> Operation:
        return Operation("aten.mul", "compute", origin._replace(phase=phase), (), ())

    tensor, end = Allocation(1, 10_000, "compute", origin), Free(1, 10_000, "compute", origin)
    alone = in_use(tensor)
    assert 10_200 < alone < 10_500
    one, two = in_use(done_in(Phase.FORWARD)), in_use(done_in(Phase.FORWARD))
    assert alone < one < two
    assert in_use(done_in(Phase.BACKWARD)) == one
    assert in_use(done_in(Phase.FORWARD), done_in(Phase.STEP)) == alone, "what no backward has come to"
    assert in_use(end) == 0


def touched_in_turns(heap: ProcessHeap, mib: int, turns: int) -> list[int]:
    """MiB of pages that are touched first when a tensor is allocated, which is freed before the next one is."""
    found, origin = [], dry.Tape().origin
    for _ in range(turns):
        found.append(round(heap.note(Allocation(1, mib * MIB, "compute", origin)) / MIB))
        heap.note(Free(1, mib * MIB, "compute", origin))
    return found


def test_pages_are_new_for_what_is_too_large_for_the_heap_and_for_what_just_misses_the_room_that_it_left():
    """This matches torch's tensors, by the page faults of such loops."""
    heap = ProcessHeap()
    assert touched_in_turns(heap, 16, 5) == [16] * 5
    assert sum(touched_in_turns(heap, 12, 5)) < 12, "most of it where the larger ones were"
    assert touched_in_turns(heap, 64, 5) == [64] * 5


def test_a_heap_gives_its_end_back_when_more_than_twice_the_largest_is_free_there():
    malloc = Malloc()
    malloc.free(malloc.allocate(16 * MIB))
    chunks = [malloc.allocate(12 * MIB) for _ in range(4)]
    ends = []
    while chunks:
        malloc.free(chunks.pop())
        ends.append(malloc.heap // MIB)
    assert ends == [48, 48, 12, 12]


def test_a_process_has_its_tensors_and_its_part_of_what_is_shared():
    tape = dry_steps("zero3", 2, 0)
    found = process_memory(tape, threshold=1 << 16)
    assert found.tensors == tape.peak_bytes()
    assert found.tensors <= found.held <= found.tensors + (2 << 20)
    assert found.nbytes == found.held + FIRST_STEPS_NBYTES
    assert not found.fits(found.nbytes)
    assert found.fits(2 * found.nbytes)


def test_a_threshold_in_the_environment_is_predicted_with(monkeypatch):
    tape = dry_steps("zero3", 2, 0)

    def needed() -> int:
        return read_off(tape, hardware("h100-80"), 2).reserved_bytes

    rising = needed()
    assert rising == process_memory(tape).nbytes
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1024")
    assert needed() == process_memory(tape, threshold=1024).nbytes != rising
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "much")
    assert needed() == rising
