"""CPU offload changes the placement of shards. On a machine that computes on the CPU, it changes nothing."""

from functools import partial
from typing import Any

import pytest
import small_models
import torch
from shared_ranks import on_ranks
from small_models import ONE_AXIS, Chain, Layer, chain, inputs, leave, sgd, wholes

from fullshard import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    summon_full_params,
)
from fullshard.engine.registry import units_in
from fullshard.state.optim_state import full_optim_state_dict, optim_state_dict_to_load
from fullshard.testing import assert_same
from fullshard.wrap import ModuleWrapPolicy


def learn(model: Any) -> list[Any]:
    rank = torch.distributed.get_rank()
    return small_models.learn(model, 4, lambda model, step: model(inputs(10 * step + rank)).square().mean())


@pytest.mark.slow
@on_ranks(2)
def test_cpu_offload_on_cpu_machine_matches_no_offload_bitwise():
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for strategy, policy in [*((name, MixedPrecisionPolicy()) for name in ONE_AXIS), ("zero3", low)]:
        shard = partial(fully_shard, strategy=strategy, mp_policy=policy)
        offload = CPUOffloadPolicy(pin_memory=policy is not low)
        assert_same(learn(chain(partial(shard, offload_policy=offload))), learn(chain(shard)), name=strategy)
    wrapper = FullyShardedDataParallel(
        chain(leave), auto_wrap_policy=ModuleWrapPolicy({Layer}), cpu_offload=CPUOffload(offload_params=True)
    )
    assert_same(learn(wrapper), learn(chain(fully_shard)), name="the wrapper")


@on_ranks(1)
def test_offloaded_shards_are_on_cpu_and_pinned_only_with_a_gpu():
    model = chain(partial(fully_shard, offload_policy=CPUOffloadPolicy()))
    model(inputs()).sum().backward()
    for unit in units_in(model):
        for param in unit.params:
            assert param.local.device.type == "cpu"
            assert param.grad is not None
            assert param.grad.device.type == "cpu"
            assert param.local.is_pinned() == torch.cuda.is_available()


def hold_in_hand(**options: Any) -> list[Any]:
    """Return everything that users read and write between steps."""
    model = chain(partial(fully_shard, **options))
    optimizer = sgd(model)
    left = learn(model)
    model(inputs(7)).square().mean().backward()
    left.append(clip_grad_norm_(model.parameters(), 0.1))
    optimizer.step()
    state = full_optim_state_dict(model, optimizer, rank0_only=False)
    with summon_full_params(model, with_grads=True), torch.no_grad():
        left += [[param.clone(), param.grad.clone()] for param in model.parameters()]
        model.head.weight.mul_(2)
    with torch.device("meta"):
        again = Chain()
    for layer in again.layers:
        fully_shard(layer, **options)
    fully_shard(again, **options)
    again.load_state_dict(wholes(model), assign=True)
    optimizer = sgd(again)
    optim_state_dict_to_load(again, optimizer, state, load_directly=True)
    return [*left, state, full_optim_state_dict(again, optimizer, rank0_only=False), learn(again)]


@pytest.mark.slow
@on_ranks(2)
def test_cpu_offload_on_cpu_machine_preserves_user_visible_values():
    """Compare state dicts, gradients, norms, full parameters, and models built on the meta device."""
    for strategy in ("zero1", "zero3"):
        expected = hold_in_hand(strategy=strategy)
        assert_same(hold_in_hand(strategy=strategy, offload_policy=CPUOffloadPolicy()), expected, name=strategy)
