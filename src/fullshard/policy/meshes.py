"""Which axes of which mesh parameters are sharded and replicated over, where a mesh alone does not say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fullshard.errors import ConfigError
from fullshard.policy.arguments import check_iterable, check_type

__all__ = ["DataParallelMeshDims", "FSDPMeshInfo", "HSDPMeshInfo", "ShardPlacementResult"]


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The axes of a mesh to shard and to replicate over, by name: several are flattened, in the mesh's order.

    Raises:
        ConfigError: neither is named.
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
                "DataParallelMeshDims() names no axis. Name those to shard over, those to replicate over, or both, as "
                'in DataParallelMeshDims(shard=("dp_shard", "cp"), replicate="dp_replicate").'
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
    """A mesh to shard over, and which of its axes are which.

    Args:
        mesh: of one axis, or of two, the first of which replicates.
        shard_mesh_dim: the number of the shard axis; the last, if None.
        replicate_mesh_dim: the number of the replicate axis; the first of two, if None.
        dp_mesh_dims: the names of these axes in `spmd_mesh`, where parameters are `DTensor`s on all axes of that.
        spmd_mesh: the mesh that they were taken from.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = None


class HSDPMeshInfo(FSDPMeshInfo):
    """An `FSDPMeshInfo` of two axes, under the name that torch has for it."""


@dataclass(frozen=True)
class ShardPlacementResult:
    """How one parameter is to be sharded, from a `shard_placement_fn`.

    Args:
        placement: `Shard(dim)` to shard it along that dim; None to leave the dim open.
        mesh_info: over which ranks: an `FSDPMeshInfo` (or torch's own), or a mesh as `fully_shard` takes it.
    """

    placement: Shard | None
    mesh_info: Any
