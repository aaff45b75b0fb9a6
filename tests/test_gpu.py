"""What only a GPU can show, over NCCL in a world of one rank: bits, a host that never waits, memory that stays."""

from functools import partial
from typing import Any

import pytest
import torch
from small_models import ONE_AXIS, chain, inputs, leave, wholes
from torch import nn

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.testing import assert_same, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def made(shard: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = chain(shard).cuda() if shard is leave else chain(shard)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def learn(shard: Any) -> list[Any]:
    model, optimizer = made(shard)
    return [torch.stack([step(model, optimizer, inputs(n).cuda()) for n in range(5)]).cpu(), wholes(model)]


def agree_on_a_gpu() -> None:
    expected = learn(leave)
    for strategy in ONE_AXIS:
        assert_same(learn(partial(fully_shard, strategy=strategy)), expected, name=strategy)


def test_one_rank_learns_the_bits_of_plain_pytorch():
    run_ranks(1, agree_on_a_gpu, backend="nccl")


def steps_without_waiting(strategy: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, optimizer = made(partial(fully_shard, strategy=strategy, mp_policy=policy))
    x = inputs().cuda()
    for _ in range(3):
        step(model, optimizer, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            step(model, optimizer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("strategy", ONE_AXIS)
def test_in_a_step_the_host_never_waits_for_the_gpu(strategy):
    run_ranks(1, steps_without_waiting, strategy, backend="nccl")


def memory_from_step_to_step() -> list[tuple[int, int]]:
    model, optimizer = made(fully_shard)
    found = []
    for _ in range(8):
        torch.cuda.reset_peak_memory_stats()
        step(model, optimizer, inputs().cuda())
        torch.cuda.synchronize()
        found.append((torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()))
    return found


def test_memory_is_the_same_in_every_step():
    [found] = run_ranks(1, memory_from_step_to_step, backend="nccl")
    assert len(set(found[3:])) == 1
