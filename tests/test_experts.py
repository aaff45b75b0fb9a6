"""Mixtures of experts: experts on ranks of their own, sharded over what is left, train as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from experts import (
    InOneProcess,
    Model,
    expert_mesh,
    loss_of,
    model_of,
    place,
    tokens_of,
    whole_grads,
    wholes,
)
from shared_ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard import (
    FSDPMeshInfo,
    ShardPlacementResult,
    clip_grad_norm_,
    fully_shard,
)
from fullshard.testing import assert_same

STEPS = range(4)  # units share memory from the third on


def nested(model: Model, mesh: DeviceMesh, dim: int | None = None, **options: Any) -> Model:
    """A unit for the experts of each block, in that of the block."""
    choose = None if dim is None else lambda _: Shard(dim)
    for block in model.blocks:
        fully_shard(block.experts, mesh=mesh["efsdp"], shard_placement_fn=choose, **options)
        fully_shard(block, **options)
    return fully_shard(model, **options)


def joint(model: Model, mesh: DeviceMesh, dim: int | None = None, **options: Any) -> Model:
    """One unit a block, with parameters on two meshes."""
    placement = None if dim is None else Shard(dim)
    result = ShardPlacementResult(placement, FSDPMeshInfo(mesh["efsdp"], shard_mesh_dim=0))
    for block in model.blocks:
        experts = set(block.experts.parameters())
        fully_shard(block, shard_placement_fn=lambda param, its=experts: result if param in its else None, **options)
    return fully_shard(model, **options)


SHARDED = {"nested": nested, "joint": joint}


# -- against one process ----------------------------------------------------------------------------------------------


def train_beside_one_process(kind: str, efsdp: int, ep: int, dim: int | None, strategy: str) -> None:
    mesh, rank = expert_mesh(efsdp, ep), dist.get_rank()
    model = SHARDED[kind](place(model_of(), mesh), mesh, dim, strategy=strategy)
    alone, together = model_of(), model_of()
    reference = InOneProcess(alone, efsdp, ep)
    optimizers = [torch.optim.AdamW(it.parameters(), lr=1e-2) for it in (model, alone, together)]
    for step in STEPS:
        batches = [tokens_of(step, other) for other in range(efsdp * ep)]
        loss_of(model, batches[rank]).backward()
        reference.backward(batches)
        loss_of(together, torch.cat(batches)).backward()
        assert_same(whole_grads(model), whole_grads(alone))
        if step == 0:  # the sums of one process over all tokens are in another order
            torch.testing.assert_close(whole_grads(model), whole_grads(together), rtol=1e-5, atol=1e-8)
        norms = [clip_grad_norm_(it.parameters(), 0.05) for it in (model, alone)]
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
        if step == 0:
            for param, other in zip(model.parameters(), alone.parameters(), strict=True):
                other.grad = param.grad.full_tensor()  # clipped by a norm that may differ in its last bit
        else:
            for param, other in zip(model.parameters(), alone.parameters(), strict=True):
                other.grad = param.grad.full_tensor()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same(wholes(model), wholes(alone))


@pytest.mark.parametrize(
    ("kind", "efsdp", "ep", "dim", "strategy"),
    [
        ("nested", 2, 2, None, "zero3"),
        ("joint", 2, 2, None, "zero3"),
        ("joint", 4, 1, 1, "zero2"),
        ("joint", 1, 4, None, "zero1"),
        ("nested", 2, 2, 1, "ddp"),
    ],
)
def test_a_mixture_of_experts_trains_to_the_bits_of_one_process(kind, efsdp, ep, dim, strategy):
    run_ranks(4, train_beside_one_process, kind, efsdp, ep, dim, strategy)
