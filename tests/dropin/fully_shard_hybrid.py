"""Hybrid sharding from a mesh of two axes, and from a slice of one with three."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard


def build(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def fit(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(10):
        for last in (False, True):
            model.set_requires_all_reduce(last)
            x = torch.randn(16, 8, generator=generator)
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder):
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = build(mesh)
    assert model[0].weight.placements == (Replicate(), Shard(0))
    losses = fit(model)

    large = init_device_mesh("cpu", (1, world, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    again = fit(build(large["dp_replicate", "dp_shard"]))
    assert torch.allclose(torch.tensor(losses), torch.tensor(again), atol=1e-4)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
