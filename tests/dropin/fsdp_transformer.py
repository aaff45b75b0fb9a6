"""A transformer, one unit a block, in bf16, with all the switches of performance guides turned on."""

import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Reverser(nn.Module):
    def __init__(self, vocabulary=11, width=24, length=6, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(folder):
    rank = dist.get_rank()
    torch.manual_seed(rank)  # sync_module_states makes them identical
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    model = FSDP(
        Reverser(),
        auto_wrap_policy=policy,
        mixed_precision=bf16,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        limit_all_gathers=True,
        sync_module_states=True,
        device_id=torch.device("cpu"),
    )
    assert len(FSDP.fsdp_modules(model)) == 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(30):
        tokens = torch.randint(11, (16, 6), generator=generator)
        optimizer.zero_grad()
        logits = model(tokens)
        assert logits.dtype == torch.bfloat16
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flip(1).flatten())
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        assert torch.isfinite(norm)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())

    save = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, save):
        state = model.state_dict()
    if rank == 0:
        torch.save(state, os.path.join(folder, "reverser.pt"))
    dist.barrier()
    if rank == 0:
        plain = Reverser()
        plain.load_state_dict(torch.load(os.path.join(folder, "reverser.pt")))
        assert all(p.dtype == torch.float32 for p in plain.parameters())
    else:
        assert state == {}
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
