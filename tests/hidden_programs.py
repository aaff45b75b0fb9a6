"""Random programs whose units hand out tensors in every way that Python allows, compared with plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from fullshard.errors import StateError

WIDTH = 12


class ListOf(list):
    pass


class TupleOf(tuple):
    pass


class DictOf(dict):
    pass


@dataclass(frozen=True)
class Fields:
    value: Any


class Pair(NamedTuple):
    first: Any
    second: Any


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.me = self


class Slotted:
    __slots__ = ("__value",)

    def __init__(self, value: Any) -> None:
        self.__value = value

    @property
    def value(self) -> Any:
        return self.__value


def _generator(value: Any) -> Iterator[Any]:
    yield value


# How a value is returned, and how the caller gets it back. What hooks find, and what they do not.
RETURNED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda item: [item], lambda item: item[0]),
    "list subclass": (lambda item: ListOf([item]), lambda item: item[0]),
    "tuple subclass": (lambda item: TupleOf((item,)), lambda item: item[0]),
    "dict subclass": (lambda item: DictOf(a=item), lambda item: item["a"]),
    "dataclass": (Fields, lambda item: item.value),
    "named tuple": (lambda item: Pair(0, item), lambda item: item.second),
    "object": (Holder, lambda item: item.value),
    "slots": (Slotted, lambda item: item.value),
    "closure": (lambda item: lambda: item, lambda item: item()),
    "partial": (lambda item: partial(max, item, item), lambda item: item.args[0]),
    "generator": (_generator, next),
    "method": (lambda item: Holder(item).__init__, lambda item: item.__self__.value),
    "nested": (lambda item: {"a": (Holder([Fields(item)]), 1)}, lambda item: item["a"][0].value[0].value),
}
KEPT = ("attribute", "list attribute", "dict attribute", "argument")
UNSEEN = ("global", "iterator", "old object")
WAYS = (*RETURNED, *KEPT, *UNSEEN)

_global: list[Tensor] = []


class RawLinear(torch.autograd.Function):
    """A product that keeps its weight past `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0] @ ctx.weight, grads[0].t() @ ctx.x


@dataclass
class BlockPlan:
    ways: list[str]  # by step
    computes: str
    is_used: bool  # whether the hidden output is part of the loss
    shows: bool  # whether the visible output depends on the block
    is_frozen: bool
    has_unit: bool
    shares: bool


@dataclass
class Program:
    seed: int
    strategy: str = "zero3"
    checkpoints: str = "no"
    microbatches: int = 1
    syncs_each: bool = True
    steps: int = 6
    blocks: list[BlockPlan] = field(default_factory=list)

    @classmethod
    def random(cls, seed: int, strategies: tuple[str, ...]) -> Program:
        rng = Random(seed)
        program = cls(
            seed,
            strategy=rng.choice(strategies),
            checkpoints=rng.choice(["no", "no", "no", "around", "reentrant", "hooks"]),
            microbatches=rng.choice([1, 1, 2]),
            syncs_each=rng.random() < 0.5,
        )
        for _ in range(rng.choice([1, 2, 3])):
            first = rng.choice(WAYS) if rng.random() < 0.8 else rng.choice(UNSEEN)
            later = rng.choice(WAYS) if rng.random() < 0.5 else first
            change = rng.randrange(program.steps)
            is_frozen = rng.random() < 0.25
            computes = rng.choice(["linear", "function", "parameter", "square", *([] if is_frozen else ["raw"])])
            program.blocks.append(
                BlockPlan(
                    [first] * change + [later] * (program.steps - change),
                    computes=computes,
                    is_used=rng.random() < 0.8,
                    shows=rng.random() < 0.8,
                    is_frozen=is_frozen,
                    has_unit=rng.random() < 0.3,
                    shares=rng.random() < 0.2,
                )
            )
        return program

    @property
    def is_supported(self) -> bool:
        """True if hooks can see all hidden outputs that the loss uses, so that no step may be refused."""
        unseen = any(way in UNSEEN for block in self.blocks for way in block.ways)
        return not unseen and self.checkpoints == "no"


class Inner(nn.Module):
    """A unit within a block, with a separate hidden output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.aux = self.linear(y).square().mean()
        return y


class Block(nn.Module):
    def __init__(self, plan: BlockPlan, shared: nn.Linear) -> None:
        super().__init__()
        self.plan = plan
        self.up = nn.Linear(WIDTH, WIDTH)
        self.probe = nn.Linear(WIDTH, WIDTH)
        if plan.shares:
            self.probe.weight = shared.weight
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.inner = Inner() if plan.has_unit else None
        if plan.is_frozen:
            self.weight.requires_grad_(False)
            for param in (self.probe.bias, *([] if plan.shares else [self.probe.weight])):
                param.requires_grad_(False)
        self.aux: Tensor | None = None
        self.several: list[Tensor] = []
        self.named: dict[str, Tensor] = {}
        self.old = Holder(None)

    def hidden(self, y: Tensor) -> Tensor:
        if self.plan.computes == "linear":
            return self.probe(y).square().mean()
        if self.plan.computes == "function":
            return F.linear(torch.tanh(y), self.weight.t()).square().mean()
        if self.plan.computes == "raw":
            return RawLinear.apply(y, self.weight).square().mean()
        if self.plan.computes == "square":
            return (self.weight * self.weight * y.mean()).sum()
        return (y * self.weight[0]).sum() * 0.1

    def forward(self, x: Tensor, step: int, losses: list[Tensor]) -> Any:
        y = torch.tanh(self.up(x))
        if self.inner is not None:
            y = self.inner(y)
        h, way = self.hidden(y), self.plan.ways[step]
        if way in RETURNED:
            return y, RETURNED[way][0](h)
        if way == "attribute":
            self.aux = h
        elif way == "list attribute":
            self.several = [h]
        elif way == "dict attribute":
            self.named["loss"] = h
        elif way == "argument":
            losses.append(h)
        elif way == "global":
            _global.append(h)
        elif way == "iterator":
            return y, iter([h])
        elif way == "old object":
            self.old.value = h
        return y, None

    def found(self, returned: Any, step: int, losses: list[Tensor]) -> Tensor:
        way = self.plan.ways[step]
        if way in RETURNED:
            return RETURNED[way][1](returned)
        kept = {
            "attribute": lambda: self.aux,
            "list attribute": lambda: self.several[0],
            "dict attribute": lambda: self.named["loss"],
            "argument": lambda: losses[-1],
            "global": lambda: _global[-1],
            "iterator": lambda: next(returned),
            "old object": lambda: self.old.value,
        }
        return kept[way]()


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        self.program = program
        self.first = nn.Linear(WIDTH, WIDTH)
        shared = nn.Linear(WIDTH, WIDTH)
        self.shared = shared
        self.blocks = nn.ModuleList(Block(plan, shared) for plan in program.blocks)
        self.last = nn.Linear(WIDTH, 3)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor, step: int) -> Tensor:
        x = torch.tanh(self.first(x))
        total = x.new_zeros(())
        for block in self.blocks:
            losses: list[Tensor] = []
            kind, returned = self.program.checkpoints, None
            if kind in ("around", "reentrant"):
                y, returned = checkpoint(block, x, step, losses, use_reentrant=kind == "reentrant")
            else:
                with torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is) if kind == "hooks" else nullcontext():
                    y, returned = block(x, step, losses)
            h = block.found(returned, step, losses)
            if block.plan.is_used and h.requires_grad:
                total = total + h
            if block.inner is not None and block.inner.aux.requires_grad:
                total = total + block.inner.aux
            x = x + y if block.plan.shows else x + 1
        self.aux = self.last(x).mean()
        return self.last(self.shared(x)).square().mean() + total


def _as_is(tensor: Tensor) -> Tensor:
    return tensor


def sharded(model: Model, strategy: str, mesh: Any = None) -> Model:
    for block in model.blocks:
        if block.inner is not None:
            fully_shard(block.inner, strategy=strategy, mesh=mesh)
        fully_shard(block, strategy=strategy, mesh=mesh)
    return fully_shard(model, strategy=strategy, mesh=mesh)


def batch(program: Program, step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(program.seed * 1009 + step * 101 + microbatch * 11 + rank)
    return torch.randn(2, WIDTH, generator=generator)


def _loss(model: Model, x: Tensor, step: int) -> Tensor:
    _global.clear()
    loss = model(x, step)
    return loss + 0.1 * model.aux  # type: ignore[operator]


def _expected(model: Model, program: Program, step: int, world: int) -> list[Tensor | None]:
    """Return the gradients of plain PyTorch: summed over ranks for each microbatch, or over microbatches first."""
    grads: list[list[list[Tensor | None]]] = []  # by rank and microbatch
    for rank in range(world):
        grads.append([])
        for microbatch in range(program.microbatches):
            if microbatch == 0 or program.syncs_each:
                model.zero_grad()
            _loss(model, batch(program, step, microbatch, rank), step).backward()
            grads[-1].append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    kept = range(program.microbatches) if program.syncs_each else [program.microbatches - 1]
    sums: list[Tensor | None] = []
    for i, _ in enumerate(model.parameters()):
        total = None
        for microbatch in kept:
            parts = [its[microbatch][i] for its in grads]
            if parts[0] is None:
                continue
            mean = sum(parts[1:], start=parts[0]) / world  # type: ignore[arg-type]
            total = mean if total is None else total + mean
        sums.append(total)
    return sums


def run_program(program: Program, mesh: Any = None) -> list[str]:
    """Return the result of each step on this rank: "same", or "refused: ...". Any other result is an error."""
    world, rank = dist.get_world_size(), dist.get_rank()
    plain = Model(program)
    model = sharded(copy.deepcopy(plain), program.strategy, mesh)
    optimizers = [torch.optim.SGD(item.parameters(), lr=0.05) for item in (plain, model)]
    outcomes = []
    for step in range(program.steps):
        expected = _expected(plain, program, step, world)
        try:
            for microbatch in range(program.microbatches):
                last = microbatch == program.microbatches - 1
                with nullcontext() if last or program.syncs_each else model.no_sync():
                    _loss(model, batch(program, step, microbatch, rank), step).backward()
        except StateError as error:
            outcomes.append(f"refused: {error}")
            model.zero_grad()
            continue
        for param in plain.parameters():
            param.grad = None
        for (name, own), other, wanted in zip(model.named_parameters(), plain.parameters(), expected, strict=True):
            found = None if own.grad is None else own.grad.full_tensor() if isinstance(own.grad, DTensor) else own.grad
            if (found is None) != (wanted is None):
                if not torch.equal(torch.zeros(()), (found if wanted is None else wanted).abs().max()):  # type: ignore[union-attr]
                    return [*outcomes, f"wrong: {name} in step {step}: {found is None}"]
            elif found is not None and wanted is not None and not torch.equal(found, wanted):
                return [*outcomes, f"wrong: {name} in step {step} by {(found - wanted).abs().max()}"]
            other.grad = wanted
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append("same")
    return outcomes


def run_programs(seeds: list[int], strategies: tuple[str, ...]) -> list[list[str]]:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    programs = [Program.random(seed, strategies) for seed in seeds]
    return [run_program(program, mesh if program.strategy.startswith("hsdp") else None) for program in programs]
