"""Gradient accumulation without communication, and fp16 autocast with a sharded gradient scaler."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def main(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 30), nn.GELU(), nn.Linear(30, 30), nn.GELU(), nn.Linear(30, 2))
    model = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**20, growth_interval=1000)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, accumulate = [], 4
    for step in range(60):
        x = torch.randn(8, 10, generator=generator)
        last = (step + 1) % accumulate == 0
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
            scaler.scale(loss / accumulate).backward()
        losses.append(loss.item())
        if last:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
