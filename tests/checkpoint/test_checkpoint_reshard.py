"""Checkpoints load bitwise into any world size and strategy, and the run resumes with the same losses."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_stacks import mesh_of, parallel, stack
from parallel_stacks import shard as shard_stack
from run_states import everything
from shared_ranks import on_ranks, run_ranks
from small_models import SmallGPT, batch, covering_pairs, loss_of, shard, small_gpt, take_step, trained, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.checkpoint import load, save
from fullshard.state.optim_state import sharded_optim_state_dict
from fullshard.testing import assert_same

STRATEGIES = {
    1: ("ddp", "zero1", "zero2", "zero3"),
    2: ("ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2"),
    3: ("ddp", "zero1", "zero2", "zero3"),
    4: ("ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero2"),
}
FEW = {1: ("zero1",), 2: ("ddp", "zero3"), 3: ("zero2",), 4: ("hsdp",)}
Source = tuple[int, str]


def build(strategy: str, seed: int = 0) -> tuple[SmallGPT, torch.optim.Optimizer]:
    """Return a model with tied, frozen, scalar and empty parameters, and an optimizer of two groups."""
    replicas = 2 if strategy.startswith("hsdp") else 0
    shape = (replicas, dist.get_world_size() // replicas) if replicas else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = small_gpt(1)
    if seed:
        torch.manual_seed(seed)
        for param in model.parameters():
            nn.init.normal_(param)
    model = shard(model, tied_in_two_units=strategy == "zero2", mesh=mesh, strategy=strategy)
    groups = [{"params": trained(model)[::2], "lr": 0.02}, {"params": trained(model)[1::2], "weight_decay": 0.3}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """Return the losses of `steps`. Every rank has the same batch."""
    losses = []
    for step in steps:
        losses.append(take_step(optimizer, loss_of(model, batch(step, sequences=2))))
    return losses


def write_all(folder: Path, strategies: list[str]) -> None:
    world = dist.get_world_size()
    for strategy in strategies:
        model, optimizer = build(strategy)
        learn(model, optimizer, range(2))
        save(folder / f"{world}-{strategy}", model=model, optimizer=optimizer, step=2)
        reported = {**everything(model, optimizer), "losses": learn(model, optimizer, range(2, 4))}
        if dist.get_rank() == 0:
            torch.save(reported, folder / f"{world}-{strategy}.pt")


def read_all(folder: Path, cases: list[tuple[Source, str]]) -> None:
    for (world, saved), strategy in cases:
        name = f"{world}-{saved} as {dist.get_world_size()}-{strategy}"
        reported = torch.load(folder / f"{world}-{saved}.pt")
        model, optimizer = build(strategy, seed=1)
        restored = load(folder / f"{world}-{saved}", model=model, optimizer=optimizer)
        assert (restored.step, restored.world, restored.strategy) == (2, world, saved)
        found = everything(model, optimizer)
        assert_same(
            {key: found[key] for key in ("params", "states")}, {key: reported[key] for key in ("params", "states")}
        )
        assert found["options"] == reported["options"], name
        losses = learn(model, optimizer, range(2, 4))
        if world == dist.get_world_size() and "hsdp" not in saved + strategy:
            assert_same(losses, reported["losses"], name=name)
        else:
            torch.testing.assert_close(losses, reported["losses"], rtol=1e-5, atol=1e-6, msg=name)


def check(sources: dict[int, tuple[str, ...]], targets: dict[int, list[tuple[Source, str]]], folder: Path) -> None:
    for world, strategies in sources.items():
        run_ranks(world, write_all, folder, list(strategies))
    for world, cases in targets.items():
        run_ranks(world, read_all, folder, cases)


@pytest.mark.slow
def test_run_resumes_under_any_strategy_at_any_world_size(tmp_path):
    """Load every source at every world size. The target strategies alternate."""
    sources = [(world, strategy) for world, strategies in FEW.items() for strategy in strategies]
    targets = {
        world: [(source, strategies[(i + world) % len(strategies)]) for i, source in enumerate(sources)]
        for world, strategies in STRATEGIES.items()
    }
    check(FEW, targets, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_checkpoint_loads_across_pairs_of_strategies_and_world_sizes(tmp_path):
    """Cover all pairs among saved strategy, saved world size, loaded strategy and loaded world size."""

    def exists(world: int, strategy: str, new_world: int, new_strategy: str) -> bool:
        return strategy in STRATEGIES[world] and new_strategy in STRATEGIES[new_world]

    targets: dict[int, list[tuple[Source, str]]] = {world: [] for world in STRATEGIES}
    for *source, world, strategy in covering_pairs(STRATEGIES, STRATEGIES[4], STRATEGIES, STRATEGIES[4], allows=exists):
        targets[world].append((tuple(source), strategy))
    check(STRATEGIES, targets, tmp_path)


def whole_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = sharded_optim_state_dict(model, optimizer)["state"]
    states = {f"{fqn} {name}": item for fqn, of_fqn in state.items() for name, item in of_fqn.items()}
    return {name: whole(tensor) for name, tensor in {**model.state_dict(), **states}.items()}


@pytest.mark.slow
@on_ranks(4)
def test_checkpoint_is_independent_of_tensor_parallelism(tmp_path):
    """Save with a 2 x 2 mesh, load without tensor parallelism on 4 ranks, and vice versa."""
    mesh = mesh_of(2, 2)
    built = {
        "2 x 2": lambda: shard_stack(parallel(mesh["tp"], sequence=False), mesh["shard"]),
        "4": lambda: shard_stack(stack(), init_device_mesh("cpu", (4,)), strategy="zero1"),
    }
    expected: dict[str, Any] = {}
    for name, build_one in built.items():
        model = build_one()
        optimizer = torch.optim.AdamW(trained(model), lr=0.1)
        for param in trained(model):
            param.grad = torch.ones_like(param)
        optimizer.step()
        save(tmp_path / name, model=model, optimizer=optimizer, step=1)
        expected[name] = whole_values(model, optimizer)
    for saved, (name, build_one) in product(expected, built.items()):
        model = build_one()
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        optimizer = torch.optim.AdamW(trained(model), lr=0.1)
        load(tmp_path / saved, model=model, optimizer=optimizer)
        assert_same(whole_values(model, optimizer), expected[saved], name=f"{saved} as {name}")
