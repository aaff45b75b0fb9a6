"""Gradients where an accelerator is pretended: cast by few kernels, with no copy beyond, in no memory beyond."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from shared_ranks import on_ranks
from small_models import Chain, Layer, chain, inputs, sgd, wholes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import MixedPrecisionPolicy, dry, fully_shard
from fullshard.dry import Tape
from fullshard.engine.registry import units_in
from fullshard.tape.recorder import Phase
from fullshard.tape.tape import Allocation, Collective, Free, Operation
from fullshard.testing import assert_same

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def trained(mesh: Any, **options: Any) -> dict[str, Tensor]:
    model = chain(partial(fully_shard, mesh=mesh, mp_policy=POLICY, **options))
    optimizer = sgd(model)
    for step in range(3):
        with model.no_sync():
            model(inputs(step)).float().square().mean().backward()
        for microbatch in range(2):  # the second adds to what the first has left
            model(inputs(10 * step + microbatch)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return wholes(model)


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "ddp"])
@on_ranks(2)
def test_numbers_are_those_of_a_cpu(strategy):
    mesh = init_device_mesh("cpu", (2,))
    expected = trained(mesh, strategy=strategy)
    with dry.taped(values=True):
        found = trained(mesh, strategy=strategy)
    assert_same(found, expected)


def steps_of(make_layer: Callable[[], nn.Module]) -> Tape:
    """Return the tape of two steps of three such layers, each a unit."""
    with dry.world(8):
        mesh = init_device_mesh("cpu", (8,))
        with dry.taped() as tape:
            layers = [make_layer() for _ in range(3)]
            model = chain(partial(fully_shard, mesh=mesh, mp_policy=POLICY), Chain(layers))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(inputs()).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert all(group.gradients.flat is None for unit in units_in(model) for group in unit.param_groups)
    return tape


def test_no_memory_of_gradients_outlives_those_of_the_optimizer():
    tape = steps_of(Layer)
    reduced = [allocation for allocation in tape.of(Allocation) if allocation.origin.phase is Phase.POST_BACKWARD]
    gradients = {item.storage for item in reduced if item.purpose in ("messages", "gradient shards")}
    taken = [allocation.nbytes for allocation in tape.of(Allocation) if allocation.storage in gradients]
    given_back = [free.nbytes for free in tape.of(Free) if free.storage in gradients]
    assert sum(taken) - sum(given_back) < 1000 < max(taken)  # zeros for the gaps of packs
    assert not dry.races(tape)


def casts(tape: Tape) -> list[Operation]:
    """Return the copies of unit `layers.1` after backward."""
    where = "layers.1", "post-backward"
    return [
        operation
        for operation in tape.of(Operation)
        if operation.copies and (operation.origin.unit, operation.origin.phase.value) == where
    ]


def test_the_pack_casts_what_it_takes():
    tape = steps_of(Layer)
    assert {cast.name for cast in casts(tape)} == {"aten._chunk_cat"}


class Wide(nn.Module):
    """Five matrices that travel in place; the rows of the last, 1023, divide by no 8."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.zeros(1024, 1024) for _ in range(4))
        self.odd = nn.Parameter(torch.zeros(1023, 1024))

    def forward(self, x: Tensor) -> Tensor:
        for each in (*self.rows, self.odd):
            x = x + (x.repeat(1, 22)[:, :1024] @ each.t())[:, :48]
        return x


def test_what_travels_in_place_is_cast_at_once_and_copied_no_more():
    tape = steps_of(Wide)
    copies = [
        operation
        for operation in tape.of(Operation)
        if operation.copies and operation.origin.unit == "layers.1" and operation.stream == "reduce"
    ]
    assert copies == [] or {copy.name for copy in copies} == {"aten.copy_"}  # of the last part of the sum
    assert not any("pad" in operation.name for operation in tape.of(Operation))
    sent = [
        collective
        for collective in tape.of(Collective)
        if "scatter" in collective.name and collective.origin.unit == "layers.1"
    ]
    assert sent
    assert all(item.sizes.count(4 << 20) == 5 for item in sent)  # with a row of padding
