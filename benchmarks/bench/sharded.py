"""This library, under each of its strategies."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.bench.model import Model
from benchmarks.bench.trainer import Build, Trainer
from benchmarks.bench.workload import Workload
from fullshard import MixedPrecisionPolicy, Placements, fully_shard
from fullshard.policy.strategy import resolve_placements

__all__ = ["REPLICAS", "fully_sharded"]

REPLICAS = 2  # of a hybrid strategy


def fully_sharded(
    strategy: str | Placements,
    *,
    blocks_per_unit: int = 1,
    gather_wire: str | None = None,
    reduce_wire: str | None = None,
) -> Build:
    """`fully_shard` with `strategy`, `blocks_per_unit` blocks as a unit, and optional encodings."""

    def build(workload: Workload, model: Model) -> Trainer:
        mesh = _mesh(workload.device_type, replicated=resolve_placements(strategy).replicated)
        policy = MixedPrecisionPolicy(
            param_dtype=workload.compute_dtype if workload.casts else None,
            reduce_dtype=model.head.weight.dtype,
            gather_wire=gather_wire,
            reduce_wire=reduce_wire,
        )
        blocks = list(model.blocks)
        for start in range(0, len(blocks), blocks_per_unit):
            unit = blocks[start : start + blocks_per_unit]
            fully_shard(unit, mesh=mesh, strategy=strategy, mp_policy=policy)
        fully_shard(model, mesh=mesh, strategy=strategy, mp_policy=policy)
        return Trainer(workload, model, workload.make_optimizer(model.parameters()))

    return build


def _mesh(device_type: str, *, replicated: bool) -> DeviceMesh:
    world = dist.get_world_size()
    if replicated:
        return init_device_mesh(device_type, (REPLICAS, world // REPLICAS), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
