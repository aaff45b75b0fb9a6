"""A language model that tensor parallelism divides, and its meshes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from fullshard import fully_shard

VOCABULARY, WIDTH, HEAD, HIDDEN, SEQUENCES, LENGTH = 131, 96, 16, 192, 4, 8


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
    """A language model of an odd vocabulary: tensor parallelism cuts it into parts of different sizes."""

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
    """Return a new model, with the same weights on every call."""
    torch.manual_seed(0)
    return Stack()


def parallel(mesh: DeviceMesh, *, sequence: bool, model: Stack | None = None) -> Stack:
    """Return the model with its matrices placed on `mesh`. With `sequence` norms are, too, and activations are cut."""
    model = model or stack()
    held = Shard(1) if sequence else Replicate()  # activations between modules
    into, back = partial(ColwiseParallel, input_layouts=held), partial(RowwiseParallel, output_layouts=held)
    matrices = {"q": into(), "k": into(), "v": into(), "out": back(), "up": into(), "down": back()}
    norms = {"attention_norm": SequenceParallel(), "norm": SequenceParallel()} if sequence else {}
    for block in model.blocks:
        parallelize_module(block, mesh, {**matrices, **norms})
    ends = {"embedding": back(input_layouts=Replicate()), "head": into(output_layouts=Replicate())}
    return parallelize_module(model, mesh, {**ends, **({"norm": SequenceParallel()} if sequence else {})})


def shard(model: Stack, mesh: DeviceMesh, **options: Any) -> Any:
    """Make each block a unit, and the model the root."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp")[-len(shape) :])
