"""Predicted beside published: step times of models that others have trained on GPUs, and what this engine's tape says.

    python benchmarks/published.py

Four parts:

mpt       115 rows that MosaicML published: MPT models from 125M to 70B parameters, trained by PyTorch's FSDP1.
          `benchmarks/data/README.md` has their source.
"""

from __future__ import annotations

import csv
import gc
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import MixedPrecisionPolicy, clip_grad_norm_, dry, fully_shard
from fullshard.plan.costs import Costs, costs_of
from fullshard.plan.hardware import Hardware, hardware
from fullshard.plan.prediction import steps_of
from fullshard.plan.timeline import lay_out
from fullshard.tape.tape import Allocation, Entry, Free

DATA = Path(__file__).parent / "data"


# -- what was trained -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT, and what one rank trains it on.

    Args:
        width: of the residual stream.
        heads: of attention.
        vocab: rows of the embedding, which is the output's too.
        seq: tokens of a sequence.
        batch: sequences of a microbatch, on one rank.
        checkpointing: whether blocks compute their forward again in backward.
        has_metrics: whether each microbatch has its loss computed twice more without gradients, in float32.
    """

    width: int
    heads: int
    vocab: int
    seq: int
    batch: int
    checkpointing: bool
    has_metrics: bool = True


class Block(nn.Module):
    """Attention, then an MLP of four times the width, each added to its input; biases everywhere."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Tokens in, the loss of the next token out."""

    def __init__(self, shape: Shape, blocks: int) -> None:
        super().__init__()
        self.shape = shape
        self.tokens, self.places = nn.Embedding(shape.vocab, shape.width), nn.Embedding(shape.seq, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(blocks))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.shape.checkpointing else block(x)
        scores = F.linear(self.norm(x), self.tokens.weight).flatten(0, 1)
        if self.shape.has_metrics:
            with torch.no_grad():
                for _ in range(2):
                    F.cross_entropy(scores.float(), tokens.flatten())
        return FusedLoss.apply(scores, tokens.flatten())


class FusedLoss(torch.autograd.Function):
    """Cross entropy in one kernel each way: forward reads the scores, backward writes their gradient over them."""

    @staticmethod
    def forward(context: Any, scores: Tensor, targets: Tensor) -> Tensor:
        context.save_for_backward(scores)
        return torch.logsumexp(scores, dim=-1).sum()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        (scores,) = context.saved_tensors
        return scores.mul_(grad), None


class DecoupledAdamW(torch.optim.Optimizer):
    """AdamW as Composer has it: one kernel for each arithmetic operation, here over all parameters at once."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [it for group in self.param_groups for it in group["params"] if it.grad is not None]
        for param in params:
            if not self.state[param]:
                self.state[param] = {name: torch.zeros_like(param) for name in ("first", "second")}
        local = [[_local(it) for it in those] for those in (
            params,
            [it.grad for it in params],
            [self.state[it]["first"] for it in params],
            [self.state[it]["second"] for it in params],
        )]  # fmt: skip
        values, grads, first, second = local
        torch._foreach_mul_(first, 0.9)
        torch._foreach_add_(first, grads, alpha=0.1)
        torch._foreach_mul_(second, 0.95)
        torch._foreach_addcmul_(second, grads, grads, value=0.05)
        roots = torch._foreach_sqrt(second)
        torch._foreach_add_(roots, 1e-8)
        torch._foreach_mul_(values, 0.99)
        torch._foreach_addcdiv_(values, first, roots, value=-1e-4)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# -- tapes of it ------------------------------------------------------------------------------------------------------

DEPTHS = 3, 5


@dataclass(frozen=True, kw_only=True)
class Task:
    """A shape, and how it is trained."""

    shape: Shape
    world: int
    reduce_dtype: torch.dtype = torch.float32


def step_of(task: Task, blocks: int, microbatches: int) -> list[Entry]:
    """The second step of a tape of `task` with so many blocks and microbatches, each of which reduces its gradients."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=task.reduce_dtype)
    shape = task.shape
    with dry.world(task.world), dry.taped() as tape:
        model = Gpt(shape, blocks)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = DecoupledAdamW(model.parameters())
        for number in range(2):
            for _ in range(microbatches if number else 1):
                model(torch.zeros(shape.batch, shape.seq, dtype=torch.long)).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
    return [it for it in tape.entries[steps_of(tape.entries)[-1] :] if not isinstance(it, Allocation | Free)]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of any number of blocks and microbatches, as two of few blocks tell.

    Blocks are alike and so are microbatches: whatever one more takes, the next one takes too. `tests/test_published.py`
    holds that to whole tapes.
    """

    parts: tuple[tuple[list[Entry], list[Entry], list[Entry]], ...]  # before, in, and after the second microbatch

    @classmethod
    def of(cls, task: Task) -> Step:
        """That of `task`."""
        return cls(parts=tuple(_parts(step_of(task, blocks, 2)) for blocks in DEPTHS))

    def seconds(self, costs: Costs, blocks: int, microbatches: int) -> float:
        """How long it takes."""
        few, more = (self._of_depth(parts, costs, microbatches) for parts in self.parts)
        return few + (blocks - DEPTHS[0]) * (more - few) / (DEPTHS[1] - DEPTHS[0])

    def _of_depth(self, parts: tuple[list[Entry], ...], costs: Costs, microbatches: int) -> float:
        before, again, after = parts
        one = lay_out([*before, *after], costs).end
        if microbatches == 1:
            return one
        return one + (microbatches - 1) * (lay_out([*before, *again, *after], costs).end - one)


def _parts(entries: list[Entry]) -> tuple[list[Entry], list[Entry], list[Entry]]:
    places = [place for place, it in enumerate(entries) if it.origin.microbatch == 2]
    first, last = places[0], places[-1] + 1
    return entries[:first], entries[first:last], entries[last:]
