"""Handwritten digits on sharded ranks, which all restart when one is lost.

torchrun --standalone --nproc-per-node 2 --max-restarts 100 examples/torchft/before.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from fullshard import fully_shard


def train(steps: int) -> None:
    """Train on this rank, with its own rows of each step."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    digits = load_digits()
    pixels, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    for step in range(steps):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))
        rows = order[: 32 * ranks].chunk(ranks)[rank]
        loss = nn.functional.cross_entropy(model(pixels[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    requested = parser.parse_args()
    train(requested.steps)
