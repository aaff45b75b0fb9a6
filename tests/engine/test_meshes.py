"""Device meshes of any shape: dimensions selected by name, flattened dimensions, and other parallelisms."""

from __future__ import annotations

import time
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_ranks import on_ranks, run_ranks
from small_models import chain, inputs, take_step, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import DataParallelMeshDims, explain, fully_shard, replicate
from fullshard.engine.hooks import runtime_of
from fullshard.engine.registry import units_in
from fullshard.liveness.rank_progress import here
from fullshard.testing import assert_same


def trained(model: nn.Module, place: int, *, steps: int = 3) -> list[Any]:
    """Return the losses, gradients and parameters of some steps. The rank trains on chunk `place` of 4."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found: list[Any] = []
    for step in range(steps):
        loss = model(inputs(step).repeat(2, 1).chunk(4)[place]).square().mean()
        loss.backward()
        found += [loss.detach(), [whole(param.grad) for param in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, [whole(param) for param in model.parameters()]]


def by_name(mesh: DeviceMesh, shard: Any = None, replicate: Any = None, **options: Any) -> Any:
    return partial(fully_shard, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard, replicate), **options)


@pytest.mark.slow
@on_ranks(4)
def test_mesh_dims_by_name_match_mesh_with_only_those_dims_bitwise():
    """Plain parameters are sharded over the named dimensions as over a mesh that has only those dimensions."""
    rank = dist.get_rank()
    flat, hybrid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    full = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_shard", "cp", "tp"))
    parts = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
    separate = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_shard", "tp", "cp"))
    zero3 = trained(chain(partial(fully_shard, mesh=flat)), rank)
    hsdp = trained(chain(partial(fully_shard, mesh=hybrid, strategy="hsdp")), rank)
    ddp = trained(chain(partial(fully_shard, mesh=flat, strategy="ddp")), rank)
    assert_same(trained(chain(by_name(full, ("dp_shard", "cp"))), rank), zero3)
    assert_same(trained(chain(by_name(full, ("cp", "dp_shard"))), rank), zero3)
    assert_same(trained(chain(by_name(separate, ("dp_shard", "cp"))), rank), zero3)
    model = chain(by_name(parts, ("dp_shard", "cp"), "dp_replicate"))
    assert_same(trained(model, rank), hsdp)
    assert next(model.parameters()).device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard_cp")
    assert "mesh: dp_replicate 2 x dp_shard_cp 2" in explain(model)
    assert_same(trained(chain(by_name(full, None, ("dp_shard", "cp"))), rank), ddp)
    assert_same(trained(chain(by_name(parts, "cp", ("dp_replicate", "dp_shard"), strategy="hsdp")), rank), hsdp)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def perceptrons() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Perceptron(), Perceptron())


def batch_of(step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


@pytest.mark.slow
@on_ranks(4)
def test_tensor_parallelism_with_named_dims_matches_mesh_slice_bitwise():
    """Compare data-parallel dimensions given by name with a mesh slice. Tensor parallelism is on another dimension."""
    full = init_device_mesh("cpu", (1, 2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp", "tp"))
    sliced = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ways = {
        "slice": (sliced, {"mesh": sliced["dp"]}),
        "names": (full, {"mesh": full, "dp_mesh_dims": DataParallelMeshDims(("dp_shard", "cp"))}),
        "hybrid": (full, {"mesh": full, "dp_mesh_dims": DataParallelMeshDims(("dp_shard", "cp"), "dp_replicate")}),
    }
    found = {}
    for name, (mesh, options) in ways.items():
        model = perceptrons()
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, **options)
        fully_shard(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(3):
            take_step(optimizer, model(batch_of(step).chunk(2)[dist.get_rank() // 2]).square().mean())
        found[name] = {key: whole(value) for key, value in model.state_dict().items()}
    assert_same(found["names"], found["slice"])
    assert_same(found["hybrid"], found["slice"])


def on_all_axes(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make every parameter a `DTensor` on all dimensions of `mesh`: sharded over `tp`, replicated over the others."""
    cuts = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    for name, param in list(model.named_parameters()):
        owner, _, own = name.rpartition(".")
        on_tp = cuts.get(".".join(name.split(".")[-2:]), Replicate())
        placements = [on_tp if axis == "tp" else Replicate() for axis in mesh.mesh_dim_names or ()]
        placed = distribute_tensor(param.detach(), mesh, placements)
        setattr(model.get_submodule(owner), own, nn.Parameter(placed))


@pytest.mark.parametrize(
    ("names", "shape", "axes"),
    [
        (("dp_shard", "cp", "tp"), (2, 1, 2), ("tp", "dp_shard_cp")),
        (("dp_shard", "cp", "tp"), (2, 2, 1), ("tp", "dp_shard_cp")),
        (("dp_replicate", "dp_shard", "tp"), (2, 1, 2), ("tp", "dp_replicate", "dp_shard")),
        (("dp_shard",), (4,), ("dp_shard",)),
    ],
)
@on_ranks(4)
def test_fully_shard_accepts_dtensors_on_all_mesh_dims(names, shape, axes):
    """All tensors are `DTensor`s on one mesh, so the loss is already the mean over all sequences."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    replicate = "dp_replicate" if "dp_replicate" in names else None
    data = [Replicate() if name == "tp" else Shard(0) for name in names]
    model, plain = perceptrons(), perceptrons()
    on_all_axes(model, mesh)
    visited = [param.placements for param in model.parameters()]
    dims = DataParallelMeshDims(tuple(name for name in names if name not in ("tp", replicate)), replicate)
    for block in model:
        fully_shard(block, mesh=mesh, dp_mesh_dims=dims)
        block.set_gradient_divide_factor(1.0)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    model.unshard()
    model[0].unshard()
    shown = list(model[0].parameters())
    assert [param.placements for param in shown] == visited[: len(shown)]
    assert all(param.device_mesh == mesh for param in shown)
    model[0].reshard()
    assert model[0].up.weight.device_mesh.mesh_dim_names == axes
    optimizers = [torch.optim.AdamW(item.parameters(), lr=0.01) for item in (model, plain)]
    for step in range(3):
        tokens = batch_of(step)
        model(distribute_tensor(tokens, mesh, data)).square().mean().backward()
        plain(tokens).square().mean().backward()
        own, peer = ([whole(param.grad) for param in item.parameters()] for item in (model, plain))
        torch.testing.assert_close(own, peer, rtol=1e-4, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


# -- all-reduce hooks -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(4)
def test_all_reduce_hook_can_modify_reduced_gradients():
    """A hook that doubles the sums doubles the gradients. It is called once per parameter group and gradient sync."""
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in ({}, {"strategy": "zero1"}, {"strategy": "ddp"}, {"mesh": hybrid, "strategy": "hsdp"}):
        plain, model = (chain(partial(fully_shard, **options)) for _ in range(2))
        runtime_of(model)  # this names the units
        called: dict[str, list[tuple[int, torch.dtype]]] = {}
        for unit in units_in(model):

            def double(sums: Tensor, calls: Any = called.setdefault(unit.name, [])) -> None:  # noqa: B008
                calls.append((sums.ndim, sums.dtype))
                sums.mul_(2)

            unit.module.set_all_reduce_hook(double)
        for item in (plain, model):
            with item.no_sync():
                item(inputs(dist.get_rank())).square().mean().backward()
            if options.get("strategy") == "hsdp":  # the all-reduce and the hook are deferred
                item.set_requires_all_reduce(False)
                item(inputs(dist.get_rank())).square().mean().backward()
                item.set_requires_all_reduce(True)
        assert not any(called.values())
        for _ in range(2):  # the second backward accumulates into existing gradients
            for element in (plain, model):
                element(inputs(dist.get_rank())).square().mean().backward()
        doubled = [2 * whole(param.grad) for param in plain.parameters()]
        assert_same([whole(param.grad) for param in model.parameters()], doubled)
        assert {call for calls in called.values() for call in calls} == {(1, torch.float32)}
        if options.get("strategy") != "ddp":
            assert {len(calls) for calls in called.values()} == {2}


@on_ranks(2)
def test_exception_in_all_reduce_hook_does_not_break_later_backward():
    model = chain(fully_shard)

    def fail(sums: Tensor) -> None:
        raise OSError("no network")

    model.set_all_reduce_hook(fail)
    with pytest.raises(OSError, match="no network"):
        model(inputs()).square().mean().backward()
    model.set_all_reduce_hook(lambda sums: None)
    model.zero_grad()
    expected = chain(fully_shard)
    for item in (model, expected):
        item(inputs()).square().mean().backward()
    assert_same(*([whole(param.grad) for param in item.parameters()] for item in (model, expected)))


@on_ranks(2)
def test_replicate_matches_ddp_strategy_bitwise():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    found = []
    for shard in (
        partial(fully_shard, strategy="ddp"),
        replicate,
        partial(replicate, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp")),
    ):
        found.append(trained(chain(shard), dist.get_rank()))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


# -- two models in two threads ----------------------------------------------------------------------------------------


def train_in_threads() -> list[Any]:
    """Train two models over separate process groups. Each rank starts with a collective of a different model."""
    groups = [dist.new_group(range(2), backend="gloo") for _ in range(2)]
    # Without names, torch treats both as the same mesh.
    meshes = [
        DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,)) for group, name in zip(groups, "ab", strict=True)
    ]
    models = [chain(partial(fully_shard, mesh=mesh)) for mesh in meshes]
    first = dist.get_rank()
    found: dict[int, list[Any]] = {}

    def train(number: int) -> None:
        found[number] = trained(models[number], first)

    threads = [Thread(target=train, args=(number,), daemon=True) for number in range(2)]
    threads[first].start()
    while not any(str(task).startswith("meeting of the ranks") for task in here.waits()):
        time.sleep(0.001)  # the other rank reaches this collective once both of its threads run
    threads[1 - first].start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), "the threads of two ranks wait for one another"
    assert_same(found[0], found[1])
    return found[0]


@pytest.mark.slow
def test_two_models_train_in_two_threads():
    """No rank holds a lock that both models need while it waits for a peer."""
    alone = run_ranks(2, train_alone)
    assert_same(run_ranks(2, train_in_threads), alone)


def train_alone() -> list[Any]:
    return trained(chain(partial(fully_shard, mesh=init_device_mesh("cpu", (2,)))), dist.get_rank())
