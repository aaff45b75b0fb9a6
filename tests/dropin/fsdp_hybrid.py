"""Hybrid sharding over a mesh of two axes, and over a part of a larger mesh."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 31), nn.ReLU(), nn.Linear(31, 31), nn.ReLU(), nn.Linear(31, 3))


def fit(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(25):
        x = torch.randn(16, 8, generator=generator)
        loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(folder):
    world = dist.get_world_size()
    policy = ModuleWrapPolicy({nn.Linear})
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    hybrid = FSDP(build(), device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, auto_wrap_policy=policy)
    losses = fit(hybrid)

    flipped = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
    zero2 = ShardingStrategy._HYBRID_SHARD_ZERO2
    again = fit(FSDP(build(), device_mesh=flipped, sharding_strategy=zero2, auto_wrap_policy=policy))
    assert torch.allclose(torch.tensor(losses), torch.tensor(again), atol=1e-5)

    both = init_device_mesh("cpu", (world, 1), mesh_dim_names=("data", "tensor"))
    sliced = fit(FSDP(build(), device_mesh=both["data"], auto_wrap_policy=policy, use_orig_params=True))
    assert torch.allclose(torch.tensor(losses), torch.tensor(sliced), atol=1e-5)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
