"""Gradients on a simulated accelerator: few cast kernels, no additional copies, no additional memory."""

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
        for microbatch in range(2):  # the second accumulates into the gradients of the first
            model(inputs(10 * step + microbatch)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return wholes(model)


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "ddp"])
@on_ranks(2)
def test_simulated_accelerator_matches_cpu_bitwise(strategy):
    mesh = init_device_mesh("cpu", (2,))
    expected = trained(mesh, strategy=strategy)
    with dry.taped(values=True):
        found = trained(mesh, strategy=strategy)
    assert_same(found, expected)


def steps_of(make_layer: Callable[[], nn.Module]) -> Tape:
    """Return the trace of two steps of a model with three layers from `make_layer`, each a unit."""
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


def test_gradient_buffers_are_freed_with_optimizer_gradients():
    tape = steps_of(Layer)
    reduced = [allocation for allocation in tape.of(Allocation) if allocation.origin.phase is Phase.POST_BACKWARD]
    gradients = {item.storage for item in reduced if item.purpose in ("messages", "gradient shards")}
    taken = [allocation.nbytes for allocation in tape.of(Allocation) if allocation.storage in gradients]
    given_back = [free.nbytes for free in tape.of(Free) if free.storage in gradients]
    assert sum(taken) - sum(given_back) < 1000 < max(taken)  # the rest are zeros for the gaps of packs
    assert not dry.races(tape)


def casts(tape: Tape) -> list[Operation]:
    """Return the copies of unit `layers.1` after backward."""
    where = "layers.1", "post-backward"
    return [
        operation
        for operation in tape.of(Operation)
        if operation.copies and (operation.origin.unit, operation.origin.phase.value) == where
    ]


def test_packing_casts_gradients_in_same_kernel():
    tape = steps_of(Layer)
    assert {cast.name for cast in casts(tape)} == {"aten._chunk_cat"}


class Wide(nn.Module):
    """Five matrices that are reduced in place. The last one has 1023 rows, which 8 ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.zeros(1024, 1024) for _ in range(4))
        self.odd = nn.Parameter(torch.zeros(1023, 1024))

    def forward(self, x: Tensor) -> Tensor:
        for each in (*self.rows, self.odd):
            x = x + (x.repeat(1, 22)[:, :1024] @ each.t())[:, :48]
        return x


def test_gradients_reduced_in_place_are_not_copied_after_cast():
    tape = steps_of(Wide)
    copies = [
        operation
        for operation in tape.of(Operation)
        if operation.copies and operation.origin.unit == "layers.1" and operation.stream == "reduce"
    ]
    assert copies == [] or {copy.name for copy in copies} == {"aten.copy_"}  # copies of the last part of the sum
    assert not any("pad" in operation.name for operation in tape.of(Operation))
    sent = [
        collective
        for collective in tape.of(Collective)
        if "scatter" in collective.name and collective.origin.unit == "layers.1"
    ]
    assert sent
    assert all(item.sizes.count(4 << 20) == 5 for item in sent)  # the last one includes a row of padding
