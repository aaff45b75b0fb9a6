"""The shard axis and the replicate axis of a mesh, and the process groups along them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Placement as TensorPlacement

from fullshard._compat import (
    address,
    concatenated_mesh,
    flattened_mesh,
    group_made_alone,
    joined_mesh,
    outside_of_modes,
)
from fullshard.comm.routes import collectives_for, collectives_of
from fullshard.device.current import count_devices
from fullshard.errors import CheckpointError, ConfigError, RankMismatchError, StateError
from fullshard.layout.shard_spec import ShardSpec, owned
from fullshard.policy.meshes import DataParallelMeshDims
from fullshard.policy.strategy import Placement, Placements
from fullshard.tape.context import Kept
from fullshard.tape.recorder import Origin, Phase


@dataclass(frozen=True)
class Axes:
    """A mesh whose last axis is the shard axis and whose other axis, if it has two, is the replicate axis."""

    mesh: DeviceMesh
    group_size: int | None = None
    """Number of consecutive ranks in a group, if the shard axis is used in two levels."""
    spmd_mesh: DeviceMesh | None = None
    """The mesh that these axes were taken from by name. Parameters may be `DTensor`s on all axes of it."""
    spmd_names: frozenset[str] = frozenset()
    """The names of these axes in `spmd_mesh`. Several of them may be flattened to one axis here."""

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The process group of the ranks with different shards, including this one."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks with the same shard; None on a 1-D mesh."""
        return self.mesh.get_group(0) if self.mesh.ndim == 2 else None

    @property
    def group_ranks(self) -> tuple[list[int], list[int]]:
        """The ranks of this rank's group on the shard axis, and the ranks with the same position in every group.

        Both are global ranks, in the order of the mesh.
        """
        assert self.group_size is not None, "the shard axis has one level"
        ranks = dist.get_process_group_ranks(self.shard_group)
        group, place = divmod(self.shard_rank, self.group_size)
        return ranks[group * self.group_size :][: self.group_size], ranks[place :: self.group_size]

    @property
    def shard_world(self) -> int:
        """The number of shards."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def shard_rank(self) -> int:
        """The index of this rank's shard."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @property
    def world(self) -> int:
        """The number of ranks on both axes."""
        return self.mesh.size()

    @cached_property
    def ranks(self) -> frozenset[int]:
        """The ranks on both axes, numbered as in the default process group."""
        return frozenset(self.mesh.mesh.flatten().tolist())

    def tensor_placements(self, spec: ShardSpec, *, sharded: bool) -> tuple[TensorPlacement, ...]:
        """Return the `DTensor` placements of a parameter sharded by `spec`; replicated unless `sharded`."""
        on_shard_axis = Shard(spec.dim) if sharded and spec.dim is not None else Replicate()
        return (*(Replicate() for _ in range(self.mesh.ndim - 1)), on_shard_axis)


def local_shard(whole: Tensor, mesh: DeviceMesh, placements: Sequence[TensorPlacement]) -> Tensor:
    """Return this rank's shard of `whole` along all axes of `mesh`, in order, as a view."""
    for dim, span in enumerate(local_spans(whole.shape, mesh, placements)):
        whole = whole.narrow(dim, span.start, len(span))
    return whole


def check_local_shard(name: str, tensor: DTensor, target: DeviceMesh | None) -> None:
    """Raise an error if a `DTensor` holds another rank's shard, as after loading the file of another rank.

    A pickled `DTensor` keeps its mesh, and the mesh keeps the coordinate of the rank that pickled it. Meshes compare
    equal regardless of their coordinate, so torch treats such a shard as this rank's.

    Args:
        name: The name of the tensor, for the message.
        tensor: The tensor, which may have been loaded from a file.
        target: The mesh of the parameter to load it into; None if there is none.

    Raises:
        CheckpointError: `tensor` was pickled by a rank at a different coordinate of an axis that the tensor is sharded
            over, or by a different number of ranks.
    """
    mesh = tensor.device_mesh
    if mesh is target:
        return
    saved, own = mesh.get_coordinate(), _own_coordinate(mesh.mesh.tolist(), dist.get_rank())
    cut = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if target is not None and mesh != target and any(_ranks_along(mesh, axis) != mesh.size(axis) for axis in cut):
        raise CheckpointError(
            f"{name} of shape {tuple(tensor.shape)} is one shard on a mesh of shape {tuple(mesh.shape)}, which does "
            f"not exist in this run of {dist.get_world_size()} ranks. Load with as many ranks as saved it. To load "
            "with any number of ranks, save full tensors (get_model_state_dict with full_state_dict=True), or use "
            "fullshard.checkpoint.save."
        )
    if saved is not None and cut and (own is None or any(saved[axis] != own[axis] for axis in cut)):
        raise CheckpointError(
            f"{name} of shape {tuple(tensor.shape)} holds the part at coordinate {saved} of a mesh of shape "
            f"{tuple(mesh.shape)}, but rank {dist.get_rank()} is {'not in it' if own is None else f'at {own}'}. The "
            "file was saved by another rank: torch.save of a sharded state dict writes only that rank's part. Load on "
            "each rank the file that it saved. To load with any number of ranks, save full tensors "
            "(get_model_state_dict with full_state_dict=True), or use fullshard.checkpoint.save."
        )


def _ranks_along(mesh: DeviceMesh, axis: int) -> int:
    """Return the size of the group of `mesh` along an axis; 0 if it is not a group of this run."""
    try:
        return dist.get_world_size(mesh.get_group(axis))
    except (RuntimeError, LookupError, ValueError):  # of a mesh that was pickled in another run
        return 0


def _own_coordinate(ranks: Any, rank: int) -> tuple[int, ...] | None:
    """Return the indices of `rank` in nested lists; None if it is not there."""
    if not isinstance(ranks, list):
        return () if ranks == rank else None
    for index, inner in enumerate(ranks):
        found = _own_coordinate(inner, rank)
        if found is not None:
            return (index, *found)
    return None


def local_spans(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[TensorPlacement]) -> list[range]:
    """Return this rank's range of indices along each dim of a tensor of `shape`, sharded as by `local_shard`."""
    spans = [range(size) for size in shape]
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            span = spans[placement.dim]
            local = owned(len(span), mesh.size(axis), mesh.get_local_rank(axis))
            spans[placement.dim] = span[local.start : local.stop]
    return spans


@torch.no_grad()
def broadcast_from_first(tensors: Sequence[Tensor], axes: Axes, phase: Phase) -> None:
    """Broadcast the values of `tensors` from the first rank of `axes` to all."""
    for group in (axes.shard_group, axes.replicate_group):
        if group is not None and tensors:
            staged = [tensor.to(axes.mesh.device_type).contiguous() for tensor in tensors]
            collectives_for(group, staged[0].device).broadcast(staged, 0, origin=Origin("", phase))
            for tensor, value in zip(tensors, staged, strict=True):
                if address(value) != address(tensor):
                    tensor.copy_(value)


def resolve_axes(mesh: DeviceMesh | Axes | None, placements: Placements, device_type: str) -> Axes:
    """Return the axes of `mesh`, or of a default mesh over all ranks, to shard and replicate over.

    Raises:
        ConfigError: the mesh has more than two axes, or only one although the strategy replicates.
        StateError: the default process group does not exist yet.
    """
    if isinstance(mesh, Axes):
        axes, mesh = mesh, mesh.mesh
    else:
        mesh = default_mesh(device_type, replicated=placements.replicated) if mesh is None else mesh
        axes = Axes(mesh)
    if mesh.ndim > 2:
        raise ConfigError(
            f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names}: expected one shard axis and at most one replicate "
            "axis. Pass the submesh to shard over, such as mesh['replicate', 'shard'], or name its axes by "
            "dp_mesh_dims."
        )
    if placements.replicated and mesh.ndim != 2:
        raise ConfigError(
            f"strategy 'hsdp' needs a replicate and a shard axis, but mesh has one axis of size {mesh.size()}. Pass "
            'init_device_mesh(device, (replicas, shards), mesh_dim_names=("replicate", "shard")).'
        )
    return axes


_by_name: Kept[tuple[DeviceMesh, tuple[str, ...], tuple[str, ...]], DeviceMesh] = Kept("meshes by name")


def axes_by_name(mesh: DeviceMesh | None, dims: DataParallelMeshDims) -> Axes:
    """Return the axes of `mesh` that `dims` names, flattened to at most two axes. Every rank must call it."""
    requested = f"dp_mesh_dims=DataParallelMeshDims(shard={dims.shard!r}, replicate={dims.replicate!r})"
    has = None if mesh is None else mesh.mesh_dim_names
    if mesh is None or has is None:
        raise ConfigError(
            f"{requested} names axes of a mesh, but {'none was given' if mesh is None else f'{mesh} has no names'}. "
            "Pass mesh=init_device_mesh(device, sizes, mesh_dim_names=...)."
        )
    known = DataParallelMeshDims(dims.shard, dims.replicate)  # torch's own has fewer checks
    named = [*known.shard_names, *known.replicate_names]
    wrong = next((name for name in named if name not in has or named.count(name) > 1), None)
    if wrong is not None:
        raise ConfigError(
            f"{requested} names {wrong!r}{' twice' if wrong in has else ''}, but the axes of the mesh are {has}. List "
            "each axis to shard or replicate over once, and leave out the axes of other parallelisms."
        )
    shard, replicate = (tuple(sorted(names, key=has.index)) for names in (known.shard_names, known.replicate_names))
    made = _by_name.get_or_make((mesh, shard, replicate), lambda: _mesh_of(mesh, shard, replicate))
    return Axes(made, spmd_mesh=mesh, spmd_names=frozenset(named))


def _mesh_of(mesh: DeviceMesh, shard: tuple[str, ...], replicate: tuple[str, ...]) -> DeviceMesh:
    with outside_of_modes():
        parts = [flattened_mesh(mesh, names) for names in (replicate, shard) if names]
        return parts[0] if len(parts) == 1 else concatenated_mesh(parts)


def axes_chosen(info: Any, fqn: str) -> Axes:
    """Return the axes that a `shard_placement_fn` chose for parameter `fqn`, given as an `FSDPMeshInfo` or a mesh."""
    mesh = info if isinstance(info, DeviceMesh) else getattr(info, "mesh", None)
    if isinstance(info, Axes):
        return info
    last = mesh.ndim - 1 if isinstance(mesh, DeviceMesh) else 0
    shard, replicate = getattr(info, "shard_mesh_dim", None), getattr(info, "replicate_mesh_dim", None)
    is_usual = shard in (None, last, -1) and replicate in (None, 0) and (replicate is None or last == 1)
    if not isinstance(mesh, DeviceMesh) or last > 1 or not is_usual:
        raise ConfigError(
            f"shard_placement_fn chose the mesh {info!r} for {fqn}. Return ShardPlacementResult(placement, "
            "FSDPMeshInfo(mesh, shard_mesh_dim=0)) with a mesh of one axis to shard over. On a mesh of two axes, the "
            "first replicates: HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)."
        )
    dims, whole = getattr(info, "dp_mesh_dims", None), getattr(info, "spmd_mesh", None)
    if dims is None or whole is None:
        return Axes(mesh)
    return Axes(mesh, spmd_mesh=whole, spmd_names=frozenset((*dims.shard_names, *dims.replicate_names)))


_of_replicas: Kept[DeviceMesh, DeviceMesh] = Kept("meshes with a replicate axis only")


def axes_of_replicas(axes: Axes) -> Axes:
    """Return axes over the same ranks with a shard axis of size 1, so that parameters are replicated on all ranks."""

    def make() -> DeviceMesh:
        ranks = axes.mesh.mesh.flatten()
        everyone = axes.shard_group if axes.mesh.ndim == 1 else subgroup(sorted(axes.ranks))
        groups = [everyone, subgroup([dist.get_rank()])]
        with outside_of_modes():
            return DeviceMesh.from_group(
                groups, axes.mesh.device_type, ranks.view(-1, 1), mesh_dim_names=("replicate", "shard")
            )

    return Axes(_of_replicas.get_or_make(axes.mesh, make))


def resolve_groups(axes: Axes, placements: Placements) -> tuple[Axes, Placements]:
    """Return the axes, with a group size if a state is grouped, and the resulting placements.

    With groups of one rank, grouped states are replicated. With one group of all ranks, they are sharded.

    Raises:
        ConfigError: The shard axis does not divide into such groups, or gradients would be summed in three levels.
        RankMismatchError: Groups are hosts, and hosts have different numbers of ranks.
    """
    if not placements.is_grouped:
        return axes, placements
    if placements.gradients is Placement.GROUPED and axes.replicate_group is not None:
        raise ConfigError(
            f"gradients are grouped, but the mesh also has a replicate axis of size {axes.mesh.size(0)}. Gradients "
            "can be summed in at most two levels. Pass a mesh with one axis."
        )
    world = axes.shard_world
    size = placements.group or _ranks_per_host(
        axes.shard_group, "states are grouped by hosts", "Set the number of ranks: Placements(group=...)"
    )
    if size < 1 or world % size:
        raise ConfigError(
            f"groups of {size} ranks do not divide the shard axis of {world} ranks. Choose one of "
            f"{', '.join(str(n) for n in range(1, world + 1) if world % n == 0)}."
        )
    if size in (1, world):
        return axes, placements.without_groups(Placement.WHOLE if size == 1 else Placement.SHARDED)
    return replace(axes, group_size=size), placements


_subgroups: Kept[tuple[int, ...], dist.ProcessGroup] = Kept("subgroups")


def subgroup(ranks: list[int]) -> dist.ProcessGroup:
    """Return the process group of `ranks`, which include this rank. The first call on these ranks creates it."""
    return _subgroups.get_or_make(tuple(ranks), lambda: group_made_alone(ranks))


_joined: Kept[tuple[DeviceMesh, DeviceMesh], DeviceMesh | None] = Kept("joined meshes")


def join(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh | None:
    """Return the cached mesh of the axes of `outer` followed by those of `inner`; None if they cannot be joined."""
    return _joined.get_or_make((outer, inner), lambda: joined_mesh(outer, inner))


_defaults: Kept[tuple[str, tuple[int, ...]], DeviceMesh] = Kept("default meshes")


def default_mesh(device_type: str, *, replicated: bool) -> DeviceMesh:
    """Return a 1-D mesh of all ranks. If `replicated`, return a 2-D mesh that replicates across hosts."""
    if not dist.is_initialized():
        raise StateError(
            "no process group is initialized. Call torch.distributed.init_process_group() first, under torchrun. A "
            "single process also works."
        )
    world = dist.get_world_size()
    shape: tuple[int, ...] = (world,)
    if replicated:
        requested = "strategy 'hsdp' without a mesh shards within a host"
        remedy = "Pass mesh=init_device_mesh(device, (replicas, shards))"
        ranks = _ranks_per_host(dist.distributed_c10d._get_default_group(), requested, remedy)
        if world % ranks:
            raise ConfigError(f"{requested}, but {world} ranks do not divide into hosts of {ranks}. {remedy}.")
        shape = (world // ranks, ranks)
    names = ("replicate", "shard") if replicated else None  # no name, so that it equals torch's own 1-D mesh

    def make() -> DeviceMesh:
        with outside_of_modes():
            return init_device_mesh(device_type, shape, mesh_dim_names=names)

    return _defaults.get_or_make((device_type, shape), make)


_agreed: Kept[tuple[dist.ProcessGroup, int], bool] = Kept("comparisons of ranks per host")


def _ranks_per_host(group: dist.ProcessGroup, requested: str, remedy: str) -> int:
    """Return the number of ranks of `group` per host, see `ranks_of_this_host`.

    Raises:
        RankMismatchError: Hosts have different numbers. The message contains `requested` and `remedy`.
    """
    ranks = ranks_of_this_host(group)
    if dist.get_backend(group) != "fake":
        # A rank knows its own host only, but all ranks must raise the same error. So they exchange the numbers once.
        _agreed.get_or_make((group, ranks), lambda: _compare(group, ranks, requested, remedy))
    return ranks


def ranks_of_this_host(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks on this host.

    This is LOCAL_WORLD_SIZE (set by torchrun), or else the number of GPUs, or else the size of `group` (by default the
    default process group).
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or count_devices() or dist.get_world_size(group)


def _compare(group: dist.ProcessGroup, ranks: int, requested: str, remedy: str) -> bool:
    counts = collectives_of(group).gather_objects(ranks, origin=Origin("", Phase.IDLE))
    odd = next((rank for rank, other in enumerate(counts) if other != counts[0]), None)
    if odd is not None:
        first, second = dist.get_global_rank(group, 0), dist.get_global_rank(group, odd)
        raise RankMismatchError(
            f"{requested}, but hosts have different numbers of ranks: the host of rank {first} has {counts[0]}, the "
            f"host of rank {second} has {counts[odd]}. {remedy}, or start the same number of ranks on every host."
        )
    return True
