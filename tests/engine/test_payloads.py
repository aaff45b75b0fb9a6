"""Weights that define their all-gather payload train as in one process, with the expected traffic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared_ranks import on_ranks, run_ranks
from small_models import ONE_AXIS, Shard, agree_with_plain, leave, take_step
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Split
from torch.testing._internal.two_tensor import TwoTensor
from wrapped_weights import DecodedWeight, LowLinear, Operand, Product, Weight, decode, encode

from fullshard import MixedPrecisionPolicy, fully_shard, recording, summon_full_params
from fullshard.checkpoint import load, save
from fullshard.engine.registry import units_in
from fullshard.testing import assert_same

WIDTH, HIDDEN = 32, 67  # 67 rows divide by neither 2 nor 3
STEPS = 5  # units share memory from the third on


class Block(nn.Module):
    def __init__(self, kind: type[Weight]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = LowLinear(WIDTH, HIDDEN, kind)
        self.frozen = LowLinear(WIDTH, HIDDEN, kind, trained=False)
        self.down = LowLinear(HIDDEN, WIDTH, kind)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.gelu(self.up(y) + self.frozen(y)))


def model_of(shard: Shard, kind: type[Weight] = Weight, **options: Any) -> Any:
    """Three blocks, each a unit, and a plain head; always of the same weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(kind) for _ in range(3)), nn.Linear(WIDTH, 5))
    for block in list(model)[:3]:
        shard(block, **options)
    return shard(model, **options)


def inputs(number: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(number))


def values_of(tensor: Tensor | None) -> Tensor | None:
    """Plain values, gathered."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.values if isinstance(tensor, Weight) else tensor


def whole_values(model: nn.Module) -> dict[str, Any]:
    return {name: values_of(param.detach()).clone() for name, param in model.named_parameters()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, foreach=False)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int, *, microbatches: int = 1) -> list[Any]:
    losses = []
    for i in range(microbatches):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(i == microbatches - 1)
        loss = model(inputs(10 * number + i)).square().mean() / microbatches
        loss.backward()
        losses.append(loss.detach())
    grads = {name: values_of(param.grad) for name, param in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    return [losses, grads]


def learn(kind: type[Weight], microbatches: int, shard: Shard) -> list[Any]:
    model = model_of(shard, kind)
    optimizer = optimizer_of(model)
    traces = [step(model, optimizer, number, microbatches=microbatches) for number in range(STEPS)]
    return [*traces, whole_values(model)]


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@on_ranks("world")
def test_wrapped_weights_match_plain_training_bitwise(world):
    strategies = ONE_AXIS if world == 2 else ("zero3",)
    for kind in (Weight, DecodedWeight):
        for microbatches in (1, 2):
            agree_with_plain(partial(learn, kind, microbatches), *strategies)


@pytest.mark.slow
@on_ranks(4)
def test_wrapped_weights_train_identically_under_hybrid_strategies():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for kind in (Weight, DecodedWeight):
        first, *others = (
            learn(kind, 1, partial(fully_shard, strategy=item, mesh=mesh)) for item in ("hsdp", "hsdp_zero2")
        )
        for other in others:
            assert_same(other, first)
    assert_same(learn(Weight, 1, partial(fully_shard, mesh=mesh, strategy="hsdp"))[0], learn(Weight, 1, leave)[0])


@pytest.mark.slow
@on_ranks(3)
def test_strategies_match_bitwise_with_wrapped_weights_on_three_ranks():
    first, *others = (learn(Weight, 1, partial(fully_shard, strategy=strategy)) for strategy in ONE_AXIS)
    for other in others:
        assert_same(other, first)


class CutLinear(nn.Module):
    """A layer with some rows on each rank of tensor parallelism."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight)


def learn_rows(model: nn.Module) -> list[Tensor]:
    optimizer = optimizer_of(model)
    losses = []
    for number in range(STEPS):
        losses.append(take_step(optimizer, model(inputs(number)).square().mean()))
    return losses


@on_ranks(4)
def test_wrapped_weights_match_plain_training_with_tensor_parallelism():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows = torch.randn(HIDDEN, WIDTH, generator=torch.Generator().manual_seed(mesh["tp"].get_local_rank()))
    placed = DTensor.from_local(Weight(rows.clone()), mesh["tp"], [Split(0)], run_check=False)
    assert_same(learn_rows(fully_shard(CutLinear(placed), mesh=mesh["dp"])), learn_rows(CutLinear(Weight(rows))))


# -- cost -------------------------------------------------------------------------------------------------------------


def traffic(strategy: str) -> None:
    world = dist.get_world_size()
    model = model_of(partial(fully_shard, strategy=strategy))
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    with recording() as record:
        step(model, optimizer, 1)
    part = -(-HIDDEN // world)  # rows
    frozen = part * (WIDTH + 4)
    trained = frozen + -(-WIDTH // world) * (HIDDEN + 4)
    found = [event.sent_bytes // (world - 1) for event in record.collectives("all_gather") if event.origin.unit == "0"]
    visits = {"zero3": 2, "zero2": 1, "zero1": 1, "ddp": 0}[strategy]
    visits_of_frozen = 0 if strategy == "zero1" else visits  # what is kept and never changes is not sent again
    assert len(found) == 2 * visits + visits_of_frozen  # two groups of payloads, and one of plain parameters
    for wanted, payloads, times in ((frozen, 2, visits_of_frozen), (trained, 4, visits)):
        room = 16 * payloads  # each starts at a multiple of 16 bytes in the pack
        assert sum(wanted <= nbytes < wanted + room for nbytes in found) == times, (found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_all_gather_sends_one_byte_per_element_plus_scales(world):
    for strategy in ONE_AXIS:
        run_ranks(world, traffic, strategy)


@on_ranks(2)
def test_gathered_payloads_are_freed_between_forward_and_backward():
    model = model_of(partial(fully_shard, strategy="zero3"))
    units = units_in(model)[1:]
    with recording() as record:
        loss = model(inputs(0)).square().mean()
    assert all(param_group.present_separate_nbytes == 0 for unit in units for param_group in unit.param_groups)
    assert all(
        sum(param_group.separate_nbytes for param_group in unit.param_groups) > 3 * WIDTH * HIDDEN for unit in units
    )
    balance = {unit.name: 0 for unit in units}
    for event in record.events:
        if event.origin.unit in balance and event.name in ("allocate", "free"):
            balance[event.origin.unit] += event.nbytes if event.name == "allocate" else -event.nbytes
    assert set(balance.values()) == {0}
    loss.backward()
    assert all(param_group.present_separate_nbytes == 0 for unit in units for param_group in unit.param_groups)


# -- the protocol -----------------------------------------------------------------------------------------------------


class PairedWeight(Weight):
    """Sends two tensors, and makes one of them that needs both at equal storage offsets."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        values = decode(*encode(self.values))
        return (values, 2 * values), None

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        pair = TwoTensor(*(tensor.detach() for tensor in gathered))
        assert [tensor.storage_offset() for tensor in gathered] == [0, 0]
        assert_same(pair.b, 2 * pair.a)
        return None if out is not None else (gathered[0], gathered)


@pytest.mark.slow
@on_ranks(2)
def test_gathered_tensors_have_storage_offset_zero():
    agree_with_plain(partial(learn, PairedWeight, 1), "zero3", "zero2")


@on_ranks(4)
def test_fsdp_extension_methods_receive_same_arguments_as_in_fsdp2():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layer = fully_shard(LowLinear(WIDTH, HIDDEN), mesh=mesh, strategy="hsdp", mp_policy=policy)
    Weight.calls.clear()
    visited = []
    layer.register_forward_pre_hook(lambda module, _: visited.append(module.weight))
    for number in range(3):
        layer.weight._local_tensor.note = f"step {number}"  # on a short shard, too
        layer(inputs(number).bfloat16())
        layer.reshard()
    rows = -(-HIDDEN // 2)
    before = (rows, WIDTH), 2, (HIDDEN, WIDTH), (WIDTH, 1), layer, policy
    after = [(f"step {number}", torch.bfloat16, number == 0) for number in range(3)]
    assert Weight.calls == [before, after[0], before, after[1], before, after[2]]
    assert all(item is visited[0] and isinstance(item, Operand) and isinstance(item, nn.Parameter) for item in visited)
    assert tuple(visited[0].shape) == (HIDDEN, WIDTH)
    assert isinstance(layer.weight, DTensor) and type(layer.weight._local_tensor) is Weight


class FailingWeight(DecodedWeight):
    """A weight whose decoding into memory that it already has fails once, if `fails` is set."""

    fails = False

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        if FailingWeight.fails and out is not None:
            FailingWeight.fails = False
            raise torch.OutOfMemoryError("no memory")
        return super().fsdp_post_all_gather(gathered, metadata, param_dtype, out=out)


class Multiplied(nn.Module):
    def __init__(self, kind: type[Weight]) -> None:
        super().__init__()
        self.weight = nn.Parameter(kind(torch.full((8, 8), 2.0)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@on_ranks(2)
def test_forward_after_failed_post_all_gather_gathers_again():
    for strategy in ("zero3", "zero1"):
        model = fully_shard(Multiplied(FailingWeight), strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        x = torch.ones(1, 8)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        FailingWeight.fails = True
        with pytest.raises(torch.OutOfMemoryError, match="no memory"):
            model(x)
        torch.testing.assert_close(model(x), torch.full((1, 8), 8 * 1.9))


# -- state ------------------------------------------------------------------------------------------------------------


def keep_state(folder: Path, strategies: Sequence[str]) -> None:
    for strategy in strategies:
        model = model_of(partial(fully_shard, strategy=strategy))
        optimizer = optimizer_of(model)
        for number in range(2):
            step(model, optimizer, number)
        expected = whole_values(model)
        with summon_full_params(model):
            shown = {name: param.detach().clone() for name, param in model.named_parameters()}
        assert_same(shown, expected)
        save(folder / strategy, model=model, optimizer=optimizer, step=2)
        later = [step(model, optimizer, 2), whole_values(model)]

        other = model_of(partial(fully_shard, strategy=strategy))
        other.load_state_dict(expected)
        assert_same(whole_values(other), expected)
        fresh = optimizer_of(other)
        load(folder / strategy, model=other, optimizer=fresh)
        assert_same([step(other, fresh, 2), whole_values(other)], later)


@pytest.mark.slow
def test_wrapped_weights_save_and_load_as_plain_values(tmp_path):
    run_ranks(2, keep_state, tmp_path, ("zero3", "ddp"))
    run_ranks(3, load_elsewhere, tmp_path / "zero3")


def load_elsewhere(folder: Path) -> None:
    model = model_of(fully_shard)
    load(folder, model=model)
    alone = model_of(leave)
    optimizer = optimizer_of(alone)
    for number in range(2):
        step(alone, optimizer, number)
    assert_same(whole_values(model), whole_values(alone))


@on_ranks(2)
def test_wrapped_weights_initialize_from_meta_device():
    with torch.device("meta"):
        model = fully_shard(nn.Sequential(LowLinear(WIDTH, HIDDEN), LowLinear(HIDDEN, 4)))
    model.to_empty(device="cpu")
    plain = nn.Sequential(LowLinear(WIDTH, HIDDEN), LowLinear(HIDDEN, 4))
    model.load_state_dict({name: values_of(item) for name, item in plain.state_dict().items()})
    other = torch.Generator().manual_seed(dist.get_rank())
    assert torch.isfinite(model(torch.randn(3, WIDTH, generator=other))).all()
    assert_same(whole_values(model)["0.weight"], model.state_dict()["0.weight"].full_tensor())


def test_int8_encoding_round_trips_within_rounding():
    values = torch.randn(5, 7)
    assert (decode(*encode(values)) - values).abs().max() < 0.02
