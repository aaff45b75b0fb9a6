"""A dry run of CPU ranks equals real CPU ranks: the same collectives, and the same peak except for timing."""

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
from fullshard.plan.prediction import read_off
from fullshard.plan.process import FIRST_STEPS_NBYTES, HEAP_FACTOR, ProcessPages, process_memory
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import HOST, Allocation, Collective, Free, Operation

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
    """Return the peak, the collectives, and the number of calls of each operation since the first forward."""
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
def test_dry_run_matches_real_cpu_ranks(world):
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
            assert abs(peak - real_peak) <= blocks, strategy  # of two collectives, depending on timing


def shared_bytes(tape: dry.Tape, purpose: str) -> set[int]:
    return {entry.ranks for entry in tape.of(Allocation) if entry.ranks > 1 and entry.purpose == purpose}


def test_cpu_ranks_share_memory_within_host_and_send_between_hosts():
    here, separate = dry_steps("zero3", 4, 0), dry_steps("zero3", 4, 0, ranks_per_host=2)
    assert shared_bytes(here, "messages") == shared_bytes(here, "unsharded parameters") == {4}
    assert not list(here.of(Collective))
    assert not shared_bytes(separate, "messages") | shared_bytes(separate, "unsharded parameters")
    assert {entry.name for entry in separate.of(Collective)} == {"send", "recv_"}
    assert here.collectives()[0].sent_bytes == separate.collectives()[0].sent_bytes > 0


def test_peak_bytes_counts_rank_share_of_shared_allocations():
    tape = dry.Tape()
    origin = tape.origin
    tape.note(Allocation(1, 600, "compute", origin))
    tape.note(Allocation(2, 400, "compute", origin, "messages", 4))
    tape.note(Free(2, 400, "compute", origin, 4))
    tape.note(Allocation(3, 50, "compute", origin))
    assert tape.peak_bytes() == 700
    tape.note(Allocation(4, 999, HOST, origin))
    assert tape.peak_bytes() == 700


def test_dry_run_with_gpu_streams_uses_no_pretended_collectives():
    from fullshard.comm import routes

    with dry.world(2), dry.taped(streams="gpu"):
        steps("zero3")
        assert not any(isinstance(value, PretendedCollectives) for value in routes._of_group._values.values())


# -- models that have been seen to hang or fail -----------------------------------------------------------------------


class Truncated(nn.Linear):
    """Redraws its weights until all are within bounds, like transformers' vision models."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        nn.init.trunc_normal_(self.weight, std=0.02)


class Experts(nn.Module):
    """A grouped matrix product in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.grouped_mm(x, self.weight, offs=torch.tensor([4, 8], dtype=torch.int32))


@pytest.mark.parametrize("streams", ["gpu", "cpu"])
def test_dry_run_terminates_for_models_that_read_values(streams):
    dry.run(lambda: fully_shard(Truncated()), lambda: torch.randn(4, 8), world=2, streams=streams)
    tape = dry.run(lambda: fully_shard(Experts()), lambda: torch.randn(8, 16), world=2, streams=streams)
    assert [entry.writes for entry in tape.of(Operation) if entry.name == "aten._grouped_mm"]


def test_dry_run_raises_for_endless_loop_on_tensor_value(monkeypatch):
    monkeypatch.setattr(watch, "_ENDLESS", 100)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        while (batch > 0).any():
            batch = batch - 1
        return model(batch).mean()

    with pytest.raises(ConfigError, match=r"in .*loss has read a value .*100 times in a row.*values=True"):
        dry.run(lambda: fully_shard(nn.Linear(8, 8)), lambda: torch.randn(4, 8), world=2, loss=loss)


# -- processes --------------------------------------------------------------------------------------------------------


MIB = 1 << 20


def touched_in_turns(pages: ProcessPages, mib: int, turns: int) -> list[int]:
    """Return the MiB of pages first touched for a tensor that is allocated and freed several times."""
    found, origin = [], dry.Tape().origin
    for _ in range(turns):
        found.append(pages.note(Allocation(1, mib * MIB, "compute", origin)) // MIB)
        assert pages.note(Free(1, mib * MIB, "compute", origin)) == 0
    return found


def test_process_pages_counts_new_mappings_and_heap_growth():
    pages = ProcessPages()
    assert touched_in_turns(pages, 16, 3) == [16, 0, 0]
    assert touched_in_turns(pages, 20, 3) == [4, 0, 0]
    assert touched_in_turns(pages, 64, 3) == [64] * 3, "too large for the heap"
    assert touched_in_turns(ProcessPages(threshold=MIB), 16, 3) == [16] * 3
    assert pages.note(Allocation(2, MIB, "compute", dry.Tape().origin, ranks=2)) == MIB, "shared memory is mapped"
    assert pages.heap_nbytes == 20 * MIB


def test_process_memory_includes_tensors_and_share_of_shared_memory():
    tape = dry_steps("zero3", 2, 0)
    mapped, on_heap = process_memory(tape, threshold=1), process_memory(tape)
    assert mapped.tensors == mapped.held == tape.peak_bytes()
    assert mapped.addresses > mapped.held, "memory shared by two ranks is mapped in full"
    assert mapped.held < on_heap.held < mapped.held * HEAP_FACTOR
    assert mapped.nbytes == mapped.held + FIRST_STEPS_NBYTES
    assert not mapped.fits(mapped.nbytes)
    assert mapped.fits(2 * mapped.nbytes)


def test_prediction_uses_mmap_threshold_from_environment(monkeypatch):
    tape = dry_steps("zero3", 2, 0)

    def needed() -> int:
        return read_off(tape, hardware("h100-80"), 2).reserved_bytes

    rising = needed()
    assert rising == process_memory(tape).nbytes
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1024")
    assert needed() == process_memory(tape, threshold=1024).nbytes != rising
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "much")
    assert needed() == rising
