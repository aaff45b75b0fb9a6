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
from fullshard.plan.process import FIRST_STEPS_NBYTES, Malloc, process_memory
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import HOST, Allocation, Collective, Free, Operation

STRATEGIES = ("zero1", "zero3")


def steps(strategy: str) -> None:
    """Three steps, so that units come to share memory."""
    model = chain(partial(fully_shard, strategy=strategy))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(3):
        model(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def told(tape: dry.Tape) -> tuple[int, list[Any], Counter[str]]:
    """The peak; what was sent; and how often each operation was done from the first forward on."""
    sent = [(it.name, it.origin, it.sent_bytes, it.messages, it.ranks) for it in tape.collectives()]
    start = next(i for i, entry in enumerate(tape.entries) if entry.origin.phase is Phase.FORWARD)
    done = Counter(entry.name for entry in tape.entries[start:] if isinstance(entry, Operation))
    return tape.peak_bytes(), sent, done


def real_steps(strategies: tuple[str, ...]) -> list[Any]:
    found = []
    for strategy in strategies:
        with dry.taped(lanes="cpu", values=True) as tape:
            steps(strategy)
        found.append(told(tape))
    return found


def dry_steps(strategy: str, world: int, rank: int, **options: Any) -> dry.Tape:
    with dry.world(world, rank=rank, **options), dry.taped(lanes="cpu") as tape:
        steps(strategy)
    return tape


@pytest.mark.parametrize("world", [1, 3])
def test_a_dry_run_of_cpu_ranks_is_what_they_do(world):
    reals = run_ranks(world, real_steps, STRATEGIES)
    for i, strategy in enumerate(STRATEGIES):
        for rank in {0, world - 1}:
            tape = dry_steps(strategy, world, rank)
            peak, sent, done = told(tape)
            real_peak, really_sent, really_done = reals[rank][i]
            assert sent == really_sent, strategy
            assert done == really_done, strategy
            blocks = sum(sorted(it.own_nbytes for it in tape.of(Allocation) if it.ranks > 1)[-2 * world :])
            assert abs(peak - real_peak) <= blocks, strategy  # of two collectives, as ranks' pace decides


def shared_bytes(tape: dry.Tape, purpose: str) -> set[int]:
    return {entry.ranks for entry in tape.of(Allocation) if entry.ranks > 1 and entry.purpose == purpose}


def test_ranks_of_one_host_share_memory_and_others_send():
    here, apart = dry_steps("zero3", 4, 0), dry_steps("zero3", 4, 0, ranks_per_host=2)
    assert shared_bytes(here, "messages") == shared_bytes(here, "unsharded parameters") == {4}
    assert not list(here.of(Collective))
    assert not shared_bytes(apart, "messages") | shared_bytes(apart, "unsharded parameters")
    assert {entry.name for entry in apart.of(Collective)} == {"send", "recv_"}
    assert here.collectives()[0].sent_bytes == apart.collectives()[0].sent_bytes > 0


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

    with dry.world(2), dry.taped(lanes="gpu"):
        steps("zero3")
        assert not any(isinstance(it, PretendedCollectives) for it in routes._of_group._values.values())


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


@pytest.mark.parametrize("lanes", ["gpu", "cpu"])
def test_models_that_ask_for_values_end(lanes):
    dry.run(lambda: fully_shard(Truncated()), lambda: torch.randn(4, 8), world=2, lanes=lanes)
    tape = dry.run(lambda: fully_shard(Experts()), lambda: torch.randn(8, 16), world=2, lanes=lanes)
    assert [entry.writes for entry in tape.of(Operation) if entry.name == "aten._grouped_mm"]


def test_a_loop_that_waits_for_a_value_is_named(monkeypatch):
    monkeypatch.setattr(watch, "_ENDLESS", 100)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        while (batch > 0).any():
            batch = batch - 1
        return model(batch).mean()

    with pytest.raises(ConfigError, match=r"in .*loss has asked for a value .*100 times in a row.*values=True"):
        dry.run(lambda: fully_shard(nn.Linear(8, 8)), lambda: torch.randn(4, 8), world=2, loss=loss)


# -- processes --------------------------------------------------------------------------------------------------------


def test_memory_of_mappings_is_gone_when_freed_and_that_of_the_heap_is_not():
    fixed, rising = Malloc(threshold=1 << 16), Malloc()
    for malloc in (fixed, rising):
        kept, large = malloc.allocate(100), malloc.allocate(1 << 20)
        assert malloc.mapped >= 1 << 20
        malloc.free(large)
        assert malloc.mapped == 0
        below, above = malloc.allocate(1 << 19), malloc.allocate(1 << 17)
        assert bool(malloc.mapped) == (malloc is fixed)  # the threshold has risen
        before = malloc.nbytes
        malloc.free(below)
        assert (malloc.nbytes < before) == (malloc is fixed)
        malloc.free(above)
        malloc.free(kept)
        assert malloc.nbytes < 1 << 20


def test_chunks_of_the_heap_never_overlap_and_join_when_free():
    malloc, generator, chunks = Malloc(), torch.Generator().manual_seed(0), dict[int, int]()
    for number in range(2000):
        nbytes = int(torch.randint(1, 60_000, (), generator=generator))
        address = malloc.allocate(nbytes)
        assert address % 64 == 48  # what it holds comes 16 bytes later
        assert all(address + nbytes <= other or other + n <= address for other, n in chunks.items())
        chunks[address] = nbytes
        if number % 3:
            address = list(chunks)[int(torch.randint(len(chunks), (), generator=generator))]
            malloc.free(address)
            del chunks[address]
    for address in list(chunks):
        malloc.free(address)
    assert malloc.allocate(1000) == 48  # all of it is one free end


def test_a_process_has_its_tensors_and_its_part_of_what_is_shared():
    tape = dry_steps("zero3", 2, 0)
    found = process_memory(tape, threshold=1 << 16)
    assert found.tensors == tape.peak_bytes()
    assert found.tensors <= found.held <= found.tensors + (2 << 20)
    assert found.nbytes == found.held + FIRST_STEPS_NBYTES
    assert not found.fits(found.nbytes)
    assert found.fits(2 * found.nbytes)
