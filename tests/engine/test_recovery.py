"""After an exception in forward or backward on all ranks, the model trains as if the step had never begun."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from small_models import BrokenBackward, Stop, adamw, batch, loss_of, my_part, shard, small_gpt, take_step, wholes
from torch import Tensor, nn

from fullshard.device.streams import Stream
from fullshard.engine.communicating import Communicating
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
