"""Small models with all that is awkward to shard, and the loop that trains them, sharded or not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product, starmap
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import fully_shard
from fullshard.engine.registry import units_in
from fullshard.tape.recorder import Recorder
from fullshard.testing import assert_same

VOCABULARY, WIDTH, HEAD, HIDDEN, BLOCKS = 131, 97, 32, 192, 3
ONE_AXIS = ("ddp", "zero1", "zero2", "zero3")
# Two strategies that differ in all that a scenario may meet; the others are for `make test-all`.
under_strategies = pytest.mark.parametrize(
    "strategies", [("zero1", "zero3"), pytest.param(("ddp", "zero2"), marks=pytest.mark.slow)], ids=" and ".join
)


def covering_pairs(
    *axes: Iterable[Any],
    allows: Callable[..., bool] = lambda *_: True,
    kind: Callable[[tuple[int, Any], tuple[int, Any]], Any] | None = None,
) -> list[tuple[Any, ...]]:
    """Choose few combinations of one value per axis that contain every pair of values of two axes.

    Args:
        axes: The values of each axis.
        allows: Returns whether a combination exists. Pairs that are in no such combination are not covered.
        kind: Returns the kind of a pair of values, each with the number of its axis. One pair of each kind is enough.
            If None, every pair is a kind of its own.
    """
    named = [tuple(zip(*item, strict=True)) for item in product(*map(enumerate, axes))]
    pairs: dict[tuple[int, ...], set[Any]] = {
        numbers: set(
            combinations(enumerate(numbers), 2) if kind is None else starmap(kind, combinations(enumerate(values), 2))
        )
        for numbers, values in named
        if allows(*values)
    }
    missing, chosen = set[Any]().union(*pairs.values()), set[Any]()
    in_any_order = random.Random(0).sample(list(pairs), len(pairs))  # no value is preferred among equals
    for gain in range(len(axes) * (len(axes) - 1) // 2, 0, -1):
        for numbers in in_any_order:
            if len(missing & pairs[numbers]) >= gain:
                missing -= pairs[numbers]
                chosen.add(numbers)
    return [values for numbers, values in named if numbers in chosen]


def torch_before(version: tuple[int, int], why: str) -> pytest.MarkDecorator:
    """Skip a test with an older torch, for what is wrong there."""
    return pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) < version, reason=why)


class Block(nn.Module):
    """Attention and a perceptron. `up` and `down` are large enough to travel in place at 1 to 4 ranks; 97 divides by
    none of 2, 3 and 4. `base` is frozen, as in LoRA.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * HEAD, bias=False)
        self.out = nn.Linear(HEAD, WIDTH)
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        y = self.norm(x)
        return x + self.down(F.gelu(self.up(y))) + 0.1 * self.base(y)


class SmallGPT(nn.Module):
    """A language model with tied embeddings, a scalar, a convolution, a weight of fewer rows than ranks, one without
    elements, frozen weights and a head in float64.
    """

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.blocks[-1].up.weight.requires_grad_(False)  # frozen and in place
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.mixture = nn.Parameter(torch.randn(3, WIDTH) / 10)
        self.nothing = nn.Parameter(torch.empty(0, 5))
        self.wide = nn.Linear(WIDTH, 5, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens) * 0.1
        x = x + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x) * self.scale + self.mixture.sum(0) + self.nothing.sum()
        return self.head(x) * WIDTH**-0.5, self.wide(x.double())


def small_gpt(blocks: int = BLOCKS) -> SmallGPT:
    """Return a new model, with the same weights on every call."""
    torch.manual_seed(0)
    return SmallGPT(blocks)


def batch(step: int, sequences: int = 12) -> Tensor:
    """Tokens of one step, for all ranks together: 12 sequences, which 1, 2, 3 and 4 ranks can share."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCABULARY, (sequences, 8), generator=generator)


def my_part(whole: Tensor) -> Tensor:
    """Return this rank's sequences."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits, extra = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    return loss + extra.square().mean().float()


def shard(model: SmallGPT, *, tied_in_two_units: bool = False, **options: object) -> SmallGPT:
    """Shard with one unit per block and the root; tied weights are in the root, or across two more units."""
    for block in model.blocks:
        fully_shard(block, **options)
    if tied_in_two_units:
        fully_shard(model.embedding, **options)
        fully_shard(model.head, **options)
    return fully_shard(model, **options)


def whole(tensor: Tensor) -> Tensor:
    """Return a plain copy of `tensor`, gathered if it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def wholes(model: nn.Module) -> dict[str, Tensor | None]:
    """Return every parameter and buffer by FQN, as `state_dict` tells them, gathered."""
    return gathered(model.state_dict())


def whole_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Return every parameter's gradient by FQN, gathered; None where there is none."""
    return gathered({name: param.grad for name, param in model.named_parameters()})


def gathered(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """What `full_tensor()` gives of each, by one message of bytes for all: tests do this often."""
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    sharded = {name: t for name, t in tensors.items() if isinstance(t, DTensor) and t.placements[-1].is_shard()}
    result = {name: None if t is None else t.detach().clone() for name, t in local.items()}
    if sharded:
        mesh = next(iter(sharded.values())).device_mesh
        world, group = mesh.size(mesh.ndim - 1), mesh.get_group(mesh.ndim - 1)
        shapes = [{name: shard_shape(t, world, rank) for name, t in sharded.items()} for rank in range(world)]
        starts, end = {}, 0
        for name, t in sharded.items():
            starts[name] = end
            end += -(-prod(shapes[0][name]) * t.itemsize // 16) * 16
        messages = [torch.zeros(end, dtype=torch.uint8, device=mesh.device_type) for _ in range(world)]
        message = torch.zeros_like(messages[0])
        for name in sharded:
            part = result[name].contiguous().view(-1).view(torch.uint8)
            message[starts[name] : starts[name] + part.numel()] = part
        dist.all_gather(messages, message, group=group)
        for name, t in sharded.items():
            parts = [
                message[starts[name] : starts[name] + prod(shape[name]) * t.itemsize]
                .view(as_bytes(t).dtype)
                .view(shape[name])
                for message, shape in zip(messages, shapes, strict=True)
            ]
            result[name] = torch.cat(parts, dim=t.placements[-1].dim).view(t.dtype)
    return result


def shard_shape(tensor: DTensor, world: int, rank: int) -> tuple[int, ...]:
    """Return the shape of `rank`'s shard, cut as `torch.chunk` cuts."""
    dim = tensor.placements[-1].dim
    shape = list(tensor.shape)
    part = -(-shape[dim] // world)
    shape[dim] = max(0, min(part, shape[dim] - rank * part))
    return tuple(shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a view that supports concatenation; 8-bit floats do not. All other tensors are returned unchanged."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=1e-2, weight_decay=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model), lr=0.05, momentum=0.9, nesterov=True)


@dataclass
class Trace:
    """Results of a training run, identical on every rank except for the losses."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)  # of the last step
    params: dict[str, Tensor | None] = field(default_factory=dict)  # after it

    @property
    def numbers(self) -> list[object]:
        """All of it, as `assert_same` compares it."""
        return [self.losses, self.norms, self.grads, self.params]


Clip = Callable[[Sequence[nn.Parameter], float], Tensor]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 4,
    clip: Clip | None = None,
    part: Callable[[Tensor], Tensor] = my_part,
) -> Trace:
    """Train `model` for some steps, each rank on its part of the batch."""
    trace = Trace()
    for step in range(steps):
        loss = loss_of(model, part(batch(step)))
        loss.backward()
        if clip is not None:
            trace.norms.append(whole(clip(trained(model), 0.5)))
        trace.losses.append(loss.detach().clone())
        if step == steps - 1:
            trace.grads = whole_grads(model)
        optimizer.step()
        optimizer.zero_grad()
    trace.params = wholes(model)
    return trace


def memory_is_shared(model: nn.Module) -> bool:
    """Return True if units of `model` share memory by now."""
    slots = [unit.slot for unit in units_in(model)]
    return len({id(slot) for slot in slots}) < len(slots) and any(slot.shared for slot in slots)


def poison_freed(model: nn.Module) -> None:
    """Write noise over the memory of every unit that is not whole: nothing may read it.

    Ranks may have that memory in common, so all of them must be as far, and none goes on before all have written.
    """
    dist.barrier()
    for unit in units_in(model):
        if not unit.residency.memory.is_occupied:
            storage = unit.slot.storage
            assert storage.nbytes() == 0 or unit.slot.shared
            torch.empty(0).set_(storage).fill_(torch.nan)
    dist.barrier()


def most_whole(record: Recorder) -> int:
    """Return the peak number of unsharded units, without the root."""
    whole: set[str] = set()
    most = 0
    for event in record.events:
        if event.origin.unit and event.name == "allocate":
            whole.add(event.origin.unit)
            most = max(most, len(whole))
        if event.name == "free":
            whole.discard(event.origin.unit)
    return most


class Layer(nn.Module):
    """A perceptron with a residual. Its matrices are sent in place at 1 and 2 ranks, all other parameters packed."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 192)
        self.down = nn.Linear(192, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """Layers in a row and a head of the root's own."""

    def __init__(self, layers: Sequence[nn.Module] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)] if layers is None else layers)
        self.head = nn.Linear(48, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


Shard = Callable[..., Any]


def leave(module: nn.Module, **options: object) -> nn.Module:
    """`fully_shard` that does nothing, for the plain model that others are compared with."""
    return module


def initialize(model: nn.Module) -> None:
    """Give `model`, which is not sharded yet, the same weights whenever it is built."""
    torch.manual_seed(1)
    for param in model.parameters():
        nn.init.normal_(param, std=0.2)


def chain(shard: Shard, model: nn.Module | None = None) -> Any:
    """Return a `Chain`, or the one given, with a unit per layer and a root unit; always of the same weights."""
    model = Chain() if model is None else model
    initialize(model)
    for layer in model.layers:
        shard(layer)
    return shard(model)


def inputs(step: int = 0) -> Tensor:
    """Return the same inputs on every rank, see `agree_with_plain`."""
    return torch.randn(6, 48, generator=torch.Generator().manual_seed(step))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def take_step(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Step by the gradients of `loss`, drop them, and return the loss without its graph."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def learn(model: Any, steps: int = 4, loss_of: Callable[[Any, int], Tensor] | None = None) -> list[Any]:
    """Train by `sgd` and return the losses, the gradients of each step, and the weights."""
    optimizer, left = sgd(model), []
    for step in range(steps):
        loss = loss_of(model, step) if loss_of else model(inputs(step)).square().mean()
        loss.backward()
        left += [loss.detach(), whole_grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*left, wholes(model)]


class Stop(Exception):  # noqa: N818  # any exception of a model
    """Raised on purpose."""


class BrokenBackward(torch.autograd.Function):
    """Returns its input, and raises `Stop` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Stop("in backward")


def agree_with_plain(scenario: Callable[[Shard], Any], *strategies: str) -> None:
    """Nothing, if `scenario(shard)` gives the same bits with nothing sharded and under every strategy.

    For 1 or 2 ranks: where all ranks have the same batch, the mean over 2 is exact, so the plain model on each rank is
    the reference.
    """
    expected = scenario(leave)
    for strategy in strategies or ONE_AXIS:
        assert_same(scenario(partial(fully_shard, strategy=strategy)), expected, name=strategy)
