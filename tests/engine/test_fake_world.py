"""One process simulates rank 0 of a large world: native collectives on a fake backend that only counts messages."""

from collections import Counter
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from logged import Operations
from shared_ranks import in_fake_world, on_ranks
from small_models import ONE_AXIS, chain, inputs

from fullshard import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, recording, testing
from fullshard._compat import all_gather_rows
from fullshard.comm.codec import codec_named
from fullshard.comm.native import NativeCollectives
from fullshard.comm.routes import collectives_for
from fullshard.comm.transport import PartSums
from fullshard.engine.registry import units_in
from fullshard.plan.ledger import measure_ledger, predict_ledger
from fullshard.tape.recorder import Origin, Phase

WORLD = 512
ORIGIN = Origin("test", Phase.IDLE)
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "one_gpu.py"


@pytest.mark.parametrize("strategy", ONE_AXIS)
@on_ranks(1)
def test_traffic_and_memory_of_rank_0_of_512_match_formulas(strategy):
    in_fake_world(WORLD)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = chain(partial(fully_shard, strategy=strategy, mp_policy=policy))
    assert all(isinstance(unit.collectives[unit.axes].shard, NativeCollectives) for unit in units_in(model))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        with recording() as record:
            model(inputs(step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    param_groups = [param_group for unit in units_in(model) for param_group in unit.param_groups]
    shards = sum(param_group.plan.layout.shard_numel for param_group in param_groups)
    root = param_groups[0].plan.layout.shard_numel
    gathered = {"ddp": 0, "zero1": shards, "zero2": shards, "zero3": 2 * shards - root}[strategy]
    assert record.sent_bytes("all_gather") == gathered * 2 * (WORLD - 1)
    reductions = Counter(event.name for event in record.collectives())
    assert reductions["all_reduce" if strategy == "ddp" else "reduce_scatter"] == len(param_groups)
    measured = measure_ledger(model, optimizer, lambda: model(inputs(0)).float().square().mean())
    assert measured == predict_ledger(model, activations=measured.activations)
    for param in model.parameters():
        assert param.grad is None
        assert strategy == "ddp" or param.to_local().shape[param.placements[0].dim] <= 1


@on_ranks(1)
def test_unit_with_empty_parameters_trains():
    in_fake_world(WORLD)

    class Empty(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = torch.nn.Parameter(torch.empty(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.rows.sum()

    model = fully_shard(torch.nn.Sequential(fully_shard(Empty()), torch.nn.Linear(4, 4)))
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    assert model[0].rows.grad.full_tensor().shape == (0, 4)


@pytest.mark.parametrize(("strategy", "gather_wire"), [("zero3", "fp8"), ("ddp", None)])
@on_ranks(1)
def test_encoded_communication_bytes_match_codec_sizes(strategy, gather_wire):
    in_fake_world(WORLD)
    policy = MixedPrecisionPolicy(gather_wire=gather_wire, reduce_wire="int8")
    model = chain(partial(fully_shard, strategy=strategy, mp_policy=policy))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        with recording() as record:
            model(inputs(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {event.name for event in record.collectives()} == {"all_gather", "all_to_all"}
    param_groups = [param_group for unit in units_in(model) for param_group in unit.param_groups]
    if strategy != "ddp":
        assert not any(
            param_group.plan.layout.in_place for param_group in param_groups
        )  # all parameters are packed: one message per parameter group
        int8 = [codec_named("int8").nbytes(param_group.plan.layout.pack_numel) for param_group in param_groups]
        assert record.sent_bytes("all_to_all") == sum(int8) * (WORLD - 1)
        assert record.sent_bytes("all_gather") == (2 * sum(int8) - int8[0]) * (WORLD - 1)
    measured = measure_ledger(model, optimizer, lambda: model(inputs(0)).square().mean())
    assert measured == predict_ledger(model, activations=measured.activations)


@on_ranks(1)
def test_clip_grad_norm_gathers_all_norms_in_one_collective():
    """An all-gather into a list of rows would copy each row out of the backend's buffer."""
    in_fake_world(WORLD)
    model = chain(fully_shard)
    model(inputs()).square().mean().backward()
    with Operations(lambda func, types: func.namespace == "c10d") as noting:
        clip_grad_norm_(model.parameters(), 1.0)
    assert noting.names == ["c10d._allgather_base_"]


def collectives_that_do_nothing() -> None:
    in_fake_world(WORLD)
    spec = spec_from_file_location("one_gpu", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    kept = module.send_nothing()
    part, rows = torch.ones(2), torch.zeros(WORLD, 2)
    channel = collectives_for(dist.group.WORLD, torch.device("cpu")).channel(1)
    channel.all_gather([rows.view(-1)], [part], origin=ORIGIN).wait()
    channel.reduce_scatter(PartSums([part], [rows.view(-1)], [2], 1), origin=ORIGIN).wait()
    all_gather_rows(rows, part, dist.group.WORLD)  # the all-gather that other libraries call
    assert not rows.any()
    assert part.all()
    del kept
    all_gather_rows(rows, part, dist.group.WORLD)
    assert rows.all()


def test_one_gpu_benchmark_disables_copies_of_fake_backend():
    testing.run_ranks(1, collectives_that_do_nothing)
