"""Norms, clipping and loss scaling of sharded gradients match a single process with full gradients."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import ONE_AXIS, Chain, Layer, chain, initialize, inputs, leave, sgd, whole, whole_grads, wholes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import ConfigError, FullyShardedDataParallel, ShardedGradScaler, clip_grad_norm_, fully_shard
from fullshard.testing import assert_same
from fullshard.wrap import ModuleWrapPolicy

NORMS = (0.5, 1.0, 2.0, 3.0, math.inf, "inf")


def backward(model: Any) -> Any:
    """Run a backward of the same batch on every rank, so a plain model on each rank is the reference."""
    model(inputs()).square().mean().backward()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks("world")
def test_clip_grad_norm_matches_single_process_for_all_strategies(world):
    for norm_type in NORMS:
        plain = backward(chain(leave))
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        expected = {name: param.grad for name, param in plain.named_parameters()}
        bits: list[Tensor] = []
        for strategy in ONE_AXIS:
            for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
                model = backward(chain(partial(fully_shard, strategy=strategy)))
                found = clip(model.parameters(), 0.1, norm_type)
                found = getattr(found, "full_tensor", lambda found=found: found)()
                torch.testing.assert_close(found, norm, rtol=1e-5, atol=0)
                for name, grad in whole_grads(model).items():
                    torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-8)
                if clip is clip_grad_norm_:
                    bits.append(found)
        assert all(torch.equal(other, bits[0]) for other in bits), f"norm {norm_type} differs between strategies"


@on_ranks(4)
def test_clip_grad_norm_supports_several_meshes_and_plain_parameters():
    """Clip parameters sharded on one and on two mesh dimensions, ignored and frozen parameters in one call."""

    def build(shard: Any) -> nn.Module:
        model = nn.Sequential(Layer(), Layer(), nn.Linear(48, 48), nn.Linear(48, 5))
        initialize(model)
        model[1].up.bias.requires_grad_(False)
        shard(model[0])
        shard(model[1], mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), strategy="hsdp")
        shard(model, ignored_params=set(model[2].parameters()))
        return model

    plain, model = backward(build(leave)), backward(build(fully_shard))
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(clip_grad_norm_(model.parameters(), 0.1), norm, rtol=1e-5, atol=0)
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for name, param in model.named_parameters():
        assert (param.grad is None) == (expected[name] is None)
        if param.grad is not None:
            torch.testing.assert_close(whole(param.grad), expected[name], rtol=1e-5, atol=1e-8)


@on_ranks(2)
def test_wrapper_clip_grad_norm_matches_plain_pytorch():
    plain = backward(chain(leave))
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    model = backward(FullyShardedDataParallel(chain(leave), auto_wrap_policy=ModuleWrapPolicy({Layer})))
    torch.testing.assert_close(model.clip_grad_norm_(0.1), norm, rtol=1e-5, atol=0)


@on_ranks(2)
def test_clip_grad_norm_edge_cases_agree_on_every_rank():
    model = chain(fully_shard)
    assert clip_grad_norm_(model.parameters(), 1.0).item() == 0  # no gradient at all
    backward(model)
    before = whole_grads(model)
    clip_grad_norm_(model.parameters(), 1e9)
    assert_same(whole_grads(model), before)
    for wrong in ({"max_norm": -1.0}, {"max_norm": 1.0, "norm_type": 0.0}):
        with pytest.raises(ConfigError, match="both must be positive"):
            clip_grad_norm_(model.parameters(), **wrong)
    if dist.get_rank() == 1:
        next(iter(model.layers[0].parameters())).grad._local_tensor[0] = math.nan
    with pytest.raises(RuntimeError, match="is nan, so nothing was clipped"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


# -- loss scaling -----------------------------------------------------------------------------------------------------


def scale(overflows: dict[int, int]) -> tuple[list[float], list[bool]]:
    """Return the scale and whether parameters changed, per step. `overflows` maps a step to the overflowing rank."""
    model = chain(fully_shard)
    optimizer = sgd(model)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales, stepped = [], []
    for step in range(6):
        before = wholes(model)
        loss = model(inputs(step)).square().mean()
        scaler.scale(loss).backward()
        if overflows.get(step) == dist.get_rank():
            model.head.bias.grad._local_tensor[0] = math.inf
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = wholes(model)
        scales.append(scaler.get_scale())
        stepped.append(any(not torch.equal(after[name], before[name]) for name in after))
    return scales, stepped


def test_overflow_on_one_rank_skips_step_on_every_rank():
    expected = ([8.0, 4.0, 4.0, 8.0, 4.0, 4.0], [True, False, True, True, False, True])
    assert run_ranks(2, scale, {1: 1, 4: 0}) == [expected] * 2


def scale_like_plain() -> None:
    """Without an overflow, scaling keeps results bitwise equal, because scales are powers of two."""

    def learn(shard: Any, scaler: Any) -> list[Any]:
        model = chain(shard)
        optimizer, left = sgd(model), []
        for step in range(4):
            loss = model(inputs(step)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            left.append((loss.detach(), scaler.get_scale()))
        return [*left, wholes(model)]

    expected = learn(leave, torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2))
    for strategy in ONE_AXIS:
        scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=2)
        assert_same(learn(partial(fully_shard, strategy=strategy), scaler), expected, name=strategy)


def test_grad_scaler_training_matches_plain_pytorch_bitwise():
    run_ranks(1, scale_like_plain)
    run_ranks(2, scale_like_plain)


@on_ranks(2)
def test_the_norm_of_half_precision_gradients_does_not_overflow():
    """The norm of float16 gradients is accumulated in float32."""
    model = chain(fully_shard, Chain().half())
    for param in model.parameters():
        param.grad = torch.full_like(param, 100.0)
    count = sum(param.numel() for param in model.parameters())
    norm = clip_grad_norm_(model.parameters(), 1.0)
    assert math.isclose(norm.item(), 100 * math.sqrt(count), rel_tol=1e-3)
    assert norm.dtype == torch.float32
