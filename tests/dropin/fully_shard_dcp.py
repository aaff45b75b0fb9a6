"""Checkpoints by torch.distributed.checkpoint: sharded to files, and whole through rank 0."""

import copy
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(12, 14), nn.Linear(14, 25), nn.BatchNorm1d(25), nn.Linear(25, 12))
    fully_shard(model[1])
    fully_shard(model[3])
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def fit(model, optimizer, steps):
    losses = []
    for step in steps:
        x = torch.randint(12, (32,), generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        loss = nn.functional.cross_entropy(model(x), (x * 5 + 2) % 12)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(folder):
    model, optimizer = build()
    losses = fit(model, optimizer, range(15))

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state = get_model_state_dict(model, options=whole)
    optim_state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=whole))  # has live step counters
    assert (len(model_state) > 0) == (dist.get_rank() == 0)
    sharded, sharded_optim = get_state_dict(model, optimizer)
    dcp.save({"model": sharded, "optim": sharded_optim}, checkpoint_id=os.path.join(folder, "dcp"))
    onward = fit(model, optimizer, range(15, 25))

    model, optimizer = build(seed=1)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, model_state, options=from_first)
    set_optimizer_state_dict(model, optimizer, optim_state, options=from_first)
    assert fit(model, optimizer, range(15, 25)) == onward

    model, optimizer = build(seed=2)
    sharded, sharded_optim = get_state_dict(model, optimizer)
    state = {"model": sharded, "optim": sharded_optim}
    dcp.load(state, checkpoint_id=os.path.join(folder, "dcp"))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert fit(model, optimizer, range(15, 25)) == onward
    return losses + onward


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
