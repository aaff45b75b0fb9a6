"""Ranks that hold, or come to hold, different values of what should be one model: told at once, and once."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks
from small_models import chain, inputs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import FullyShardedDataParallel, RankMismatchError, fully_shard


class Said(logging.Handler):
    """What was logged, as texts, within a `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("fullshard").addHandler(self)
        return self.texts

    def __exit__(self, *_: Any) -> None:
        logging.getLogger("fullshard").removeHandler(self)


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 16), nn.LayerNorm(16), nn.Linear(16, 48))


def forwards(remedy: str) -> list[str]:
    rank = dist.get_rank()
    model = build(0 if remedy == "seed" else rank)
    if remedy == "broadcast":
        model = FullyShardedDataParallel(model, sync_module_states=True)
    else:
        fully_shard(model[0])
        fully_shard(model)
    if remedy == "load":
        model.load_state_dict(build(0).state_dict())
    if remedy == "write":
        for param in model.parameters():
            nn.init.ones_(param)
    with Said() as texts:
        for _ in range(3):
            model(torch.ones(2, 48))
    return texts


@pytest.mark.parametrize("remedy", ["none", "seed", "broadcast", "load", "write"])
def test_ranks_that_drew_different_values_are_told_once(remedy):
    first, second = run_ranks(2, forwards, remedy)
    assert second == []
    assert len(first) == (remedy == "none")
    if first:
        assert "4 parameters, such as 2.weight on rank 0 and rank 1" in first[0]
        assert "torch.manual_seed" in first[0]


def never_alike(options: dict[str, Any]) -> None:
    if options["strategy"] == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(build(dist.get_rank()), **options)
    with pytest.raises(RankMismatchError, match=r"such as 0.weight on rank 0 and rank 1.*sync_module_states"):
        model(torch.ones(2, 48))


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
def test_values_that_nothing_would_make_alike_are_an_error(strategy):
    run_ranks(2, never_alike, {"strategy": strategy})


def train_with_a_head(care: str) -> list[str]:
    """A head beside the sharded model, whose gradients nobody averages, unless it is taken `care` of."""
    model, head = chain(fully_shard), nn.Linear(5, 1)
    nn.init.ones_(head.weight)
    nn.init.zeros_(head.bias)
    if care == "sharded":
        fully_shard(head)
    if care == "ignored":
        fully_shard(nn.Sequential(head, nn.Linear(2, 2)), ignored_params=head.parameters())
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step, 1))  # 0 in the first step
    with Said() as texts:
        for step in range(9):
            (head(model(inputs(step))).square().mean() * (1 + dist.get_rank())).backward()
            if care == "averaged":
                for param in head.parameters():
                    dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
            rates.step()
    return texts


@pytest.mark.parametrize("care", ["none", "sharded", "ignored", "averaged"])
def test_parameters_outside_units_that_diverge_are_told_once(care):
    first, second = run_ranks(2, train_with_a_head, care)
    assert second == []
    assert len(first) == (care == "none")
    if first:
        assert "2 parameters that no unit has, the first of shape (1, 5)" in first[0]
        assert "outermost module" in first[0]
        assert "after 3 steps" in first[0]
