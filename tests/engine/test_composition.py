"""Every cell of the table in docs/composition.md: the result of a combination of parallelisms under a strategy."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from experts import InOneProcess, Model, loss_of, model_of, place, tokens_of, whole_grads, wholes
from pages import page, rows, section
from shared_ranks import end_shared_ranks, run_ranks
from test_meshes import batch_of, on_all_axes, perceptrons
from test_parity_meshes import compared
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import ConfigError, DataParallelMeshDims, ShardPlacementResult, fully_shard
from fullshard.testing.parity import check

STEPS = range(3)
Values = dict[str, Tensor]
HEADING = "What a combination gives"


def mesh_of(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def hybrid(strategy: str) -> bool:
    return strategy.startswith("hsdp")


def by_slice(strategy: str) -> dict[str, Any]:
    return {"mesh": mesh_of(replicate=2, shard=2) if hybrid(strategy) else mesh_of(shard=4), "strategy": strategy}


def by_names(strategy: str) -> dict[str, Any]:
    """Shard over two data axes, one of which is the context parallel axis."""
    replicate = "dp_replicate" if hybrid(strategy) else None
    mesh = mesh_of(dp_replicate=2, dp_shard=1, cp=2) if replicate else mesh_of(dp_shard=2, cp=2, tp=1)
    return {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(("dp_shard", "cp"), replicate), "strategy": strategy}


def trained(model: nn.Module, backward: Any) -> list[Values]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in STEPS:
        backward(step)
        found.append(whole_grads(model))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, wholes(model)]


def mixture(options: dict[str, Any], ep: int, *, one_unit: bool = False) -> tuple[list[Values], list[Values]]:
    """Run a mixture of experts, with the experts shared by `ep` ranks, and compare with one process."""
    strategy, rank = options["strategy"], dist.get_rank()
    replicas = 2 if hybrid(strategy) else 1
    mesh = mesh_of(replicate=replicas, efsdp=4 // ep // replicas, ep=ep)
    over = mesh["replicate", "efsdp"] if replicas > 1 else mesh["efsdp"]
    model: Model = place(model_of(), mesh) if ep > 1 else model_of()
    for block in model.blocks:
        experts = set(block.experts.parameters())
        if ep > 1 and not one_unit:
            fully_shard(block.experts, mesh=over, strategy=strategy)
        choose = partial(chosen, experts, over) if one_unit else None
        fully_shard(block, shard_placement_fn=choose, **options)
    fully_shard(model, **options)
    reference = InOneProcess(alone := model_of(), 4 // ep, ep, replicas)
    return (
        trained(model, lambda step: loss_of(model, tokens_of(step, rank)).backward()),
        trained(alone, lambda step: reference.backward([tokens_of(step, other) for other in range(4)])),
    )


def chosen(experts: set[nn.Parameter], over: DeviceMesh, param: nn.Parameter) -> ShardPlacementResult | None:
    return ShardPlacementResult(None, over) if param in experts else None


def tensor_parallel(strategy: str) -> tuple[list[Values], list[Values]]:
    """Compare with tensor parallelism alone, with gradients averaged manually."""
    mesh = mesh_of(replicate=2, shard=1, tp=2) if hybrid(strategy) else mesh_of(replicate=1, shard=2, tp=2)
    data = mesh["replicate" if hybrid(strategy) else "shard"].get_group()
    model, alone = perceptrons(), perceptrons()
    for item in (*model, *alone):
        parallelize_module(item, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    over = mesh["replicate", "shard"] if hybrid(strategy) else mesh["shard"]
    for block in model:
        fully_shard(block, mesh=over, strategy=strategy)
    fully_shard(model, mesh=over, strategy=strategy)
    index = dist.get_rank() // 2

    def backward(item: nn.Module, step: int) -> None:
        item(batch_of(step).chunk(2)[index]).square().mean().backward()
        if item is alone:
            for param in item.parameters():
                assert param.grad is not None
                local = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
                dist.all_reduce(local, group=data)
                local /= 2

    return trained(model, partial(backward, model)), trained(alone, partial(backward, alone))


def one_mesh(strategy: str) -> tuple[list[Values], list[Values]]:
    """Make everything a `DTensor` on one mesh, including the batch. Compare with one process and the whole batch."""
    mesh = mesh_of(replicate=2, shard=1, tp=2) if hybrid(strategy) else mesh_of(shard=2, cp=1, tp=2)
    dims = DataParallelMeshDims("shard", "replicate") if hybrid(strategy) else DataParallelMeshDims(("shard", "cp"))
    model, alone = perceptrons(), perceptrons()
    on_all_axes(model, mesh)
    for block in model:
        fully_shard(block, mesh=mesh, dp_mesh_dims=dims, strategy=strategy).set_gradient_divide_factor(1.0)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims, strategy=strategy)
    spread = [Replicate() if name == "tp" else Shard(0) for name in mesh.mesh_dim_names or ()]

    def backward(item: nn.Module, step: int) -> None:
        tokens = batch_of(step)
        item(distribute_tensor(tokens, mesh, spread) if item is model else tokens).square().mean().backward()

    return trained(model, partial(backward, model))[:1], trained(alone, partial(backward, alone))[:1]


COMBINATIONS = {
    "data": lambda strategy: mixture(by_slice(strategy), 1),
    "data, context": lambda strategy: mixture(by_names(strategy), 1),
    "data, tensor": tensor_parallel,
    "data, context, tensor: all tensors on one mesh": one_mesh,
    "data, expert": lambda strategy: mixture(by_slice(strategy), 2),
    "data, expert: one unit per block": lambda strategy: mixture(by_slice(strategy), 2, one_unit=True),
    "data, context, expert": lambda strategy: mixture(by_names(strategy), 2, one_unit=True),
}


BY_PARITY: dict[str, dict[str, Any]] = {  # two ranks of data, and the sizes of other axes
    "data, pipeline, tensor": {"pp": 2, "tp": 2},
    "data, pipeline, context, expert": {"pp": 2, "cp": 2, "ep": 2},
    "data, context, tensor, expert": {"cp": 2, "tp": 2, "ep": 2},
}


def verdict(combination: str, strategy: str) -> str:
    try:
        found, expected = COMBINATIONS[combination](strategy)
    except ConfigError:
        return "refused"
    pairs = [(actual[name], item[name]) for actual, item in zip(found, expected, strict=True) for name in item]
    if all(torch.equal(a, b) for a, b in pairs):
        return "bits"
    is_close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)
    return "close" if is_close else "wrong"


def verdicts(strategies: list[str]) -> dict[str, list[str]]:
    return {combination: [verdict(combination, strategy) for strategy in strategies] for combination in COMBINATIONS}


@cache
def table() -> tuple[list[str], dict[str, list[str]]]:
    text = section(page("docs/composition.md"), HEADING)
    head = next(line for line in text.splitlines() if line.startswith("|"))
    strategies = [cell.strip(" `") for cell in head.strip("|").split("|")][1:]
    return strategies, {row[0]: row[1:] for row in rows(text)}


def test_composition_table_has_every_combination():
    assert list(table()[1]) == [*COMBINATIONS, *BY_PARITY]


@pytest.mark.slow
def test_composition_table_cells_match_runs():
    strategies, cells = table()
    for found in run_ranks(4, verdicts, strategies):
        assert found == {name: cells[name] for name in COMBINATIONS}


@pytest.fixture
def _ends_eight_ranks():
    yield
    end_shared_ranks()  # the threads of their many process groups slow down later tests


@pytest.mark.slow
@pytest.mark.parametrize("combination", BY_PARITY)
def test_composition_table_cells_of_longer_combinations_match_runs(combination, monkeypatch, _ends_eight_ranks):
    """Compare with unsharded training on the same ranks, which matches a single process within rounding."""
    monkeypatch.setattr(check, "run_ranks", run_ranks)  # all strategies train in the same processes
    strategies, cells = table()
    report = compared(2, strategies, blocks=2, **BY_PARITY[combination])
    assert report.is_equal, str(report)
    found = {row.strategy: "bits" if row.is_bit_for_bit else "close" for row in report.rows}
    assert [found[strategy] for strategy in strategies] == cells[combination]
