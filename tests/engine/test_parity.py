"""Sharding changes the placement of values, not the values.

Every world size trains all strategies once on the same ranks. The tests below compare the results.
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import (
    ONE_AXIS,
    Clip,
    SmallGPT,
    Trace,
    adamw,
    batch,
    loss_of,
    memory_is_shared,
    momentum,
    shard,
    small_gpt,
    train,
    trained,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fullshard import clip_grad_norm_
from fullshard.engine.registry import units_in
from fullshard.testing import assert_same


@dataclass(frozen=True)
class Recipe:
    """One way to train the small model."""

    name: str
    optimizer: str
    clips: bool
    tied_in_two_units: bool


CLIPPED = Recipe("adamw, clipped, tied within a unit", "adamw", True, False)
MOMENTUM = Recipe("momentum, tied across two units", "momentum", False, True)
# Sharded ranks combine norms of shards; `DistributedDataParallel` norms full gradients: the rounding differs.
UNCLIPPED = Recipe("adamw, tied within a unit", "adamw", False, False)
EACH_RECIPE = pytest.mark.parametrize("recipe", [CLIPPED, MOMENTUM], ids=lambda recipe: recipe.name)
FOUR, ON_FOUR = (pytest.param(world, marks=pytest.mark.slow) for world in (4, (4,)))
Traces = dict[tuple[Recipe, str], Trace]  # by recipe and strategy


def run(recipe: Recipe, model: nn.Module) -> Trace:
    optimizer = {"adamw": adamw, "momentum": momentum}[recipe.optimizer](model)
    clip: Clip | None = clip_grad_norm_ if recipe.clips else None
    return train(model, optimizer, clip=clip)


def sharded(recipe: Recipe, strategy: str, mesh: DeviceMesh | None) -> SmallGPT:
    return shard(small_gpt(), strategy=strategy, mesh=mesh, tied_in_two_units=recipe.tied_in_two_units)


def train_all(shape: tuple[int, ...]) -> Traces:
    """Every recipe under every strategy that a mesh of `shape` allows; at 1 and 2 ranks under their plain peer too."""
    mesh = init_device_mesh("cpu", shape) if len(shape) == 2 else None
    strategies = (*ONE_AXIS, "hsdp", "hsdp_zero2") if mesh else ONE_AXIS
    world = dist.get_world_size()
    traces = {}
    for recipe in (CLIPPED, MOMENTUM, UNCLIPPED) if world == 2 else (CLIPPED, MOMENTUM):
        if world == 1:
            traces[recipe, "plain"] = run(recipe, small_gpt())
        if world == 2 and not recipe.clips:
            traces[recipe, "plain"] = without_prefix(run(recipe, DistributedDataParallel(small_gpt())))
        for strategy in strategies:
            model = sharded(recipe, strategy, mesh)
            traces[recipe, strategy] = run(recipe, model)
            assert memory_is_shared(model) == (strategy in ("zero3", "hsdp"))  # else the steps were too few
    return traces


def without_prefix(trace: Trace) -> Trace:
    """Names as they were before `DistributedDataParallel` wrapped the model."""
    trace.params = {name.removeprefix("module."): value for name, value in trace.params.items()}
    trace.grads = {name.removeprefix("module."): value for name, value in trace.grads.items()}
    return trace


@cache
def traces(*shape: int) -> list[Traces]:
    """What `train_all` gave on each rank of a mesh of `shape`."""
    return run_ranks(torch.Size(shape).numel(), train_all, shape)


def assert_all_same(shape: tuple[int, ...], recipe: Recipe, strategies: tuple[str, ...], reference: str) -> None:
    for rank, of_rank in enumerate(traces(*shape)):
        for strategy in strategies:
            actual, expected = of_rank[recipe, strategy], of_rank[recipe, reference]
            assert_same(actual.numbers, expected.numbers, name=f"rank {rank}, {strategy} as {reference}: ")


@EACH_RECIPE
def test_one_rank_matches_plain_pytorch_bitwise(recipe):
    assert_all_same((1,), recipe, ONE_AXIS, "plain")


@pytest.mark.slow
@EACH_RECIPE
def test_2d_mesh_of_one_rank_matches_plain_pytorch_bitwise(recipe):
    assert_all_same((1, 1), recipe, (*ONE_AXIS, "hsdp", "hsdp_zero2"), "plain")


@pytest.mark.parametrize("recipe", [UNCLIPPED, MOMENTUM], ids=lambda recipe: recipe.name)
def test_two_ranks_match_distributed_data_parallel_bitwise(recipe):
    assert_all_same((2,), recipe, ONE_AXIS, "plain")


@EACH_RECIPE
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), FOUR])
def test_strategies_match_each_other_bitwise(recipe, world):
    assert_all_same((world,), recipe, ("zero1", "zero2", "zero3"), "ddp")


@pytest.mark.slow
@EACH_RECIPE
def test_strategies_match_each_other_bitwise_on_2d_mesh(recipe):
    """Every strategy on a 2D mesh sums over the shard dimension first, as hybrid sharding does."""
    assert_all_same((2, 2), recipe, ("zero1", "zero2", "zero3", "hsdp", "hsdp_zero2"), "ddp")


@EACH_RECIPE
@pytest.mark.parametrize(
    "shape", [(2,), ON_FOUR, *(pytest.param(item, marks=pytest.mark.slow) for item in ((3,), (2, 2)))]
)
def test_ranks_have_equal_parameters_and_gradients_but_different_losses(recipe, shape):
    first, *others = (of_rank[recipe, "zero3"] for of_rank in traces(*shape))
    for other in others:
        assert_same([other.norms, other.grads, other.params], [first.norms, first.grads, first.params])
        assert not torch.equal(torch.stack(other.losses), torch.stack(first.losses))


@EACH_RECIPE
@pytest.mark.parametrize("shape", [(2,), (3,), ON_FOUR, (2, 2)])
def test_sharded_ranks_match_one_process_on_full_batch_within_tolerance(recipe, shape):
    alone = traces(1)[0][recipe, "plain"]
    together = [of_rank[recipe, "zero3"] for of_rank in traces(*shape)]
    mean = torch.stack([torch.stack(trace.losses) for trace in together]).mean(0)
    torch.testing.assert_close(mean, torch.stack(alone.losses), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[0].params, alone.params, rtol=1e-3, atol=1e-3)


def places_of_parameters() -> list[tuple[str, bool]]:
    return [(p.fqn, p.layout.in_place) for unit in units_in(shard(small_gpt())) for p in unit.params]


@pytest.mark.parametrize("world", [1, 2, 3, FOUR])
def test_small_model_has_in_place_and_packed_parameters(world):
    """Otherwise the tests above would cover one kind only."""
    found = run_ranks(world, places_of_parameters)[0]
    assert {"up.weight", "down.weight"} <= {name for name, in_place in found if in_place}
    assert {"base.weight", "scale", "mixture", "nothing"} <= {name for name, in_place in found if not in_place}


@on_ranks(1)
def test_clip_grad_norm_on_one_rank_matches_pytorch_bitwise():
    norms = []
    for clip in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
        model = small_gpt() if clip is not clip_grad_norm_ else shard(small_gpt())
        loss_of(model, batch(0)).backward()
        grads = [p for p in trained(model) if p.dtype == torch.float32]
        norms.append(clip(grads, 0.5))
        norms += [getattr(p.grad, "_local_tensor", p.grad).clone() for p in grads]
    half = len(norms) // 2
    expected, actual = norms[:half], norms[half:]
    assert_same(actual, expected)
