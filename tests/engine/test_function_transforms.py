"""`torch.func` transforms of sharded modules: derivatives with respect to inputs, and losses that contain them."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
import torch.distributed as dist
from shared_ranks import on_ranks
from small_models import take_step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import grad, jacrev, jvp, vmap

from fullshard import fully_shard
from fullshard.engine.registry import units_in
from fullshard.engine.residency import INACTIVE
from fullshard.policy.switches import switches
from fullshard.testing import assert_same

# torch itself calls the deprecated function.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

WIDTH = 64


class Field(nn.Module):
    """A function of points. If `derives` is set, its forward adds the function's own derivative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, 1)
        self.derives = False

    def forward(self, x: Tensor) -> Tensor:
        if self.derives:
            return self.value(x) + grad(lambda x: self.value(x).sum())(x).sum(-1, keepdim=True)
        return self.value(x)

    def value(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def dual(model: nn.Module, x: Tensor) -> Tensor:
    with forward_mode.dual_level():
        return forward_mode.unpack_dual(model(forward_mode.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "grad": lambda model, x: grad(lambda x: model(x).sum())(x),
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda model, x: vmap(model)(x),
    "vmap of grad": lambda model, x: vmap(grad(lambda x: model(x).sum()))(x),
    "jacrev": lambda model, x: jacrev(model)(x),
    "second derivatives": lambda model, x: grad(lambda x: grad(lambda x: model(x).sum())(x).square().sum())(x),
    "forward mode": dual,
}


def sharded(strategy: str) -> nn.Module:
    model = Field()
    for layer in (model.layers[0], model.layers[2], model.layers):
        fully_shard(layer, strategy=strategy)
    return fully_shard(model, strategy=strategy)


def learn(model: nn.Module, name: str, steps: int = 4) -> list[Any]:
    """Train with a derivative and a plain term in the loss. The third step accumulates two microbatches."""
    transform, optimizer, visited = TRANSFORMS[name], torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        for part in x.chunk(2 if step == 2 else 1):
            derived = transform(model, part)
            (derived.square().mean() + model(part).square().mean()).backward()
            visited.append(derived.detach())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            visited.append(transform(model, x))
    model.derives = True
    for step in range(2):
        y = model(torch.randn(8, 3, generator=torch.Generator().manual_seed(step)))
        take_step(optimizer, y.square().mean())
        visited.append(y.detach())
    return [*visited, *(p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
@on_ranks(2)
def test_derivatives_and_derivative_losses_match_plain_pytorch_bitwise(strategy):
    for name, transform in TRANSFORMS.items():
        model = sharded(strategy)
        assert_same(learn(model, name), learn(Field(), name), name=name)
        assert all(unit.residency.state in INACTIVE for unit in units_in(model))
        transform(model, torch.ones(2, 3))
        model.state_dict()
        model(torch.ones(2, 3)).sum().backward()
        assert all(unit.residency.state in INACTIVE for unit in units_in(model))
        transform(model, torch.ones(2, 3))
        model.state_dict()
        model.derives = False
        with torch.no_grad():
            vmap(model)(torch.ones(2, 3))
            model(torch.ones(2, 3))
        assert all(unit.residency.state in INACTIVE for unit in units_in(model))  # an evaluation leaves no unit active
        assert not any(unit.residency.awaits_backward for unit in units_in(model))
    dist.barrier()


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
@on_ranks(2)
def test_transform_between_backward_and_step_matches_plain_pytorch(strategy):
    """Call a transform between backward and a manual step, with and without a forward after it."""
    x = torch.ones(2, 3)
    for transform, forwards in itertools.product(TRANSFORMS.values(), (0, 1)):
        weights = []
        for model in (Field(), sharded(strategy)):
            model(x).square().mean().backward()
            transform(model, x)
            for _ in range(forwards):
                model(x)
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
            model.zero_grad()
            weights.append([p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()])
        assert_same(weights[1], weights[0])


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
@on_ranks(2)
def test_parameters_can_be_frozen_and_unfrozen_between_transforms(strategy):
    x = torch.ones(2, 3)
    for name, transform in TRANSFORMS.items():
        visited: list[list[Any]] = []
        for model in (Field(), sharded(strategy)):
            visited.append([])
            for is_trained in (True, False, True):
                model.layers.requires_grad_(is_trained)
                derived = transform(model, x)
                derived.square().mean().backward()
                grads = [param.grad for param in model.parameters()]
                visited[-1] += [derived.detach(), [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]]
                model.zero_grad()
        assert_same(visited[1], visited[0], name=name)


def penalized(model: nn.Module, x: Tensor) -> Tensor:
    """Return the gradient norm at each point, as in a gradient penalty. Its backward is a double backward."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum(-1).add(1e-6).sqrt()


def learn_with_penalty(model: nn.Module) -> list[Any]:
    optimizer, visited = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(4):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        for part in x.chunk(2 if step == 2 else 1):
            loss = model(part).square().mean() + (penalized(model, part) - 1).square().mean()
            loss.backward(retain_graph=step == 3)
            visited.append(loss.detach())
        if step == 3:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        y = model(x.requires_grad_())
        visited.append(torch.autograd.grad(y.sum(), x)[0])
        hessian = torch.autograd.functional.hvp(lambda x: model(x).square().sum(), x, torch.ones_like(x))[1]
        visited.append(hessian.detach())
        optimizer.zero_grad()
    return [*visited, *(p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters())]


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
@on_ranks(2)
def test_double_backward_matches_plain_pytorch_bitwise(strategy):
    expected = learn_with_penalty(Field())
    for shares in (True, False):  # shared memory contains values of other units, separate memory does not
        with mock.patch.object(switches, "shares_memory_between_units", shares):
            model = sharded(strategy)
            assert_same(learn_with_penalty(model), expected)
            model(torch.ones(2, 3)).sum().backward()
            assert all(unit.residency.state in INACTIVE for unit in units_in(model))


@on_ranks(2)
def test_parameters_modified_after_grad_with_create_graph_are_trained():
    """Write to parameters after an input gradient whose graph never runs a backward, then train."""
    weights = []
    for shard in (False, True):
        model = sharded("zero3") if shard else Field()
        penalized(model, torch.ones(2, 3))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        model(torch.ones(2, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        weights.append([p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()])
    assert_same(weights[1], weights[0])


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "ddp"])
@on_ranks(2)
def test_manually_unsharded_parameters_are_gathered_again_after_step(strategy):
    """Parameters unsharded manually before a step are gathered again after it, even if the first gather had ended."""
    plain, model = nn.Linear(8, 8), nn.Linear(8, 8)
    model.load_state_dict(plain.state_dict())
    for param in plain.parameters():
        dist.broadcast(param.detach(), 0)
    model.load_state_dict(plain.state_dict())
    fully_shard(model, strategy=strategy)
    make = partial(torch.optim.SGD, lr=1.0)
    optimizers = make(plain.parameters()), make(model.parameters())
    for waits in (True, False):
        for item, optimizer in zip((plain, model), optimizers, strict=True):
            item(torch.ones(2, 8)).square().mean().backward()
            if item is model:
                handle = model.unshard(async_op=True)
                if waits:
                    handle.wait()
            optimizer.step()
            optimizer.zero_grad()
        assert_same(model(torch.ones(2, 8)).detach(), plain(torch.ones(2, 8)).detach())
