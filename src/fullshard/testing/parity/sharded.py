"""One rank: train sharded, and compare every step with the plain process's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fullshard import FSDPModule, clip_grad_norm_, fully_shard
from fullshard.testing.parity.cases import Case
from fullshard.testing.parity.difference import Compared, Kind, Tolerance
from fullshard.testing.parity.recipe import Recipe, trained
from fullshard.testing.parity.tensor import cut
from fullshard.testing.parity.trace import Step, Trace

__all__ = ["train_sharded"]


def train_sharded(recipe: Recipe, case: Case, trace: Trace, tolerance: Tolerance) -> Compared:
    """Train on this rank under `case`, and compare with `trace`. Every rank compares its own shards."""
    model, mesh = recipe.model(), _mesh(case)
    if case.tp > 1:
        cut(model, recipe, mesh["tp"])
        mesh = mesh["replicate", "shard"] if case.has_two_axes else mesh["shard"]
    fully_shard(
        model,
        mesh=mesh,
        strategy=case.strategy,
        mp_policy=recipe.precision,
        auto_wrap_policy=recipe.policy(model),
    )
    optimizer = recipe.optimizer_of(model)
    compared = Compared(dist.get_rank(), tolerance)
    params = dict(model.named_parameters())
    _compare_parameters(compared, 0, params, trace.read(0))
    for step in range(1, recipe.steps + 1):
        expected = trace.read(step)
        for number, loss in _microbatches(recipe, model, step, dist.get_rank() % case.ranks, case.ranks).items():
            compared.add(Kind.LOSS, str(number), step, loss, expected.losses[number])
        for name, gradient in expected.gradients.items():
            param = params.get(name)
            compared.add(Kind.GRADIENT, name, step, *_of_this_rank(None if param is None else param.grad, gradient))
        norm = clip_grad_norm_(trained(model), recipe.clip or math.inf)
        compared.add(Kind.GRADIENT_NORM, "", step, norm, expected.norm)
        optimizer.step()
        optimizer.zero_grad()
        _compare_parameters(compared, step, params, expected)
    return compared


def _compare_parameters(compared: Compared, step: int, params: Mapping[str, Tensor], expected: Step) -> None:
    for name, values in expected.parameters.items():
        compared.add(Kind.PARAMETER, name, step, *_of_this_rank(params.get(name), values))


def _of_this_rank(actual: Tensor | None, expected: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """This rank's part of a tensor, and the expected one."""
    if not isinstance(actual, DTensor):
        return actual, expected
    local = actual.to_local().detach()
    if expected is None or expected.shape != actual.shape:
        return local, expected
    mesh = actual.device_mesh
    for axis, placement in enumerate(actual.placements):
        if isinstance(placement, Shard):
            parts = expected.chunk(mesh.size(axis), placement.dim)  # as torch cuts: the last ranks may have none
            rank = mesh.get_local_rank(axis)
            expected = parts[rank] if rank < len(parts) else expected.narrow(placement.dim, 0, 0)
    return local, expected


def _mesh(case: Case) -> DeviceMesh:
    axes = {"replicate": case.replicas} if case.has_two_axes else {}
    axes |= {"shard": case.shards}
    axes = {"tp": case.tp, **axes} if case.tp > 1 else axes
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def _microbatches(recipe: Recipe, model: nn.Module, step: int, rank: int, ranks: int) -> dict[int, Tensor]:
    """Compute the gradients of a step; the losses of this rank's microbatches, by number."""
    losses = {}
    for together in recipe.microbatches(step, rank, ranks):
        for number in together:
            cast(FSDPModule, model).set_requires_gradient_sync(number == together[-1])
            losses[number] = recipe.backward(model, number)
    return losses
