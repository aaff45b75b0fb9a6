"""A rank loads a file that it pickled itself. Other ranks reject it, because it does not contain their shards."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import take_step
from torch import nn

from fullshard import CheckpointError, fully_shard
from fullshard.testing import assert_same


def built(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 5))
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    stepped(model, optimizer)
    return model, optimizer


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    take_step(optimizer, model(torch.ones(2, 3)).sum())


def dumped(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def opened(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def of_rank(rank: int, value: Any) -> Any:
    found = [value]
    dist.broadcast_object_list(found, src=rank)
    return found[0]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.to_local().clone() for name, param in model.state_dict().items()}


def load_anothers(options: dict[str, Any]) -> list[str]:
    """Return this rank's errors about rank 0's file, and about a file with tensors that were moved to the CPU first."""
    model, optimizer = built(**options)
    moved = {name: value.cpu() for name, value in model.state_dict().items()}
    files = of_rank(0, [dumped(model.state_dict()), dumped(model.state_dict()), dumped(moved)])  # one is loaded twice
    stepped(model, optimizer)
    before, stated = values(model), []
    for data in files:
        try:
            model.load_state_dict(opened(data))
            stated.append("")
        except CheckpointError as error:
            stated.append(str(error))
            assert_same(values(model), before)
    return stated


@pytest.mark.parametrize("options", [{}, {"strategy": "zero2"}])
def test_load_state_dict_rejects_file_of_another_rank(options):
    first, second = run_ranks(2, load_anothers, options)
    assert first == ["", "", ""]
    assert all(second), [stated[:60] for stated in second]
    for stated in second:
        assert "holds the part at coordinate (0,) of a mesh of shape (2,), but rank 1 is at (1,)" in stated
        assert "fullshard.checkpoint.save" in stated
    assert second[0].startswith("0.weight of shape (8, 3)")


def load_anothers_states(options: dict[str, Any]) -> list[str]:
    """Return this rank's errors about rank 0's optimizer state, before and after the first step of the optimizer."""
    model, optimizer = built(**options)
    data, stated = of_rank(0, dumped(optimizer.state_dict())), []
    for steps in (0, 1):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(steps):
            stepped(model, optimizer)
        before = values(model)
        model(torch.ones(2, 3)).sum().backward()
        try:
            optimizer.load_state_dict(opened(data))
            optimizer.step()
            stated.append("")
        except CheckpointError as error:
            stated.append(str(error))
            assert_same(values(model), before)
        optimizer.zero_grad()
    return stated


@pytest.mark.parametrize("options", [{}, {"strategy": "zero2"}])
def test_optimizer_rejects_state_of_another_rank(options):
    first, second = run_ranks(2, load_anothers_states, options)
    assert first == ["", ""]
    for stated in second:
        assert stated.startswith("'exp_avg' of 0.weight of shape (8, 3) holds the part at coordinate (0,)"), stated
        assert "fullshard.checkpoint.save" in stated


@on_ranks(2)
def test_load_state_dict_accepts_file_of_the_same_rank():
    """Check that a rank can still use its own state: files, copies, and other DTensors on live meshes."""
    model, optimizer = built()
    expected, state, states = values(model), dumped(model.state_dict()), dumped(optimizer.state_dict())
    copied = copy.deepcopy(model.state_dict())
    stepped(model, optimizer)
    model.load_state_dict(opened(state))
    assert_same(values(model), expected)
    stepped(model, optimizer)
    model.load_state_dict(copied)
    assert_same(values(model), expected)
    optimizer.load_state_dict(opened(states))
    stepped(model, optimizer)
    model.load_state_dict({name: value.full_tensor() for name, value in copied.items()})
    assert_same(values(model), expected)


def write_first(folder: Path) -> None:
    model, _ = built()
    (folder / f"{dist.get_rank()}.pt").write_bytes(dumped(model.state_dict()))


def read_first(folder: Path) -> str:
    model, _ = built()
    before = values(model)
    with pytest.raises(CheckpointError) as caught:
        model.load_state_dict(opened((folder / f"{min(dist.get_rank(), 1)}.pt").read_bytes()))
    assert_same(values(model), before)
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 3])
def test_load_state_dict_rejects_file_of_another_world_size(world, tmp_path):
    run_ranks(2, write_first, tmp_path)
    for stated in run_ranks(world, read_first, tmp_path):
        assert "on a mesh of shape (2,), which does not exist in this run" in stated


@on_ranks(2)
def test_load_state_dict_accepts_file_of_another_replica():
    """Ranks along the replicate dimension hold the same shard, so each can load the file of the other."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model, optimizer = built(mesh=mesh)
    state, states = of_rank(0, (dumped(model.state_dict()), dumped(optimizer.state_dict())))
    model.load_state_dict(opened(state))
    optimizer.load_state_dict(opened(states))
    stepped(model, optimizer)
