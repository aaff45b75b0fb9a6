"""`stream_weights`: full weights in buckets, under every strategy, within a bound on memory."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from shared_ranks import on_ranks, run_ranks
from small_models import ONE_AXIS, Block, shard, small_gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import (
    FSDPMeshInfo,
    FullyShardedDataParallel,
    HSDPMeshInfo,
    ShardPlacementResult,
    fully_shard,
    recording,
    stream_weights,
)
from fullshard._dry_compat import storage_watch
from fullshard.testing import assert_same
from fullshard.wrap import ModuleWrapPolicy

BUCKET = 3 * 10**4  # bytes; some weights are larger

# Parameters: shape, mesh to shard over, dim to shard along, and whether they are distributed over `ep` first.
PARAMETERS = st.tuples(
    st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(1, 3)),
    st.sampled_from(["of the unit", "efsdp", "ep", "both"]),
    st.sampled_from([None, 0, 1]),
    st.booleans(),
)


def by_wrapper(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))


def expected() -> dict[str, Tensor]:
    return {name: param.detach() for name, param in small_gpt(blocks=2).named_parameters()}


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
@on_ranks("world")
def test_stream_weights_yields_full_weights_under_original_names(world):
    ways: list[Any] = [partial(shard, strategy=strategy) for strategy in ONE_AXIS]
    ways += [partial(shard, tied_in_two_units=True), by_wrapper, lambda model: model]
    ways.append(partial(shard, shard_placement_fn=lambda param: Shard(1) if param.ndim == 2 else None))
    ways.append(partial(shard, strategy="hsdp", mesh=init_device_mesh("cpu", (world, 1), mesh_dim_names=("r", "s"))))
    ways.append(partial(shard, strategy="hsdp", mesh=init_device_mesh("cpu", (1, world), mesh_dim_names=("r", "s"))))
    if world == 4:
        ways.append(partial(shard, reshard_after_forward=2))
    for way in ways:
        model = way(small_gpt(blocks=2))
        for bucket in (1, BUCKET, 2**40):
            streamed = list(stream_weights(model, bucket_bytes=bucket))
            assert [name for name, _ in streamed] == list(expected())  # tied weights appear once
            assert_same(dict(streamed), expected())


@on_ranks(2)
def test_stream_weights_runs_one_all_gather_per_bucket_and_bounds_memory():
    model = shard(small_gpt(blocks=2))
    with storage_watch() as watch, recording() as record:
        for _, weight in stream_weights(model, bucket_bytes=BUCKET, dtype=torch.bfloat16):
            assert watch.live_bytes() <= max(BUCKET, weight.untyped_storage().nbytes())
            assert weight.untyped_storage().nbytes() <= BUCKET or weight.nbytes + 1024 > BUCKET  # alone, if too large
            del weight
    total = sum(param.numel() * 2 for param in expected().values())
    assert total / BUCKET <= len(record.collectives()) <= 2 * total / BUCKET + 1
    assert set(record.names()) == {"all_gather"}


@on_ranks(2)
def test_stream_weights_casts_renames_filters_and_sends_to_one_rank():
    model = shard(small_gpt(blocks=2))
    model.register_buffer("kept", torch.ones(3))
    model.register_buffer("unkept", torch.ones(3), persistent=False)
    streamed = dict(stream_weights(model, dtype=torch.bfloat16))
    assert_same(streamed.pop("kept"), torch.ones(3, dtype=torch.bfloat16))
    assert_same(streamed, {name: weight.to(torch.bfloat16) for name, weight in expected().items()})

    names = {"norm.weight": "model.norm.weight", "wide.bias": "bias"}
    assert list(dict(stream_weights(model, rename=names.get))) == list(names.values())

    with recording() as record:
        streamed = dict(stream_weights(model, to_rank=1, bucket_bytes=2**40))
    assert record.names() == ["all_gather"]
    assert len(streamed) == (len(expected()) + 1) * (dist.get_rank() == 1)

    model(torch.zeros(1, 2, dtype=torch.long))[0].sum().backward()
    model.unshard()
    assert_same(dict(stream_weights(model, rename=names.get))["bias"], expected()["wide.bias"])


@on_ranks(4)
def test_stream_weights_yields_full_weights_under_tensor_parallelism():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    plain = {name: param.detach().clone() for name, param in model.named_parameters()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    assert_same(dict(stream_weights(model)), plain)


def stream_from_several_meshes(
    parameters: Any, units: int, strategy: str, bucket: int, dtype: torch.dtype | None
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    infos = {
        "efsdp": FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0),
        "ep": FSDPMeshInfo(mesh["ep"], shard_mesh_dim=0),
        "both": HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0),
    }
    model, plain, places = nn.Sequential(*(nn.Module() for _ in range(units))), {}, {}
    for number, (shape, over, dim, is_placed) in enumerate(parameters):
        value = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        plain[f"{number % units}.p{number}"] = value if dtype is None else value.to(dtype)
        is_placed = is_placed and over == "efsdp"  # like experts: each rank of `ep` has different ones
        param = nn.Parameter(distribute_tensor(value, mesh["ep"], [Shard(0)]) if is_placed else value)
        setattr(model[number % units], f"p{number}", param)
        chosen = None if dim is None else Shard(dim)
        places[param] = chosen if over == "of the unit" else ShardPlacementResult(chosen, infos[over])
    for unit in model:
        fully_shard(unit, strategy=strategy, shard_placement_fn=places.get)
    fully_shard(model, strategy=strategy)
    assert_same(dict(sorted(stream_weights(model, bucket_bytes=bucket, dtype=dtype))), dict(sorted(plain.items())))


@pytest.mark.slow
@settings(max_examples=15, derandomize=True, phases=[Phase.generate])
@given(
    parameters=st.lists(PARAMETERS, min_size=1, max_size=6),
    units=st.integers(1, 2),
    strategy=st.sampled_from(["zero3", "zero3", "zero1", "ddp"]),
    bucket=st.sampled_from([1, 500, 2**30]),
    dtype=st.sampled_from([None, torch.bfloat16]),
)
def test_stream_weights_yields_full_weights_of_units_on_several_meshes(parameters, units, strategy, bucket, dtype):
    run_ranks(4, stream_from_several_meshes, parameters, units, strategy, bucket, dtype)
