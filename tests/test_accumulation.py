"""Gradients of several microbatches: added up in the right dtype, and reduced exactly when they are to be."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import run_ranks
from small_models import ONE_AXIS, Layer, chain, inputs, leave, sgd, whole_grads, wholes
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard, recording
from fullshard.tape.recorder import Recorder
from fullshard.testing import assert_same
from fullshard.wrap import ModuleWrapPolicy

MICROBATCHES = 3
REDUCTIONS = ("reduce_scatter", "all_reduce")
UNITS = 5


def batch(number: int) -> Tensor:
    return inputs(100 * number + dist.get_rank())


def by_switch(model: Any, last: bool) -> Any:
    model.set_requires_gradient_sync(last)
    return nullcontext()


def by_context(model: Any, last: bool) -> Any:
    return nullcontext() if last else model.no_sync()


def always(model: Any, last: bool) -> Any:
    return nullcontext()


def inner(model: Any) -> torch.nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def learn(model: Any, quiet: Any, steps: int = 3) -> list[Any]:
    """What is left of `steps` steps of several microbatches each."""
    optimizer, left = sgd(model), []
    for step in range(steps):
        for i in range(MICROBATCHES):
            with quiet(model, i == MICROBATCHES - 1):
                loss = model(batch(step * MICROBATCHES + i)).square().mean()
                loss.backward()
            left.append(loss.detach())
        left.append(whole_grads(inner(model)))
        optimizer.step()
        optimizer.zero_grad()
    return [*left, wholes(inner(model))]


def like_plain(strategy: str) -> None:
    expected = learn(chain(leave), always)
    for quiet in (by_switch, by_context, always):
        assert_same(learn(chain(partial(fully_shard, strategy=strategy)), quiet), expected, name=strategy)


@pytest.mark.parametrize(
    "strategy", ["zero1", "zero3", *(pytest.param(it, marks=pytest.mark.slow) for it in ("ddp", "zero2"))]
)
def test_one_rank_adds_up_the_bits_of_plain_pytorch(strategy):
    run_ranks(1, like_plain, strategy)


def like_ddp() -> None:
    expected = learn(DistributedDataParallel(chain(leave)), by_context)
    for strategy in ONE_AXIS:
        for quiet in (by_switch, by_context):
            assert_same(learn(chain(partial(fully_shard, strategy=strategy)), quiet), expected, name=strategy)


def test_two_ranks_add_up_the_bits_of_distributed_data_parallel():
    run_ranks(2, like_ddp)


def like_one_another(world: int) -> None:
    for quiet in (by_switch, always):
        expected = learn(chain(partial(fully_shard, strategy="ddp")), quiet)
        for strategy in ONE_AXIS[1:]:
            assert_same(learn(chain(partial(fully_shard, strategy=strategy)), quiet), expected, name=strategy)


@pytest.mark.slow
def test_three_ranks_add_up_the_same_bits_under_every_strategy():
    run_ranks(3, like_one_another, 3)


def wrapped_like_switched() -> None:
    model = FullyShardedDataParallel(chain(leave), auto_wrap_policy=ModuleWrapPolicy({Layer}))
    expected = learn(chain(fully_shard), by_switch)
    assert_same(learn(model, by_context)[:-1], expected[:-1])


def test_no_sync_of_the_wrapper_is_the_same():
    run_ranks(2, wrapped_like_switched)


# -- what is sent -----------------------------------------------------------------------------------------------------


def record_each(model: Any, switch: str | None, before_last: bool) -> list[Recorder]:
    records = []
    for i in range(MICROBATCHES):
        if switch is not None:
            getattr(model, switch)(before_last or i == MICROBATCHES - 1)
        with recording() as record:
            model(batch(i)).square().mean().backward()
        records.append(record)
    return records


def count_reductions(strategy: str) -> list[list[int]]:
    counts = []
    for before_last in (True, False):
        model = chain(partial(fully_shard, strategy=strategy))
        records = record_each(model, "set_requires_gradient_sync", before_last)
        counts.append([sum(len(record.collectives(name)) for name in REDUCTIONS) for record in records])
    return counts


@pytest.mark.parametrize(
    "strategy", ["zero1", "zero3", *(pytest.param(it, marks=pytest.mark.slow) for it in ("ddp", "zero2"))]
)
def test_every_unit_is_reduced_once_in_every_microbatch_that_is_synced(strategy):
    assert run_ranks(2, count_reductions, strategy) == [[[UNITS] * 3, [0, 0, UNITS]]] * 2


def count_hybrid(strategy: str) -> dict[str, list[tuple[int, int]]]:
    """Messages of each microbatch by collective: (calls, bytes)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = chain(partial(fully_shard, strategy=strategy, mesh=mesh))
    records = record_each(model, "set_requires_all_reduce", False)
    return {n: [(len(r.collectives(n)), r.sent_bytes(n)) for r in records] for n in REDUCTIONS}


@pytest.mark.parametrize("strategy", ["hsdp", "hsdp_zero2"])
def test_hybrid_strategies_reduce_over_replicas_once_a_step_if_told_to(strategy):
    for counts in run_ranks(4, count_hybrid, strategy):
        scattered = counts["reduce_scatter"]
        assert [calls for calls, _ in scattered] == [UNITS] * 3
        assert len({nbytes for _, nbytes in scattered}) == 1
        assert counts["all_reduce"][:2] == [(0, 0)] * 2
        calls, nbytes = counts["all_reduce"][2]
        assert calls == UNITS
        # Two ranks: a rank sends half of its shards to be summed, and the sum of the other half back.
        assert nbytes == scattered[0][1]


def deferred_like_immediate() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    left = []
    for before_last in (True, False):
        model = chain(partial(fully_shard, strategy="hsdp", mesh=mesh))
        record_each(model, "set_requires_all_reduce", before_last)
        left.append(whole_grads(model))
    for name, grad in left[0].items():
        torch.testing.assert_close(left[1][name], grad, rtol=1e-5, atol=1e-5)


def test_a_deferred_sum_over_replicas_is_the_same_but_for_rounding():
    run_ranks(4, deferred_like_immediate)


# -- dtypes -----------------------------------------------------------------------------------------------------------


def low_precision_reference(reduce_dtype: torch.dtype) -> dict[str, Tensor]:
    """bf16 gradients of each microbatch, added up in `reduce_dtype`, summed in rank order and divided once."""
    plain = chain(leave)
    masters = {name: param.detach().clone() for name, param in plain.named_parameters()}
    plain.to(torch.bfloat16)
    total: dict[str, Tensor] = {}
    for i in range(MICROBATCHES):
        plain(batch(i).bfloat16()).square().mean().backward()
        for name, param in plain.named_parameters():
            assert param.grad is not None
            grad = param.grad.to(reduce_dtype)
            total[name] = total[name].add_(grad) if name in total else grad
            param.grad = None
    reduced = {}
    for name, mine in total.items():
        terms = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(terms, mine)
        reduced[name] = ((terms[0] + terms[1]) / 2).to(masters[name].dtype)
    return reduced


def accumulate_low_precision(quiet: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = low_precision_reference(torch.float32)
    for strategy in ONE_AXIS:
        model = chain(partial(fully_shard, strategy=strategy, mp_policy=policy))
        for i in range(MICROBATCHES):
            with quiet(model, i == MICROBATCHES - 1):
                model(batch(i)).square().mean().backward()
        assert_same(whole_grads(model), expected, name=strategy)


def test_low_precision_gradients_add_up_in_the_dtype_of_the_reduction():
    """bfloat16 has 8 bits: sums of it kept in it would lose the small terms."""
    run_ranks(2, accumulate_low_precision, by_switch)


# -- after a failure --------------------------------------------------------------------------------------------------


def fail_in_an_unsynced_microbatch() -> None:
    expected = whole_grads_of(chain(fully_shard), [0, 1])
    model = chain(fully_shard)
    with model.no_sync(), pytest.raises(RuntimeError, match="size"):
        model(torch.zeros(6, 47))
    assert_same(whole_grads_of(model, [0, 1]), expected)


def whole_grads_of(model: Any, numbers: list[int]) -> dict[str, Tensor | None]:
    with model.no_sync():
        model(batch(numbers[0])).square().mean().backward()
    model(batch(numbers[1])).square().mean().backward()
    return whole_grads(model)


def test_an_exception_in_no_sync_leaves_it_and_the_next_step_is_right():
    run_ranks(2, fail_in_an_unsynced_microbatch)


def divide_by(factor: float) -> None:
    usual, model = chain(fully_shard), chain(fully_shard)
    for layer in (*model.layers, model):
        layer.set_gradient_divide_factor(factor)
    usual(batch(0)).sum().backward()
    model(batch(0)).sum().backward()
    for name, grad in whole_grads(usual).items():
        torch.testing.assert_close(whole_grads(model)[name], grad * 2 / factor)


@pytest.mark.parametrize("factor", [1.0, 3.0, 8.0])
def test_sums_are_divided_by_what_the_user_says(factor):
    run_ranks(2, divide_by, factor)
