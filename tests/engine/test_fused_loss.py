"""Kernels that patch modules and fuse the head with the loss, as in Liger: another module uses the head's weight."""

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
    """Cross-entropy of `hidden @ weight.T` in chunks of rows. Forward computes the gradients and drops the logits."""

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
    """A model whose head is never called: the loss uses the head's weight."""

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


def test_fused_loss_with_head_in_root_matches_plain_pytorch_bitwise():
    """Within the root's forward, every module can use the unsharded weight of the head."""
    report = check_parity(
        patched, make_batch, ranks=2, strategies=["zero2", "zero3"], steps=2, auto_wrap_policy=ModuleWrapPolicy({Block})
    )
    assert report.is_bit_for_bit, str(report)


def gradients() -> tuple[Tensor, str]:
    """Return the gradient of a head that is a separate, manually unsharded unit, and the error without `unshard()`."""
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


def test_fused_loss_with_head_as_unit_requires_manual_unshard():
    """Without `unshard()`, torch raises an error for the sharded weight. The result is never silently wrong."""
    torch.manual_seed(0)
    alone = patched()
    for rank in range(2):
        alone(make_batch(rank)).backward()
    for gradient, stated in run_ranks(2, gradients):
        assert_same(gradient, alone.head.weight.grad / 2)
        assert "mixed torch.Tensor and DTensor" in stated
