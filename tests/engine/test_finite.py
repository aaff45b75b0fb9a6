"""`check_finite_gradients` reports the parameter, unit and rank of NaN or infinite gradients on every rank."""

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_new_ranks, same_on_all_ranks
from small_models import chain, gathered, inputs, sgd, take_step, wholes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import NonFiniteError, check_finite_gradients, fully_shard, recording
from fullshard.testing import assert_same, run_ranks


class Spoil(torch.autograd.Function):
    """An identity whose backward sets one element of the gradient to `value`."""

    @staticmethod
    def forward(ctx, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        grad.view(-1)[0] = ctx.value
        return grad, None


def spoil(module: nn.Module, args: object, output: Tensor) -> Tensor:
    """Simulate a bad sample on one rank: set a row of the weight's gradient to a value that is not finite."""
    values = {1: float("nan"), 2: float("inf")}
    return Spoil.apply(output, values[dist.get_rank()]) if dist.get_rank() in values else output


def spoilt(strategy: str, replicas: int = 1) -> tuple[str, int]:
    """Return the message about a bad gradient in the second layer, and the number of collectives."""
    world = dist.get_world_size()
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=names) if replicas > 1 else None
    model = chain(lambda module: fully_shard(module, strategy=strategy, mesh=mesh))
    check_finite_gradients(True)
    model(inputs(0)).square().mean().backward()
    handle = model.layers[1].up.register_forward_hook(spoil)
    model.zero_grad()
    with pytest.raises(NonFiniteError) as caught, recording() as record:
        model(inputs(1)).square().mean().backward()
    handle.remove()
    model.zero_grad()
    check_finite_gradients(False)
    model(inputs(2)).square().mean().backward()
    assert all(grad.isfinite().all() for grad in gathered({"": model.head.weight.grad}).values() if grad is not None)
    return str(caught.value), len(record.collectives())


@pytest.mark.parametrize(
    ("strategy", "world", "replicas"), [("ddp", 3, 1), ("zero1", 3, 1), ("zero3", 3, 1), ("hsdp", 4, 2)]
)
@on_new_ranks("world")
def test_nonfinite_gradient_error_names_parameter_unit_and_rank(strategy, world, replicas):
    message = same_on_all_ranks(spoilt(strategy, replicas)[0])
    assert "layers.1.up.weight (unit layers.1): " in message
    assert "NaN on rank 1" in message
    assert "infinite on rank 2" in message or "NaN on rank 2" in message
    assert "rank 0" not in message and "rank 3" not in message
    assert message.index("layers.1.up") < message.index("layers.0"), "in the order of backward"
    assert "layers.2" not in message, "backward came through it before"


def train(checks: bool) -> dict[str, Tensor | None]:
    check_finite_gradients(checks)
    model = chain(fully_shard)
    optimizer = sgd(model)
    for step in range(3):
        take_step(optimizer, model(inputs(step)).square().mean())
    return wholes(model)


def test_check_finite_gradients_does_not_change_results():
    assert_same(run_ranks(2, train, True), run_ranks(2, train, False))
