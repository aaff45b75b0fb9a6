"""Units chosen where a model is built: `wrap` marks them, `enable_wrap` says what that means.

    torchrun --nproc-per-node 2 examples/3_wrap_by_hand.py

The same class builds a plain model outside of `enable_wrap`, where `wrap` does nothing. Both are trained on the same
batches, the plain one on every rank with the whole batch, and end with the same loss.
"""

import inspect
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import FullyShardedDataParallel, ShardingStrategy
from fullshard.wrap import enable_wrap, wrap

CONTEXT, WIDTH, BATCH, STEPS = 16, 128, 64, 40
TEXT = Path(inspect.__file__).read_bytes()


class NextByte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH // CONTEXT)
        self.encoder = wrap(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)))
        # This one stays whole from forward to backward: its arguments differ from the others'.
        self.head = wrap(nn.Linear(WIDTH, 256), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)

    def forward(self, context: Tensor) -> Tensor:
        x = self.embed(context).flatten(1)
        return self.head(x + self.encoder(x))


def batch_of(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=torch.Generator().manual_seed(step))
    pieces = text.unfold(0, CONTEXT + 1, 1)[starts].to(device)
    return pieces[:, :-1], pieces[:, -1]


def train(model: nn.Module, rank: int, world: int, device: torch.device) -> list[float]:
    """The loss over the whole batch before each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        context, target = batch_of(step, device)
        loss = F.cross_entropy(model(context[rank::world]), target[rank::world])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    plain = NextByte().to(device)
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, device_id=device):
        model = wrap(NextByte())

    alone = train(plain, 0, 1, device)
    sharded = train(model, rank, world, device)
    if rank == 0:
        print(model)
        print(f"plain, whole batch  loss {alone[0]:.4f} -> {alone[-1]:.4f}")
        print(f"sharded, {world} ranks    loss {sharded[0]:.4f} -> {sharded[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
