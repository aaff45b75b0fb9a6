"""A long context: every rank has a part of each sequence, and attention exchanges parts for heads.

    torchrun --nproc-per-node 4 examples/8_long_context.py

Two ranks share the sequences of a batch (axis "cp"), two pairs of them have different ones (axis "dp"). All layers but
attention look at one position at a time, so a rank needs only its own. For attention an all-to-all gives it all
positions of half the heads, and another one takes the result back, as DeepSpeed-Ulysses does. Parameters know nothing
of that: they are sharded over both axes; gradients are means over all ranks, each of which has as many positions.
"""

import inspect
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard import DataParallelMeshDims, fully_shard

CONTEXT, WIDTH, HEADS, BATCH, STEPS = 32, 64, 4, 32, 25
TEXT = Path(inspect.__file__).read_bytes()


class Exchange(torch.autograd.Function):
    """Cuts dim `cut` into a part for each rank of a group, and joins what they send along dim `join`."""

    @staticmethod
    def forward(ctx, x: Tensor, cut: int, join: int, group: dist.ProcessGroup) -> Tensor:
        ctx.back = join, cut, group
        sent = torch.stack(x.chunk(group.size(), dim=cut))
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(received.unbind(), dim=join)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchange.apply(grad, *ctx.back), None, None, None


class Block(nn.Module):
    def __init__(self, cp: DeviceMesh) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.group = cp.get_group()

    def forward(self, x: Tensor) -> Tensor:  # (batch, positions of this rank, width)
        x = x + self.out(self.attend(self.qkv(self.norm(x))))
        return x + self.down(F.gelu(self.up(self.other_norm(x))))

    def attend(self, qkv: Tensor) -> Tensor:
        heads = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # three of (batch, heads, positions, width)
        q, k, v = Exchange.apply(heads, 2, 3, self.group)  # half of the heads, all positions
        visited = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return Exchange.apply(visited, 2, 1, self.group).transpose(1, 2).flatten(2)


class NextByte(nn.Module):
    def __init__(self, cp: DeviceMesh) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(cp) for _ in range(3))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, context: Tensor, places: Tensor) -> Tensor:
        x = self.embed(context) + self.place(places)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(step: int, mesh: DeviceMesh, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of its sequences: bytes, their places in the sequence, and the bytes that follow."""
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
    local = starts[mesh.get_local_rank("dp") :: mesh["dp"].size()]
    pieces = text.unfold(0, CONTEXT + 1, 1)[local].to(device)
    whole = pieces[:, :-1], torch.arange(CONTEXT, device=device)[None], pieces[:, 1:]
    return tuple(item.chunk(mesh["cp"].size(), dim=1)[mesh.get_local_rank("cp")] for item in whole)


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    world = dist.get_world_size()
    cp = 1 if world % 2 else 2

    mesh = init_device_mesh(device.type, (world // cp, cp), mesh_dim_names=("dp", "cp"))
    dims = DataParallelMeshDims(shard=("dp", "cp"))
    torch.manual_seed(0)
    model = NextByte(mesh["cp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    losses = []
    for step in range(STEPS):
        context, places, target = batch_of(step, mesh, device)
        loss = F.cross_entropy(model(context, places).flatten(0, 1), target.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)

    if dist.get_rank() == 0:
        print(f"each rank has {context.shape[1]} of {CONTEXT} positions, of {context.shape[0]} of {BATCH} sequences")
        print(f"blocks.0.up.weight is placed {model.blocks[0].up.weight.placements} over {world} ranks")
        print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
