"""In-place writes to sharded parameters that do not increment torch's version counter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared_ranks import on_ranks
from small_models import chain, inputs, wholes
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from wrapped_weights import DecodedWeight

from fullshard import MixedPrecisionPolicy, fully_shard, recording
from fullshard.engine import uncounted_writes
from fullshard.testing import assert_same

Write = Callable[[list[nn.Parameter]], object]


def each(write: Callable[[Tensor], object]) -> Write:
    return lambda params: [write(param) for param in params]


WRITES: dict[str, Write] = {
    "data.mul_": each(lambda param: param.data.mul_(2)),
    "data.copy_": each(lambda param: param.data.copy_(param.detach().clone() * 3)),
    "data.zero_": each(lambda param: param.data.zero_()),
    "foreach_mul_": lambda params: torch._foreach_mul_(params, 2.0),
    "foreach_mul_ of one": each(lambda param: torch._foreach_mul_([param], 2.0)),
    "foreach_lerp_": lambda params: torch._foreach_lerp_(params, [param.detach() * 3 for param in params], 0.5),
    "foreach_add_ of data": lambda params: torch._foreach_add_([param.data for param in params], 1.0),
    "mul_": each(lambda param: param.mul_(2)),
}
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def outputs_around_writes(write: Write, shard: Any, *, grad: bool) -> list[Any]:
    """Return the outputs of forwards before and after writes to the parameters, which are restored at the end."""
    model = chain(shard)
    found = []
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            found.append(model(inputs(0)).detach())
            stored = [param.detach().clone() for param in model.parameters()]
            with torch.no_grad():
                write(list(model.parameters()))
            found.append(model(inputs(0)).detach())
            for param, value in zip(model.parameters(), stored, strict=True):
                param.data.copy_(value)
    loss = model(inputs(1)).square().mean()
    loss.backward()
    return [*found, loss.detach(), wholes(model)]


STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_next_forward_uses_parameters_written_in_place(strategy):
    """Every write is tested with and without gradients, each under about half of the strategies."""
    for number, (name, write) in enumerate(WRITES.items()):
        grad = (number + STRATEGIES.index(strategy)) % 2 == 0
        expected = outputs_around_writes(write, lambda module: module, grad=grad)
        found = outputs_around_writes(write, lambda module: fully_shard(module, strategy=strategy), grad=grad)
        assert_same(found, expected, name=f"{name}, {grad}")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@on_ranks(2)
def test_averaged_model_matches_plain_pytorch_bitwise(strategy):
    """Evaluate the average and the model with averaged values after each step, as diffusion models do."""
    visited: list[list[Any]] = []
    for shard in (lambda module: module, lambda module: fully_shard(module, strategy=strategy)):
        model = chain(shard)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        visited.append([])
        for step in range(3):
            model(inputs(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            with torch.no_grad():
                visited[-1].append(average(inputs(9)))
                stored = [param.detach().clone() for param in model.parameters()]
                for param, mean in zip(model.parameters(), average.parameters(), strict=True):
                    param.data.copy_(mean.data)
                visited[-1].append(model(inputs(9)))
                for param, value in zip(model.parameters(), stored, strict=True):
                    param.data.copy_(value)
    assert_same(visited[1], visited[0])


@on_ranks(2)
def test_in_place_writes_refresh_low_precision_copies():
    model = fully_shard(nn.Linear(4, 4), strategy="ddp", mp_policy=LOW)
    with torch.no_grad():
        model(torch.ones(1, 4))
        for param in model.parameters():
            param.data.zero_()
        assert not model(torch.ones(1, 4)).any()


class Multiplied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(DecodedWeight(torch.full((8, 8), 2.0)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@on_ranks(2)
def test_next_forward_uses_tensor_subclass_written_through_data():
    model = fully_shard(Multiplied(), strategy="zero1")
    with torch.no_grad():
        model(torch.ones(1, 8))
        model.weight.data.copy_(model.weight.data * 2)
        torch.testing.assert_close(model(torch.ones(1, 8)), torch.full((1, 8), 32.0))


@on_ranks(2)
def test_forward_without_parameter_write_repeats_no_all_gather():
    """Writes to tensors other than parameters cause no all-gather."""
    model = fully_shard(nn.Linear(4, 4), strategy="zero1")
    with torch.no_grad():
        model(torch.ones(1, 4))
        others = [param.detach().clone() for param in model.parameters()]
        for written, gathers in ((others, 0), ([param.data for param in model.parameters()], 1), (others, 0)):
            torch._foreach_mul_(written, 2.0)
            for expected in (gathers, 0):
                with recording() as record:
                    model(torch.ones(1, 4))
                assert len(record.events) == expected


@on_ranks(1)
def test_record_of_written_tensors_does_not_grow_with_freed_tensors():
    """Writes to temporary DTensors use bounded memory, even without a forward of a sharded model."""
    model = fully_shard(nn.Linear(4, 4))
    param = next(model.parameters()).detach()
    for _ in range(3 << 10):
        (param + 1).add_(1)
    assert len(uncounted_writes._written) <= 1 << 10
