"""A model that is never whole in memory: built on the meta device, sharded, and only then given memory and values.

    torchrun --nproc-per-node 2 examples/6_meta_device.py

Values come from the model's own `init_weights`, one unit after another, so that no rank ever holds more than one unit
whole. After some training the state is saved from rank 0, and a second model, also built on the meta device, takes it
up: each rank reads its part of the memory-mapped file.
"""

import inspect
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import fully_shard, summon_full_params

CONTEXT, WIDTH, BATCH, STEPS = 16, 256, 64, 40
TEXT = Path(inspect.__file__).read_bytes()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def init_weights(self) -> None:
        for layer in (self.norm, self.up, self.down):
            layer.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NextByte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH // CONTEXT)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 256)

    def init_weights(self) -> None:
        """Values for what the blocks do not have."""
        self.embed.reset_parameters()
        self.head.reset_parameters()

    def forward(self, context: Tensor) -> Tensor:
        x = self.embed(context).flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded_without_memory() -> NextByte:
    with torch.device("meta"):
        model = NextByte()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def batch_of(step: int, rank: int, world: int, device: torch.device) -> tuple[Tensor, Tensor]:
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
    pieces = text.unfold(0, CONTEXT + 1, 1)[starts[rank::world]].to(device)
    return pieces[:, :-1], pieces[:, -1]


def save(model: nn.Module, path: Path) -> None:
    """Write the full parameters from rank 0, one gathered after another."""
    whole = {}
    for name, shard in model.state_dict().items():
        tensor = shard.full_tensor()  # a collective: every rank takes part, and rank 0 keeps the result
        if dist.get_rank() == 0:
            whole[name] = tensor.cpu()
    if dist.get_rank() == 0:
        torch.save(whole, path)
    dist.barrier()


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()

    model = sharded_without_memory()
    on_meta = all(param.to_local().is_meta for param in model.parameters())
    model.to_empty(device=device)  # memory for the shards
    torch.manual_seed(0)  # every rank draws the same full values, and keeps its part of them
    for unit in (*model.blocks, model):
        with summon_full_params(unit, recurse=False):
            unit.init_weights()

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        context, target = batch_of(step, rank, world, device)
        loss = F.cross_entropy(model(context), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / "model.pt")]
        dist.broadcast_object_list(paths, src=0)  # the folder of rank 0
        save(model, Path(paths[0]))
        again = sharded_without_memory().to_empty(device=device)
        again.load_state_dict(torch.load(paths[0], mmap=True, map_location="cpu"))
        dist.barrier()  # before rank 0 removes the folder

    context, target = batch_of(STEPS, rank, world, device)
    with torch.no_grad():
        before, after = (F.cross_entropy(m(context), target).item() for m in (model, again))
    if rank == 0:
        print(f"on the meta device when sharded: {on_meta}")
        print(f"loss {losses[0]:.2f} -> {sum(losses[-10:]) / 10:.2f}")
        print(f"next batch: loss {before:.6f}, and {after:.6f} with the loaded model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
