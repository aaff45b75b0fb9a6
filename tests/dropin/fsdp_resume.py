"""Training that stops and resumes: model and optimizer saved in full by rank 0, then sharded by every rank."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 19), nn.BatchNorm1d(19), nn.ReLU(), nn.Linear(19, 2, bias=False))
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def fit(model, optimizer, steps):
    losses = []
    for step in steps:
        x = torch.randn(16, 7, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        loss = nn.functional.cross_entropy(model(x), (x[:, 0] > x[:, 1]).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(folder):
    rank = dist.get_rank()
    model, optimizer = build()
    losses = fit(model, optimizer, range(15))

    # whole, on rank 0's disk
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    )
    state, optim_state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    if rank == 0:
        torch.save({"model": state, "optim": optim_state}, os.path.join(folder, "whole.pt"))
    dist.barrier()

    # sharded, by every rank
    with FSDP.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    ):
        shards = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(shards, checkpoint_id=os.path.join(folder, "shards"))

    onward = fit(model, optimizer, range(15, 25))

    model, optimizer = build(seed=1)
    found = torch.load(os.path.join(folder, "whole.pt"))
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found["optim"]))
    assert fit(model, optimizer, range(15, 25)) == onward

    model, optimizer = build(seed=2)
    fit(model, optimizer, range(1))  # makes the optimizer's state, to be loaded into
    with FSDP.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    ):
        shards = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.load(shards, checkpoint_id=os.path.join(folder, "shards"))
        model.load_state_dict(shards["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, shards["optim"]))
    assert fit(model, optimizer, range(15, 25)) == onward
    return losses + onward


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
