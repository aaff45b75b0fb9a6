"""Which mesh axis shards and which replicates, and the process groups along them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement as TensorPlacement
from torch.distributed.tensor import Replicate, Shard

from fullshard.errors import ConfigError, StateError
from fullshard.layout import Cut
from fullshard.strategy import Placements

__all__ = ["Axes", "default_mesh", "resolve_axes"]


@dataclass(frozen=True)
class Axes:
    """A mesh whose last axis is the shard axis and whose other axis, if it has two, is the replicate axis."""

    mesh: DeviceMesh

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that hold different parts, this one among them."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same parts as this one; None on a 1-D mesh."""
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None

    @property
    def shard_world(self) -> int:
        """Into how many parts a state that is sharded is cut."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def shard_rank(self) -> int:
        """Which part is this rank's."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @property
    def world(self) -> int:
        """Over how many ranks a gradient is averaged."""
        return self.mesh.size()

    def tensor_placements(self, cut: Cut, *, sharded: bool) -> tuple[TensorPlacement, ...]:
        """The `DTensor` placements, axis by axis, of a parameter that is cut so, or whole if not `sharded`."""
        on_shard_axis = Shard(cut.dim) if sharded and cut.dim is not None else Replicate()
        return (*(Replicate() for _ in range(self.mesh.ndim - 1)), on_shard_axis)


def resolve_axes(mesh: DeviceMesh | None, placements: Placements, device_type: str) -> Axes:
    """The axes to shard and replicate over: those of `mesh`, or of a default one over all ranks.

    Raises:
        ConfigError: the mesh has more than two axes, or only one where the strategy replicates.
        StateError: there is no process group yet.
    """
    if mesh is None:
        mesh = default_mesh(device_type, replicated=placements.replicated)
    if mesh.ndim > 2:
        raise ConfigError(
            f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names}: one shard axis and at most one replicate axis are "
            "needed. Pass the part of it to shard over, such as mesh['replicate', 'shard']."
        )
    if placements.replicated and mesh.ndim != 2:
        raise ConfigError(
            f"strategy 'hsdp' needs a replicate and a shard axis, but mesh has one axis of size {mesh.size()}. Pass "
            'init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard")).'
        )
    return Axes(mesh)


_defaults: dict[tuple[dist.ProcessGroup, str, tuple[int, ...]], DeviceMesh] = {}


def default_mesh(device_type: str, *, replicated: bool) -> DeviceMesh:
    """All ranks on one shard axis; if `replicated`, the ranks of a host on the shard axis and hosts as replicas.

    Raises:
        StateError: there is no process group yet.
        ConfigError: hosts have different numbers of ranks.
    """
    if not dist.is_initialized():
        raise StateError(
            "there is no process group to shard over. Call torch.distributed.init_process_group() first, under "
            "torchrun; one process alone is a valid world too."
        )
    world = dist.get_world_size()
    shape = (world // _ranks_per_host(world), _ranks_per_host(world)) if replicated else (world,)
    names = ("replicate", "shard")[-len(shape) :]
    key = (dist.distributed_c10d._get_default_group(), device_type, shape)
    if key not in _defaults:
        _defaults[key] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return _defaults[key]


def _ranks_per_host(world: int) -> int:
    """How many ranks share this host: what torchrun says, or the number of GPUs, or all of them."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or gpus or world
    if world % ranks:
        raise ConfigError(
            f"strategy 'hsdp' without a mesh shards within a host, but {world} ranks do not divide into hosts of "
            f"{ranks}. Pass mesh=init_device_mesh(device, (replicas, shards))."
        )
    return ranks
