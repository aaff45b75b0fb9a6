"""Hybrid sharding: shard within a group of ranks, replicate between groups.

    torchrun --nproc-per-node 4 examples/5_hybrid.py

Four ranks are laid out as a mesh of two replicas with two shards each. Gathers and reduce-scatters, which carry whole
parameters, stay among the ranks of a replica (on a cluster: within a host, where links are fast). Only gradient shards
are summed between replicas, and while gradients accumulate, once a step. The recorder counts both.
"""

import inspect
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import fully_shard, recording

CONTEXT, WIDTH, BATCH, STEPS, MICROBATCHES = 16, 128, 64, 25, 2
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
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
    pieces = text.unfold(0, CONTEXT + 1, 1)[starts[rank::world]].to(device)
    return pieces[:, :-1], pieces[:, -1]


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    if world % 2:
        raise SystemExit(f"two replicas need an even number of ranks, not {world}: --nproc-per-node 4")

    mesh = init_device_mesh(device.type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = NextByte()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, strategy="hsdp")
    fully_shard(model, mesh=mesh, strategy="hsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for step in range(STEPS):
        with recording() as record:
            for microbatch in range(MICROBATCHES):
                context, target = batch_of(step * MICROBATCHES + microbatch, rank, world, device)
                # Within a replica every microbatch is reduced; between replicas, only the sum of them all.
                model.set_requires_all_reduce(microbatch == MICROBATCHES - 1)
                loss = F.cross_entropy(model(context), target) / MICROBATCHES
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() * MICROBATCHES)

    if rank == 0:
        print(f"shards within ranks {mesh['shard'].mesh.tolist()}, replicas on ranks {mesh['replicate'].mesh.tolist()}")
        print(f"blocks.0.up.weight is placed {model.blocks[0].up.weight.placements}")
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            print(f"{name}: {len(record.collectives(name))} a step, {record.sent_bytes(name):,} bytes sent by rank 0")
        print(f"loss {losses[0]:.2f} -> {sum(losses[-10:]) / 10:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
