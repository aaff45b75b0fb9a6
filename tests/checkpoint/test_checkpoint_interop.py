"""fullshard loads checkpoints of torch.distributed.checkpoint, and torch loads checkpoints of fullshard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared_ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard as their_fully_shard

from fullshard import CheckpointError, fully_shard
from fullshard.checkpoint import load, save
from fullshard.testing import assert_same


class Net(nn.Module):
    """A tied, a frozen and an uneven weight, and a norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.frozen = nn.Linear(6, 7, bias=False).requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)
        self.back = nn.Linear(7, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.back(self.norm(self.frozen(x))))


def build(shard: Any, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    for block in model.blocks:
        shard(block)
    shard(model)
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.arange(8) * (step + 1) % 11
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 11)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class AppState(Stateful):
    """The application state of torch's recipe."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def write_as_torch_does(folder: Path) -> list[float]:
    """Save three common layouts: custom sections, torch's recipe, and a flat state dict. Return the next losses."""
    model, optimizer = build(their_fully_shard)
    fit(model, optimizer, range(2))
    state, optim_state = get_state_dict(model, optimizer)
    dcp.save({"net": state, "opt": optim_state, "epoch": 3}, checkpoint_id=folder / "sections")
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=folder / "recipe")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    state, optim_state = get_state_dict(model, optimizer, options=flat)
    dcp.save({**state, "optimizer": optim_state, "train_state": {"step": 2}}, checkpoint_id=folder / "flat")
    return fit(model, optimizer, range(2, 4))


def read_what_torch_wrote(folder: Path) -> list[list[float]]:
    losses = []
    for layout in ("sections", "recipe", "flat"):
        model, optimizer = build(fully_shard, seed=1)
        restored = load(folder / layout, model=model, optimizer=optimizer)
        assert restored.step is None
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert model.head.weight is model.embedding.weight
        losses.append(fit(model, optimizer, range(2, 4)))
    return losses


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_load_finds_newest_torch_checkpoint_named_like_a_step(tmp_path):
    for step in (9, 10):
        state = {name: value + step for name, value in nn.Linear(2, 2).state_dict().items()}
        dcp.save({"model": state}, checkpoint_id=tmp_path / f"step-{step}")
    model = nn.Linear(2, 2)
    assert load(tmp_path, model=model).path == tmp_path / "step-10"
    assert_same(model.state_dict(), state)


@pytest.mark.slow
def test_load_reads_torch_dcp_checkpoints(tmp_path):
    expected = run_ranks(2, write_as_torch_does, tmp_path)[0]
    for world in (2, 3):
        for layouts in run_ranks(world, read_what_torch_wrote, tmp_path):
            for losses in layouts:
                assert losses == pytest.approx(expected, rel=1e-5)


def write_own(folder: Path) -> list[float]:
    model, optimizer = build(fully_shard)
    fit(model, optimizer, range(2))
    save(folder, model=model, optimizer=optimizer, step=2, extra={"note": [1, {}]})
    whole = {name: param.full_tensor() for name, param in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(whole, folder / "whole.pt")
    return fit(model, optimizer, range(2, 4))


def read_ours_as_torch_does(folder: Path) -> list[float]:
    model, optimizer = build(their_fully_shard, seed=1)
    state, optim_state = get_state_dict(model, optimizer)
    loaded = {"model": state, "optimizer": optim_state}
    dcp.load(loaded, checkpoint_id=folder / "step-000000002")
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert_same(model.head.weight.full_tensor(), model.embedding.weight.full_tensor())
    return fit(model, optimizer, range(2, 4))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_dcp_reads_fullshard_checkpoint(tmp_path):
    expected = run_ranks(2, write_own, tmp_path)[0]
    for losses in run_ranks(3, read_ours_as_torch_does, tmp_path):
        assert losses == pytest.approx(expected, rel=1e-5)
    dcp_to_torch_save(os.fspath(tmp_path / "step-000000002"), tmp_path / "all.pt")
    converted = torch.load(tmp_path / "all.pt", weights_only=True)["model"]
    whole = torch.load(tmp_path / "whole.pt")
    assert_same({name: converted[name] for name in whole}, whole)
    assert_same(converted["head.weight"], whole["embedding.weight"])


VALID_STRIDES = [(), (None,), ((2, 1),), ((0, 0),)]


@pytest.mark.parametrize("strides", [*VALID_STRIDES, ((-2, 1),), (7,), ("no",), ((2, 1), (2, 1))], ids=str)
def test_metadata_loads_with_or_without_valid_strides(strides, tmp_path, monkeypatch):
    """Since torch 2.15, metadata has the strides of tensors."""
    as_here = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*as_here(self)[:5], *strides))
    model, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    save(tmp_path, model=model, step=1)
    if strides in VALID_STRIDES:
        load(tmp_path, model=other)
        assert_same(other.weight, model.weight)
    else:
        with pytest.raises(CheckpointError, match=r"\.metadata: expected the metadata of a checkpoint"):
            load(tmp_path, model=other)
