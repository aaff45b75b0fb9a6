"""The wrapping interface: a policy picks the units, bfloat16 computes, and the structure is printed.

    torchrun --nproc-per-node 2 examples/2_wrapper.py

A script written for torch's `FullyShardedDataParallel` looks just like this; only its imports name another package.
The policy makes a unit of every transformer layer. With mixed precision, shards and the optimizer stay in float32; what
is gathered and computed with is bfloat16; gradients are summed in float32.
"""

import inspect
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fullshard.wrap import transformer_auto_wrap_policy

LENGTH, WIDTH, BATCH, STEPS = 32, 64, 16, 50
TEXT = Path(inspect.__file__).read_bytes()


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        layers = (nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(3))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        mask = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool, device=text.device).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)


def batch_of(step: int, rank: int, world: int, device: torch.device) -> tuple[Tensor, Tensor]:
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    pieces = text.unfold(0, LENGTH + 1, 1)[starts[rank::world]].to(device)
    return pieces[:, :-1], pieces[:, 1:]


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Transformer(),
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=device,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if rank == 0:
        print(model)

    losses = []
    for step in range(STEPS):
        text, target = batch_of(step, rank, world, device)
        logits = model(text)
        loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    if rank == 0:
        print(f"units: {len(FullyShardedDataParallel.fsdp_modules(model))}")
        print(f"stored {model.head.weight.dtype}, computed {logits.dtype}")
        print(f"loss {losses[0]:.2f} -> {sum(losses[-10:]) / 10:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
