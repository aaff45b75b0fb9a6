"""Kernels that patch modules and fuse the head with the loss, as Liger's: its weight is used by another module."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared_ranks import run_ranks
from torch import Tensor, nn

from fullshard import fully_shard
from fullshard.testing import assert_same, check_parity
from fullshard.wrap import ModuleWrapPolicy

WIDTH, LETTERS, BATCH = 16, 13, 12


class LinearCrossEntropy(torch.autograd.Function):
    """Cross-entropy of `hidden @ weight.T`, a few rows at a time, which takes gradients in forward and drops logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        total, to_weight, to_hidden = hidden.new_zeros(()), torch.zeros_like(weight), []
        for rows, wanted in zip(hidden.split(5), target.split(5), strict=True):
            logits = rows @ weight.T
            total += F.cross_entropy(logits, wanted, reduction="sum")
            slope = (logits.softmax(-1) - F.one_hot(wanted, len(weight))) / len(target)
            to_hidden.append(slope @ weight)
            to_weight += slope.T @ rows
        ctx.save_for_backward(torch.cat(to_hidden), to_weight)
        return total / len(target)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        to_hidden, to_weight = ctx.saved_tensors
        return to_hidden * grad, to_weight * grad, None


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("it is patched")


def fused_norm(self: RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), self.weight)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = RMSNorm(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(x)).relu()


class Letters(nn.Module):
    """Its head is never called: the loss takes its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)

    def forward(self, letters: Tensor) -> Tensor:
        x = self.embed(letters[:-1])
        for block in self.blocks:
            x = block(x)
        return LinearCrossEntropy.apply(x, self.head.weight, letters[1:])


def patched() -> Letters:
    """Patch the model as a kernel library does."""
    model = Letters()
    for block in model.blocks:
        block.norm.forward = MethodType(fused_norm, block.norm)
    return model


def make_batch(number: int) -> Tensor:
    return torch.randint(LETTERS, (BATCH + 1,), generator=torch.Generator().manual_seed(number))


def test_a_head_in_the_root_has_the_bits_of_the_plain_process():
    """Any caller gets its unsharded weight within the root's forward."""
    report = check_parity(
        patched, make_batch, ranks=2, strategies=["zero2", "zero3"], steps=2, auto_wrap_policy=ModuleWrapPolicy({Block})
    )
    assert report.is_bit_for_bit, str(report)


def gradients() -> tuple[Tensor, str]:
    """Return the gradients of a head that is a separate unit, unsharded before the forward. Or the error otherwise."""
    torch.manual_seed(0)
    model = patched()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model.head)
    fully_shard(model)
    model.head.unshard()
    model(make_batch(dist.get_rank())).backward()
    with pytest.raises(RuntimeError) as reported:
        model(make_batch(dist.get_rank()))
    return model.head.weight.grad.full_tensor(), str(reported.value)


def test_a_head_that_is_a_unit_is_unsharded_for_it():
    """Else torch refuses the shard: no wrong numbers."""
    torch.manual_seed(0)
    alone = patched()
    for rank in range(2):
        alone(make_batch(rank)).backward()
    for gradient, stated in run_ranks(2, gradients):
        assert_same(gradient, alone.head.weight.grad / 2)
        assert "mixed torch.Tensor and DTensor" in stated
