"""Run one program, plain or sharded, and compare the two bit by bit.

A program is plain data: dicts, lists, strings, numbers. `build` makes its model, `run_sharded` runs it on this rank,
`run_plain` does the work of all ranks in one process with plain PyTorch, and `first_difference` compares the two. A
missing key means the default. This file imports nothing of the fuzzer: it is the first part of a printed script.

The reference computes the microbatches of all ranks with one copy of the model per rank. It adds the gradients in rank
order, within each replica first, and divides once (docs/design.md, "Numbers do not depend on the strategy"). With mixed
precision the copies have parameters in the compute dtype, and gradients are added in the reduce dtype. The optimizer
steps each parameter in the parts that ranks have of it.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import clip_grads_with_norm_
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import (
    ConfigError,
    FullshardError,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    Offload,
    Placement,
    Placements,
    fully_shard,
    summon_full_params,
)
from fullshard.comm.routes import collectives_for
from fullshard.engine import activations, offloaded
from fullshard.engine.nested import map_tensors
from fullshard.layout.shard_spec import choose_spec
from fullshard.optim import step_shards
from fullshard.state import on_disk
from fullshard.tape.recorder import Origin, Phase
from fullshard.testing.parity.plain import mean_of, norm_in_parts
from fullshard.testing.same import differing, gaps
from fullshard.wrap import CustomPolicy

Json = dict[str, Any]
ROWS = 6
IDLE = Origin("", Phase.IDLE)
_S, _G = Placement.SHARDED, Placement.GROUPED
GROUPED = {
    "hpz": Placements(parameters=_S, parameters_in_step=_G, gradients=_S, optimizer=_S, group=2),
    "hfsdp": Placements(parameters=_G, parameters_in_step=_G, gradients=_G, optimizer=_S, group=2),
}

# -- models -----------------------------------------------------------------------------------------------------------


class Now:
    """The step that runs on this rank, for modules that depend on it."""

    step = 0
    rank = 0


class CastsInput:
    """Casts the input to the dtype of the module's parameters, so that any two modules can follow each other."""

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        return super().forward(x.to(next(module.parameters()).dtype))  # type: ignore[misc]


class Linear(nn.Linear):
    """A layer whose bias may have a different dtype than its weight, which may be tied to one of a different dtype."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return F.linear(x.to(weight.dtype), weight, None if self.bias is None else self.bias.to(weight.dtype))


class LayerNorm(CastsInput, nn.LayerNorm):
    pass


class BatchNorm(CastsInput, nn.BatchNorm1d):
    pass


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Scale(nn.Module):
    """Parameters without a dimension, without elements, and of three dimensions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.9))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.cube = nn.Parameter(torch.randn(3, 2, width) / 9)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scalar + self.cube.sum((0, 1)) + self.empty.sum()


class Lookup(nn.Module):
    """An embedding of numbers that follow from the input."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.table = nn.Embedding(rows, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.detach()[:, 0].float() * 7).long() % self.rows).to(x.dtype)


def heads_of(width: int) -> int:
    return 2 if width % 2 == 0 else 1


class Attention(nn.Module):
    """Attention between rows. Its output layer is never called: torch reads the weights of that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads_of(width), batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.attention.in_proj_weight.dtype)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Encoder(nn.Module):
    """A layer of torch that, in evaluation, reads the weights of its children instead of calling them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, heads_of(width), 7, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(self.layer.linear1.weight.dtype)[None])[0]


class Recurrent(nn.Module):
    """A module that keeps its weights in a list, besides."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.cell = getattr(nn, how)(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x.to(self.cell.weight_ih_l0.dtype))[0]


class Convolution(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(1, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x.to(self.inner.weight.dtype)[:, None]).mean(1)


class Complex(nn.Module):
    """Complex parameters, which mixed precision does not cast."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(width, width, dtype=torch.complex64) / width)
        self.turn = nn.Parameter(torch.randn(width, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        y = (x.to(self.matrix.dtype) * self.turn) @ self.matrix
        return x + (y.real - 0.5 * y.imag).to(x.dtype)


class Integers(nn.Module):
    """A frozen parameter of integers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(2 * width).reshape(2, width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * self.table.sum(0).to(x.dtype)


class Own(nn.Module):
    """A parameter that is used by the module that also calls a child."""

    def __init__(self, width: int, child: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        return self.child(F.linear(x, self.weight)) + F.linear(x, self.weight.t())


class Unused(nn.Module):
    """A layer that is never called."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.spare = nn.Linear(width, rows)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Counted(nn.Module):
    """A buffer that changes in forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.detach().mean(0).to(self.mean.dtype), alpha=0.1)
        return x - self.mean.to(x.dtype)


def is_leaf_memory(x: Tensor) -> bool:
    """True for a leaf that requires a gradient and for views of it, as units give their modules: not to be written."""
    base = x._base if x._base is not None else x
    return base.is_leaf and base.requires_grad


class Shape(nn.Module):
    """Operations without parameters: views, in-place writes, strides, random numbers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "inplace":
            return (x * 1).mul_(0.5).tanh_()
        if self.how == "inplace on input":
            return x if is_leaf_memory(x) else F.relu(x, inplace=True)
        if self.how == "strides":
            return x.t().contiguous().t()
        if self.how == "view":
            return x.view_as(x)
        if self.how == "same":
            return x
        return F.dropout(x, 0.3, self.training)


class Residual(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        return x + self.child(x)


class Parallel(nn.Module):
    """The mean of all children's outputs, called in reverse order if asked to."""

    def __init__(self, children: list[nn.Module], reverse: bool) -> None:
        super().__init__()
        self.branches = nn.ModuleList(children)
        self.reverse = reverse

    def forward(self, x: Tensor) -> Tensor:
        branches = list(self.branches)
        total = x
        for branch in reversed(branches) if self.reverse else branches:
            total = total + branch(x)
        return total / (1 + len(branches))


class Repeat(nn.Module):
    def __init__(self, child: nn.Module, times: int) -> None:
        super().__init__()
        self.child = child
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.child(x))
        return x


class Dropped(nn.Module):
    """A child that is called in some steps only, on all ranks or on some."""

    def __init__(self, child: nn.Module, every: int, by_rank: bool) -> None:
        super().__init__()
        self.child = child
        self.every = every
        self.by_rank = by_rank

    def forward(self, x: Tensor) -> Tensor:
        turn = Now.step + (Now.rank if self.by_rank else 0)
        return x + self.child(x) if turn % self.every == 0 else x * 0.9


class Detached(nn.Module):
    """A child whose input, or whose whole work, has no gradient."""

    def __init__(self, child: nn.Module, no_grad: bool) -> None:
        super().__init__()
        self.child = child
        self.no_grad = no_grad

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad() if self.no_grad else nullcontext():
            y = self.child(x.detach())
        return x + y


class Double(nn.Module):
    """A child that computes in float64."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child.double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.child(x.double()).to(x.dtype)


class Recompute(nn.Module):
    def __init__(self, child: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.child = child
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.child, x, use_reentrant=self.reentrant)


class MyList(list):
    """A subclass of list."""


@dataclass
class Answer:
    """An output as a dataclass."""

    hidden: Tensor
    number: int = 3


class Thing:
    """An output that no library knows."""

    def __init__(self, hidden: Tensor) -> None:
        self.inner = [hidden]


BOXES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tuple": (lambda y: (y, None, 2 * y), lambda box: box[0]),
    "dict": (lambda y: {"y": [y], "z": y.detach()}, lambda box: box["y"][0]),
    "dataclass": (Answer, lambda box: box.hidden),
    "list subclass": (lambda y: MyList([y]), lambda box: box[0]),
    "object": (Thing, lambda box: box.inner[0]),
    "closure": (lambda y: lambda: y, lambda box: box()),
}


class Hides(nn.Module):
    """A child whose output is returned in a container; a custom one only after some steps, if asked to."""

    def __init__(self, child: nn.Module, how: str, since: int) -> None:
        super().__init__()
        self.child = child
        self.how = how
        self.since = since

    def forward(self, x: Tensor) -> Any:
        self.now = BOXES[self.how if Now.step >= self.since else "tuple"]
        return self.now[0](self.child(x))


class Opens(nn.Module):
    def __init__(self, child: Hides) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        box = self.child(x)
        hides = next(module for module in self.child.modules() if isinstance(module, Hides))
        return hides.now[1](box)


class Aux(nn.Module):
    """A child, and an auxiliary loss of the module's own weights, kept on an attribute."""

    def __init__(self, width: int, child: nn.Module) -> None:
        super().__init__()
        self.child = child
        self.probe = Linear(width, 3)
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.child(x)
        self.aux = self.probe(y).square().mean()
        return y


class Model(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Builder:
    """The model of a program, and which of its modules are units, frozen or ignored."""

    def __init__(self, program: Json) -> None:
        torch.manual_seed(program.get("seed", 0))
        self.width: int = program.get("width", 6)
        self._labelled: dict[str, nn.Module] = {}
        self.units: list[tuple[list[nn.Module], Json]] = []
        self.ignored: list[nn.Parameter] = []
        self.model: nn.Module = Model(self._node(program.get("model", {"kind": "linear"})))
        if "dtype" in program:
            dtype = getattr(torch, program["dtype"])
            self.model._apply(lambda t: cast(t, dtype))  # `to` would cast complex parameters as well
        if "device" in program and not any(param.is_meta for param in self.model.parameters()):
            self.model.to(program["device"])

    def _node(self, node: Json) -> nn.Module:
        module = made = self._made(node)
        if "label" in node:
            self._labelled[node["label"]] = made
        if node.get("frozen") or node.get("ignored"):
            module.requires_grad_(False)
        how = node.get("recompute")
        if how is not None and not node.get("unit outside"):
            self._unit(node, module)
        if how == "wrapper":
            module = checkpoint_wrapper(module)
        elif how is not None:
            module = Recompute(module, how == "reentrant")
        if how is None or node.get("unit outside"):
            self._unit(node, module)
        if node.get("ignored"):
            self.ignored += list(module.parameters())
        return Opens(module) if node["kind"] == "box" else module

    def _unit(self, node: Json, module: nn.Module) -> None:
        if "unit" in node and not any(module in modules for modules, _ in self.units):
            if node.get("as one") and isinstance(module, nn.Sequential) and len(module):
                units = [unit for modules, _ in self.units for unit in modules]
                remaining = [child for child in dict.fromkeys(module) if not any(child is unit for unit in units)]
                self.units.append((remaining or [module], node["unit"]))
            else:
                self.units.append(([module], node["unit"]))

    def _made(self, node: Json) -> nn.Module:
        kind, width = node["kind"], self.width
        children = [self._node(child) for child in node.get("children", [])]
        child = children[0] if len(children) == 1 else nn.Sequential(*children)
        if kind == "tied":
            linear = Linear(width, width)
            other = self._labelled.get(node["to"])
            if isinstance(other, nn.Linear):
                linear.weight = other.weight
            return linear
        if kind == "again":
            return self._labelled.get(node["to"]) or nn.Identity()
        made: dict[str, Callable[[], nn.Module]] = {
            "linear": lambda: Linear(width, width, bias=node.get("bias", True)),
            "mlp": lambda: Mlp(width, node.get("hidden", 5)),
            "norm": lambda: LayerNorm(width),
            "batch norm": lambda: BatchNorm(width),
            "scale": lambda: Scale(width),
            "lookup": lambda: Lookup(width, node.get("rows", 5)),
            "weight norm": lambda: nn.utils.parametrizations.weight_norm(Linear(width, width)),
            "attention": lambda: Attention(width),
            "encoder": lambda: Encoder(width),
            "recurrent": lambda: Recurrent(width, node.get("how", "GRU")),
            "convolution": lambda: Convolution(node.get("channels", 3)),
            "complex": lambda: Complex(width),
            "integers": lambda: Integers(width),
            "unused": lambda: Unused(width, node.get("rows", 5)),
            "counted": lambda: Counted(width),
            "shape": lambda: Shape(node.get("how", "view")),
            "sequence": lambda: nn.Sequential(*children),
            "own": lambda: Own(width, child),
            "residual": lambda: Residual(child),
            "parallel": lambda: Parallel(children, node.get("reverse", False)),
            "repeat": lambda: Repeat(child, node.get("times", 2)),
            "dropped": lambda: Dropped(child, node.get("every", 2), node.get("by rank", False)),
            "detached": lambda: Detached(child, node.get("no_grad", False)),
            "double": lambda: Double(child),
            "box": lambda: Hides(child, node.get("how", "tuple"), node.get("since", 0)),
            "aux": lambda: Aux(width, child),
        }
        return made[kind]()


# -- what plain and sharded runs have in common -----------------------------------------------------------------------


@dataclass
class Part:
    """A rank's local tensor, and the cuts that it is a part by: (dim, number of parts, index).

    `dtype` is the compute dtype of a parameter that is unsharded: its values are cast to that.
    """

    local: Tensor
    cuts: list[tuple[int, int, int]]
    dtype: torch.dtype | None = None


@dataclass
class PerRank:
    """Values that differ between ranks."""

    values: list[Any]


class Boom(Exception):  # noqa: N818
    """Raised by a program on purpose."""


Records = dict[str, Any]


def optimizer_of(program: Json, model: nn.Module) -> torch.optim.Optimizer:
    """Create the program's optimizer, with two parameter groups on request."""
    options = dict(program.get("optimizer", {"name": "SGD"}))
    name, two = options.pop("name", "SGD"), options.pop("two groups", False)
    params = [param for param in model.parameters() if param.requires_grad]
    options.setdefault("lr", 0.05)
    if two and len(params) > 1:
        return getattr(torch.optim, name)([{"params": params[::2]}, {"params": params[1::2], "lr": 0.01}], **options)
    return getattr(torch.optim, name)(params, **options)


def device_of(program: Json) -> torch.device:
    return torch.device(program.get("device", "cpu"))


def loss_of(program: Json, model: nn.Module, step: int, micro: int, rank: int) -> Tensor:
    """Return the loss of one microbatch, whose data and random numbers depend on the arguments alone."""
    Now.step, Now.rank = step, rank
    torch.manual_seed(step * 1000 + micro * 10 + rank)
    width, dtype = program.get("width", 6), getattr(torch, program.get("dtype", "float32"))
    x, target = torch.randn(2, ROWS, width).to(device_of(program), dtype)
    if program.get("input needs grad"):
        x = x.clone().requires_grad_()  # a leaf that is not a view: `unbind` returns views that must not be written
    autocast = program.get("autocast")
    with nullcontext() if autocast is None else torch.autocast(device_of(program).type, getattr(torch, autocast)):
        y = model(x)
    loss = (y - target).float().square().mean()
    for module in model.modules():
        if isinstance(module, Aux) and module.aux is not None:
            loss = loss + module.aux.float()
    if program.get("penalty") and loss.requires_grad:
        (slope,) = torch.autograd.grad(loss, x, create_graph=True, allow_unused=True)
        if slope is not None:
            loss = loss + slope.float().square().sum()
    return loss


def can_be_trained(param: Tensor) -> bool:
    """True unless `param` is of integers."""
    return param.is_floating_point() or param.is_complex()


def has_all_states(optimizer: torch.optim.Optimizer) -> bool:
    """True if all parameters have a state, or none: torch's state dicts cannot be loaded where one is missing."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    return len({bool(optimizer.state.get(param)) for param in params}) < 2


def forget_losses(model: nn.Module) -> None:
    """Delete the auxiliary losses of the last forward: a tensor with a graph cannot be copied."""
    for module in model.modules():
        if isinstance(module, Aux):
            module.aux = None


def add_hooks(program: Json, model: nn.Module) -> None:
    """Register the hooks of the user on the modules of `model`, before anything is sharded."""
    modules = list(model.modules())[1:]
    for hook in program.get("hooks", []):
        module = modules[hook.get("module", 0) % len(modules)]
        if hook["on"] == "forward pre":
            module.register_forward_pre_hook(lambda _, args: scaled(args, 0.97))
        elif hook["on"] == "forward":
            module.register_forward_hook(lambda _, args, output: scaled(output, 1.03))
        elif hook["on"] == "backward":
            module.register_full_backward_hook(lambda _, inner, outer: scaled(inner, 0.9))
        elif hook["on"] == "backward pre":
            module.register_full_backward_pre_hook(lambda _, outer: scaled(outer, 1.1))


def scaled(value: Any, factor: float) -> Any:
    """Return a tensor, or a tuple of tensors and other values, multiplied by `factor`."""
    if isinstance(value, tuple):
        return tuple(scaled(item, factor) for item in value)
    return value * factor if isinstance(value, Tensor) and value.is_floating_point() else value


def halves_gradients(program: Json, params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters whose gradients are halved by a hook when they are accumulated."""
    places = [hook.get("module", 0) for hook in program.get("hooks", []) if hook["on"] == "accumulated"]
    return [params[i] for i in sorted({place % len(params) for place in places}) if params[i].requires_grad]


def edit_gradients(params: list[nn.Parameter], how: str) -> None:
    """Change gradients as users do between backward and step."""
    with torch.no_grad():
        for i, param in enumerate(params):
            if param.grad is None:
                continue
            if how == "scale":
                param.grad.mul_(0.5)
            elif how == "replace":
                param.grad = 2 * param.grad
            elif how == "drop" and i % 3 == 1:
                param.grad = None
            elif how == "zero" and i % 3 == 1:
                param.grad.zero_()
            elif how == "clamp" and not param.is_complex():
                param.grad.clamp_(-0.01, 0.01)


def edit_parameters(params: Iterable[nn.Parameter], how: str) -> None:
    """Change parameters between steps, in ways for which torch counts versions and in others."""
    with torch.no_grad():
        for param in filter(can_be_trained, params):
            if how == "foreach":
                torch._foreach_mul_([param], 0.875)
            elif how == "data":
                param.data.mul_(0.875)
            else:
                param.mul_(0.875)


def change_groups(optimizer: torch.optim.Optimizer, how: str, which: int) -> None:
    """Change the parameter groups of an optimizer between steps."""
    first = optimizer.param_groups[0]
    if how == "options":
        first["lr"] *= 0.7
        if "weight_decay" in first:
            first["weight_decay"] = 0.05
    elif how == "reverse":
        first["params"].reverse()
    elif how == "move" and len(first["params"]) > 1:
        moved = first["params"].pop(which % len(first["params"]))
        optimizer.add_param_group({"params": [moved], "lr": 0.01})


def tangent_of(program: Json, model: nn.Module, step: int, rank: int) -> Tensor:
    """Return the derivative of the output in one direction, by forward-mode differentiation."""
    Now.step, Now.rank = step, rank
    torch.manual_seed(step * 1000 + rank)
    dtype = getattr(torch, program.get("dtype", "float32"))
    x = torch.randn(ROWS, program.get("width", 6)).to(device_of(program), dtype)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    return torch.zeros(()) if tangent is None else tangent.detach().clone()


@contextmanager
def booming(model: nn.Module, action: Json) -> Iterator[None]:
    """Raise `Boom` in forward or backward of a module within this context."""
    modules = [module for module in model.modules() if not list(module.children())]
    module = modules[action.get("module", 0) % len(modules)]

    def boom(*_: Any) -> None:
        raise Boom

    def in_backward(_: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(boom)

    backward = action.get("where") == "backward"
    handle = module.register_forward_hook(in_backward) if backward else module.register_forward_pre_hook(boom)
    try:
        yield
    except Boom:
        pass
    finally:
        handle.remove()


class Driver:
    """Runs the actions of a program in order. Subclasses say how each is done."""

    def __init__(self, program: Json) -> None:
        self.program = program
        self.records: Records = {}
        self.number = 0
        self.has_failed = False  # since the last step
        built = Builder(program)
        ignored = {id(param) for param in built.ignored}
        self.ignored = {i for i, param in enumerate(built.model.parameters()) if id(param) in ignored}
        places = [id(param) for _, param in built.model.named_parameters(remove_duplicate=False)]
        self.ties_ignored = any(places.count(each) > 1 for each in ignored)

    def run(self) -> Records:
        self.snapshot("start")
        for action in self.program.get("loop", []):
            self.number += 1
            getattr(self, action["do"])(action)
            if action["do"] != "boom":  # units may be unsharded until the next forward
                self.snapshot("parameter")
        return self.records

    def record(self, name: str, value: Any) -> None:
        self.records[f"action {self.number}: {name.replace('_checkpoint_wrapped_module.', '')}"] = value

    def snapshot(self, name: str) -> None:
        raise NotImplementedError


# -- plain ------------------------------------------------------------------------------------------------------------


class Plain(Driver):
    """All ranks' work in this process, with plain PyTorch."""

    def __init__(self, program: Json) -> None:
        super().__init__(program)
        self.ranks = program.get("ranks", 1)
        self.shards = self.ranks // program.get("replicas", 1)  # a norm is taken of these
        self.use(program.get("strategy", "zero3"))
        self.model = Builder(program).model
        self.copies = [self.computing(Builder(program)) for _ in range(self.ranks)]
        self.halved = {id(param) for param in halves_gradients(program, list(self.model.parameters()))}
        self.optimizer = self.new_optimizer()
        self.policy = policy_of(program)
        self.buffers_differ = True
        self.pending: list[Tensor | None] = []
        for made in self.copies:
            for i, (own, param) in enumerate(zip(made.parameters(), self.model.parameters(), strict=True)):
                self.collect_gradients(own, i, self.policy.contract(param.dtype).reduce)

    def new_optimizer(self) -> torch.optim.Optimizer:
        return optimizer_of(self.program, self.model)

    def use(self, strategy: str) -> None:
        """Set which ranks' gradients are added first, and in how many parts ranks step each parameter."""
        self.summed_first = 2 if strategy == "hfsdp" else self.shards
        self.cuts = 1 if strategy == "ddp" else self.shards

    def computing(self, built: Builder) -> nn.Module:
        """Return the copy that computes for one rank: parameters in the compute dtype, units that cast."""
        add_hooks(self.program, built.model)
        policy = policy_of(self.program)
        for param in built.model.parameters():
            if not any(param is item for item in built.ignored):
                param.data = param.data.to(policy.contract(param.dtype).compute)
        units = [module for modules, _ in built.units for module in modules]
        root_only = self.program.get("interface") == "wrapper"
        for module in dict.fromkeys([*units, built.model]):
            module.register_forward_pre_hook(as_units_see)
            if (
                policy.param_dtype is not None
                and policy.cast_forward_inputs
                and (module is built.model or not root_only)
            ):
                module.register_forward_pre_hook(
                    lambda _, args, kwargs: map_tensors(lambda t: cast(t, policy.param_dtype), (args, kwargs)),
                    with_kwargs=True,
                )
            if policy.output_dtype is not None:
                module.register_forward_hook(
                    lambda _, args, output: map_tensors(lambda t: cast(t, policy.output_dtype), output)
                )
        return built.model

    def collect_gradients(self, own: nn.Parameter, i: int, dtype: torch.dtype) -> None:
        """Add each gradient of a copy's parameter to those that wait for a reduction, in the dtype of that."""

        def collect(_: Tensor) -> None:
            grad = own.grad.to(dtype)
            self.pending[i] = grad.clone() if self.pending[i] is None else self.pending[i] + grad
            own.grad = None

        if not can_be_trained(own):
            return
        is_trained = own.requires_grad
        own.requires_grad_().register_post_accumulate_grad_hook(collect)
        own.requires_grad_(is_trained)

    def snapshot(self, name: str) -> None:
        for key, param in self.model.named_parameters():
            self.record(f"{name} {key}", param.detach().clone())
        by_rank = [dict(each_copy.named_buffers()) for each_copy in self.copies]
        for key in by_rank[0]:
            self.record(f"buffer {key}", PerRank([item[key].clone() for item in by_rank]))

    def hand_over(self) -> None:
        """Give the copies the parameters, and the first one's buffers in the first forward after a synced backward."""
        if self.program.get("broadcast_buffers") and self.buffers_differ:
            for other in self.copies[1:]:
                for peer, first in zip(other.buffers(), self.copies[0].buffers(), strict=True):
                    peer.copy_(first)
        self.buffers_differ = False
        with torch.no_grad():
            for made in self.copies:
                for own, param in zip(made.parameters(), self.model.parameters(), strict=True):
                    own.copy_(param)
                    own.requires_grad_(param.requires_grad)

    def step(self, action: Json) -> None:
        self.has_failed = False
        micros, each = action.get("micro", 1), action.get("sync") == "each"
        pending: list[list[Tensor | None]] = [[None for _ in self.model.parameters()] for _ in self.copies]
        losses: dict[int, list[Tensor]] = {}
        for micro in range(micros):
            self.hand_over()
            syncs = each or micro == micros - 1
            of_ranks = [self.loss(made, micro, rank, action) for rank, made in enumerate(self.copies)]
            losses[micro] = [loss.detach() for loss in of_ranks]
            for last in [False, True] if action.get("twice") else [True]:
                for rank, loss in enumerate(of_ranks):
                    self.pending, Now.rank = pending[rank], rank  # which recomputed parts read
                    loss.backward(retain_graph=not last)
                if syncs:
                    self.reduce(pending)
            self.buffers_differ = syncs
            if micro < micros - 1:
                self.zero_between(action, pending)
        for micro, of_ranks in losses.items():
            self.record(f"loss {micro}", PerRank(of_ranks))
        for key, param in self.model.named_parameters():
            self.record(f"gradient {key}", None if param.grad is None else param.grad.clone())
        edit_gradients(list(self.model.parameters()), action.get("edit grads", ""))
        if "clip" in action:
            params = list(self.model.parameters())
            norm = norm_in_parts([param.grad for param in params if param.grad is not None], self.shards)
            self.record("norm", norm)
            clip_grads_with_norm_(params, action["clip"], norm)
        if self.cuts > 1:
            step_in_parts(self.optimizer, self.cuts, 1 if self.program.get("shard dim 1") else None)
        else:
            self.optimizer.step()
        if not action.get("keep grads"):
            target = self.model if action.get("zero model") else self.optimizer
            target.zero_grad(set_to_none=action.get("set_to_none", True))

    def zero_between(self, action: Json, pending: list[list[Tensor | None]]) -> None:
        """Drop the gradients of the microbatches so far, of all parameters or of those that the optimizer has."""
        how = action.get("zero between")
        if how is None:
            return
        groups = self.optimizer.param_groups
        zeroed = {id(param) for param_group in groups for param in param_group["params"]}
        for i, param in enumerate(self.model.parameters()):
            if how == "model" or id(param) in zeroed:
                param.grad = None
                for sums in pending:
                    sums[i] = None

    def reduce(self, pending: list[list[Tensor | None]]) -> None:
        """Add the mean over all ranks to the gradients that the optimizer sees."""
        for i, param in enumerate(self.model.parameters()):
            found = next((sums[i] for sums in pending if sums[i] is not None), None)
            if found is not None:
                whole = [torch.zeros_like(found) if sums[i] is None else sums[i] for sums in pending]
                mean = mean_of(whole, self.summed_first).to(param.dtype)
                param.grad = mean if param.grad is None else param.grad + mean
                if id(param) in self.halved:
                    param.grad.mul_(0.5)
        for sums in pending:
            sums[:] = [None] * len(sums)

    def loss(self, model: nn.Module, micro: int, rank: int, action: Json) -> Tensor:
        loss = loss_of(self.program, model, self.number, micro, rank)
        if action.get("two forwards"):
            loss = loss + loss_of(self.program, model, self.number, micro + 5, rank)
        return loss

    def evaluate(self, action: Json) -> None:
        self.hand_over()
        losses = []
        for rank, made in enumerate(self.copies):
            made.eval()
            with torch.inference_mode() if action.get("inference") else torch.no_grad():
                losses.append(loss_of(self.program, made, self.number, 0, rank))
            made.train()
        self.record("evaluation", PerRank(losses))

    def forward_only(self, action: Json) -> None:
        self.hand_over()
        losses = [loss_of(self.program, made, self.number, 0, rank) for rank, made in enumerate(self.copies)]
        self.record("forward", PerRank([loss.detach() for loss in losses]))

    def boom(self, action: Json) -> None:
        self.hand_over()
        self.pending = [None for _ in self.model.parameters()]
        for rank, made in enumerate(self.copies):
            for micro in range(action.get("after", 0)):
                self.loss(made, micro + 1, rank, {}).backward()
            with booming(made, action):
                loss_of(self.program, made, self.number, 0, rank).backward()
                self.buffers_differ = True  # nothing failed: the module is not called
            made.zero_grad()
        self.optimizer.zero_grad()
        self.has_failed = True
        if "after" in action:
            self.abandon()

    def abandon(self) -> None:
        """Abandon a failed step, as the sharded program does. The next forward broadcasts buffers."""
        self.buffers_differ = self.buffers_differ or self.has_failed
        self.has_failed = False

    def edit(self, action: Json) -> None:
        self.abandon()
        edit_parameters(self.model.parameters(), action.get("how", ""))

    def summon(self, action: Json) -> None:
        for key, param in self.model.named_parameters():
            self.record(f"summoned {key}", param.detach().clone())
        if action.get("write"):
            self.edit(action)

    def learning_rate(self, action: Json) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def freeze(self, action: Json) -> None:
        params = list(self.model.parameters())
        i = action.get("which", 0) % len(params)
        if (
            can_be_trained(params[i]) and i not in self.ignored
        ):  # no rank averages the gradients of these, so ranks would train different models
            params[i].requires_grad_(action.get("trained", False))

    def groups(self, action: Json) -> None:
        change_groups(self.optimizer, action.get("how", "options"), action.get("which", 0))

    def tangent(self, action: Json) -> None:
        self.hand_over()
        tangents = [tangent_of(self.program, made, self.number, rank) for rank, made in enumerate(self.copies)]
        self.record("tangent", PerRank(tangents))

    def copied(self, action: Json) -> None:
        for made in self.copies:
            forget_losses(made)
        if action.get("together"):
            self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
        else:
            self.model = copy.deepcopy(self.model)
            self.optimizer = self.new_optimizer()
        self.buffers_differ = True  # the first forward of a model broadcasts them

    def nothing(self, action: Json) -> None:
        pass

    def reload(self, action: Json) -> None:
        """See that torch's state dicts of the plain model can be loaded."""
        if not has_all_states(self.optimizer):
            return
        model, optimizer = copy.deepcopy(dcp.get_state_dict(self.model, self.optimizer))
        dcp.set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def optimizer_state(self, action: Json) -> None:
        """A new optimizer that takes the old one's state."""
        self.abandon()
        self.load_states()

    def load_states(self) -> None:
        states, old = copy.deepcopy(self.optimizer.state_dict()), self.optimizer
        self.optimizer = self.new_optimizer()
        if [len(param_group["params"]) for param_group in old.param_groups] == [
            len(param_group["params"]) for param_group in self.optimizer.param_groups
        ]:
            self.optimizer.load_state_dict(states)
        else:
            self.optimizer = old

    def checkpointed(self, action: Json) -> None:
        """Load into a new optimizer; for `into`, into a new model without gradients, too."""
        if "into" in action:
            self.model.zero_grad()
            self.use(action["into"])
            self.buffers_differ = True
        self.load_states()

    def saved(self, action: Json) -> None:
        """Load the optimizer's own states: torch casts some of them, such as the products of NAdam."""
        self.abandon()
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    state_dicts = unshard = nothing


def step_in_parts(optimizer: torch.optim.Optimizer, count: int, dim: int | None) -> None:
    """Step each parameter in `count` parts, as ranks do that have one each.

    Kernels of PyTorch for half precision, and fused ones, round the last elements of a tensor differently from those
    before, so a part of a tensor has other bits when it is stepped alone.
    """
    wholes = {param: optimizer.state.get(param, {}) for group in optimizer.param_groups for param in group["params"]}
    states: dict[nn.Parameter, Json] = {}
    for index in range(count):
        parts: dict[nn.Parameter, nn.Parameter] = {}
        for param in wholes:
            if param.ndim > 0 or index == 0:
                made = parts[param] = nn.Parameter(part_at(param, count, index, dim).clone())
                if param.grad is not None:
                    made.grad = part_at(param.grad, count, index, dim).clone()
        groups = [
            group | {"params": [parts[param] for param in group["params"] if param in parts]}
            for group in optimizer.param_groups
        ]
        by_parts = type(optimizer)(groups)
        for param, made in parts.items():
            for key, value in wholes[param].items():
                by_parts.state[made][key] = part_of_state(value, param, count, index, dim)
        by_parts.step()
        for param, made in parts.items():
            part_at(param, count, index, dim).copy_(made.detach())
            for key, value in by_parts.state.get(made, {}).items():
                whole = states.setdefault(param, {})
                if isinstance(value, Tensor) and value.shape == made.shape and param.ndim > 0:
                    whole.setdefault(key, torch.empty(param.shape, dtype=value.dtype, device=value.device))
                    part_at(whole[key], count, index, dim).copy_(value)
                else:
                    whole[key] = value
    for param, state in states.items():
        optimizer.state[param] = state


def part_at(tensor: Tensor, count: int, index: int, dim: int | None) -> Tensor:
    """The part of a tensor that rank `index` has, as a view. `dim` is where matrices are cut, if the user chose one."""
    cut_along = choose_spec(tensor.shape, count, dim if tensor.ndim > 1 else None).dim
    return tensor.detach() if cut_along is None else cut(tensor.detach(), [(cut_along, count, index)])


def part_of_state(value: Any, param: nn.Parameter, count: int, index: int, dim: int | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    is_like_param = value.shape == param.shape and param.ndim > 0
    return part_at(value, count, index, dim).clone() if is_like_param else value.clone()


def as_units_see(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs that the modules of a unit get: a view of a leaf that requires a gradient.

    Gradients of the view are added up before those of other uses of the leaf. In these models only
    reentrant checkpoints make leaves.
    """
    first = args[0]
    if torch.is_grad_enabled() and isinstance(first, Tensor) and first.is_leaf and first.requires_grad:
        return first.view_as(first), *args[1:]
    return args


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def policy_of(program: Json) -> MixedPrecisionPolicy:
    """Return the precision of a program, as a policy of `fully_shard`."""
    options = dict(program.get("precision", {}))
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        if name in options:
            options[name] = getattr(torch, options[name])
    return MixedPrecisionPolicy(**options)


def use_device(program: Json) -> None:
    """Make kernels of the program's device deterministic, if it is not the CPU."""
    if "device" in program:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # kernels that order streams by chance
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def run_plain(program: Json) -> Records:
    """Return the records of all ranks, by plain PyTorch."""
    use_device(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Plain(program).run()


# -- sharded ----------------------------------------------------------------------------------------------------------


class Sharded(Driver):
    """One rank's work, by fullshard."""

    def __init__(self, program: Json, folder: str) -> None:
        super().__init__(program)
        self.folder = folder
        self.rank = dist.get_rank()
        self.left_unsharded: list[Any] = []  # by the action unshard
        fullshard.share_memory_between_units(program.get("share units"))
        fullshard.check_finite_gradients(program.get("check finite", False))
        self.model = self.sharded(program.get("strategy", "zero3"))
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> torch.optim.Optimizer:
        optimizer = optimizer_of(self.program, self.model)
        return step_shards(optimizer) if isinstance(optimizer, torch.optim.Rprop) else optimizer

    def sharded(self, strategy: str) -> nn.Module:
        """Return the program's model under `strategy`, with the user's hooks and its initial values."""
        program, start = self.program, self.program.get("start")
        is_wrapper = program.get("interface") == "wrapper"
        if start in META and self.ignored and (is_wrapper or self.ties_ignored):
            start = None  # a script has to initialize ignored parameters itself, and `to_empty` of torch unties them
        with torch.device("meta") if start in META else nullcontext():
            built = Builder(program)
        add_hooks(program, built.model)
        if start == "synchronized" and self.rank > 0:
            ignored = {id(param) for param in built.ignored}
            with torch.no_grad():
                for tensor in [*built.model.parameters(), *built.model.buffers()]:
                    if id(tensor) not in ignored:
                        tensor.zero_()
        model = self.wrapped(built, strategy, start)
        if start in META and not self.is_wrapper_of(model):
            self.start_from_meta(model, start)
        for param in halves_gradients(program, list(model.parameters())):
            param.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(0.5))
        return model

    def start_from_meta(self, model: nn.Module, how: str) -> None:
        """Give a model on the meta device the program's values."""
        plain = Builder(self.program).model
        if how == "assigned":
            model.load_state_dict(plain.state_dict(), assign=True)
            return
        model.to_empty(device=device_of(self.program))
        if how == "loaded":
            model.load_state_dict(plain.state_dict())
            return
        with summon_full_params(model), torch.no_grad():
            for tensor, value in zip(tensors_of(model), tensors_of(plain), strict=True):
                tensor.copy_(value)

    def wrapped(self, built: Builder, strategy: str, start: str | None) -> nn.Module:
        """Shard the built model."""
        program = self.program
        self.units = [module for modules, _ in built.units for module in modules]
        policy = policy_of(program)
        self.compute_dtypes = [policy.contract(param.dtype).compute for param in built.model.parameters()]
        mesh = mesh_of(program, strategy)
        options: Json = {"broadcast_buffers": program.get("broadcast_buffers", False)}
        if program.get("interface") == "wrapper":
            mixed = MixedPrecision(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)
            return FullyShardedDataParallel(
                built.model,
                sharding_strategy=GROUPED.get(strategy, strategy),
                device_mesh=mesh,
                auto_wrap_policy=CustomPolicy(lambda module: any(module is unit for unit in self.units)),
                mixed_precision=mixed if program.get("precision") else None,
                ignored_states=built.ignored or None,
                forward_prefetch=program.get("forward prefetch", False),
                limit_all_gathers=program.get("limit", True),
                sync_module_states=start == "synchronized",
                param_init_fn=init_like(program, built.model) if start in META else None,
                **options,
            )
        options |= {"mesh": mesh, "strategy": GROUPED.get(strategy, strategy), "mp_policy": policy}
        options |= {"ignored_params": set(built.ignored), "offload_policy": self.offload()}
        if program.get("shard dim 1"):
            options["shard_placement_fn"] = lambda param: Shard(1) if param.ndim > 1 else None
        for modules, own in built.units:
            fully_shard(modules if len(modules) > 1 else modules[0], **options | own)
        return fully_shard(built.model, **options)

    def offload(self) -> Any:
        options = dict(self.program.get("offload", {}))
        if options.pop("cpu", False):
            return fullshard.CPUOffloadPolicy()
        needs_folder = "budget" in options or any(
            "disk" in option for option in options.values() if isinstance(option, dict)
        )
        return Offload(**options, folder=self.folder if needs_folder else None) if options else None

    @staticmethod
    def is_wrapper_of(model: nn.Module) -> bool:
        return isinstance(model, FullyShardedDataParallel)

    @property
    def is_wrapper(self) -> bool:
        return self.is_wrapper_of(self.model)

    def snapshot(self, name: str) -> None:
        for i, (key, param) in enumerate(self.model.named_parameters()):
            recorded = part(param)
            if i not in self.ignored and not isinstance(param, DTensor):
                recorded.dtype = self.compute_dtypes[i]
            self.record(f"{name} {key}", recorded)
        for key, buffer in self.model.named_buffers():
            self.record(f"buffer {key}", buffer.detach().clone())

    def step(self, action: Json) -> None:
        self.has_failed = False
        micros, each = action.get("micro", 1), action.get("sync") == "each"
        losses: Records = {}
        for micro in range(micros):
            syncs = each or micro == micros - 1
            use_context = self.is_wrapper or action.get("no_sync")
            if not use_context:
                self.model.set_requires_gradient_sync(syncs)
            with self.model.no_sync() if use_context and not syncs else nullcontext():
                loss = Plain.loss(self, self.model, micro, self.rank, action)
                losses[f"loss {micro}"] = loss.detach()
                if action.get("twice"):
                    loss.backward(retain_graph=True)
                loss.backward()
            if micro < micros - 1 and "zero between" in action:
                (self.model if action["zero between"] == "model" else self.optimizer).zero_grad()
        for name, loss in losses.items():
            self.record(name, loss)
        for key, param in self.model.named_parameters():
            self.record(f"gradient {key}", None if param.grad is None else part(param.grad))
        edit_gradients(list(self.model.parameters()), action.get("edit grads", ""))
        if "clip" in action:
            params = list(self.model.parameters())
            if action.get("clip by torch"):
                norm = nn.utils.clip_grad_norm_(params, action["clip"])
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            elif self.is_wrapper:
                norm = self.model.clip_grad_norm_(action["clip"])
            else:
                norm = fullshard.clip_grad_norm_(params, action["clip"])
            self.record("norm", norm.detach().clone())
        if action.get("step hook"):
            handle = self.optimizer.register_step_pre_hook(lambda *_: None)
            self.optimizer.step()
            handle.remove()
        else:
            self.optimizer.step(*[lambda: losses["loss 0"]] if action.get("closure") else ())
        if not action.get("keep grads"):
            target = self.model if action.get("zero model") else self.optimizer
            target.zero_grad(set_to_none=action.get("set_to_none", True))

    def evaluate(self, action: Json) -> None:
        self.model.eval()
        with torch.inference_mode() if action.get("inference") else torch.no_grad():
            self.record("evaluation", loss_of(self.program, self.model, self.number, 0, self.rank))
        self.model.train()

    def forward_only(self, action: Json) -> None:
        self.record("forward", loss_of(self.program, self.model, self.number, 0, self.rank).detach())

    def boom(self, action: Json) -> None:
        for micro in range(action.get("after", 0)):
            with self.model.no_sync():
                Plain.loss(self, self.model, micro + 1, self.rank, {}).backward()
        with booming(self.model, action):
            loss_of(self.program, self.model, self.number, 0, self.rank).backward()
        self.optimizer.zero_grad()
        self.has_failed = True
        if "after" in action:  # or the next step would add gradients of these microbatches
            self.reshard_all()

    def edit(self, action: Json) -> None:
        self.reshard_all()  # writes to unsharded parameters are lost with a warning
        edit_parameters(self.model.parameters(), action.get("how", ""))

    def reshard_all(self) -> None:
        """Reshard the units that a failed step or the action unshard has left unsharded."""
        if self.has_failed:
            self.model.abandon_step()
            self.has_failed = False
        for unit in self.left_unsharded:
            unit.reshard()
        self.left_unsharded.clear()

    def optimizer_state(self, action: Json) -> None:
        self.reshard_all()  # torch's state dicts raise KeyError for an optimizer of unsharded parameters
        Plain.load_states(self)

    def summon(self, action: Json) -> None:
        with summon_full_params(self.model, writeback=bool(action.get("write"))):
            for key, param in self.model.named_parameters():
                self.record(f"summoned {key}", param.detach().clone())
            if action.get("write"):
                self.edit(action)

    learning_rate = Plain.learning_rate
    freeze = Plain.freeze
    groups = Plain.groups
    nothing = Plain.nothing

    def tangent(self, action: Json) -> None:
        self.record("tangent", tangent_of(self.program, self.model, self.number, self.rank))

    def copied(self, action: Json) -> None:
        forget_losses(self.model)
        if action.get("together"):
            self.reshard_all()
            self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
        else:
            self.model = copy.deepcopy(self.model)
            self.optimizer = self.new_optimizer()
        self.units = []

    def unshard(self, action: Json) -> None:
        units = [unit for unit in self.units if hasattr(unit, "unshard")] or [self.model]
        unit = units[action.get("which", 0) % len(units)]
        if hasattr(unit, "unshard"):
            handle = unit.unshard(async_op=action.get("async", False))
            if handle is not None and not action.get("no wait"):
                handle.wait()
            if action.get("leave"):
                self.left_unsharded.append(unit)
            else:
                unit.reshard()

    def state_dicts(self, action: Json) -> None:
        """Load its own state dict, after the values were lost."""
        states = copy.deepcopy(self.model.state_dict())
        self.lose_values()
        self.model.load_state_dict(states)

    def saved(self, action: Json) -> None:
        """Save the rank's state dicts by `torch.save`, and load them."""
        path = Path(self.folder, f"{self.number}-{self.rank}.pt")  # tensors may be mapped to files of earlier actions
        self.reshard_all()
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], path)
        self.lose_values()
        model, optimizer = torch.load(path, mmap=action.get("mmap", False))
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def reload(self, action: Json) -> None:
        """Save and load by torch's state dicts of model and optimizer."""
        if not has_all_states(self.optimizer):
            return
        has_tensors = bool(self.optimizer.state)  # torch fails otherwise, for plain models also
        is_spread = "device" in self.program and "offload" in self.program  # torch refuses states on several devices
        options = dcp.StateDictOptions(full_state_dict=action.get("full", False) and has_tensors and not is_spread)
        model, optimizer = copy.deepcopy(dcp.get_state_dict(self.model, self.optimizer, options=options))
        self.lose_values()
        dcp.set_state_dict(
            self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options
        )

    def checkpointed(self, action: Json) -> None:
        """Save a checkpoint; load it into this model, or into a new one under a different strategy."""
        from fullshard.checkpoint import async_save, load, save

        folder = Path(self.folder, "checkpoints")
        if action.get("async"):
            async_save(folder, model=self.model, optimizer=self.optimizer, step=self.number).wait()
        else:
            save(folder, model=self.model, optimizer=self.optimizer, step=self.number)
        trained = [param.requires_grad for param in self.model.parameters()]
        if "into" in action:
            self.model = self.sharded(action["into"])
            for param, is_trained in zip(self.model.parameters(), trained, strict=True):
                param.requires_grad_(is_trained)
            rates = [group["lr"] for group in self.optimizer.param_groups]
            self.optimizer = self.new_optimizer()
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        self.lose_values()
        load(folder, model=self.model, optimizer=self.optimizer)

    def lose_values(self) -> None:
        with torch.no_grad():
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                tensor.zero_()


META = ("loaded", "assigned", "summoned")
"""Ways to give values to a model that was built on the meta device. The wrapper is given a function instead."""


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def init_like(program: Json, model: nn.Module) -> Callable[[nn.Module], None]:
    """Return a function that gives a module of `model`, on the meta device, the program's values."""
    values = dict(zip(model.modules(), Builder(program).model.modules(), strict=True))

    def init(module: nn.Module) -> None:
        module.to_empty(device=device_of(program), recurse=False)
        own = zip(module.parameters(recurse=False), values[module].parameters(recurse=False), strict=True)
        buffers = zip(module.buffers(recurse=False), values[module].buffers(recurse=False), strict=True)
        with torch.no_grad():
            for tensor, value in [*own, *buffers]:
                tensor.copy_(value)

    return init


def part(tensor: Tensor) -> Part:
    """Return a copy of this rank's part of `tensor`."""
    if not isinstance(tensor, DTensor):
        return Part(tensor.detach().clone(), [])
    mesh = tensor.device_mesh
    cuts = [
        (placement.dim, mesh.size(axis), mesh.get_local_rank(axis))
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard)
    ]
    return Part(tensor.to_local().detach().clone(), cuts)


_meshes: dict[tuple[str, tuple[int, ...]], DeviceMesh] = {}


def mesh_of(program: Json, strategy: str) -> DeviceMesh:
    ranks, replicas = program.get("ranks", 1), program.get("replicas", 1)
    shape = (replicas, ranks // replicas) if replicas > 1 or strategy.startswith("hsdp") else (ranks,)
    key = device_of(program).type, shape
    if key not in _meshes:
        _meshes[key] = init_device_mesh(*key, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return _meshes[key]


@dataclass
class Outcome:
    """The end of a program on one rank: its records, or the error."""

    records: Records | None = None
    error: str = ""
    is_own: bool = False
    place: str = ""  # the innermost function of fullshard
    details: str = ""


@contextmanager
def small_windows() -> Iterator[None]:
    """Context manager that offloads even the smallest tensors, and a little at a time."""
    with ExitStack() as stack:
        for module, sizes in (
            (activations, {"SMALLEST_BYTES": 1}),
            (offloaded, {"WINDOW_BYTES": 4096}),
            (on_disk, {"CHUNK_NBYTES": 4096}),
        ):
            stack.enter_context(mock.patch.multiple(module, **sizes))
        yield


def with_budget(program: Json, folder: str) -> Json:
    """Return the program with a budget in bytes: its share of what offloading saves, above the smallest possible one.

    The error for a budget that is too small states both.
    """
    options = dict(program.get("offload", {}))
    share = options.pop("share", None)
    if share is None:
        return program
    try:
        Sharded(program | {"offload": {"budget": 1000}}, folder).run()
    except ConfigError as error:
        found = re.search(r"at least (\d+) bytes .*\((\d+) with nothing", str(error))
        if found is None:
            raise
    else:
        return program | {"offload": {"budget": 1000}}
    least, most = map(int, found.groups())
    return program | {"offload": {"budget": least + int(share * (most - least))}}


def run_sharded(program: Json, folder: str) -> Outcome:
    """Run a program on this rank."""
    logging.getLogger("fullshard").setLevel(logging.ERROR)
    use_device(program)
    try:
        with warnings.catch_warnings(), small_windows():
            warnings.simplefilter("ignore")
            outcome = Outcome(records=Sharded(with_budget(program, folder), folder).run())
            if program.get("ranks", 1) > 1:  # ranks may still wait for collectives that the others never start
                collectives_for(dist.group.WORLD, device_of(program)).barrier("end of the program", origin=IDLE)
            return outcome
    except Exception as error:
        own = [item for item in traceback.extract_tb(error.__traceback__) if "/fullshard/" in item.filename]
        return Outcome(
            error=f"{type(error).__name__}: {error}",
            is_own=isinstance(error, FullshardError),
            place=f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "",
            details=traceback.format_exc(),
        )
    finally:
        fullshard.share_memory_between_units(None)
        fullshard.check_finite_gradients(False)


# -- comparison -------------------------------------------------------------------------------------------------------


def first_difference(actual: Records, expected: Records, rank: int, tolerance: float = 0.0) -> str | None:
    """Return the first record that differs from the plain one, described; None if there is none."""
    if actual.keys() != expected.keys():
        odd = sorted(actual.keys() ^ expected.keys())
        return f"{odd[0]}: recorded on one side only"
    for name, plain in expected.items():
        own, wanted = actual[name], plain.values[rank] if isinstance(plain, PerRank) else plain
        if isinstance(own, Part):
            wanted = None if wanted is None else cast(cut(wanted, own.cuts), own.dtype)
            own = own.local
        if (found := difference(own, wanted, tolerance)) is not None:
            return f"{name}, rank {rank}: {found}"
    return None


def cut(tensor: Tensor, cuts: list[tuple[int, int, int]]) -> Tensor:
    for dim, count, index in cuts:
        parts = tensor.chunk(count, dim)
        tensor = parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)
    return tensor


def difference(own: Tensor | None, plain: Tensor | None, tolerance: float = 0.0) -> str | None:
    """Return how two tensors differ, wherever they are. The tolerance is relative to the largest element."""
    if own is None or plain is None:
        return None if own is plain else f"{describe(own)} instead of {describe(plain)}"
    if (own.dtype, own.shape) != (plain.dtype, plain.shape):
        return f"{describe(own)} instead of {describe(plain)}"
    own, plain = own.detach().cpu(), plain.detach().cpu()
    differs = differing(own, plain)
    if tolerance and differs.any() and can_be_trained(plain):
        largest = float(plain.abs().max()) + 1e-3
        differs &= ~((own - plain).abs() <= tolerance * largest)
    if not differs.any():
        return None
    gap = float(gaps(own, plain, differs).max())
    return f"{int(differs.sum())} of {own.numel()} elements differ, by at most {gap:.3g}"


def describe(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} of {tuple(tensor.shape)}"


def is_finite(records: Records) -> bool:
    tensors = [
        each_value
        for value in records.values()
        for each_value in (value.values if isinstance(value, PerRank) else [value])
    ]
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors if isinstance(tensor, Tensor))


def main(program: Json) -> int:
    """Run `program` on the ranks of torchrun, compare it with the plain run, and report."""
    torch.set_num_threads(1)
    use_device(program)
    dist.init_process_group("gloo" if "device" not in program else "cpu:gloo,cuda:nccl")
    if program.get("no shared memory"):
        fullshard.share_memory_between_ranks(False)
    if dist.get_world_size() != program.get("ranks", 1):
        raise SystemExit(f"start this with --nproc-per-node {program.get('ranks', 1)}")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    expected = run_plain(program)
    outcome = run_sharded(program, folder[0])
    if outcome.records is None:
        print(f"rank {dist.get_rank()}: {outcome.details}", file=sys.stderr, flush=True)
        os._exit(1)
    found = first_difference(outcome.records, expected, dist.get_rank())
    print(f"rank {dist.get_rank()}: {found or 'the same bits'}", flush=True)
    dist.barrier()
    return int(found is not None)
