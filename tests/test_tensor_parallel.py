"""A model that tensor parallelism has placed on one axis of a mesh trains sharded on the others as it would without."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_models import whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fullshard import fully_shard
from fullshard.testing import assert_same, run_ranks

VOCABULARY, WIDTH, HEAD, HIDDEN, SEQUENCES, LENGTH = 131, 96, 16, 192, 4, 8
STEPS = 4  # units share memory from the third step on


class Block(nn.Module):
    """Attention and a perceptron, whose heads and hidden units tensor parallelism divides."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.down.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def stack() -> Stack:
    """The same weights whenever it is called."""
    torch.manual_seed(0)
    return Stack()


def parallel(mesh: DeviceMesh, *, sequence: bool) -> Stack:
    """The model with its matrices cut over `mesh`; with `sequence` its activations, too, and norms as `DTensor`s."""
    model = stack()
    held = Shard(1) if sequence else Replicate()  # activations between modules
    into, back = partial(ColwiseParallel, input_layouts=held), partial(RowwiseParallel, output_layouts=held)
    matrices = {"q": into(), "k": into(), "v": into(), "out": back(), "up": into(), "down": back()}
    norms = {"attention_norm": SequenceParallel(), "norm": SequenceParallel()} if sequence else {}
    for block in model.blocks:
        parallelize_module(block, mesh, {**matrices, **norms})
    ends = {"embedding": back(input_layouts=Replicate()), "head": into(output_layouts=Replicate())}
    return parallelize_module(model, mesh, {**ends, **({"norm": SequenceParallel()} if sequence else {})})


def shard(model: Stack, mesh: DeviceMesh, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(step: int) -> Tensor:
    """The sequences of all ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def averaged(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let every rank of `group` have the mean of all gradients, added in rank order."""
    for param in model.parameters():
        if param.grad is None:
            continue
        if isinstance(param.grad, DTensor):
            param.grad = param.grad.redistribute(placements=param.placements)
        local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        terms = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(terms, local.contiguous(), group=group)
        local.copy_(sum(terms[1:], terms[0]) / len(terms))


def train(model: Any, part: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What some steps of two microbatches leave, where each rank computes with `part` of a batch.

    Without units of its own to do so, the model has its gradients averaged over `group`.
    """
    optimizer, left = adamw(model), []
    for step in range(STEPS):
        with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
            loss_of(model, part(batch(2 * step))).backward()
        loss = loss_of(model, part(batch(2 * step + 1)))
        loss.backward()
        if group is not None:
            averaged(model, group)
        grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        left += [loss.detach(), grads]
        optimizer.step()
        optimizer.zero_grad()
    return [*left, {name: whole(param) for name, param in model.named_parameters()}]


def train_in_both_ways(shape: tuple[int, ...], sequence: bool, strategies: tuple[str, ...]) -> None:
    names = ("replicate", "shard", "tp") if len(shape) == 3 else ("shard", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = mesh[names[:-1]]
    groups = [group for group in data.get_all_groups() if dist.get_world_size(group) == 2]
    rank = sum(dist.get_rank(group) for group in groups)
    part = lambda tokens: tokens.chunk(2 if groups else 1)[rank]  # noqa: E731
    alone = train(parallel(mesh["tp"], sequence=sequence), part, group=groups[0] if groups else None)
    one_process = train(stack(), lambda tokens: tokens)
    for strategy in strategies:
        model = shard(parallel(mesh["tp"], sequence=sequence), data, strategy=strategy)
        found = train(model, part)
        assert_same(found, alone, name=strategy)
        for name, value in found[-1].items():
            torch.testing.assert_close(value, one_process[-1][name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sequence", [False, True])
def test_one_rank_on_the_shard_axis_gives_the_bits_of_tensor_parallelism_alone(sequence):
    run_ranks(2, train_in_both_ways, (1, 2), sequence, ("zero3", "ddp"), timeout=300)


@pytest.mark.parametrize("sequence", [False, True])
def test_two_axes(sequence):
    run_ranks(4, train_in_both_ways, (2, 2), sequence, ("zero3", "zero2", "zero1", "ddp"), timeout=300)
