"""Activation checkpointing by torch's wrapper, put on before sharding and after it."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

non_reentrant = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(12, 48)
        self.down = nn.Linear(48, 12)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def build():
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), Layer(), nn.Linear(12, 1))


def fit(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(20):
        x = torch.randn(16, 12, generator=generator)
        loss = (model(x) - x.prod(1, keepdim=True).tanh() - x[:, :1]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(folder):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Layer})
    plain = fit(FSDP(build(), auto_wrap_policy=policy))

    after = FSDP(build(), auto_wrap_policy=policy)
    apply_activation_checkpointing(
        after, checkpoint_wrapper_fn=non_reentrant, check_fn=lambda module: isinstance(module, Layer)
    )
    assert fit(after) == plain
    assert sorted(after.state_dict()) == sorted(build().state_dict())

    before = build()
    for i in range(3):
        before[i] = checkpoint_wrapper(before[i])
    before = FSDP(before, auto_wrap_policy=policy)
    assert fit(before) == plain

    outside = nn.Sequential(*(checkpoint_wrapper(FSDP(layer)) for layer in build()[:3]), build()[3])
    assert fit(FSDP(outside)) == plain
    return plain


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(main("."))
