"""An abandoned step has no effect: later steps are bitwise equal to those of a run without it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_new_ranks
from small_models import (
    BrokenBackward,
    Stop,
    adamw,
    batch,
    loss_of,
    my_part,
    shard,
    small_gpt,
    under_strategies,
    wholes,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import FullyShardedDataParallel, RankMismatchError, share_memory_between_ranks
from fullshard.engine.hooks import runtime_of
from fullshard.testing import assert_same, run_ranks
from fullshard.wrap import ModuleWrapPolicy


def fail(*_: object) -> None:
    raise Stop


def fail_in_backward(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return BrokenBackward.apply(output)


def backward(model: nn.Module, step: int = 99) -> None:
    loss_of(model, my_part(batch(step))).backward()


def after_forward(model: nn.Module) -> None:
    loss_of(model, my_part(batch(99)))


def after_a_step_s_worthwhile(model: nn.Module) -> None:
    backward(model)


def between_microbatches(model: nn.Module) -> None:
    with model.no_sync():
        backward(model)


def before_second_sums(model: nn.Module) -> None:
    model.set_requires_all_reduce(False)
    backward(model)
    model.set_requires_all_reduce(True)


def in_forward(model: nn.Module) -> None:
    handle = model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(Stop):
        backward(model)
    handle.remove()


def in_backward(model: nn.Module) -> None:
    handle = model.blocks[1].register_forward_hook(fail_in_backward)
    with pytest.raises(Stop):
        backward(model)
    handle.remove()


def in_a_hook_on_sums(model: nn.Module) -> None:
    model.blocks[1].set_all_reduce_hook(fail)
    with pytest.raises(Stop):
        backward(model)
    model.blocks[1].set_all_reduce_hook(lambda sums: None)


def on_one_rank(break_it: object, model: nn.Module) -> None:
    """Fail and abandon the step on one rank. The peers wait in a collective and get an error."""
    if dist.get_rank() == dist.get_world_size() - 1:
        break_it(model)
    else:
        with pytest.raises(RankMismatchError, match="abandon_step"):
            backward(model)
            dist.barrier()  # never reached


def one_rank_ahead(model: nn.Module) -> None:
    """One rank has started a step that the other ranks abandon."""
    if dist.get_rank() == 0:
        with pytest.raises(RankMismatchError, match="abandon_step"):
            backward(model)


TOGETHER = (after_forward, after_a_step_s_worthwhile, between_microbatches, before_second_sums, in_forward, in_backward)
ALONE = (*(partial(on_one_rank, item) for item in (in_forward, in_backward, in_a_hook_on_sums)), one_rank_ahead)


def learn(strategy: str, abandoned: dict[int, object], in_memory: bool = True) -> dict[str, Tensor]:
    """Train one step per kind of failure, each preceded by that failure, and return the weights."""
    share_memory_between_ranks(in_memory)
    options = {"strategy": strategy}
    if strategy.startswith("hsdp"):
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(small_gpt(), **options)
    optimizer = adamw(model)
    for step in range(len(TOGETHER) + len(ALONE) + 2):
        if step in abandoned:
            abandoned[step](model)
            model.abandon_step()
            assert all(param.grad is None for param in model.parameters())
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return wholes(model)


EVERY = dict(enumerate((*TOGETHER, in_a_hook_on_sums, *ALONE), 1))


@pytest.mark.slow
@under_strategies
def test_abandoned_step_has_no_effect_on_later_steps(strategies):
    for strategy in strategies:
        expected = run_ranks(2, learn, strategy, {})
        assert_same(run_ranks(2, learn, strategy, EVERY), expected)


@pytest.mark.slow
def test_abandoned_step_has_no_effect_under_hsdp_or_without_shared_memory():
    expected = run_ranks(4, learn, "hsdp", {})
    assert_same(run_ranks(4, learn, "hsdp", EVERY), expected)
    expected = run_ranks(2, learn, "zero3", {}, False)
    assert_same(run_ranks(2, learn, "zero3", EVERY, False), expected)


def learn_from_the_first_step(strategy: str, in_memory: bool) -> None:
    """Abandon the first step of a model, in which only some ranks have made the first call of some channels."""
    share_memory_between_ranks(in_memory)
    expected = None
    for fail_first in (None, *ALONE):
        model = shard(small_gpt(), strategy=strategy)
        model.blocks[1].set_all_reduce_hook(lambda sums: None)  # on every rank, as one failure sets it
        optimizer = adamw(model)
        if fail_first is not None:
            fail_first(model)
            model.abandon_step()
        other = shard(small_gpt(), strategy=strategy)  # its calls precede the remaining calls of `model`
        for step in range(2):
            backward(other)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        expected = expected or wholes(model)
        assert_same(wholes(model), expected, name=str(fail_first))


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [True, False])
def test_abandoned_first_step_has_no_effect_on_later_steps(in_memory):
    run_ranks(2, learn_from_the_first_step, "zero3", in_memory)


@on_new_ranks(1)
def test_step_after_abandoned_step_restarts_microbatch_count():
    model = shard(small_gpt())
    backward(model)
    model.abandon_step()
    backward(model)
    assert runtime_of(model).microbatches.number == 1


def edit_wrapped(fails: bool) -> dict[str, Tensor]:
    """Train a wrapped model and scale its weights after each step. If `fails`, abandon a failed backward first."""
    model = small_gpt()
    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}))
    optimizer = adamw(model)
    for step in range(2):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        if fails:
            in_backward(model)
            model.abandon_step()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
    return wholes(model)


@pytest.mark.slow
def test_wrapper_weights_can_be_changed_after_abandoned_step():
    assert_same(run_ranks(2, edit_wrapped, True), run_ranks(2, edit_wrapped, False))
