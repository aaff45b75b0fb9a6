"""After an exception in forward or backward on all ranks, the model trains as if the step had never begun."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from shared_ranks import on_ranks
from small_models import (
    BrokenBackward,
    Chain,
    Stop,
    adamw,
    batch,
    chain,
    inputs,
    loss_of,
    my_part,
    shard,
    small_gpt,
    take_step,
    whole_grads,
    wholes,
)
from torch import Tensor, nn

from fullshard import fully_shard, register_fsdp_forward_method
from fullshard.device.streams import Stream
from fullshard.engine.communicating import Communicating
from fullshard.engine.unshard_scheduler import UnshardScheduler
from fullshard.tape.recorder import Origin, Phase
from fullshard.testing import assert_same, run_ranks


def break_in_forward(module: nn.Module, args: object) -> None:
    raise Stop("in forward")


def break_in_backward(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return BrokenBackward.apply(output)


def fail_once(model: nn.Module, where: str) -> None:
    block = model.blocks[1]
    if where == "forward":
        handle = block.register_forward_pre_hook(break_in_forward)
    else:
        handle = block.register_forward_hook(break_in_backward)
    with pytest.raises(Stop, match=where):
        loss_of(model, my_part(batch(99))).backward()
    handle.remove()


def learn(strategy: str, failures: dict[int, str]) -> dict[str, Tensor]:
    """Train five steps, with failures before and after memory is shared between units. Return the weights."""
    model = shard(small_gpt(), strategy=strategy)
    optimizer = adamw(model)
    for step in range(5):
        if step in failures:
            fail_once(model, failures[step])
            optimizer.zero_grad()
        take_step(optimizer, loss_of(model, my_part(batch(step))))
    return wholes(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["zero1", "zero3", *(pytest.param(item, marks=pytest.mark.slow) for item in ("ddp", "zero2"))]
)
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_failed_step_does_not_change_later_training(world, strategy):
    """The next step does not use pending messages of the failed step."""
    expected = run_ranks(world, learn, strategy, {})
    assert_same(run_ranks(world, learn, strategy, {1: "forward", 2: "backward", 4: "backward"}), expected)


class FailingOnce(torch.autograd.Function):
    """The identity, whose first backward raises `Stop`."""

    remaining = 1

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if FailingOnce.remaining:
            FailingOnce.remaining -= 1
            raise Stop("backward")
        return grad


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@on_ranks(2)
def test_backward_of_earlier_forward_is_complete_after_a_failed_backward(strategy):
    """Both forwards precede the first backward, so no forward can reset the state of the failed backward."""
    plain, model = chain(lambda module: module), chain(partial(fully_shard, strategy=strategy))
    FailingOnce.remaining = 1
    model.layers[1].register_forward_pre_hook(lambda _, args: (FailingOnce.apply(args[0]),))
    first, second = (model(inputs(step)).square().mean() for step in range(2))
    with pytest.raises(Stop):
        first.backward()
    model.zero_grad()
    second.backward()
    plain(inputs(1)).square().mean().backward()
    assert_same(whole_grads(model), {name: param.grad for name, param in plain.named_parameters()})


class Computing(Chain):
    def compute(self, x: Tensor) -> Tensor:
        return self.forward(x)


@on_ranks(1)
def test_model_trains_after_a_method_run_as_forward_could_not_unshard():
    model = chain(fully_shard, Computing())
    register_fsdp_forward_method(model, "compute")
    with mock.patch.object(UnshardScheduler, "unshard", side_effect=MemoryError), pytest.raises(MemoryError):
        model.compute(inputs())
    model(inputs()).square().mean().backward()
    assert all(param.grad is not None for param in model.parameters())


class InterruptedStream(Stream):
    """A stream on which an interrupt arrives when it has become the current one."""

    is_stream = True
    is_current = False

    @contextmanager
    def queueing(self) -> Iterator[None]:
        self.is_current = True
        yield
        self.is_current = False


class Interrupted:
    def __init__(self, context: AbstractContextManager[object]) -> None:
        self.context = context

    def __enter__(self) -> None:
        self.context.__enter__()
        raise KeyboardInterrupt

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(None, None, None)


def test_keyboard_interrupt_restores_current_stream(monkeypatch):
    stream = InterruptedStream("gather")
    queueing = stream.queueing
    monkeypatch.setattr(stream, "queueing", lambda: Interrupted(queueing()))
    with pytest.raises(KeyboardInterrupt), Communicating(Origin("", Phase.IDLE), stream, is_recorded=False):
        pass
    assert not stream.is_current
    assert torch.is_grad_enabled()
