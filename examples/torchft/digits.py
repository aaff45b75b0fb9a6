"""Handwritten digits on replicas that join and leave: the loss of one costs the others one step and no restart.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 --bind '[::]:29510' &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 100 examples/torchft/digits.py --replica a &
    torchrun --standalone --nproc-per-node 2 --max-restarts 100 examples/torchft/digits.py --replica b

Kill one process while it runs: its torchrun restarts that replica, which gets its state from the other replica.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from fullshard import fully_shard
from fullshard.integrations.torchft import Replicas


def train(replica: str, steps: int) -> None:
    """Train on this rank of a replica, with its own rows of each step for the current number of replicas."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    replicas = Replicas(model, optimizer, name=replica)

    digits = load_digits()
    pixels, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    while replicas.step < steps:
        replicas.begin_step()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(replicas.step))
        rows = order[: 32 * ranks * replicas.count].chunk(ranks * replicas.count)[replicas.index * ranks + rank]
        loss = nn.functional.cross_entropy(model(pixels[rows]), labels[rows])
        loss.backward()
        if replicas.should_commit():
            optimizer.step()
            if rank == 0 and replicas.step % 20 == 0:
                print(f"replica {replica}, step {replicas.step} of {replicas.count} replicas: loss {loss.item():.3f}")
        optimizer.zero_grad()
    replicas.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--replica", required=True, help="its name, which no other replica has")
    parser.add_argument("--steps", type=int, default=200)
    requested = parser.parse_args()
    train(requested.replica, requested.steps)
