"""Ranks that tests share: a call finds them as if they were new."""

import os
import signal
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks

import fullshard
from fullshard import RankMismatchError, fully_shard
from fullshard.comm import collectives
from fullshard.testing import RanksFailed


def replace_a_class() -> None:
    collectives.Collectives = None  # type: ignore[assignment, misc]


def replace_a_method() -> None:
    collectives.Collectives.all_reduce = None  # type: ignore[assignment, method-assign]


def listen_to_signals() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)


def disagree() -> None:
    """Catch the error that all ranks raise if they call different models."""
    models = [fully_shard(torch.nn.Linear(4, width)) for width in (4, 6)]
    for model in models:
        model(torch.ones(2, 4))
    with pytest.raises(RankMismatchError, match="different collectives"):
        models[dist.get_rank()](torch.ones(2, 4)).sum().backward()


SWITCHES = [
    partial(fullshard.check_finite_gradients, True),
    partial(fullshard.compare_ranks, False),
    partial(fullshard.set_collective_timeout, 7.0),
    partial(fullshard.share_memory_between_ranks, False),
    partial(fullshard.share_memory_between_units, False),
    replace_a_class,
    replace_a_method,
    listen_to_signals,
    partial(torch.set_default_dtype, torch.float64),
    partial(torch.use_deterministic_algorithms, True),
    dist.destroy_process_group,
    disagree,
]


def train() -> int:
    model = fully_shard(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return os.getpid()


def random() -> float:
    return torch.rand(()).item()


def flip(switch: Callable[[], object]) -> int:
    switch()
    return os.getpid()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no")
    dist.barrier()


def test_run_ranks_reuses_processes_and_resets_random_state():
    first, *others = [run_ranks(2, train) for _ in range(4)]
    assert others == [first] * 3
    assert run_ranks(2, random) == run_ranks(2, random)


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: getattr(switch, "func", switch).__name__)
def test_run_ranks_replaces_ranks_whose_global_state_changed(switch):
    flipped = run_ranks(2, flip, switch)
    assert set(flipped).isdisjoint(run_ranks(2, train))


def test_run_ranks_raises_failure_and_starts_new_ranks():
    before = run_ranks(2, train)
    with pytest.raises(RanksFailed, match="1 of 2 failed") as caught:
        run_ranks(2, fail_on_one)
    assert caught.value.failures[1].kind == "ValueError"
    assert set(before).isdisjoint(run_ranks(2, train))
