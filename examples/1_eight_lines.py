"""Shard a model in eight lines.

    torchrun --nproc-per-node 2 examples/1_eight_lines.py

A small network learns to tell the next byte of Python source from the sixteen before it. The lines marked 1 to 8 are
all that sharding it takes; the rest is what a script for one process has, too. At the end it prints what became of one
parameter.
"""

import inspect
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import fully_shard  # 1

CONTEXT, WIDTH, BATCH, STEPS = 16, 256, 64, 80
TEXT = Path(inspect.__file__).read_bytes()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NextByte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH // CONTEXT)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, context: Tensor) -> Tensor:
        x = self.embed(context).flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(step: int, rank: int, world: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's part of the batch: the same batch for any number of ranks."""
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
    pieces = text.unfold(0, CONTEXT + 1, 1)[starts[rank::world]].to(device)
    return pieces[:, :-1], pieces[:, -1]


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()  # 2: gloo between CPUs, NCCL between GPUs
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # every rank builds the same model, and keeps its part of it
    model = NextByte()  # 3
    for block in model.blocks:  # 4
        fully_shard(block)  # 5: a unit: gathered for its own forward and backward only
    fully_shard(model)  # 6: the outermost unit takes what is left: the embedding and the head
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # 7: steps this rank's shards

    losses = []
    for step in range(STEPS):
        context, target = batch_of(step, rank, world, device)
        loss = F.cross_entropy(model(context), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    weight = model.blocks[0].up.weight
    if rank == 0:
        print(f"loss {losses[0]:.2f} -> {sum(losses[-10:]) / 10:.2f}")
        print(f"blocks.0.up.weight: shape {tuple(weight.shape)}, placed {weight.placements} over {world} ranks")
        print(f"rank 0 keeps {tuple(weight.to_local().shape)} of it, and of what the optimizer keeps for it")
    dist.destroy_process_group()  # 8


if __name__ == "__main__":
    main()
