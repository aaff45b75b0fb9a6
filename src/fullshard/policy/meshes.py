"""The mesh axes to shard and to replicate parameters over, for meshes whose shape does not determine them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.errors import ConfigError
from fullshard.policy.arguments import check_iterable, check_type


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The names of the mesh axes to shard and to replicate over. Several axes are flattened, in mesh order.

    Args:
        shard: The name or names of the axes to shard over; None to only replicate.
        replicate: The name or names of the axes to replicate over; None to only shard.

    Raises:
        ConfigError: Neither is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for field, value in (("shard", self.shard), ("replicate", self.replicate)):
            if value is not None and not isinstance(value, str):
                check_iterable(field, value, "the name of an axis, or a tuple of names")
                for name in value:
                    check_type(field, name, str, "the name of an axis, or a tuple of names")
        if not (self.shard_names or self.replicate_names):
            raise ConfigError(
                "DataParallelMeshDims() has no axes. Pass axes to shard over, axes to replicate over, or both, as in "
                'DataParallelMeshDims(shard=("dp_shard", "cp"), replicate="dp_replicate").'
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The names of the axes to shard over."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The names of the axes to replicate over."""
        return _names(self.replicate)


def _names(of: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if of is None else (of,) if isinstance(of, str) else tuple(of)


@dataclass(frozen=True)
class FSDPMeshInfo:
    """A mesh to shard over and the roles of its axes.

    Args:
        mesh: A mesh of one axis, or of two axes, where the first replicates.
        shard_mesh_dim: The index of the shard axis. If None, the last axis.
        replicate_mesh_dim: The index of the replicate axis. If None, the first of two axes.
        dp_mesh_dims: The names of these axes in `spmd_mesh`, if parameters are `DTensor`s on all axes of `spmd_mesh`.
        spmd_mesh: The mesh that contains these axes.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = None


class HSDPMeshInfo(FSDPMeshInfo):
    """An `FSDPMeshInfo` with two axes, under torch's name.

    Args:
        mesh: A mesh of two axes. The first one replicates.
        shard_mesh_dim: The index of the shard axis. If None, the last axis.
        replicate_mesh_dim: The index of the replicate axis. If None, the first axis.
        dp_mesh_dims: The names of these axes in `spmd_mesh`.
        spmd_mesh: The mesh that contains these axes.
    """


@dataclass(frozen=True)
class ShardPlacementResult:
    """The sharding of one parameter, as returned by a `shard_placement_fn`.

    Args:
        placement: `Shard(dim)` to shard along `dim`; None to let fullshard choose the dim.
        mesh_info: The ranks to shard over: an `FSDPMeshInfo` (or torch's own), or a mesh as in `fully_shard`.
    """

    placement: Shard | None
    mesh_info: Any
