"""Mixture of experts: expert-parallel experts, sharded over the other mesh dimensions, match a single process."""

from __future__ import annotations

import copy
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from experts import (
    InOneProcess,
    Model,
    expert_mesh,
    is_expert,
    loss_of,
    model_of,
    place,
    tokens_of,
    whole_grads,
    wholes,
)
from logged import Logged
from shared_ranks import on_ranks, run_ranks
from small_models import torch_before
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fullshard import (
    FSDPMeshInfo,
    FullyShardedDataParallel,
    ShardPlacementResult,
    clip_grad_norm_,
    explain,
    fully_shard,
    recording,
    summon_full_params,
    take_part,
)
from fullshard.checkpoint import load, save
from fullshard.engine.registry import is_unit
from fullshard.optim import Muon
from fullshard.plan.ledger import predict_ledger
from fullshard.testing import assert_same

STEPS = range(4)  # units share memory from the third step on


def nested(model: Model, mesh: DeviceMesh, dim: int | None = None, **options: Any) -> Model:
    """Shard the experts of each block as a separate unit, nested in the unit of the block."""
    choose = None if dim is None else lambda _: Shard(dim)
    for block in model.blocks:
        fully_shard(block.experts, mesh=mesh["efsdp"], shard_placement_fn=choose, **options)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def joint(model: Model, mesh: DeviceMesh, dim: int | None = None, **options: Any) -> Model:
    """Shard each block as one unit whose parameters are on two meshes."""
    placement = None if dim is None else Shard(dim)
    result = ShardPlacementResult(placement, FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0))
    for block in model.blocks:
        experts = set(block.experts.parameters())
        fully_shard(block, shard_placement_fn=lambda param, its=experts: result if param in its else None, **options)
    return fully_shard(model, **options)


SHARDED = {"nested": nested, "joint": joint}


# -- comparison with one process --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "efsdp", "ep", "dim", "strategy"),
    [
        ("nested", 2, 2, None, "zero3"),
        ("joint", 2, 2, None, "zero3"),
        ("joint", 4, 1, 1, "zero2"),
        pytest.param(
            "joint", 1, 4, None, "zero1", marks=torch_before((2, 13), "torch 2.11 gives no full tensor of these")
        ),
        ("nested", 2, 2, 1, "ddp"),
    ],
)
@on_ranks(4)
def test_moe_training_matches_single_process_bitwise(kind, efsdp, ep, dim, strategy):
    mesh, rank = expert_mesh(efsdp, ep), dist.get_rank()
    model = SHARDED[kind](place(model_of(), mesh), mesh, dim, strategy=strategy)
    alone, together = model_of(), model_of()
    reference = InOneProcess(alone, efsdp, ep)
    optimizers = [torch.optim.AdamW(item.parameters(), lr=1e-2) for item in (model, alone, together)]
    for step in STEPS:
        batches = [tokens_of(step, other) for other in range(efsdp * ep)]
        loss_of(model, batches[rank]).backward()
        reference.backward(batches)
        loss_of(together, torch.cat(batches)).backward()
        assert_same(whole_grads(model), whole_grads(alone))
        if step == 0:  # one process sums over all tokens in a different order
            torch.testing.assert_close(whole_grads(model), whole_grads(together), rtol=1e-5, atol=1e-8)
        norms = [clip_grad_norm_(item.parameters(), 0.05) for item in (model, alone)]
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
        for param, other in zip(model.parameters(), alone.parameters(), strict=True):
            other.grad = param.grad.full_tensor()  # clipped by a norm that may differ in its last bit
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(wholes(model), wholes(alone))


# -- one unit, several meshes -----------------------------------------------------------------------------------------


def step(model: Model, optimizer: torch.optim.Optimizer, number: int) -> dict[str, Tensor]:
    loss_of(model, tokens_of(number, dist.get_rank())).backward()
    grads = whole_grads(model)
    optimizer.step()
    optimizer.zero_grad()
    return grads


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "dim"), [("zero3", None), ("zero3", 1), ("zero1", None)])
@on_ranks(4)
def test_unit_with_two_meshes_matches_two_nested_units_bitwise(strategy, dim):
    mesh = expert_mesh()
    models = [shard(place(model_of(), mesh), mesh, dim, strategy=strategy) for shard in (nested, joint)]
    optimizers = [adamw(model) for model in models]
    records = []
    for number in STEPS:
        found = []
        for model, optimizer in zip(models, optimizers, strict=True):
            with recording() as record:
                found.append(step(model, optimizer, number))
            records.append(record)
        assert_same(found[1], found[0])
    assert_same(wholes(models[1]), wholes(models[0]))
    gathers = [
        [(collective.origin.unit, len(collective.ranks)) for collective in record.collectives("all_gather")]
        for record in records[-2:]
    ]
    if strategy == "zero3":  # nested units gather in turn; one unit gathers both meshes, a block ahead
        assert ("blocks.1.experts", 2) in gathers[0]
        at = gathers[1].index(("blocks.1", 4))
        assert gathers[1][at : at + 2] == [("blocks.1", 4), ("blocks.1", 2)]
        assert {unit for unit, _ in gathers[1]} == {"", "blocks.0", "blocks.1"}
    assert_same(*(clip_grad_norm_(model.parameters(), 1.0) for model in models))
    assert "experts.up (4, 16, 24): S(0) on ep, " in explain(models[1])
    assert predict_ledger(models[0]).parameters == predict_ledger(models[1]).parameters


@pytest.mark.slow
@on_ranks(4)
def test_unit_with_two_meshes_supports_deepcopy_cast_and_checkpoints(tmp_path):
    """Test deep copies, casts, state dicts, full parameters and checkpoints."""
    mesh = expert_mesh()
    model = joint(place(model_of(), mesh), mesh)
    step(model, adamw(model), 0)
    for block in model.blocks:
        block.group = None  # a process group cannot be copied
    twin = copy.deepcopy(model)
    for block in (*model.blocks, *twin.blocks):
        block.group = mesh.get_group("ep")
    other = nested(place(model_of(), mesh), mesh)
    other.load_state_dict(model.state_dict())
    plain = model_of()
    plain.load_state_dict(wholes(model))
    with summon_full_params(model):
        assert_same({name: param.detach() for name, param in model.named_parameters()}, dict(plain.state_dict()))
    optimizers = [adamw(item) for item in (model, twin, other)]
    found = [step(item, optimizer, 1) for item, optimizer in zip((model, twin, other), optimizers, strict=True)]
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
    save(tmp_path, model=model, optimizer=optimizers[0], step=1)
    resumed = nested(place(model_of(), mesh), mesh)
    load(tmp_path, model=resumed, optimizer=(again := adamw(resumed)))
    load(tmp_path, model=plain)
    assert_same(wholes(plain), wholes(model))
    assert_same(step(resumed, again, 2), step(model, optimizers[0], 2))
    assert_same(wholes(resumed), wholes(model))
    model.double()
    twin.double()
    twin.load_state_dict(model.state_dict())
    for item in (model, twin):
        loss_of(item, tokens_of(3, dist.get_rank()).double()).backward()
    assert_same(whole_grads(twin), whole_grads(model))


# -- the gradient divisor ---------------------------------------------------------------------------------------------


@on_ranks(4)
def test_expert_gradients_use_dense_divisor_with_tensor_parallelism():
    """The divisor is the size of the root's mesh, although each tensor-parallel rank has different tokens."""
    world = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    mesh = expert_mesh()
    model = place(model_of(), mesh)
    for block in model.blocks:
        fully_shard(block.experts, mesh=mesh["efsdp"])
        fully_shard(block, mesh=world["dp"])
    fully_shard(model, mesh=world["dp"])
    loss_of(model, tokens_of(0, dist.get_rank())).backward()
    reference = InOneProcess(plain := model_of(), 2, 2)
    reference.backward([tokens_of(0, rank) for rank in range(4)])
    expected = {name: grad * 4 for name, grad in whole_grads(plain).items() if is_expert(name)}  # a sum: dp is 1
    found = whole_grads(model)
    assert_same({name: found[name] for name in expected}, expected)


def units_on_fewer_ranks(own: int, factor: float | None, front: str) -> tuple[nn.Module, list[nn.Module]]:
    """Build four layers over all ranks, two of them as units on `own` ranks. `front` selects the user interface."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    mesh = init_device_mesh("cpu", (dist.get_world_size() // own, own), mesh_dim_names=("outer", "inner"))["inner"]
    if front == "wrapper":
        for index in (1, 2):
            model[index] = FullyShardedDataParallel(model[index], process_group=mesh.get_group())
        root: nn.Module = FullyShardedDataParallel(model)
        units = [model[1], model[2]]
    elif front == "placements":
        smaller = ShardPlacementResult(None, FSDPMeshInfo(mesh, shard_mesh_dim=0))
        chosen = {*model[1].parameters(), *model[2].parameters()}
        fully_shard(model, shard_placement_fn=lambda param: smaller if param in chosen else None)
        root, units = model, [model]
    else:
        units = [fully_shard(model[index], mesh=mesh) for index in (1, 2)]
        root = fully_shard(model)
    if factor is not None:
        for unit in units:
            unit.set_gradient_divide_factor(factor)
    return root, units


def warn_of_smaller_divisors() -> None:
    world = dist.get_world_size()
    for own in (1, 2, 4):
        for front in ("meshes", "wrapper", "placements"):
            with Logged(logging.WARNING) as messages:
                root, _ = units_on_fewer_ranks(own, None, front)
                for _ in range(3):
                    root(torch.ones(2, 3)).sum().backward()
            assert len(messages) == (own < world), (own, front, messages)
            for message in messages:
                assert "1.weight (and 3 parameters like it)" in message, message
                assert f"over {own} ranks" in message and f"divided by {world}." in message, message
                assert f"torch's FSDP divides by {own}." in message and "set_gradient_divide_factor" in message


def follow_torch_by_factor() -> None:
    for own in (1, 2):
        with Logged(logging.WARNING) as messages:
            root, units = units_on_fewer_ranks(own, own, "meshes")
            data = torch.full((2, 3), 1.0 + dist.get_rank())
            root(data).sum().backward()
        assert not messages
        torch.manual_seed(3)
        plain = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        plain(data).sum().backward()
        mesh = units[0].weight.device_mesh
        for name, param in plain.named_parameters():
            if name.split(".")[0] in "12":
                dist.all_reduce(param.grad, group=mesh.get_group())
                expected = param.grad / own
                assert torch.allclose(root.get_parameter(name).grad.full_tensor(), expected, rtol=1e-6), name


def state_nothing_of_experts() -> None:
    with Logged(logging.WARNING) as messages:
        for form in (nested, joint):
            model = form(place(model_of(), mesh := expert_mesh()), mesh)
            loss_of(model, tokens_of(0, dist.get_rank())).backward()
    assert not messages


@pytest.mark.parametrize("task", [warn_of_smaller_divisors, follow_torch_by_factor, state_nothing_of_experts])
def test_plain_parameters_on_fewer_ranks_than_root_warn_about_divisor(task):
    run_ranks(4, task)


# -- Muon -------------------------------------------------------------------------------------------------------------


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


STACKS: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    ((4, 12, 8), (Shard(0), Shard(0))),  # each rank has one whole expert
    ((5, 12, 8), (Shard(0), Shard(1))),  # two ranks share one expert
    ((6, 9, 14), (Shard(0), Shard(2))),
    ((3, 7, 5), (Replicate(), Shard(0))),
    ((4, 8, 12), (Shard(1), Shard(1))),
    ((13, 9), (Shard(0), Shard(0))),  # sharded by tensor parallelism, then by the engine
    ((9, 13), (Shard(1), Shard(0))),
    ((10, 6), (Shard(0), Replicate())),
    ((4, 6), (Replicate(), Replicate())),
]


def step_stacks() -> list[int]:
    """Check every matrix of every stack against a separate `torch.optim.Muon`. Return the counts of this rank."""
    mesh = expert_mesh()
    wholes, placed = ([numbers(shape, i) for i, (shape, _) in enumerate(STACKS)] for _ in range(2))
    params = [
        nn.Parameter(distribute_tensor(value, mesh, placements))
        for value, (_, placements) in zip(placed, STACKS, strict=True)
    ]
    alone = [[nn.Parameter(matrix.clone()) for matrix in whole.view(-1, *whole.shape[-2:])] for whole in wholes]
    own = Muon(params, lr=0.02)
    peer = torch.optim.Muon([matrix for stack in alone for matrix in stack], lr=0.02)
    for number in range(3):
        for i, (param, stack) in enumerate(zip(params, alone, strict=True)):
            grad = numbers(tuple(param.shape), 100 * number + i)
            param.grad = distribute_tensor(grad, mesh, param.placements)
            for matrix, its in zip(stack, grad.view(-1, *grad.shape[-2:]), strict=True):
                matrix.grad = its.clone()
        with recording() as record:
            own.step()
        peer.step()
        for param, stack in zip(params, alone, strict=True):
            expected = torch.stack([matrix.detach() for matrix in stack]).view(param.shape)
            assert_same(param.full_tensor().detach(), expected)
    done = [event.origin.unit for event in record.events if event.name == "orthogonalize"]
    return [done.count(f"parameter {i}") for i in range(len(STACKS))]


def test_muon_orthogonalizes_each_matrix_once_and_matches_torch_muon():
    counts = run_ranks(4, step_stacks)
    assert [sum(each) for each in zip(*counts, strict=True)] == [
        shape[0] if len(shape) == 3 else 1 for shape, _ in STACKS
    ]
    assert [rank[0] for rank in counts] == [1] * 4


@pytest.mark.slow
@on_ranks(4)
def test_muon_training_of_moe_matches_single_process_bitwise():
    mesh = expert_mesh()
    model, plain = joint(place(model_of(), mesh), mesh), model_of()
    matrices = [[param for param in item.blocks.parameters() if param.ndim > 1] for item in (model, plain)]
    optimizers = [Muon(params, lr=0.02) for params in matrices]
    reference = InOneProcess(plain, 2, 2)
    for number in range(3):
        loss_of(model, tokens_of(number, dist.get_rank())).backward()
        reference.backward([tokens_of(number, rank) for rank in range(4)])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.zero_grad()
        plain.zero_grad()
    assert_same(wholes(model), wholes(plain))


# -- ranks without local work -----------------------------------------------------------------------------------------


@on_ranks(4)
def test_experts_without_tokens_have_gradients_of_zeros():
    """All tokens go to one expert. The gradients of the other experts are zero."""
    mesh, rank = expert_mesh(), dist.get_rank()
    model, alone = joint(place(model_of(), mesh), mesh), model_of()
    for item in (model, alone):
        for block in item.blocks:
            with summon_full_params(item) if item is model else nullcontext(), torch.no_grad():
                block.router.weight[:3].zero_()
                block.norm.weight.zero_()
                block.norm.bias.fill_(1.0)
                block.router.weight[3].fill_(1.0)
    reference = InOneProcess(alone, 2, 2)
    for number in range(2):
        loss_of(model, tokens_of(number, rank)).backward()
        reference.backward([tokens_of(number, other) for other in range(4)])
        found = whole_grads(model)
        assert_same(found, whole_grads(alone))
        assert all(not found[name][:3].any() and found[name][3].any() for name in found if is_expert(name))
        model.zero_grad()


class Tower(nn.Module):
    """Blocks between an embedding and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x).mean()


class WithTower(nn.Module):
    """A model with a loss on words, plus a loss on images if there are any."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.words = nn.Linear(8, 8)

    def forward(self, words: Tensor, images: Tensor | None) -> Tensor:
        loss = self.words(words).square().mean()
        if images is not None:
            return loss + self.tower(images)
        return loss + take_part(self.tower) if is_unit(self.tower) else loss


@pytest.mark.parametrize("strategy", ["zero3", "zero1", "ddp"])
@on_ranks(2)
def test_ranks_without_images_contribute_zero_gradients_to_vision_tower(strategy):
    """A different set of ranks has images in each step."""
    rank, ranks = dist.get_rank(), range(2)
    torch.manual_seed(0)
    plain, model = (WithTower() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    for block in model.tower.blocks:
        fully_shard(block, strategy=strategy)
    fully_shard(model.tower, strategy=strategy).set_reduce_scatter_unused_params(True)
    fully_shard(model, strategy=strategy)
    optimizers = [torch.optim.AdamW(item.parameters(), lr=0.01) for item in (model, plain)]
    for number, having in enumerate(((0, 1), (0,), (1,), (), (0,), (1,), (0, 1))):
        batches = [(numbers((4, 8), 10 * number + r), numbers((3, 8), 99 * number + r)) for r in ranks]
        local = [(words, images if r in having else None) for r, (words, images) in enumerate(batches)]
        model(*local[rank]).backward()
        sums: dict[str, Tensor] = {name: torch.zeros_like(param) for name, param in plain.named_parameters()}
        for each in local:
            plain(*each).backward()
            for name, param in plain.named_parameters():
                sums[name] += 0 if param.grad is None else param.grad
            plain.zero_grad()
        for name, param in plain.named_parameters():
            param.grad = sums[name] / 2
        assert_same(whole_grads(model), {name: param.grad for name, param in plain.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        model(*local[rank])
    assert_same(wholes(model), wholes(plain))
