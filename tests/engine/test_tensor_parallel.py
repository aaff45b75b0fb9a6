"""Models with tensor parallelism on one mesh dimension train identically if sharded over the other dimensions."""

import logging
import math
import re
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from parallel_stacks import (
    HIDDEN,
    LENGTH,
    SEQUENCES,
    VOCABULARY,
    WIDTH,
    Block,
    Stack,
    mesh_of,
    parallel,
    shard,
    stack,
)
from shared_ranks import on_ranks, run_ranks
from small_models import memory_is_shared, torch_before, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    NonFiniteError,
    StateDictType,
    check_finite_gradients,
    clip_grad_norm_,
    explain,
    fully_shard,
    recording,
    summon_full_params,
)
from fullshard.checkpoint import load, save
from fullshard.testing import assert_same
from fullshard.wrap import ModuleWrapPolicy

STEPS = range(3)  # units share memory starting with the third step


def data_axes(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["replicate", "shard"] if mesh.ndim == 3 else mesh["shard"]


def part_of_rank(mesh: DeviceMesh | None, tokens: Tensor) -> Tensor:
    """Return this rank's chunk of the sequences on `mesh`, or all sequences if `mesh` is None."""
    if mesh is None:
        return tokens
    place = int((mesh.mesh.flatten() == dist.get_rank()).nonzero())
    return tokens.chunk(mesh.size())[place]


def batch(step: int) -> Tensor:
    """Return the sequences of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)


def average(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average all gradients over `mesh`. Add them in rank order, along the last dimension first."""
    for param in trained(model):
        if isinstance(param.grad, DTensor):
            param.grad = param.grad.redistribute(placements=param.placements)
        local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        for group in reversed(mesh.get_all_groups()):
            terms = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(terms, local.contiguous(), group=group)
            local.copy_(sum(terms[1:], terms[0]))
        local.div_(mesh.size())


def wholes(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in model.named_parameters()}


def whole_grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def train(
    model: Any, mesh: DeviceMesh | None, *, by_hand: bool = False, optimizer: Any = None, steps: range = STEPS
) -> dict[str, Any]:
    """Train each rank on its chunk of the batch and return the results. The last step has two microbatches.

    For a model without units, pass `by_hand` to average the gradients over `mesh`, if there is one.
    """
    optimizer = optimizer or momentum(model)
    for step in steps:
        if step == steps[-1]:
            with nullcontext() if by_hand else model.no_sync():
                loss_of(model, part_of_rank(mesh, batch(100 + step))).backward()
        loss = loss_of(model, part_of_rank(mesh, batch(step)))
        loss.backward()
        if by_hand and mesh is not None:
            average(model, mesh)
        grads = whole_grads(model) if step == steps[-1] else {}
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": loss.detach(), "grads": grads, "params": wholes(model)}


# -- training results -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]  # of the mesh; tensor parallelism uses the last dimension
    sequence: bool  # whether norms and activations are sharded, too (sequence parallelism)
    strategies: tuple[str, ...]


ON_TWO_RANKS = (
    Case((1, 2), False, ("zero3", "ddp")),
    Case((1, 2), True, ("zero3", "zero1")),
    Case((2, 1), True, ("zero3",)),
)
ON_FOUR_RANKS = (
    Case((2, 2), False, ("zero2", "ddp")),
    Case((2, 2), True, ("zero3", "zero1")),
    Case((2, 1, 2), True, ("hsdp",)),
)
ON_EIGHT_RANKS = (Case((2, 2, 2), True, ("hsdp", "hsdp_zero2", "ddp")), Case((2, 2, 2), False, ("hsdp",)))


@pytest.mark.slow
@torch_before((2, 13), "torch 2.11 gives no full tensor of axes that are not in the mesh's order")
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, ON_TWO_RANKS),
        pytest.param(4, ON_FOUR_RANKS, marks=pytest.mark.slow),
        pytest.param(8, ON_EIGHT_RANKS, marks=pytest.mark.slow),
    ],
    ids=["two ranks", "four ranks", "eight ranks"],
)
@on_ranks("world")
def test_sharded_tp_matches_tp_with_manual_gradient_averaging_bitwise(world, cases):
    """With one rank on the data dimensions, this is tensor parallelism alone."""
    plain = train(stack(), None, by_hand=True)["params"]
    for case in cases:
        mesh = mesh_of(*case.shape)
        data = data_axes(mesh)
        alone = train(parallel(mesh["tp"], sequence=case.sequence), data, by_hand=True)
        torch.testing.assert_close(alone["params"], plain, rtol=1e-3, atol=1e-3)
        for strategy in case.strategies:
            model = shard(parallel(mesh["tp"], sequence=case.sequence), data, strategy=strategy)
            assert_same(train(model, data), alone, name=f"{strategy} in {case}")
            assert memory_is_shared(model) == (strategy in ("zero3", "hsdp"))  # otherwise there were too few steps


@pytest.mark.slow
@on_ranks(4)
def test_tp_modules_as_units_and_reversed_mesh_dims_match_bitwise():
    """Test units with tensor parallel hooks, units with `DTensor` inputs and outputs, and reordered mesh dims."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "data"))

    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, VOCABULARY)]
        plan = {
            "0": ColwiseParallel(use_local_output=False),
            "2": RowwiseParallel(output_layouts=Replicate(), use_local_output=False),
            "3": ColwiseParallel(output_layouts=Replicate()),
        }
        return parallelize_module(nn.Sequential(*layers), mesh["tp"], plan)

    def losses(model: Any, by_hand: bool) -> list[Any]:
        optimizer, left = momentum(model), []
        for step in STEPS:
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = model(part_of_rank(mesh["data"], x)).square().mean()
            loss.backward()
            if by_hand:
                average(model, mesh["data"])
            left.append((loss.detach(), whole_grads(model)))
            optimizer.step()
            optimizer.zero_grad()
        return left

    expected = losses(build(), by_hand=True)
    model = build()
    for i in (0, 2, 3):
        fully_shard(model[i], mesh=mesh["data"])
    assert_same(losses(fully_shard(model, mesh=mesh["data"]), by_hand=False), expected)


@pytest.mark.slow
@on_ranks(4)
def test_zero3_matches_ddp_bitwise_with_tp_and_mixed_precision():
    mesh = mesh_of(2, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for strategy in ("zero3", "ddp"):
        model = shard(parallel(mesh["tp"], sequence=True), mesh["shard"], strategy=strategy, mp_policy=policy)
        found.append(train(model, mesh["shard"], steps=range(2)))
        assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert_same(found[1], found[0])
    torch.testing.assert_close(found[0]["params"], wholes(stack()), rtol=0, atol=0.1)


@pytest.mark.slow
@on_ranks(4)
def test_optimizer_created_before_sharding_tp_model_trains_shards():
    mesh = mesh_of(2, 2)
    model = parallel(mesh["tp"], sequence=True)
    optimizer = adamw(model)  # holds `DTensor`s of tensor parallelism that are not sharded
    shard(model, mesh["shard"])
    ready = shard(parallel(mesh["tp"], sequence=True), mesh["shard"])
    expected = train(ready, mesh["shard"], optimizer=adamw(ready), steps=range(1))
    assert_same(train(model, mesh["shard"], optimizer=optimizer, steps=range(1)), expected)


def spoil(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda grad: grad * math.nan)


def spoil_one_part() -> str:
    mesh = mesh_of(2, 2)
    model = shard(parallel(mesh["tp"], sequence=False), mesh["shard"])
    check_finite_gradients(True)
    if dist.get_rank() == 3:  # gradients from here are added up over the tensor parallel ranks
        model.blocks[1].up.register_forward_hook(spoil)
    with pytest.raises(NonFiniteError) as caught:
        loss_of(model, part_of_rank(mesh["shard"], batch(0))).backward()
    return str(caught.value)


def test_every_rank_reports_gradients_that_are_not_finite():
    stated = run_ranks(4, spoil_one_part)
    assert len(set(stated)) == 1
    assert re.search(r"blocks.1.up.weight \(unit blocks.1\): \d+ NaN on rank 3[;.]", stated[0])
    assert re.search(r"blocks.1.norm.weight \(unit blocks.1\): \d+ NaN on rank 2, \d+ NaN on rank 3[;.]", stated[0])
    assert "blocks.2" not in stated[0]


# -- communication ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(4)
def test_tp_halves_communicated_bytes_with_the_same_collectives():
    mesh = mesh_of(2, 2)
    records = []
    for model in (stack(), parallel(mesh["tp"], sequence=False)):
        shard(model, mesh["shard"])
        for step in range(2):
            with recording() as record:
                loss_of(model, part_of_rank(mesh["shard"], batch(step))).backward()
        records.append(record)
    without, along = records
    assert along.names() == without.names()
    for name in ("all_gather", "reduce_scatter"):  # norms and biases of `out` are not split
        assert 0.5 < along.sent_bytes(name) / without.sent_bytes(name) < 0.51


# -- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(4)
def test_clip_grad_norm_of_tp_model_matches_one_process():
    mesh = mesh_of(2, 2)
    tokens = batch(0)[:1]  # the same on all ranks, so a plain model on each rank is the reference
    bits: dict[Any, Tensor] = {}
    for norm_type in (2.0, math.inf):
        loss_of(plain := stack(), tokens).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        for sequence, strategy, clip in (
            (True, "zero3", nn.utils.clip_grad_norm_),  # requires all parameters on one mesh
            (True, "zero3", clip_grad_norm_),
            (True, "ddp", clip_grad_norm_),
            (False, "zero3", clip_grad_norm_),
            (False, "ddp", clip_grad_norm_),
        ):
            model = shard(parallel(mesh["tp"], sequence=sequence), mesh["shard"], strategy=strategy)
            loss_of(model, tokens).backward()
            norm = whole(clip(model.parameters(), 0.1, norm_type))
            torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0)
            if strategy == "zero3":
                torch.testing.assert_close(whole_grads(model), whole_grads(plain), rtol=1e-4, atol=1e-7)
            if clip is clip_grad_norm_:
                assert_same(norm, bits.setdefault((norm_type, sequence), norm))


@pytest.mark.slow
@on_ranks(4)
def test_clip_grad_norm_of_ignored_tp_parameters_matches_one_process():
    """Tensor parallelism leaves these gradients sharded, replicated or partial."""
    mesh, tokens = mesh_of(2, 2), batch(0)[:1]
    loss_of(plain := stack(), tokens).backward()
    model = parallel(mesh["tp"], sequence=True)
    names = ("up.weight", "norm.weight", "out.bias")
    ignored = [model.blocks[1].get_parameter(name) for name in names]
    shard(model, mesh["shard"], ignored_params=ignored)
    loss_of(model, tokens).backward()
    for name, param in zip(names, ignored, strict=True):
        expected = plain.blocks[1].get_parameter(name).grad
        norm = clip_grad_norm_([param], 1e-3)
        torch.testing.assert_close(norm, expected.norm(), rtol=1e-4, atol=0)
        torch.testing.assert_close(whole(param.grad), expected * 1e-3 / expected.norm(), rtol=1e-2, atol=1e-7)


# -- state dicts and checkpoints --------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(4)
def test_state_dict_of_tp_model_has_original_names_and_full_values(tmp_path):
    mesh = mesh_of(2, 2)
    model = shard(parallel(mesh["tp"], sequence=False), mesh["shard"])
    initial, sharded = stack().state_dict(), model.state_dict()
    assert list(sharded) == list(initial)
    assert_same({name: whole(value) for name, value in sharded.items()}, initial)
    placed = {name: (value.device_mesh.mesh_dim_names, value.placements) for name, value in sharded.items()}
    assert placed["norm.weight"] == (("shard",), (Shard(0),))
    assert placed["embedding.weight"] == (("tp", "shard"), (Shard(0), Shard(0)))
    assert placed["blocks.1.down.weight"] == (("tp", "shard"), (Shard(1), Shard(0)))
    assert placed["blocks.1.down.bias"] == (("tp", "shard"), (Replicate(), Shard(0)))
    assert "    down.bias (96,): R on tp, S(0) on shard; here (48,)" in explain(model)

    torch.manual_seed(1)
    others = [shard(parallel(mesh["tp"], sequence=False, model=Stack()), mesh["shard"]) for _ in range(3)]
    others[0].load_state_dict(initial)
    others[1].load_state_dict(sharded)
    others[2].load_state_dict(parallel(mesh["tp"], sequence=False).state_dict())  # tensor parallel, but not sharded
    for other in others:
        assert_same(wholes(other), dict(initial))

    dcp.save(sharded, checkpoint_id=tmp_path)
    plain = {name: torch.empty_like(value) for name, value in initial.items()}
    dcp.load(plain, checkpoint_id=tmp_path)
    assert_same(plain, dict(initial))


def wrapped(mesh: DeviceMesh, model: Stack | None = None) -> FullyShardedDataParallel:
    placed = parallel(mesh["tp"], sequence=True, model=model)
    return FullyShardedDataParallel(placed, device_mesh=mesh["shard"], auto_wrap_policy=ModuleWrapPolicy({Block}))


@pytest.mark.slow
@on_ranks(4)
def test_tp_run_resumes_from_state_dicts_and_checkpoints(tmp_path):
    """Save a run and resume it in another model. The results equal those of the saved run."""
    mesh = mesh_of(2, 2)
    data = mesh["shard"]
    model = wrapped(mesh)
    optimizer = adamw(model)
    train(model, data, optimizer=optimizer, steps=range(1))
    alone = parallel(mesh["tp"], sequence=True)
    train(alone, data, by_hand=True, optimizer=(reference := adamw(alone)), steps=range(1))
    names = {id(param): name for name, param in alone.named_parameters()}
    expected = {names[id(p)]: {key: whole(v) for key, v in state.items()} for p, state in reference.state.items()}
    params = wholes(alone)

    saved = []
    full, sharded = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
    kinds = {full: (FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)), sharded: ()}
    for kind, configs in kinds.items():
        with FullyShardedDataParallel.state_dict_type(model, kind, *configs):
            state, optim_state = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
        if kind is full:  # on the first rank of the mesh only
            assert bool(state) == bool(optim_state) == (dist.get_rank() == 0)
        if state:
            assert_same({name: whole(value) for name, value in state.items()}, params)
            found = optim_state["state"].items()
            assert_same({name: {key: whole(v) for key, v in values.items()} for name, values in found}, expected)
        saved.append((kind, configs, state, optim_state))

    resumed = []
    for kind, configs, state, optim_state in saved:
        other = wrapped(mesh, model=Stack())
        again = adamw(other)
        with FullyShardedDataParallel.state_dict_type(other, kind, *configs):
            other.load_state_dict(state or saved[1][2])
            FullyShardedDataParallel.optim_state_dict_to_load(other, again, optim_state, load_directly=True)
        resumed.append((other, again))
    save(tmp_path, model=model, optimizer=optimizer, step=1)
    other = wrapped(mesh, model=Stack())
    resumed.append((other, adamw(other)))
    load(tmp_path, model=other, optimizer=resumed[-1][1])
    load(tmp_path, model=(plain := Stack()))  # neither tensor parallel nor sharded
    assert_same(wholes(plain), params)
    expected = train(model, data, optimizer=optimizer, steps=range(1, 2))
    for other, again in resumed:
        assert_same(train(other, data, optimizer=again, steps=range(1, 2)), expected)


@pytest.mark.slow
@on_ranks(4)
def test_tp_models_from_meta_device_or_cast_have_same_gradients():
    mesh = mesh_of(2, 2)
    with torch.device("meta"):
        model = Stack()
    shard(parallel(mesh["tp"], sequence=True, model=model), mesh["shard"])
    model.to_empty(device="cpu")
    model.load_state_dict(stack().state_dict())
    ready = shard(parallel(mesh["tp"], sequence=True), mesh["shard"])
    for step in range(2):
        if step:  # cast after the first step
            model.to(torch.float64)
            ready = shard(parallel(mesh["tp"], sequence=True).to(torch.float64), mesh["shard"])
        for each in (model, ready):
            loss_of(each, part_of_rank(mesh["shard"], batch(step))).backward()
        assert_same(whole_grads(model), whole_grads(ready))
        model.zero_grad()


# -- summon_full_params ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(4)
def test_summon_full_params_unshards_tp_parameters_and_keeps_changes():
    mesh = mesh_of(2, 2)
    model = shard(parallel(mesh["tp"], sequence=False), mesh["shard"])
    tokens = batch(0)[:1]
    loss_of(model, tokens).backward()
    loss_of(plain := stack(), tokens).backward()
    warnings: list[Any] = []  # torch may warn if two mesh dims shard one dim and both are gathered
    logging.getLogger("torch.distributed.tensor._redistribute").addFilter(warnings.append)
    with summon_full_params(model, with_grads=True):
        assert warnings == []
        assert not any(isinstance(param, DTensor) for param in model.parameters())
        assert_same(wholes(model), wholes(plain))
        torch.testing.assert_close(whole_grads(model), whole_grads(plain), rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            for param in (*model.parameters(), *plain.parameters()):
                param.mul_(torch.arange(param.numel()).view(param.shape))
                if param.grad is not None:
                    param.grad.fill_(2)
    assert_same(wholes(model), wholes(plain))
    assert all((grad == 2).all() for grad in whole_grads(model).values())


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def own_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


class Exchange(torch.autograd.Function):
    """Apply the collective `there` in forward, and the collective `back` to gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, there: Any, back: Any) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


class Experts(nn.Module):
    """Four experts. Each of two ranks on a mesh axis holds two. Every rank's tokens go to all of them."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights.to_local() if isinstance(self.weights, DTensor) else self.weights
        if self.group is None:
            return x + torch.stack([(x @ weights[i]).tanh() for i in range(4)]).sum(0)
        tokens = Exchange.apply(x, self.group, gathered, own_sum)
        term = torch.stack([(tokens @ weights[i]).tanh() for i in range(len(weights))]).sum(0)
        return x + Exchange.apply(term, self.group, own_sum, gathered)


@pytest.mark.parametrize("divided_by_hand", [False, True])
@on_ranks(4)
def test_expert_gradients_are_averaged_over_all_tokens(divided_by_hand):
    """Dense layers are sharded over four ranks, experts over two mesh dims. Both average gradients over all tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(None), nn.Linear(WIDTH, WIDTH))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(mesh.get_group("ep")), nn.Linear(WIDTH, WIDTH))
    experts = model[1]
    experts.weights = nn.Parameter(distribute_tensor(experts.weights.detach(), mesh["ep"], [Shard(0)]))
    fully_shard(experts, mesh=mesh["efsdp"])
    fully_shard(model)
    if divided_by_hand:
        experts.set_gradient_divide_factor(8.0)
    rank, factor = dist.get_rank(), 2 if divided_by_hand else 1
    for step in STEPS:
        batches = [torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * step + i)) for i in range(4)]
        model(batches[rank]).square().mean().backward()
        plain(torch.cat(batches)).square().mean().backward()
        torch.testing.assert_close(experts.weights.grad.full_tensor() * factor, plain[1].weights.grad)
        torch.testing.assert_close(model[2].weight.grad.full_tensor(), plain[2].weight.grad)
        model.zero_grad()
        plain.zero_grad()
